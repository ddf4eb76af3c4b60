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
from dataclasses import dataclass, replace

import torch
from timm.layers import Mlp
from torch import nn

from vitinit.attention.heads import HeadWeights
from vitinit.attention.table import TableAttention, read_leak
from vitinit.convert import TOLERANCES, check_network, copy_network, relative_error
from vitinit.errors import ConstructionError, ConversionError, check_choice
from vitinit.positions import ConvGeometry, sharpness_to_alpha
from vitinit.report import PlainViTReport
from vitinit.residual import SYMMETRIC, Layer, Step, check_layer, read_block, read_stages
from vitinit.resnet_cifar import FixedBatchNorm2d
from vitinit.trace import Convolution, read_convolution
from vitinit.vit import Block, Branch, ChannelAffine, RelPosViT, Slice, TokenBatchNorm


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


@dataclass(frozen=True)
class Placed:
    """A layer of a step with its convolution, its geometry on the token grid and the map that it writes."""

    layer: Layer
    conv: Convolution
    geometry: ConvGeometry
    target: Layout


@dataclass(frozen=True)
class Plan:
    """One block: its step, the map that attention reads, and the maps in the stream behind the step."""

    name: str
    step: Step
    source: Layout
    maps: dict[str, Layout]
    placed: list[Placed]

    @property
    def active(self) -> Layout:
        """The map that the MLP activates."""
        return self.maps[self.step.active]


class _Planner:
    """Lays out the stream and builds the blocks, one step after another."""

    def __init__(self, grid: tuple[int, int], settings: dict, dtype: torch.dtype):
        self.grid, self.settings, self.dtype = grid, settings, dtype
        self.plans: list[Plan] = []

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

    def add(self, name: str, step: Step, maps: dict[str, Layout]) -> dict[str, Layout]:
        """Plan a step on the maps that the stream holds; returns the maps behind it."""
        source = maps[step.source]
        placed, after = [], dict(maps)
        for layer in step.layers:
            check_layer(layer, step.act, name)
            conv = read_convolution(layer.conv, source.size)
            if layer.pool:
                conv = replace(conv, stride=(layer.pool, layer.pool))
            geometry, target = self._place(conv, source, name, pool=layer.pool)
            placed.append(Placed(layer, conv, geometry, target))
            after[layer.target] = target
        self.plans.append(Plan(name, step, source, after, placed))
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
        maps = [{"u": self.plans[0].source}, *(plan.maps for plan in self.plans)]
        u, p = (max([m[part].width for m in maps if part in m], default=0) for part in ("u", "p"))
        self.starts, self.width = {"u": 0, "p": u}, u + p
        return [self._build_block(plan) for plan in self.plans], self.width

    def _build_block(self, plan: Plan) -> Block:
        s, dtype, act = self.settings, self.dtype, plan.step.act
        geometry = self._join([placed.geometry for placed in plan.placed], s["span"])
        alpha = sharpness_to_alpha(s["sharpness"], geometry.table_size) if s["alpha"] is None else s["alpha"]
        leak = read_leak(alpha, geometry)
        heads = {offset: i for i, offset in enumerate(geometry.offsets)}
        projections, branches = [], []
        for placed in plan.placed:
            layer, conv, own = placed.layer, placed.conv, placed.geometry
            slots = [*(heads[offset] for offset in own.offsets), geometry.heads - 1]
            projection = HeadWeights(
                own, in_channels=conv.weight.shape[1] * conv.groups, out_channels=len(conv.weight), groups=conv.groups,
                leak=leak, slots=None if slots == list(range(geometry.heads)) else slots, bias=conv.bias is not None,
                weights=s["weights"], values=s["values"], rank=s["rank"], average=bool(layer.pool), dtype=dtype,
            )  # fmt: skip
            projections.append(projection.requires_grad_(conv.weight.requires_grad))  # frozen stays frozen
            norm = self._build_norm(layer.norm, placed.target)
            start = self.starts[layer.target]
            branches.append(Branch(norm, start=start, width=self.width, drop_path=layer.drop_path))
        width, start = plan.source.width, self.starts[plan.step.source]
        attention = TableAttention(
            geometry, projections, width=width, alpha=alpha, content_dim=s["content_dim"], dtype=dtype
        )
        units = plan.active.width * (2 if isinstance(act, nn.ReLU6) else 1) + s["spare_hidden"]
        mlp = Mlp(self.width, units, act_layer=SYMMETRIC[type(act)])
        if type(act) is nn.GELU:
            mlp.act = nn.GELU(approximate=act.approximate)
        keep = torch.ones(self.width, dtype=dtype)
        block = Block(Slice(start, start + width), attention, branches, keep, mlp.to(dtype))
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
        for block, plan in zip(blocks, self.plans, strict=True):
            block.attention.load_positions()
            for projection, branch, placed in zip(
                block.attention.projections, block.branches, plan.placed, strict=True
            ):
                projection.load_kernel(placed.conv.weight, placed.conv.bias)
                _load_norm(branch.norm, placed.layer.norm)
            block.keep[: self.starts["p"]] = float(plan.step.keeps_u)
            block.keep[self.starts["p"] :] = 0
            _load_activation(block.mlp, plan.step.act, self.starts[plan.step.active], plan.active.width)


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
    size = check_network(cnn, img_size, caller="plain_vit")
    source = copy_network(cnn).eval()
    vit, planner, report = build_plain_vit(source, img_size=size, **settings)
    planner.load(list(vit.blocks))
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


