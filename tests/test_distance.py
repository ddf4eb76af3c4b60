"""Where heads attend, against loops over the zero-padded plane and against values known by hand."""

import math

import pytest
import timm
import torch
from conftest import build_attention, randomize_norms
from torch import nn

import vitinit
from vitinit.attention.table import TableAttention
from vitinit.errors import ConversionError, DataError
from vitinit.positions import ConvGeometry, cut_patches


def convert_one(**settings):
    torch.manual_seed(0)
    cnn = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1).double())
    model, _ = vitinit.convert(cnn, img_size=(4, 6), stages=["0"], **settings)
    return model


@pytest.mark.parametrize("span", ["global", "local"])
@pytest.mark.parametrize("sharpness", [0.5, 0.9])
def test_at_the_start(span, sharpness):
    model = convert_one(span=span, sharpness=sharpness)
    (layer,) = vitinit.distance_from_convolution(model).layers
    size = model[0].geometry.table_size
    leak = (1 - sharpness) / (size - 1)
    assert layer.start_mass == pytest.approx(sharpness)
    for head in layer.heads[:-1]:
        others = [math.hypot(*t) for t in model[0].geometry.table_offsets if t != head.offset]
        assert head.target_mass == pytest.approx(sharpness)
        assert head.distance == pytest.approx(sharpness * math.hypot(*head.offset) + leak * sum(others))
        assert head.entropy == pytest.approx(-sharpness * math.log(sharpness) - (size - 1) * leak * math.log(leak))
        assert head.content_share == 0
    mean = layer.heads[-1]
    assert mean.offset is None and mean.target_mass is None and mean.entropy == pytest.approx(math.log(size))


@pytest.mark.parametrize("span", ["global", "local"])
def test_content_against_loops_over_the_plane(span):
    model = convert_one(span=span, content_dim=3)
    attention = model[0].attention
    with torch.no_grad():
        attention.query.weight.normal_()
        attention.key.weight.normal_()
    images = torch.randn(2, 2, 4, 6, dtype=torch.float64)
    (layer,) = vitinit.distance_from_convolution(model, images).layers
    geometry, tokens = attention.geometry, cut_patches(images, (1, 1))
    query, key = attention._split_content(tokens)
    for head in (0, 4, attention.heads - 1):
        shares, distances, entropies = [], [], []
        for b in range(2):
            for i in range(4):
                for j in range(6):
                    logits = []
                    for dy, dx in geometry.table_offsets:
                        inside = 0 <= i + dy < 4 and 0 <= j + dx < 6
                        k = key[b, head, (i + dy) * 6 + j + dx] if inside else torch.zeros(3, dtype=torch.float64)
                        logits.append((query[b, head, i * 6 + j] @ k / 3**0.5).detach())
                    table = attention.bias_table[head].detach()
                    a, p = (torch.stack(logits) + table).softmax(0), table.softmax(0)
                    shares.append(float((a - p).abs().sum() / 2))
                    radii = torch.tensor([math.hypot(*t) for t in geometry.table_offsets], dtype=torch.float64)
                    distances.append(float(a @ radii))
                    entropies.append(float(-(a * a.log()).sum()))
        got = layer.heads[head]
        for value, expected in ((got.content_share, shares), (got.distance, distances), (got.entropy, entropies)):
            assert value == pytest.approx(sum(expected) / len(expected), rel=1e-9)
    assert layer.heads[0].content_share > 0.01


def test_plane_weights_agree_with_the_maps_on_the_image():
    geometry = ConvGeometry.build((5, 7), kernel_size=(3, 3), stride=(2, 2), padding=(1,) * 4)
    attention = build_attention(geometry, in_channels=2, out_channels=2, alpha=2.0, content_dim=3, dtype=torch.float64)
    tokens = torch.randn(2, geometry.n_keys, 2, dtype=torch.float64)
    plane, maps = attention.plane_weights(tokens), attention.attention_weights(tokens)
    assert torch.allclose(plane.sum(-1), torch.ones_like(plane.sum(-1)))
    index = geometry.relative_index().expand_as(maps)
    assert torch.allclose(plane.gather(3, index), maps, atol=1e-12)


def test_whole_networks_and_what_it_prints():
    cnn = randomize_norms(timm.create_model("resnet8_cifar"))
    model, _ = vitinit.convert(cnn, img_size=16, stages=2, content_dim=2)
    report = vitinit.distance_from_convolution(model)
    assert [layer.name for layer in report.layers] == [
        name for name, m in model.named_modules() if isinstance(m, vitinit.attention.conv.AttentionConv2d)
    ]
    assert all(head.content_share == 0 for layer in report.layers for head in layer.heads)  # silent
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, TableAttention):
                layer.query.weight.normal_()
    report = vitinit.distance_from_convolution(model)
    assert all(head.content_share is None for layer in report.layers for head in layer.heads)
    assert "needs images" in str(report)
    model.train()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    report = vitinit.distance_from_convolution(model, torch.randn(2, 3, 16, 16))
    assert model.training and all(torch.equal(statistics[n], b) for n, b in model.named_buffers())
    assert "needs images" not in str(report)
    assert report.to_dict()["layers"][0]["heads"][0]["content_share"] > 0


def test_a_network_without_attention_is_refused():
    with pytest.raises(ConversionError, match=r"Linear has no attention layer: give what vitinit.convert returned"):
        vitinit.distance_from_convolution(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("images", "got"),
    [
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "torch.uint8 (2, 3, 16, 16)"),
        (torch.zeros(3, 16, 16), "torch.float32 (3, 16, 16)"),
        (torch.zeros(0, 3, 16, 16), "torch.float32 (0, 3, 16, 16)"),
        (torch.full((1, 3, 16, 16), math.nan), "torch.float32 (1, 3, 16, 16)"),
        ([1, 2], "list"),
    ],
)
@pytest.mark.parametrize("content_dim", [0, 4])
def test_images_that_are_no_batch_are_refused(images, got, content_dim):
    model, _ = vitinit.convert(timm.create_model("resnet8_cifar"), img_size=16, content_dim=content_dim)
    with pytest.raises(DataError) as error:
        vitinit.distance_from_convolution(model, images)
    assert str(error.value) == (
        f"images: expected a normalized batch (B, C, height, width) of torch.float32, all finite, and got {got}"
    )
