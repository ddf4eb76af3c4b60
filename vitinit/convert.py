"""Replace the convolutions of a CNN by attention layers that compute the same function."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from timm.layers import Conv2dSame, get_same_padding
from torch import Tensor, nn

from vitinit.attention.conv import AttentionConv2d
from vitinit.attention.kernels import count_macs
from vitinit.construction import plan_ranks
from vitinit.errors import ConstructionError, ConversionError
from vitinit.positions import ConvGeometry, alpha_to_sharpness, sharpness_to_alpha
from vitinit.report import ConversionReport, LayerReport

MAX_AUTO_PATCH = 8
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass
class _TracedConv:
    """What one forward pass has shown of a convolution."""

    name: str
    module: nn.Module
    in_sizes: list[tuple[int, int]] = field(default_factory=list)
    out_sizes: list[tuple[int, int]] = field(default_factory=list)


@torch.no_grad()
def convert(
    cnn: nn.Module,
    *,
    img_size: int | tuple[int, int],
    stages: int | Sequence[str] | None = None,
    sharpness: float = 0.9,
    alpha: float | None = None,
    patch: int | str = "auto",
    values: str = "identity",
    rank: int | None = None,
    weights: str = "tied",
    content_dim: int = 0,
    tolerance: float | None = None,
) -> tuple[nn.Module, ConversionReport]:
    """A copy of a CNN whose chosen KxK convolutions are attention layers, and a report; same logits.

    Batch norms (statistics included), activations, pools and 1x1 convolutions stay as they are, and so does
    the CNN that was passed in.

    Args:
        cnn: Any network of `nn.Conv2d` layers that takes one image batch (B, C, height, width).
        img_size: Side, or (height, width), in pixels of the images that the network will see.
        stages: Which convolutions: a number n for the last n stages (a stage is what shares an output grid), a
            list of module names ("layer3", "layer4.0.conv1"), or None for the stages at stride 8 and coarser,
            and at least the last two.
        sharpness: Attention mass p of each head on its own offset at the start.
        alpha: The bias itself in place of `sharpness`.
        patch: Side of the square patches that make a token, or "auto" for the fewest multiply-adds.
        values: "identity" (a head carries the whole token) or "factorized" (a product of low rank).
        rank: Largest rank of a factorized head. Below the exact plan the logits differ, so pass a `tolerance`.
        weights: "tied" (the kernels stay the parameters) or "free" (each head has weights of its own).
        content_dim: Width of queries and keys; 0 leaves content off.
        tolerance: Largest relative error of the logits; by default 1e-9 in float64 and 1e-4 in float32.

    Returns:
        The converted network in the CNN's own mode, and its `ConversionReport`.

    Raises:
        ConversionError: Nothing to convert, a named layer that cannot be, an image size that the network does
            not take, or logits that differ by more than the tolerance.
        ConstructionError: A setting outside its range.
    """
    size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if patch != "auto" and (not isinstance(patch, int) or patch < 1):
        raise ConstructionError(f'patch={patch!r}: expected "auto" or a side of at least 1 pixel')
    model = copy.deepcopy(cnn).eval()
    example = _draw_images(model, size)
    traced = _trace(model, example)
    chosen = _choose(traced, stages, size)
    report = ConversionReport(img_size=size)
    replacements: dict[str, AttentionConv2d] = {}
    for conv in traced:
        reason = _reason_to_keep(conv, conv.name in chosen)
        if reason is None:
            try:
                geometry = _place(conv, patch, values=values, content_dim=content_dim)
            except ConstructionError as error:
                reason = str(error)
        if reason is not None:
            if isinstance(stages, Sequence) and conv.name in stages:
                raise ConversionError(f"cannot convert {conv.name}: {reason}")
            report.layers.append(_describe(conv, reason=reason))
            continue
        with torch.random.fork_rng(devices=[]):  # the keys of silent content are random; the caller's draws are not
            layer = _build(
                conv, geometry, alpha=sharpness_to_alpha(sharpness, geometry.table_size) if alpha is None else alpha,
                weights=weights, values=values, rank=rank, content_dim=content_dim,
            )  # fmt: skip
        energy = layer.attention.load_kernel(conv.module.weight, conv.module.bias)
        layer.requires_grad_(conv.module.weight.requires_grad)  # a frozen convolution stays frozen
        replacements[conv.name] = layer.to(conv.module.weight.device)
        report.layers.append(_describe(conv, layer=layer, energy=energy))
    if not replacements:
        reasons = "\n".join(f"  {row.name}: {row.reason}" for row in report.layers) or "  it has no convolution"
        raise ConversionError(f"no convolution of {type(cnn).__name__} can be converted:\n{reasons}")

    logits = _measure_layers(model, replacements, example, report)
    for name, layer in replacements.items():
        if name:
            model.set_submodule(name, layer)
        else:  # the CNN is one convolution
            model = layer
    report.params_before = sum(p.numel() for p in cnn.parameters())
    report.params_after = sum(p.numel() for p in model.parameters())
    report.logits_error = relative_error(_outputs(model(example)), logits)
    report.tolerance = tolerance if tolerance is not None else TOLERANCES.get(example.dtype, 1e-4)
    if not report.logits_error <= report.tolerance:  # also catches nan
        worst = max((r for r in report.layers if r.converted), key=lambda r: r.error)
        raise ConversionError(
            f"the converted network's logits differ from the CNN's by {report.logits_error:.2e}, more than the "
            f"tolerance {report.tolerance:.0e}; worst layer {worst.name} with {worst.error:.2e}"
            + (f" and {worst.energy:.1%} of its kernel kept: raise rank, or pass tolerance" if rank else "")
        )
    return model.train(cnn.training), report


def attention_specs(model: nn.Module) -> dict[str, dict]:
    """The arguments that rebuild each attention layer of a converted network, by module name."""
    return {name: module.spec for name, module in model.named_modules() if isinstance(module, AttentionConv2d)}


def replace_convolutions(model: nn.Module, specs: dict[str, dict]) -> nn.Module:
    """Put freshly initialized attention layers at the named places of a CNN, in place; returns it.

    Raises:
        ConversionError: A name that the network does not have.
    """
    for name, spec in specs.items():
        try:
            conv = model.get_submodule(name)
        except AttributeError as error:
            raise ConversionError(f"{type(model).__name__} has no layer {name} to replace by attention") from error
        weight = next(conv.parameters())
        model.set_submodule(name, AttentionConv2d(**spec, dtype=weight.dtype).to(weight.device))
    return model


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of what was expected, over all tensors together."""
    difference = sum((g.double() - e.double()).square().sum() for g, e in zip(got, expected, strict=True))
    return float((difference / sum(e.double().square().sum() for e in expected)).sqrt())