def build_plain_vit(
    cnn: nn.Module, *, img_size: tuple[int, int], stem_stages: int, tokens: str, grid: int | tuple[int, int] | None,
    **settings: object,
) -> tuple[RelPosViT, _Planner, PlainViTReport]:  # fmt: skip
    """The transformer of a CNN with random weights in its blocks; stem and classifier are the CNN's."""
    stem, stages, head = read_stages(cnn)
    if not 0 <= stem_stages < len(stages):
        raise ConstructionError(
            f"stem_stages={stem_stages}: {type(cnn).__name__} has {len(stages)} stages and one must be left to convert"
        )
    for key, value, choices in (
        ("tokens", tokens, ("patch", "dilated")), ("norm", settings["norm"], ("batch", "affine")),
        ("span", settings["span"], ("global", "local")),
    ):  # fmt: skip
        check_choice(key, value, choices)
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
    maps = {"u": first}
    for i, stage in enumerate(stages[stem_stages:], stem_stages + 1):
        for j, block in enumerate(stage):
            for k, step in enumerate(read_block(block, f"stage {i}, block {j}")):
                maps = planner.add(f"stage {i}, block {j}, step {k}", step, maps)
    blocks, width = planner.build()
    last = maps["u"]
    vit = RelPosViT(
        stem, blocks, grid=grid, stem_patch=first.patch, width=width, num_features=last.channels,
        pool_step=last.step, pool_patch=last.patch,
        num_classes=head.out_features if isinstance(head, nn.Linear) else 0,
        drop_rate=getattr(cnn, "drop_rate", 0.0) or 0.0, dtype=like.dtype,
    )  # fmt: skip
    vit.head.load_state_dict(head.state_dict())
    report = PlainViTReport(img_size, grid, width=width, blocks=len(blocks))
    report.params_after = sum(p.numel() for p in vit.parameters())
    for block, plan in zip(blocks, planner.plans, strict=True):
        hidden = block.mlp.fc1.out_features
        report.macs_before += sum(p.conv.weight.numel() * math.prod(p.target.size) for p in plan.placed)
        report.macs_after += block.attention.count_macs() + 2 * math.prod(grid) * width * hidden
        report.rows.append({
            "what": plan.name, "heads": block.attention.heads, "read": plan.source.width,
            "write": sum(p.target.width for p in plan.placed), "hidden": hidden,
        })  # fmt: skip
    return vit, planner, report
