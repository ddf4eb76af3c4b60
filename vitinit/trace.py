"""Find the convolutions of a network by watching one forward pass: what each of them computes, and on which grid."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitinit.attention.conv import AttentionConv2d
from vitinit.errors import ConversionError


@dataclass(frozen=True)
class Convolution:
    """What a layer computes: the arguments of `F.conv2d`, padding written as zeros (top, bottom, left, right)."""

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int


@dataclass
class TracedLayer:
    """A convolution that a forward pass called, or could have called.

    Attributes:
        names: Every name of the module in the network; the first one names it in reports.
        module: What makes the call.
        conv: What it computes, where it is a convolution of its input with fixed weights and zero padding.
        reason: Why it is not, where it is not.
        kernel: (Kh, Kw).
        channels: (C_in, C_out).
        stride: Per axis.
        groups: G.
        in_sizes: (height, width) of the input of each call.
        out_sizes: (height, width) of the output of each call.
    """

    names: list[str]
    module: nn.Module
    kernel: tuple[int, int]
    channels: tuple[int, int]
    stride: tuple[int, int]
    groups: int
    conv: Convolution | None = None
    reason: str | None = None
    in_sizes: list[tuple[int, int]] = field(default_factory=list)
    out_sizes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the layer in reports."""
        return self.names[0]

    @property
    def is_spatial(self) -> bool:
        """Whether it looks at more than one pixel."""
        return max(self.kernel) > 1


