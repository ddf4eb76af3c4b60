"""The training loop: Accelerate around plain PyTorch, everything random a function of (seed, step)."""

from __future__ import annotations

import copy
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from tqdm import tqdm

from vitinit.augment import Augmentation, epoch_batches, normalize
from vitinit.checkpoint import load_state, save_state
from vitinit.data import ImageSet, LowDataSplits
from vitinit.errors import CheckpointError, TrainingError
from vitinit.optim import build_optimizer, group_by_rate, learning_rate
from vitinit.recipe import TrainConfig
from vitinit.sync_norm import synchronize_batch_norms

MOST_LINES = 20  # of one training in the log; metrics.json has every epoch


class Interrupted(Exception):
    """Training was asked to stop and has saved its state."""


def fit(
    model: nn.Module,
    splits: LowDataSplits,
    *,
    config: TrainConfig,
    augmentation: Augmentation,
    seed: int,
    accelerator: Accelerator,
    folder: Path,
    settings: dict,
    resume: bool = False,
    log: Callable[[str], None] = print,
) -> tuple[nn.Module, dict]:
    """Train a model on a subset and return the weights to evaluate, with a record of the training.

    The same settings and seed give the same weights on any number of processes (up to the rounding of sums,
    and up to stochastic depth, which each process draws for its own images), and after any number of resumes.

    Args:
        model: Takes normalized images (B, 3, H, W), gives logits (B, classes).
        splits: Training and held-out images, uint8.
        config: The optimization.
        augmentation: Draws and augments the batches.
        seed: Of order, augmentation and stochastic depth.
        accelerator: Device, precision and processes.
        folder: Where the state is kept.
        settings: The recipe as plain values: a state of other settings is refused.
        resume: Go on from the state in `folder`.
        log: Takes one line of text.

    Returns:
        The model (or its moving average) on the device, and `{"epochs": [...], "steps", "images_seen", "seconds"}`.

    Raises:
        CheckpointError: A state that is missing, damaged or of other settings.
        TrainingError: A loss that is not finite; the state of the last good epoch stays.
        Interrupted: Ctrl-C or a termination signal; the state is saved.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    set_backends()
    train = splits.train.to(accelerator.device)
    steps_per_epoch = len(epoch_batches(len(train), batch_size=config.batch_size, seed=seed, epoch=0))
    steps, batch_size = config.epochs * steps_per_epoch, min(config.batch_size, len(train))
    model = model.to(accelerator.device).train()
    ema = ModelEmaV3(model, decay=config.ema_decay) if config.ema_decay is not None else None
    if world > 1:
        synchronize_batch_norms(model)
    groups = group_by_rate(
        model, weight_decay=config.weight_decay, position_lr_scale=config.position_lr_scale,
        layer_decay=config.layer_decay,
    )  # fmt: skip
    optimizer = build_optimizer(groups, name=config.opt, momentum=config.momentum)
    step, record = 0, {"epochs": [], "seconds": 0.0}
    if resume:
        state = load_state(folder)
        check_settings(state["recipe"], settings, folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if ema is not None:
            ema.module.load_state_dict(state["ema"])
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(state["scaler"])
        step, record = state["step"], state["record"]
        log(f"resumed at step {step} of {steps}")
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    evaluated = ema.module if ema is not None else model

    def keep_state() -> None:
        record["seconds"] += clock.lap()
        if accelerator.is_main_process:
            save_state(
                {
                    "recipe": settings, "step": step, "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(), "ema": ema.module.state_dict() if ema else None,
                    "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None, "record": record,
                },
                folder,
            )  # fmt: skip

    def interrupt() -> NoReturn:
        keep_state()
        raise Interrupted(f"stopped at step {step} of {steps}; the state is in {folder}")

    clock, meter, stop = _Clock(), _Meter(), _StopRequest()
    bar = tqdm(
        total=steps, initial=step, unit="step", leave=False,
        disable=not (accelerator.is_main_process and sys.stderr.isatty()),
    )  # fmt: skip
    with stop, bar:
        while step < steps:
            epoch, position = divmod(step, steps_per_epoch)
            batches = epoch_batches(len(train), batch_size=config.batch_size, seed=seed, epoch=epoch)
            for batch in batches[position:]:
                started = time.perf_counter()
                images, targets = augmentation.batch(
                    train.images, train.labels, batch, seed=seed, step=step, rank=rank, world=world
                )
                loaded = time.perf_counter()
                rate = learning_rate(
                    step, steps=steps, warmup_steps=config.warmup_epochs * steps_per_epoch, peak=config.lr,
                    floor=config.min_lr,
                )  # fmt: skip
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["lr_scale"]
                torch.manual_seed(hash((seed, step, rank)))  # stochastic depth, the same after a resume
                loss, logits, norm = _update(
                    wrapped, optimizer, images, targets, clip_grad=config.clip_grad, accelerator=accelerator
                )
                step += 1
                if ema is not None:
                    ema.update(model, step)
                own = batch.view(world, -1)[rank].to(train.labels.device)
                meter.add(loss, logits, train.labels[own], norm, waited=loaded - started)
                bar.update()
                is_asked_to_stop = stop.requested(accelerator)
                if is_asked_to_stop and step % steps_per_epoch:
                    interrupt()
            epoch += 1
            line = {"epoch": epoch, "step": step, "lr": rate, **meter.read(accelerator)}
            if not math.isfinite(line["loss"]):
                raise TrainingError(
                    f"the loss is {line['loss']} in epoch {epoch}, learning rate {config.lr:g}: lower train.lr "
                    "(source.lr in stage 1) or train.clip_grad"
                )
            if len(splits.holdout) and (epoch % config.eval_every == 0 or epoch == config.epochs):
                line["holdout_accuracy"] = evaluate(
                    evaluated, splits.holdout, augmentation=augmentation, accelerator=accelerator
                )
            record["epochs"].append(line)
            if config.tracker != "none":
                accelerator.log({f"{folder.name}/{k}": v for k, v in line.items() if v is not None}, step=step)
            spent = record["seconds"] + clock.elapsed()
            if epoch % math.ceil(config.epochs / MOST_LINES) == 0 or epoch == config.epochs:
                log(_format_line(line, config.epochs, left=spent / step * (steps - step)))
            if is_asked_to_stop:  # at the end of an epoch its line comes first: a resume starts with the next
                interrupt()
            if epoch % config.save_every == 0 or epoch == config.epochs:
                keep_state()
    record |= {"steps": steps, "images_seen": steps * batch_size}
    accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)  # gives the model its own forward back
    accelerator.free_memory()
    return evaluated, record


def _update(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, targets: Tensor, *,
    clip_grad: float | None, accelerator: Accelerator,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """One optimizer step; returns loss, logits and the gradient's norm before clipping."""
    logits = model(images).float()
    loss = F.cross_entropy(logits, targets)
    accelerator.backward(loss)
    norm = None if clip_grad is None else accelerator.clip_grad_norm_(model.parameters(), clip_grad)
    optimizer.step()
    optimizer.zero_grad()
    return loss, logits, norm


