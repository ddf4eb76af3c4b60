"""Batch norm over the global batch, so that 1, 2 or 4 processes train the same network."""

from __future__ import annotations

import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d, convert_sync_batchnorm
from torch import Tensor, nn


def synchronize_batch_norms(model: nn.Module) -> nn.Module:
    """Make every trained batch norm see all processes' images; state-dict keys stay the same.

    On CUDA this is PyTorch's own SyncBatchNorm. That one refuses to run on CPU, so there the norms change class
    in place.
    """
    if next(model.parameters()).is_cuda:
        return convert_sync_batchnorm(model)
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = _GlobalBatchNorm2d
        elif type(module) is BatchNormAct2d:
            module.__class__ = _GlobalBatchNormAct2d
    return model


class _GlobalBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose training statistics are those of all processes' equally large batches."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return _normalize_globally(self, x)


class _GlobalBatchNormAct2d(BatchNormAct2d):
    """The same for timm's batch norm with an activation behind it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return self.act(self.drop(_normalize_globally(self, x)))


def _normalize_globally(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    mean, var = batch_statistics(norm, x)
    # Written out: F.batch_norm gives no gradient to a mean and a variance.
    normalized = (x.to(mean.dtype) - mean[:, None, None]) * (var + norm.eps).rsqrt()[:, None, None]
    if norm.affine:
        normalized = normalized * norm.weight[:, None, None] + norm.bias[:, None, None]
    return normalized.to(x.dtype)


def batch_statistics(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (C,) of x (B, C, ...) over all processes; the norm's running statistics take them in.

    Args:
        norm: Has the running statistics and the momentum of an `nn.BatchNorm2d`.
        x: Equally many images in each process.
    """
    parallel = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    axes = [dim for dim in range(x.ndim) if dim != 1]
    if parallel:
        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean = _SumOverProcesses.apply(wide.sum(dim=axes)) / count
        centred = wide - mean.view(-1, *[1] * (x.ndim - 2))
        var = _SumOverProcesses.apply(centred.square().sum(dim=axes)) / count
    else:
        count = x.numel() // x.shape[1]
        var, mean = torch.var_mean(wide, dim=axes, correction=0)
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        momentum = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked)
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
        norm.running_var.lerp_((var * count / max(count - 1, 1)).to(norm.running_var.dtype), momentum)
    return mean, var


class _SumOverProcesses(torch.autograd.Function):
    """Sum of a tensor over all processes; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return _SumOverProcesses.forward(ctx, gradient.contiguous())
