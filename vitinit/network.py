"""The network that a recipe trains: its source CNN, and what becomes of it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import timm
from torch import nn

from vitinit.attention_cnn import ARCHITECTURE
from vitinit.convert import attention_specs, convert
from vitinit.data import LowDataSplits
from vitinit.errors import RecipeError
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
    converted, report = convert(source.model, img_size=img_size, **_convert_args(recipe))
    args = {
        "source": source.name, "layers": attention_specs(converted),
        "source_args": {k: v for k, v in source.kwargs.items() if k not in ("num_classes", "drop_path_rate")},
        "num_classes": len(splits.train.classes),
    }  # fmt: skip
    # Built by timm from names and numbers, exactly as an export will be.
    model = timm.create_model(ARCHITECTURE, **args, drop_path_rate=recipe.train.drop_path)
    if recipe.init == "construction":
        model.load_state_dict(converted.state_dict())
    return Network(model, ARCHITECTURE, args, report, time.perf_counter() - started)


def _convert_args(recipe: Recipe) -> dict:
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
