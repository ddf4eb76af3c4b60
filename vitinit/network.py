"""The network that a recipe trains: its source CNN, what becomes of it, and the record that rebuilds both."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import nn

from vitinit.attention_cnn import ARCHITECTURE
from vitinit.checkpoint import hash_tensors
from vitinit.convert import attention_specs, convert
from vitinit.data import LowDataSplits
from vitinit.errors import RecipeError, SourceError
from vitinit.recipe import Recipe
from vitinit.report import ConversionReport
from vitinit.sources import Source, load_source, parse_source


@dataclass(frozen=True)
class Network:
    """A network ready to train, and what rebuilds it."""

    model: nn.Module
    architecture: str | None
    model_args: dict | None
    report: ConversionReport | None
    convert_seconds: float


def build_network(recipe: Recipe, source: Source, splits: LowDataSplits) -> Network:
    """The network that a recipe trains: the source itself, or its conversion, or the same from random init.

    Raises:
        ConversionError: A source whose convolutions cannot be converted.
    """
    if recipe.model == "source":
        return Network(source.model, None, None, None, 0.0)
    started = time.perf_counter()
    img_size = tuple(splits.test.images.shape[-2:])
    converted, report = convert(source.model, img_size=img_size, **read_convert_settings(recipe))
    args = describe_attention(source, converted)
    # Built by timm from names and numbers, exactly as an export will be.
    model = timm.create_model(ARCHITECTURE, **args, drop_path_rate=recipe.train.drop_path)
    if recipe.init == "construction":
        model.load_state_dict(converted.state_dict())
    return Network(model, ARCHITECTURE, args, report, time.perf_counter() - started)


def describe_attention(source: Source, converted: nn.Module) -> dict:
    """The arguments by which timm builds a converted network with random weights."""
    return {
        "source": source.name, "layers": attention_specs(converted),
        "source_args": {k: v for k, v in source.kwargs.items() if k not in ("num_classes", "drop_path_rate")},
        "num_classes": source.kwargs["num_classes"],
    }  # fmt: skip


def record_source(
    source: Source, *, model: str, weights: str | Path | None, weights_classes: int | None = None, pretrained: bool,
    new_classifier: bool = False, seed: int,
) -> dict:  # fmt: skip
    """Plain values by which `rebuild_source` finds the same CNN again, and the hash that proves it.

    Args:
        source: What `sources.load_source` gave.
        model: Its argument, and so the next three.
        weights: A file is recorded by its full path, unless `$VITINIT_WEIGHTS` holds it.
        weights_classes: Width of the classifier in that file.
        pretrained: False for random weights.
        new_classifier: Whether the classifier was replaced by a random one since.
        seed: What torch's generator was seeded with before the CNN was loaded.
    """
    kind, name = parse_source(model)
    return {
        "model": f"local-dir:{_locate(name)}" if kind == "local-dir" else model,
        "weights": None if weights is None else _locate(weights),
        "weights_classes": weights_classes, "pretrained": pretrained,
        "new_classifier": source.model.num_classes if new_classifier else None,
        "seed": seed, "sha256": hash_tensors(source.model.state_dict()),
    }  # fmt: skip


def rebuild_source(record: dict, *, weights: str | Path | None = None) -> Source:
    """The CNN that an export was converted from.

    Args:
        record: What `record_source` gave.
        weights: Where the weights are now, if not where they were: a file, or the folder of a local-dir: source.

    Raises:
        SourceError: It cannot be loaded, or it is another CNN than the one that was converted.
    """
    kind, name = parse_source(record["model"])
    model, weights = record["model"], weights or record["weights"]
    if kind == "train":
        if weights is None:
            raise SourceError(
                f"the source {model} was trained in its run: give its weights, source/model/model.safetensors in "
                "the run's folder, with --weights"
            )
        model = name
    elif kind == "local-dir" and weights:
        model, weights = f"local-dir:{weights}", None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(record["seed"])
        source = load_source(
            model, weights=weights, weights_classes=record["weights_classes"], pretrained=record["pretrained"]
        )
        if record["new_classifier"]:
            source.model.reset_classifier(record["new_classifier"])
    got = hash_tensors(source.model.state_dict())
    if got != record["sha256"]:
        raise SourceError(
            f"{source.description}: these are not the weights that were converted (hash {got[:12]}, recorded "
            f"{record['sha256'][:12]}): give the file or folder that holds those with --weights"
        )
    return source


def _locate(path: str | Path) -> str:
    full = Path(path).expanduser().resolve()
    return str(full if full.exists() else path)


def read_convert_settings(recipe: Recipe) -> dict:
    """A recipe's arguments of `convert`, but for the image size."""
    args = dataclasses.asdict(recipe.convert)
    return {**args, "stages": list(args["stages"]) if isinstance(args["stages"], tuple) else args["stages"]}


def keeps_head(recipe: Recipe) -> bool:
    """Whether the source's classifier stays: where the recipe says so, or where stage 1 trains it on these classes."""
    return recipe.source.keep_head or parse_source(recipe.source.model)[0] == "train"


def load_recipe_source(recipe: Recipe, num_classes: int) -> Source:
    """The source CNN with a classifier for these classes; random weights where the arm starts from them.

    Raises:
        SourceError: See `sources.load_source`.
        RecipeError: A classifier to keep that has another width.
    """
    config, is_random = recipe.source, recipe.init == "random"
    kind, _ = parse_source(config.model)
    is_new = is_random or kind == "train"
    source = load_source(
        config.model, weights=None if is_random else config.weights, weights_classes=config.weights_classes,
        pretrained=config.pretrained and not is_random, num_classes=num_classes if is_new else None,
        drop_path=recipe.train.drop_path,
    )  # fmt: skip
    if not keeps_head(recipe):
        source.model.reset_classifier(num_classes)
    elif source.model.num_classes != num_classes:
        raise RecipeError(
            f"source.keep_head: the source has {source.model.num_classes} classes and the data {num_classes}: "
            "set it to false for a new classifier"
        )
    return dataclasses.replace(source, kwargs={**source.kwargs, "num_classes": num_classes})
