"""Offsets, relative bias tables and sink logits: where the heads of a converted convolution look.

Alphabet: H heads, P output patch side, Q input patch side, K kernel side, s stride, d dilation,
t = s*P/Q token stride, (Hq, Wq) query grid, (Hk, Wk) key grid, Nq = Hq*Wq, Nk = Hk*Wk,
T = Th*Tw relative offsets of a table.

Attention runs over the infinite zero-padded plane. Every offset of a table exists as a key for every query;
a key outside the image holds zero. The softmax denominator over the table is therefore the same for every
query, and a map that depends on positions alone is a gather of softmax(table).

The span of a table is "global", every offset between two tokens of the image, or "local", the window of offsets that
the kernel reaches (Ramachandran et al. 2019). The construction is the same on both: only T differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from vitinit.errors import ConstructionError


def axis_offsets(kernel: int, *, stride: int, dilation: int, before: int, patch: int, in_patch: int) -> tuple[int, ...]:
    """Token offsets that a kernel reaches along one axis, ascending; the arguments are `AxisGeometry`'s."""
    reads = (stride * u - before + dilation * k for u in range(patch) for k in range(kernel))
    return tuple(sorted({pixel // in_patch for pixel in reads}))


@dataclass(frozen=True)
class AxisGeometry:
    """One axis of a convolution that reads and writes patches.

    Query token i covers the output pixels i*P .. i*P+P-1, key token j the input pixels j*Q .. j*Q+Q-1.
    Output pixel y reads the input pixels s*y - before + d*k for k = 0 .. K-1.

    Args:
        in_size: Input pixels.
        kernel: K, kernel side.
        stride: s.
        dilation: d.
        before: Zero padding before the first pixel.
        after: Zero padding behind the last pixel.
        patch: P, output pixels a query token holds.
        in_patch: Q, input pixels a key token holds.
        span: "global" or "local": the offsets of the table.
        margin: Offsets that a local table holds on each side of the kernel's own.

    Raises:
        ConstructionError: An empty output, an unknown span, or patches that do not divide the grids or the stride.
    """

    in_size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    patch: int
    in_patch: int
    span: str = "global"
    margin: int = 0

    def __post_init__(self):
        if self.span not in ("global", "local"):
            raise ConstructionError(f'span={self.span!r} is unknown: expected "global" or "local"')
        if self.out_size < 1:
            raise ConstructionError(
                f"a kernel of {self.kernel} (dilation {self.dilation}) does not fit into {self.in_size} pixels "
                f"with padding {self.before}+{self.after}: use a larger image"
            )
        for what, size, patch in (("output", self.out_size, self.patch), ("input", self.in_size, self.in_patch)):
            if size % patch:
                raise ConstructionError(
                    f"patch {patch} does not divide the {what} grid of {size}: use a divisor of {size}"
                )
        if (self.stride * self.patch) % self.in_patch:
            raise ConstructionError(
                f"input patch {self.in_patch} does not divide stride x output patch = "
                f"{self.stride} x {self.patch}: queries would not lie on a lattice of keys"
            )

    @property
    def out_size(self) -> int:
        """Output pixels."""
        return (self.in_size + self.before + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    @property
    def queries(self) -> int:
        """Query tokens."""
        return self.out_size // self.patch

    @property
    def keys(self) -> int:
        """Key tokens."""
        return self.in_size // self.in_patch

    @property
    def token_stride(self) -> int:
        """Key tokens from one query to the next, t = s*P/Q."""
        return self.stride * self.patch // self.in_patch

    @cached_property
    def placement(self) -> Tensor:
        """(offsets, K, Q, P) float64, 1 where tap k links input pixel v at that offset to output pixel u."""
        placement = torch.zeros(len(self.offsets), self.kernel, self.in_patch, self.patch, dtype=torch.float64)
        for u in range(self.patch):
            for k in range(self.kernel):
                offset, v = divmod(self.stride * u - self.before + self.dilation * k, self.in_patch)
                placement[self.offsets.index(offset), k, v, u] = 1.0
        return placement

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Token offsets that the kernel reaches, ascending: one head each."""
        return axis_offsets(
            self.kernel, stride=self.stride, dilation=self.dilation, before=self.before,
            patch=self.patch, in_patch=self.in_patch,
        )  # fmt: skip

    @cached_property
    def table_offsets(self) -> range:
        """Token offsets of the table, ascending.

        A global table holds what any query can reach, and at least -1..1. A local one holds the kernel's own offsets,
        a dilated window where they are, and `margin` more on each side.
        """
        if self.span == "local":
            gaps = [b - a for a, b in pairwise(self.offsets)]
            step = math.gcd(*gaps) or 1
            return range(self.offsets[0] - self.margin * step, self.offsets[-1] + self.margin * step + 1, step)
        low = min(self.offsets[0], -self.token_stride * (self.queries - 1), -1)
        return range(low, max(self.offsets[-1], self.keys - 1, 1) + 1)

    @property
    def table_size(self) -> int:
        """Offsets of the table."""
        return len(self.table_offsets)

    @property
    def query_tokens(self) -> Tensor:
        """(queries,) the key token nearest the centre of each query's kernel: its content asks the question."""
        centre = (self.offsets[0] + self.offsets[-1]) // 2
        return (torch.arange(self.queries) * self.token_stride + centre).clamp(0, self.keys - 1)

    @property
    def table_index(self) -> Tensor:
        """(queries, keys) index into the table of the offset j - t*i, and -1 where the table does not hold it."""
        i, j = torch.arange(self.queries)[:, None], torch.arange(self.keys)[None, :]
        offset, step = j - self.token_stride * i - self.table_offsets[0], self.table_offsets.step
        held = (offset % step == 0) & (offset >= 0) & (offset < step * self.table_size)
        return torch.where(held, offset // step, -1)

    @property
    def reach(self) -> tuple[Tensor, Tensor]:
        """(queries, table_size) twice: the key at each offset, and whether the image has it."""
        key = torch.arange(self.queries)[:, None] * self.token_stride + torch.tensor(self.table_offsets)
        return key, (key >= 0) & (key < self.keys)

    @property
    def margins(self) -> tuple[int, int]:
        """Key tokens that the tables of the first and the last query reach before and behind the image (or lack)."""
        last = self.token_stride * (self.queries - 1) + self.table_offsets[-1]
        return -self.table_offsets[0], last - (self.keys - 1)


@dataclass(frozen=True)
class ConvGeometry:
    """Both axes of a convolution on patches; every token order is row-major.

    Build it with `ConvGeometry.build`, which takes what `nn.Conv2d` has.
    """

    y: AxisGeometry
    x: AxisGeometry

    @classmethod
    def build(
        cls,
        in_size: tuple[int, int],
        *,
        kernel_size: tuple[int, int],
        stride: tuple[int, int] = (1, 1),
        dilation: tuple[int, int] = (1, 1),
        padding: tuple[int, int, int, int] = (0, 0, 0, 0),
        patch: tuple[int, int] = (1, 1),
        in_patch: tuple[int, int] | None = None,
        span: str = "global",
    ) -> ConvGeometry:
        """Geometry of a convolution.

        Args:
            in_size: (height, width) of the input in pixels.
            kernel_size: (Kh, Kw).
            stride: Per axis.
            dilation: Per axis.
            padding: Zeros (top, bottom, left, right).
            patch: Output patch (Ph, Pw).
            in_patch: Input patch (Qh, Qw); the output patch by default.
            span: "global" or "local".

        Raises:
            ConstructionError: As `AxisGeometry`.
        """
        in_patch = in_patch or patch
        axes = [
            AxisGeometry(
                in_size[i], kernel_size[i], stride[i], dilation[i],
                padding[2 * i], padding[2 * i + 1], patch[i], in_patch[i], span,
            )
            for i in range(2)
        ]  # fmt: skip
        if span == "local" and all(len(axis.offsets) == 1 for axis in axes):  # pointwise: or no head could look around
            axes = [replace(axis, margin=1) for axis in axes]
        return cls(*axes)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """(row, column) token offset of each convolution head; the mean head comes after them."""
        return [(dy, dx) for dy in self.y.offsets for dx in self.x.offsets]

    @property
    def heads(self) -> int:
        """H: one head an offset and the mean head."""
        return len(self.y.offsets) * len(self.x.offsets) + 1

    @property
    def table_size(self) -> int:
        """T."""
        return self.y.table_size * self.x.table_size

    @property
    def in_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the input."""
        return self.y.in_size, self.x.in_size

    @property
    def out_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the output."""
        return self.y.out_size, self.x.out_size

    @property
    def query_grid(self) -> tuple[int, int]:
        """(Hq, Wq)."""
        return self.y.queries, self.x.queries

    @property
    def key_grid(self) -> tuple[int, int]:
        """(Hk, Wk)."""
        return self.y.keys, self.x.keys

    @property
    def n_queries(self) -> int:
        """Nq."""
        return self.y.queries * self.x.queries

    @property
    def n_keys(self) -> int:
        """Nk."""
        return self.y.keys * self.x.keys

    @property
    def patch(self) -> tuple[int, int]:
        """Output patch (Ph, Pw)."""
        return self.y.patch, self.x.patch

    @property
    def in_patch(self) -> tuple[int, int]:
        """Input patch (Qh, Qw)."""
        return self.y.in_patch, self.x.in_patch

    @property
    def span(self) -> str:
        """ "global" or "local"."""
        return self.y.span

    @property
    def table_offsets(self) -> list[tuple[int, int]]:
        """(T,) (row, column) token offset of each entry of a table."""
        return [(dy, dx) for dy in self.y.table_offsets for dx in self.x.table_offsets]

    def relative_index(self) -> Tensor:
        """(Nq, Nk) index into a flat table (T,) of the offset from query to key; T for keys outside its window."""
        rows, columns = self.y.table_index[:, None, :, None], self.x.table_index[None, :, None, :]
        index = torch.where((rows < 0) | (columns < 0), self.table_size, rows * self.x.table_size + columns)
        return index.reshape(self.n_queries, self.n_keys)

    def key_index(self) -> Tensor:
        """(Nq, T) key token at each offset of the table, as seen from each query; Nk for those outside the image."""
        (rows, row_inside), (columns, column_inside) = (axis.reach for axis in (self.y, self.x))
        index = rows[:, None, :, None] * self.x.keys + columns[None, :, None, :]  # Hq Wq Th Tw
        inside = row_inside[:, None, :, None] & column_inside[None, :, None, :]
        return torch.where(inside, index, self.n_keys).reshape(self.n_queries, self.table_size)

    def query_index(self) -> Tensor:
        """(Nq,) key token whose content is each query's."""
        return (self.y.query_tokens[:, None] * self.x.keys + self.x.query_tokens).flatten()

    def target_index(self) -> Tensor:
        """(H-1,) index into a flat table (T,) of each convolution head's own offset."""
        place = {offset: i for i, offset in enumerate(self.table_offsets)}
        return torch.tensor([place[offset] for offset in self.offsets])


def sharpness_to_alpha(sharpness: float, table_size: int) -> float:
    """Bias that puts the attention mass `sharpness` on one of T offsets: alpha = ln(p (T-1) / (1-p)).

    Raises:
        ConstructionError: p at most 1/T (a head that does not prefer its offset), or p not below 1.
    """
    if not 1 / table_size < sharpness < 1:
        raise ConstructionError(
            f"sharpness {sharpness:g} is not between 1/T = {1 / table_size:.3g} and 1 on a table of T = "
            f"{table_size} offsets: a head must put more on its own offset than on the others"
        )
    return math.log(sharpness * (table_size - 1) / (1 - sharpness))


def alpha_to_sharpness(alpha: float, table_size: int) -> float:
    """Attention mass that a bias alpha puts on its offset: p = e^alpha / (e^alpha + T - 1)."""
    return 1 / (1 + (table_size - 1) * math.exp(-alpha))


def build_bias_table(geometry: ConvGeometry, *, alpha: float) -> Tensor:
    """Bias table (H, T) in float64: alpha on each head's own offset, 0 elsewhere and in the last, the mean head."""
    table = torch.zeros(geometry.heads, geometry.table_size, dtype=torch.float64)
    table[torch.arange(geometry.heads - 1), geometry.target_index()] = alpha
    return table


def positional_mass(table: Tensor) -> Tensor:
    """Attention mass (H, T) of heads that attend by position alone: the softmax of a table (H, T).

    Not torch.softmax: on CPU it is measured to be ten times less accurate in float32 than torch.exp, and the output
    weights assume the exact mass.
    """
    mass = (table - table.detach().amax(dim=-1, keepdim=True)).exp()
    return mass / mass.sum(dim=-1, keepdim=True)


def positional_maps(table: Tensor, relative_index: Tensor) -> Tensor:
    """Attention maps (H, Nq, Nk) of heads that attend by position alone, over the zero-padded plane.

    A[h, q, k] = softmax(table[h])[offset(q, k)]. Rows sum to less than 1 where a query sees zero padding.

    Args:
        table: (H, T).
        relative_index: (Nq, Nk), from `ConvGeometry.relative_index`.
    """
    mass = F.pad(positional_mass(table), (0, 1))  # nothing outside a window
    return mass.index_select(1, relative_index.flatten()).view(len(table), *relative_index.shape)


def positional_logits(table: Tensor, relative_index: Tensor) -> Tensor:
    """Logits (H, Nq, Nk) of a table (H, T); outside a window they are hugely negative, as in `sink_logits`."""
    table = F.pad(table, (0, 1), value=torch.finfo(table.dtype).min / 4)
    return table.index_select(1, relative_index.flatten()).view(len(table), *relative_index.shape)


def sink_logits(table: Tensor, geometry: ConvGeometry) -> Tensor:
    """Logits (H, Nq) of the one key that stands for all offsets outside the image.

    sink[h, q] = logsumexp of table[h] over the offsets that fall outside the image as seen from q: first the
    columns outside, row by row, then the rows, so the cost is H*N^1.5 and nothing is subtracted. Where no
    offset falls outside, the logit is hugely negative instead of -inf, which keeps its gradient at zero.

    Args:
        table: (H, T).
        geometry: The geometry that the table belongs to.
    """
    nothing = torch.finfo(table.dtype).min / 4
    inside_y, inside_x = (axis.reach[1].to(table.device) for axis in (geometry.y, geometry.x))
    rows = table.view(len(table), geometry.y.table_size, 1, geometry.x.table_size)  # H Th 1 Tw
    beside = rows.masked_fill(inside_x, nothing).logsumexp(dim=-1)  # H Th Wq, for rows that cross the image
    whole = rows.logsumexp(dim=-1)  # H Th 1, for rows above and below it
    per_row = torch.where(inside_y[:, None, :], beside.mT.unsqueeze(1), whole.mT.unsqueeze(1))  # H Hq Wq Th
    return per_row.logsumexp(dim=-1).flatten(1)


def cut_patches(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Tokens (B, N, C*Ph*Pw) of a feature map (B, C, h*Ph, w*Pw), channel-major inside a token."""
    batch, channels, height, width = images.shape
    ph, pw = patch
    if ph == pw == 1:
        return images.flatten(2).mT
    grid = images.view(batch, channels, height // ph, ph, width // pw, pw).permute(0, 2, 4, 1, 3, 5)
    return grid.reshape(batch, (height // ph) * (width // pw), channels * ph * pw)  # B h w C Ph Pw -> B N D


def join_patches(tokens: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """Feature map (B, C, h*Ph, w*Pw) of tokens (B, N, C*Ph*Pw): the inverse of `cut_patches`."""
    batch, _, width = tokens.shape
    (h, w), (ph, pw) = grid, patch
    channels = width // (ph * pw)
    if ph == pw == 1:
        return tokens.mT.reshape(batch, channels, h, w)
    pixels = tokens.reshape(batch, h, w, channels, ph, pw).permute(0, 3, 1, 4, 2, 5)
    return pixels.reshape(batch, channels, h * ph, w * pw)
