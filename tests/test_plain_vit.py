"""The plain ViT equals its CNN: logits, training-mode statistics and gradients, at every layout of the token grid."""

import copy
import math

import pytest
import timm
import torch
from conftest import randomize_norms
from timm.layers import DropPath
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitinit.errors import ConstructionError, ConversionError
from vitinit.plain_vit import plain_vit

SHAPES = {"patch": {"tokens": "patch"}, "dilated": {"tokens": "dilated"}, "between": {"grid": (4, 6)}}


def build_resnet(block=BasicBlock, layers=(1, 1, 1, 1), **kwargs):
    torch.manual_seed(0)
    cnn = ResNet(block, layers, num_classes=7, channels=(4, 6, 8, 10), stem_width=4, **kwargs)
    return randomize_norms(cnn).double()


def build_repvgg(**kwargs):
    torch.manual_seed(0)
    blocks = tuple(ByoBlockCfg(type="rep", d=d, c=c, s=2) for d, c in ((1, 4), (2, 6), (2, 8), (1, 10)))
    cnn = ByobNet(ByoModelCfg(blocks=blocks, stem_type="rep", stem_chs=4, **kwargs), num_classes=7)
    return randomize_norms(cnn).double()


NETWORKS = {
    "basic": lambda: build_resnet(layers=(1, 2, 1, 1)),
    "bottleneck": lambda: build_resnet(Bottleneck),
    "resnet-d": lambda: build_resnet(Bottleneck, stem_type="deep", avg_down=True),
    "resnext": lambda: build_resnet(Bottleneck, cardinality=2, base_width=32),
    "gelu": lambda: build_resnet(act_layer="gelu"),
    "silu": lambda: build_resnet(act_layer="silu"),
    "hardswish": lambda: build_resnet(act_layer="hard_swish"),
    "relu6": lambda: build_resnet(act_layer="relu6"),
    "repvgg": build_repvgg,
}  # fmt: skip


def relative(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_transformer_equals_its_cnn_in_evaluation_and_in_training(name, shape):
    cnn = NETWORKS[name]()
    size = (64, 96)
    stem_stages = 1 if name != "repvgg" else 2
    vit, report = plain_vit(cnn.eval(), img_size=size, stem_stages=stem_stages, **SHAPES[shape])
    images = torch.randn(3, 3, *size, dtype=torch.float64)
    assert not any(isinstance(m, nn.Conv2d) for m in vit.blocks.modules())
    assert report.logits_error < 1e-12
    assert relative(vit(images), cnn(images)) < 1e-12
    # In training: the same batch statistics, and after it the same running ones.
    cnn.train(), vit.train()
    assert relative(vit(images), cnn(images)) < 1e-11
    cnn.eval(), vit.eval()
    assert relative(vit(images), cnn(images)) < 1e-11


def test_a_step_with_fixed_positions_is_a_step_of_the_cnn():
    """Tied kernels and batch norms get the gradients that they get in the CNN."""
    cnn = build_resnet(Bottleneck).train()
    vit, _ = plain_vit(cnn, img_size=64, tokens="dilated")
    images = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    for model in (cnn, vit):
        model(images).square().sum().backward()
    block = vit.blocks[3]  # stage 3 opens with: conv1 and the shortcut
    for projection, branch, conv, norm in zip(
        block.attention.projections, block.branches, (cnn.layer3[0].conv1, cnn.layer3[0].downsample[0]),
        (cnn.layer3[0].bn1, cnn.layer3[0].downsample[1]), strict=True,
    ):  # fmt: skip
        assert relative(projection.kernel.grad, conv.weight.grad) < 1e-9
        assert relative(branch.norm.weight.grad, norm.weight.grad) < 1e-9
    assert relative(vit.head.weight.grad, cnn.fc.weight.grad) < 1e-9


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "free"}, {"weights": "free", "values": "factorized"}, {"sharpness": 0.3}, {"alpha": 30.0},
        {"content_dim": 4}, {"spare_hidden": 5}, {"norm": "affine"}, {"span": "local", "tokens": "dilated"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)  # fmt: skip
def test_every_setting_starts_as_the_cnn(settings):
    cnn = build_resnet(Bottleneck).eval()
    vit, _ = plain_vit(cnn, img_size=(64, 96), stem_stages=2, **settings)
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    assert relative(vit(images), cnn(images)) < 1e-12


@pytest.mark.parametrize("tokens", ["patch", "dilated"])
def test_cifar_resnet_in_float32(tokens):
    cnn = randomize_norms(timm.create_model("resnet20_cifar", num_classes=10)).eval()
    vit, report = plain_vit(cnn, img_size=32, tokens=tokens)
    assert report.blocks == 12 and report.grid == ((8, 8) if tokens == "patch" else (16, 16))
    images = torch.randn(4, 3, 32, 32)
    assert relative(vit(images), cnn(images)) < 1e-5


