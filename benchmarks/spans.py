"""Global against local attention: seconds and memory of one layer's forward pass at 7, 14, 28 and 56 pixels a side.

    python benchmarks/spans.py --out benchmarks/results/spans.json

Three kinds of layer, with the widths of ResNets and of ConvNeXts at each grid: a 3x3 convolution, the same with content
on (queries and keys of width 16), and a 7x7 depthwise convolution. Tokens are pixels. Last, the conversion of timm's
resnet50 at 224 px: seconds and peak memory beyond the CNN's own, in a process of its own.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import statistics
import time
from pathlib import Path

import timm
import torch
from torch import nn

import vitinit
from vitinit.provenance import describe_environment

GRIDS = {7: (512, 768), 14: (256, 384), 28: (128, 192), 56: (64, 96)}  # side: channels of a ResNet and of a ConvNeXt
KINDS = ("3x3", "3x3, content 16", "7x7 depthwise")
LARGEST_MAP = 2e9  # bytes; attention maps beyond that are not tried


def build(kind: str, side: int) -> nn.Conv2d:
    """A convolution of a kind."""
    dense, depthwise = GRIDS[side]
    if kind == "7x7 depthwise":
        return nn.Conv2d(depthwise, depthwise, 7, padding=3, groups=depthwise)
    return nn.Conv2d(dense, dense, 3, padding=1)


def convert(kind: str, side: int, span: str) -> nn.Module:
    """A convolution of a kind as one attention layer."""
    content = 16 if "content" in kind else 0
    return vitinit.convert(build(kind, side), img_size=side, stages=[""], span=span, patch=1, content_dim=content)[0]


def map_bytes(kind: str, side: int, batch: int) -> int:
    """Bytes of the maps of global attention."""
    heads = 50 if "7x7" in kind else 10
    return 4 * heads * side**4 * (batch if "content" in kind else 1)


@torch.no_grad()
def time_forward(layer: nn.Module, images: torch.Tensor) -> float:
    """Seconds of one pass."""
    started = time.perf_counter()
    layer(images)
    return time.perf_counter() - started


def measure_memory(pipe, kind: str, side: int, span: str | None, batch: int) -> None:
    """Peak memory in MiB that one pass adds to a process, sent through a pipe; for no span, that of the convolution."""
    torch.set_num_threads(1)
    layer = build(kind, side) if span is None else convert(kind, side, span)
    images = torch.randn(batch, next(m for m in build(kind, side).parameters()).shape[0], side, side)
    time_forward(nn.Conv2d(3, 3, 3), torch.randn(1, 3, 8, 8))  # what the library itself takes
    before = reset_peak()
    time_forward(layer, images)
    pipe.send(peak() - before)


def measure_conversion(pipe) -> None:
    """Seconds to convert resnet50's last two stages, and the peak memory in MiB that it adds, sent through a pipe."""
    torch.manual_seed(0)
    cnn = timm.create_model("resnet50").eval()
    with torch.no_grad():
        cnn(torch.randn(2, 3, 224, 224))  # what the CNN needs by itself
    before, started = reset_peak(), time.perf_counter()
    _, report = vitinit.convert(cnn, img_size=224, stages=2)
    seconds = time.perf_counter() - started
    pipe.send((seconds, peak() - before, len(report.converted), report.logits_error, torch.get_num_threads()))


def resident(key: str = "VmRSS") -> float:
    """Memory in MiB that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def reset_peak() -> float:
    """Memory in MiB that is held now, free blocks given back; `peak` counts from here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def peak() -> float:
    """The most that has been held since `reset_peak`."""
    return resident("VmHWM")


def in_a_process(function, *args):
    """What a function sends from a new process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *args))
    process.start()
    result = here.recv()
    process.join()
    return result


def main() -> None:
    """Measure in turns, print the rows, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for kind in KINDS:
        for side in GRIDS:
            spans = ["local"] if map_bytes(kind, side, args.batch_size) > LARGEST_MAP else ["global", "local"]
            conv = build(kind, side)
            layers = {None: conv, **{span: convert(kind, side, span) for span in spans}}
            images = torch.randn(args.batch_size, conv.in_channels, side, side)
            seconds = {span: [] for span in layers}
            for turn in range(args.turns + 1):
                for span, layer in layers.items():
                    elapsed = time_forward(layer, images)
                    if turn:  # the first turn warms up
                        seconds[span].append(elapsed)
            row = {"kind": kind, "side": side, "channels": conv.in_channels}
            row["conv_ms"] = 1000 * statistics.median(seconds[None])
            row["conv_mib"] = in_a_process(measure_memory, kind, side, None, args.batch_size)
            for span in spans:
                ratios = [s / c for s, c in zip(seconds[span], seconds[None], strict=True)]
                row[f"{span}_ratio_to_conv"] = statistics.median(ratios)
                row[f"{span}_ratio_spread"] = statistics.stdev(ratios)
                row[f"{span}_mib"] = in_a_process(measure_memory, kind, side, span, args.batch_size)
            _, report = vitinit.convert(build(kind, side), img_size=side, stages=[""])
            row["auto"], row["auto_patch"] = report.layers[0].span, report.layers[0].patch[0]
            rows.append(row)
            print("  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    keys = ("seconds", "mib", "converted", "logits_error", "threads")
    conversion = dict(zip(keys, in_a_process(measure_conversion), strict=True))
    print(conversion)
    content = {
        "script": "benchmarks/spans.py",
        "environment": describe_environment(),
        "batch_size": args.batch_size,
        "turns": args.turns,
        "rows": rows,
        "resnet50_last_two_stages_224px": conversion,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
