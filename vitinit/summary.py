"""A run's results for people: the lines at its end, and the model card of its export."""

from __future__ import annotations

from vitinit.recipe import Recipe


def summarize(metrics: dict) -> str:
    """The few lines at the end of a run: test accuracy at the start and at the end, against what."""
    name = f"{metrics['init']} init"
    if metrics["model"] == "source":
        name = "source CNN" if metrics["init"] == "construction" else "source CNN, random init"
    rows = []
    if "source" in metrics:
        rows.append(("source CNN, trained on the same images", metrics["source"]["accuracy"]))
    rows.append((f"{name}, step 0", metrics["step0"]["accuracy"]))
    if metrics["step0"]["probe_accuracy"] is not None:
        rows.append((f"{name}, linear probe of step 0", metrics["step0"]["probe_accuracy"]))
    rows.append((f"{name}, fine-tuned", metrics["accuracy"]))
    if "random" in metrics:
        rows.append(("same network, random init, as many images", metrics["random"]["accuracy"]))
    kind = metrics["recipe"]["evaluate"]
    lines = [f"{kind} accuracy ({metrics['n_train']} training images, {metrics['n_test']} {kind} images)"]
    lines += [f"  {label:<42} {accuracy:6.1%}" for label, accuracy in rows]
    if "random" in metrics:
        gain = metrics["accuracy"] - metrics["random"]["accuracy"]
        lines.append(f"  gained over random init: {100 * gain:+.1f} points")
    return "\n".join(lines)


def write_card(recipe: Recipe, metrics: dict) -> str:
    """The model card of an export, Markdown."""
    what = (
        f"The CNN `{recipe.source.model}`, fine-tuned"
        if recipe.model == "source"
        else f"A relative-position attention network built from the CNN `{recipe.source.model}` "
        f"({'random' if recipe.init == 'random' else 'convolution-construction'} initialization) and fine-tuned"
    )
    return f"""---
library_name: timm
tags: [image-classification, timm, vitinit]
---
# {recipe.name}

{what} on {metrics["n_train"]} images of `{recipe.data.name}` (seed {recipe.seed}).

| | {recipe.evaluate} accuracy |
|---|---|
| step 0 | {metrics["step0"]["accuracy"]:.2%} |
| after {metrics["steps"]} steps | {metrics["accuracy"]:.2%} |

```python
import timm, vitinit  # vitinit registers the architecture
model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
```

The recipe is in `recipe.yaml`; numbers, subset and environment in `metrics.json` beside this folder.
"""
