"""What a conversion did, layer by layer: data that prints as a table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

COSTLY = 10


@dataclass
class LayerReport:
    """One convolution of the CNN: what became of it.

    One multiply-add counts as one FLOP, as in the papers' and timm's tables; `macs` are for one image.
    """

    name: str
    kernel: tuple[int, int]
    stride: tuple[int, int]
    groups: int
    channels: tuple[int, int]
    grid: tuple[int, int]
    reason: str | None = None
    patch: tuple[int, int] | None = None
    span: str | None = None
    tokens: int | None = None
    heads: int | None = None
    sharpness: float | None = None
    params_before: int = 0
    params_after: int = 0
    macs_before: int = 0
    macs_after: int = 0
    error: float | None = None
    energy: float | None = None

    @property
    def converted(self) -> bool:
        """Whether the convolution is now attention."""
        return self.reason is None


@dataclass
class ConversionReport:
    """Every convolution of a CNN, converted or kept with the reason, and the error of the logits."""

    img_size: tuple[int, int]
    layers: list[LayerReport] = field(default_factory=list)
    params_before: int = 0
    params_after: int = 0
    logits_error: float = float("nan")
    tolerance: float = float("nan")

    @property
    def converted(self) -> list[LayerReport]:
        """The layers that are now attention."""
        return [row for row in self.layers if row.converted]

    @property
    def kept(self) -> list[LayerReport]:
        """The layers that stayed convolutions."""
        return [row for row in self.layers if not row.converted]

    def to_dict(self) -> dict:
        """Plain numbers and lists, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        header = ("layer", "kernel", "stride", "grid", "patch", "span", "heads", "params", "MFLOPs", "error")
        rows = [
            (
                row.name, _by(row.kernel), _by(row.stride), _by(row.grid), _by(row.patch), row.span, str(row.heads),
                f"{_count(row.params_before)} > {_count(row.params_after)}",
                f"{row.macs_before / 1e6:.1f} > {row.macs_after / 1e6:.1f}", f"{row.error:.1e}",
            )
            for row in self.converted
        ]  # fmt: skip
        widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                 for line in [header, *rows]]  # fmt: skip
        lines += [f"kept  {names}: {reason}" for reason, names in group_by_reason(self.kept).items()]
        if any(row.energy is not None and row.energy < 1 - 1e-9 for row in self.converted):
            lowest = min(row.energy for row in self.converted)
            lines.append(f"kernel energy kept: at least {lowest:.2%} in every layer")
        costly = [row for row in self.converted if row.macs_after > COSTLY * row.macs_before]
        if costly:
            worst = max(costly, key=lambda row: row.macs_after / row.macs_before)
            lines.append(
                f"note: {len(costly)} layers cost more than {COSTLY} times their convolution, {worst.name} "
                f'{worst.macs_after / worst.macs_before:.0f} times; span="local" costs about what it does'
            )
        before, after = (sum(getattr(row, key) for row in self.layers) for key in ("macs_before", "macs_after"))
        lines.append(
            f"{len(self.converted)} of {len(self.layers)} convolutions are attention at "
            f"{self.img_size[0]}x{self.img_size[1]} px; parameters {_count(self.params_before)} > "
            f"{_count(self.params_after)}, MFLOPs of all convolutions {before / 1e6:.0f} > {after / 1e6:.0f}; "
            f"relative error of the logits {self.logits_error:.1e}"
        )
        return "\n".join(lines)


@dataclass
class PlainViTReport:
    """What the transformer is and how far its logits are from the CNN's; prints as a table.

    Attributes:
        img_size: (height, width) in pixels.
        grid: (h, w), the token grid.
        width: D, the token width.
        blocks: Blocks.
        params_before: Parameters of the CNN.
        params_after: Parameters of the transformer.
        macs_before: Multiply-adds of the converted convolutions for one image.
        macs_after: Multiply-adds of the blocks for one image.
        logits_error: Norm of the difference over the norm of the CNN's logits, on random images.
        tolerance: Its limit.
        rows: One a block: what it computes.
    """

    img_size: tuple[int, int]
    grid: tuple[int, int]
    width: int = 0
    blocks: int = 0
    params_before: int = 0
    params_after: int = 0
    macs_before: int = 0
    macs_after: int = 0
    logits_error: float = math.nan
    tolerance: float = math.nan
    rows: list[dict] = field(default_factory=list)

    def to_dict(self) -> dict:
        """Plain numbers and lists, for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        lines = [
            f"{i:3}  {row['what']:40}  heads {row['heads']:3}  reads {row['read']:5}  writes {row['write']:5}  "
            f"hidden {row['hidden']:5}"
            for i, row in enumerate(self.rows)
        ]
        lines.append(
            f"{self.blocks} blocks on {self.grid[0]}x{self.grid[1]} tokens of width {self.width}; parameters "
            f"{self.params_before:,} -> {self.params_after:,}; MFLOPs {self.macs_before / 1e6:.0f} -> "
            f"{self.macs_after / 1e6:.0f}; logits differ by {self.logits_error:.1e} (limit {self.tolerance:.0e})"
        )
        return "\n".join(lines)


def group_by_reason(rows: list[LayerReport]) -> dict[str, str]:
    """The names of layers that stayed convolutions, by the reason; of many names the first, the last and the number."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row.name)
    return {
        reason: ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)})"
        for reason, names in by_reason.items()
    }


def _by(pair: tuple[int, int]) -> str:
    return f"{pair[0]}x{pair[1]}"


def _count(number: int) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f}{unit}"
    return str(number)
