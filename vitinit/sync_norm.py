"""Batch norm over the global batch, so that 1, 2 or 4 processes train the same network."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, convert_sync_batchnorm
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


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
    count = x.numel() // x.shape[1] * dist.get_world_size()
    wide = x.float()
    mean = all_reduce(wide.sum(dim=(0, 2, 3))) / count
    var = all_reduce((wide - mean[:, None, None]).square().sum(dim=(0, 2, 3))) / count
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        momentum = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked)
        norm.running_mean.lerp_(mean, momentum)
        norm.running_var.lerp_(var * count / (count - 1), momentum)
    return F.batch_norm(wide, mean, var, norm.weight, norm.bias, training=False, eps=norm.eps).to(x.dtype)
