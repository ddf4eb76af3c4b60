"""What attention costs: seconds to convert, images/s of training and inference against the CNN and a timm ViT.

    python benchmarks/cost.py --out benchmarks/results/cost.json

All networks run in one process, in turns, so that their ratios mean something on a machine that is not idle.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

import vitinit
from vitinit.provenance import describe_environment


def build_networks() -> tuple[dict[str, nn.Module], list[dict]]:
    """ResNet-20, its conversions, and timm's relative-position ViT with 64 tokens and about the same FLOPs."""
    cnn = timm.create_model("resnet20_cifar", num_classes=100)
    networks, conversions = {"resnet20 (the CNN)": cnn}, []
    for label, settings in {
        "converted, tied": {"weights": "tied"},
        "converted, free": {"weights": "free"},
        "converted, free, factorized": {"weights": "free", "values": "factorized"},
        "converted, tied, content 16": {"content_dim": 16},
        "converted, tied, pixel tokens": {"patch": 1},
    }.items():
        networks[label] = time_conversion(cnn, 32, label, settings, conversions)
    networks["timm vit_relpos, patch 4"] = VisionTransformerRelPos(
        img_size=32, patch_size=4, embed_dim=192, depth=5, num_heads=3, num_classes=100, class_token=False
    )
    for name in ("resnet18", "resnet50"):
        time_conversion(timm.create_model(name), 224, f"{name}, last two stages", {"stages": 2}, conversions)
    return networks, conversions


def time_conversion(cnn: nn.Module, size: int, label: str, settings: dict, rows: list[dict]) -> nn.Module:
    """Convert, and note how long that took with all its checks."""
    started = time.perf_counter()
    model, report = vitinit.convert(cnn.eval(), img_size=size, **settings)
    rows.append(
        {
            "network": label,
            "img_size": size,
            "seconds": time.perf_counter() - started,
            "converted": len(report.converted),
            "parameters_before": report.params_before,
            "parameters_after": report.params_after,
            "mflops_before": sum(row.macs_before for row in report.layers) / 1e6,
            "mflops_after": sum(row.macs_after for row in report.layers) / 1e6,
            "logits_error": report.logits_error,
        }
    )
    return model


def run_once(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, train: bool, bf16: bool) -> float:
    """Images a second of one step."""
    started = time.perf_counter()
    with torch.set_grad_enabled(train), torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        logits = model.train(train)(images)
    if train:
        F.cross_entropy(logits.float(), labels).backward()
        model.zero_grad()
    if images.is_cuda:
        torch.cuda.synchronize()
    return len(images) / (time.perf_counter() - started)


def main() -> None:
    """Measure in turns, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    networks, conversions = build_networks()
    images = torch.randn(args.batch_size, 3, 32, 32, device=device)
    labels = torch.randint(0, 100, (args.batch_size,), device=device)
    modes = [(train, bf16) for train in (True, False) for bf16 in (False, True)]
    speeds = {(name, *mode): [] for name in networks for mode in modes}
    for model in networks.values():
        model.to(device)
    for turn in range(args.turns + 1):
        for name, model in networks.items():
            for mode in modes:
                speed = run_once(model, images, labels, train=mode[0], bf16=mode[1])
                if turn:  # the first turn warms up
                    speeds[(name, *mode)].append(speed)
    reference = next(iter(networks))
    rows = []
    for name, model in networks.items():
        row = {"network": name, "parameters": sum(p.numel() for p in model.parameters())}
        for train, bf16 in modes:
            key = f"{'train' if train else 'infer'}_{'bf16' if bf16 else 'float32'}"
            values = speeds[name, train, bf16]
            pairs = [v / r for v, r in zip(values, speeds[reference, train, bf16], strict=True)]
            row |= {
                f"{key}_images_per_second": statistics.median(values),
                f"{key}_ratio_to_cnn": statistics.median(pairs),
                f"{key}_ratio_spread": statistics.stdev(pairs),
            }
        rows.append(row)
        print(
            f"{name:32} {row['parameters']:>9,}  train {row['train_bf16_images_per_second']:6.0f} img/s bf16 "
            f"({row['train_bf16_ratio_to_cnn']:.2f} of the CNN)  infer {row['infer_bf16_images_per_second']:6.0f} "
            f"({row['infer_bf16_ratio_to_cnn']:.2f})"
        )
    for row in conversions:
        print(f"{row['network']:32} converted in {row['seconds']:.2f}s, logits {row['logits_error']:.1e}")
    content = {
        "script": "benchmarks/cost.py",
        "environment": describe_environment(),
        "batch_size": args.batch_size,
        "turns": args.turns,
        "speed": rows,
        "conversion": conversions,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
