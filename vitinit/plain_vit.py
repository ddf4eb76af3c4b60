"""A residual CNN as a plain vision transformer: stem, identical blocks on one token grid, mean pool, linear head.

The token stream has two parts: u, the CNN's features, and p, scratch for what lies between two convolutions of a
residual block. One convolution is one block,

    x <- keep * x + norm(attention(x)),      x <- x + MLP(x),

whose norm is the CNN's own and whose MLP activates in place: p + act(-p) = act(p) for every activation with
act(x) - act(-x) = x (ReLU, GELU, SiLU, Hardswish), so W_1 = -I and W_2 = I on the channels to activate.

A feature map of another size than the token grid is held as patches where it is finer, and on every d-th token where
it is coarser; its convolutions are then dilated by d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from timm.layers import GELU, BatchNormAct2d, GELUTanh, Mlp
from timm.models.byobnet import ByobNet, RepVggBlock
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from vitinit.attention.heads import HeadWeights
from vitinit.attention.table import TableAttention, read_leak
from vitinit.convert import TOLERANCES, copy_network, relative_error
from vitinit.errors import ConstructionError, ConversionError
from vitinit.positions import ConvGeometry, sharpness_to_alpha
from vitinit.resnet_cifar import FixedBatchNorm2d
from vitinit.trace import Convolution, read_convolution
from vitinit.vit import Block, Branch, ChannelAffine, RelPosViT, Slice, TokenBatchNorm

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


@dataclass(frozen=True)
class Layout:
    """How a feature map lies in the stream: `patch` pixels a token, or on every `step`-th token, per axis."""

    channels: int
    size: tuple[int, int]
    patch: tuple[int, int]
    step: tuple[int, int]

    @property
    def width(self) -> int:
        """Channels of the stream."""
        return self.channels * math.prod(self.patch)


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


def read_stages(cnn: nn.Module) -> tuple[list[nn.Module], list[list[list[Step]]], nn.Module]:
    """The stem's modules, the steps of every block of every stage, and the classifier of a CNN.

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


def _check_layer(layer: Layer, act: nn.Module, name: str) -> None:
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


