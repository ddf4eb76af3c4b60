"""Write the result tables into README.md, between its markers, from benchmarks/results/*.json.

python benchmarks/tables.py           # rewrite
python benchmarks/tables.py --check   # fail if README.md and the results differ
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin(content: dict, environment: dict) -> str:
    """One line: script, date, commit, device, versions."""
    versions = environment["versions"]
    return (
        f"`{content['script']}`, {environment['date'][:10]}, commit {environment['commit']}, {environment['device']} "
        f"({environment['threads']} threads), torch {versions['torch']}, timm {versions['timm']}"
    )


def percent(mean: float, half: float | None = None) -> str:
    """Accuracy in percent, with the half width of its 95 % interval."""
    return f"{100 * mean:.1f}" + (f" ± {100 * half:.1f}" if half is not None else "")


def exactness() -> str:
    """Worst errors by dtype, then the networks."""
    content = json.loads((RESULTS / "exactness.json").read_text())
    rows = []
    for dtype in ("float32", "float64"):
        part = [row for row in content["kernels"] if row["dtype"] == dtype]
        cases = sum(row["cases"] for row in part)
        border, interior = (max(row[key] for row in part) for key in ("border", "interior"))
        rows.append([f"{cases} convolutions, K = 2 to 11, {dtype}", f"{interior:.1e}", f"{border:.1e}", ""])
    for row in content["networks"]:
        real = ""
        if "real_images" in row:
            real = f"; same prediction on {row['same_prediction']:,} of {row['real_images']:,} CIFAR-100 test images"
        name = f"{row['network']} ({row['weights']} weights, {row['img_size']} px), {row['dtype']}"
        rows.append([name, f"{row['worst_layer']:.1e}", "", f"{row['logits']:.1e}{real}"])
    text = table(["what", "worst layer or interior", "border", "logits"], rows)
    return f"{text}\n\n{origin(content, content['environment'])}"


def low_data() -> str:
    """Arms of the CIFAR-100 runs."""
    content = json.loads((RESULTS / "cifar100_resnet20.json").read_text())
    rows = []
    for row in content["rows"]:
        probes = row["step0_probe_accuracy"]
        probe = percent(statistics.mean(probes)) if probes[0] is not None else "–"
        rows.append([
            row["arm"], f"{row['lr']:g}", percent(statistics.mean(row["step0_accuracy"])), probe,
            f"**{percent(row['mean'], row['interval95'])}**", percent(statistics.mean(row["train_accuracy"])),
            str(row["n"]), f"{statistics.mean(row['train_seconds']):.0f} ({max(row['threads'])})",
        ])  # fmt: skip
    header = ["arm", "lr", "step 0, new head", "step 0, linear probe", "test accuracy, %", "train accuracy"]
    header += ["seeds", "train s (threads)"]
    first = content["rows"][0]
    note = (
        f"{first['n_train']:,} training images, {content['epochs']} epochs ({first['images_seen']:,} images seen); "
        f"rate chosen from {', '.join(f'{r:g}' for r in content['rates'])} on a held-out {content['holdout']:.0%} of "
        "the subset; mean with its 95 % interval."
    )
    return f"{table(header, rows)}\n\n{note} {origin(content, content['rows'][-1]['environment'])}"


def digits() -> str:
    """The demo over its seeds."""
    content = json.loads((RESULTS / "digits.json").read_text())
    rows = [[row["arm"], percent(row["mean"], row["interval95"]), str(content["n"])] for row in content["rows"]]
    text = table(["arm", "test accuracy, %", "seeds"], rows)
    note = f"{content['n_train']} training and {content['n_test']} test images."
    return f"{text}\n\n{note} {origin(content, content['environment'])}"


def cost() -> str:
    """Speed relative to the CNN, and conversions."""
    content = json.loads((RESULTS / "cost.json").read_text())
    header = ["network", "parameters", "train, bf16", "train, float32", "infer, bf16", "infer, float32"]
    modes = ("train_bf16", "train_float32", "infer_bf16", "infer_float32")
    rows = [
        [row["network"], f"{row['parameters']:,}", *(f"{row[f'{mode}_ratio_to_cnn']:.2f}" for mode in modes)]
        for row in content["speed"]
    ]
    conversions = [
        [
            row["network"],
            f"{row['img_size']}",
            f"{row['seconds']:.2f}",
            f"{row['mflops_before']:.0f} → {row['mflops_after']:.0f}",
        ]
        for row in content["conversion"]
    ]
    second = table(["conversion of", "px", "seconds", "MFLOPs of the convolutions"], conversions)
    note = (
        f"Images/s relative to the CNN's in the same turn, median of {content['turns']}, batch {content['batch_size']}."
    )
    return f"{table(header, rows)}\n\n{note}\n\n{second}\n\n{origin(content, content['environment'])}"


def main() -> int:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = before = readme.read_text()
    for name, make in {"exactness": exactness, "low_data": low_data, "digits": digits, "cost": cost}.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, found = re.subn(pattern, lambda m, make=make: m[1] + make() + "\n" + m[2], text, flags=re.DOTALL)
        if found != 1:
            print(f"README.md has {found} places for the table {name!r}, expected 1", file=sys.stderr)
            return 1
    if args.check:
        if text != before:
            print("README.md does not show benchmarks/results: run python benchmarks/tables.py", file=sys.stderr)
        return int(text != before)
    readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