def _draw_images(model: nn.Module, size: tuple[int, int]) -> Tensor:
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        raise ConversionError(f"{type(model).__name__} has no convolution: vitinit converts CNNs")
    images = torch.randn(2, first.in_channels, *size, generator=torch.Generator().manual_seed(0))
    return images.to(first.weight)


def _outputs(output: Tensor | Iterable) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, Iterable) or isinstance(output, str):  # None, a flag
        return []
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in _outputs(part)]


def _trace(model: nn.Module, images: Tensor) -> list[_TracedConv]:
    """Convolutions in the order in which one forward pass calls them, with the sizes that they saw."""
    traced = {
        module: _TracedConv(name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)
    }
    order: dict[nn.Module, None] = {}

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        order[module] = None
        traced[module].in_sizes.append(tuple(inputs[0].shape[-2:]))
        traced[module].out_sizes.append(tuple(output.shape[-2:]))

    hooks = [module.register_forward_hook(record) for module in traced]
    try:
        model(images)
    except Exception as error:
        height, width = images.shape[-2:]
        raise ConversionError(
            f"{type(model).__name__} does not take images of {height}x{width} pixels ({error}): "
            "pass an img_size that it does"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return [traced[m] for m in order] + [c for m, c in traced.items() if m not in order]


def _choose(traced: list[_TracedConv], stages: int | Sequence[str] | None, size: tuple[int, int]) -> set[str]:
    """Names of the convolutions in the chosen stages."""
    called = [conv for conv in traced if conv.out_sizes]
    if isinstance(stages, str):
        stages = [stages]
    if isinstance(stages, Sequence):
        chosen = {c.name for c in traced for s in stages if c.name == s or c.name.startswith(f"{s}.")}
        for stage in stages:
            if not any(name == stage or name.startswith(f"{stage}.") for name in chosen):
                known = ", ".join(sorted({c.name.split(".")[0] for c in traced}))
                raise ConversionError(f"no convolution lies in stage {stage!r}: expected module names such as {known}")
        return chosen
    spatial = [conv for conv in called if isinstance(conv.module, nn.Conv2d) and _is_spatial(conv.module)]
    grids = list(dict.fromkeys(conv.out_sizes[0] for conv in spatial))  # one stage each, in order
    if stages is None:
        coarse = [grid for grid in grids if size[0] >= 8 * grid[0]]
        grids = coarse if len(coarse) >= 2 else grids[-2:]
    elif not 1 <= stages <= len(grids):
        raise ConversionError(f"stages={stages}: this network has {len(grids)} stages of KxK convolutions at this size")
    else:
        grids = grids[-stages:]
    return {conv.name for conv in called if conv.out_sizes[0] in grids}


def _is_spatial(module: nn.Module) -> bool:
    return max(module.kernel_size) > 1


def _reason_to_keep(conv: _TracedConv, chosen: bool) -> str | None:
    """Why a convolution stays, or None where it can be attention."""
    module = conv.module
    if isinstance(module, nn.ConvTranspose2d):
        return "transposed convolution"
    if not _is_spatial(module):
        return "1x1: already a linear map of each pixel"
    if not conv.in_sizes:
        return "never called as a module in a forward pass"
    if not chosen:
        return "outside the chosen stages"
    if len(set(conv.in_sizes)) > 1:
        return f"called with {len(set(conv.in_sizes))} image sizes"
    if module.padding_mode != "zeros":
        return f"padding mode {module.padding_mode!r}: only zeros are attention on the zero-padded plane"
    if type(module).forward not in (nn.Conv2d.forward, Conv2dSame.forward):
        return f"{type(module).__name__} computes something else than nn.Conv2d"
    return None


def _padding(module: nn.Conv2d, in_size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Zeros (top, bottom, left, right) that a convolution adds."""
    if isinstance(module, Conv2dSame):
        total = [
            get_same_padding(in_size[i], module.kernel_size[i], module.stride[i], module.dilation[i]) for i in (0, 1)
        ]
        return total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2
    left, right, top, bottom = module._reversed_padding_repeated_twice
    return top, bottom, left, right


def _place(conv: _TracedConv, patch: int | str, *, values: str, content_dim: int) -> ConvGeometry:
    """A convolution on patches of the given side, or of the side with the fewest multiply-adds."""
    module, in_size = conv.module, conv.in_sizes[0]

    def place(side: int) -> ConvGeometry:
        return ConvGeometry.build(
            in_size, kernel_size=module.kernel_size, stride=module.stride, dilation=module.dilation,
            padding=_padding(module, in_size), patch=(side, side),
        )  # fmt: skip

    def cost(geometry: ConvGeometry) -> int:
        channels = {"in_channels": module.in_channels, "out_channels": module.out_channels, "groups": module.groups}
        # The exact plan even where the rank is capped: a cap would favour huge patches, whose kernels it ruins most.
        ranks = plan_ranks(geometry, **channels) if values == "factorized" else None
        return count_macs(geometry, **channels, content_dim=content_dim, ranks=ranks)

    if patch != "auto":
        return place(patch)
    grids = (*in_size, *conv.out_sizes[0])
    return min((place(p) for p in range(1, MAX_AUTO_PATCH + 1) if not any(n % p for n in grids)), key=cost)


def _build(
    conv: _TracedConv, geometry: ConvGeometry, *, alpha: float, weights: str, values: str, rank: int | None,
    content_dim: int,
) -> AttentionConv2d:  # fmt: skip
    """The attention layer that is to compute a convolution, its weights not yet loaded."""
    module = conv.module
    return AttentionConv2d(
        module.in_channels, module.out_channels, module.kernel_size, in_size=geometry.in_size, stride=module.stride,
        padding=_padding(module, geometry.in_size), dilation=module.dilation, groups=module.groups,
        bias=module.bias is not None, patch=geometry.patch, alpha=alpha, weights=weights, values=values, rank=rank,
        content_dim=content_dim, dtype=module.weight.dtype,
    )  # fmt: skip


def _describe(
    conv: _TracedConv, *, reason: str | None = None, layer: AttentionConv2d | None = None, energy: float = 1.0
) -> LayerReport:
    module = conv.module
    out_size = conv.out_sizes[0] if conv.out_sizes else (0, 0)
    row = LayerReport(
        name=conv.name, kernel=tuple(module.kernel_size), stride=tuple(module.stride), groups=module.groups,
        channels=(module.in_channels, module.out_channels), grid=out_size, reason=reason,
        params_before=sum(p.numel() for p in module.parameters()),
        macs_before=module.weight.numel() * out_size[0] * out_size[1],
    )  # fmt: skip
    if layer is None:
        row.params_after, row.macs_after = row.params_before, row.macs_before
        return row
    row.patch, row.heads, row.tokens = layer.geometry.patch, layer.geometry.heads, layer.geometry.n_queries
    row.sharpness = alpha_to_sharpness(layer.attention.alpha, layer.geometry.table_size)
    row.params_after, row.macs_after = sum(p.numel() for p in layer.parameters()), layer.count_macs()
    row.energy = energy
    return row


def _measure_layers(
    model: nn.Module, replacements: dict[str, AttentionConv2d], images: Tensor, report: ConversionReport
) -> list[Tensor]:
    """Logits of the CNN; on the way, the error of each attention layer on its convolution's own input."""
    rows = {row.name: row for row in report.layers}

    def compare(name: str):
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            rows[name].error = relative_error([replacements[name](inputs[0])], [output])

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(compare(name)) for name in replacements]
    try:
        return _outputs(model(images))
    finally:
        for hook in hooks:
            hook.remove()
