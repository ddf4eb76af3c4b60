"""Residual CNNs of timm read as steps: the convolutions, norms and activations of each block, in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from timm.layers import GELU, BatchNormAct2d, GELUTanh
from timm.models.byobnet import ByobNet, RepVggBlock
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from vitinit.errors import ConversionError
from vitinit.resnet_cifar import FixedBatchNorm2d

SYMMETRIC = {  # act(x) - act(-x) = x
    nn.ReLU: nn.ReLU, nn.ReLU6: nn.ReLU,  # which is two ReLUs
    nn.GELU: nn.GELU, GELU: nn.GELU, GELUTanh: partial(nn.GELU, approximate="tanh"), nn.SiLU: nn.SiLU,
    nn.Hardswish: nn.Hardswish,
}  # fmt: skip
NORMS = (nn.BatchNorm2d, FixedBatchNorm2d, BatchNormAct2d)


@dataclass(frozen=True)
class Layer:
    """A convolution and its batch norm, from one part of the stream onto a part of it.

    Attributes:
        target: "u" or "p".
        conv: The convolution.
        norm: The norm behind it; None for none.
        pool: Side of the average pooling before a 1x1 convolution, and its stride; None for none.
        drop_path: Rate at which the whole branch is dropped in training.
    """

    target: str
    conv: nn.Module
    norm: nn.Module | None
    pool: int | None = None
    drop_path: float = 0.0


@dataclass(frozen=True)
class Step:
    """What one block does: convolutions of `source`, what stays of u, and the activation of `active`."""

    source: str
    layers: list[Layer]
    keeps_u: bool
    active: str
    act: nn.Module


def read_stages(cnn: nn.Module) -> tuple[list[nn.Module], list[nn.Module], nn.Module]:
    """The stem's modules, the stages and the classifier of a CNN.

    Raises:
        ConversionError: A network, or a block of it, that a plain ViT cannot hold; the message is the reason.
    """
    if isinstance(cnn, ResNet):
        stem = [cnn.conv1, cnn.bn1, cnn.act1, cnn.maxpool]
        stages = [stage for stage in (cnn.layer1, cnn.layer2, cnn.layer3, cnn.layer4) if len(stage)]
        pool, head = cnn.global_pool, cnn.fc
    elif isinstance(cnn, ByobNet) and all(isinstance(b, RepVggBlock) for stage in cnn.stages for b in stage):
        stem, stages = [cnn.stem], list(cnn.stages)
        if not isinstance(cnn.final_conv, nn.Identity):
            raise ConversionError("a last convolution behind the stages")
        pool, head = cnn.head.global_pool, cnn.head.fc
    else:
        raise ConversionError(
            f"{type(cnn).__name__} is no network that a plain ViT can hold: expected timm's ResNet family (basic or "
            "bottleneck blocks) or RepVGG; vitinit.convert takes every CNN"
        )
    if getattr(pool, "pool_type", "") not in ("avg", "fast"):
        raise ConversionError(f"global pooling {getattr(pool, 'pool_type', pool)!r}: expected the mean")
    if not isinstance(head, nn.Linear | nn.Identity):
        raise ConversionError(f"classifier {type(head).__name__}: expected a linear one")
    return stem, stages, head


def read_block(block: nn.Module, name: str) -> list[Step]:
    """The steps of one block of a CNN, in order.

    Raises:
        ConversionError: A part that a plain ViT cannot hold.
    """
    if isinstance(block, RepVggBlock):
        return [_read_repvgg(block, name)]
    if not isinstance(block, BasicBlock | Bottleneck):
        raise ConversionError(f"{name}: a {type(block).__name__}, expected basic, bottleneck or RepVGG blocks")
    if block.se is not None:
        raise ConversionError(f"{name}: {type(block.se).__name__}, whose weights depend on the whole image")
    if not isinstance(block.aa, nn.Identity):
        raise ConversionError(f"{name}: blur pooling between its convolutions")
    if not isinstance(block.drop_block, nn.Identity):
        raise ConversionError(f"{name}: DropBlock")
    count = 2 if isinstance(block, BasicBlock) else 3
    convs = [(getattr(block, f"conv{i}"), getattr(block, f"bn{i}")) for i in range(1, count + 1)]
    acts = [getattr(block, f"act{i}") for i in range(1, count + 1)]
    drop_path = getattr(block.drop_path, "drop_prob", 0.0) or 0.0
    shortcut = [] if block.downsample is None else [_read_shortcut(block.downsample, name)]
    first = [Layer("p", *convs[0]), *shortcut]
    steps = [Step("u", first, not shortcut, "p", acts[0])]
    if count == 3:
        steps.append(Step("p", [Layer("p", *convs[1])], True, "p", acts[1]))
    steps.append(Step("p", [Layer("u", *convs[-1], drop_path=drop_path)], True, "u", acts[-1]))
    return steps


def _read_shortcut(downsample: nn.Module, name: str) -> Layer:
    parts = [part for part in downsample if not isinstance(part, nn.Identity)]
    pool = None
    if isinstance(parts[0], nn.AvgPool2d):
        pool, *parts = parts
        sides = {pool.kernel_size, pool.stride} if isinstance(pool.kernel_size, int) else {pool.kernel_size}
        if type(pool) is not nn.AvgPool2d or len(sides) != 1 or pool.padding or pool.divisor_override:
            raise ConversionError(f"{name}: a shortcut by {pool}, expected average pooling without overlap")
    if len(parts) != 2 or not isinstance(parts[0], nn.Conv2d):
        raise ConversionError(f"{name}: a shortcut of {', '.join(type(part).__name__ for part in downsample)}")
    return Layer("u", parts[0], parts[1], pool=pool and pool.kernel_size)


def _read_repvgg(block: RepVggBlock, name: str) -> Step:
    if not isinstance(block.attn, nn.Identity):
        raise ConversionError(f"{name}: {type(block.attn).__name__}, whose weights depend on the whole image")
    if block.reparam_conv is not None:
        return Step("u", [Layer("u", block.reparam_conv, None)], False, "u", block.act)
    drop_path = getattr(block.drop_path, "drop_prob", 0.0) or 0.0
    if drop_path:
        raise ConversionError(f"{name}: stochastic depth over two branches at once: build the CNN without drop_path")
    layers = [Layer("u", branch.conv, branch.bn) for branch in (block.conv_kxk, block.conv_1x1)]
    if block.identity is not None:
        channels = block.identity.num_features
        same = nn.Conv2d(channels, channels, 1, groups=channels, bias=False).requires_grad_(False)
        same = same.to(block.identity.weight)
        nn.init.ones_(same.weight)
        layers.append(Layer("u", same, block.identity))
    return Step("u", layers, False, "u", block.act)


def check_layer(layer: Layer, act: nn.Module, name: str) -> None:
    """Raise a ConversionError where a norm or an activation has no counterpart in a transformer block."""
    norm = layer.norm
    if norm is not None and not isinstance(norm, NORMS):
        raise ConversionError(f"{name}: a {type(norm).__name__}, expected batch norms")
    if isinstance(norm, BatchNormAct2d) and not (
        isinstance(norm.act, nn.Identity) and isinstance(norm.drop, nn.Identity)
    ):
        raise ConversionError(f"{name}: an activation inside the norm")
    if norm is not None and not isinstance(norm, FixedBatchNorm2d) and norm.running_mean is None:
        raise ConversionError(f"{name}: a batch norm without running statistics")
    if type(act) not in SYMMETRIC:
        known = ", ".join(kind.__name__ for kind in SYMMETRIC)
        raise ConversionError(
            f"{name}: {type(act).__name__}; an MLP activates in place where act(x) - act(-x) = x: {known}"
        )
