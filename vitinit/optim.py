"""Learning rates and parameter groups: pure functions of the step and of the model."""

from __future__ import annotations

import math

import torch
from timm.models import group_parameters
from torch import nn

POSITION_PARAMETERS = ("bias_table", "query.weight", "key.weight")


def learning_rate(step: int, *, steps: int, warmup_steps: float, peak: float, floor: float = 0.0) -> float:
    """Rate of a step: a linear rise to `peak` over the warm-up, then a cosine to `floor` at the last step.

    A function of the step alone, so a resumed run and any number of processes see the same rates.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1.0, steps - 1 - warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def group_by_rate(
    model: nn.Module, *, weight_decay: float, position_lr_scale: float = 1.0, layer_decay: float | None = None
) -> list[dict]:
    """Optimizer groups, each with its `weight_decay` and an `lr_scale` for the schedule to multiply.

    Positions (bias tables), norms and biases are not decayed: a decayed table would blur the heads while their
    output weights still assume the old sharpness.

    Args:
        model: A timm model.
        weight_decay: For all other weights.
        position_lr_scale: Factor on the rate of bias tables, queries and keys.
        layer_decay: Factor on the rate from one layer (timm's `group_matcher`) to the one before it; None for 1.
    """
    layers = {}
    if layer_decay is not None:
        layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    last = max(layers.values(), default=0)
    kept = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    groups: dict[tuple[float, float], dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_position = name.endswith(POSITION_PARAMETERS)
        scale = (position_lr_scale if is_position else 1.0) * (layer_decay or 1.0) ** (last - layers.get(name, last))
        decays = parameter.ndim > 1 and not name.endswith("bias_table") and name not in kept
        key = (scale, weight_decay if decays else 0.0)
        group = groups.setdefault(key, {"params": [], "lr_scale": key[0], "weight_decay": key[1]})
        group["params"].append(parameter)
    return list(groups.values())


def build_optimizer(groups: list[dict], *, name: str, momentum: float) -> torch.optim.Optimizer:
    """AdamW or SGD with Nesterov momentum over `group_by_rate`'s groups; the schedule sets the rates."""
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=momentum > 0)
    return torch.optim.AdamW(groups, lr=0.0)
