"""How exactly attention reproduces convolutions: the space of kernels, and whole networks.

    python benchmarks/exactness.py --out benchmarks/results/exactness.json [--weights DIR] [--data DIR]

Errors are norms of differences over norms of the CNN's values. Networks run on random images; ResNet-20 and -56 with
the published CIFAR-10 weights (--weights) also on the CIFAR-100 test images (--data).
"""

import argparse
import json
import os
from pathlib import Path

import timm
import torch
from torch import nn

import vitinit
from vitinit.data import load_splits
from vitinit.provenance import describe_environment
from vitinit.sources import load_source

SHARPNESS = (0.3, 0.9, 0.999)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def measure_kernel(kernel: int, dtype: torch.dtype) -> dict:
    """Worst errors of one kernel side over strides, patches, groups, dilations, paddings and sharpness."""
    worst = {"border": 0.0, "interior": 0.0}
    n = 0
    for stride in (1, 2, 3, 4):
        for patch in (1, 2, 4):
            for groups, dilation, padding in ((1, 1, kernel // 2), (4, 2, kernel - 1), (8, 1, 0)):
                rows, columns = (choose_size(m, kernel, stride, patch, dilation, padding) for m in (3, 4))
                if rows is None or columns is None:
                    continue
                conv = nn.Conv2d(8, 8, kernel, stride, padding, dilation, groups).to(dtype)
                image = torch.randn(2, 8, rows, columns, dtype=dtype)
                for sharpness in SHARPNESS:
                    model, _ = vitinit.convert(
                        nn.Sequential(conv), img_size=(rows, columns), stages=["0"], patch=patch, sharpness=sharpness
                    )
                    with torch.no_grad():
                        errors = split_error(model(image).double(), conv.double()(image.double()))
                    conv.to(dtype)
                    worst = {part: max(worst[part], errors[part]) for part in worst}
                    n += 1
    return {"kernel": kernel, "cases": n, **worst}


def choose_size(multiple: int, kernel: int, stride: int, patch: int, dilation: int, padding: int) -> int | None:
    """A side that the patch divides before and after the convolution, a few patches large; None if there is none."""
    reach = dilation * (kernel - 1) + 1
    sizes = (n for n in range(patch, 400, patch) if n + 2 * padding >= reach)
    fits = (n for n in sizes if ((n + 2 * padding - reach) // stride + 1) % patch == 0)
    return next((n for n in fits if (n + 2 * padding - reach) // stride + 1 >= multiple * patch), None)


def split_error(got: torch.Tensor, expected: torch.Tensor) -> dict:
    """Relative errors of the outermost output pixels and of the others."""
    border = torch.ones(expected.shape[-2:], dtype=torch.bool)
    border[1:-1, 1:-1] = False
    scale = expected.square().mean().sqrt()
    parts = {"border": border, "interior": ~border}
    return {
        name: float((got - expected)[..., mask].square().mean().sqrt() / scale) if mask.any() else 0.0
        for name, mask in parts.items()
    }


def measure_network(name: str, cnn: nn.Module, img_size: int, dtype: torch.dtype, weights: str) -> dict:
    """Worst layer and logits of a converted network on random images."""
    _, report = vitinit.convert(cnn.to(dtype), img_size=img_size)
    return {
        "network": name,
        "weights": weights,
        "img_size": img_size,
        "converted": len(report.converted),
        "convolutions": len(report.layers),
        "worst_layer": max(row.error for row in report.converted),
        "logits": report.logits_error,
    }


def measure_predictions(cnn: nn.Module, images: torch.Tensor, mean: tuple, std: tuple) -> dict:
    """Agreement of the converted network with its CNN on real images, in float32."""
    model, _ = vitinit.convert(cnn.float(), img_size=32)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))
    same, error, total = 0, 0.0, 0.0
    with torch.no_grad():
        for batch in images.split(500):
            x = (batch / 255 - mean) / std
            ours, theirs = model(x), cnn(x)
            same += int((ours.argmax(1) == theirs.argmax(1)).sum())
            error, total = error + float((ours - theirs).square().sum()), total + float(theirs.square().sum())
    return {"real_images": len(images), "same_prediction": same, "logits_on_real_images": (error / total) ** 0.5}


def randomize_norms(model: nn.Module) -> nn.Module:
    """Batch norms as after training, so that no zero-initialized branch hides an error."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=Path, default=os.environ.get("VITINIT_WEIGHTS"))
    parser.add_argument("--data", type=Path, default=os.environ.get("VITINIT_DATA"))
    args = parser.parse_args()
    torch.manual_seed(0)
    kernels, networks = [], []
    for name, dtype in DTYPES.items():
        for kernel in range(2, 12):
            row = {"dtype": name, **measure_kernel(kernel, dtype)}
            kernels.append(row)
            errors = f"border {row['border']:.1e}  interior {row['interior']:.1e}"
            print(f"{name}  K={kernel:<2}  {row['cases']} cases  {errors}", flush=True)
    for name, dtype in DTYPES.items():
        for network, size in (("resnet18", 64), ("resnet50", 64)):
            cnn = randomize_norms(timm.create_model(network)).eval()
            networks.append({"dtype": name, **measure_network(network, cnn, size, dtype, "random")})
        for network in ("resnet20", "resnet56") if args.weights else ():
            source = load_source(f"{network}_cifar", weights=Path(args.weights) / f"{network}_cifar10.safetensors")
            networks.append({"dtype": name, **measure_network(network, source.model, 32, dtype, "published, CIFAR-10")})
            if args.data and name == "float32":
                test = load_splits(
                    "cifar100",
                    path=str(Path(args.data) / "cifar100"),
                    label="fine_label",
                    img_size=32,
                    images_per_class=1,
                ).test
                networks[-1] |= measure_predictions(source.model, test.images, source.mean, source.std)
    for row in networks:
        print("  ".join(f"{k}={v:.1e}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    content = {
        "script": "benchmarks/exactness.py",
        "environment": describe_environment(),
        "sharpness": SHARPNESS,
        "kernels": kernels,
        "networks": networks,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