@torch.no_grad()
def trace_convolutions(model: nn.Module, images: Tensor) -> list[TracedLayer]:
    """The 2-D convolutions of a network in the order in which a forward pass of these images calls them.

    Modules that call `F.conv2d` without being an `nn.Conv2d` are among them, with the reason why they stay; so are
    attention layers of an earlier conversion, and, last, convolutions that the pass never called.

    Raises:
        ConversionError: The forward pass failed.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    layers: dict[nn.Module, TracedLayer] = {}
    running: list[nn.Module] = []
    known = (nn.Conv2d, nn.ConvTranspose2d, AttentionConv2d)

    def enter(module: nn.Module, _: tuple) -> None:
        running.append(module)

    def leave(module: nn.Module, inputs: tuple, output: object) -> None:
        running.pop()
        if isinstance(module, known):
            layer = layers.setdefault(module, _describe_module(names[module], module))
            layer.in_sizes.append(tuple(inputs[0].shape[-2:]))
            layer.out_sizes.append(tuple(output.shape[-2:]))

    def called(arguments: dict, output: Tensor) -> None:
        caller = running[-1] if running else model
        if any(isinstance(module, known) for module in running):
            return
        layer = layers.setdefault(caller, _describe_call(names[caller], caller, arguments))
        layer.in_sizes.append(tuple(arguments["input"].shape[-2:]))
        layer.out_sizes.append(tuple(output.shape[-2:]))

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    try:
        with _WatchConvolutions(called):
            model(images)
    except Exception as error:
        height, width = images.shape[-2:]
        raise ConversionError(
            f"{type(model).__name__} failed on images of {height}x{width} pixels ({type(error).__name__}: {error}): "
            "pass an img_size that it takes"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    for module in names:
        if isinstance(module, known) and module not in layers:
            layers[module] = _describe_module(names[module], module)
    return list(layers.values())


def _describe_module(names: list[str], module: nn.Conv2d | nn.ConvTranspose2d | AttentionConv2d) -> TracedLayer:
    if isinstance(module, AttentionConv2d):
        spec = module.spec
        return TracedLayer(
            names, module, tuple(spec["kernel_size"]), (spec["in_channels"], spec["out_channels"]),
            tuple(spec["stride"]), spec["groups"], reason="already attention",
        )  # fmt: skip
    layer = TracedLayer(
        names, module, tuple(module.kernel_size), (module.in_channels, module.out_channels), tuple(module.stride),
        module.groups,
    )  # fmt: skip
    if isinstance(module, nn.ConvTranspose2d):
        layer.reason = "transposed convolution"
    return layer


def _describe_call(names: list[str], module: nn.Module, arguments: dict) -> TracedLayer:
    weight, groups = arguments["weight"], arguments["groups"]
    own = any(weight is tensor for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)])
    kind = "calls F.conv2d itself" if own else "is a dynamic convolution: its kernel is computed in the forward pass"
    return TracedLayer(
        names, module, tuple(weight.shape[-2:]), (weight.shape[1] * groups, len(weight)), _pair(arguments["stride"]),
        groups, reason=f"{type(module).__name__} {kind}",
    )  # fmt: skip


def read_convolution(module: nn.Conv2d, in_size: tuple[int, int]) -> Convolution:
    """What an `nn.Conv2d` computes on inputs of one size, read from its attributes or, for a subclass with a forward
    pass of its own (weight standardization, "same" padding), from the call of `F.conv2d` that it makes.

    Raises:
        ConversionError: It is no convolution with fixed weights and zero padding.
    """
    if module.padding_mode != "zeros":
        raise ConversionError(
            f"padding mode {module.padding_mode!r}: only zeros are attention on the zero-padded plane"
        )
    kind = type(module)
    if kind.forward is nn.Conv2d.forward and kind._conv_forward is nn.Conv2d._conv_forward:
        left, right, top, bottom = module._reversed_padding_repeated_twice
        return Convolution(
            module.weight, module.bias, module.stride, (top, bottom, left, right), module.dilation, module.groups
        )
    generator = torch.Generator().manual_seed(0)
    first, second = (_observe(module, in_size, generator) for _ in range(2))
    if not torch.equal(first.weight, second.weight):
        raise ConversionError(f"{kind.__name__} is a dynamic convolution: its kernel depends on the image")
    return first


def _observe(module: nn.Conv2d, in_size: tuple[int, int], generator: torch.Generator) -> Convolution:
    kind, calls = type(module).__name__, []
    image = torch.randn(2, module.in_channels, *in_size, generator=generator).to(module.weight)
    with _WatchConvolutions(lambda arguments, output: calls.append((arguments, output))):
        result = module(image)
    if len(calls) != 1 or not torch.equal(calls[0][1], result):
        raise ConversionError(f"{kind} computes something else than one convolution")
    arguments = calls[0][0]
    margins = _find_margins(image, arguments["input"])
    if margins is None:
        raise ConversionError(f"{kind} changes its input before it convolves")
    inner = _normalize_padding(arguments)
    return Convolution(
        arguments["weight"], arguments["bias"], _pair(arguments["stride"]),
        tuple(a + b for a, b in zip(margins, inner, strict=True)), _pair(arguments["dilation"]), arguments["groups"],
    )  # fmt: skip


def _find_margins(image: Tensor, padded: Tensor) -> tuple[int, int, int, int] | None:
    """Zeros (top, bottom, left, right) around an image; None where something else was done to it."""
    rows, columns = (padded.shape[i] - image.shape[i] for i in (-2, -1))
    for top in range(rows + 1):
        for left in range(columns + 1):
            margins = top, rows - top, left, columns - left
            if torch.equal(F.pad(image, (left, columns - left, top, rows - top)), padded):
                return margins
    return None


def _normalize_padding(arguments: dict) -> tuple[int, int, int, int]:
    padding = arguments["padding"]
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(_pair(arguments["dilation"]), arguments["weight"].shape[-2:], strict=True)]
        return reach[0] // 2, reach[0] - reach[0] // 2, reach[1] // 2, reach[1] - reach[1] // 2
    rows, columns = (0, 0) if padding == "valid" else _pair(padding)
    return rows, rows, columns, columns


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return tuple(value) * 2 if len(value) == 1 else tuple(value)


class _WatchConvolutions(TorchFunctionMode):
    """Hands the arguments and the output of each call of `F.conv2d` to a function."""

    _NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    _DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}  # noqa: RUF012

    def __init__(self, called):  # noqa: ANN001
        super().__init__()
        self.called = called

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        output = func(*args, **(kwargs or {}))
        if func is F.conv2d:
            self.called(self._DEFAULTS | dict(zip(self._NAMES, args, strict=False)) | (kwargs or {}), output)
        return output
