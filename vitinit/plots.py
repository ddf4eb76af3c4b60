"""Pictures of results; matplotlib is imported here and nowhere else."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, told apart in greyscale and by most colour-blind readers.
CONSTRUCTION, RANDOM, SOURCE, PROBE = "#0072B2", "#E69F00", "#555555", "#56B4E9"


def plot_summary(metrics: dict, path: Path, *, title: str) -> None:
    """Draw a run: test accuracies as bars on the left, the training loss by epoch on the right.

    Args:
        metrics: What `run.run_recipe` returns.
        path: PNG file to write.
        title: Above the picture.
    """
    name = f"{metrics['init']} init" if metrics["model"] == "converted" else "source CNN"
    main = CONSTRUCTION if metrics["init"] == "construction" else RANDOM
    bars = [
        (f"{name},\nstep 0", metrics["step0"]["accuracy"], PROBE),
        (f"{name},\nfine-tuned", metrics["accuracy"], main),
    ]
    if metrics["step0"]["probe_accuracy"] is not None:
        bars.insert(1, (f"{name},\nstep-0 linear probe", metrics["step0"]["probe_accuracy"], PROBE))
    if "source" in metrics:
        bars.insert(0, ("source CNN\n(stage 1)", metrics["source"]["accuracy"], SOURCE))
    if "random" in metrics:
        bars.append(("random init,\nsame network", metrics["random"]["accuracy"], RANDOM))

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    drawn = left.bar(range(len(bars)), [100 * value for _, value, _ in bars], color=[c for *_, c in bars], width=0.65)
    left.bar_label(drawn, fmt="%.1f", padding=2)
    left.set_xticks(range(len(bars)), [label for label, *_ in bars], fontsize=8.5)
    left.set_ylim(0, 110)
    left.set_ylabel(f"{metrics['recipe']['evaluate']} accuracy in % ({metrics['n_test']} images)")
    left.set_title(f"{metrics['n_train']} training images", fontsize=10)

    stage1 = metrics["source"]["epochs"] if "source" in metrics else []
    curves = [(name, metrics["epochs"], main, len(stage1))]
    if stage1:
        curves.insert(0, ("source CNN (stage 1)", stage1, SOURCE, 0))
    if "random" in metrics:
        curves.append(("random init", metrics["random"]["epochs"], RANDOM, 0))
    for label, epochs, colour, start in curves:
        x = range(start + 1, start + len(epochs) + 1)
        right.plot(x, [e["loss"] for e in epochs], color=colour, marker="o", markersize=2.5, label=label)
    # Logarithmic: a network that starts as its trained source would lie on the axis.
    right.set(xlabel="epoch, stage 1 included" if stage1 else "epoch", ylabel="training loss", yscale="log")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
