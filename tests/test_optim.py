"""The learning-rate schedule against PyTorch's, and which parameters are scaled, decayed or left out."""

import itertools
import math

import pytest
import timm
import torch
from torch import nn

import vitinit.resnet_cifar  # noqa: F401 (registers its names)
from vitinit.convert import convert
from vitinit.optim import build_optimizer, group_by_rate, learning_rate


@pytest.fixture(scope="module")
def converted():
    """Two of three stages as attention with content; the option-A shortcuts are frozen."""
    return convert(timm.create_model("resnet8_cifar"), img_size=16, stages=2, content_dim=4)[0]


def groups_by_name(model, **settings):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = group_by_rate(model, **{"weight_decay": 0.05, **settings})
    return {names[id(parameter)]: group for group in groups for parameter in group["params"]}


def scales(model, **settings):
    return {name: group["lr_scale"] for name, group in groups_by_name(model, **settings).items()}


# The schedule


def test_rate_rises_linearly_to_the_peak_and_falls_to_the_floor_at_the_last_step():
    rates = [learning_rate(step, steps=100, warmup_steps=10, peak=2.0, floor=0.5) for step in range(100)]
    assert rates[:10] == pytest.approx([2.0 * (step + 1) / 11 for step in range(10)])
    assert rates[10] == max(rates) == 2.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[99] == pytest.approx(0.5, abs=1e-12)


def test_cosine_is_that_of_pytorch():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=49, eta_min=0.01)
    expected = []
    for _ in range(50):
        expected += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    got = [learning_rate(step, steps=50, warmup_steps=0, peak=0.3, floor=0.01) for step in range(50)]
    assert got == pytest.approx(expected, rel=1e-6)


def test_rate_depends_on_the_step_alone():
    def rate(step):
        return learning_rate(step, steps=20, warmup_steps=2.5, peak=1.0)

    forward = [rate(step) for step in range(20)]
    assert [rate(step) for step in reversed(range(20))] == forward[::-1]


@pytest.mark.parametrize("warmup_steps", [0, 1, 3])
def test_one_step_has_a_rate_between_nothing_and_the_peak(warmup_steps):
    rate = learning_rate(0, steps=1, warmup_steps=warmup_steps, peak=1.0)
    assert rate == (1.0 if warmup_steps == 0 else 1 / (warmup_steps + 1))


def test_a_warm_up_longer_than_the_run_only_rises():
    rates = [learning_rate(step, steps=5, warmup_steps=20, peak=1.0) for step in range(5)]
    assert rates == sorted(rates)
    assert rates[-1] < 0.25


# Groups


@pytest.mark.parametrize("settings", [{}, {"layer_decay": 0.5, "position_lr_scale": 0.1}])
def test_every_trainable_parameter_is_in_exactly_one_group(converted, settings):
    groups = group_by_rate(converted, weight_decay=0.05, **settings)
    grouped = sorted(id(parameter) for group in groups for parameter in group["params"])
    assert grouped == sorted(id(parameter) for parameter in converted.parameters() if parameter.requires_grad)


def test_frozen_parameters_are_left_out(converted):
    names = set(groups_by_name(converted))
    assert "layer2.0.conv1.attention.bias_table" in names
    assert not any("downsample" in name for name in names)


def test_positions_norms_and_biases_are_not_decayed(converted):
    decay = {name: group["weight_decay"] for name, group in groups_by_name(converted, weight_decay=0.05).items()}
    norms = tuple(name for name, module in converted.named_modules() if isinstance(module, nn.BatchNorm2d))
    assert norms
    for name, value in decay.items():
        is_kept = name.startswith(norms) or name.endswith((".bias", "bias_table"))
        assert value == (0.0 if is_kept else 0.05), name
    decayed = ("projections.0.kernel", "query.weight", "key.weight")
    assert {decay[f"layer3.0.conv1.attention.{part}"] for part in decayed} == {0.05}


def test_what_a_model_asks_not_to_decay_is_not(converted, monkeypatch):
    assert groups_by_name(converted)["fc.weight"]["weight_decay"] == 0.05
    monkeypatch.setattr(converted, "no_weight_decay", lambda: {"fc.weight"}, raising=False)
    assert groups_by_name(converted)["fc.weight"]["weight_decay"] == 0.0


def test_position_rate_is_of_bias_tables_queries_and_keys_only(converted):
    scaled = {name for name, scale in scales(converted, position_lr_scale=0.1).items() if scale != 1.0}
    layers = [f"layer{stage}.0.conv{number}.attention" for stage in (2, 3) for number in (1, 2)]
    assert scaled == {f"{name}.{part}" for name in layers for part in ("bias_table", "query.weight", "key.weight")}
    assert set(scales(converted, position_lr_scale=0.1).values()) == {0.1, 1.0}


def test_layer_decay_lowers_the_rate_by_one_factor_a_layer_from_the_head_down(converted):
    got = scales(converted, layer_decay=0.5)
    by_layer = {}
    for name, scale in got.items():
        by_layer.setdefault(name.split(".")[0], set()).add(scale)
    assert all(len(values) == 1 for values in by_layer.values())
    assert by_layer["fc"] == {1.0}
    assert by_layer["conv1"] == by_layer["bn1"]
    rates = [by_layer[layer].pop() for layer in ("conv1", "layer1", "layer2", "layer3", "fc")]
    assert [math.log2(later / earlier) for earlier, later in itertools.pairwise(rates)] == [1, 1, 1, 1]


def test_position_rate_and_layer_decay_multiply(converted):
    plain = scales(converted, layer_decay=0.5)
    both = scales(converted, layer_decay=0.5, position_lr_scale=0.1)
    name = "layer2.0.conv1.attention.bias_table"
    assert both[name] == pytest.approx(0.1 * plain[name])
    assert both["fc.weight"] == plain["fc.weight"]


# Optimizers


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_without_a_gradient_only_decayed_weights_move(name, kind):
    model = timm.create_model("resnet8_cifar")
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    optimizer = build_optimizer(group_by_rate(model, weight_decay=0.5), name=name, momentum=0.0)
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert group["lr"] == 0.0  # the schedule sets it
        group["lr"] = 0.1
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, parameter in model.named_parameters():
        decays = parameter.requires_grad and parameter.ndim > 1
        torch.testing.assert_close(parameter.detach(), before[key] * (0.95 if decays else 1.0))


def test_sgd_has_nesterov_momentum():
    weight = nn.Parameter(torch.zeros(()))
    group = {"params": [weight], "lr_scale": 1.0, "weight_decay": 0.0}
    optimizer = build_optimizer([group], name="sgd", momentum=0.9)
    optimizer.param_groups[0]["lr"] = 1.0
    weight.grad = torch.ones(())
    optimizer.step()
    assert weight.item() == pytest.approx(-1.9)  # the gradient and 0.9 of the velocity that it has just become
