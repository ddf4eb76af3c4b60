"""One run of a recipe, from the source CNN to the exported transformer."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from vitinit import checkpoint, probe
from vitinit.attention_cnn import ARCHITECTURE
from vitinit.augment import Augmentation
from vitinit.convert import attention_specs, convert
from vitinit.data import LowDataSplits, load_splits
from vitinit.errors import CheckpointError, RecipeError
from vitinit.provenance import describe_environment
from vitinit.recipe import Recipe, dump_recipe, recipe_to_dict
from vitinit.report import ConversionReport
from vitinit.sources import Source, load_source, parse_source
from vitinit.train import evaluate, fit, format_seconds, set_backends, time_step

METRICS_FILE = "metrics.json"
RECIPE_FILE = "recipe.resolved.yaml"


@dataclass(frozen=True)
class Network:
    """A network ready to train, and what rebuilds it."""

    model: nn.Module
    architecture: str | None
    model_args: dict | None
    report: ConversionReport | None
    convert_seconds: float


def run_recipe(
    recipe: Recipe, *, out: Path, resume: bool = False, overwrite: bool = False, dry_run: bool = False
) -> dict:
    """Carry out a recipe and return what metrics.json holds.

    Args:
        recipe: The run.
        out: Folder for the results: log.txt, metrics.json, recipe.resolved.yaml, subset.json, model/, state.pt.
        resume: Go on with the interrupted run in `out`.
        overwrite: Delete what `out` holds first.
        dry_run: Print the plan (recipe, conversion, steps, estimated time), train nothing and write nothing.

    Raises:
        VitinitError: See `errors`; nothing is left half-written.
        Interrupted: Ctrl-C or a termination signal; the state is saved.
    """
    set_backends()  # before any thread pool starts: its threads inherit the setting
    tracker = None if recipe.train.tracker == "none" or dry_run else recipe.train.tracker
    accelerator = Accelerator(mixed_precision=recipe.train.precision, log_with=tracker, project_dir=out)
    _use_all_cores(accelerator)
    if dry_run:
        return _plan(recipe, accelerator)
    _check_folder(out, resume=resume, overwrite=overwrite)
    log = _Log(accelerator)
    splits = _load_data(recipe, log)
    # Whatever can go wrong with the source goes wrong here, before anything in `out` is touched.
    build_network(recipe, _load_source(recipe, len(splits.train.classes)), splits)
    if accelerator.is_main_process:
        if overwrite:
            shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        log.keep_in(out / "log.txt")
        (out / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
        _write_json(splits.subset, out / "subset.json")
    accelerator.wait_for_everyone()
    if tracker:
        accelerator.init_trackers(recipe.name)
    metrics = _train_arm(recipe, splits, accelerator=accelerator, folder=out, resume=resume, log=log)
    if recipe.compare_random and recipe.init == "construction":
        rival = _rival(recipe)
        folder = out / "random"
        folder.mkdir(exist_ok=True)
        log("\nthe same network from random init")
        metrics["random"] = _train_arm(rival, splits, accelerator=accelerator, folder=folder, resume=resume, log=log)
    if accelerator.is_main_process:
        from vitinit.plots import plot_summary

        plot_summary(metrics, out / "summary.png", title=recipe.name)
        # The last file of a run: where it exists, everything else is complete.
        _write_json(metrics, out / METRICS_FILE)
        for state in (out, out / "source", out / "random"):
            (state / checkpoint.STATE_FILE).unlink(missing_ok=True)
    log("\n" + summarize(metrics))
    log(f"results in {out}: {METRICS_FILE}, summary.png, model/ (vitinit.load or timm's local-dir:)")
    if tracker:
        accelerator.end_training()
    return metrics


def _rival(recipe: Recipe) -> Recipe:
    """The random-init arm of `compare_random`: where stage 1 has trained the source, it sees as many images in all,
    at stage 1's learning rate, which is the one for training from scratch."""
    train = recipe.train
    if parse_source(recipe.source.model)[0] == "train":
        train = dataclasses.replace(train, epochs=train.epochs + recipe.source.epochs, lr=recipe.source.lr)
    return dataclasses.replace(recipe, init="random", compare_random=False, train=train)


