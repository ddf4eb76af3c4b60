"""A relative-position vision transformer: stem, identical blocks on one token grid, mean pool, linear head."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models import checkpoint
from torch import Tensor, nn

from vitinit.attention.table import TableAttention
from vitinit.errors import ConstructionError
from vitinit.positions import cut_patches
from vitinit.sync_norm import batch_statistics


class TokenBatchNorm(nn.Module):
    """The batch norm of a CNN on patch tokens (B, N, C*P*P): one mean and variance a channel, over the images, the
    tokens and the pixels of a patch. In training they are those of all processes' batches.

    Args:
        channels: C.
        eps: Added to the variance.
        momentum: Of the running statistics.
        tokens: (n,) the tokens that hold features; the others do not count. None for all.
        dtype: Of the parameters.
    """

    def __init__(
        self, channels: int, *, eps: float = 1e-5, momentum: float | None = 0.1, tokens: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.channels, self.eps, self.momentum = channels, eps, momentum
        self.weight = nn.Parameter(torch.ones(channels, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(channels, dtype=dtype))
        self.register_buffer("running_var", torch.ones(channels, dtype=dtype))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.register_buffer("tokens", tokens, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalized tokens, shaped as x."""
        pixels = x.unflatten(2, (self.channels, -1)).transpose(1, 2)  # B C N P*P
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = batch_statistics(self, pixels if self.tokens is None else pixels.index_select(2, self.tokens))
        scale = self.weight * (var + self.eps).rsqrt()
        pixels = (pixels - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]
        return pixels.transpose(1, 2).flatten(2).to(x.dtype)

    def extra_repr(self) -> str:
        """Short summary for print(model)."""
        return f"{self.channels}, eps={self.eps}"


class ChannelAffine(nn.Module):
    """A scale and a shift for each channel of patch tokens (B, N, C*P*P): a batch norm whose statistics are frozen.

    Args:
        channels: C.
        dtype: Of the parameters.
    """

    def __init__(self, channels: int, *, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, shaped as x."""
        pixels = x.shape[2] // len(self.weight)
        return x * self.weight.repeat_interleave(pixels) + self.bias.repeat_interleave(pixels)


class Slice(nn.Module):
    """The channels `start` to `stop` of a token stream."""

    def __init__(self, start: int, stop: int):
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, stop - start) of tokens (B, N, D)."""
        return x[..., self.start : self.stop]

    def extra_repr(self) -> str:
        """Short summary for print(model)."""
        return f"{self.start}:{self.stop}"


class Branch(nn.Module):
    """Where the output of a projection goes: through a norm onto the channels from `start` of a stream of `width`."""

    def __init__(self, norm: nn.Module, *, start: int, width: int, drop_path: float = 0.0):
        super().__init__()
        self.norm, self.start, self.width = norm, start, width
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, out: Tensor) -> Tensor:
        """Tokens (B, N, width), zero on all other channels."""
        return F.pad(self.drop_path(self.norm(out)), (self.start, self.width - self.start - out.shape[-1]))

    def extra_repr(self) -> str:
        """Short summary for print(model)."""
        return f"from {self.start}"


class Block(nn.Module):
    """One transformer block on tokens (B, N, D):

        x <- keep * x + sum_i branch_i(attention_i(read(x))),      x <- x + MLP(x)

    Args:
        read: What attention sees of the stream: a `Slice`, or a norm and a linear map.
        attention: Its projections are the attention_i.
        branches: One for each projection.
        keep: (D,) share of each channel that stays, trained; None for all of it.
        mlp: The MLP, with its own norm where it has one.
    """

    def __init__(
        self, read: nn.Module, attention: TableAttention, branches: Sequence[Branch], keep: Tensor | None,
        mlp: nn.Module,
    ):  # fmt: skip
        super().__init__()
        self.read, self.attention, self.branches = read, attention, nn.ModuleList(branches)
        self.keep = None if keep is None else nn.Parameter(keep)
        self.mlp = mlp

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random start, as a transformer's: all of the stream stays, small weights in the MLP."""
        if self.keep is not None:
            self.keep.fill_(1)
        for module in self.mlp.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, D)."""
        outs = self.attention(self.read(x))
        if self.keep is not None:
            x = x * self.keep
        for branch, out in zip(self.branches, outs, strict=True):
            x = x + branch(out)
        return x + self.mlp(x)


class RelPosViT(nn.Module):
    """A vision transformer that knows positions through its heads alone, with timm's model contract.

    Args:
        stem: Image (B, 3, height, width) to feature map (B, C, h*P, w*P).
        blocks: `Block`s on tokens (B, h*w, D).
        grid: (h, w), the token grid.
        stem_patch: P per axis: pixels of the stem's map that make a token.
        width: D; the stem fills the first channels, the others start at zero.
        num_features: Channels that are pooled for the classifier: the first num_features * pixels of a token.
        pool_step: Every how many tokens are pooled, per axis.
        pool_patch: Pixels of a token that are pooled, per axis.
        norm: Norm of the last tokens.
        num_classes: 0 for no classifier.
        drop_rate: Dropout before the classifier.
        dtype: Of the classifier.
    """

    def __init__(
        self, stem: nn.Module, blocks: Sequence[Block], *, grid: tuple[int, int], stem_patch: tuple[int, int],
        width: int, num_features: int, pool_step: tuple[int, int] = (1, 1), pool_patch: tuple[int, int] = (1, 1),
        norm: nn.Module | None = None, num_classes: int = 1000, drop_rate: float = 0.0,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.grid, self.stem_patch, self.embed_dim = grid, stem_patch, width
        self.num_features = self.head_hidden_size = num_features
        self.pool_step, self.pool_patch, self.drop_rate = pool_step, pool_patch, drop_rate
        self.num_classes, self.grad_checkpointing = num_classes, False
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm or nn.Identity()
        self.head = nn.Linear(num_features, num_classes, dtype=dtype) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens (B, h*w, D) of images (B, 3, height, width).

        Raises:
            ConstructionError: Images of another size than the network was built for.
        """
        x = self.stem(x)
        expected = tuple(g * p for g, p in zip(self.grid, self.stem_patch, strict=True))
        if tuple(x.shape[-2:]) != expected:
            got, wanted = ("x".join(map(str, size)) for size in (x.shape[-2:], expected))
            raise ConstructionError(
                f"this transformer's stem was to give {wanted} pixels and gave {got}: build it with the img_size that "
                "you want to use"
            )
        x = cut_patches(x, self.stem_patch)
        x = F.pad(x, (0, self.embed_dim - x.shape[-1]))
        for block in self.blocks:
            x = checkpoint(block, x) if self.grad_checkpointing and self.training else block(x)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, classes) of tokens, or the pooled features (B, num_features)."""
        x = x[..., : self.num_features * math.prod(self.pool_patch)]
        rows, columns = self.pool_step
        x = x.unflatten(1, self.grid)[:, ::rows, ::columns].unflatten(3, (self.num_features, -1))
        x = F.dropout(x.mean(dim=(1, 2, 4)), self.drop_rate, self.training)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, height, width)."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """The classifier."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier; the pooling is always the mean."""
        self.num_classes = num_classes
        like = next(self.parameters())
        head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head = head.to(like.device, like.dtype)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute each block's activations again in the backward pass, for memory."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict:
        """Layers for layer-wise rates."""
        return {"stem": r"^stem", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def no_weight_decay(self) -> set[str]:
        """Parameters that must not shrink."""
        return {name for name, _ in self.named_parameters() if name.endswith(("bias_table", "keep"))}
