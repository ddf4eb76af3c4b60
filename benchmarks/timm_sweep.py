"""Every timm model with a convolution larger than 1x1, converted and compared with itself in float64 and float32.

    python benchmarks/timm_sweep.py                        # go on where the CSV ends, then write timm_sweep.md
    python benchmarks/timm_sweep.py --models "convnext*"   # some models

Each model is built with random weights at the smallest square image that it takes (32 px or more). Its norms, scales
and zero-initialized weights are drawn at random, so that no branch is silent, and batch norms get the statistics of
random images, perturbed. Two conversions: "first", every convolution on a grid of at most 16x16 pixels, and "windows",
every convolution on a grid of at most 56x56 with local windows. Errors are norms of differences over norms of the CNN's
logits, against the limits of 1e-9 in float64 and 1e-4 in float32.

A deep network of random weights may amplify rounding by itself. What it does to its own logits is measured beside:
`rounding_f64`, in float64, when what each convolution returns changes by 1e-15 of its norm, and `rounding_f32`,
float32 against float64. Status "rounding": above a limit, and within thirty times the CNN's own, for two perturbations
of one size may end that far apart.
"""

import argparse
import contextlib
import csv
import fnmatch
import gc
import itertools
import math
import multiprocessing
import os
import statistics
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from tables import table
from torch import nn

import vitinit
from vitinit.convert import relative_error
from vitinit.errors import ConversionError
from vitinit.provenance import describe_environment

PASSES = {"first": {"max_grid": 16}, "windows": {"max_grid": 56, "span": "local"}}
LIMITS = {"error_f64": 1e-9, "error_f32": 1e-4}
SIZES = (32, 48, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512)
COLUMNS = [
    "model", "family", "pass", "status", "params_m", "img_size", "convolutions", "converted", "local", "kept",
    "error_f64", "rounding_f64", "worst_layer_f64", "error_f32", "rounding_f32", "seconds", "reason",
]  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "timm_sweep.csv"
PAGE = Path(__file__).parent / "timm_sweep.md"


def list_names() -> list[str]:
    """timm's models without those that vitinit registers: one of each family first, then the next of each."""
    own = ("vitinit_", "_cifar")
    families = {}
    for name in sorted(n for n in timm.list_models() if own[0] not in n and not n.endswith(own[1])):
        families.setdefault(family(name), []).append(name)
    return [name for turn in itertools.zip_longest(*families.values()) for name in turn if name]


def family(name: str) -> str:
    """The timm module that a model is defined in."""
    return timm.model_entrypoint(name).__module__.rsplit(".", 1)[-1]


def build(name: str, max_params: float) -> tuple[nn.Module, int]:
    """A model with random weights that no branch hides, and the smallest image side that it takes.

    Raises:
        ConversionError: It has no K x K convolution, is too large, or takes no square image.
    """
    torch.manual_seed(0)
    outline = None
    with contextlib.suppress(Exception), torch.device("meta"):  # some networks compute on weights as they are built
        outline = timm.create_model(name)
    if outline is not None:
        check(outline, max_params)  # before it takes memory
    model = check(timm.create_model(name), max_params)
    native = model.pretrained_cfg["input_size"][-1]
    problem = None
    for side in sorted({*(s for s in SIZES if s <= native), native}):
        for settings in ({}, {"img_size": side}):
            try:
                candidate = timm.create_model(name, **settings) if settings else model
                candidate.eval()(draw_images(2, candidate, side))
            except Exception as error:  # whatever a network raises on a size that it does not take
                problem = error
                continue
            return randomize(candidate, side), side
    raise ConversionError(f"runs on no square image: {type(problem).__name__}: {problem}")


def check(model: nn.Module, max_params: float) -> nn.Module:
    """The model itself.

    Raises:
        ConversionError: It has no K x K convolution, or is too large.
    """
    if not any(isinstance(m, nn.Conv2d) and max(m.kernel_size) > 1 for m in model.modules()):
        raise ConversionError("none: no nn.Conv2d larger than 1x1")
    if (size := sum(p.numel() for p in model.parameters()) / 1e6) > max_params:
        raise ConversionError(f"too large: {size:.0f} M parameters, limit {max_params:.0f} M")
    return model


