"""The residual networks that He et al. (2016, section 4.2) trained on CIFAR-10, registered with timm.

A 3×3 stem of 16 channels, three stages of 16, 32 and 64 channels at strides 1, 2 and 4, mean pooling and one
linear layer; the depth is 6n + 2 with n basic blocks a stage. Importing this module registers the names:
``timm.create_model("resnet20_cifar", num_classes=10)``.

Where the width doubles, the shortcut is the paper's option A: every second pixel, zeros for the new channels.
The published weights write it as a 1×1 convolution of stride 2 with a fixed 0/1 kernel and an identity batch
norm, under timm's key names; so does this file, with both kept fixed in training too.
"""

import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn


class FixedBatchNorm2d(nn.Module):
    """A batch norm that uses its stored statistics in training as well: a fixed affine map per channel.

    Freshly made it is the identity: the variance is 1 − eps, so its root is that of 1. It never trains.
    The batch statistics of an ordinary norm would rescale an option-A shortcut in training. It has the state
    of an `nn.BatchNorm2d` without being one, because what walks a network for batch norms (the conversion to
    SyncBatchNorm, for one) would make it an ordinary norm again.

    Args:
        num_features: Channels.
        device: Where the tensors are made.
        dtype: Their type.
    """

    def __init__(
        self, num_features: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.num_features, self.eps = num_features, 1e-5
        ones = torch.ones(num_features, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros_like(ones), requires_grad=False)
        self.register_buffer("running_mean", torch.zeros_like(ones))
        self.register_buffer("running_var", ones - self.eps)
        # Counts nothing; the published files have it.
        self.register_buffer("num_batches_tracked", torch.zeros((), device=device, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """The normalized map, shaped as x (B, C, height, width)."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class CifarResNet(ResNet):
    """timm's ``ResNet`` with the CIFAR stem, three stages and option-A shortcuts.

    ``layer4`` is an empty stage without parameters (timm's forward names it), so that level 4 of
    ``forward_intermediates`` repeats level 3. Unlike timm's, the last norm of a branch starts at 1 and not at
    0, as in the paper; a converted untrained network would otherwise be one of its shortcuts alone.

    Args:
        depth: Number of weighted layers, 6n + 2: 8, 20, 32, 44, 56, 110.
        num_classes: Width of the classifier; 0 for none.
        in_chans: Channels of the image.
        global_pool: timm's name of the pooling before the classifier.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block; the blocks before it rise to it linearly.
        zero_init_last: Start the last norm of every branch at 0.
        device: Where the parameters are made.
        dtype: Their type.
    """

    def __init__(
        self,
        *,
        depth: int,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        zero_init_last: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ValueError(f"depth: expected 6n + 2 (8, 14, 20, ...), got {depth}")
        super().__init__(
            BasicBlock,
            layers=(blocks, blocks, blocks),
            channels=(16, 32, 64),
            num_classes=num_classes,
            in_chans=in_chans,
            global_pool=global_pool,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            # timm fixes the width after a plain stem at 64; only a deep stem can hand 16 channels on.
            stem_type="deep",
            stem_width=8,
            zero_init_last=False,  # once zero, a scale would stay zero in the second drawing below
            device=device,
            dtype=dtype,
        )
        self.conv1 = nn.Conv2d(in_chans, 16, 3, padding=1, bias=False, device=device, dtype=dtype)
        self.maxpool = nn.Identity()
        self.layer4 = nn.Sequential()
        for stage in (self.layer2, self.layer3):
            width = stage[0].downsample[0].out_channels
            stage[0].downsample[1] = FixedBatchNorm2d(width, device=device, dtype=dtype)
        for info, reduction in zip(self.feature_info, (1, 1, 2, 4), strict=True):
            info["reduction"] = reduction
        self.init_weights(zero_init_last=zero_init_last)

    def init_weights(self, zero_init_last: bool = False) -> None:
        """Draws the convolutions (He et al. 2015) and writes the fixed shortcuts.

        Args:
            zero_init_last: Start the last norm of every branch at 0.
        """
        super().init_weights(zero_init_last=zero_init_last)
        for stage in (self.layer2, self.layer3):
            projection = stage[0].downsample[0]
            padding = (projection.out_channels - projection.in_channels) // 2  # zero channels on either side
            nn.init.zeros_(projection.weight)
            nn.init.eye_(projection.weight.data[padding : padding + projection.in_channels, :, 0, 0])
            projection.weight.requires_grad_(False)


def _cfg() -> dict:
    return {
        "url": "",
        "num_classes": 10,
        "input_size": (3, 32, 32),
        "pool_size": (8, 8),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "conv1",
        "classifier": "fc",
    }


default_cfgs = generate_default_cfgs({f"resnet{depth}_cifar": _cfg() for depth in (8, 20, 32, 44, 56, 110)})


def _create(depth: int, pretrained: bool, kwargs: dict) -> CifarResNet:
    return build_model_with_cfg(
        CifarResNet,
        f"resnet{depth}_cifar",
        pretrained,
        feature_cfg={"out_indices": (0, 1, 2, 3)},
        depth=depth,
        **kwargs,
    )


@register_model
def resnet8_cifar(pretrained: bool = False, **kwargs) -> CifarResNet:
    """One block a stage: the smallest of the family, for tests and first trials."""
    return _create(8, pretrained, kwargs)


@register_model
def resnet20_cifar(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Three blocks a stage, 0.27 M parameters."""
    return _create(20, pretrained, kwargs)


@register_model
def resnet32_cifar(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Five blocks a stage, 0.46 M parameters."""
    return _create(32, pretrained, kwargs)


@register_model
def resnet44_cifar(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Seven blocks a stage, 0.66 M parameters."""
    return _create(44, pretrained, kwargs)


@register_model
def resnet56_cifar(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Nine blocks a stage, 0.85 M parameters."""
    return _create(56, pretrained, kwargs)


@register_model
def resnet110_cifar(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Eighteen blocks a stage, 1.7 M parameters."""
    return _create(110, pretrained, kwargs)
