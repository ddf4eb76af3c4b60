"""A convolution layer of a CNN written as attention: feature map in, feature map out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitinit.attention.heads import HeadWeights
from vitinit.attention.table import TableAttention, read_leak
from vitinit.errors import ConstructionError
from vitinit.positions import ConvGeometry, cut_patches, join_patches


class AttentionConv2d(nn.Module):
    """Attention in the place of an `nn.Conv2d`: (B, C_in, h, w) to (B, C_out, h', w').

    The first arguments are those of `nn.Conv2d`; the others are `HeadWeights`' and `TableAttention`'s. Every argument
    is a plain number, text or tuple, and `spec` gives them back, so a network can be rebuilt from a JSON file.

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: (Kh, Kw).
        in_size: (height, width) of the feature map that comes in; the layer takes no other.
        stride: Per axis.
        padding: Zeros (top, bottom, left, right).
        dilation: Per axis.
        groups: G.
        bias: Whether there is a bias.
        patch: Patch (Ph, Pw) of queries and keys in pixels.
        span: "global", all tokens of the image, or "local", the window of tokens that the kernel reaches.
        alpha: Bias of each head on its own offset at the start.
        weights: "tied" or "free".
        values: "identity" or "factorized".
        rank: Largest rank of a factorized head.
        content_dim: Width of a head's queries and keys; 0 leaves content off.
        dtype: Of the parameters.

    Raises:
        ConstructionError: A patch that does not divide the grid, or a contradictory setting.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int],
        *,
        in_size: tuple[int, int],
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int, int, int] = (0, 0, 0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
        bias: bool = True,
        patch: tuple[int, int] = (1, 1),
        span: str = "global",
        alpha: float,
        weights: str = "tied",
        values: str = "identity",
        rank: int | None = None,
        content_dim: int = 0,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.spec = {
            "in_channels": in_channels, "out_channels": out_channels, "kernel_size": list(kernel_size),
            "in_size": list(in_size), "stride": list(stride), "padding": list(padding),
            "dilation": list(dilation), "groups": groups, "bias": bias, "patch": list(patch), "span": span,
            "alpha": alpha, "weights": weights, "values": values, "rank": rank, "content_dim": content_dim,
        }  # fmt: skip
        # A CNN's forward pass may read these of its convolution, to pad the input itself.
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = tuple(kernel_size), tuple(stride), tuple(dilation)
        self.geometry = ConvGeometry.build(
            tuple(in_size), kernel_size=self.kernel_size, stride=self.stride, dilation=self.dilation,
            padding=tuple(padding), patch=tuple(patch), span=span,
        )  # fmt: skip
        projection = HeadWeights(
            self.geometry, in_channels=in_channels, out_channels=out_channels, groups=groups,
            leak=read_leak(alpha, self.geometry), bias=bias, weights=weights, values=values, rank=rank, dtype=dtype,
        )  # fmt: skip
        self.attention = TableAttention(
            self.geometry, [projection], width=in_channels * math.prod(self.geometry.in_patch), alpha=alpha,
            content_dim=content_dim, dtype=dtype,
        )  # fmt: skip

    @property
    def projection(self) -> HeadWeights:
        """The heads' weights."""
        return self.attention.projections[0]

    def load_kernel(self, kernel: Tensor, bias: Tensor | None = None) -> float:
        """Start as the convolution with this kernel; arguments and result are those of `HeadWeights.load_kernel`."""
        self.attention.load_positions()
        return self.projection.load_kernel(kernel, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Feature map (B, C_out, h', w') of a feature map (B, C_in, h, w).

        Raises:
            ConstructionError: A feature map of another size than the layer was built for.
        """
        if tuple(x.shape[-2:]) != self.geometry.in_size:
            got, expected = "x".join(map(str, x.shape[-2:])), "x".join(map(str, self.geometry.in_size))
            raise ConstructionError(
                f"this attention layer was built for {expected} pixels and got {got}: "
                "convert the CNN again with the img_size that you want to use"
            )
        (tokens,) = self.attention(cut_patches(x, self.geometry.in_patch))
        return join_patches(tokens, self.geometry.query_grid, self.geometry.patch)

    def count_macs(self) -> int:
        """Multiply-adds for one image: content scores, attention and the head weights."""
        return self.attention.count_macs()
