"""What a network's features are worth before fine-tuning: a linear probe."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitinit.augment import normalize

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)  # each fit starts where the one before it ended


def linear_probe(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, *, num_classes: int) -> float:
    """Test accuracy (0 to 1) of a logistic regression on features, see `extract_features`.

    The features are standardized by the training images' statistics. The L2 penalty is chosen among
    `PENALTIES` on every fifth training image, never on the test images, then the fit uses all of them.

    Args:
        x: (n, num_features) of the training images.
        y: (n,) their labels.
        x_test: (m, num_features).
        y_test: (m,).
        num_classes: Number of classes.
    """
    centre, scale = x.mean(dim=0), x.std(dim=0) + 1e-6
    x, x_test = (x - centre) / scale, (x_test - centre) / scale
    chosen = torch.arange(len(y), device=y.device) % 5 == 0

    weight = torch.zeros(x.shape[1] + 1, num_classes, device=x.device)
    fits = []
    for penalty in PENALTIES:
        weight = _fit_logistic(x[~chosen], y[~chosen], weight, penalty)
        fits.append((_accuracy(weight, x[chosen], y[chosen]), penalty, weight))
    _, penalty, weight = max(fits, key=lambda fit: fit[0])
    return _accuracy(_fit_logistic(x, y, weight, penalty), x_test, y_test)


@torch.no_grad()
def extract_features(
    model: nn.Module, images: Tensor, *, mean: tuple[float, ...], std: tuple[float, ...], batch_size: int = 500
) -> Tensor:
    """Pooled features (n, num_features) of uint8 images (n, 3, H, W), in evaluation mode."""
    training = model.training
    model.eval()
    features = [
        model.forward_head(model.forward_features(normalize(batch, mean=mean, std=std)), pre_logits=True)
        for batch in images.split(batch_size)
    ]
    model.train(training)
    return torch.cat(features).float()


def _fit_logistic(x: Tensor, y: Tensor, start: Tensor, penalty: float) -> Tensor:
    """(num_features + 1, n_classes) weights, the bias in the last row."""
    x = F.pad(x, (0, 1), value=1.0)
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight], max_iter=100, history_size=10, line_search_fn="strong_wolfe", tolerance_grad=1e-5
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight, y) + penalty * weight[:-1].square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach()


def _accuracy(weight: Tensor, x: Tensor, y: Tensor) -> float:
    return float(((F.pad(x, (0, 1), value=1.0) @ weight).argmax(dim=1) == y).double().mean())
