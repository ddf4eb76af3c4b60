"""A convolution kernel written as the weights of attention heads: pure functions of tensors.

A convolution on tokens is a sum of shifts, conv(X) = sum_delta S_delta(X) M_delta + b (Cordonnier et al. 2019,
theorem 1; Li et al. 2021, theorem 1 for patches). A head with bias alpha on its offset attends as
A_delta = a*S_delta + b*U, U the average of the zero-padded plane, so with one more head that attends as U,

    W_delta = M_delta / a,      W_mean = -(b / a) * sum_delta M_delta

reproduces the convolution exactly, whatever the sharpness.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitinit.positions import ConvGeometry, axis_offsets


def count_heads(
    kernel_size: tuple[int, int],
    *,
    patch: tuple[int, int] = (1, 1),
    in_patch: tuple[int, int] | None = None,
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] | None = None,
) -> int:
    """Heads that a convolution needs: one for each token offset that its kernel reaches, and the mean head.

    For an odd K with stride 1 and "same" padding this is (2*ceil(r/P) + 1)^2 + 1 with r = (K-1)/2: K^2 + 1 on
    pixels, 10 for every K <= 2P+1. No fewer can do it for a general kernel: the maps of n heads span n
    dimensions, the shifts alone are as many as the offsets, and a softmax at finite sharpness is positive
    everywhere, so it never lies in the span of the shifts.

    Args:
        kernel_size: (Kh, Kw).
        patch: Output patch (Ph, Pw).
        in_patch: Input patch, the output patch by default.
        stride: Per axis.
        dilation: Per axis.
        padding: Zeros (top, bottom, left, right); by default "same" padding, (d*(K-1))//2 before.

    Example:
        >>> count_heads((3, 3)), count_heads((5, 5), patch=(2, 2))
        (10, 10)
    """
    in_patch = in_patch or patch
    if padding is None:
        before = [d * (k - 1) // 2 for k, d in zip(kernel_size, dilation, strict=True)]
    else:
        before = [padding[0], padding[2]]
    rows, columns = (
        axis_offsets(
            kernel_size[i], stride=stride[i], dilation=dilation[i], before=before[i],
            patch=patch[i], in_patch=in_patch[i],
        )
        for i in range(2)
    )  # fmt: skip
    return len(rows) * len(columns) + 1


def leak_coefficients(alpha: float, table_size: int) -> tuple[float, float]:
    """(a, b) of a head's map a*S + b*U with bias alpha on one of T offsets.

    a = (e^alpha - 1) / Z,  b = T / Z,  Z = e^alpha + T - 1, written so that a large alpha does not overflow.
    """
    small = math.exp(-alpha)
    z = 1 + (table_size - 1) * small
    return (1 - small) / z, table_size * small / z


def place_kernel(kernel: Tensor, geometry: ConvGeometry, *, groups: int = 1) -> Tensor:
    """The slices M_delta (H-1, G, C_in/G*Q^2, C_out/G*P^2) of a kernel, one for each offset.

    M_delta[(c, v), (c', u)] = kernel[c', c, k] where d*k = delta*Q + v - s*u + padding, 0 where no k fits.

    Args:
        kernel: (C_out, C_in/G, Kh, Kw).
        geometry: The convolution on patches.
        groups: G.
    """
    grouped = kernel.view(groups, -1, *kernel.shape[1:])  # G O I Kh Kw
    py, px = geometry.y.placement.to(kernel), geometry.x.placement.to(kernel)  # offsets K Q P
    slices = torch.einsum("goikl,akvu,blwz->abgivwouz", grouped, py, px)
    n_offsets, n_in = geometry.heads - 1, kernel.shape[1] * math.prod(geometry.in_patch)
    return slices.reshape(n_offsets, groups, n_in, -1)


def build_head_placement(geometry: ConvGeometry, *, leak: tuple[float, float]) -> Tensor:
    """The linear map (H, Kh*Kw, Qh*Qw, Ph*Pw) in float64 from a kernel's taps to all head weights.

    W[h, (c, v), (c', u)] = sum_k kernel[c', c, k] * placement[h, k, v, u]: a gather, the scale 1/a, and the
    mean head's -b/a. A network tied to its kernels trains through it.
    """
    py, px = geometry.y.placement, geometry.x.placement
    placed = torch.einsum("akvu,blwz->abklvwuz", py, px)
    taps, v, u = py.shape[1] * px.shape[1], math.prod(geometry.in_patch), math.prod(geometry.patch)
    return cancel_leak(placed.reshape(geometry.heads - 1, taps, v, u), leak)


def cancel_leak(slices: Tensor, leak: tuple[float, float]) -> Tensor:
    """Head weights (H, ...) of slices M_delta (H-1, ...): M_delta / a, and -(b/a) * sum_delta M_delta behind."""
    a, b = leak
    return torch.cat([slices / a, -(b / a) * slices.sum(dim=0, keepdim=True)])


def kernel_to_heads(kernel: Tensor, geometry: ConvGeometry, *, leak: tuple[float, float], groups: int = 1) -> Tensor:
    """Head weights (H, G, C_in/G*Q^2, C_out/G*P^2) in float64 that reproduce a kernel; the mean head is last.

    Args:
        kernel: (C_out, C_in/G, Kh, Kw).
        geometry: The convolution on patches.
        leak: (a, b) of the heads' maps, see `leak_coefficients`.
        groups: G.
    """
    return cancel_leak(place_kernel(kernel.double(), geometry, groups=groups), leak)


def plan_ranks(
    geometry: ConvGeometry, *, in_channels: int, out_channels: int, groups: int = 1, cap: int | None = None
) -> list[int]:
    """Rank (per group) that each head needs to be exact, at most `cap`; the mean head's last.

    A slice links only the input and output pixels that are a kernel's reach apart: the centre has P^2*C, an
    edge r*P*C, a corner r^2*C; together (P+2r)^2*C for stride 1. The mean head's slice is their sum.

    Args:
        geometry: The convolution on patches.
        in_channels: C_in.
        out_channels: C_out.
        groups: G.
        cap: Largest rank of a convolution head; None for the exact plan.
    """
    c_in, c_out = in_channels // groups, out_channels // groups
    y, x = (axis.placement.sum(dim=1) for axis in (geometry.y, geometry.x))  # offsets Q P
    rows, columns = ([(m > 0).any(dim=d).sum(dim=-1) for m in (y, x)] for d in (2, 1))  # used pixels of an offset
    ranks = [
        min(int(rows[0][i] * rows[1][j]) * c_in, int(columns[0][i] * columns[1][j]) * c_out)
        for i in range(len(y))
        for j in range(len(x))
    ]
    if cap is not None:
        ranks = [min(rank, cap) for rank in ranks]
    full = min(c_in * math.prod(geometry.in_patch), c_out * math.prod(geometry.patch))
    return [*ranks, min(full, sum(ranks))]


def factorize_heads(
    kernel: Tensor, geometry: ConvGeometry, *, leak: tuple[float, float], ranks: list[int], groups: int = 1
) -> tuple[list[Tensor], list[Tensor], float]:
    """Value and output weights of each head by balanced singular value decomposition, and the energy kept.

    M_delta ~ V_delta O_delta with V = L*sqrt(S), O = sqrt(S)*R, the largest `rank` singular values of each.
    The mean head cancels the leak of what was kept, so a low rank stays a clean (smaller) convolution.

    Args:
        kernel: (C_out, C_in/G, Kh, Kw).
        geometry: The convolution on patches.
        leak: (a, b) of the heads' maps, see `leak_coefficients`.
        ranks: (H,) rank of each head, the mean head's last; see `plan_ranks`.
        groups: G.

    Returns:
        values: H tensors (G, C_in/G*Q^2, rank), float64.
        outputs: H tensors (G, rank, C_out/G*P^2), float64.
        energy: Share of the kernel's squared norm (over all slices) that is kept, 0 to 1.
    """
    slices = place_kernel(kernel.double(), geometry, groups=groups)
    kept = torch.stack([_truncate(m, r) for m, r in zip(slices, ranks[:-1], strict=True)])
    total = slices.square().sum()
    energy = float(kept.square().sum() / total) if total > 0 else 1.0
    pairs = [_balance(w, r) for w, r in zip(cancel_leak(kept, leak), ranks, strict=True)]
    return [v for v, _ in pairs], [o for _, o in pairs], energy


def _truncate(matrix: Tensor, rank: int) -> Tensor:
    values, outputs = _balance(matrix, rank)
    return values @ outputs


def _balance(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    left, scale, right = torch.linalg.svd(matrix, full_matrices=False)  # G m r, G r, G r n
    root = scale[..., :rank].sqrt()
    return left[..., :rank] * root.unsqueeze(-2), root.unsqueeze(-1) * right[..., :rank, :]
