"""Two things on disk: the state of a run, to resume it, and an export in timm's layout, to share it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.models import save_for_hf
from torch import nn

from vitinit.errors import CheckpointError

STATE_FILE = "state.pt"
MODEL_FOLDER = "model"


def save_state(state: dict, folder: Path) -> None:
    """Write a run's state so that a crash at any moment leaves the old one or the new one, never half of it."""
    target = folder / STATE_FILE
    partial = target.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, target)


def load_state(folder: Path) -> dict:
    """The state that `save_state` wrote.

    Raises:
        CheckpointError: There is none, or the file is damaged.
    """
    target = folder / STATE_FILE
    if not target.exists():
        raise CheckpointError(f"{folder} holds no {STATE_FILE} to resume from: start the run without --resume")
    try:
        state = torch.load(target, map_location="cpu", weights_only=True)
        return {key: state[key] for key in ("recipe", "step", "model", "optimizer", "ema", "scaler", "record")}
    except Exception as error:  # a cut zip file, a foreign pickle or a missing key: torch has a type for each
        raise CheckpointError(
            f"{target} is incomplete or not a vitinit state ({type(error).__name__}): "
            "delete it, or start again with --overwrite"
        ) from error


def export_model(
    model: nn.Module, folder: Path, *, classes: tuple[str, ...], mean: tuple[float, ...], std: tuple[float, ...],
    img_size: tuple[int, int], card: str, architecture: str | None = None, model_args: dict | None = None,
) -> None:  # fmt: skip
    """Write a model in timm's layout: config.json, model.safetensors and a model card.

    Args:
        model: A timm model.
        folder: Where to; an export that is there already is replaced once the new one is complete.
        classes: Class names, in the order of the logits.
        mean: Channel means that the images are normalized with.
        std: Channel deviations.
        img_size: (height, width) in pixels.
        card: The model card, Markdown.
        architecture: timm's name to build the model by, if it is not the model's own.
        model_args: Arguments of that name.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    data = {"mean": mean, "std": std, "input_size": (3, *img_size), "crop_pct": 1.0}
    overrides = {"num_classes": len(classes), **data}
    if architecture:
        overrides["architecture"] = architecture
    # What timm replaces where a user asks for other classes.
    overrides["classifier"] = next(name for name, part in model.named_modules() if part is model.get_classifier())
    save_for_hf(
        model, partial, safe_serialization=True, model_args=model_args, data_config=data,
        model_config={"label_names": list(classes), "pretrained_cfg": overrides},
    )  # fmt: skip
    (partial / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def load(folder: str | Path) -> nn.Module:
    """The model of an export, in evaluation mode; the same as `timm.create_model("local-dir:FOLDER")`.

    Args:
        folder: An export (config.json and model.safetensors), or a finished run's folder, which holds one.

    Raises:
        CheckpointError: A missing or truncated file, or weights of another architecture.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists() and (folder / MODEL_FOLDER / "config.json").exists():
        folder = folder / MODEL_FOLDER
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} is not an export: expected config.json and model.safetensors in it")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = config["architecture"]
        if not isinstance(architecture, str):
            raise TypeError(f"the architecture is {architecture!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} is damaged ({error}): export the model again") from error
    if not timm.is_model(architecture):
        raise CheckpointError(
            f"{folder} was exported from the architecture {architecture!r}, which neither timm {timm.__version__} "
            "nor this vitinit knows: update them"
        )
    try:
        with safe_open(folder / "model.safetensors", framework="pt") as tensors:
            stored = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{folder / 'model.safetensors'} is truncated or damaged ({error}): copy or export it again"
        ) from error
    try:
        # Without weights first: timm would report a mismatch in pages of keys, and half of a cut file.
        args = {**config.get("model_args", {}), "num_classes": config["num_classes"]}
        expected = {n: tuple(t.shape) for n, t in timm.create_model(architecture, **args).state_dict().items()}
    except Exception as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a {architecture} ({error})") from error
    if stored != expected:
        wrong = sorted({name for name, _ in stored.items() ^ expected.items()})
        raise CheckpointError(
            f"{folder / 'model.safetensors'} does not belong to this config.json: {len(wrong)} tensors differ from "
            f"{architecture}'s, {', '.join(wrong[:3])} among them; take both files from the same export"
        )
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
