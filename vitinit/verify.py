"""An export against the CNN that it was converted from: the same logits, on random and on real images."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from vitinit.attention.conv import AttentionConv2d
from vitinit.convert import TOLERANCES, relative_error
from vitinit.errors import DataError
from vitinit.trace import read_convolution

BATCH = 8
ROUNDING = 2**-20  # of what a conversion computes in float32, as a part of the largest number of its tensor
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm")


def compare(
    model: nn.Module, cnn: nn.Module, sets: dict[str, Iterable[Tensor]], limits: dict[str, float]
) -> list[dict]:
    """Errors of an export's logits and number of equal predictions, one row for each set of images.

    Args:
        model: The export.
        cnn: Its source.
        sets: Normalized images (C, height, width) by the name of their set.
        limits: Largest relative error in "float64" and "float32".
    """
    pairs = {
        "float64": (_restore_precision(model, cnn), copy.deepcopy(cnn).double()),
        "float32": (model, cnn),
    }
    return [{"images": name, **_compare_set(pairs, images, limits)} for name, images in sets.items()]


@torch.no_grad()
def _compare_set(
    pairs: dict[str, tuple[nn.Module, nn.Module]], images: Iterable[Tensor], limits: dict[str, float]
) -> dict:
    logits = {name: ([], []) for name in pairs}
    for batch in batch_images(images):
        for name, pair in pairs.items():
            for outputs, net in zip(logits[name], pair, strict=True):
                outputs.append(net(batch.to(getattr(torch, name))))
    errors = {name: relative_error(*outputs) for name, outputs in logits.items()}
    got, expected = (torch.cat(outputs).argmax(dim=1) for outputs in logits["float32"])
    return {
        "count": len(got), **{f"{name}_error": error for name, error in errors.items()},
        "same_predictions": int((got == expected).sum()),
        "equal": all(errors[name] <= limit for name, limit in limits.items()),
    }  # fmt: skip


@torch.no_grad()
def _restore_precision(model: nn.Module, cnn: nn.Module) -> nn.Module:
    """The export in float64, with the numbers that its file rounds to float32 in full: what the construction computes
    in float64 where no more than rounding lies between that and what is stored, and what is stored elsewhere."""
    full, stored = copy.deepcopy(cnn).double(), model.state_dict()
    for name, layer in list_attention(model).items():
        if isinstance(full.get_submodule(name), AttentionConv2d):  # the source was an export itself
            continue
        conv = read_convolution(full.get_submodule(name), layer.geometry.in_size)
        attention = AttentionConv2d(**layer.spec, dtype=torch.float64)
        attention.load_kernel(conv.weight, conv.bias)
        full.set_submodule(name, attention)
    state = full.state_dict()
    for name, value in state.items():
        kept = stored[name].to(value.dtype)
        is_rounded = (value - kept).abs() <= ROUNDING * kept.abs().max()
        state[name] = torch.where(is_rounded, value, kept)
    full.load_state_dict(state)
    return full.eval()


@torch.no_grad()
def attention_counts(model: nn.Module, images: Tensor) -> bool:
    """Whether the logits depend on the attention layers at all."""
    logits = model(images)
    hooks = [m.register_forward_hook(lambda _, __, output: output * 0) for m in list_attention(model).values()]
    try:
        return relative_error([model(images)], [logits]) > TOLERANCES[logits.dtype]
    finally:
        for hook in hooks:
            hook.remove()


def list_attention(model: nn.Module) -> dict[str, AttentionConv2d]:
    """The attention layers of a network by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AttentionConv2d)}


def batch_images(images: Iterable[Tensor]) -> Iterator[Tensor]:
    """Images in batches of `BATCH`."""
    images = iter(images)
    while chunk := list(islice(images, BATCH)):
        yield torch.stack(chunk)


def load_sample(model: nn.Module) -> Iterator[Tensor]:
    """Normalized crops of matplotlib's sample photo."""
    from matplotlib.cbook import get_sample_data
    from PIL import Image

    try:
        photo = Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)).convert("RGB")
    except OSError as error:
        raise DataError(f"matplotlib's sample photo is missing ({error}): give --images FOLDER") from error
    prepare, side = create_transform(**resolve_model_data_config(model)), min(photo.size) // 2
    for top in range(0, photo.height - side + 1, side // 2):
        for left in range(0, photo.width - side + 1, side // 2):
            yield prepare(photo.crop((left, top, left + side, top + side)))


def load_folder(folder: Path, model: nn.Module) -> Iterator[Tensor]:
    """The normalized images of a folder and those below it."""
    from PIL import Image, ImageOps

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
    if not paths:
        raise DataError(f"--images {folder}: expected a folder that holds images ({', '.join(PICTURES)})")
    prepare = create_transform(**resolve_model_data_config(model))
    for path in paths:
        try:
            with Image.open(path) as file:
                image = ImageOps.exif_transpose(file).convert("RGB")
        except Exception as error:  # PIL has a type for each kind of damage
            raise DataError(f"{path} is not a readable image ({error}): remove it from the folder") from error
        yield prepare(image)
