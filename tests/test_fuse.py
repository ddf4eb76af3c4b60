"""Back to convolutions: the CNN's own kernels come out again, and what has moved stays attention."""

import copy

import pytest
import timm
import torch
from conftest import randomize_norms
from timm.layers import Conv2dSame
from torch import nn

import vitinit
from vitinit.attention.conv import AttentionConv2d
from vitinit.construction import place_kernel
from vitinit.errors import ConstructionError, ConversionError
from vitinit.fuse import PaddedConv2d, fit_kernel

FORMS = [
    {},
    {"span": "local"},
    {"weights": "free"},
    {"weights": "free", "values": "factorized", "content_dim": 4},
    {"content_dim": 4, "span": "local"},
    {"patch": 2},
]


@pytest.mark.parametrize("settings", FORMS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_convert_then_fuse_gives_the_cnn_back(settings, dtype, limit):
    cnn = randomize_norms(timm.create_model("resnet8_cifar")).to(dtype).eval()
    model, _ = vitinit.convert(cnn, img_size=16, stages=2, **settings)
    fused, report = vitinit.fuse(model)
    assert all(layer.fused and layer.error < limit for layer in report.layers)
    assert not any(isinstance(module, AttentionConv2d) for module in fused.modules())
    state = fused.state_dict()
    assert state.keys() == cnn.state_dict().keys()
    for name, tensor in cnn.state_dict().items():
        assert (state[name] - tensor).double().norm() <= limit * tensor.double().norm(), name
    other = copy.deepcopy(cnn)
    other.load_state_dict(state)  # it fits the CNN
    images = torch.randn(2, 3, 16, 16, dtype=dtype)
    assert (fused(images) - cnn(images)).norm() <= 10 * limit * cnn(images).norm()


class Odd(nn.Module):
    """Strides, groups, dilation, one-sided padding, even kernels, and one module in two places."""

    def __init__(self):
        super().__init__()
        self.same = Conv2dSame(3, 8, 3, stride=2)
        self.depthwise = nn.Conv2d(8, 8, (5, 3), padding=(2, 1), groups=8, bias=False)
        self.dilated = nn.Conv2d(8, 12, 3, padding=2, dilation=2, groups=4)
        self.even = nn.Conv2d(12, 12, 4, padding="same")
        self.again = self.even

    def forward(self, x):
        return self.again(self.even(self.dilated(self.depthwise(self.same(x)))))


@pytest.mark.parametrize("span", ["global", "local"])
@pytest.mark.parametrize("img_size", [(16, 12), (17, 11)])
def test_odd_convolutions(span, img_size):
    cnn = Odd().double()
    model, report = vitinit.convert(cnn, img_size=img_size, max_grid=99, span=span)
    assert len(report.converted) == 4 and model.again is model.even
    fused, _ = vitinit.fuse(model)
    assert fused.again is fused.even
    images = torch.randn(2, 3, *img_size, dtype=torch.float64)
    assert (fused(images) - cnn(images)).norm() <= 1e-12 * cnn(images).norm()
    assert isinstance(fused.even, PaddedConv2d) and type(fused.dilated) is nn.Conv2d
    again, report = vitinit.convert(fused, img_size=img_size, max_grid=99, span=span)  # and there once more
    assert len(report.converted) == 4
    assert (again(images) - cnn(images)).norm() <= 1e-12 * cnn(images).norm()


def test_what_has_moved_stays_attention_and_the_function_stays():
    cnn = randomize_norms(timm.create_model("resnet8_cifar")).double().eval()
    model, _ = vitinit.convert(cnn, img_size=16, stages=2, content_dim=2)
    layers = [module for module in model.modules() if isinstance(module, AttentionConv2d)]
    with torch.no_grad():
        layers[0].attention.bias_table[0, 3] += 3  # one head looks elsewhere a little
        layers[1].attention.query.weight.normal_()
        layers[2].projection.kernel.mul_(1.5)  # another kernel is still a kernel
    fused, report = vitinit.fuse(model)
    assert [row.fused for row in report.layers] == [False, False, *[True] * (len(layers) - 2)]
    assert report.layers[0].reason == "moved away from a convolution" and report.layers[0].error > 1e-5
    assert report.layers[1].reason == "content is on"
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert (fused(images) - model(images)).norm() <= 1e-12 * model(images).norm()
    text = str(report)
    assert "content is on" in text and f"{len(layers) - 2} of {len(layers)} attention layers are convolutions" in text
    everything, report = vitinit.fuse(model, tolerance=10.0)  # as near as a kernel comes
    assert report.layers[0].fused and not report.layers[1].fused
    assert (everything(images) - model(images)).norm() > 1e-6 * model(images).norm()


def test_windows_of_pixels_are_convolutions_whatever_their_training():
    """Attention by position alone within a window is a convolution: the fused one computes what was learned."""
    conv = nn.Conv2d(4, 6, 3, padding=1).double()
    model, _ = vitinit.convert(nn.Sequential(conv), img_size=9, stages=["0"], span="local")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    fused, report = vitinit.fuse(model)
    images = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    assert report.layers[0].error < 1e-12
    assert torch.allclose(fused(images), model(images), atol=1e-12)


def test_the_fit_is_the_nearest_kernel():
    """No other kernel comes nearer to what the layer does: its error is least along every tap."""
    model, _ = vitinit.convert(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1).double()), img_size=4, stages=["0"], patch=2)
    layer = model[0]
    with torch.no_grad():
        layer.attention.bias_table.normal_()
    kernel, error = fit_kernel(layer)
    assert kernel.shape == (1, 1, 3, 3) and 0.01 < error < 1
    for tap in range(9):
        for step in (-1e-3, 1e-3):
            moved = kernel.clone()
            moved.view(-1)[tap] += step
            assert measure_distance(layer, kernel) < measure_distance(layer, moved)


def measure_distance(layer, kernel):
    """Norm of what a layer's token kernel has beyond that of a pixel kernel."""
    mass = layer.attention.bias_table.softmax(-1)
    linked = torch.einsum("ht,hgio->tgio", mass, layer.projection.build())
    placed = torch.zeros_like(linked)
    placed[layer.geometry.target_index()] = place_kernel(kernel, layer.geometry)
    return (linked - placed).norm().item()


def test_a_network_without_attention_is_refused():
    with pytest.raises(ConversionError, match=r"Conv2d has no attention layer to fuse: give what vitinit.convert"):
        vitinit.fuse(nn.Conv2d(3, 3, 3))


def test_fusing_keeps_the_input_mode_and_frozen_layers():
    cnn = timm.create_model("resnet8_cifar").requires_grad_(False).train()
    model, _ = vitinit.convert(cnn, img_size=16)
    before = copy.deepcopy(model.state_dict())
    fused, report = vitinit.fuse(model)
    assert fused.training and not any(p.requires_grad for p in fused.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert report.to_dict()["layers"][0]["fused"] is True


def test_bad_input_to_fuse():
    with pytest.raises(ConversionError, match=r"fuse takes an nn\.Module and got 'resnet18'"):
        vitinit.fuse("resnet18")
    model, _ = vitinit.convert(timm.create_model("resnet8_cifar"), img_size=16)
    with pytest.raises(ConstructionError, match="tolerance=-1: expected a relative error of at least 0"):
        vitinit.fuse(model, tolerance=-1)
