"""Replace the convolutions of a CNN by attention layers that compute the same function."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from vitinit.attention.conv import AttentionConv2d
from vitinit.attention.kernels import count_macs
from vitinit.construction import plan_ranks
from vitinit.errors import ConstructionError, ConversionError
from vitinit.positions import ConvGeometry, alpha_to_sharpness, sharpness_to_alpha
from vitinit.report import ConversionReport, LayerReport, group_by_reason
from vitinit.trace import Convolution, TracedLayer, read_convolution, trace_convolutions

MAX_AUTO_PATCH = 8
MIN_AUTO_TOKENS = 4  # a side: patches leave that much to attend to
# Up to so many pairs of an output and an input pixel attention is global by itself: a 16x16 grid behind a stride of 2.
MAX_AUTO_PAIRS = 2**18
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@torch.no_grad()
def convert(
    cnn: nn.Module,
    *,
    img_size: int | tuple[int, int],
    stages: int | Sequence[str] | None = None,
    max_grid: int | None = None,
    sharpness: float = 0.9,
    alpha: float | None = None,
    patch: int | str = "auto",
    span: str = "auto",
    values: str = "identity",
    rank: int | None = None,
    weights: str = "tied",
    content_dim: int = 0,
    tolerance: float | None = None,
) -> tuple[nn.Module, ConversionReport]:
    """A copy of a CNN whose chosen KxK convolutions are attention layers, and a report; same logits.

    Batch norms (statistics included), activations, pools and 1x1 convolutions stay as they are, and so does
    the CNN that was passed in. A subclass of `nn.Conv2d` is taken for what it computes: "same" padding is zeros on
    two sides, and standardized weights become the attention's own, from then on without the standardization.

    Args:
        cnn: Any network of `nn.Conv2d` layers that takes one image batch (B, C, height, width).
        img_size: Side, or (height, width), in pixels of the images that the network will see.
        stages: Which convolutions: a number n for the last n stages (a stage is what shares an output grid), a
            list of module names ("layer3", "layer4.0.conv1"), or None for the stages at stride 8 and coarser,
            and at least the last two.
        max_grid: In place of `stages`: every convolution whose output has at most this side, in pixels.
        sharpness: Attention mass p of each head on its own offset at the start.
        alpha: The bias itself in place of `sharpness`.
        patch: Side of the square patches that make a token, or "auto" for the fewest multiply-adds that leave
            4x4 tokens.
        span: "global", heads see the whole image; "local", the window that the kernel reaches, whose cost grows with
            k^2 N instead of N^2; "auto", global where a map stays small (16x16 pixels behind a stride of 2), and
            beyond that whichever needs fewer multiply-adds.
        values: "identity" (a head carries the whole token) or "factorized" (a product of low rank).
        rank: Largest rank of a factorized head. Below the exact plan the logits differ, so pass a `tolerance`.
        weights: "tied" (the kernels stay the parameters) or "free" (each head has weights of its own).
        content_dim: Width of queries and keys; 0 leaves content off.
        tolerance: Largest relative error of the logits and of each layer; by default 1e-9 in float64, 1e-4 in float32,
            1e-2 in float16 and 5e-2 in bfloat16.

    Returns:
        The converted network in the CNN's own mode, and its `ConversionReport`.

    Raises:
        ConversionError: Nothing to convert, a named layer that cannot be, an image size that the network does
            not take, a difference of more than the tolerance, or a network that cannot be copied.
        ConstructionError: A setting outside its range.
    """
    size = _check_arguments(cnn, img_size, stages, max_grid, patch, span)
    for key, value in {"sharpness": sharpness, "alpha": alpha, "tolerance": tolerance}.items():
        if value is not None and not isinstance(value, int | float):
            raise ConstructionError(f"{key}={value!r}: expected a number")
    if tolerance is not None and not tolerance >= 0:
        raise ConstructionError(f"tolerance={tolerance!r}: expected a relative error of at least 0, such as 1e-4")
    model = copy_network(cnn).eval()
    layers, example = _trace(model, size)
    chosen = _choose(layers, stages, max_grid, size)
    report = ConversionReport(img_size=size)
    replacements: dict[str, AttentionConv2d] = {}
    for layer in layers:
        try:
            if layer.name not in chosen and max_grid is not None and layer.out_sizes and layer.is_spatial:
                raise ConversionError(f"its grid is larger than {max_grid}x{max_grid} pixels")
            conv, geometry = _place(layer, layer.name in chosen, patch, span, values=values, content_dim=content_dim)
        except (ConversionError, ConstructionError) as error:
            if isinstance(stages, Sequence) and not isinstance(stages, str) and layer.name in stages:
                raise ConversionError(f"cannot convert {layer.name}: {error}") from error
            report.layers.append(_describe(layer, reason=str(error)))
            continue
        with torch.random.fork_rng(devices=[]):  # the keys of silent content are random; the caller's draws are not
            attention = _build(
                conv, geometry, alpha=sharpness_to_alpha(sharpness, geometry.table_size) if alpha is None else alpha,
                weights=weights, values=values, rank=rank, content_dim=content_dim,
            )  # fmt: skip
        energy = attention.load_kernel(conv.weight, conv.bias)
        attention.requires_grad_(layer.module.weight.requires_grad)  # a frozen convolution stays frozen
        replacements[layer.name] = attention.to(conv.weight.device)
        report.layers.append(_describe(layer, attention=attention, energy=energy))
    if not replacements:
        spatial = [row for row in report.layers if max(row.kernel) > 1] or report.layers
        rows = [row for row in spatial if row.name in chosen] or spatial
        reasons = "; ".join(f"{names}: {reason}" for reason, names in group_by_reason(rows).items())
        raise ConversionError(f"no convolution of {type(cnn).__name__} can be converted: {reasons}")

    logits = _measure_layers(model, replacements, example, report)
    for layer in layers:
        for name in layer.names if layer.name in replacements else ():  # one module may have several places
            if name:
                model.set_submodule(name, replacements[layer.name])
            else:  # the CNN is one convolution
                model = replacements[layer.name]
    report.params_before = sum(p.numel() for p in cnn.parameters())
    report.params_after = sum(p.numel() for p in model.parameters())
    report.logits_error = relative_error(_outputs(model(example)), logits)
    report.tolerance = tolerance if tolerance is not None else TOLERANCES.get(example.dtype, 1e-4)
    # Layers too: random weights of many networks silence a branch, and nothing of it shows in the logits.
    errors = [report.logits_error, *(row.error for row in report.converted)]
    if not all(error <= report.tolerance for error in errors):  # also catches nan
        worst = max(report.converted, key=lambda row: row.error)
        raise ConversionError(
            f"the converted network differs from the CNN by more than the tolerance {report.tolerance:.0e}: its logits "
            f"by {report.logits_error:.2e}; worst layer {worst.name} with {worst.error:.2e}"
            + (f" and {worst.energy:.1%} of its kernel kept: raise rank, or pass tolerance" if rank else "")
        )
    return model.train(cnn.training), report


def copy_network(model: nn.Module) -> nn.Module:
    """A deep copy.

    Raises:
        ConversionError: Weights without values yet, or computed ones, which PyTorch does not copy.
    """
    if any(tensor.is_meta or nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ConversionError(
            f"{type(model).__name__} has weights without values (on the meta device, or lazy): load its weights, or "
            "run it once, before it is converted"
        )
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever a module's own copying raises
        raise ConversionError(
            f"{type(model).__name__} cannot be copied ({error}): make computed weights plain ones, e.g. with "
            "torch.nn.utils.prune.remove or remove_weight_norm"
        ) from error


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
    """Norm of the difference over the norm of what was expected, over all tensors together; 0 for equal zeros."""
    difference = sum(float((g.double() - e.double()).square().sum()) for g, e in zip(got, expected, strict=True))
    norm = sum(float(e.double().square().sum()) for e in expected)
    return (difference / norm) ** 0.5 if norm else math.inf if difference else 0.0


def _check_arguments(
    cnn: object, img_size: object, stages: object, max_grid: object, patch: object, span: object
) -> tuple[int, int]:
    """(height, width) of the images; an error for arguments of the wrong kind."""
    size = check_network(cnn, img_size, caller="convert")
    if stages is not None and max_grid is not None:
        raise ConversionError(f"stages={stages!r} and max_grid={max_grid!r}: give one of them")
    if max_grid is not None and not _is_count(max_grid):
        raise ConversionError(f"max_grid={max_grid!r}: expected a side in pixels, at least 1")
    if patch != "auto" and not _is_count(patch):
        raise ConstructionError(f'patch={patch!r}: expected "auto" or a side of at least 1 pixel')
    if span not in ("auto", "global", "local"):
        raise ConstructionError(f'span={span!r}: expected "auto", "global" or "local"')
    return size


def check_network(cnn: object, img_size: object, *, caller: str) -> tuple[int, int]:
    """(height, width) of the images.

    Raises:
        ConversionError: No network, or no image size.
    """
    if not isinstance(cnn, nn.Module):
        raise ConversionError(
            f'{caller} takes an nn.Module and got {cnn!r}: load it first, e.g. timm.create_model("…")'
        )
    size = (img_size, img_size) if _is_count(img_size) else img_size
    if not isinstance(size, tuple | list) or len(size) != 2 or not all(_is_count(n) for n in size):
        raise ConversionError(f"img_size={img_size!r}: expected a side in pixels, or (height, width)")
    return tuple(size)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _trace(model: nn.Module, size: tuple[int, int]) -> tuple[list[TracedLayer], Tensor]:
    """The convolutions of a network, and random images that it takes."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        raise ConversionError(f"{type(model).__name__} has no convolution: vitinit converts CNNs")

    def draw(channels: int) -> Tensor:
        return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0)).to(first.weight)

    images = draw(first.in_channels)
    try:
        return trace_convolutions(model, images), images
    except ConversionError:
        if first.in_channels == 3:
            raise
        images = draw(3)  # the first convolution sees pixels folded into channels
        return trace_convolutions(model, images), images


