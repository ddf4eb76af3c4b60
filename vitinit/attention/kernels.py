"""How attention is computed: the one place that picks an implementation.

Alphabet: B images, H heads, G groups, Nq queries, Nk keys, D token width, d head width of queries and keys.

Global span, two cases. While content is off, a head's map is the same for every image, so one (H, Nq, Nk) map serves
the batch and attention is two matrix products. With content on, each image has its own maps, and one more key, the
sink, stands for the zero-padded plane outside the image.

Local span, the same two cases without any map over all tokens: with content off, heads that share a window add up to
one convolution of the token grid; with content on, each query gathers its window of T keys.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def attend_depthwise_positions(maps: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Outputs (B, Nq, C) = sum_h A_h X * w_h of depthwise heads on pixels, by maps that are the same for every image.

    Two ways, equal up to rounding: gather for each head, B*Nq*H*C numbers, and mix; or add the heads up to one map for
    each channel, C*Nq*Nk numbers, once for the batch. The smaller one runs.

    Args:
        maps: (H, Nq, Nk).
        weight: (H, C).
        tokens: (B, Nk, C).
    """
    heads, n_queries, n_keys = maps.shape
    if n_keys > len(tokens) * heads:
        return torch.einsum("bqhc,hc->bqc", attend_positions(maps, tokens), weight)
    channel_maps = (weight.mT @ maps.flatten(1)).view(-1, n_queries, n_keys)  # C Nq Nk
    return torch.bmm(tokens.permute(2, 0, 1), channel_maps.mT).permute(1, 2, 0)  # C B Nq -> B Nq C


def attend_window_positions(mass: Tensor, weight: Tensor, tokens: Tensor, geometry: ConvGeometry) -> Tensor:
    """Outputs (B, Nq, D_out) = sum_h A_h X W_h of heads that attend by position alone within one window.

    A_h = sum_t mass[h, t] S_t, so the sum is the convolution of the token grid with sum_h mass[h, t] W_h: one kernel
    for all images, formed anew in each step. Depthwise heads cost what a depthwise convolution costs.

    Args:
        mass: (H, T) attention of each head on each offset of the window.
        weight: (H, G, D_in/G, D_out/G).
        tokens: (B, Nk, D_in).
        geometry: A geometry of local span.
    """
    y, x = geometry.y, geometry.x
    kernel = torch.einsum("ht,hgio->goit", mass, weight).flatten(0, 1)
    kernel = kernel.unflatten(-1, (y.table_size, x.table_size))  # Dout Din/G Th Tw
    out = F.conv2d(
        _pad_grid(tokens, geometry), kernel, stride=(y.token_stride, x.token_stride),
        dilation=(y.table_offsets.step, x.table_offsets.step), groups=weight.shape[1],
    )  # fmt: skip
    return out.flatten(2).mT


def attend_window_content(query: Tensor, key: Tensor, value: Tensor, table: Tensor, geometry: ConvGeometry) -> Tensor:
    """What each head gathers, (B, Nq, H, D), by softmax(query key^T / sqrt(d) + table) on the window of each query.

    Keys and values outside the image are zero.

    Args:
        query: (B, H, Nq, d).
        key: (B, H, Nk, d).
        value: (B, Nk, D).
        table: (H, T).
        geometry: A geometry of local span.
    """
    heads, width = key.shape[1], key.shape[3]
    keys = gather_windows(key.transpose(1, 2).flatten(2), geometry).unflatten(-1, (heads, width))  # B Nq T H d
    logits = torch.einsum("bhqd,bqthd->bqht", query * width**-0.5, keys)
    return (logits + table).softmax(dim=-1).to(value.dtype) @ gather_windows(value, geometry)


def gather_windows(tokens: Tensor, geometry: ConvGeometry) -> Tensor:
    """The window of every query, (B, Nq, T, D), zero outside the image, of tokens (B, Nk, D)."""
    (y, x), padded = (geometry.y, geometry.x), _pad_grid(tokens, geometry)
    windows = [
        padded[:, :, row : row + y.token_stride * (y.queries - 1) + 1 : y.token_stride,
               column : column + x.token_stride * (x.queries - 1) + 1 : x.token_stride]
        for row in range(0, y.table_offsets.step * y.table_size, y.table_offsets.step)
        for column in range(0, x.table_offsets.step * x.table_size, x.table_offsets.step)
    ]  # fmt: skip
    return torch.stack([window.flatten(2) for window in windows], dim=2).permute(0, 3, 2, 1)  # B D T Nq -> B Nq T D


def _pad_grid(tokens: Tensor, geometry: ConvGeometry) -> Tensor:
    """The token grid (B, D, rows, columns), with the zeros that its windows reach."""
    grid = tokens.mT.unflatten(2, geometry.key_grid)
    margins = (*geometry.x.margins, *geometry.y.margins)
    added, cut = [max(m, 0) for m in margins], [min(m, 0) for m in margins]
    grid = F.pad(grid, added) if any(added) else grid  # first: windows may all lie in the padding, beside the image
    return F.pad(grid, cut) if any(cut) else grid


def count_macs(
    geometry: ConvGeometry,
    *,
    width: int,
    mixes: Sequence[tuple[int, int, int, list[int] | None]],
    content_dim: int = 0,
) -> int:
    """Multiply-adds of one image through an attention: content scores, attention and head weights.

    What is done once a batch (tied weights, the kernel of a window, the maps of depthwise channels) does not count.

    Args:
        geometry: The offsets of the heads and of the table.
        width: D_in.
        mixes: (heads, D_out, groups, ranks) of each projection; ranks (H,) of factorized values, None for identity.
        content_dim: Width of a head's queries and keys, 0 where content is off.
    """
    n_queries, n_keys, heads = geometry.n_queries, geometry.n_keys, geometry.heads
    is_local = geometry.span == "local"
    pairs = n_queries * (geometry.table_size if is_local else n_keys)
    if is_local and not content_dim:
        return sum(pairs * width * d_out // groups for _, d_out, groups, _ in mixes)
    content = heads * content_dim * (width * (n_queries + n_keys) + pairs)
    if not is_local and all(ranks is not None for *_, ranks in mixes):
        return content + sum(
            sum(ranks) * (n_keys * width + groups * pairs + n_queries * d_out) for _, d_out, groups, ranks in mixes
        )
    if not content_dim and all(width == d_out == groups for _, d_out, groups, _ in mixes):  # depthwise on pixels
        return len(mixes) * pairs * width
    mixed = sum(own * n_queries * width * d_out // groups for own, d_out, groups, _ in mixes)
    return content + heads * pairs * width + mixed


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
        return seen.flatten(2) @ weight.reshape(heads * width_in, width_out)
    rows = seen.unflatten(3, (groups, width_in)).permute(3, 0, 1, 2, 4).flatten(3).flatten(1, 2)
    mixed = rows @ weight.transpose(0, 1).reshape(groups, heads * width_in, width_out)  # G B*Nq Dout/G
    return mixed.transpose(0, 1).reshape(batch, n_queries, groups * width_out)
