"""Exports that three ways of loading give back bit for bit, and what a damaged file says."""

import copy
import functools
import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.data import resolve_model_data_config

import vitinit
from vitinit import checkpoint
from vitinit.errors import CheckpointError, ConversionError
from vitinit.recipe import recipe_from_dict
from vitinit.run import run_recipe

DIGITS = [str(digit) for digit in range(10)]


VARIANTS = {
    "tied": {},
    "free": {"convert": {"weights": "free"}},
    "factorized": {"convert": {"weights": "free", "values": "factorized"}},
    "content": {"convert": {"content_dim": 4, "sharpness": 0.8}},
    "named stages and drop path": {"convert": {"stages": ["layer3"]}, "train": {"drop_path": 0.2}},
    "tall images": {"data": {"img_size": [24, 16]}},
    "source": {"model": "source"},
    "average": {"train": {"ema_decay": 0.5}},
}


pytestmark = pytest.mark.usefixtures("small_and_fast")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder and trained network of a short run of a variant; each is trained once."""

    @functools.cache
    def train(variant: str) -> tuple[Path, torch.nn.Module]:
        raw = {
            "source": {"model": "resnet8_cifar", "pretrained": False},
            "data": {"name": "digits", "img_size": 16, "images_per_class": 2},
            "train": {"epochs": 1, "batch_size": 10, "warmup_epochs": 0},
        }
        for key, value in VARIANTS[variant].items():
            raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
        out, trained = tmp_path_factory.mktemp("run") / "out", []
        with pytest.MonkeyPatch.context() as patch:
            export = checkpoint.export_model

            def spy(model, *args, **kwargs):
                trained.append(copy.deepcopy(model).eval())
                export(model, *args, **kwargs)

            patch.setattr(checkpoint, "export_model", spy)
            run_recipe(recipe_from_dict(raw), out=out)
        return out, trained[-1]

    return train


@pytest.fixture
def export(runs, tmp_path):
    """A copy of an export, to damage."""

    def copy_export(variant: str = "tied") -> Path:
        return shutil.copytree(runs(variant)[0] / "model", tmp_path / variant)

    return copy_export


@torch.no_grad()
def logits(model, size=(16, 16)):
    return model.eval()(torch.randn(4, 3, *size, generator=torch.Generator().manual_seed(0)))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        vitinit.load(folder)
    return str(caught.value)


# Exports


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_of_loading_gives_the_trained_network_bit_for_bit(runs, variant):
    out, trained = runs(variant)
    size = tuple(VARIANTS[variant].get("data", {}).get("img_size", (16, 16)))
    expected = logits(trained, size)
    assert expected.std() > 0.01
    loaded = {
        "the export": vitinit.load(out / "model"),
        "the run": vitinit.load(str(out)),
        "timm": timm.create_model(f"local-dir:{out / 'model'}", pretrained=True),
    }
    for way, model in loaded.items():
        assert torch.equal(logits(model, size), expected), way
    assert not vitinit.load(out).training


def test_config_has_class_names_normalization_and_size(runs):
    out, _ = runs("tall images")
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["label_names"] == DIGITS
    assert config["num_classes"] == 10
    assert config["architecture"] == "vitinit_attention_cnn"
    data = resolve_model_data_config(vitinit.load(out))
    source = resolve_model_data_config(timm.create_model("resnet8_cifar"))
    assert [tuple(data[key]) for key in ("mean", "std")] == [source["mean"], source["std"]]
    assert (data["input_size"], data["crop_pct"]) == ((3, 24, 16), 1.0)


def test_an_exported_source_is_an_ordinary_timm_model(runs):
    config = json.loads((runs("source")[0] / "model" / "config.json").read_text())
    assert config["architecture"] == "resnet8_cifar"
    assert config["label_names"] == DIGITS
    assert "layers" not in config["model_args"]


@pytest.mark.parametrize("variant", ["tied", "source"])
def test_timm_adapts_the_classifier_to_other_classes(runs, variant):
    out, trained = runs(variant)
    model = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True, num_classes=3)
    assert logits(model).shape == (4, 3)
    kept, own = model.state_dict(), trained.state_dict()
    assert kept.keys() == own.keys()
    assert {name for name in kept if not torch.equal(kept[name], own[name])} == {"fc.weight", "fc.bias"}


def test_timm_gives_the_features_of_an_export_without_its_classifier(runs):
    out, trained = runs("tied")
    model = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True, num_classes=0)
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = trained.forward_head(trained.forward_features(pixels), pre_logits=True)
        assert torch.equal(model.eval()(pixels), expected)


def test_model_card_says_what_the_network_is(runs):
    card = (runs("tied")[0] / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: timm\n")
    assert "built from the CNN `resnet8_cifar` (convolution-construction initialization)" in card
    assert "20 images of `digits` (seed 0)" in card
    assert "The CNN `resnet8_cifar`, fine-tuned on" in (runs("source")[0] / "model" / "README.md").read_text()


def test_an_export_replaces_the_one_before_and_leaves_no_other_files(tmp_path):
    settings = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "img_size": (16, 16), "card": "# card\n"}
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = timm.create_model("resnet8_cifar", num_classes=2)
        checkpoint.export_model(model, tmp_path / "model", classes=("cat", "dog"), **settings)
    assert torch.equal(logits(vitinit.load(tmp_path / "model")), logits(model))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md"}


def test_a_failed_export_leaves_the_one_before(tmp_path, monkeypatch):
    settings = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "img_size": (16, 16), "card": "# card\n"}
    first, second = timm.create_model("resnet8_cifar"), timm.create_model("resnet8_cifar")
    checkpoint.export_model(first, tmp_path / "model", classes=DIGITS, **settings)

    def fill_the_disk(model, folder, **_):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_for_hf", fill_the_disk)
    with pytest.raises(OSError, match="no space"):
        checkpoint.export_model(second, tmp_path / "model", classes=DIGITS, **settings)
    assert torch.equal(logits(vitinit.load(tmp_path / "model")), logits(first))


# The record of where an export comes from


@pytest.mark.parametrize(("variant", "is_converted"), [("tied", True), ("source", False)])
def test_a_run_records_its_source_its_settings_and_the_hash_of_its_tensors(runs, variant, is_converted):
    folder = runs(variant)[0] / "model"
    record = json.loads((folder / "config.json").read_text())["vitinit"]
    torch.manual_seed(0)
    cnn = timm.create_model("resnet8_cifar")
    cnn.reset_classifier(10)
    assert record["source"] == {
        "model": "resnet8_cifar", "weights": None, "weights_classes": None, "pretrained": False,
        "new_classifier": 10, "seed": 0, "sha256": checkpoint.hash_tensors(cnn.state_dict()),
    }  # fmt: skip
    assert (record["trained"], record["img_size"], record["tolerance"]) == (True, [16, 16], None)
    assert (record["init"], record["model"]) == ("construction", "converted" if is_converted else "source")
    assert (record["convert"] or {}).get("weights") == ("tied" if is_converted else None)
    assert record["environment"]["versions"]["vitinit"] == vitinit.__version__
    assert record["sha256"] == checkpoint.hash_tensors(load_file(folder / "model.safetensors"))


def test_the_hash_is_of_names_types_shapes_and_bytes():
    tensor = torch.arange(6.0)
    hashes = [
        checkpoint.hash_tensors(state)
        for state in (
            {"a": tensor}, {"b": tensor}, {"a": tensor.view(2, 3)}, {"a": tensor.int()}, {"a": tensor.bfloat16()},
            {"a": tensor.flip(0)}, {"a": tensor, "n": torch.tensor(3)}, {},
        )
    ]  # fmt: skip
    assert len(set(hashes)) == len(hashes)
    both = {"a": tensor, "n": torch.tensor(3)}
    assert checkpoint.hash_tensors(dict(reversed(both.items()))) == hashes[6]
    assert checkpoint.hash_tensors({"a": torch.arange(12.0)[::2] / 2}) == hashes[0]  # strides are no content


@pytest.mark.parametrize("variant", ["tied", "source"])
def test_a_changed_tensor_is_refused(export, variant):
    folder = export(variant)
    state = load_file(folder / "model.safetensors")
    save_file({**state, "fc.bias": state["fc.bias"] + 1e-6}, folder / "model.safetensors")
    message = refusal(folder)
    assert "model.safetensors was changed since it was exported" in message
    assert "copy or export it again" in message


def test_other_metadata_of_the_same_tensors_is_no_change(export):
    folder = export()
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"format": "pt"})
    assert not vitinit.load(folder).training


def test_an_export_of_an_older_vitinit_still_loads(export):
    folder = export()
    config = json.loads((folder / "config.json").read_text())
    del config["vitinit"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not vitinit.load(folder).training


# The architecture in timm


@pytest.mark.parametrize(
    ("args", "missing"), [({}, "no source= and no layers="), ({"source": "resnet18"}, "no layers=")]
)
def test_the_architecture_alone_says_what_it_needs(args, missing):
    with pytest.raises(ConversionError) as caught:
        timm.create_model("vitinit_attention_cnn", **args)
    assert f"vitinit_attention_cnn got {missing}: it is built from source=" in str(caught.value)
    assert 'timm.create_model("local-dir:FOLDER", pretrained=True)' in str(caught.value)


@pytest.mark.parametrize("indices", [None, (1, 3)])
def test_timm_gives_the_feature_maps_of_an_export(runs, indices):
    out, trained = runs("tied")
    chosen = {} if indices is None else {"out_indices": indices}
    model = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True, features_only=True, **chosen).eval()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        maps, expected = model(pixels), trained.forward_intermediates(pixels, intermediates_only=True)
    assert model.feature_info.channels() == [[16, 16, 32, 64][i] for i in indices or range(4)]
    assert all(torch.equal(got, expected[i]) for got, i in zip(maps, indices or range(4), strict=True))


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "convnext_atto"])
def test_cnns_that_are_built_otherwise_without_head_give_feature_maps_too(name):
    cnn = timm.create_model(name, features_only=True)
    model = timm.create_model("vitinit_attention_cnn", source=name, layers={}, features_only=True)
    with torch.no_grad():
        maps, expected = (net.eval()(torch.randn(1, 3, 64, 64)) for net in (model, cnn))
    assert [part.shape for part in maps] == [part.shape for part in expected]


# Damage


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_truncated_weights_are_refused(export, kept):
    folder = export()
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: int(kept * len(content))])
    message = refusal(folder)
    assert "model.safetensors is truncated or damaged" in message
    assert "copy or export it again" in message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(export, name):
    folder = export()
    (folder / name).unlink()
    assert f"{folder} is not an export: expected config.json and model.safetensors" in refusal(folder)


def test_a_folder_without_an_export_is_refused(tmp_path):
    assert "is not an export" in refusal(tmp_path)
    assert "is not an export" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"architecture": null}',
        '{"architecture": ["a"]}',
        '{"architecture": "resnet18", "vitinit": 3}',
        '{"architecture": "resnet18", "pretrained_cfg": null}',
    ],
)
def test_a_broken_config_is_refused(export, text):
    folder = export()
    (folder / "config.json").write_text(text)
    assert "config.json is damaged" in refusal(folder)


def test_a_config_that_is_not_text_is_refused(export):
    folder = export()
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "config.json is damaged" in refusal(folder)


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["vitinit"].pop("config_sha256")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_changed_config_is_refused(export):
    folder = export()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))  # the same values in another layout
    assert not vitinit.load(folder).training
    config["label_names"][0] = "another"
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder)
    assert "config.json was changed since it was exported" in message
    assert 'remove "config_sha256" from it' in message
    del config["vitinit"]["config_sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not vitinit.load(folder).training


def test_an_unknown_architecture_is_named(export):
    folder = export()
    change_config(folder, architecture="vitinit_attention_rnn")
    message = refusal(folder)
    assert "from the architecture 'vitinit_attention_rnn', which neither timm" in message
    assert "update them" in message


@pytest.mark.parametrize("changes", [{"model_args": {}}, {"model_args": None}, {"num_classes": "ten"}])
def test_a_config_that_does_not_build_its_architecture_is_refused(export, changes):
    folder = export()
    change_config(folder, **changes)
    assert "config.json does not describe a vitinit_attention_cnn" in refusal(folder)


@pytest.mark.parametrize(("one", "other"), [("tied", "source"), ("tied", "free"), ("source", "tied")])
def test_weights_of_another_export_are_refused(export, one, other):
    folder = export(one)
    shutil.copy(export(other) / "model.safetensors", folder / "model.safetensors")
    message = refusal(folder)
    assert "model.safetensors does not belong to this config.json" in message
    assert "take both files from the same export" in message
    assert len(message) < 500


def test_a_tensor_of_another_shape_is_refused_by_name(export):
    folder = export()
    state = load_file(folder / "model.safetensors")
    save_file({**state, "fc.bias": torch.zeros(3)}, folder / "model.safetensors")
    assert "1 tensors differ from vitinit_attention_cnn's, fc.bias among them" in refusal(folder)


# The state of a run

STATE = {"recipe": {}, "step": 3, "model": {}, "optimizer": {}, "ema": None, "scaler": None, "record": {}}


@pytest.mark.parametrize("moment", ["while it is written", "before it is renamed"])
def test_a_crash_leaves_the_state_before(tmp_path, monkeypatch, moment):
    checkpoint.save_state(STATE, tmp_path)

    def write_half(state, path):
        path.write_bytes(b"PK half of a file")
        raise OSError("no space left on device")

    def refuse(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "while it is written":
            patch.setattr(checkpoint.torch, "save", write_half)
        else:
            patch.setattr(checkpoint.os, "replace", refuse)
        with pytest.raises((OSError, KeyboardInterrupt)):
            checkpoint.save_state({**STATE, "step": 4}, tmp_path)
    assert checkpoint.load_state(tmp_path)["step"] == 3
    checkpoint.save_state({**STATE, "step": 5}, tmp_path)
    assert checkpoint.load_state(tmp_path)["step"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
