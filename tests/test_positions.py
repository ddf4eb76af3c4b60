"""Bias tables, sinks and patches against direct computations on the padded plane."""

import pytest
import torch

from vitinit.positions import (
    ConvGeometry,
    build_bias_table,
    cut_patches,
    join_patches,
    positional_maps,
    sharpness_to_alpha,
    sink_logits,
)  # fmt: skip

GEOMETRIES = [
    {"in_size": (5, 7), "kernel_size": (3, 3), "padding": (1,) * 4},
    {"in_size": (1, 6), "kernel_size": (1, 3), "padding": (0, 0, 1, 1)},
    {"in_size": (9, 8), "kernel_size": (4, 5), "stride": (2, 3), "padding": (0, 3, 2, 1)},
    {"in_size": (8, 12), "kernel_size": (5, 3), "padding": (2, 2, 1, 1), "patch": (2, 4)},
    {"in_size": (3, 3), "kernel_size": (3, 3), "padding": (6, 0, 5, 1)},
]
GEOMETRIES += [{**settings, "span": "local"} for settings in GEOMETRIES]
GEOMETRIES += [{"in_size": (9, 8), "kernel_size": (3, 2), "dilation": (2, 3), "padding": (2,) * 4, "span": "local"}]


def on_the_plane(geometry, logits):
    """Softmax over every offset of the table, query by query, as loops: maps on keys, and the mass outside."""
    heads = len(logits)
    maps = torch.zeros(heads, geometry.n_queries, geometry.n_keys, dtype=torch.float64)
    outside = torch.zeros(heads, geometry.n_queries, dtype=torch.float64)
    y, x = geometry.y, geometry.x
    mass = logits.softmax(-1).view(heads, y.table_size, x.table_size)
    for i in range(y.queries):
        for j in range(x.queries):
            for a, dy in enumerate(y.table_offsets):
                for b, dx in enumerate(x.table_offsets):
                    row, column = i * y.token_stride + dy, j * x.token_stride + dx
                    share = mass[:, a, b]
                    if 0 <= row < y.keys and 0 <= column < x.keys:
                        maps[:, i * x.queries + j, row * x.keys + column] += share
                    else:
                        outside[:, i * x.queries + j] += share
    return maps, outside


@pytest.mark.parametrize("settings", GEOMETRIES)
def test_maps_and_sinks_are_the_softmax_over_the_padded_plane(settings):
    geometry = ConvGeometry.build(**settings)
    table = torch.randn(geometry.heads, geometry.table_size, dtype=torch.float64)
    maps, outside = on_the_plane(geometry, table)
    assert torch.allclose(positional_maps(table, geometry.relative_index()), maps, atol=1e-14)
    assert torch.allclose(maps.sum(-1) + outside, torch.ones_like(outside), atol=1e-14)
    if geometry.span == "local":  # no more offsets than the kernel has
        assert geometry.table_offsets == geometry.offsets
    else:  # all keys are seen
        assert (maps > 0).all()
    expected = (outside + 1e-300).log() + table.logsumexp(-1, keepdim=True)
    got = sink_logits(table, geometry)
    seen = outside > 0
    assert torch.allclose(got[seen], expected[seen], atol=1e-12)
    assert (got[~seen] < -1e30).all()


def test_a_local_pointwise_head_sees_its_neighbours():
    geometry = ConvGeometry.build((5, 6), kernel_size=(1, 1), span="local")
    assert geometry.offsets == [(0, 0)]
    assert geometry.table_offsets == [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]


def test_sink_gradients_are_right_and_finite_where_nothing_is_outside():
    geometry = ConvGeometry.build((1, 3), kernel_size=(1, 3), padding=(0, 0, 1, 1))
    table = torch.randn(geometry.heads, geometry.table_size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: sink_logits(t, geometry).clamp(min=-50).exp(), table)
    inner = ConvGeometry.build((3, 3), kernel_size=(3, 3))  # one query in the middle that sees the image alone
    table = torch.randn(inner.heads, inner.table_size, dtype=torch.float64, requires_grad=True)
    sink_logits(table, inner).exp().sum().backward()
    assert torch.isfinite(table.grad).all()


def test_every_head_looks_at_its_own_offset():
    geometry = ConvGeometry.build((6, 5), kernel_size=(3, 3), padding=(1,) * 4)
    alpha = sharpness_to_alpha(0.8, geometry.table_size)
    maps = positional_maps(build_bias_table(geometry, alpha=alpha), geometry.relative_index())
    for head, (dy, dx) in enumerate(geometry.offsets):
        query, key = 2 * 5 + 2, (2 + dy) * 5 + 2 + dx
        assert maps[head, query, key] == pytest.approx(0.8, abs=1e-12)
    assert torch.allclose(maps[-1], torch.full_like(maps[-1], 1 / geometry.table_size))


@pytest.mark.parametrize("patch", [(1, 1), (2, 2), (3, 2), (1, 4)])
def test_patches_are_channel_major_and_come_back(patch):
    images = torch.randn(2, 3, 6, 8)
    tokens = cut_patches(images, patch)
    ph, pw = patch
    assert tokens.shape == (2, (6 // ph) * (8 // pw), 3 * ph * pw)
    last = images[:, :, 6 - ph :, 8 - pw :].flatten(1)
    assert torch.equal(tokens[:, -1], last)
    assert torch.equal(join_patches(tokens, (6 // ph, 8 // pw), patch), images)
