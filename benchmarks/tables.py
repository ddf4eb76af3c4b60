"""Write the result tables into README.md, between its markers, from benchmarks/results/*.json.

python benchmarks/tables.py           # rewrite
python benchmarks/tables.py --check   # fail if README.md and the results differ
"""

import argparse
import csv
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
        f"({count_threads(environment['threads'])}), torch {versions['torch']}, timm {versions['timm']}"
    )


def percent(mean: float, half: float | None = None) -> str:
    """Accuracy in percent, with the half width of its 95 % interval."""
    return f"{100 * mean:.1f}" + (f" ± {100 * half:.1f}" if half is not None else "")


def count_threads(number: int) -> str:
    """A number of threads in words."""
    return f"{number} thread{'' if number == 1 else 's'}"


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


def low_data(name: str) -> str:
    """Arms of the CIFAR-100 runs."""
    content = json.loads((RESULTS / f"cifar100_{name}.json").read_text())
    rows = []
    for row in content["rows"]:
        probes = row["step0_probe_accuracy"]
        probe = percent(statistics.mean(probes)) if probes and probes[0] is not None else "–"
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


def imagenette() -> str:
    """A CNN trained on ImageNet and its conversions on photographs."""
    content = json.loads((RESULTS / "imagenette.json").read_text())
    header = ["image size", "converted", "top-1 of the CNN, %", "top-1 converted, %", "same prediction", "logits"]
    rows = [
        [
            f"{row['img_size']} px", f"{row['converted']} of {row['convolutions']} convolutions",
            percent(row["top1_before"]), percent(row["top1_after"]),
            f"{row['same_prediction']:,} of {row['images']:,}", f"{row['logits']:.1e}",
        ]
        for row in content["rows"]
    ]  # fmt: skip
    return f"{table(header, rows)}\n\n{origin(content, content['environment'])}"


def spans() -> str:
    """One layer's forward pass by span, and the conversion of a ResNet-50."""
    content = json.loads((RESULTS / "spans.json").read_text())
    header = ["layer", "grid", "channels", "global: time", "MiB", "local: time", "MiB", "chosen"]
    rows = []
    for row in content["rows"]:
        cells = [row["kind"], f"{row['side']}×{row['side']}", str(row["channels"])]
        for span in ("global", "local"):
            tried = f"{span}_mib" in row
            cells += [f"{row[f'{span}_ratio_to_conv']:.1f}" if tried else "–"]
            cells += [f"{row[f'{span}_mib']:.0f}" if tried else "–"]
        rows.append([*cells, row["auto"]])
    conversion = content["resnet50_last_two_stages_224px"]
    note = (
        f"Forward pass of a batch of {content['batch_size']}, pixel tokens, float32: time relative to the convolution "
        f'(median of {content["turns"]} turns) and peak memory. `chosen` is what `span="auto"` takes.\n\n'
        f"Conversion of timm's resnet50 at 224 px, last two stages ({conversion['converted']} layers), with all its "
        f"checks: {conversion['seconds']:.1f} s and {conversion['mib']:.0f} MiB beyond the CNN's own peak, on "
        f"{count_threads(conversion['threads'])}."
    )
    return f"{table(header, rows)}\n\n{note}\n\n{origin(content, content['environment'])}"


def sweep() -> str:
    """Totals of the sweep over timm."""
    rows = list(csv.DictReader((RESULTS / "timm_sweep.csv").open()))
    tried = [row for row in rows if row["status"] not in ("none", "too large")]
    lines = []
    for key, what in (("first", "grids up to 16×16"), ("windows", "grids up to 56×56, local windows")):
        part = [row for row in tried if row["pass"] == key]
        states = [row["status"] for row in part]
        layers, converted = (sum(int(row[c] or 0) for row in part) for c in ("convolutions", "converted"))
        counts = [f"{states.count(state):,}" for state in ("passed", "rounding", "kept", "failed")]
        families = len({row["family"] for row in part})
        lines.append([what, f"{len(part):,} in {families} families", *counts, f"{converted:,} of {layers:,}"])
    header = ["convolutions", "models", "passed", "rounding", "kept", "failed", "converted"]
    return table(header, lines)


def main() -> int:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = before = readme.read_text()
    tables = {
        "exactness": exactness, "sweep": sweep, "imagenette": imagenette, "digits": digits, "cost": cost,
        "spans": spans, "low_data resnet20": lambda: low_data("resnet20"), "low_data lite0": lambda: low_data("lite0"),
    }  # fmt: skip
    for name, make in tables.items():
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
