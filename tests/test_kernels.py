"""Every implementation of attention gives the same numbers and the same gradients."""

import pytest
import torch
from conftest import build_attention, load_kernel

from vitinit.attention import kernels
from vitinit.attention.kernels import (
    attend_content,
    attend_depthwise_positions,
    attend_positions,
    attend_window_content,
    attend_window_positions,
    choose_backend,
    gather_windows,
    mix_heads,
)
from vitinit.positions import (
    ConvGeometry,
    positional_logits,
    positional_maps,
    positional_mass,
    sharpness_to_alpha,
    sink_logits,
)

GEOMETRY = ConvGeometry.build((6, 9), kernel_size=(3, 3), stride=(1, 3), padding=(1,) * 4)


def make_inputs(dtype):
    q = torch.randn(2, GEOMETRY.heads, GEOMETRY.n_queries, 4, dtype=dtype, requires_grad=True)
    k = torch.randn(2, GEOMETRY.heads, GEOMETRY.n_keys, 4, dtype=dtype, requires_grad=True)
    v = torch.randn(2, 1, GEOMETRY.n_keys, 5, dtype=dtype, requires_grad=True)
    table = torch.randn(GEOMETRY.heads, GEOMETRY.table_size, dtype=dtype, requires_grad=True)
    return q, k, v, table


def bias_of(table):
    return table[:, GEOMETRY.relative_index()]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_sdpa_equals_matmul_with_gradients(dtype, limit):
    inputs = make_inputs(dtype)
    results = []
    for backend in ("matmul", "sdpa"):
        q, k, v, table = inputs
        out = attend_content(q, k, v, bias_of(table), sink_logits(table, GEOMETRY), backend=backend)
        weight = torch.arange(out.numel(), dtype=dtype).view_as(out).sin()
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= limit * a.norm()


def test_content_attention_is_the_equation_on_the_padded_plane():
    """Against explicit zero keys: pad the image on all sides with tokens whose key and value are zero."""
    q, k, v, table = make_inputs(torch.float64)
    y, x = GEOMETRY.y, GEOMETRY.x
    out = attend_content(q, k, v, bias_of(table), sink_logits(table, GEOMETRY))
    q, k, v, table = (t.detach() for t in (q, k, v, table))
    flat = table.view(-1, y.table_size, x.table_size)
    for head in range(0, GEOMETRY.heads, 4):
        for query in (0, 7, GEOMETRY.n_queries - 1):
            i, j = divmod(query, x.queries)
            logits, values = [], []
            for a, dy in enumerate(y.table_offsets):
                for b, dx in enumerate(x.table_offsets):
                    row, column = i * y.token_stride + dy, j * x.token_stride + dx
                    inside = 0 <= row < y.keys and 0 <= column < x.keys
                    key = k[0, head, row * x.keys + column] if inside else torch.zeros(4, dtype=torch.float64)
                    value = v[0, 0, row * x.keys + column] if inside else torch.zeros(5, dtype=torch.float64)
                    logits.append(q[0, head, query] @ key / 2 + flat[head, a, b])
                    values.append(value)
            expected = torch.stack(logits).softmax(0) @ torch.stack(values)
            assert torch.allclose(out[0, head, query], expected, atol=1e-12)


@pytest.mark.parametrize("width", [3, 64])  # below and above the number of keys: both layouts
def test_positional_path_equals_the_sum_over_heads(width):
    maps = torch.rand(4, 6, 20, dtype=torch.float64)
    tokens = torch.randn(3, 20, width, dtype=torch.float64)
    assert torch.allclose(attend_positions(maps, tokens), torch.einsum("hqk,bkd->bqhd", maps, tokens), atol=1e-12)


WINDOWS = [
    {"in_size": (6, 9), "kernel_size": (3, 3), "stride": (1, 3), "padding": (1,) * 4},
    {"in_size": (7, 5), "kernel_size": (3, 2), "dilation": (2, 3), "padding": (2, 0, 3, 1)},
    {"in_size": (8, 12), "kernel_size": (5, 3), "padding": (2, 2, 1, 1), "patch": (2, 4)},
    {"in_size": (9, 8), "kernel_size": (2, 2), "stride": (2, 2)},
]


