"""What a convolution layer computes is read right, whatever its class, and what is none is left with the reason."""

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import randomize_norms
from timm.layers import BlurPool2d, CondConv2d, Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d
from torch import nn

import vitinit
from vitinit.attention.conv import AttentionConv2d
from vitinit.errors import ConversionError
from vitinit.trace import read_convolution, trace_convolutions


class Doubled(nn.Conv2d):
    """Computes more than its convolution."""

    def forward(self, x):
        return 2 * super().forward(x)


class Flipped(nn.Conv2d):
    """Convolves something else than its input."""

    def forward(self, x):
        return super().forward(x.flip(-1))


class Gated(nn.Conv2d):
    """A kernel that depends on the image."""

    def forward(self, x):
        return self._conv_forward(x, self.weight * x.mean().sigmoid(), self.bias)


SUBCLASSES = {
    "weight standardization": lambda: StdConv2d(4, 6, 3, padding=1, bias=True),
    "scaled standardization": lambda: ScaledStdConv2d(4, 6, 3, padding=1),
    "scaled standardization, same": lambda: ScaledStdConv2dSame(4, 6, 3, stride=2),
    "same": lambda: Conv2dSame(4, 6, (3, 4), stride=2),
    "same as text": lambda: nn.Conv2d(4, 6, (4, 3), padding="same", dilation=2),
    "valid as text": lambda: nn.Conv2d(4, 6, 3, padding="valid"),
    "groups": lambda: nn.Conv2d(4, 6, 3, padding=(0, 2), groups=2, dilation=(1, 2)),
}


@pytest.mark.parametrize("size", [(9, 12), (10, 7)])
@pytest.mark.parametrize("kind", SUBCLASSES)
def test_what_a_convolution_computes(kind, size):
    torch.manual_seed(0)
    module = SUBCLASSES[kind]().double()
    nn.init.normal_(module.weight, mean=0.3)
    conv = read_convolution(module, size)
    top, bottom, left, right = conv.padding
    x = torch.randn(3, 4, *size, dtype=torch.float64)
    padded = F.pad(x, (left, right, top, bottom))
    got = F.conv2d(padded, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
    assert torch.allclose(got, module(x), rtol=1e-13, atol=1e-13)
    model, report = vitinit.convert(nn.Sequential(module), img_size=size, stages=["0"])
    assert isinstance(model[0], AttentionConv2d) and report.logits_error < 1e-13


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Doubled(4, 4, 3), "Doubled computes something else than one convolution"),
        (Flipped(4, 4, 3), "Flipped changes its input before it convolves"),
        (Gated(4, 4, 3), "Gated is a dynamic convolution: its kernel depends on the image"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), "padding mode 'circular': only zeros are attention"),
        (nn.ConvTranspose2d(4, 4, 3), "transposed convolution"),
        (CondConv2d(4, 4, 3, num_experts=2), "CondConv2d is a dynamic convolution: its kernel is computed"),
        (BlurPool2d(4), "BlurPool2d calls F.conv2d itself"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_no_plain_convolution_stays_and_says_why(module, reason):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.special = nn.Conv2d(3, 4, 3, padding=1), module

        def forward(self, x):
            x = self.stem(x)
            gates = (torch.ones(len(x), 2),) if isinstance(self.special, CondConv2d) else ()
            return self.special(x, *gates)

    _, report = vitinit.convert(Net(), img_size=12, max_grid=14)
    kept = {row.name: row.reason for row in report.kept}
    assert kept["special"].startswith(reason)
    with pytest.raises(ConversionError, match=f"cannot convert special: {reason}"):
        vitinit.convert(Net(), img_size=12, stages=["special"])


def test_one_module_at_several_places_is_one_layer():
    shared = nn.Conv2d(3, 3, 3, padding=1)
    cnn = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    cnn.forward = lambda x: cnn["b"](cnn["a"](x))
    (layer,) = trace_convolutions(cnn, torch.randn(1, 3, 8, 8))
    assert layer.names == ["a", "b.0"] and layer.in_sizes == [(8, 8), (8, 8)]

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(3, 3, 3, padding=1)
            self.b = nn.Sequential(self.a, nn.ReLU())

        def forward(self, x):
            return self.b(self.a(x))

    model, report = vitinit.convert(Twice(), img_size=8, stages=["a"])
    assert model.a is model.b[0] and isinstance(model.a, AttentionConv2d) and len(report.layers) == 1


def test_a_converted_network_is_not_converted_again():
    model, _ = vitinit.convert(timm.create_model("resnet8_cifar"), img_size=16, stages=1)
    again, report = vitinit.convert(model, img_size=16, stages=2)
    done = {row.name for row in report.kept if row.reason == "already attention"}
    assert done == {row.name for row in report.kept if row.name.startswith("layer3") and max(row.kernel) > 1}
    assert {row.name.split(".")[0] for row in report.converted} == {"layer2"}
    with pytest.raises(ConversionError, match=r"cannot convert layer3\.0\.conv1: already attention"):
        vitinit.convert(again, img_size=16, stages=["layer3.0.conv1"])


@pytest.mark.parametrize("norm", ["groupnorm", "layernorm2d"])
def test_other_norms(norm):
    cnn = randomize_norms(timm.create_model("resnet18", norm_layer=norm)).double()
    _, report = vitinit.convert(cnn, img_size=64, stages=2)
    assert report.logits_error < 1e-12
