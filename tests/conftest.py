"""Fixtures that several test files share; real data and weights lie beside the checkout and are optional."""

import dataclasses
import functools
import gc
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from vitinit import plots, probe, run
from vitinit.attention.heads import HeadWeights
from vitinit.attention.table import TableAttention, read_leak
from vitinit.data import ImageSet, load_splits

SHARED = Path(__file__).parents[1].parent / "shared"


@pytest.fixture(autouse=True)
def _fresh_state():
    torch.manual_seed(0)
    torch.set_flush_denormal(False)  # runs set it for the process, and hypothesis needs denormal floats


def find_shared(name, what):
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"{what} are not here: no ../shared/{name} beside the checkout")
    return folder


@pytest.fixture(scope="session")
def shared_weights():
    return find_shared("weights", "the published CIFAR-10 weights")


@pytest.fixture(scope="session")
def shared_data():
    return find_shared("data", "the real data sets")


def randomize_norms(model):
    """Batch norms as after training: no zero-initialized branch hides an error, no statistic is trivial."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


@functools.cache
def load_few(name: str, **settings) -> object:
    """The splits of `load_splits` with a tenth of the test images."""
    splits = load_splits(name, **{**settings, "log": lambda _: None})
    test, few = splits.test, slice(None, None, 10)
    test = ImageSet(test.images[few], test.labels[few], test.classes, test.indices[few])
    return dataclasses.replace(splits, test=test)


@pytest.fixture(scope="module")
def small_and_fast():
    """What runs spend their time on without being about it: teams of threads, garbage, pictures, the probe."""
    threads = torch.get_num_threads()
    gc.freeze()  # accelerate collects after every training
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "load_splits", lambda name, *, log, **settings: load_few(name, **settings))
        patch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
        patch.setattr(plots, "plot_summary", lambda *_, **__: None)
        patch.setattr(probe, "PENALTIES", (1e-2,))
        yield
    torch.set_num_threads(threads)


def build_attention(geometry, *, in_channels, alpha, content_dim=0, dtype=None, **projection):
    """Attention with one projection, on the offsets of its convolution."""
    leak = read_leak(alpha, geometry)
    heads = HeadWeights(geometry, in_channels=in_channels, leak=leak, dtype=dtype, **projection)
    width = in_channels * math.prod(geometry.in_patch)
    return TableAttention(geometry, [heads], width=width, alpha=alpha, content_dim=content_dim, dtype=dtype)


def load_kernel(attention, kernel, bias=None):
    attention.load_positions()
    attention.projections[0].load_kernel(kernel, bias)