def _outputs(output: Tensor | Iterable) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, Iterable) or isinstance(output, str):  # None, a flag
        return []
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in _outputs(part)]


def _choose(
    layers: list[TracedLayer], stages: int | Sequence[str] | None, max_grid: int | None, size: tuple[int, int]
) -> set[str]:
    """Names of the convolutions in the chosen stages."""
    if isinstance(stages, str):
        stages = [stages]
    if isinstance(stages, Sequence):
        chosen = {layer.name for layer in layers for s in stages if layer.name == s or layer.name.startswith(f"{s}.")}
        for stage in stages:
            if not any(name == stage or name.startswith(f"{stage}.") for name in chosen):
                known = ", ".join(sorted({layer.name.split(".")[0] for layer in layers}))
                raise ConversionError(f"no convolution lies in stage {stage!r}: expected module names such as {known}")
        return chosen
    called = [layer for layer in layers if layer.out_sizes]
    if max_grid is not None:
        return {layer.name for layer in called if max(layer.out_sizes[0]) <= max_grid}
    spatial = [r for r in called if r.is_spatial and isinstance(r.module, nn.Conv2d | AttentionConv2d)]
    grids = list(dict.fromkeys(layer.out_sizes[0] for layer in spatial))  # one stage each, in order
    if stages is None:
        coarse = [grid for grid in grids if size[0] >= 8 * grid[0]]
        grids = coarse if len(coarse) >= 2 else grids[-2:]
    elif not 1 <= stages <= len(grids):
        raise ConversionError(f"stages={stages}: this network has {len(grids)} stages of KxK convolutions at this size")
    else:
        grids = grids[-stages:]
    return {layer.name for layer in called if layer.out_sizes[0] in grids}