def draw_images(count: int, model: nn.Module, side: int, seed: int = 0) -> torch.Tensor:
    """Random images that differ in colour, in shapes and in detail, as photographs do."""
    generator, channels = torch.Generator().manual_seed(seed), model.pretrained_cfg["input_size"][0]
    scales = (torch.randn(count, channels, n, n, generator=generator) for n in (1, 4, 16, side))
    return sum(F.interpolate(noise, size=(side, side)) for noise in scales) / 2


@torch.no_grad()
def randomize(model: nn.Module, side: int) -> nn.Module:
    """Norms, scales and zero weights drawn at random; batch norms with perturbed statistics of random images."""
    for name, parameter in model.named_parameters():
        is_vector = parameter.numel() == max(parameter.shape, default=1)
        if is_vector and ("bias" in name or "embed" in name or "token" in name):
            nn.init.normal_(parameter, std=0.1)
        elif is_vector:
            nn.init.uniform_(parameter, 0.1, 0.5)  # as in trained networks, where branches are small beside shortcuts
        elif not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    norms = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    for norm in norms:
        norm.train().momentum = 1.0
    if norms:
        model(draw_images(16, model, side))
    for norm in norms:
        norm.eval()
        norm.running_mean += 0.1 * norm.running_var.sqrt() * torch.randn_like(norm.running_mean)
        norm.running_var *= torch.empty_like(norm.running_var).uniform_(0.8, 1.25)
    return model.eval()


@torch.no_grad()
def measure(name: str, max_params: float) -> list[dict]:
    """The rows of a model, one a pass."""
    row = {"model": name, "family": family(name)}
    started = time.perf_counter()
    try:
        cnn, side = build(name, max_params)
    except ConversionError as error:
        status, _, reason = str(error).partition(": ")
        return [{**row, "pass": key, "status": status, "reason": reason} for key in PASSES]
    row |= {"params_m": round(sum(p.numel() for p in cnn.parameters()) / 1e6, 2), "img_size": side}
    images = draw_images(2, cnn, side, seed=1)
    rows = []
    for key, settings in PASSES.items():
        rows.append({**row, "pass": key, **compare(cnn, images, settings)})
        rows[-1]["seconds"] = round(time.perf_counter() - started, 2)
        started = time.perf_counter()
    return rows


def compare(cnn: nn.Module, images: torch.Tensor, settings: dict) -> dict:
    """Errors of one conversion of a float32 CNN, which is as it was afterwards."""
    try:
        converted, report = vitinit.convert(cnn.double(), img_size=images.shape[-1], tolerance=math.inf, **settings)
    except ConversionError as error:
        cnn.float()
        problem, found, layers = str(error).partition("can be converted: ")
        reasons = dict.fromkeys(layer.partition(": ")[2] for layer in layers.split("; "))
        return {"status": "kept" if found else "failed", "converted": 0, "reason": "; ".join(reasons) or problem}
    exact = images.double()
    expected = flatten(cnn(exact))
    errors = {
        "error_f64": relative_error(flatten(converted(exact)), expected),
        "rounding_f64": relative_error(perturb(cnn, exact), expected),
        "worst_layer_f64": max(r.error for r in report.converted),
    }
    single = flatten(cnn.float()(images))
    errors["error_f32"] = relative_error(flatten(converted.float()(images)), single)
    errors["rounding_f32"] = relative_error(single, expected)
    spatial = [r for r in report.layers if max(r.kernel) > 1]
    kept = [r for r in spatial if not r.converted]
    over = [error for error, limit in LIMITS.items() if not errors[error] <= limit]
    own = all(errors[error] <= 30 * errors[error.replace("error", "rounding")] for error in over)
    status = "passed" if not over else "rounding" if own else "failed"
    if not all(tensor.isfinite().all() and tensor.any() for tensor in single):
        status = "failed"
    reasons = {}
    for r in kept:
        reasons.setdefault(r.reason, []).append(r.name)
    return {
        "status": status, "convolutions": len(spatial), "converted": len(report.converted),
        "local": sum(r.span == "local" for r in report.converted), "kept": len(kept),
        **{key: f"{value:.1e}" for key, value in errors.items()},
        "reason": "; ".join(f"{len(names)} {reason}" for reason, names in reasons.items()),
    }  # fmt: skip


