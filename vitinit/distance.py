"""How far a converted network has moved from the convolutions that it started as: layer by layer, head by head."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from vitinit.attention.conv import AttentionConv2d
from vitinit.attention.table import TableAttention
from vitinit.errors import ConversionError, DataError
from vitinit.positions import alpha_to_sharpness


@dataclass(frozen=True)
class HeadDistance:
    """One head, averaged over queries and images.

    Attributes:
        offset: (row, column) offset in tokens that the head started on; None for the mean head.
        target_mass: Attention mass on that offset, 0 to 1; None for the mean head.
        distance: Mean distance to where it attends, in pixels of the feature map that comes in.
        entropy: Entropy of its attention over the zero-padded plane, in nats.
        content_share: Part of the attention mass that content has moved (total variation distance to the map of its
            positions alone), 0 to 1; None where content is on and no images were given.
    """

    offset: tuple[int, int] | None
    target_mass: float | None
    distance: float
    entropy: float
    content_share: float | None


@dataclass(frozen=True)
class LayerDistance:
    """The heads of one attention layer, and the target mass that they started with."""

    name: str
    start_mass: float
    heads: list[HeadDistance]


@dataclass(frozen=True)
class DistanceReport:
    """Every attention layer of a network; prints as a table."""

    layers: list[LayerDistance]

    def to_dict(self) -> dict:
        """Plain numbers and lists, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        header = f"{'layer':{width}}  heads  mass on target: start  now (least)  distance, px  entropy  content share"
        return "\n".join([header, *(f"{layer.name:{width}}  {_summarize(layer)}" for layer in self.layers)])


def _summarize(layer: LayerDistance) -> str:
    masses = [head.target_mass for head in layer.heads if head.offset is not None]
    distance, entropy = (statistics.mean(getattr(head, key) for head in layer.heads) for key in ("distance", "entropy"))
    shares = [head.content_share for head in layer.heads]
    share = f"{statistics.mean(shares):13.3f}" if None not in shares else " needs images"
    return (
        f"{len(layer.heads):5}  {layer.start_mass:21.3f}  {statistics.mean(masses):.3f} ({min(masses):.3f})  "
        f"{distance:11.2f}  {entropy:7.2f}  {share}"
    )


@torch.no_grad()
def distance_from_convolution(model: nn.Module, images: Tensor | None = None) -> DistanceReport:
    """Where the heads of a converted network attend, and how much of it is content.

    Args:
        model: A network with attention layers.
        images: A normalized batch (B, C, height, width) to run content on; not needed where content is off.

    Raises:
        ConversionError: The network has no attention layer.
        DataError: The images are no batch of finite numbers, of a type other than the network's.
    """
    layers = {name: m.attention for name, m in model.named_modules() if isinstance(m, AttentionConv2d)}
    if not layers:
        raise ConversionError(f"{type(model).__name__} has no attention layer: give what vitinit.convert returned")
    if images is not None:
        _check_images(images, next(model.parameters()).dtype)
    seen: dict[nn.Module, Tensor] = {}
    if images is not None and any(layer.content_dim for layer in layers.values()):
        hooks = [m.register_forward_pre_hook(lambda m, args: seen.update({m: args[0]})) for m in layers.values()]
        training = model.training
        try:
            model.eval()(images)
        finally:
            model.train(training)
            for hook in hooks:
                hook.remove()
    rows = []
    for name, layer in layers.items():
        start = alpha_to_sharpness(layer.alpha, layer.geometry.table_size)
        rows.append(LayerDistance(name, start, _measure_heads(layer, seen.get(layer))))
    return DistanceReport(rows)


def _check_images(images: object, dtype: torch.dtype) -> None:
    is_batch = isinstance(images, Tensor) and images.ndim == 4 and images.dtype == dtype and len(images)
    if not is_batch or not images.isfinite().all():
        got = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise DataError(
            f"images: expected a normalized batch (B, C, height, width) of {dtype}, all finite, and got {got}"
        )


def _measure_heads(layer: TableAttention, tokens: Tensor | None) -> list[HeadDistance]:
    geometry = layer.geometry
    positions = layer.plane_weights().double()  # 1 H 1 T
    maps = positions if tokens is None else layer.plane_weights(tokens).double()  # B H Nq T
    offsets = torch.tensor(geometry.table_offsets, dtype=torch.float64, device=maps.device)
    pixels = (offsets * torch.tensor(geometry.in_patch, device=maps.device)).norm(dim=1)  # T

    def average(values: Tensor) -> list[float]:
        return values.mean(dim=(0, 2)).tolist()

    distances, entropies = average(maps @ pixels), average(torch.special.entr(maps).sum(dim=-1))
    shares = average((maps - positions).abs().sum(dim=-1) / 2)
    if layer.content_dim and tokens is None:
        shares = [0.0 if not layer.query.weight.any() else None] * layer.heads
    targets = geometry.target_index().tolist()
    masses = [average(maps[..., target])[head] for head, target in enumerate(targets)]
    return [
        HeadDistance(offset, mass, *rest)
        for offset, mass, *rest in zip(
            [*geometry.offsets, None], [*masses, None], distances, entropies, shares, strict=True
        )
    ]