def _place(
    layer: TracedLayer, chosen: bool, patch: int | str, span: str, *, values: str, content_dim: int
) -> tuple[Convolution, ConvGeometry]:
    """What a layer computes and its heads' layout: the span and patch asked for, or those of fewest multiply-adds.

    Raises:
        ConversionError: The layer stays a convolution; the message is the reason.
        ConstructionError: A patch that does not divide its grid.
    """
    if layer.reason is not None:
        raise ConversionError(layer.reason)
    if not layer.is_spatial:
        raise ConversionError("1x1: already a linear map of each pixel")
    if not layer.in_sizes:
        raise ConversionError("never called as a module in a forward pass")
    if not chosen:
        raise ConversionError("outside the chosen stages")
    if len(set(layer.in_sizes)) > 1:
        raise ConversionError(f"called with {len(set(layer.in_sizes))} image sizes")
    in_size, out_size = layer.in_sizes[0], layer.out_sizes[0]
    conv = read_convolution(layer.module, in_size)

    def place(side: int, span: str) -> ConvGeometry:
        return ConvGeometry.build(
            in_size, kernel_size=layer.kernel, stride=conv.stride, dilation=conv.dilation, padding=conv.padding,
            patch=(side, side), span=span,
        )  # fmt: skip

    def cost(geometry: ConvGeometry) -> int:
        (in_channels, out_channels), groups = layer.channels, conv.groups
        # The exact plan even where the rank is capped: a cap would favour huge patches, whose kernels it ruins most.
        ranks = None
        if values == "factorized":
            ranks = plan_ranks(geometry, in_channels=in_channels, out_channels=out_channels, groups=groups)
        width_in, width_out = (c * math.prod(geometry.patch) for c in layer.channels)
        mixes = [(geometry.heads, width_out, groups, ranks)]
        return count_macs(geometry, width=width_in, mixes=mixes, content_dim=content_dim)

    sides = [patch]
    if patch == "auto":
        fits = [p for p in range(2, MAX_AUTO_PATCH + 1) if not any(n % p for n in (*in_size, *out_size))]
        sides = [1, *(p for p in fits if min(out_size) >= MIN_AUTO_TOKENS * p)]
    spans = [span]
    if span == "auto":
        spans = ["global"] if math.prod(in_size) * math.prod(out_size) <= MAX_AUTO_PAIRS else ["global", "local"]
    # A window of one offset has nothing to attend to.
    places = [place(side, name) for name in spans for side in sides]
    return conv, min((p for p in places if p.table_size > 1), key=cost, default=places[0])