def perturb(cnn: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """A CNN's logits where what each convolution returns is off by 1e-15 of its norm, and in another memory order."""

    def hook(_: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        noise = 1e-15 * output.square().mean().sqrt() * torch.randn_like(output)
        return (output + noise).to(memory_format=torch.channels_last)

    hooks = [m.register_forward_hook(hook) for m in cnn.modules() if isinstance(m, nn.Conv2d)]
    try:
        return flatten(cnn(images))
    finally:
        for handle in hooks:
            handle.remove()


def flatten(output: object) -> list[torch.Tensor]:
    """The tensors of a model's output."""
    return [output] if isinstance(output, torch.Tensor) else [t for part in output for t in flatten(part)]


def work(pipe: Connection, max_params: float) -> None:
    """Measure the models that come through a pipe."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    warnings.filterwarnings("ignore")
    while name := pipe.recv():
        try:
            rows = measure(name, max_params)
        except Exception as error:  # one broken model does not end the sweep
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            rows = [
                {"model": name, "family": family(name), "pass": p, "status": "failed", "reason": reason} for p in PASSES
            ]
        gc.collect()
        pipe.send(rows)


class Worker:
    """A process that measures one model at a time; it is replaced when it dies or takes too long."""

    def __init__(self, limit: float, max_params: float):
        self.limit, self.max_params = limit, max_params
        self.start()

    def start(self) -> None:
        """Start the process anew."""
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, self.max_params), daemon=True)
        self.process.start()
        other.close()
        self.name = None

    def give(self, name: str) -> None:
        """Hand over a model to measure."""
        self.name, self.deadline = name, time.monotonic() + self.limit
        self.pipe.send(name)

    def take(self) -> list[dict] | None:
        """The rows of the model it was given, once there are any."""
        reason = None
        try:
            if self.pipe.poll():
                rows, self.name = self.pipe.recv(), None
                return rows
        except EOFError:
            reason = "the process died, probably for memory"
        if time.monotonic() > self.deadline:
            reason = f"took more than {self.limit:.0f} s"
        if reason is None:
            return None
        self.process.kill()
        rows = [
            {"model": self.name, "family": family(self.name), "pass": p, "status": "stopped", "reason": reason}
            for p in PASSES
        ]
        self.start()
        return rows


def run(names: list[str], path: Path, workers: list[Worker]) -> None:
    """Measure models in several processes; their rows go to the CSV as they come."""
    todo, left = list(names), len(names)
    while left:
        for worker in workers:
            if worker.name is None:
                if todo:
                    worker.give(todo.pop(0))
                continue
            if rows := worker.take():
                with path.open("a", newline="") as file:
                    csv.DictWriter(file, COLUMNS).writerows(rows)
                left -= 1
                show(rows, left)
        time.sleep(0.02)
    for worker in workers:
        worker.process.kill()


def write(rows: list[dict], path: Path) -> None:
    """The CSV, anew."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def show(rows: list[dict], left: int) -> None:
    """One line for each pass on the terminal."""
    for row in rows:
        values = (
            f"{row.get(key, '')}"
            for key in ("status", "img_size", "converted", "kept", "error_f64", "error_f32", "seconds")
        )
        print(
            f"{left:5} {row['model']:44} {row['pass']:8} {'  '.join(values)}  {row.get('reason', '')[:80]}", flush=True
        )


def write_page(rows: list[dict], path: Path) -> None:
    """The sweep for a reader: totals, every family, and the reasons of what was left."""
    environment = describe_environment()
    versions = environment["versions"]
    names = {row["model"]: row for row in rows}
    tried = [row for row in rows if row["status"] not in ("none", "too large")]
    lines = [
        "# Every timm model, converted", "",
        f"`benchmarks/timm_sweep.py`: {len({row['model'] for row in tried})} models of timm {versions['timm']}, torch "
        f"{versions['torch']}, one thread a model; page written {environment['date'][:10]} at commit "
        f"{environment['commit']} on {environment['device']}. One row a model and pass, with errors and seconds: "
        "[results/timm_sweep.csv](results/timm_sweep.csv).", "",
        *(line for line in __doc__.split("\n\n", 2)[2].strip().splitlines()), "",
        "## Totals", "",
        table(
            ["pass", "models", "passed", "rounding", "kept", "failed", "K×K convolutions", "converted", "of them local",
             "median error, float64", "median error, float32", "hours"],
            [total(key, [row for row in tried if row["pass"] == key]) for key in PASSES],
        ), "",
        f"Not tried: {sum(row['status'] == 'too large' for row in names.values())} models above the parameter limit; "
        f"{sum(row['status'] == 'none' for row in names.values())} without an `nn.Conv2d` larger than 1×1.", "",
        "## Families", "",
        "The timm module that defines a model; passed / rounding / kept / failed of each pass, and the worst layer's "
        "relative error in float64.", "",
    ]  # fmt: skip
    families = {}
    for row in tried:
        families.setdefault(row["family"], []).append(row)
    counts = []
    for name, part in sorted(families.items()):
        cells = []
        for key in PASSES:
            states = [row["status"] for row in part if row["pass"] == key]
            cells.append(" / ".join(str(states.count(s)) for s in ("passed", "rounding", "kept", "failed")))
        worst = max((float(row["worst_layer_f64"]) for row in part if row["worst_layer_f64"]), default=None)
        counts.append([name, str(len(part) // len(PASSES)), *cells, f"{worst:.1e}" if worst is not None else "–"])
    lines += [table(["family", "models", *PASSES, "worst layer"], counts), "", "## What stayed, and why", ""]
    reasons = {}
    for row in tried:
        for reason in row["reason"].split("; ") if row["reason"] else ():
            count, _, text = reason.partition(" ") if reason[0].isdigit() else ("0", "", reason)
            key = row["pass"], text
            models, layers = reasons.get(key, (0, 0))
            reasons[key] = models + 1, layers + int(count)
    ordered = sorted(reasons.items(), key=lambda item: (item[0][0], -item[1][0]))
    cells = [[key, text, str(models), str(layers or "all")] for (key, text), (models, layers) in ordered]
    lines += [table(["pass", "reason", "models", "layers"], cells)]
    columns = ["model", "pass", "error_f64", "error_f32", "reason"]
    unusual = [[row[column] for column in columns] for row in tried if row["status"] in ("failed", "stopped")]
    if unusual:
        lines += ["", "## Failed", "", table(columns, unusual)]
    path.write_text("\n".join(lines) + "\n")


def total(key: str, rows: list[dict]) -> list[str]:
    """One pass' line of the totals."""
    states = [row["status"] for row in rows]
    sums = [sum(int(row[column] or 0) for row in rows) for column in ("convolutions", "converted", "local")]
    medians = [
        f"{statistics.median(float(row[column]) for row in rows if row[column]):.1e}"
        for column in ("error_f64", "error_f32")
    ]
    hours = sum(float(row["seconds"] or 0) for row in rows) / 3600
    counts = [states.count(state) for state in ("passed", "rounding", "kept", "failed")]
    return [key, str(len(rows)), *(str(c) for c in counts), *(f"{s:,}" for s in sums), *medians, f"{hours:.1f}"]


def main() -> None:
    """Sweep what the CSV lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default="*", help="a pattern such as 'convnext*'")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=300, help="seconds for one model")
    parser.add_argument("--max-params", type=float, default=700, help="in millions; larger models are left out")
    parser.add_argument("--again", nargs="+", default=[], help="states to measure again, e.g. failed stopped")
    args = parser.parse_args()
    rows = list(csv.DictReader(args.out.open())) if args.out.exists() else []
    rows = [row for row in rows if row["status"] not in args.again]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write(rows, args.out)
    done = {row["model"] for row in rows}
    names = [n for n in fnmatch.filter(list_names(), args.models) if n not in done]
    run(names, args.out, [Worker(args.limit, args.max_params) for _ in range(args.workers)])
    rows = list(csv.DictReader(args.out.open()))
    rows.sort(key=lambda row: (row["family"], row["model"], row["pass"]))
    write(rows, args.out)
    if args.out == RESULTS:
        write_page(rows, PAGE)


if __name__ == "__main__":
    main()
