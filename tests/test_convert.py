"""Whole networks: the converted one gives the CNN's logits, in evaluation and, tied, in training too."""

import copy
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import randomize_norms
from timm.layers import Conv2dSame
from torch import nn
from torch.nn.utils import prune

import vitinit
from vitinit.attention.conv import AttentionConv2d
from vitinit.augment import normalize
from vitinit.convert import attention_specs, replace_convolutions
from vitinit.data import load_splits
from vitinit.errors import ConstructionError, ConversionError
from vitinit.sources import load_source


class SmallCNN(nn.Module):
    """Every kind of layer that conversion must take or leave."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16, bias=False)
        self.same = Conv2dSame(16, 16, (3, 4), stride=2)
        self.text = nn.Conv2d(16, 16, 4, padding="same", dilation=2)
        self.reflect = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect")
        self.pointwise = nn.Conv2d(16, 8, 1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 3)
        self.unused = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.depthwise(self.norm(self.grouped(self.stem(x).relu()))))
        x = self.pointwise(self.reflect(self.text(self.same(x)))).relu()
        x = self.twice(x) + F.interpolate(self.twice(F.avg_pool2d(x, 2)), size=x.shape[-2:])
        return self.head(self.up(x).mean((2, 3)))


def small_cnn(dtype=torch.float64):
    return randomize_norms(SmallCNN()).to(dtype).eval()


ALL = ["stem", "grouped", "depthwise", "same", "text"]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("img_size", [32, (20, 28), (31, 17)])
def test_logits_of_an_arbitrary_module(img_size, dtype, limit):
    cnn = small_cnn(dtype)
    before = copy.deepcopy(cnn.state_dict())
    model, report = vitinit.convert(cnn, img_size=img_size, stages=ALL)
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    images = torch.randn(4, 3, *size, dtype=dtype)
    assert (model(images) - cnn(images)).norm() <= limit * cnn(images).norm()
    assert report.logits_error <= limit
    assert [row.name for row in report.converted] == ALL
    assert isinstance(model.same, AttentionConv2d) and isinstance(cnn.same, Conv2dSame)
    assert all(torch.equal(before[key], value) for key, value in cnn.state_dict().items())  # untouched
    assert torch.equal(model.norm.running_var, cnn.norm.running_var)


def test_report_gives_a_reason_for_each_convolution_that_stayed():
    _, report = vitinit.convert(small_cnn(), img_size=32, stages=2)
    reasons = {row.name: row.reason for row in report.kept}
    assert reasons == {
        "stem": "outside the chosen stages",
        "reflect": "padding mode 'reflect': only zeros are attention on the zero-padded plane",
        "pointwise": "1x1: already a linear map of each pixel",
        "twice": "called with 2 image sizes",
        "up": "transposed convolution",
        "unused": "never called as a module in a forward pass",
    } | {name: "outside the chosen stages" for name in reasons if name in ("grouped", "depthwise")}
    text = str(report)
    assert "called with 2 image sizes" in text and "relative error of the logits" in text
    assert report.to_dict()["layers"][0]["name"] == "stem"


@pytest.mark.parametrize(
    ("name", "img_size"), [("resnet18", 64), ("resnet50", 64), ("resnet18", (64, 96)), ("resnet20_cifar", 32)]
)
@pytest.mark.parametrize("weights", ["tied", "free"])
def test_timm_networks(name, img_size, weights):
    cnn = randomize_norms(timm.create_model(name)).double().eval()
    model, report = vitinit.convert(cnn, img_size=img_size, weights=weights)
    assert len(report.converted) >= 6
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    assert (model(images) - cnn(images)).norm() <= 1e-9 * cnn(images).norm()


@pytest.mark.parametrize("name", ["resnet20", "resnet56"])
def test_published_weights(name, shared_weights):
    source = load_source(f"{name}_cifar", weights=shared_weights / f"{name}_cifar10.safetensors")
    model, report = vitinit.convert(source.model, img_size=32)
    patches = {row.patch for row in report.converted}
    assert patches == {(2, 2), (1, 1)}  # 64 tokens in both stages
    assert {row.tokens for row in report.converted} == {64}
    images = torch.randn(8, 3, 32, 32)
    assert (model(images) - source.model(images)).norm() <= 1e-5 * source.model(images).norm()


def test_published_weights_see_through_the_conversion(shared_weights, shared_data):
    """CIFAR-100 has no CIFAR-10 labels, but its pickup trucks are automobiles or trucks to a good network."""
    source = load_source("resnet20_cifar", weights=shared_weights / "resnet20_cifar10.safetensors")
    test = load_splits(
        "cifar100", path=shared_data / "cifar100", label="fine_label", img_size=32, images_per_class=1
    ).test
    pickups = test.images[test.labels == test.classes.index("pickup_truck")]
    images = normalize(pickups, mean=source.mean, std=source.std)
    model, _ = vitinit.convert(source.model, img_size=32)
    predictions = model(images).argmax(1)
    assert torch.equal(predictions, source.model(images).argmax(1))
    automobile, truck = 1, 9
    assert ((predictions == automobile) | (predictions == truck)).float().mean() > 0.8


def test_a_tied_network_with_frozen_positions_trains_exactly_like_its_cnn():
    """Ten optimizer steps in training mode: same losses, and at the end the same kernels and statistics."""
    cnn = randomize_norms(timm.create_model("resnet8_cifar")).double()
    model, _ = vitinit.convert(cnn, img_size=16, stages=2, sharpness=0.8)
    for name, parameter in model.named_parameters():
        if name.endswith("bias_table"):
            parameter.requires_grad_(False)
    images, labels = torch.randn(8, 3, 16, 16, dtype=torch.float64), torch.arange(8)
    losses = []
    for network in (cnn.train(), model.train()):
        optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        steps = []
        for _ in range(10):
            loss = F.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0][-1] < 0.5 * losses[0][0]  # it did train
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    trained = dict(cnn.named_parameters()) | dict(cnn.named_buffers())
    for name, tensor in model.state_dict().items():
        if not name.endswith("bias_table"):
            assert torch.allclose(
                tensor.double(), trained[name.replace("attention.projections.0.kernel", "weight")].double(), atol=1e-9
            )


def test_conversion_keeps_the_mode_and_the_global_random_state():
    cnn = small_cnn().train()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model, _ = vitinit.convert(cnn, img_size=32, stages=ALL, content_dim=2)
    assert torch.equal(torch.rand(1), expected)
    assert model.training and cnn.training


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_patch_sides(patch):
    cnn = randomize_norms(timm.create_model("resnet8_cifar")).double()
    _, report = vitinit.convert(cnn, img_size=32, stages=["layer2"], patch=patch)
    assert {row.patch for row in report.converted} == {(patch, patch)}
    assert report.logits_error < 1e-12


def test_every_grid_up_to_a_side():
    cnn = randomize_norms(timm.create_model("resnet8_cifar")).double().eval()
    model, report = vitinit.convert(cnn, img_size=32, max_grid=16)
    assert {row.name.split(".")[0] for row in report.converted} == {"layer2", "layer3"}
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert (model(images) - cnn(images)).norm() <= 1e-12 * cnn(images).norm()
    reasons = {row.reason for row in report.kept if max(row.kernel) > 1}
    assert reasons == {"its grid is larger than 16x16 pixels"}
    with pytest.raises(
        ConversionError, match=r"conv1 \.\.\. layer3\.0\.conv2 \(7\): its grid is larger than 7x7 pixels"
    ):
        vitinit.convert(cnn, img_size=32, max_grid=7)


@pytest.mark.parametrize("settings", [{}, {"content_dim": 3}, {"weights": "free"}])
@pytest.mark.parametrize("img_size", [24, (17, 30)])
def test_windows_give_what_global_attention_gives(img_size, settings):
    """Content is silent at the start, so both are the CNN, to the last layer and border."""
    cnn = small_cnn()
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    for span in ("local", "global"):
        model, report = vitinit.convert(cnn, img_size=img_size, stages=ALL, span=span, patch=1, **settings)
        assert {row.span for row in report.converted} == {span}
        assert (model(images) - cnn(images)).norm() <= 1e-12 * cnn(images).norm()


def test_the_span_is_chosen_by_cost_and_reported():
    """At 56 px a map of all pairs would have 10 million numbers a head: windows; at 14 px attention sees everything."""
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(4), nn.Conv2d(4, 4, 3, padding=1))
    _, report = vitinit.convert(cnn, img_size=56, stages=["0", "2"])
    assert [row.span for row in report.layers] == ["local", "global"]
    first, second = str(report).splitlines()[1:3]
    assert " local " in first and " global " in second
    assert all(buffer.numel() < 56**4 for buffer in vitinit.convert(cnn, img_size=56, stages=["0"])[0].buffers())


def test_costly_layers_are_pointed_out():
    cnn = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8))
    _, report = vitinit.convert(cnn, img_size=32, stages=["0"], span="global", patch=1)
    assert 'note: 1 layers cost more than 10 times their convolution, 0 114 times; span="local"' in str(report)
    assert report.layers[0].macs_after == 8 * 32**4  # depthwise: one map a channel, whatever the number of heads
    _, report = vitinit.convert(cnn, img_size=32, stages=["0"], span="local", patch=1)
    assert "note:" not in str(report) and report.layers[0].macs_after == report.layers[0].macs_before


def test_rebuilding_from_specs():
    cnn = randomize_norms(timm.create_model("resnet8_cifar"))
    model, _ = vitinit.convert(cnn, img_size=32, content_dim=4)
    rebuilt = replace_convolutions(timm.create_model("resnet8_cifar"), attention_specs(model))
    rebuilt.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(rebuilt.eval()(images), model.eval()(images))


def test_a_capped_rank_needs_a_tolerance():
    cnn = randomize_norms(timm.create_model("resnet8_cifar"))
    settings = {"img_size": 32, "stages": 1, "values": "factorized", "weights": "free", "rank": 4}
    with pytest.raises(ConversionError, match=r"more than the tolerance 1e-04: its logits .* raise rank, or pass tol"):
        vitinit.convert(cnn, **settings)
    _, report = vitinit.convert(cnn, **settings, tolerance=10.0)
    assert "kernel energy kept: at least" in str(report)
    assert all(0 < row.energy < 1 for row in report.converted)


def test_a_wrong_conversion_is_never_returned(monkeypatch):
    load = AttentionConv2d.load_kernel
    monkeypatch.setattr(AttentionConv2d, "load_kernel", lambda self, kernel, bias: load(self, kernel * 1.01, bias))
    with pytest.raises(ConversionError, match="differs from the CNN by more than the tolerance 1e-09: its logits"):
        vitinit.convert(small_cnn(), img_size=32, stages=ALL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": ["reflect"]}, "cannot convert reflect: padding mode 'reflect'"),
        ({"stages": ["pointwise"]}, "cannot convert pointwise: 1x1"),
        ({"stages": ["layer9"]}, "no convolution lies in stage 'layer9': expected module names such as"),
        ({"stages": 7}, "this network has 3 stages of KxK convolutions at this size"),
        ({"stages": ["stem"], "patch": 5}, "cannot convert stem: patch 5 does not divide the output grid of 32"),
        ({"img_size": 4}, "SmallCNN failed on images of 4x4 pixels ("),
        ({"img_size": "32"}, "img_size='32': expected a side in pixels, or (height, width)"),
        ({"img_size": (32, 0)}, "img_size=(32, 0): expected a side in pixels, or (height, width)"),
        ({"max_grid": 0}, "max_grid=0: expected a side in pixels, at least 1"),
        ({"max_grid": 8, "stages": 2}, "stages=2 and max_grid=8: give one of them"),
    ],
)
def test_what_cannot_be_converted_is_named(settings, message):
    with pytest.raises(ConversionError, match=re.escape(message)):
        vitinit.convert(small_cnn(), **({"img_size": 32} | settings))


def test_networks_without_convolutions_to_convert():
    with pytest.raises(ConversionError, match=r"convert takes an nn\.Module and got 'resnet18': load it first"):
        vitinit.convert("resnet18", img_size=32)
    with pytest.raises(ConversionError, match="Linear has no convolution: vitinit converts CNNs"):
        vitinit.convert(nn.Linear(3, 3), img_size=32)
    pointwise = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(ConversionError, match="no convolution of Sequential can be converted: 0, 2: 1x1"):
        vitinit.convert(pointwise, img_size=8)


def test_sharpness_out_of_range():
    with pytest.raises(ConstructionError, match=r"sharpness 1\.5 is not between"):
        vitinit.convert(small_cnn(), img_size=32, sharpness=1.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch": 0}, "patch=0: expected"),
        ({"patch": "two"}, "patch='two': expected \"auto\" or a side"),
        ({"alpha": 0.0}, "alpha=0: expected a finite number above 0"),
        ({"alpha": float("nan")}, "alpha=nan: expected a finite number"),
        ({"content_dim": -1}, "content_dim=-1: expected 0"),
        ({"span": "window"}, 'span=\'window\': expected "auto", "global" or "local"'),
        ({"sharpness": "0.9"}, "sharpness='0.9': expected a number"),
        ({"tolerance": -1}, "tolerance=-1: expected a relative error of at least 0"),
        ({"tolerance": float("nan")}, "tolerance=nan: expected a relative error of at least 0"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ConstructionError, match=message):
        vitinit.convert(small_cnn(), img_size=32, **settings)


def test_a_layer_that_the_logits_do_not_show_is_checked_too():
    cnn = timm.create_model("resnet18", num_classes=10)  # its residual branches start at zero
    settings = {"img_size": 64, "stages": 1, "values": "factorized", "weights": "free", "rank": 2}
    with pytest.raises(ConversionError, match=r"its logits by 0\.00e\+00; worst layer layer4"):
        vitinit.convert(cnn, **settings)
    assert vitinit.convert(cnn, **settings, tolerance=1.0)[1].logits_error == 0


def test_networks_that_cannot_be_copied_are_named():
    pruned = small_cnn()
    prune.l1_unstructured(pruned.stem, "weight", 0.5)
    with pytest.raises(ConversionError, match=r"SmallCNN cannot be copied .* torch\.nn\.utils\.prune\.remove"):
        vitinit.convert(pruned, img_size=32)
    prune.remove(pruned.stem, "weight")
    assert vitinit.convert(pruned, img_size=32)[1].converted
    for cnn in (small_cnn().to("meta"), nn.Sequential(nn.LazyConv2d(4, 3))):
        with pytest.raises(ConversionError, match=r"has weights without values \(on the meta device, or lazy\)"):
            vitinit.convert(cnn, img_size=32)


@pytest.mark.parametrize("span", ["global", "local"])
@pytest.mark.parametrize(
    "settings", [{}, {"weights": "free"}, {"content_dim": 4}, {"weights": "free", "values": "factorized"}]
)
def test_a_batch_of_no_images(settings, span):
    if span == "local" and "values" in settings:
        pytest.skip("factorized values are global")
    cnn = small_cnn().eval()
    model, _ = vitinit.convert(cnn, img_size=32, stages=ALL, span=span, **settings)
    empty = torch.empty(0, 3, 32, 32, dtype=next(cnn.parameters()).dtype)
    assert model(empty).shape == cnn(empty).shape


def test_outputs_of_any_structure_and_frozen_sources():
    class Parts(SmallCNN):
        def forward(self, x):
            return {"logits": super().forward(x), "rest": [self.stem(x), None]}

    cnn = Parts().double().requires_grad_(False)
    model, report = vitinit.convert(cnn, img_size=32, stages=ALL)
    assert report.logits_error < 1e-12
    assert not any(parameter.requires_grad for parameter in model.parameters())