def _build(
    conv: Convolution, geometry: ConvGeometry, *, alpha: float, weights: str, values: str, rank: int | None,
    content_dim: int,
) -> AttentionConv2d:  # fmt: skip
    """The attention layer that is to compute a convolution, its weights not yet loaded."""
    out_channels, width, *kernel_size = conv.weight.shape
    return AttentionConv2d(
        width * conv.groups, out_channels, tuple(kernel_size), in_size=geometry.in_size, stride=conv.stride,
        padding=conv.padding, dilation=conv.dilation, groups=conv.groups, bias=conv.bias is not None,
        patch=geometry.patch, span=geometry.span, alpha=alpha, weights=weights, values=values, rank=rank,
        content_dim=content_dim, dtype=conv.weight.dtype,
    )  # fmt: skip


def _describe(
    layer: TracedLayer, *, reason: str | None = None, attention: AttentionConv2d | None = None, energy: float = 1.0
) -> LayerReport:
    out_size = layer.out_sizes[0] if layer.out_sizes else (0, 0)
    macs = math.prod(layer.kernel) * layer.channels[0] * layer.channels[1] // layer.groups * math.prod(out_size)
    if isinstance(layer.module, AttentionConv2d):
        macs = layer.module.count_macs()
    row = LayerReport(
        name=layer.name, kernel=layer.kernel, stride=layer.stride, groups=layer.groups, channels=layer.channels,
        grid=out_size, reason=reason, macs_before=macs, params_before=sum(p.numel() for p in layer.module.parameters()),
    )  # fmt: skip
    if attention is None:
        row.params_after, row.macs_after = row.params_before, row.macs_before
        return row
    geometry = attention.geometry
    row.patch, row.heads, row.tokens, row.span = geometry.patch, geometry.heads, geometry.n_queries, geometry.span
    row.sharpness = alpha_to_sharpness(attention.attention.alpha, geometry.table_size)
    row.params_after, row.macs_after = sum(p.numel() for p in attention.parameters()), attention.count_macs()
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
