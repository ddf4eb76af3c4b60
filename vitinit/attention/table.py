"""Multi-head attention with a learned relative bias table (Li et al. 2021), started from a convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitinit.attention.heads import HeadWeights
from vitinit.attention.kernels import (
    attend_content,
    attend_depthwise_positions,
    attend_positions,
    attend_window_content,
    attend_window_positions,
    content_maps,
    count_macs,
    mix_heads,
)
from vitinit.construction import leak_coefficients
from vitinit.errors import ConstructionError
from vitinit.positions import (
    ConvGeometry,
    build_bias_table,
    positional_logits,
    positional_maps,
    positional_mass,
    sink_logits,
)


def read_leak(alpha: float, geometry: ConvGeometry) -> tuple[float, float]:
    """(a, b) of the maps a*S + b*U that heads of a table attend by at the start: the leak of `HeadWeights`.

    Raises:
        ConstructionError: An alpha that is not a finite number above 0.
    """
    if not 0 < alpha < math.inf:
        raise ConstructionError(f"alpha={alpha:g}: expected a finite number above 0, the logit of a head's own offset")
    return leak_coefficients(alpha, geometry.table_size)


class TableAttention(nn.Module):
    """Relative-position attention from tokens (B, Nk, D_in) to tokens (B, Nq, D_out), once for each projection.

        A_h = softmax(q_h k_h^T / sqrt(d) + B_h[offset]),      out = sum_h A_h X W_h + b

    over the zero-padded plane: a sink key stands for every offset outside the image. The heads are one for each
    offset that the convolution reaches and a last one, the mean head (see `construction`).

    Args:
        geometry: The offsets of the heads and of the table.
        projections: The W_h; several share the heads and what they see.
        width: D_in.
        alpha: Bias of each head on its own offset at the start.
        content_dim: d, width of a head's queries and keys; 0 leaves content off.
        dtype: Of the parameters.

    Raises:
        ConstructionError: A negative content width.
    """

    def __init__(
        self,
        geometry: ConvGeometry,
        projections: Sequence[HeadWeights],
        *,
        width: int,
        alpha: float,
        content_dim: int = 0,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if content_dim < 0:
            raise ConstructionError(
                f"content_dim={content_dim}: expected 0 (content off) or the width of a head's queries"
            )
        self.geometry, self.alpha, self.width = geometry, alpha, width
        self.heads, self.content_dim = geometry.heads, content_dim
        self.bias_table = nn.Parameter(torch.empty(self.heads, geometry.table_size, dtype=dtype))
        self.projections = nn.ModuleList(projections)
        if content_dim:
            self.query = nn.Linear(width, self.heads * content_dim, bias=False, dtype=dtype)
            self.key = nn.Linear(width, self.heads * content_dim, bias=False, dtype=dtype)
        if geometry.span == "global":  # N^2 numbers, which a window does without
            self.register_buffer("relative_index", geometry.relative_index(), persistent=False)
        self.register_buffer("query_index", geometry.query_index(), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random start of a relative-position ViT: biases and scores near zero."""
        nn.init.trunc_normal_(self.bias_table, std=0.02)
        if self.content_dim:
            nn.init.trunc_normal_(self.query.weight, std=0.02)
            nn.init.trunc_normal_(self.key.weight, std=0.02)

    @torch.no_grad()
    def load_positions(self) -> None:
        """Each head on its own offset; W_Q = 0 and W_K random, so content is silent but trains."""
        self.bias_table.copy_(build_bias_table(self.geometry, alpha=self.alpha))
        if self.content_dim:
            nn.init.zeros_(self.query.weight)

    def attention_weights(self, tokens: Tensor) -> Tensor:
        """Maps (B, H, Nq, Nk) of tokens (B, Nk, D_in); while content is off, (1, H, Nq, Nk).

        What a row lacks to 1 lies on zero padding.
        """
        index = self._index()
        if not self.content_dim:
            return positional_maps(self.bias_table, index).unsqueeze(0)
        query, key = self._split_content(tokens)
        return content_maps(
            query, key, positional_logits(self.bias_table, index), sink_logits(self.bias_table, self.geometry)
        )

    def plane_weights(self, tokens: Tensor | None = None) -> Tensor:
        """Attention (B, H, Nq, T) on every offset of the table, zero padding included: rows sum to 1.

        Without tokens, or while content is off, that of positions alone, (1, H, 1, T).
        """
        if not self.content_dim or tokens is None:
            return positional_mass(self.bias_table)[None, :, None, :]
        query, key = self._split_content(tokens)
        scores = F.pad(query @ key.mT * self.content_dim**-0.5, (0, 1))  # B H Nq Nk+1, zero on padding
        index = self.geometry.key_index().to(scores.device).expand(*scores.shape[:2], -1, -1)
        return (scores.gather(3, index) + self.bias_table[:, None]).softmax(dim=-1)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Tokens (B, Nq, D_out) of each projection, of tokens (B, Nk, D_in)."""
        return [p.add_bias(out) for p, out in zip(self.projections, self._attend(tokens), strict=True)]

    def _attend(self, tokens: Tensor) -> list[Tensor]:
        if not self.content_dim and self.geometry.span == "local":
            mass = positional_mass(self.bias_table)
            return [
                attend_window_positions(p.select(mass, 0), p.build(), tokens, self.geometry) for p in self.projections
            ]
        if self.geometry.span == "global" and all(p.values == "factorized" for p in self.projections):
            maps = self.attention_weights(tokens)
            return [p.attend_factorized(maps, tokens) for p in self.projections]
        if not self.content_dim and all(p.is_depthwise for p in self.projections):
            maps = positional_maps(self.bias_table, self.relative_index)
            return [
                attend_depthwise_positions(p.select(maps, 0), p.build()[:, :, 0, 0], tokens) for p in self.projections
            ]
        seen = self._gather(tokens)
        return [mix_heads(p.select(seen, 2), p.build()) for p in self.projections]

    def _gather(self, tokens: Tensor) -> Tensor:
        """What each head sees, (B, Nq, H, D_in)."""
        if not self.content_dim:
            return attend_positions(positional_maps(self.bias_table, self.relative_index), tokens)
        query, key = self._split_content(tokens)
        if self.geometry.span == "local":
            return attend_window_content(query, key, tokens, self.bias_table, self.geometry)
        logits = positional_logits(self.bias_table, self.relative_index)
        sink = sink_logits(self.bias_table, self.geometry)
        return attend_content(query, key, tokens.unsqueeze(1), logits, sink).transpose(1, 2)

    def count_macs(self) -> int:
        """Multiply-adds for one image: content scores, attention and the head weights of every projection."""
        mixes = [
            (p.geometry.heads, p.out_channels * math.prod(p.geometry.patch), p.groups, p.ranks)
            for p in self.projections
        ]
        return count_macs(self.geometry, width=self.width, mixes=mixes, content_dim=self.content_dim)

    def _index(self) -> Tensor:
        if self.geometry.span == "global":
            return self.relative_index
        return self.geometry.relative_index().to(self.bias_table.device)

    def _split_content(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query(tokens.index_select(1, self.query_index)).unflatten(-1, (self.heads, self.content_dim))
        key = self.key(tokens).unflatten(-1, (self.heads, self.content_dim))
        return query.transpose(1, 2), key.transpose(1, 2)  # B H N d

    def extra_repr(self) -> str:
        """Short summary for print(model)."""
        (qy, qx), (ky, kx) = self.geometry.query_grid, self.geometry.key_grid
        return (
            f"heads={self.heads}, span={self.geometry.span}, keys={ky}x{kx}, queries={qy}x{qx}, "
            f"patch={self.geometry.patch}, content_dim={self.content_dim}"
        )
