"""Multi-head attention with a learned relative bias table (Li et al. 2021), started from a convolution."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitinit.attention.kernels import (
    attend_content,
    attend_depthwise_positions,
    attend_positions,
    attend_window_content,
    attend_window_positions,
    content_maps,
    mix_heads,
)
from vitinit.construction import build_head_placement, factorize_heads, kernel_to_heads, plan_ranks
from vitinit.errors import ConstructionError
from vitinit.positions import (
    ConvGeometry,
    build_bias_table,
    positional_logits,
    positional_maps,
    positional_mass,
    sink_logits,
)


class TableAttention(nn.Module):
    """Relative-position attention from tokens (B, Nk, D_in) to tokens (B, Nq, D_out).

        A_h = softmax(q_h k_h^T / sqrt(d) + B_h[offset]),      out = sum_h A_h X W_h + b

    over the zero-padded plane: a sink key stands for every offset outside the image. The heads are one for each
    offset that the convolution reaches and a last one, the mean head (see `construction`).

    Args:
        geometry: The convolution on patches that the heads are laid out for.
        in_channels: C_in, pixels' channels; D_in = C_in * Qh * Qw.
        out_channels: C_out; D_out = C_out * Ph * Pw.
        groups: G, as in `nn.Conv2d`.
        alpha: Bias of each head on its own offset at the start.
        bias: Whether there is a bias b for each output channel.
        weights: "tied": the kernel is the parameter and head weights are a linear function of it. "free": head
            weights are parameters of their own.
        values: "identity": a head carries the whole token and W_h maps it to the output. "factorized": W_h is
            a product of rank r_h.
        rank: Largest rank of a factorized convolution head; None for the exact plan.
        content_dim: d, width of a head's queries and keys; 0 leaves content off.
        dtype: Of the parameters. The construction is exact to the rounding of the dtype it is built in.

    Raises:
        ConstructionError: An unknown or contradictory setting.
    """

    def __init__(
        self,
        geometry: ConvGeometry,
        *,
        in_channels: int,
        out_channels: int,
        groups: int = 1,
        alpha: float,
        bias: bool = True,
        weights: str = "tied",
        values: str = "identity",
        rank: int | None = None,
        content_dim: int = 0,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_choice("weights", weights, ("tied", "free"))
        _check_choice("values", values, ("identity", "factorized"))
        if values == "factorized" and weights == "tied":
            raise ConstructionError("factorized values have weights of their own: use weights='free' with them")
        if rank is not None and (values != "factorized" or rank < 1):
            raise ConstructionError(f"rank={rank}: give a rank of at least 1, and values='factorized' with it")
        if not 0 < alpha < math.inf:
            raise ConstructionError(
                f"alpha={alpha:g}: expected a finite number above 0, the logit of a head's own offset"
            )
        if content_dim < 0:
            raise ConstructionError(
                f"content_dim={content_dim}: expected 0 (content off) or the width of a head's queries"
            )
        self.geometry = geometry
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.alpha, self.weights, self.values = alpha, weights, values
        self.heads, self.content_dim = geometry.heads, content_dim

        dtype = dtype or torch.get_default_dtype()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.bias_table = parameter(self.heads, geometry.table_size)
        width_in = in_channels // groups * math.prod(geometry.in_patch)
        width_out = out_channels // groups * math.prod(geometry.patch)
        if weights == "tied":
            kernel_size = geometry.y.kernel, geometry.x.kernel
            self.kernel = parameter(out_channels, in_channels // groups, *kernel_size)
            placement = build_head_placement(geometry, alpha=alpha)
            self.register_buffer("placement", placement.to(dtype), persistent=False)
        elif values == "identity":
            self.head_weight = parameter(self.heads, groups, width_in, width_out)
        else:
            self.ranks = plan_ranks(
                geometry, in_channels=in_channels, out_channels=out_channels, groups=groups, cap=rank
            )
            self.value_weight = parameter(groups, width_in, sum(self.ranks))
            self.out_weight = parameter(groups, sum(self.ranks), width_out)
        self.bias = parameter(out_channels) if bias else None
        if content_dim:
            self.query = nn.Linear(groups * width_in, self.heads * content_dim, bias=False, dtype=dtype)
            self.key = nn.Linear(groups * width_in, self.heads * content_dim, bias=False, dtype=dtype)
        if geometry.span == "global":  # N^2 numbers, which a window does without
            self.register_buffer("relative_index", geometry.relative_index(), persistent=False)
        self.register_buffer("query_index", geometry.query_index(), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random start of a relative-position ViT: biases near zero, weights scaled to keep the variance."""
        nn.init.trunc_normal_(self.bias_table, std=0.02)
        if self.weights == "tied":
            nn.init.kaiming_normal_(self.kernel, mode="fan_out", nonlinearity="relu")
        elif self.values == "identity":
            nn.init.trunc_normal_(self.head_weight, std=(self.heads * self.head_weight.shape[2]) ** -0.5)
        else:
            nn.init.trunc_normal_(self.value_weight, std=self.value_weight.shape[1] ** -0.5)
            nn.init.trunc_normal_(self.out_weight, std=self.out_weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.content_dim:
            nn.init.trunc_normal_(self.query.weight, std=0.02)
            nn.init.trunc_normal_(self.key.weight, std=0.02)

    @torch.no_grad()
    def load_kernel(self, kernel: Tensor, bias: Tensor | None = None) -> float:
        """Start as the convolution with this kernel: W_Q = 0, W_K random, so content is silent but trains.

        Args:
            kernel: (C_out, C_in/G, Kh, Kw).
            bias: (C_out,), needed where the layer has a bias.

        Returns:
            Share of the kernel's energy that the weights hold: 1 unless a rank was capped.
        """
        energy = 1.0
        self.bias_table.copy_(build_bias_table(self.geometry, alpha=self.alpha))
        if self.weights == "tied":
            self.kernel.copy_(kernel)
        elif self.values == "identity":
            self.head_weight.copy_(kernel_to_heads(kernel, self.geometry, alpha=self.alpha, groups=self.groups))
        else:
            values, outputs, energy = factorize_heads(
                kernel, self.geometry, alpha=self.alpha, ranks=self.ranks, groups=self.groups
            )
            self.value_weight.copy_(torch.cat(values, dim=2))
            self.out_weight.copy_(torch.cat(outputs, dim=1))
        if self.bias is not None:
            self.bias.copy_(bias)
        if self.content_dim:
            nn.init.zeros_(self.query.weight)
        return energy

    def head_weights(self) -> Tensor:
        """Weights (H, G, D_in/G, D_out/G) that map a head's tokens to the output."""
        if self.weights == "tied":
            out_channels, width, *_ = self.kernel.shape
            taps = self.kernel.view(self.groups, out_channels // self.groups, width, -1)  # G O I K*K
            placed = torch.einsum("goik,hkvu->hgivou", taps, self.placement.to(taps.dtype))
            return placed.flatten(4, 5).flatten(2, 3)
        if self.values == "identity":
            return self.head_weight
        pairs = zip(self.value_weight.split(self.ranks, 2), self.out_weight.split(self.ranks, 1), strict=True)
        return torch.stack([value @ out for value, out in pairs])

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

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, Nq, D_out) of tokens (B, Nk, D_in)."""
        if self.geometry.span == "local":
            out = self._attend_window(tokens)
        elif self.values == "factorized":
            out = self._attend_factorized(tokens)
        elif not self.content_dim and self._is_depthwise:
            maps = positional_maps(self.bias_table, self.relative_index)
            out = attend_depthwise_positions(maps, self.head_weights()[:, :, 0, 0], tokens)
        else:
            out = mix_heads(self._gather(tokens), self.head_weights())
        if self.bias is not None:
            out = out + self.bias.repeat_interleave(math.prod(self.geometry.patch))
        return out

    def _gather(self, tokens: Tensor) -> Tensor:
        """What each head sees, (B, Nq, H, D_in)."""
        if not self.content_dim:
            return attend_positions(positional_maps(self.bias_table, self.relative_index), tokens)
        query, key = self._split_content(tokens)
        logits = positional_logits(self.bias_table, self.relative_index)
        sink = sink_logits(self.bias_table, self.geometry)
        return attend_content(query, key, tokens.unsqueeze(1), logits, sink).transpose(1, 2)

    def _attend_window(self, tokens: Tensor) -> Tensor:
        if not self.content_dim:
            mass = positional_mass(self.bias_table)
            return attend_window_positions(mass, self.head_weights(), tokens, self.geometry)
        query, key = self._split_content(tokens)
        seen = attend_window_content(query, key, tokens, self.bias_table, self.geometry)
        return mix_heads(seen, self.head_weights())

    def _attend_factorized(self, tokens: Tensor) -> Tensor:
        grouped = tokens.unflatten(2, (self.groups, -1)).transpose(1, 2)  # B G Nk Din/G
        values = (grouped @ self.value_weight).split(self.ranks, dim=-1)  # H times B G Nk r
        maps = self.attention_weights(tokens).unbind(1)  # H times B|1 Nq Nk
        seen = torch.cat([m.unsqueeze(1).to(v.dtype) @ v for m, v in zip(maps, values, strict=True)], dim=-1)
        return (seen @ self.out_weight).transpose(1, 2).flatten(2)  # B G Nq Dout/G -> B Nq Dout

    @property
    def _is_depthwise(self) -> bool:
        """Whether a head has one factor for each channel: depthwise, on pixels as tokens."""
        pixels = math.prod(self.geometry.patch) == math.prod(self.geometry.in_patch) == 1
        return pixels and self.in_channels == self.out_channels == self.groups

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
            f"patch={self.geometry.patch}, weights={self.weights}, values={self.values}, content_dim={self.content_dim}"
        )


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConstructionError(f"{key}={value!r} is unknown: expected one of {', '.join(choices)}")