def test_what_it_writes_is_left_out_of_the_cnn():
    cnn = build_resnet().eval()
    before = copy.deepcopy(cnn.state_dict())
    vit, _ = plain_vit(cnn, img_size=64)
    for parameter in vit.parameters():
        parameter.data.zero_()
    assert all(torch.equal(cnn.state_dict()[key], value) for key, value in before.items())


def test_gradient_checkpointing_changes_nothing():
    vit, _ = plain_vit(build_resnet().train(), img_size=64, tokens="dilated", content_dim=4)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    gradients = []
    for enable in (False, True):
        vit.set_grad_checkpointing(enable)
        vit.zero_grad()
        vit(images).sum().backward()
        gradients.append([p.grad.clone() for p in vit.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))


def test_dropped_branches_are_those_of_the_cnn():
    """Stochastic depth drops a block's last convolution, for the same images."""
    cnn = build_resnet(layers=(1, 2, 1, 1), drop_path_rate=0.5).eval()
    vit, _ = plain_vit(cnn, img_size=64)
    rates = [
        branch.drop_path.drop_prob
        for b in vit.blocks
        for branch in b.branches
        if hasattr(branch.drop_path, "drop_prob")
    ]
    assert rates == [
        block.drop_path.drop_prob
        for stage in (cnn.layer2, cnn.layer3, cnn.layer4)
        for block in stage
        if hasattr(block.drop_path, "drop_prob")
    ]
    assert len(rates) == 4
    # Without batch statistics, both drop the same images under one seed.
    images = torch.randn(6, 3, 64, 64, dtype=torch.float64)
    for model in (cnn, vit):
        for module in model.modules():
            if isinstance(module, DropPath):
                module.train()
    outs = []
    for model in (cnn, vit):
        torch.manual_seed(3)
        outs.append(model(images))
    assert relative(outs[1], outs[0]) < 1e-12


@pytest.mark.parametrize(
    ("network", "settings", "match"),
    [
        (lambda: timm.create_model("mobilenetv3_small_050"), {}, "expected timm's ResNet family"),
        (lambda: timm.create_model("seresnet18"), {}, "stage 2, block 0.*depend on the whole image"),
        (lambda: timm.create_model("resnetblur18"), {}, "stage 2, block 0: blur pooling"),
        (lambda: timm.create_model("resnet18", global_pool="max"), {}, "'max'.*expected the mean"),
        (lambda: build_resnet(act_layer="elu"), {}, "ELU; an MLP activates in place"),
        (lambda: build_resnet(norm_layer="groupnorm1"), {}, "GroupNorm1, expected batch norms"),
        (build_resnet, {"img_size": 72}, "a stride of 2 on patches of 3 pixels: use another grid"),
        (build_resnet, {"stem_stages": 4}, "4 stages and one must be left"),
        (build_resnet, {"tokens": "pixels"}, "expected one of patch, dilated"),
        (build_resnet, {"grid": 5}, "does not fit a grid of 5x5"),
        (build_resnet, {"sharpness": 1.5}, "sharpness"),
        (build_resnet, {"alpha": 0.0}, "alpha=0: expected a finite number above 0"),
        (build_resnet, {"img_size": "64"}, "img_size='64': expected a side in pixels"),
        (lambda: "resnet18", {}, "plain_vit takes an nn.Module and got 'resnet18'"),
    ],
)
def test_what_it_cannot_take_gets_one_clear_error(network, settings, match):
    with pytest.raises((ConversionError, ConstructionError), match=match):
        plain_vit(network(), **{"img_size": 64, **settings})


def test_images_of_another_size_say_what_was_expected():
    vit, _ = plain_vit(build_resnet(), img_size=64)
    with pytest.raises(ConstructionError, match="gave 24x24: build it with the img_size"):
        vit(torch.randn(1, 3, 96, 96, dtype=torch.float64))


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "free"}, {"weights": "free", "tokens": "dilated", "content_dim": 4},
        {"weights": "free", "values": "factorized", "content_dim": 4},
        {"weights": "free", "span": "local", "tokens": "dilated", "content_dim": 4},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)  # fmt: skip
def test_report_counts_the_multiply_adds_that_run(settings):
    vit, report = plain_vit(build_resnet(Bottleneck).eval(), img_size=(64, 96), **settings)
    tokens = torch.randn(1, math.prod(vit.grid), vit.embed_dim, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for block in vit.blocks:
            tokens = block(tokens)
    assert counter.get_total_flops() == 2 * report.macs_after


def test_report_counts_what_the_transformer_holds():
    vit, report = plain_vit(build_resnet(), img_size=64)
    assert report.params_after == sum(p.numel() for p in vit.parameters())
    assert report.width == vit.embed_dim and len(report.rows) == len(vit.blocks)
    assert math.isfinite(report.logits_error) and "logits differ by" in str(report)