@pytest.mark.parametrize("settings", WINDOWS)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_windows_equal_whole_maps_with_gradients(settings, groups):
    """The same heads, computed over all tokens with what lies outside the window masked, and over windows alone."""
    geometry = ConvGeometry.build(**settings, span="local")
    heads, width, dim = geometry.heads, 6 * geometry.patch[0] * geometry.patch[1], 3

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    table, tokens = draw(heads, geometry.table_size), draw(2, geometry.n_keys, width)
    weight = draw(heads, groups, width // groups, 5)
    query, key = draw(2, heads, geometry.n_queries, dim), draw(2, heads, geometry.n_keys, dim)
    index = geometry.relative_index()
    whole = attend_positions(positional_maps(table, index), tokens)
    logits, sink = positional_logits(table, index), sink_logits(table, geometry)
    pairs = [
        (mix_heads(whole, weight), attend_window_positions(positional_mass(table), weight, tokens, geometry)),
        (
            attend_content(query, key, tokens.unsqueeze(1), logits, sink).transpose(1, 2),
            attend_window_content(query, key, tokens, table, geometry),
        ),
    ]
    for inputs, pair in zip([(table, tokens, weight), (table, tokens, query, key)], pairs, strict=True):
        results = [(out, *torch.autograd.grad((out * out.detach().sin()).sum(), inputs)) for out in pair]
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_a_window_holds_no_map_over_all_tokens():
    """Memory grows with k^2 N: one layer on 56 x 56 pixels whose global maps would hold 10 x 3136^2 numbers."""
    geometry = ConvGeometry.build((56, 56), kernel_size=(3, 3), padding=(1,) * 4, span="local")
    layer = build_attention(geometry, in_channels=4, out_channels=4, alpha=3.0, content_dim=2)
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Watch():
        layer(torch.randn(1, geometry.n_keys, 4))[0].sum().backward()
    heads, window, width = geometry.heads, 9, 4
    assert max(largest) <= geometry.n_queries * window * max(heads * layer.content_dim, width)
    assert max([p.numel() for p in layer.buffers()]) <= geometry.n_queries
    assert gather_windows(torch.randn(1, geometry.n_keys, 4), geometry).shape == (1, geometry.n_queries, window, width)


@pytest.mark.parametrize(("groups", "width_in", "width_out"), [(1, 6, 4), (2, 3, 5), (6, 1, 1), (6, 1, 2)])
def test_mixing_heads_equals_the_grouped_sum(groups, width_in, width_out):
    seen = torch.randn(2, 5, 3, groups * width_in, dtype=torch.float64)
    weight = torch.randn(3, groups, width_in, width_out, dtype=torch.float64)
    expected = torch.einsum("bqhgi,hgio->bqgo", seen.unflatten(3, (groups, width_in)), weight).flatten(2)
    assert torch.allclose(mix_heads(seen, weight), expected, atol=1e-12)


@pytest.mark.parametrize("values", ["identity", "factorized"])
def test_silent_content_and_no_content_agree(values):
    """W_Q = 0: the per-image path and the one-map-a-step path are the same function, gradients included."""
    kernel, bias = torch.randn(8, 8, 3, 3, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    alpha = sharpness_to_alpha(0.7, GEOMETRY.table_size)
    layers = [
        build_attention(
            GEOMETRY, in_channels=8, out_channels=8, alpha=alpha, weights="free", values=values,
            content_dim=dim, dtype=torch.float64,
        )
        for dim in (0, 4)
    ]  # fmt: skip
    tokens = torch.randn(2, GEOMETRY.n_keys, 8, dtype=torch.float64)
    grads = []
    for layer in layers:
        load_kernel(layer, kernel, bias)
        (out,) = layer(tokens)
        out.square().sum().backward()
        grads.append((out, layer.bias_table.grad))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)
    assert layers[1].query.weight.grad.abs().max() > 0  # silent, but it learns
    assert layers[1].key.weight.grad.abs().max() == 0  # until the query has moved


@pytest.mark.parametrize("content_dim", [0, 4])
def test_gradients_of_the_layer(content_dim):
    geometry = ConvGeometry.build((2, 4), kernel_size=(3, 3), padding=(1,) * 4)
    layer = build_attention(
        geometry, in_channels=2, out_channels=2, alpha=1.5, content_dim=content_dim, dtype=torch.float64
    )
    names = [n for n, _ in layer.named_parameters()]
    tokens = torch.randn(1, geometry.n_keys, 2, dtype=torch.float64)

    def call(*parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (tokens,))

    assert torch.autograd.gradcheck(call, tuple(p.detach().requires_grad_() for p in layer.parameters()))


def test_bf16_stays_close():
    layer = build_attention(GEOMETRY, in_channels=8, out_channels=8, alpha=6.0, content_dim=4)
    load_kernel(layer, torch.randn(8, 8, 3, 3), torch.zeros(8))
    tokens = torch.randn(2, GEOMETRY.n_keys, 8)
    (exact,) = layer(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer(tokens)[0].float()
    assert (rounded - exact).norm() < 0.02 * exact.norm()


def test_backend_choice(monkeypatch):
    small, large = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 1024, 8)
    assert choose_backend(small) == "matmul"
    assert choose_backend(large) == "sdpa"
    assert choose_backend(large.bfloat16()) == "matmul"
    used = []
    monkeypatch.setattr(kernels, "choose_backend", lambda *_: used.append(1) or "matmul")
    q, k, v, table = make_inputs(torch.float32)
    attend_content(q, k, v, bias_of(table), sink_logits(table, GEOMETRY))
    assert used


def test_maps_of_position_alone_do_not_depend_on_the_image():
    layer = build_attention(GEOMETRY, in_channels=2, out_channels=2, alpha=3.0)
    maps = layer.attention_weights(torch.randn(5, GEOMETRY.n_keys, 2))
    assert maps.shape == (1, GEOMETRY.heads, GEOMETRY.n_queries, GEOMETRY.n_keys)
    assert torch.equal(maps[0], positional_maps(layer.bias_table, layer.relative_index))


@pytest.mark.parametrize(("batch", "merged"), [(1, False), (9, True)])
def test_depthwise_heads_add_up_to_one_map_a_channel(batch, merged):
    heads, channels = 3, 4
    maps = torch.rand(heads, 6, 20, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(heads, channels, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(batch, 20, channels, dtype=torch.float64, requires_grad=True)
    assert (maps.shape[2] <= batch * heads) == merged
    out = attend_depthwise_positions(maps, weight, tokens)
    expected = torch.einsum("hqk,bkc,hc->bqc", maps, tokens, weight)
    probe = torch.arange(out.numel(), dtype=torch.float64).view_as(out).sin()
    inputs = (maps, weight, tokens)
    for a, b in zip(
        (out, *torch.autograd.grad((out * probe).sum(), inputs)),
        (expected, *torch.autograd.grad((expected * probe).sum(), inputs)),
        strict=True,
    ):
        assert (a - b).norm() <= 1e-12 * b.norm()
