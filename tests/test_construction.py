"""The construction against F.conv2d, over the whole space of kernels."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import build_attention, load_kernel
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from vitinit.attention.conv import AttentionConv2d
from vitinit.construction import (
    count_heads,
    factorize_heads,
    kernel_to_heads,
    leak_coefficients,
    place_kernel,
    plan_ranks,
)  # fmt: skip
from vitinit.errors import ConstructionError
from vitinit.positions import ConvGeometry, alpha_to_sharpness, cut_patches, join_patches, sharpness_to_alpha

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6}


def convolve(x, kernel, bias, *, stride, padding, dilation, groups):
    """The oracle; padding is (top, bottom, left, right)."""
    top, bottom, left, right = padding
    x = F.pad(x, (left, right, top, bottom))
    return F.conv2d(x, kernel, bias, stride=stride, dilation=dilation, groups=groups)


def build_layer(kernel, bias, *, in_size, stride, padding, dilation, groups, patch, sharpness, span="global", **kwargs):
    c_out, width, *kernel_size = kernel.shape
    geometry = ConvGeometry.build(
        in_size,
        kernel_size=tuple(kernel_size),
        stride=stride,
        dilation=dilation,
        padding=padding,
        patch=patch,
        span=span,
    )
    # A window may hold fewer offsets than a low sharpness needs, even one.
    window = span == "local" and sharpness <= 1.01 / geometry.table_size
    alpha = 1.0 if window else sharpness_to_alpha(sharpness, geometry.table_size)
    layer = AttentionConv2d(
        width * groups, c_out, tuple(kernel_size), in_size=in_size, stride=stride, padding=padding,
        dilation=dilation, groups=groups, bias=bias is not None, patch=patch,
        span=span, alpha=alpha, dtype=kernel.dtype, **kwargs,
    )  # fmt: skip
    layer.load_kernel(kernel, bias)
    return layer


def border_and_interior_errors(got, expected):
    """Relative errors of the outermost pixels and of the others."""
    border = torch.zeros(expected.shape[-2:], dtype=torch.bool)
    border[0], border[-1], border[:, 0], border[:, -1] = True, True, True, True
    scale = expected.double().square().mean().sqrt()
    parts = [(got - expected)[..., mask].double() for mask in (border, ~border) if mask.any()]
    return [float(part.square().mean().sqrt() / scale) for part in parts]


@st.composite
def convolutions(draw):
    """Any convolution that fits: K 1..11 odd or even, stride 1..4, dilation, groups, one-sided padding, patches."""
    patch = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    kernel_size = draw(st.tuples(st.integers(1, 11), st.integers(1, 11)))
    padding = draw(st.tuples(*[st.integers(0, 6)] * 4))
    in_size = []
    for axis in range(2):
        before, after = padding[2 * axis], padding[2 * axis + 1]
        reach = dilation[axis] * (kernel_size[axis] - 1) + 1
        sizes = [
            n
            for n in range(patch[axis], 25, patch[axis])
            if n + before + after >= reach and not ((n + before + after - reach) // stride[axis] + 1) % patch[axis]
        ]
        assume(sizes)
        in_size.append(draw(st.sampled_from(sizes)))
    groups = draw(st.sampled_from([1, 2, 4]))
    return {
        "in_size": tuple(in_size), "kernel_size": kernel_size, "stride": stride, "dilation": dilation,
        "padding": padding, "patch": patch, "groups": groups,
        "channels": draw(st.sampled_from([(4, 4), (4, 8), (8, 4)])),
    }  # fmt: skip


def check(case, *, dtype, sharpness, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    c_in, c_out = case["channels"]
    kernel = torch.randn(c_out, c_in // case["groups"], *case["kernel_size"], generator=generator, dtype=dtype)
    bias = torch.randn(c_out, generator=generator, dtype=dtype)
    x = torch.randn(2, c_in, *case["in_size"], generator=generator, dtype=dtype)
    shape = {key: case[key] for key in ("stride", "padding", "dilation", "groups")}
    layer = build_layer(
        kernel, bias, in_size=case["in_size"], patch=case["patch"], sharpness=sharpness, **shape, **kwargs
    )
    expected = convolve(x.double(), kernel.double(), bias.double(), **shape)
    for error in border_and_interior_errors(layer(x).detach().double(), expected):
        assert error <= LIMITS[dtype], (case, sharpness, error)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    case=convolutions(), dtype=st.sampled_from([torch.float64, torch.float32]),
    sharpness=st.sampled_from([0.3, 0.9, 0.999]), content_dim=st.sampled_from([0, 0, 3]),
    form=st.sampled_from([("tied", "identity"), ("free", "identity"), ("free", "factorized")]),
    span=st.sampled_from(["global", "local"]),
)  # fmt: skip
def test_any_convolution_is_reproduced(case, dtype, sharpness, content_dim, form, span):
    weights, values = form
    check(case, dtype=dtype, sharpness=sharpness, content_dim=content_dim, weights=weights, values=values, span=span)


@pytest.mark.parametrize("content_dim", [0, 3])
@pytest.mark.parametrize("span", ["global", "local"])
def test_windows_that_lie_beside_the_image(span, content_dim):
    case = {
        "in_size": (1, 2), "kernel_size": (1, 1), "stride": (3, 4), "dilation": (1, 1), "padding": (2, 0, 0, 3),
        "patch": (1, 1), "groups": 1, "channels": (4, 4),
    }  # fmt: skip
    check(case, dtype=torch.float64, sharpness=0.9, span=span, content_dim=content_dim)


@pytest.mark.parametrize("sharpness", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kernel", range(1, 12))
def test_every_kernel_side(kernel, dtype, sharpness):
    case = {
        "in_size": (13, 11), "kernel_size": (kernel, kernel), "stride": (1, 1), "dilation": (1, 1),
        "padding": (kernel // 2,) * 4, "patch": (1, 1), "groups": 1, "channels": (8, 8),
    }  # fmt: skip
    check(case, dtype=dtype, sharpness=sharpness)


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("patch", [1, 2, 4])
def test_strides_patches_and_groups(stride, patch, groups):
    case = {
        "in_size": (4 * stride * patch, 3 * stride * patch), "kernel_size": (5, 5), "stride": (stride, stride),
        "dilation": (1, 1), "padding": (2, 2, 2, 2), "patch": (patch, patch), "groups": groups, "channels": (8, 8),
    }  # fmt: skip
    for weights in ("tied", "free"):
        check(case, dtype=torch.float64, sharpness=0.9, weights=weights)


def test_coarser_input_patches_keep_one_token_grid():
    """With an input patch of stride x output patch, queries and keys are the same tokens."""
    x, kernel = torch.randn(2, 3, 16, 24, dtype=torch.float64), torch.randn(5, 3, 3, 3, dtype=torch.float64)
    geometry = ConvGeometry.build(
        (16, 24), kernel_size=(3, 3), stride=(2, 2), padding=(1, 1, 1, 1), patch=(2, 2), in_patch=(4, 4)
    )
    assert geometry.query_grid == geometry.key_grid == (4, 6)
    attention = build_attention(geometry, in_channels=3, out_channels=5, alpha=3.0, bias=False, dtype=torch.float64)
    load_kernel(attention, kernel)
    (tokens,) = attention(cut_patches(x, (4, 4)))
    got = join_patches(tokens, (4, 6), (2, 2))
    assert torch.allclose(got, F.conv2d(x, kernel, stride=2, padding=1), rtol=1e-12, atol=1e-12)


def test_without_the_mean_head_or_the_sink_it_is_wrong():
    """Both are needed at finite sharpness: the test would pass a construction that dropped either."""
    kernel, x = torch.rand(4, 4, 3, 3, dtype=torch.float64), torch.rand(1, 4, 6, 5, dtype=torch.float64)
    shape = {"stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
    layer = build_layer(kernel, None, in_size=(6, 5), patch=(1, 1), sharpness=0.3, weights="free", **shape)
    expected = F.conv2d(x, kernel, padding=1)
    tokens = x.flatten(2).mT
    maps = layer.attention.attention_weights(tokens)[0]
    weight = layer.projection.build()[:, 0]
    out = torch.einsum("hqk,bkd,hde->bqe", maps, tokens, weight)
    assert torch.allclose(out.mT.reshape_as(expected), expected, atol=1e-12)
    no_mean = torch.einsum("hqk,bkd,hde->bqe", maps[:-1], tokens, weight[:-1])
    assert (no_mean.mT.reshape_as(expected) - expected).norm() > 0.05 * expected.norm()
    renormalized = torch.einsum("hqk,bkd,hde->bqe", maps / maps.sum(-1, keepdim=True), tokens, weight)
    difference = (renormalized.mT.reshape_as(expected) - expected)[..., 0, :]
    assert difference.norm() > 0.2 * expected[..., 0, :].norm()


@pytest.mark.parametrize(
    ("kernel_size", "patch", "stride", "dilation", "padding"),
    [((3, 3), 1, 1, 1, 1), ((5, 5), 2, 1, 1, 2), ((7, 7), 4, 1, 1, 3), ((4, 4), 1, 2, 1, 1), ((3, 3), 2, 2, 2, 2)],
)
def test_one_head_fewer_cannot_do_it(kernel_size, patch, stride, dilation, padding):
    """The maps of n heads span n dimensions: the best fit of the shifts' slices by fewer maps leaves a residual,
    whatever the maps. And the shifts' own maps cannot be had without a mean head at finite sharpness."""
    size = 4 * patch * stride + dilation * kernel_size[0]
    while (size + 2 * padding - dilation * (kernel_size[0] - 1) - 1) // stride % patch != patch - 1 or size % patch:
        size += 1
    shape = {"stride": (stride,) * 2, "dilation": (dilation,) * 2, "padding": (padding,) * 4, "patch": (patch,) * 2}
    geometry = ConvGeometry.build((size, size), kernel_size=kernel_size, **shape)
    heads = count_heads(kernel_size, **shape)
    assert heads == geometry.heads
    slices = place_kernel(torch.randn(8, 8, *kernel_size, dtype=torch.float64), geometry)
    singular = torch.linalg.svdvals(slices.flatten(1))
    assert len(singular) == heads - 1
    # Eckart-Young: the least-squares residual of the best rank heads-2 fit is the last singular value.
    assert singular[-1] > 1e-3 * singular[0]

    # Least squares over the output weights of the positional heads alone, on real attention maps.
    a, b = leak_coefficients(sharpness_to_alpha(0.9, geometry.table_size), geometry.table_size)
    basis = torch.cat([a * torch.eye(heads - 1, dtype=torch.float64), b * torch.ones(1, heads - 1)])  # shifts and U
    target = torch.cat([slices.flatten(1), torch.zeros(1, slices[0].numel(), dtype=torch.float64)])
    fit = basis @ torch.linalg.lstsq(basis, target).solution
    assert (fit - target).norm() > 1e-3 * target.norm()
    with_mean = torch.cat([basis, torch.zeros(heads, 1, dtype=torch.float64)], dim=1)
    with_mean[-1, -1] = 1.0
    fit = with_mean @ torch.linalg.lstsq(with_mean, target).solution
    assert (fit - target).norm() < 1e-10 * target.norm()


