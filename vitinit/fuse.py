"""The way back: attention layers that still are convolutions become convolutions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitinit.attention.conv import AttentionConv2d
from vitinit.construction import place_kernel
from vitinit.convert import copy_network
from vitinit.errors import ConstructionError, ConversionError
from vitinit.positions import positional_mass


class PaddedConv2d(nn.Conv2d):
    """An `nn.Conv2d` whose zeros differ from side to side: `margins` are (top, bottom, left, right)."""

    def __init__(self, *args: object, margins: tuple[int, int, int, int], **kwargs: object):
        super().__init__(*args, **kwargs)
        self.margins = margins

    def forward(self, x: Tensor) -> Tensor:
        """Feature map (B, C_out, h', w') of a feature map (B, C_in, h, w)."""
        top, bottom, left, right = self.margins
        return super().forward(F.pad(x, (left, right, top, bottom)))


@dataclass(frozen=True)
class FusedLayer:
    """An attention layer, and how far it is from a convolution.

    Attributes:
        name: Its name in the network.
        fused: Whether it is a convolution now.
        error: Norm of what no kernel can express over the norm of the layer's weights on all offsets; nan where the
            content is on.
        reason: Why it stayed attention.
    """

    name: str
    fused: bool
    error: float
    reason: str | None = None


@dataclass(frozen=True)
class FuseReport:
    """What became of every attention layer; prints as a table."""

    layers: list[FusedLayer]

    def to_dict(self) -> dict:
        """Plain numbers and lists, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        lines = [
            f"{r.name:{width}}  {'convolution' if r.fused else r.reason}"
            + ("" if math.isnan(r.error) else f"  {r.error:.1e}")
            for r in self.layers
        ]
        fused = sum(r.fused for r in self.layers)
        lines.append(f"{fused} of {len(self.layers)} attention layers are convolutions again")
        return "\n".join(lines)


@torch.no_grad()
def fuse(model: nn.Module, *, tolerance: float = 1e-6) -> tuple[nn.Module, FuseReport]:
    """A copy of a converted network whose attention layers that still are convolutions are convolutions, and a report.

    While content is silent, a layer is the linear map that links tokens at offset t by E_t = sum_h A_h[t] W_h. It is a
    convolution where E_t is a kernel's slice on the offsets that the kernel reaches and zero on all others: so for
    maps a*S + b*U with the mean head that cancels b*U, and for pixel tokens of local span whatever their training.

    The kernels are the CNN's own, under the CNN's own names (of a weight-standardized convolution: its standardized
    kernel), so the state of a fully fused network fits the CNN.

    Args:
        model: A network with attention layers.
        tolerance: Largest part of a layer's weights, by norm, that no kernel expresses.

    Raises:
        ConversionError: The network has no attention layer, or cannot be copied.
        ConstructionError: A negative tolerance.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"fuse takes an nn.Module and got {model!r}: give what vitinit.convert returned")
    if not tolerance >= 0:
        raise ConstructionError(f"tolerance={tolerance!r}: expected a relative error of at least 0, such as 1e-6")
    model = copy_network(model)
    places = model.named_modules(remove_duplicate=False)  # one module may have several
    layers = {name: module for name, module in places if isinstance(module, AttentionConv2d)}
    if not layers:
        raise ConversionError(
            f"{type(model).__name__} has no attention layer to fuse: give what vitinit.convert returned"
        )
    found = {layer: _find_kernel(layer, tolerance) for layer in set(layers.values())}
    convolutions = {layer: _build(layer, kernel) for layer, (kernel, *_) in found.items() if kernel is not None}
    rows = []
    for name, layer in layers.items():
        _, error, reason = found[layer]
        rows.append(FusedLayer(name, layer in convolutions, error, reason))
        if layer in convolutions and name:
            model.set_submodule(name, convolutions[layer])
        elif layer in convolutions:  # the network is one layer
            model = convolutions[layer]
    return model, FuseReport(rows)


def _find_kernel(layer: AttentionConv2d, tolerance: float) -> tuple[Tensor | None, float, str | None]:
    """The kernel of a layer that still is a convolution, its error, and the reason where there is none."""
    attention = layer.attention
    if attention.content_dim and attention.query.weight.any() and attention.key.weight.any():
        return None, math.nan, "content is on"
    kernel, error = fit_kernel(layer)
    if not error <= tolerance:
        return None, error, "moved away from a convolution"
    return kernel, error, None


def _build(layer: AttentionConv2d, kernel: Tensor) -> nn.Conv2d:
    spec, source = layer.spec, next(layer.parameters())
    top, bottom, left, right = spec["padding"]
    settings = {
        "stride": tuple(spec["stride"]), "dilation": tuple(spec["dilation"]), "groups": spec["groups"],
        "bias": spec["bias"], "device": source.device, "dtype": source.dtype,
    }  # fmt: skip
    shape = spec["in_channels"], spec["out_channels"], tuple(spec["kernel_size"])
    if (top, left) == (bottom, right):
        conv = nn.Conv2d(*shape, padding=(top, left), **settings)
    else:
        conv = PaddedConv2d(*shape, margins=(top, bottom, left, right), **settings)
    conv.weight.copy_(kernel)
    if spec["bias"]:
        conv.bias.copy_(layer.projection.bias)
    return conv.requires_grad_(source.requires_grad).train(layer.training)


@torch.no_grad()
def fit_kernel(layer: AttentionConv2d) -> tuple[Tensor, float]:
    """The kernel (C_out, C_in/G, Kh, Kw) in float64 nearest to what a layer does while its content is silent, and the
    norm of the difference over the norm of the whole.

    Args:
        layer: The layer.
    """
    geometry = layer.geometry
    mass, weight = positional_mass(layer.attention.bias_table.double()), layer.projection.build().double()
    reached = geometry.target_index().tolist()
    outside = 0.0
    slices = {}
    for offset, share in enumerate(mass.T):  # one at a time: all T of them can be gigabytes
        linked = torch.einsum("h,hgio->gio", share, weight)
        if offset in reached:
            slices[offset] = linked
        else:
            outside += float(linked.square().sum())
    slices = torch.stack([slices[offset] for offset in reached])  # H-1 G Cin/G*Q^2 Cout/G*P^2
    y, x = geometry.y.placement.to(slices), geometry.x.placement.to(slices)
    (a, _, v, u), (b, _, w, z) = y.shape, x.shape
    width_in, width_out = slices.shape[2] // (v * w), slices.shape[3] // (u * z)
    split = slices.view(a, b, len(slices[0]), width_in, v, w, width_out, u, z)
    # Every tap lies once in each output pixel of a patch: their mean is the least-squares fit.
    kernel = torch.einsum("abgivwouz,akvu,blwz->goikl", split, y, x).flatten(0, 1) / (u * z)
    rest = float((slices - place_kernel(kernel, geometry, groups=layer.groups)).square().sum())
    total = float(slices.square().sum()) + outside
    return kernel, ((rest + outside) / total) ** 0.5 if total else 0.0
