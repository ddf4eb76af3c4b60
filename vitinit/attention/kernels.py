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
        backend = choose_backend(query)
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


def choose_backend(query: Tensor) -> str:
    """ "matmul" or "sdpa", by device, dtype and number of queries.

    On CPU the fused kernel leaves its fast path when the mask needs a gradient. Measured on 2 cores (10 heads, a bias
    that trains or not): in bfloat16 it is 1.2 to 3 times slower from 64 to 784 tokens, in float32 slower up to 256
    and 1.3 times faster at 784. On CUDA the mask gets its gradient from the memory-efficient kernel; cuDNN's gives
    none and is wrong for some masks, so `train.set_backends` switches that one off.

    Args:
        query: (B, H, Nq, d).
    """
    if query.device.type == "cuda":
        return "sdpa"
    low_precision = query.dtype in (torch.bfloat16, torch.float16)
    return "matmul" if low_precision or query.shape[2] < 512 else "sdpa"


def attend_positions(maps: Tensor, tokens: Tensor) -> Tensor:
    """What each head gathers, (B, Nq, H, D), by maps (H, Nq, Nk) that are the same for every image.

    Two layouts, equal up to rounding: a product for each image, whose backward holds B*H*Nq*Nk numbers, or one
    product for the whole batch, which copies B*H*Nq*D numbers in each direction. The smaller one runs.

    Args:
        maps: (H, Nq, Nk).
        tokens: (B, Nk, D).
    """
    heads, n_queries, n_keys = maps.shape
    batch, _, width = tokens.shape
    maps = maps.transpose(0, 1).reshape(n_queries * heads, n_keys)
    if n_keys <= width:
        seen = torch.bmm(maps.expand(batch, -1, -1), tokens)  # B Nq*H D
        return seen.view(batch, n_queries, heads, width)
    seen = maps @ tokens.transpose(0, 1).reshape(n_keys, batch * width)  # Nq*H B*D
    return seen.view(n_queries, heads, batch, width).permute(2, 0, 1, 3)


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
    return content + heads * (n_queries * n_keys * d_in + n_queries * d_in * d_out // groups)


def mix_heads(seen: Tensor, weight: Tensor) -> Tensor:
    """Outputs (B, Nq, D_out) = sum_h seen[h] weight[h].

    Args:
        seen: (B, Nq, H, D_in), what each head has gathered.
        weight: (H, G, D_in/G, D_out/G).
    """
    batch, n_queries, heads, _ = seen.shape
    groups, width_in, width_out = weight.shape[1:]
    if width_in == width_out == 1:  # depthwise on pixels: one factor for each head and channel
        return torch.einsum("bqhc,hc->bqc", seen, weight[:, :, 0, 0])
    if groups == 1:
        return seen.reshape(batch, n_queries, -1) @ weight.reshape(heads * width_in, width_out)
    rows = seen.unflatten(3, (groups, width_in)).permute(3, 0, 1, 2, 4).reshape(groups, -1, heads * width_in)
    mixed = rows @ weight.transpose(0, 1).reshape(groups, heads * width_in, width_out)  # G B*Nq Dout/G
    return mixed.transpose(0, 1).reshape(batch, n_queries, groups * width_out)