def test_head_counts_of_the_papers():
    assert [count_heads((k, k)) for k in (1, 3, 5, 7, 11)] == [2, 10, 26, 50, 122]  # K^2 and the mean head
    for patch, kernel in itertools.product((1, 2, 3, 4, 8), (3, 5, 7, 9)):
        expected = (2 * math.ceil((kernel // 2) / patch) + 1) ** 2 + 1
        assert count_heads((kernel, kernel), patch=(patch, patch)) == expected


def test_leak_coefficients_describe_the_softmax():
    alpha, size = 2.5, 63
    logits = torch.zeros(size, dtype=torch.float64)
    logits[10] = alpha
    a, b = leak_coefficients(alpha, size)
    expected = torch.full((size,), b / size, dtype=torch.float64)
    expected[10] += a
    assert torch.allclose(logits.softmax(0), expected, atol=1e-15)
    assert alpha_to_sharpness(sharpness_to_alpha(0.7, size), size) == pytest.approx(0.7, abs=1e-12)
    assert leak_coefficients(2000.0, size) == (1.0, 0.0)  # no overflow


def test_rank_plan_sums_to_the_reach():
    for patch, kernel, channels in ((4, 3, 5), (4, 5, 3), (2, 3, 8), (3, 3, 2)):
        r = kernel // 2
        geometry = ConvGeometry.build(
            (3 * patch, 4 * patch), kernel_size=(kernel, kernel), padding=(r,) * 4, patch=(patch, patch)
        )
        ranks = plan_ranks(geometry, in_channels=channels, out_channels=channels)
        assert sum(ranks[:-1]) == (patch + 2 * r) ** 2 * channels
        slices = place_kernel(torch.randn(channels, channels, kernel, kernel, dtype=torch.float64), geometry)
        actual = [int(torch.linalg.matrix_rank(m[0])) for m in slices]
        assert all(have <= plan for have, plan in zip(actual, ranks, strict=False))
        centre = len(actual) // 2
        assert actual[centre] == ranks[centre] == patch**2 * channels


def test_a_capped_rank_reports_the_energy_it_keeps():
    geometry = ConvGeometry.build((8, 8), kernel_size=(3, 3), padding=(1,) * 4, patch=(2, 2))
    kernel = torch.randn(6, 6, 3, 3, dtype=torch.float64)
    ranks = plan_ranks(geometry, in_channels=6, out_channels=6, cap=8)
    assert max(ranks[:-1]) == 8
    leak = leak_coefficients(4.0, geometry.table_size)
    values, outputs, energy = factorize_heads(kernel, geometry, leak=leak, ranks=ranks)
    slices = place_kernel(kernel, geometry)
    kept = torch.stack([leak[0] * v @ o for v, o in zip(values[:-1], outputs[:-1], strict=True)])
    lost = (kept - slices).square().sum() / slices.square().sum()
    assert 0 < energy < 1
    assert float(lost) == pytest.approx(1 - energy, abs=1e-12)
    full = plan_ranks(geometry, in_channels=6, out_channels=6)
    assert factorize_heads(kernel, geometry, leak=leak, ranks=full)[2] == pytest.approx(1.0, abs=1e-12)
    # The factors are balanced: V^T V = O O^T.
    assert torch.allclose(values[0].mT @ values[0], outputs[0] @ outputs[0].mT, atol=1e-10)


def test_tied_and_free_weights_agree():
    kernel = torch.randn(6, 4, 5, 3, dtype=torch.float64)
    shape = {
        "in_size": (12, 8), "stride": (2, 1), "padding": (2, 1, 1, 1), "dilation": (1, 1), "groups": 1,
        "patch": (2, 2), "sharpness": 0.8,
    }  # fmt: skip
    tied, free = (build_layer(kernel, None, weights=weights, **shape).projection for weights in ("tied", "free"))
    assert torch.allclose(tied.build(), free.build(), atol=1e-13)
    expected = kernel_to_heads(kernel, tied.geometry, leak=tied.leak)
    assert torch.equal(free.head_weight, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sharpness": 1.0}, "sharpness 1 is not between"),
        ({"sharpness": 0.001}, "must put more on its own offset"),
        ({"patch": (3, 3)}, "patch 3 does not divide the output grid of 8"),
        ({"weights": "loose"}, "weights='loose' is unknown: expected one of tied, free"),
        ({"values": "factorized"}, "use weights='free'"),
        ({"rank": 4}, "rank=4: give a rank of at least 1, and values='factorized'"),
        ({"in_size": (1, 8), "padding": (0, 0, 1, 1)}, "does not fit into 1 pixels"),
    ],
)
def test_bad_settings_are_named(change, message):
    case = {
        "in_size": (8, 8), "stride": (1, 1), "padding": (1,) * 4, "dilation": (1, 1), "groups": 1, "patch": (1, 1),
        "sharpness": 0.9,
    } | change  # fmt: skip
    with pytest.raises(ConstructionError, match=message.replace("(", r"\(")):
        build_layer(torch.randn(2, 2, 3, 3), None, **case)


def test_another_image_size_is_refused():
    shape = {"stride": (1, 1), "padding": (1,) * 4, "dilation": (1, 1), "groups": 1}
    layer = build_layer(torch.randn(2, 2, 3, 3), None, in_size=(8, 6), patch=(1, 1), sharpness=0.9, **shape)
    with pytest.raises(ConstructionError, match="built for 8x6 pixels and got 8x8: convert the CNN again"):
        layer(torch.randn(1, 2, 8, 8))