class _Planner:
    """Lays out the stream and builds the blocks, one step after another."""

    def __init__(self, grid: tuple[int, int], settings: dict, dtype: torch.dtype):
        self.grid, self.settings, self.dtype = grid, settings, dtype
        self.planned: list[tuple[str, Step, dict[str, Layout], list[tuple[Convolution, ConvGeometry, Layout]]]] = []

    def hold(self, channels: int, size: tuple[int, int]) -> Layout:
        """The layout of a feature map.

        Raises:
            ConversionError: A size that the token grid does not divide.
        """
        patch, step = [], []
        for side, tokens in zip(size, self.grid, strict=True):
            finer = side >= tokens
            scale = side // tokens if finer else -(-tokens // side)
            if (side != tokens * scale) if finer else (side != -(-tokens // scale)):
                raise ConversionError(
                    f"a feature map of {size[0]}x{size[1]} pixels does not fit a grid of {self.grid[0]}x{self.grid[1]} "
                    "tokens: use an image size whose feature maps divide each other, or another grid"
                )
            patch.append(scale if finer else 1)
            step.append(1 if finer else scale)
        return Layout(channels, size, tuple(patch), tuple(step))

    def add(self, name: str, step: Step, state: dict[str, Layout]) -> dict[str, Layout]:
        """Plan a step on the maps that the stream holds; returns the maps behind it."""
        source = state[step.source]
        placed, after = [], dict(state)
        for layer in step.layers:
            _check_layer(layer, step.act, name)
            conv = read_convolution(layer.conv, source.size)
            if layer.pool:
                conv = replace(conv, stride=(layer.pool, layer.pool))
            geometry, target = self._place(conv, source, name, pool=layer.pool)
            placed.append((conv, geometry, target))
            after[layer.target] = target
        self.planned.append((name, step, {"source": source, **after}, placed))
        return after

    def _place(self, conv: Convolution, source: Layout, name: str, *, pool: int | None) -> tuple[ConvGeometry, Layout]:
        kernel = (pool, pool) if pool else tuple(conv.weight.shape[-2:])
        axes = []
        for i in range(2):
            before, after = conv.padding[2 * i], conv.padding[2 * i + 1]
            reach = conv.dilation[i] * (kernel[i] - 1)
            out = (source.size[i] + before + after - reach - 1) // conv.stride[i] + 1
            if pool and source.size[i] % pool:
                raise ConversionError(f"{name}: average pooling of {source.size[i]} pixels by {pool}")
            if source.step[i] > 1 or source.patch[i] == 1:  # on tokens: dilate, and let the lattice thin out
                d = source.step[i]
                axes.append((1, d * conv.dilation[i], d * before, d * (reach - before), 1, 1, out))
            else:
                if source.patch[i] % conv.stride[i]:
                    raise ConversionError(
                        f"{name}: a stride of {conv.stride[i]} on patches of {source.patch[i]} pixels: use another grid"
                    )
                to = source.patch[i] // conv.stride[i]
                axes.append((conv.stride[i], conv.dilation[i], before, after, to, source.patch[i], out))
        stride, dilation, before, after, patch, in_patch, out = zip(*axes, strict=True)
        target = self.hold(len(conv.weight), out)
        in_size = tuple(g * p for g, p in zip(self.grid, in_patch, strict=True))
        geometry = ConvGeometry.build(
            in_size, kernel_size=kernel, stride=stride, dilation=dilation,
            padding=(before[0], after[0], before[1], after[1]), patch=patch, in_patch=in_patch,
        )  # fmt: skip
        if geometry.query_grid != self.grid or target.patch != patch:
            raise ConversionError(f"{name}: its output of {out[0]}x{out[1]} pixels leaves the token grid")
        return geometry, target

    def build(self) -> tuple[list[Block], int]:
        """The blocks, with random weights, and the width of the stream."""
        layouts = [state for _, _, state, _ in self.planned]
        widths = {part: max([s[part].width for s in layouts if part in s], default=0) for part in ("u", "p")}
        first = layouts[0]["source"]
        widths["u"] = max(widths["u"], first.width)
        self.starts = {"u": 0, "p": widths["u"]}
        self.width = sum(widths.values())
        return [self._build_block(*plan) for plan in self.planned], self.width

    def _build_block(self, name: str, step: Step, state: dict, placed: list) -> Block:
        s, dtype = self.settings, self.dtype
        geometry = self._join([geometry for _, geometry, _ in placed], s["span"])
        alpha = s["alpha"] or sharpness_to_alpha(s["sharpness"], geometry.table_size)
        leak = read_leak(alpha, geometry)
        heads = {offset: i for i, offset in enumerate(geometry.offsets)}
        projections, branches = [], []
        for layer, (conv, own, target) in zip(step.layers, placed, strict=True):
            slots = [*(heads[offset] for offset in own.offsets), geometry.heads - 1]
            projections.append(HeadWeights(
                own, in_channels=conv.weight.shape[1] * conv.groups, out_channels=len(conv.weight), groups=conv.groups,
                leak=leak, slots=None if slots == list(range(geometry.heads)) else slots, bias=conv.bias is not None,
                weights=s["weights"], values=s["values"], rank=s["rank"], average=bool(layer.pool), dtype=dtype,
            ))  # fmt: skip
            norm = self._build_norm(layer.norm, target)
            start = self.starts[layer.target]
            branches.append(Branch(norm, start=start, width=self.width, drop_path=layer.drop_path))
        source = state["source"]
        start = self.starts[step.source]
        attention = TableAttention(
            geometry, projections, width=source.width, alpha=alpha, content_dim=s["content_dim"], dtype=dtype
        )
        active = state[step.active].width
        units = active * (2 if isinstance(step.act, nn.ReLU6) else 1) + s["spare_hidden"]
        mlp = Mlp(self.width, units, act_layer=SYMMETRIC[type(step.act)])
        if type(step.act) is nn.GELU:
            mlp.act = nn.GELU(approximate=step.act.approximate)
        block = Block(
            Slice(start, start + source.width), attention, branches, torch.ones(self.width, dtype=dtype), mlp.to(dtype)
        )
        for projection, (conv, *_) in zip(projections, placed, strict=True):
            if s["weights"] == "tied":
                projection.kernel.requires_grad_(conv.weight.requires_grad)
        block.reset_parameters()
        return block

    def _join(self, geometries: list[ConvGeometry], span: str) -> ConvGeometry:
        """One set of heads, on tokens, for all of them."""
        axes = []
        for axis in ("y", "x"):
            offsets = sorted({0}.union(*(getattr(geometry, axis).offsets for geometry in geometries)))
            gap = math.gcd(*offsets) or 1
            axes.append((gap, -offsets[0], offsets[-1], (offsets[-1] - offsets[0]) // gap + 1))
        gaps, before, after, kernel = zip(*axes, strict=True)
        return ConvGeometry.build(
            self.grid, kernel_size=kernel, dilation=gaps, padding=(before[0], after[0], before[1], after[1]), span=span
        )

    def _build_norm(self, norm: nn.Module | None, target: Layout) -> nn.Module:
        if norm is None:
            return nn.Identity()
        if isinstance(norm, FixedBatchNorm2d):
            return ChannelAffine(target.channels, dtype=self.dtype).requires_grad_(False)
        if self.settings["norm"] == "affine":
            return ChannelAffine(target.channels, dtype=self.dtype)
        tokens = None
        if max(target.step) > 1:
            index = torch.arange(math.prod(self.grid)).view(self.grid)
            tokens = index[:: target.step[0], :: target.step[1]].flatten()
        return TokenBatchNorm(target.channels, eps=norm.eps, momentum=norm.momentum, tokens=tokens, dtype=self.dtype)

    @torch.no_grad()
    def load(self, blocks: list[Block]) -> None:
        """The CNN's weights into the blocks that `build` gave."""
        for block, (_, step, state, placed) in zip(blocks, self.planned, strict=True):
            attention = block.attention
            attention.load_positions()
            for projection, branch, layer, (conv, *_) in zip(
                attention.projections, block.branches, step.layers, placed, strict=True
            ):
                projection.load_kernel(conv.weight, conv.bias)
                _load_norm(branch.norm, layer.norm)
            block.keep.fill_(1)
            start, stop = self.starts["p"], self.width
            block.keep[start:stop] = 0
            if not step.keeps_u:
                block.keep[: self.starts["p"]] = 0
            start = self.starts[step.active]
            _load_activation(block.mlp, step.act, start, state[step.active].width)


@torch.no_grad()
def _load_norm(norm: nn.Module, source: nn.Module | None) -> None:
    if source is None:
        return
    weight = torch.ones_like(source.running_mean) if source.weight is None else source.weight
    bias = torch.zeros_like(source.running_mean) if source.bias is None else source.bias
    if isinstance(norm, TokenBatchNorm):
        norm.weight.copy_(weight)
        norm.bias.copy_(bias)
        norm.running_mean.copy_(source.running_mean)
        norm.running_var.copy_(source.running_var)
        norm.num_batches_tracked.copy_(source.num_batches_tracked)
    else:
        scale = weight.double() / (source.running_var.double() + source.eps).sqrt()
        norm.weight.copy_(scale)
        norm.bias.copy_(bias.double() - source.running_mean.double() * scale)


@torch.no_grad()
def _load_activation(mlp: nn.Module, act: nn.Module, start: int, width: int) -> None:
    """p + act(-p) = act(p) on `width` channels; hidden units beyond those have zero output weight."""
    nn.init.zeros_(mlp.fc1.bias)
    nn.init.zeros_(mlp.fc2.weight)
    nn.init.zeros_(mlp.fc2.bias)
    needed = 2 * width if isinstance(act, nn.ReLU6) else width
    mlp.fc1.weight[:needed].zero_()
    channels, units = torch.arange(start, start + width), torch.arange(width)
    mlp.fc1.weight[units, channels] = -1
    mlp.fc2.weight[channels, units] = 1
    if isinstance(act, nn.ReLU6):  # relu6(p) = p + relu(-p) - relu(p - 6)
        mlp.fc1.weight[units + width, channels] = 1
        mlp.fc1.bias[units + width] = -6
        mlp.fc2.weight[channels, units + width] = -1


def plain_vit(
    cnn: nn.Module,
    *,
    img_size: int | tuple[int, int],
    stem_stages: int = 1,
    tokens: str = "patch",
    grid: int | tuple[int, int] | None = None,
    sharpness: float = 0.9,
    alpha: float | None = None,
    norm: str = "batch",
    weights: str = "tied",
    values: str = "identity",
    rank: int | None = None,
    content_dim: int = 0,
    span: str = "global",
    spare_hidden: int = 0,
    tolerance: float | None = None,
) -> tuple[RelPosViT, PlainViTReport]:
    """The plain vision transformer that computes what a residual CNN computes, and a report. The CNN is not changed.

    Args:
        cnn: timm's ResNet family with basic or bottleneck blocks, or RepVGG.
        img_size: Side, or (height, width), in pixels.
        stem_stages: Stages that stay convolutions, with what lies before them.
        tokens: "patch": the token grid of the last stage; finer maps are patches. "dilated": that of the first stage
            behind the stem; the convolutions of coarser maps are dilated.
        grid: The token grid itself, a side or (h, w), in the place of `tokens`.
        sharpness: Attention mass of a head on its own offset.
        alpha: That as a logit; where given, it counts and sharpness does not.
        norm: "batch": the CNN's batch norms, alive. "affine": their running statistics frozen into a scale and a
            shift for each channel.
        weights: "tied" (the kernels stay the parameters) or "free".
        values: "identity" or "factorized".
        rank: Largest rank of a factorized head.
        content_dim: Width of queries and keys; 0 leaves content off.
        span: "global" or "local".
        spare_hidden: Hidden units of each MLP beyond those that activate; they start with zero output weight.
        tolerance: Largest relative error of the logits; by default 1e-9 in float64 and 1e-4 in float32.

    Returns:
        The transformer in the CNN's own mode, and its report.

    Raises:
        ConversionError: A network or an image size that it cannot take, or logits that differ by more than the
            tolerance.
        ConstructionError: A setting outside its range.
    """
    settings = {
        "stem_stages": stem_stages, "tokens": tokens, "grid": grid, "sharpness": sharpness, "alpha": alpha,
        "norm": norm, "weights": weights, "values": values, "rank": rank, "content_dim": content_dim, "span": span,
        "spare_hidden": spare_hidden,
    }  # fmt: skip
    size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    source = copy_network(cnn).eval()
    vit, planner, report = build_plain_vit(source, img_size=size, **settings)
    planner.load(list(vit.blocks))
    if isinstance(vit.head, nn.Linear):
        vit.head.load_state_dict(_read_classifier(source).state_dict())
    dtype = next(source.parameters()).dtype
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        report.logits_error = relative_error([vit.eval()(images)], [source(images)])
    report.tolerance = tolerance if tolerance is not None else TOLERANCES.get(dtype, 1e-4)
    report.params_before = sum(p.numel() for p in cnn.parameters())
    if not report.logits_error <= report.tolerance:
        raise ConversionError(
            f"the transformer's logits differ from the CNN's by {report.logits_error:.2e}, more than the tolerance "
            f"{report.tolerance:.0e}" + (": raise rank, or pass tolerance" if rank else "")
        )
    return vit.train(cnn.training), report


def _read_classifier(cnn: nn.Module) -> nn.Module:
    return read_stages(cnn)[2]


def build_plain_vit(
    cnn: nn.Module, *, img_size: tuple[int, int], stem_stages: int, tokens: str, grid: int | tuple[int, int] | None,
    **settings: object,
) -> tuple[RelPosViT, _Planner, PlainViTReport]:  # fmt: skip
    """The transformer of a CNN with random weights in its blocks; its stem is the CNN's own."""
    stem, stages, head = read_stages(cnn)
    if not 0 <= stem_stages < len(stages):
        raise ConstructionError(
            f"stem_stages={stem_stages}: {type(cnn).__name__} has {len(stages)} stages and one must be left to convert"
        )
    for key, value, choices in (
        ("tokens", tokens, ("patch", "dilated")), ("norm", settings["norm"], ("batch", "affine")),
        ("span", settings["span"], ("global", "local")),
    ):  # fmt: skip
        if value not in choices:
            raise ConstructionError(f"{key}={value!r} is unknown: expected one of {', '.join(choices)}")
    stem = nn.Sequential(*stem, *stages[:stem_stages])
    like = next(cnn.parameters())
    try:
        with torch.no_grad():
            x = stem(torch.zeros(1, 3, *img_size, dtype=like.dtype))
            channels, sizes, features = x.shape[1], [tuple(x.shape[-2:])], x
            for stage in stages[stem_stages:]:
                features = stage(features)
                sizes.append(tuple(features.shape[-2:]))
    except Exception as error:
        raise ConversionError(
            f"{type(cnn).__name__} failed on images of {img_size[0]}x{img_size[1]} pixels ({error}): use a size that "
            "it takes"
        ) from error
    if grid is None:
        grid = sizes[-1] if tokens == "patch" else sizes[1]
    grid = (grid, grid) if isinstance(grid, int) else tuple(grid)
    planner = _Planner(grid, settings, like.dtype)
    first = planner.hold(channels, sizes[0])
    if max(first.step) > 1:
        raise ConstructionError(f"grid={grid}: finer than the stem's {sizes[0][0]}x{sizes[0][1]} pixels")
    state = {"u": first}
    for i, stage in enumerate(stages[stem_stages:], stem_stages + 1):
        for j, block in enumerate(stage):
            for k, step in enumerate(read_block(block, f"stage {i}, block {j}")):
                state = planner.add(f"stage {i}, block {j}, step {k}", step, state)
    blocks, width = planner.build()
    last = state["u"]
    vit = RelPosViT(
        stem, blocks, grid=grid, stem_patch=first.patch, width=width, num_features=last.channels,
        pool_step=last.step, pool_patch=last.patch,
        num_classes=head.out_features if isinstance(head, nn.Linear) else 0,
        drop_rate=getattr(cnn, "drop_rate", 0.0) or 0.0, dtype=like.dtype,
    )  # fmt: skip
    report = PlainViTReport(img_size, grid, width=width, blocks=len(blocks))
    report.params_after = sum(p.numel() for p in vit.parameters())
    for block, (name, step, state, placed) in zip(blocks, planner.planned, strict=True):
        _count(report, block, name, step, state, placed, settings["content_dim"])
    return vit, planner, report


def _count(
    report: PlainViTReport, block: Block, name: str, step: Step, state: dict, placed: list, content_dim: int
) -> None:
    n = math.prod(report.grid)
    projections = block.attention.projections
    # Heads gather once for all projections.
    macs = block.attention.geometry.heads * n * n * state["source"].width
    for projection, (conv, geometry, target) in zip(projections, placed, strict=True):
        d_in = projection.in_channels * math.prod(geometry.in_patch)
        mixed = geometry.heads * n * d_in * target.width // projection.groups
        macs += mixed
        report.macs_before += conv.weight.numel() * math.prod(target.size)
    if content_dim:
        heads = block.attention.heads
        macs += heads * content_dim * (2 * n * state["source"].width + n * n)
    macs += 2 * n * block.mlp.fc1.weight.numel()
    report.macs_after += macs
    report.rows.append({
        "what": name, "heads": block.attention.heads, "read": state["source"].width,
        "write": sum(target.width for _, _, target in placed), "hidden": block.mlp.fc1.out_features,
    })  # fmt: skip