def set_backends() -> None:
    """Process-wide settings of a training."""
    torch.set_flush_denormal(True)  # second moments of saturated heads become denormal floats, and those are slow
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)  # no gradient for the bias, and wrong for some masks


@torch.no_grad()
def evaluate(
    model: nn.Module, images: ImageSet, *, augmentation: Augmentation, accelerator: Accelerator,
    batch_size: int = 500,
) -> float:  # fmt: skip
    """Accuracy (0 to 1) on a set of images, shared out over the processes."""
    training = model.training
    model.eval()
    part = images.to(accelerator.device)
    correct = torch.zeros((), dtype=torch.float64)
    for start in range(accelerator.process_index * batch_size, len(part), accelerator.num_processes * batch_size):
        batch = slice(start, start + batch_size)
        pixels = normalize(part.images[batch], mean=augmentation.mean, std=augmentation.std)
        with accelerator.autocast():
            logits = model(pixels)
        correct += (logits.argmax(dim=1) == part.labels[batch]).sum().cpu()
    model.train(training)
    total = accelerator.reduce(correct.to(accelerator.device, torch.float32))
    return float(total) / len(part)


def time_step(model: nn.Module, images: Tensor, labels: Tensor, *, accelerator: Accelerator, repeats: int = 3) -> float:
    """Seconds of one training step (forward and backward) on a copy of the model, the best of a few."""
    set_backends()
    model = copy.deepcopy(model).to(accelerator.device).train()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        with accelerator.autocast():
            logits = model(images.to(accelerator.device))
        F.cross_entropy(logits.float(), labels.to(accelerator.device)).backward()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


