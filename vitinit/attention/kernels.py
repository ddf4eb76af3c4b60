"""How attention is computed: the one place that picks an implementation.

Alphabet: B images, H heads, G groups, Nq queries, Nk keys, D token width, d head width of queries and keys.

Two cases. While content is off, a head's map is the same for every image, so one (H, Nq, Nk) map serves the
batch and attention is two matrix products. With content on, each image has its own maps, and one more key, the
sink, stands for the zero-padded plane outside the image.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitinit.positions import ConvGeometry


def attend_content(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sink: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Attention outputs (B, H, Nq, D) of softmax(query key^T / sqrt(d) + bias) value over image and sink.

    Args:
        query: (B, H, Nq, d).
        key: (B, H, Nk, d).
        value: (B, H or 1, Nk, D).
        bias: (H, Nq, Nk) relative position logits.
        sink: (H, Nq) logit of the sink, whose value is zero.
        backend: "matmul", "sdpa" or "auto", which asks `choose_backend`.
    """
    if backend == "auto":
        backend = choose_backend(query, bias)
    if backend == "matmul":
        return content_maps(query, key, bias, sink).to(value.dtype) @ value
    heads, n_queries = query.shape[1], query.shape[2]
    # Keys are padded to a multiple of 8 because the memory-efficient CUDA kernel wants an aligned mask; the first
    # padded key is the sink, and the others must not be seen.
    padding = 8 - key.shape[2] % 8
    blocked = sink.new_full((heads, n_queries, padding - 1), torch.finfo(bias.dtype).min / 4)
    mask = torch.cat([bias, sink.unsqueeze(-1), blocked], dim=-1).to(query.dtype)  # H Nq Nk+padding
    key, value = F.pad(key, (0, 0, 0, padding)), F.pad(value, (0, 0, 0, padding))
    return F.scaled_dot_product_attention(
        query, key, value.expand(-1, heads, -1, -1), mask.expand(len(query), -1, -1, -1)
    )


def content_maps(query: Tensor, key: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
    """Attention maps (B, H, Nq, Nk) on the image's keys; the rest of each row's mass is in the sink."""
    logits = (query * query.shape[-1] ** -0.5) @ key.mT + bias
    sinks = sink.to(logits.dtype)[None, :, :, None].expand(len(logits), -1, -1, -1)
    return torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def choose_backend(query: Tensor, bias: Tensor) -> str:
    """"matmul" or "sdpa", by device and by whether the bias needs a gradient.

    On CPU the fused kernel leaves its fast path when the mask needs a gradient, and even without one it is
    slower in bfloat16 at the few hundred tokens of these networks. On CUDA only the memory-efficient kernel
    gives the mask a gradient; cuDNN's does not, and is wrong for some masks, so train.py switches cuDNN's off.
    """
    if query.device.type == "cuda":
        return "sdpa"
    trains = torch.is_grad_enabled() and bias.requires_grad
    low_precision = query.dtype in (torch.bfloat16, torch.float16)
    return "matmul" if trains or low_precision or query.shape[2] < 256 else "sdpa"


def attend_positions(maps: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    """Outputs (B, Nq, D_out) = sum_h maps[h] tokens weight[h] of heads that attend by position alone.

    Two orders, equal up to rounding; the one with fewer multiplications runs. Mixing channels first lets one
    matrix product sum over heads and keys together, and needs no copy of anything H times as large as a token.

    Args:
        maps: (H, Nq, Nk), the same for every image.
        tokens: (B, Nk, D_in).
        weight: (H, G, D_in/G, D_out/G).
    """
    heads, n_queries, n_keys = maps.shape
    d_in, d_out = weight.shape[1] * weight.shape[2], weight.shape[1] * weight.shape[3]
    mix_first, maps_first = count_orders(n_queries, n_keys, d_in, d_out, weight.shape[1])
    batch = len(tokens)
    by_key = tokens.transpose(0, 1)  # Nk B D
    if mix_first <= maps_first:
        mixed = by_key.reshape(1, n_keys * batch, d_in) @ weight[:, 0]  # H Nk*B Dout
        summed = maps.transpose(0, 1).reshape(n_queries, -1) @ mixed.view(heads * n_keys, batch * d_out)
        return summed.view(n_queries, batch, d_out).transpose(0, 1)
    seen = maps.reshape(heads * n_queries, n_keys) @ by_key.reshape(n_keys, batch * d_in)
    seen = seen.view(heads, n_queries, batch, d_in).permute(2, 1, 0, 3)  # B Nq H D
    return mix_heads(seen, weight)


def count_orders(n_queries: int, n_keys: int, d_in: int, d_out: int, groups: int) -> tuple[float, int]:
    """Multiply-adds for each image and head of (channels first, maps first) in `attend_positions`."""
    maps_first = n_queries * n_keys * d_in + n_queries * d_in * d_out // groups
    mix_first = n_keys * d_in * d_out + n_queries * n_keys * d_out
    return (mix_first if groups == 1 else float("inf")), maps_first


def count_macs(
    geometry: ConvGeometry,
    *,
    in_channels: int,
    out_channels: int,
    groups: int,
    content_dim: int = 0,
    ranks: list[int] | None = None,
) -> int:
    """Multiply-adds of one image through an attention layer: content scores, attention and head weights.

    Args:
        geometry: The convolution on patches.
        in_channels: C_in.
        out_channels: C_out.
        groups: G.
        content_dim: Width of a head's queries and keys, 0 where content is off.
        ranks: (H,) ranks of factorized values, None for identity values.
    """
    n_queries, n_keys, heads = geometry.n_queries, geometry.n_keys, geometry.heads
    d_in, d_out = in_channels * math.prod(geometry.in_patch), out_channels * math.prod(geometry.patch)
    content = heads * content_dim * (d_in * (n_queries + n_keys) + n_queries * n_keys)
    if ranks is not None:
        return content + sum(ranks) * (n_keys * d_in + groups * n_queries * n_keys + n_queries * d_out)
    mix_first, maps_first = count_orders(n_queries, n_keys, d_in, d_out, groups)
    return content + heads * (maps_first if content_dim else int(min(mix_first, maps_first)))


def mix_heads(seen: Tensor, weight: Tensor) -> Tensor:
    """Outputs (B, Nq, D_out) of what each head has gathered, (B, Nq, H, D_in), by weights (H, G, D_in/G, D_out/G)."""
    batch, n_queries, heads, _ = seen.shape
    groups, width_in, width_out = weight.shape[1:]
    if width_in == width_out == 1:  # depthwise on pixels: one factor for each head and channel
        return torch.einsum("bqhc,hc->bqc", seen, weight[:, :, 0, 0])
    if groups == 1:
        return seen.reshape(batch, n_queries, -1) @ weight.reshape(heads * width_in, width_out)
    rows = seen.unflatten(3, (groups, width_in)).permute(3, 0, 1, 2, 4).reshape(groups, -1, heads * width_in)
    mixed = rows @ weight.transpose(0, 1).reshape(groups, heads * width_in, width_out)  # G B*Nq Dout/G
    return mixed.transpose(0, 1).reshape(batch, n_queries, groups * width_out)