def summarize(metrics: dict) -> str:
    """The few lines at the end of a run: test accuracy at the start and at the end, against what."""
    name = f"{metrics['init']} init" if metrics["model"] == "converted" else f"source CNN ({metrics['init']})"
    rows = []
    if "source" in metrics:
        rows.append(("source CNN, trained on the same images", metrics["source"]["accuracy"]))
    rows.append((f"{name}, step 0", metrics["step0"]["accuracy"]))
    if metrics["step0"]["probe_accuracy"] is not None:
        rows.append((f"{name}, linear probe of step 0", metrics["step0"]["probe_accuracy"]))
    rows.append((f"{name}, fine-tuned", metrics["accuracy"]))
    if "random" in metrics:
        rows.append(("same network, random init, as many images", metrics["random"]["accuracy"]))
    kind = metrics["recipe"]["evaluate"]
    lines = [f"{kind} accuracy ({metrics['n_train']} training images, {metrics['n_test']} {kind} images)"]
    lines += [f"  {label:<42} {accuracy:6.1%}" for label, accuracy in rows]
    if "random" in metrics:
        gain = metrics["accuracy"] - metrics["random"]["accuracy"]
        lines.append(f"  gained over random init: {100 * gain:+.1f} points")
    return "\n".join(lines)


def _train_arm(
    recipe: Recipe, splits: LowDataSplits, *, accelerator: Accelerator, folder: Path, resume: bool,
    log: Callable[[str], None],
) -> dict:  # fmt: skip
    """Build, train, evaluate and export one network."""
    done = folder / METRICS_FILE
    if resume and done.exists():
        return json.loads(done.read_text(encoding="utf-8"))
    settings = recipe_to_dict(recipe)
    torch.manual_seed(recipe.seed)
    source = _load_source(recipe, len(splits.train.classes))
    log(f"source    {source.description}")
    augmentation = Augmentation(
        **dataclasses.asdict(recipe.augment), mean=source.mean, std=source.std, num_classes=len(splits.train.classes)
    )
    shared = {"augmentation": augmentation, "accelerator": accelerator}
    metrics = {"name": recipe.name, "model": recipe.model, "init": recipe.init, "seed": recipe.seed}
    if parse_source(recipe.source.model)[0] == "train" and recipe.init == "construction":
        record = _train_source(recipe, source, splits, folder=folder / "source", resume=resume, log=log, **shared)
        test = evaluate(source.model, splits.test, **shared)
        log(f"source    trained in {format_seconds(record['seconds'])}, {recipe.evaluate} accuracy {test:.1%}")
        metrics["source"] = {"accuracy": test, **record}

    network = build_network(recipe, source, splits)
    if network.report is not None:
        log(f"convert   {str(network.report).splitlines()[-1]} ({network.convert_seconds:.1f}s)")
        if accelerator.is_main_process:
            _write_json(network.report.to_dict(), folder / "conversion.json")
    model = network.model.to(accelerator.device)
    # A random network has no features to probe, and a kept classifier is better than a probe.
    keeps_features = recipe.init == "construction" and not _keeps_head(recipe)
    step0 = {"accuracy": evaluate(model, splits.test, **shared), "probe_accuracy": None}
    if keeps_features:
        step0["probe_accuracy"] = _probe(model, splits, source, accelerator)
    probed = f", {step0['probe_accuracy']:.1%} with a linear probe" if keeps_features else ""
    log(f"step 0    {recipe.evaluate} accuracy {step0['accuracy']:.1%}{probed}")

    trained, record = fit(
        model, splits, config=recipe.train, seed=recipe.seed, folder=folder, settings=settings,
        resume=resume and (folder / checkpoint.STATE_FILE).exists(), log=log, **shared,
    )  # fmt: skip
    metrics |= {
        "accuracy": evaluate(trained, splits.test, **shared), "step0": step0, "n_train": len(splits.train),
        "n_holdout": len(splits.holdout), "n_test": len(splits.test), "subset_sha256": splits.subset["sha256"],
        "parameters": sum(p.numel() for p in trained.parameters()), "convert_seconds": network.convert_seconds,
        **record, "environment": describe_environment(), "recipe": settings,
    }  # fmt: skip
    log(f"end       {recipe.evaluate} accuracy {metrics['accuracy']:.1%} after {format_seconds(record['seconds'])}")
    if accelerator.is_main_process:
        checkpoint.export_model(
            trained, folder / checkpoint.MODEL_FOLDER, classes=splits.train.classes, mean=source.mean,
            std=source.std, img_size=splits.train.images.shape[-2:], architecture=network.architecture,
            model_args=network.model_args, card=_write_card(recipe, metrics),
        )  # fmt: skip
        (folder / checkpoint.MODEL_FOLDER / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        if folder.name == "random":
            _write_json(metrics, done)
    accelerator.wait_for_everyone()
    return metrics


def _probe(model: nn.Module, splits: LowDataSplits, source: Source, accelerator: Accelerator) -> float:
    train, test = splits.train.to(accelerator.device), splits.test.to(accelerator.device)
    with accelerator.autocast():
        x, x_test = (
            probe.extract_features(model, part.images, mean=source.mean, std=source.std) for part in (train, test)
        )
    return probe.linear_probe(x, train.labels, x_test, test.labels, num_classes=len(train.classes))


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


def _keeps_head(recipe: Recipe) -> bool:
    return recipe.source.keep_head or parse_source(recipe.source.model)[0] == "train"


def _load_source(recipe: Recipe, num_classes: int) -> Source:
    """The source CNN with a classifier for these classes; random weights where the arm starts from them."""
    config, is_random = recipe.source, recipe.init == "random"
    kind, _ = parse_source(config.model)
    source = load_source(
        config.model, weights=None if is_random else config.weights, weights_classes=config.weights_classes,
        pretrained=config.pretrained and not is_random, num_classes=num_classes if kind == "train" else None,
        drop_path=recipe.train.drop_path,
    )  # fmt: skip
    if not _keeps_head(recipe):
        source.model.reset_classifier(num_classes)
    elif source.model.num_classes != num_classes:
        raise RecipeError(
            f"source.keep_head: the source has {source.model.num_classes} classes and the data {num_classes}: "
            "set it to false for a new classifier"
        )
    return dataclasses.replace(source, kwargs={**source.kwargs, "num_classes": num_classes})


def _train_source(
    recipe: Recipe, source: Source, splits: LowDataSplits, *, folder: Path, resume: bool,
    log: Callable[[str], None], augmentation: Augmentation, accelerator: Accelerator,
) -> dict:  # fmt: skip
    """Stage 1 of a `train:` source: train the CNN itself on the subset; skipped where a resumed run has it."""
    record_file = folder / "record.json"
    if resume and record_file.exists():
        source.model.load_state_dict(checkpoint.load(folder).state_dict())
        return json.loads(record_file.read_text(encoding="utf-8"))
    folder.mkdir(exist_ok=True)
    config = dataclasses.replace(recipe.train, epochs=recipe.source.epochs, lr=recipe.source.lr)
    trained, record = fit(
        source.model, splits, config=config, augmentation=augmentation, seed=recipe.seed, accelerator=accelerator,
        folder=folder, settings=recipe_to_dict(recipe),
        resume=resume and (folder / checkpoint.STATE_FILE).exists(), log=log,
    )  # fmt: skip
    source.model.load_state_dict(trained.state_dict())  # with a moving average, `trained` is another module
    if accelerator.is_main_process:
        checkpoint.export_model(
            trained, folder / checkpoint.MODEL_FOLDER, classes=splits.train.classes, mean=source.mean,
            std=source.std, img_size=splits.train.images.shape[-2:],
            card=f"# {source.name}\n\nThe CNN of stage 1 of the recipe `{recipe.name}`.\n",
        )  # fmt: skip
        _write_json(record, record_file)
    accelerator.wait_for_everyone()
    return record


def _load_data(recipe: Recipe, log: Callable[[str], None]) -> LowDataSplits:
    data = {k: v for k, v in dataclasses.asdict(recipe.data).items() if k != "name"}
    splits = load_splits(recipe.data.name, **data, seed=recipe.seed, log=lambda text: log(f"data      {text}"))
    log(
        f"data      {len(splits.train)} training, {len(splits.holdout)} held-out and {len(splits.test)} test images "
        f"of {len(splits.train.classes)} classes, subset {splits.subset['sha256'][:12]}"
    )
    return dataclasses.replace(splits, test=splits.holdout) if recipe.evaluate == "holdout" else splits


def _plan(recipe: Recipe, accelerator: Accelerator) -> dict:
    """Print what a run would do."""
    log = accelerator.print
    log(dump_recipe(recipe))
    splits = _load_data(recipe, log)
    source = _load_source(recipe, len(splits.train.classes))
    log(f"source    {source.description}")
    network = build_network(recipe, source, splits)
    if network.report is not None:
        log(f"\n{network.report}\n")
    n, batch = len(splits.train), min(recipe.train.batch_size, len(splits.train))
    steps = recipe.train.epochs * max(1, n // recipe.train.batch_size)
    shape = (batch // accelerator.num_processes, *splits.train.images.shape[1:])
    labels = torch.zeros(shape[0], dtype=torch.long)
    seconds = time_step(copy.deepcopy(network.model), torch.randn(shape), labels, accelerator=accelerator)
    extra = f" (and {recipe.source.epochs} epochs of the source first)" if recipe.source.epochs else ""
    arms = 2 if recipe.compare_random and recipe.init == "construction" else 1
    log(
        f"plan      {arms} x {steps} steps of {batch} images{extra}; about {seconds * 1000:.0f} ms a step here, "
        f"{format_seconds(arms * steps * seconds)} of training in all"
    )
    return {"steps": steps, "seconds_per_step": seconds}


def _check_folder(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Say why a results folder cannot be used, if so: nothing that is there is lost unasked."""
    if resume and overwrite:
        raise CheckpointError("--resume goes on with a run and --overwrite deletes it: pass one of them")
    finished = (out / METRICS_FILE).exists()
    is_run = (out / RECIPE_FILE).exists()
    if resume:
        if finished:
            raise CheckpointError(f"{out} holds a finished run, there is nothing to resume: read its {METRICS_FILE}")
        states = [out / part / checkpoint.STATE_FILE for part in ("", "source", "random")]
        if not is_run or not any(state.exists() for state in states):
            raise CheckpointError(
                f"{out} holds no {checkpoint.STATE_FILE} to resume from: start the run without --resume"
            )
    elif out.exists() and any(out.iterdir()):
        if not is_run:
            raise CheckpointError(f"{out} holds files that are not of a vitinit run: pass another --out DIR")
        if not overwrite:
            raise CheckpointError(
                f"{out} holds {'a finished' if finished else 'an unfinished'} run: pass --overwrite to replace it, "
                f"--out DIR to keep it{'' if finished else ', or --resume to go on with it'}"
            )


def _use_all_cores(accelerator: Accelerator) -> None:
    """One CPU process takes all cores: accelerate's launcher sets one thread, which suits several processes."""
    if accelerator.device.type == "cpu" and accelerator.num_processes == 1:
        has_affinity = hasattr(os, "sched_getaffinity")
        torch.set_num_threads(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)


class _Log:
    """Prints on the main process and keeps the lines in the run's folder, once there is one."""

    def __init__(self, accelerator: Accelerator):
        self._is_main, self._path, self._pending = accelerator.is_main_process, None, []

    def keep_in(self, path: Path) -> None:
        self._path = path

    def __call__(self, text: str) -> None:
        if not self._is_main:
            return
        tqdm.write(text)
        self._pending.append(text)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in self._pending)
            self._pending.clear()


def _write_json(content: dict, path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_card(recipe: Recipe, metrics: dict) -> str:
    what = (
        f"The CNN `{recipe.source.model}`, fine-tuned"
        if recipe.model == "source"
        else f"A relative-position attention network built from the CNN `{recipe.source.model}` "
        f"({'random' if recipe.init == 'random' else 'convolution-construction'} initialization) and fine-tuned"
    )
    return f"""---
library_name: timm
tags: [image-classification, timm, vitinit]
---
# {recipe.name}

{what} on {metrics["n_train"]} images of `{recipe.data.name}` (seed {recipe.seed}).

| | test accuracy |
|---|---|
| step 0 | {metrics["step0"]["accuracy"]:.2%} |
| after {metrics["steps"]} steps | {metrics["accuracy"]:.2%} |

```python
import timm, vitinit  # vitinit registers the architecture
model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
```

The recipe is in `recipe.yaml`; numbers, subset and environment in `metrics.json` beside this folder.
"""
