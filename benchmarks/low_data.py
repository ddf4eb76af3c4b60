"""Arms x learning rates x seeds of one recipe: rates chosen on the held-out slice, then the test set once a seed.

    python benchmarks/low_data.py --recipe cifar100_10pct_resnet20 --out benchmarks/results/cifar100_resnet20.json

Each cell is an ordinary run of the recipe in a folder of its own under --runs; finished cells are not repeated.
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

# Two-sided 95 % quantiles of Student's t for n - 1 = 1 .. 9 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

# From random init the positions must be learned, so they train at the full rate there.
RANDOM = ["init=random", "train.position_lr_scale=1"]
ARMS = {
    "construction, tied": ["convert.weights=tied"],
    "source CNN": ["model=source"],
    "random init, free": ["convert.weights=free", *RANDOM],
    "construction, free": ["convert.weights=free"],
    "construction, free, alpha 30": ["convert.weights=free", "convert.alpha=30"],
    "random init, tied": ["convert.weights=tied", *RANDOM],
    "source CNN from random init": ["model=source", "init=random"],
}


def run_cell(recipe: str, folder: Path, settings: list[str]) -> dict:
    """Metrics of one run, from its folder if it is finished, resumed if it was interrupted."""
    result = folder / "metrics.json"
    if not result.exists():
        command = [sys.executable, "finetune.py", "--recipe", recipe, "--out", str(folder)]
        command += [part for setting in settings for part in ("--set", setting)]
        if (folder / "state.pt").exists():
            command.append("--resume")
        elif folder.exists():
            command.append("--overwrite")
        print(f"{datetime.datetime.now():%H:%M:%S}  {folder.name}  {' '.join(settings)}", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())


def choose_rate(
    recipe: str, runs: Path, name: str, settings: list[str], args: argparse.Namespace
) -> tuple[float, dict]:
    """The rate with the best accuracy on the held-out slice, and all of them."""
    scores = {}
    for rate in args.rates:
        tuning = ["evaluate=holdout", f"data.holdout={args.holdout}", f"train.epochs={args.tune_epochs}"]
        tuning += [f"train.lr={rate}", "seed=100", "probe=false"]
        scores[rate] = run_cell(recipe, runs / f"{name}_tune_{rate:g}", settings + tuning)["accuracy"]
    return max(scores, key=scores.get), scores


def confidence_interval(values: list[float]) -> float | None:
    """Half width of the 95 % interval of the mean."""
    n = len(values)
    return STUDENT[n - 2] * statistics.stdev(values) / math.sqrt(n) if n > 1 else None


def main() -> None:
    """Run the cells, arm by arm; the JSON is written anew after each arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/low_data"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 2e-3, 8e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--probes", type=int, default=3, help="seeds whose step 0 is probed as well")
    parser.add_argument("--holdout", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--tune-epochs", type=int, required=True)
    args = parser.parse_args()
    rows = []
    for arm in args.arms:
        settings, name = ARMS[arm], arm.replace(", ", "_").replace(" ", "-")
        rate, scores = choose_rate(args.recipe, args.runs, name, settings, args)
        cells = [
            run_cell(
                args.recipe, args.runs / f"{name}_seed{seed}",
                [
                    *settings, f"train.lr={rate}", f"train.epochs={args.epochs}", f"seed={seed}",
                    f"probe={str(seed < args.probes).lower()}",
                ],
            )
            for seed in range(args.seeds)
        ]  # fmt: skip
        accuracies = [cell["accuracy"] for cell in cells]
        rows.append(
            {
                "arm": arm,
                "settings": settings,
                "lr": rate,
                "holdout_accuracy_by_lr": {f"{r:g}": s for r, s in scores.items()},
                "n": len(cells),
                "accuracy": accuracies,
                "mean": statistics.mean(accuracies),
                "spread": statistics.stdev(accuracies) if len(cells) > 1 else None,
                "interval95": confidence_interval(accuracies),
                "step0_accuracy": [cell["step0"]["accuracy"] for cell in cells],
                "step0_probe_accuracy": [cell["step0"]["probe_accuracy"] for cell in cells[: args.probes]],
                "train_seconds": [round(cell["seconds"], 1) for cell in cells],
                "threads": [cell["environment"]["threads"] for cell in cells],
                "train_accuracy": [cell["epochs"][-1]["train_accuracy"] for cell in cells],
                "parameters": cells[0]["parameters"],
                "n_train": cells[0]["n_train"],
                "steps": cells[0]["steps"],
                "images_seen": cells[0]["images_seen"],
                "subset_sha256": [cell["subset_sha256"] for cell in cells],
                "environment": cells[-1]["environment"],
            }
        )
        write(rows, args)


def write(rows: list[dict], args: argparse.Namespace) -> None:
    """One JSON, rewritten after each arm, and a table."""
    content = {
        "script": "benchmarks/low_data.py", "recipe": args.recipe, "rates": args.rates, "epochs": args.epochs,
        "tune_epochs": args.tune_epochs, "holdout": args.holdout, "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{'arm':32} {'lr':>7} {'test accuracy':>16} {'step 0':>7} {'probe':>7} {'seconds':>8}  n")
    for row in rows:
        probe = row["step0_probe_accuracy"]
        probe = f"{statistics.mean(probe):7.1%}" if probe[0] is not None else "      -"
        half = f"± {row['interval95']:.1%}" if row["interval95"] is not None else ""
        step0, seconds = (statistics.mean(row[key]) for key in ("step0_accuracy", "train_seconds"))
        end = f"{row['mean']:8.1%} {half:>7} {step0:7.1%} {probe} {seconds:8.0f}  {row['n']}"
        print(f"{row['arm']:32} {row['lr']:7g} {end}", flush=True)


if __name__ == "__main__":
    main()
