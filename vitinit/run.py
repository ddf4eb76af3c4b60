"""One run of a recipe, from the source CNN to the exported transformer."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from tqdm import tqdm

from vitinit import checkpoint, probe
from vitinit.augment import Augmentation
from vitinit.data import LowDataSplits, load_splits
from vitinit.errors import CheckpointError, RecipeError
from vitinit.network import build_network, keeps_head, load_recipe_source, read_convert_settings, record_source
from vitinit.provenance import describe_environment
from vitinit.recipe import Recipe, dump_recipe, load_recipe, recipe_to_dict
from vitinit.sources import Source, parse_source
from vitinit.summary import summarize, write_card
from vitinit.train import check_settings, evaluate, fit, format_seconds, set_backends, time_step

METRICS_FILE = "metrics.json"
RECIPE_FILE = "recipe.resolved.yaml"


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
    AcceleratorState._reset_state()  # it allows one precision a process, which may run several recipes
    accelerator = Accelerator(mixed_precision=recipe.train.precision, log_with=tracker, project_dir=out)
    if recipe.train.precision == "fp16" and accelerator.device.type == "cpu":  # accelerate would use float32
        raise RecipeError("train.precision: fp16 needs a GPU, and this is a CPU: use bf16, or no")
    _use_all_cores(accelerator)
    if dry_run:
        return _plan(recipe, accelerator)
    _check_folder(out, recipe, resume=resume, overwrite=overwrite)
    accelerator.wait_for_everyone()  # or the first process would fill the folder before the others have looked at it
    log = _Log(accelerator)
    splits = _load_data(recipe, log)
    _check_batch(recipe, splits, accelerator)
    # Whatever can go wrong with the source goes wrong here, before anything in `out` is touched.
    build_network(recipe, load_recipe_source(recipe, len(splits.train.classes)), splits)
    if accelerator.is_main_process:
        if overwrite:
            shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        log.keep_in(out / "log.txt")
        (out / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
        _write_json(splits.subset, out / "subset.json")
    accelerator.wait_for_everyone()
    if tracker:
        accelerator.init_trackers(tracker)
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
    source = load_recipe_source(recipe, len(splits.train.classes))
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
        torch.manual_seed(recipe.seed)  # the same draws below, whether this run or the resumed one has trained it

    provenance = _describe_origin(recipe, source, splits)  # before the source itself may be trained
    network = build_network(recipe, source, splits)
    if network.report is not None:
        log(f"convert   {str(network.report).splitlines()[-1]} ({network.convert_seconds:.1f}s)")
        if accelerator.is_main_process:
            _write_json(network.report.to_dict(), folder / "conversion.json")
    model = network.model.to(accelerator.device)
    # A random network has no features to probe, and a kept classifier is better than a probe.
    probes = recipe.probe and recipe.init == "construction" and not keeps_head(recipe)
    step0 = {"accuracy": evaluate(model, splits.test, **shared), "probe_accuracy": None}
    if probes:
        step0["probe_accuracy"] = _probe(model, splits, source, accelerator)
    probed = f", {step0['probe_accuracy']:.1%} with a linear probe" if probes else ""
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
            model_args=network.model_args, card=write_card(recipe, metrics), provenance=provenance,
        )  # fmt: skip
        (folder / checkpoint.MODEL_FOLDER / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        if folder.name == "random":
            _write_json(metrics, done)
    accelerator.wait_for_everyone()
    return metrics


def _describe_origin(recipe: Recipe, source: Source, splits: LowDataSplits) -> dict:
    """What an export says about where it comes from."""
    is_converted, is_random = recipe.model == "converted", recipe.init == "random"
    return {
        "source": record_source(
            source, model=recipe.source.model, weights=None if is_random else recipe.source.weights,
            weights_classes=recipe.source.weights_classes, pretrained=recipe.source.pretrained and not is_random,
            new_classifier=not keeps_head(recipe), seed=recipe.seed,
        ),
        "model": recipe.model, "init": recipe.init, "trained": recipe.train.epochs > 0,
        "convert": read_convert_settings(recipe) if is_converted else None,
        "img_size": list(splits.train.images.shape[-2:]), "tolerance": recipe.convert.tolerance,
    }  # fmt: skip


def _probe(model: nn.Module, splits: LowDataSplits, source: Source, accelerator: Accelerator) -> float:
    train, test = splits.train.to(accelerator.device), splits.test.to(accelerator.device)
    with accelerator.autocast():
        x, x_test = (
            probe.extract_features(model, part.images, mean=source.mean, std=source.std) for part in (train, test)
        )
    return probe.linear_probe(x, train.labels, x_test, test.labels, num_classes=len(train.classes))


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
    source = load_recipe_source(recipe, len(splits.train.classes))
    log(f"source    {source.description}")
    network = build_network(recipe, source, splits)
    if network.report is not None:
        log(f"\n{network.report}\n")
    n, batch = len(splits.train), min(recipe.train.batch_size, len(splits.train))
    steps = recipe.train.epochs * max(1, n // recipe.train.batch_size)
    shape = (batch // accelerator.num_processes, *splits.train.images.shape[1:])
    labels = torch.zeros(shape[0], dtype=torch.long)
    seconds = time_step(network.model, torch.randn(shape), labels, accelerator=accelerator)
    per_epoch = max(1, n // recipe.train.batch_size)
    trainings, costly = [f"{steps} steps"], steps  # the source's own steps are cheaper
    if parse_source(recipe.source.model)[0] == "train" and recipe.init == "construction":
        trainings.insert(0, f"{recipe.source.epochs * per_epoch} steps of the source")
    if recipe.compare_random and recipe.init == "construction":
        rival = _rival(recipe).train.epochs * per_epoch
        trainings.append(f"{rival} steps from random init")
        costly += rival
    log(
        f"plan      {', then '.join(trainings)}, of {batch} images each; about {seconds * 1000:.0f} ms a step here "
        f"(less for the source), {format_seconds(costly * seconds)} for the converted network"
    )
    return {"steps": steps, "seconds_per_step": seconds}


def _check_batch(recipe: Recipe, splits: LowDataSplits, accelerator: Accelerator) -> None:
    batch, world = min(recipe.train.batch_size, len(splits.train)), accelerator.num_processes
    if batch % world:
        raise RecipeError(
            f"train.batch_size: {batch} images cannot be shared by {world} processes: use a multiple of {world}"
        )
    side = min(splits.train.images.shape[-2:])
    if recipe.augment.crop_padding >= side:
        raise RecipeError(f"augment.crop_padding: expected less than the image's {side} pixels")


def _check_folder(out: Path, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
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
        check_settings(recipe_to_dict(load_recipe(out / RECIPE_FILE)), recipe_to_dict(recipe), out)
    elif out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is not a folder: pass another --out DIR")
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
