"""What becomes of what the heads have seen: the linear maps W_h, started from a convolution's kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitinit.construction import build_head_placement, factorize_heads, kernel_to_heads, plan_ranks
from vitinit.errors import ConstructionError, check_choice
from vitinit.positions import ConvGeometry


class HeadWeights(nn.Module):
    """The maps W_h, each from D_in to D_out, of heads that together compute one convolution, and its bias.

        out = sum_h (A_h X) W_h + b

    Several of them may share the heads of one attention: then `slots` says which heads are theirs.

    Args:
        geometry: The convolution on patches that the maps are laid out for.
        in_channels: C_in, pixels' channels; D_in = C_in * Qh * Qw.
        out_channels: C_out; D_out = C_out * Ph * Pw.
        groups: G, as in `nn.Conv2d`.
        leak: (a, b) of the heads' maps a*S + b*U at the start, see `construction.leak_coefficients`.
        slots: The heads of the attention that stand for the geometry's offsets and for the mean; None for all.
        bias: Whether there is a bias b for each output channel.
        weights: "tied": the kernel is the parameter and head weights are a linear function of it. "free": head
            weights are parameters of their own.
        values: "identity": a head carries the whole token and W_h maps it to the output. "factorized": W_h is
            a product of rank r_h.
        rank: Largest rank of a factorized convolution head; None for the exact plan.
        average: The kernel is 1 x 1 on the mean of the pixels that the geometry's kernel covers.
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
        leak: tuple[float, float],
        slots: list[int] | None = None,
        bias: bool = True,
        weights: str = "tied",
        values: str = "identity",
        rank: int | None = None,
        average: bool = False,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_choice("weights", weights, ("tied", "free"))
        check_choice("values", values, ("identity", "factorized"))
        if values == "factorized" and weights == "tied":
            raise ConstructionError("factorized values have weights of their own: use weights='free' with them")
        if rank is not None and (values != "factorized" or rank < 1):
            raise ConstructionError(f"rank={rank}: give a rank of at least 1, and values='factorized' with it")
        self.geometry, self.leak, self.slots, self.average = geometry, leak, slots, average
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.weights, self.values = weights, values
        dtype = dtype or torch.get_default_dtype()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        width_in = in_channels // groups * math.prod(geometry.in_patch)
        width_out = out_channels // groups * math.prod(geometry.patch)
        self.ranks = None
        if weights == "tied":
            placement = build_head_placement(geometry, leak=leak)
            if average:
                placement = placement.mean(dim=1, keepdim=True)
            self.register_buffer("placement", placement.to(dtype), persistent=False)
            kernel_size = (1, 1) if average else (geometry.y.kernel, geometry.x.kernel)
            self.kernel = parameter(out_channels, in_channels // groups, *kernel_size)
        elif values == "identity":
            self.head_weight = parameter(geometry.heads, groups, width_in, width_out)
        else:
            self.ranks = plan_ranks(
                geometry, in_channels=in_channels, out_channels=out_channels, groups=groups, cap=rank
            )
            self.value_weight = parameter(groups, width_in, sum(self.ranks))
            self.out_weight = parameter(groups, sum(self.ranks), width_out)
        self.bias = parameter(out_channels) if bias else None
        if slots is not None:
            self.register_buffer("slot_index", torch.tensor(slots), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random start: weights scaled to keep the variance."""
        if self.weights == "tied":
            nn.init.kaiming_normal_(self.kernel, mode="fan_out", nonlinearity="relu")
        elif self.values == "identity":
            heads, _, width_in, _ = self.head_weight.shape
            nn.init.trunc_normal_(self.head_weight, std=(heads * width_in) ** -0.5)
        else:
            nn.init.trunc_normal_(self.value_weight, std=self.value_weight.shape[1] ** -0.5)
            nn.init.trunc_normal_(self.out_weight, std=self.out_weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def load_kernel(self, kernel: Tensor, bias: Tensor | None = None) -> float:
        """Start as the convolution with this kernel.

        Args:
            kernel: (C_out, C_in/G, Kh, Kw), or (C_out, C_in/G, 1, 1) of an average.
            bias: (C_out,), needed where the layer has a bias.

        Returns:
            Share of the kernel's energy that the weights hold: 1 unless a rank was capped.
        """
        energy = 1.0
        if self.average and self.weights == "free":
            size = self.geometry.y.kernel, self.geometry.x.kernel
            kernel = kernel.double().expand(-1, -1, *size) / math.prod(size)
        if self.weights == "tied":
            self.kernel.copy_(kernel)
        elif self.values == "identity":
            self.head_weight.copy_(kernel_to_heads(kernel, self.geometry, leak=self.leak, groups=self.groups))
        else:
            values, outputs, energy = factorize_heads(
                kernel, self.geometry, leak=self.leak, ranks=self.ranks, groups=self.groups
            )
            self.value_weight.copy_(torch.cat(values, dim=2))
            self.out_weight.copy_(torch.cat(outputs, dim=1))
        if self.bias is not None:
            self.bias.copy_(bias)
        return energy

    def build(self) -> Tensor:
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

    def attend_factorized(self, maps: Tensor, tokens: Tensor) -> Tensor:
        """Outputs (B, Nq, D_out) of tokens (B, Nk, D_in), through the narrow values of each head.

        Args:
            maps: (B|1, H, Nq, Nk) of all heads of the attention.
            tokens: (B, Nk, D_in).
        """
        grouped = tokens.unflatten(2, (self.groups, -1)).transpose(1, 2)  # B G Nk Din/G
        values = (grouped @ self.value_weight).split(self.ranks, dim=-1)  # H times B G Nk r
        maps = self.select(maps, 1).unbind(1)  # H times B|1 Nq Nk
        seen = torch.cat([m.unsqueeze(1).to(v.dtype) @ v for m, v in zip(maps, values, strict=True)], dim=-1)
        return (seen @ self.out_weight).transpose(1, 2).flatten(2)  # B G Nq Dout/G -> B Nq Dout

    def select(self, per_head: Tensor, dim: int) -> Tensor:
        """The part of a tensor with one entry a head of the attention that belongs to these heads."""
        return per_head if self.slots is None else per_head.index_select(dim, self.slot_index)

    def add_bias(self, tokens: Tensor) -> Tensor:
        """Tokens (B, Nq, D_out) with the bias of each pixel's channels added."""
        return tokens if self.bias is None else tokens + self.bias.repeat_interleave(math.prod(self.geometry.patch))

    @property
    def is_depthwise(self) -> bool:
        """Whether a head has one factor for each channel: depthwise, on pixels as tokens."""
        pixels = math.prod(self.geometry.patch) == math.prod(self.geometry.in_patch) == 1
        return pixels and self.in_channels == self.out_channels == self.groups

    def extra_repr(self) -> str:
        """Short summary for print(model)."""
        return f"{self.in_channels} -> {self.out_channels}, weights={self.weights}, values={self.values}"
