"""Batched augmentation whose randomness is a function of (seed, step, position in the global batch).

Every process draws the parameters of the whole global batch and applies those of its own rows, so that one
process and four see the same pixels. Each kind of randomness has a stream of its own: switching the flip on
does not change the crops.

Letters: B images of the global batch, b = B / world of one process, (H, W) pixels, n images of the data set.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def epoch_batches(n: int, *, batch_size: int, seed: int, epoch: int) -> Tensor:
    """Returns the global batches of an epoch, (steps, B) positions in a training set of n images.

    One permutation per (seed, epoch); the images left over after the last full batch are dropped. A training
    set smaller than `batch_size` is one batch of all its images, (1, n).

    Raises:
        ValueError: `n` or `batch_size` below 1.
    """
    if n < 1 or batch_size < 1:
        raise ValueError(f"n={n}, batch_size={batch_size}: expected at least one image and a batch of one")
    order = torch.randperm(n, generator=_generator(seed, epoch, "order"))  # (n,)
    size = min(batch_size, n)
    return order[: n // size * size].view(-1, size)  # (steps, B)


def normalize(images: Tensor, *, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Returns (images / 255 - mean) / std of uint8 images (b, 3, H, W), float32; mean and std by channel."""
    centre, scale = (255 * images.new_tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (mean, std))
    return (images - centre).div_(scale)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What happens to training images on their way into the network; nothing but normalization by default.

    Attributes:
        crop_padding: Pixels of reflection around the image before a random crop of its old size; 0 is off.
        hflip: Mirror half of the images.
        mixup: Alpha of mixup's Beta(alpha, alpha), one weight a batch (Zhang et al. 2018); 0 is off.
        cutmix: Alpha of cutmix's Beta(alpha, alpha), one box a batch (Yun et al. 2019); 0 is off. With
            mixup on as well, each batch takes one of the two at random.
        smoothing: Part of the label's mass that is spread evenly over all classes.
        mean: Of the source CNN's input, a number a channel, for pixels from 0 to 1.
        std: Likewise.
        num_classes: Width of soft targets.
    """

    crop_padding: int = 0
    hflip: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.0
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int

    def batch(
        self, images: Tensor, labels: Tensor, indices: Tensor, *, seed: int, step: int, rank: int = 0,
        world: int = 1,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns this process's augmented, normalized images and their targets.

        Args:
            images: The whole training set, uint8 (n, 3, H, W), on any device.
            labels: Its classes, int64 (n,).
            indices: The global batch, (B,) positions in the training set; the same on every process.
            seed: Of the run.
            step: Number of the batch in the run: the same step is augmented the same way again.
            rank: This process, of `world`; it takes the rank-th part of the global batch.
            world: Number of processes.

        Returns:
            Images (b, 3, H, W) in float32, and targets: classes (b,), or class probabilities (b, num_classes)
            in float32 with smoothing, mixup or cutmix.

        Raises:
            ValueError: A global batch that `world` does not divide, or a crop padding that the image is too
                small to reflect.
        """
        size = len(indices)
        if size % world:
            raise ValueError(f"a global batch of {size} images cannot be shared evenly by {world} processes")
        indices = indices.to(images.device)
        own = torch.arange(size).view(world, -1)[rank]  # (b,)
        geometry = self._draw_geometry(size, images.shape[-2:], seed, step)

        def take(positions: Tensor) -> tuple[Tensor, Tensor]:
            """Augmented images and targets of these positions in the global batch."""
            rows = indices[positions.to(images.device)]
            x = images[rows]  # (b, 3, H, W)
            if geometry is not None:
                x = _gather_pixels(x, *(part[positions].to(x.device) for part in geometry))
            y = labels[rows]  # (b,)
            if self.smoothing or self.mixup or self.cutmix:
                y = F.one_hot(y, self.num_classes).float()  # (b, num_classes)
                y = y * (1 - self.smoothing) + self.smoothing / self.num_classes
            return normalize(x, mean=self.mean, std=self.std), y

        x, y = take(own)
        if not (self.mixup or self.cutmix):
            return x, y
        partners = torch.randperm(size, generator=_generator(seed, step, "partners"))  # (B,)
        # A partner may be another process's image: it is augmented again here, exactly as it is there.
        other_x, other_y = take(partners[own])
        weight, box = self._draw_mixing(images.shape[-2:], seed, step)
        if box is None:
            x = x * weight + other_x * (1 - weight)
        else:
            top, bottom, left, right = box
            x[..., top:bottom, left:right] = other_x[..., top:bottom, left:right]
        return x, y * weight + other_y * (1 - weight)

    def _draw_geometry(self, size: int, shape: tuple[int, int], seed: int, step: int) -> tuple[Tensor, Tensor] | None:
        """Source rows (B, H) and columns (B, W) of every output pixel, or None where nothing moves."""
        if not (self.crop_padding or self.hflip):
            return None
        if self.crop_padding >= min(shape):
            raise ValueError(
                f"crop_padding={self.crop_padding} is more than {shape[0]}x{shape[1]} pixels can reflect: use "
                f"at most {min(shape) - 1}"
            )
        rows, columns = (torch.arange(side).expand(size, -1) for side in shape)
        if self.hflip:
            flips = torch.rand(size, generator=_generator(seed, step, "flip")) < 0.5  # (B,)
            columns = torch.where(flips[:, None], columns.flip(1), columns)
        if self.crop_padding:
            generator = _generator(seed, step, "crop")
            offsets = torch.randint(2 * self.crop_padding + 1, (2, size, 1), generator=generator)
            offsets -= self.crop_padding  # (2, B, 1)
            rows, columns = _reflect(rows + offsets[0], shape[0]), _reflect(columns + offsets[1], shape[1])
        return rows, columns

    def _draw_mixing(
        self, shape: tuple[int, int], seed: int, step: int
    ) -> tuple[float, tuple[int, int, int, int] | None]:
        """Weight of an image against its partner, and cutmix's box as (top, bottom, left, right)."""
        random = np.random.default_rng(_hash_seed(seed, step, "mixing"))  # torch's beta takes no generator
        cuts = random.random() < 0.5 if self.mixup and self.cutmix else bool(self.cutmix)
        alpha = self.cutmix if cuts else self.mixup
        weight = float(random.beta(alpha, alpha))
        if not cuts:
            return weight, None
        height, width = shape
        half = 0.5 * math.sqrt(1 - weight)  # of the box's side, as a part of the image's
        y, x = random.random(2).tolist()
        top, bottom = (round(height * min(max(edge, 0.0), 1.0)) for edge in (y - half, y + half))
        left, right = (round(width * min(max(edge, 0.0), 1.0)) for edge in (x - half, x + half))
        # The box is clipped at the border and rounded, so the weight is what is left of the image.
        return 1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right)


def _gather_pixels(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """out[b, c, y, x] = images[b, c, rows[b, y], columns[b, x]] for images (b, 3, H, W)."""
    places = rows[:, :, None] * images.shape[-1] + columns[:, None, :]  # (b, H, W)
    flat = images.flatten(2)  # (b, 3, H·W)
    return flat.gather(2, places.flatten(1)[:, None].expand_as(flat)).view_as(images)


def _reflect(places: Tensor, side: int) -> Tensor:
    """Places outside 0..side-1 mirrored at the border pixel, which is not repeated."""
    return (side - 1) - ((side - 1) - places.abs()).abs()


def _generator(seed: int, step: int, stream: str) -> torch.Generator:
    return torch.Generator().manual_seed(_hash_seed(seed, step, stream))


def _hash_seed(seed: int, step: int, stream: str) -> int:
    """63 bits that differ for every (seed, step, stream), so that neighbouring seeds share nothing."""
    digest = hashlib.sha256(f"{seed}:{step}:{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
