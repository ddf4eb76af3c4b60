"""Two things on disk: the state of a run, to resume it, and an export in timm's layout, to share it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from timm.models import save_for_hf
from torch import Tensor, nn

from vitinit.errors import CheckpointError
from vitinit.provenance import describe_environment

STATE_FILE = "state.pt"
MODEL_FOLDER = "model"
RECORD = "vitinit"  # the key of config.json with the export's provenance; timm reads past it


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


def hash_tensors(state: dict[str, Tensor]) -> str:
    """SHA-256 of tensors by their names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def export_model(
    model: nn.Module, folder: Path, *, classes: tuple[str, ...], mean: tuple[float, ...], std: tuple[float, ...],
    img_size: tuple[int, int], card: str, architecture: str | None = None, model_args: dict | None = None,
    preprocessing: dict | None = None, provenance: dict | None = None,
) -> None:  # fmt: skip
    """Write a model in timm's layout: config.json, model.safetensors and a model card.

    config.json says under "vitinit" where the model comes from, with the environment and hashes of the tensors and of
    the rest of config.json.

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
        preprocessing: timm's other settings of an image on its way in (crop_pct, crop_mode, interpolation); by
            default the whole image is resized.
        provenance: Plain values that say what was exported: source, conversion, whether it was trained.
    """
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    data = {"mean": mean, "std": std, "input_size": (3, *img_size), **(preprocessing or {"crop_pct": 1.0})}
    overrides = {"num_classes": len(classes), **data}
    if architecture:
        overrides["architecture"] = architecture
    # What timm replaces where a user asks for other classes.
    overrides["classifier"] = next(name for name, part in model.named_modules() if part is model.get_classifier())
    record = {**(provenance or {}), "environment": describe_environment(), "sha256": hash_tensors(model.state_dict())}
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        new, old = Path(place) / "new", Path(place) / "old"
        save_for_hf(
            model, new, safe_serialization=True, model_args=model_args, data_config=data,
            model_config={"label_names": list(classes), "pretrained_cfg": overrides, RECORD: record},
        )  # fmt: skip
        (new / "README.md").write_text(card, encoding="utf-8")
        path = new / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config[RECORD]["config_sha256"] = _hash_config(config)
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")
        (new / "model.safetensors").chmod(path.stat().st_mode)  # safetensors writes it for its owner alone
        try:
            if folder.exists():
                os.replace(folder, old)
            os.replace(new, folder)
        finally:
            if not folder.exists() and old.exists():
                os.replace(old, folder)


def _hash_config(config: dict) -> str:
    """SHA-256 of a config.json, but for the hash in it."""
    record = {key: value for key, value in config[RECORD].items() if key != "config_sha256"}
    return hashlib.sha256(json.dumps({**config, RECORD: record}, sort_keys=True).encode()).hexdigest()


def find_export(folder: str | Path) -> Path:
    """The folder of an export: itself, or `model` in the folder of a finished run.

    Raises:
        CheckpointError: There is none.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists() and (folder / MODEL_FOLDER / "config.json").exists():
        folder = folder / MODEL_FOLDER
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} is not an export: expected config.json and model.safetensors in it")
    return folder


def read_config(folder: str | Path) -> dict:
    """What config.json of an export says; its "vitinit" is empty where an older vitinit wrote it.

    Raises:
        CheckpointError: There is no export, or its config.json is damaged or changed.
    """
    path = find_export(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config["architecture"], str):
            raise TypeError(f"the architecture is {config['architecture']!r}")
        for key in (RECORD, "pretrained_cfg"):
            if not isinstance(config.get(key, {}), dict):
                raise TypeError(f'"{key}" is {config[key]!r}')
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): export the model again") from error
    recorded = config.get(RECORD, {}).get("config_sha256")
    if recorded and _hash_config(config) != recorded:
        raise CheckpointError(
            f"{path} was changed since it was exported, its hash is not the recorded one: copy or export it again, or "
            f'remove "config_sha256" from it to use it as it is'
        )
    return {RECORD: {}, **config}


def load(folder: str | Path) -> nn.Module:
    """The model of an export, in evaluation mode; the same as `timm.create_model("local-dir:FOLDER")`.

    Args:
        folder: An export (config.json and model.safetensors), or a finished run's folder, which holds one.

    Raises:
        CheckpointError: A missing, truncated or changed file, or weights of another architecture.
    """
    folder = find_export(folder)
    config = read_config(folder)
    architecture = config["architecture"]
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
    recorded = config[RECORD].get("sha256")
    if recorded and hash_tensors(load_file(folder / "model.safetensors")) != recorded:
        raise CheckpointError(
            f"{folder / 'model.safetensors'} was changed since it was exported: its tensors do not have the hash "
            f"{str(recorded)[:12]} that config.json records; copy or export it again"
        )
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