class _StopRequest:
    """Turns the first Ctrl-C or termination signal into a question that the loop asks; the second one kills."""

    def __enter__(self):
        self._asked = False
        self._old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, *_) -> None:
        self._asked = True
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def requested(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked to stop: all of them stop at the same step."""
        if accelerator.num_processes == 1:
            return self._asked
        asked = torch.tensor(float(self._asked), device=accelerator.device)
        return bool(accelerator.reduce(asked) > 0)


class _Clock:
    """Wall time since the last lap."""

    def __init__(self):
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def lap(self) -> float:
        seconds, self._start = self.elapsed(), time.perf_counter()
        return seconds


class _Meter:
    """Sums of an epoch, kept on the device until the log line asks for them."""

    def __init__(self):
        self._reset()

    def _reset(self) -> None:
        self._clock, self._waited, self._steps, self._norm = _Clock(), 0.0, 0, None
        self._sums: Tensor | None = None

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, norm: Tensor | None, *, waited: float) -> None:
        correct = (logits.argmax(dim=1) == labels).sum()
        sums = torch.stack([loss.detach() * len(labels), correct.to(loss), loss.new_tensor(float(len(labels)))])
        self._sums = sums if self._sums is None else self._sums + sums
        self._waited, self._steps, self._norm = self._waited + waited, self._steps + 1, norm

    def read(self, accelerator: Accelerator) -> dict:
        loss, correct, count = accelerator.reduce(self._sums).tolist()
        seconds = self._clock.elapsed()
        line = {
            "loss": loss / count,
            "train_accuracy": correct / count,
            "grad_norm": None if self._norm is None else float(self._norm),
            "images_per_second": count / seconds,
            "data_wait": self._waited / seconds,
        }
        self._reset()
        return line


def _format_line(line: dict, epochs: int, *, left: float) -> str:
    parts = [
        f"epoch {line['epoch']:>{len(str(epochs))}}/{epochs}", f"step {line['step']}", f"loss {line['loss']:.4f}",
        f"train {line['train_accuracy']:.1%}", f"lr {line['lr']:.2e}",
    ]  # fmt: skip
    if line["grad_norm"] is not None:
        parts.append(f"grad {line['grad_norm']:.2f}")
    parts += [f"{line['images_per_second']:.0f} img/s", f"data wait {line['data_wait']:.1%}"]
    if "holdout_accuracy" in line:
        parts.append(f"held out {line['holdout_accuracy']:.1%}")
    return "  ".join([*parts, f"left {format_seconds(left)}"])


def format_seconds(seconds: float) -> str:
    """Seconds as a person reads them: 42s, 3m05s, 2h10m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def check_settings(stored: dict, settings: dict, folder: Path) -> None:
    """Refuse to go on with a run of other settings, and name the keys (`CheckpointError`)."""
    if stored == settings:
        return
    keys = sorted(
        key
        for section in stored.keys() | settings.keys()
        for key in _differences(section, stored.get(section), settings.get(section))
    )
    raise CheckpointError(
        f"the state in {folder} is of another recipe; these keys differ: {', '.join(keys)}. Resume with the recipe "
        "that it was started with, or start again with --overwrite"
    )


def _differences(key: str, a: object, b: object) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [name for k in a.keys() | b.keys() for name in _differences(f"{key}.{k}", a.get(k), b.get(k))]
    return [] if a == b else [key]
