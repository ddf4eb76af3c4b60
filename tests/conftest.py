"""Fixtures that several test files share; real data and weights lie beside the checkout and are optional."""

from pathlib import Path

import pytest
import torch
from torch import nn

SHARED = Path(__file__).parents[1].parent / "shared"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_weights():
    folder = SHARED / "weights"
    if not folder.is_dir():
        pytest.skip("the published CIFAR-10 weights are not here: no ../shared/weights beside the checkout")
    return folder


@pytest.fixture(scope="session")
def shared_data():
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("the real data sets are not here: no ../shared/data beside the checkout")
    return folder


def randomize_norms(model):
    """Batch norms as after training: no zero-initialized branch hides an error, no statistic is trivial."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model
