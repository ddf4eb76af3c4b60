"""The command line: what convert writes, what inspect says, what verify finds, and what each of them refuses."""

import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import vitinit
from vitinit import checkpoint, cli
from vitinit.checkpoint import hash_tensors
from vitinit.convert import ConversionError, convert
from vitinit.recipe import recipe_from_dict
from vitinit.run import run_recipe

pytestmark = pytest.mark.usefixtures("small_and_fast")
RANDOM = ("convert", "resnet8_cifar", "--random", "--img-size", "16")


@pytest.fixture
def call(capsys):
    """The command in this process: exit code, standard output and errors."""

    def run(*arguments) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refusal(call):
    """The one line of an error."""

    def run(*arguments) -> str:
        code, printed, errors = call(*arguments)
        assert (code, printed) == (2, "")
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
        return errors.removeprefix("error: ")

    return run


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Converted once: from random weights, and from a weights file."""
    folder = tmp_path_factory.mktemp("exports")
    torch.manual_seed(5)
    save_file(timm.create_model("resnet8_cifar").state_dict(), folder / "weights.safetensors")
    assert cli.main([*RANDOM, "--out", str(folder / "random")]) == 0
    weights = ["--weights", str(folder / "weights.safetensors")]
    free = ["--head-weights", "free", "--content-dim", "4", "--span", "local"]
    assert (
        cli.main(["convert", "resnet8_cifar", *weights, *free, "--img-size", "16x24", "--out", str(folder / "file")])
        == 0
    )
    return folder


@pytest.fixture
def export(exports, tmp_path):
    """A copy of an export, to change."""
    return lambda name: shutil.copytree(exports / name, tmp_path / name)


def read_record(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["vitinit"]


def rewrite(folder: Path, **tensors) -> None:
    """Change tensors of an export, with the hash of the new ones on record."""
    state = {**load_file(folder / "model.safetensors"), **tensors}
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["vitinit"]["sha256"] = hash_tensors(state)
    del config["vitinit"]["config_sha256"]
    (folder / "config.json").write_text(json.dumps(config))


def change_record(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["vitinit"].update(changes)
    config["vitinit"].pop("config_sha256", None)
    (folder / "config.json").write_text(json.dumps(config))


# The command itself


def test_no_command_prints_help(call):
    code, printed, errors = call()
    assert (code, errors) == (0, "")
    assert all(name in printed for name in ("convert", "inspect", "verify"))


@pytest.mark.parametrize(("argument", "text"), [("--version", f"vitinit {vitinit.__version__}"), ("--help", "usage")])
def test_version_and_help(capsys, argument, text):
    with pytest.raises(SystemExit) as stop:
        cli.main([argument])
    assert stop.value.code == 0
    assert text in capsys.readouterr().out


def test_python_m_vitinit_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vitinit", "inspect", "nowhere"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("vitinit", run_name="__main__")
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: nowhere is not an export")


@pytest.mark.slow
def test_the_installed_command():
    script = Path(sys.executable).with_name("vitinit")
    if not script.exists():
        pytest.skip("vitinit is not installed beside this Python: pip install -e .")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, f"vitinit {vitinit.__version__}\n"), done.stderr


def test_ctrl_c_is_one_line(call, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "load_source", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert call(*RANDOM, "--out", tmp_path / "out") == (130, "", "stopped\n")
    assert list(tmp_path.iterdir()) == []


# vitinit convert


def test_convert_says_what_it_did_and_what_is_next(call, tmp_path):
    code, printed, errors = call(*RANDOM[:3], "--stages", "1", "--out", tmp_path / "out")
    assert (code, errors) == (0, "")
    assert "image size: 32x32, the source's own (--img-size gives another)" in printed
    assert "2 of 9 convolutions are attention at 32x32 px" in printed
    last = printed.splitlines()[-1]
    assert f"vitinit verify {tmp_path / 'out'}" in last
    assert f'after import vitinit: timm.create_model("local-dir:{tmp_path / "out"}", pretrained=True)' in last
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "README.md"}


@pytest.mark.parametrize(("name", "size"), [("random", (16, 16)), ("file", (16, 24))])
def test_timm_and_vitinit_load_what_convert_wrote(exports, name, size):
    cnn = timm.create_model("resnet8_cifar")
    if name == "file":
        cnn.load_state_dict(load_file(exports / "weights.safetensors"))
    else:
        torch.manual_seed(cli.SEED)
        cnn = timm.create_model("resnet8_cifar")
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = cnn.eval()(images)
        for model in (
            timm.create_model(f"local-dir:{exports / name}", pretrained=True).eval(), vitinit.load(exports / name),
        ):  # fmt: skip
            assert torch.allclose(model(images), expected, rtol=1e-4, atol=1e-4)


def test_config_records_where_the_export_comes_from(exports):
    record, weights = read_record(exports / "file"), exports / "weights.safetensors"
    assert record["source"] == {
        "model": "resnet8_cifar", "weights": str(weights.resolve()), "weights_classes": None, "pretrained": True,
        "new_classifier": None, "seed": 0, "sha256": hash_tensors(load_file(weights)),
    }  # fmt: skip
    assert record["convert"] == {
        "stages": None, "max_grid": None, "sharpness": 0.9, "alpha": None, "patch": "auto", "span": "local",
        "values": "identity", "rank": None, "weights": "free", "content_dim": 4, "tolerance": None,
    }  # fmt: skip
    assert (record["img_size"], record["trained"], record["tolerance"]) == ([16, 24], False, None)
    assert record["environment"]["versions"]["vitinit"] == vitinit.__version__
    assert record["sha256"] == hash_tensors(load_file(exports / "file" / "model.safetensors"))


def test_convert_keeps_the_sources_class_names_and_preprocessing(call, tmp_path):
    settings = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "img_size": (16, 16), "card": ""}
    checkpoint.export_model(
        timm.create_model("resnet8_cifar", num_classes=2), tmp_path / "cnn", classes=("cat", "dog"), **settings,
        preprocessing={"crop_pct": 0.8, "interpolation": "bilinear"},
    )  # fmt: skip
    assert call("convert", f"local-dir:{tmp_path / 'cnn'}", "--out", tmp_path / "out")[0] == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["label_names"] == ["cat", "dog"]
    data = config["pretrained_cfg"]
    assert [data[key] for key in ("crop_pct", "interpolation", "mean", "input_size")] == [
        0.8, "bilinear", [0.5] * 3, [3, 16, 16],
    ]  # fmt: skip
    assert call("verify", tmp_path / "out")[0] == 0
    shutil.move(tmp_path / "cnn", tmp_path / "moved")
    assert call("verify", tmp_path / "out")[0] == 2
    assert call("verify", tmp_path / "out", "--weights", tmp_path / "moved")[0] == 0


OPTIONS = {
    "--stages 2": {"stages": 2},
    "--stages layer2 layer3.0.conv1": {"stages": ["layer2", "layer3.0.conv1"]},
    "--max-grid 8": {"max_grid": 8},
    "--sharpness 0.8": {"sharpness": 0.8},
    "--alpha 7": {"alpha": 7.0},
    "--patch 2": {"patch": 2},
    "--patch auto": {"patch": "auto"},
    "--span local": {"span": "local"},
    "--head-weights free --values factorized --rank 9": {"weights": "free", "values": "factorized", "rank": 9},
    "--content-dim 4": {"content_dim": 4},
    "--tolerance 0.01": {"tolerance": 0.01},
    "--img-size 24": {"img_size": (24, 24)},
    "--img-size 16x24": {"img_size": (16, 24)},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_reaches_convert(refusal, monkeypatch, tmp_path, options):
    seen = {}

    def spy(_, **settings):
        seen.update(settings)
        raise ConversionError("seen")

    monkeypatch.setattr(cli, "convert", spy)
    assert refusal(*RANDOM[:3], *options.split(), "--out", tmp_path / "out") == "seen\n"
    defaults = {key: p.default for key, p in inspect.signature(convert).parameters.items() if key != "cnn"}
    assert seen == {**defaults, "img_size": (32, 32), **OPTIONS[options]}


@pytest.mark.parametrize("options", ["--img-size big", "--img-size 16x", "--patch half", "--stages 1 --max-grid 4",
                                     "--sharpness 0.9 --alpha 5", "--random --weights file.pth"])  # fmt: skip
def test_contradictory_and_misspelt_options_are_usage_errors(capsys, tmp_path, options):
    with pytest.raises(SystemExit) as stop:
        cli.main(["convert", "resnet8_cifar", *options.split(), "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_json_of_every_command_is_one_document(call, tmp_path):
    out = tmp_path / "out"
    code, printed, errors = call(*RANDOM, "--out", out, "--json")
    converted = json.loads(printed)
    assert (code, errors) == (0, "")
    assert converted["report"]["logits_error"] < 1e-5
    assert converted["source"] == read_record(out)["source"]
    inspected = json.loads(call("inspect", out, "--json")[1])
    assert inspected["hash_is_right"] is True
    assert (inspected["img_size"], inspected["classes"]) == ([16, 16], [str(n) for n in range(10)])
    assert inspected["layers"]["layer3.0.conv2"] == {
        "heads": 10, "span": "global", "patch": [1, 1], "weights": "tied", "values": "identity", "content_dim": 0,
    }  # fmt: skip
    assert len(inspected["distance"]["layers"]) == 4
    verified = json.loads(call("verify", out, "--json")[1])
    assert verified["equal"] is True
    assert [row["count"] for row in verified["sets"]] == [8, 9]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("resnet9_cifar", "timm has no model 'resnet9_cifar'; nearest names: resnet8_cifar"),
        ("train:resnet8_cifar", "convert trains nothing, run finetune.py with a recipe for that"),
        ("local-dir:nowhere", "no such file or folder: nowhere"),
        ("http:resnet18", "expected a timm name, local-dir:"),
    ],
)
def test_an_unknown_source_is_its_own_error(refusal, tmp_path, source, message):
    assert message in refusal("convert", source, "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_source_of_other_channels_is_refused(refusal, tmp_path):
    gray = timm.create_model("resnet10t", in_chans=1, num_classes=2)
    timm.models.save_for_hf(gray, tmp_path / "gray", safe_serialization=True, model_args={"in_chans": 1})
    message = refusal("convert", f"local-dir:{tmp_path / 'gray'}", "--out", tmp_path / "out")
    assert "resnet10t takes 1 channels: expected a CNN for RGB images" in message


def test_an_export_is_kept_without_overwrite_and_replaced_with_it(call, refusal, export):
    out = export("file")
    assert "holds an export: pass --overwrite to replace it, or another --out DIR" in refusal(*RANDOM, "--out", out)
    assert read_record(out)["img_size"] == [16, 24]
    assert call(*RANDOM, "--out", out, "--overwrite")[0] == 0
    assert read_record(out)["img_size"] == [16, 16]


@pytest.mark.parametrize("kind", ["other files", "an export and more", "a model of somebody else", "a file"])
def test_what_is_not_an_export_is_never_touched(refusal, exports, tmp_path, kind):
    out = tmp_path / "out"
    if kind == "other files":
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")
    elif kind == "an export and more":
        shutil.copytree(exports / "random", out)
        (out / "thesis.tex").write_text("years of work")
    elif kind == "a model of somebody else":
        timm.models.save_for_hf(timm.create_model("resnet8_cifar"), out, safe_serialization=True)
    else:
        out.write_text("a file")
    before = {path: path.read_bytes() for path in [out, *tmp_path.rglob("*")] if path.is_file()}
    message = refusal(*RANDOM, "--out", out, "--overwrite")
    expected = "is not a folder" if kind == "a file" else "holds files that are not of a vitinit export"
    assert f"{out} {expected}" in message
    assert "pass another --out DIR" in message
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    "error", [OSError("no space left on device"), SafetensorError("I/O error"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupted_write_leaves_nothing_or_the_export_before(
    call, exports, tmp_path, monkeypatch, error, overwrite
):
    out = tmp_path / "out"
    if overwrite:
        shutil.copytree(exports / "file", out)
    before = {path.name: path.read_bytes() for path in out.rglob("*")}

    def fill_the_disk(model, folder, **_):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise error

    monkeypatch.setattr(checkpoint, "save_for_hf", fill_the_disk)
    code, printed, errors = call(*RANDOM, "--out", out, *(["--overwrite"] if overwrite else []))
    assert printed == ""
    if isinstance(error, KeyboardInterrupt):
        assert (code, errors) == (130, "stopped\n")
    else:
        assert (code, errors) == (2, f"error: could not write {out} ({error}): free space, or pass another --out DIR\n")
    assert {path.name: path.read_bytes() for path in out.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if overwrite else [])


# vitinit inspect


def test_inspect_says_what_an_export_is(call, exports):
    code, printed, errors = call("inspect", exports / "random")
    assert (code, errors) == (0, "")
    record = read_record(exports / "random")
    for text in (
        f"resnet8_cifar, random weights, seed 0, hash {record['source']['sha256'][:12]}",
        "the source's, not trained since", record["environment"]["date"], f"vitinit {vitinit.__version__}",
        "16x16", "10: 0, 1, 2, ...", "0.485 0.456 0.406; 0.229 0.224 0.225", "84,702",
        f"{record['sha256'][:12]}, the tensors are as exported", "mass on target: start",
    ):  # fmt: skip
        assert text in printed, text
    assert ["layer3.0.conv2", "10", "global", "1x1", "tied", "identity", "off"] in map(str.split, printed.splitlines())


def test_inspect_runs_content_on_images(call, exports):
    printed = call("inspect", exports / "file")[1]
    assert f"weights {(exports / 'weights.safetensors').resolve()}" in printed
    assert "needs images" not in printed
    assert any(line.split()[-4:] == ["1x1", "free", "identity", "4"] for line in printed.splitlines())


def test_a_changed_tensor_is_refused(refusal, export):
    folder = export("random")
    state = load_file(folder / "model.safetensors")
    save_file({**state, "fc.bias": state["fc.bias"] + 1e-6}, folder / "model.safetensors")
    for command in ("inspect", "verify"):
        assert "model.safetensors was changed since it was exported" in refusal(command, folder)


def test_a_changed_config_is_refused(refusal, export):
    folder = export("random")
    config = json.loads((folder / "config.json").read_text())
    config["vitinit"]["tolerance"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    for command in ("inspect", "verify"):
        assert "config.json was changed since it was exported" in refusal(command, folder)


@pytest.mark.skipif(os.name == "nt", reason="pipes and modes of POSIX")
@pytest.mark.parametrize(("code", "changes"), [(0, {}), (1, {"trained": True})])
def test_a_reader_that_leaves_changes_no_exit_code(export, code, changes):
    folder = export("random")
    change_record(folder, **changes)
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, "-m", "vitinit", "verify", folder], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (code, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_an_answer_that_cannot_be_written_is_one_line(exports):
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "vitinit", "inspect", exports / "random"], stdout=full, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
    assert run.returncode == 2
    assert run.stderr.startswith("error: could not write to standard output (") and run.stderr.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="pipes and modes of POSIX")
def test_all_files_of_an_export_are_for_the_same_readers(exports):
    assert len({path.stat().st_mode for path in (exports / "random").iterdir()}) == 1


def test_an_export_of_an_older_vitinit_is_inspected_but_not_verified(call, refusal, export):
    folder = export("random")
    config = json.loads((folder / "config.json").read_text())
    del config["vitinit"]
    (folder / "config.json").write_text(json.dumps(config))
    code, printed, _ = call("inspect", folder)
    assert code == 0
    assert printed.count("not recorded") == 4
    assert json.loads(call("inspect", folder, "--json")[1])["hash_is_right"] is None
    assert "records no source, as exports of an older vitinit: convert its CNN again" in refusal("verify", folder)


# vitinit verify


@pytest.mark.parametrize("name", ["random", "file"])
def test_verify_finds_an_export_equal_in_both_types(call, exports, name):
    code, printed, errors = call("verify", exports / name, "--json")
    assert (code, errors) == (0, "")
    document = json.loads(printed)
    assert document["limits"] == {"float64": 1e-9, "float32": 1e-4}
    assert document["attention_counts"] is True
    for row in document["sets"]:
        assert row["float64_error"] < 1e-13
        assert 0 < row["float32_error"] < 1e-5
        assert row["same_predictions"] == row["count"]
    table = call("verify", exports / name)[1]
    assert table.splitlines()[0].split()[:2] == ["images", "count"]
    assert "equal to its source within 1e-09 in float64 and 1e-04 in float32" in table


def test_verify_takes_all_images_of_a_folder(call, exports, tmp_path):
    (tmp_path / "cats").mkdir()
    for index, mode in enumerate(("RGB", "L", "RGBA", "P")):
        Image.new(mode, (20 + index, 17), color=90).save(tmp_path / "cats" / f"{index}.png")
    (tmp_path / "notes.txt").touch()
    code, printed, _ = call("verify", exports / "file", "--images", tmp_path, "--json")
    assert code == 0
    rows = {row["images"]: row["count"] for row in json.loads(printed)["sets"]}
    assert rows == {"random": 8, str(tmp_path): 4}


def test_images_that_are_missing_or_damaged_are_named(refusal, exports, tmp_path):
    assert f"--images {tmp_path}: expected a folder that holds images (.jpg" in refusal(
        "verify", exports / "random", "--images", tmp_path
    )
    (tmp_path / "cut.png").write_bytes(b"\x89PNG")
    assert f"{tmp_path / 'cut.png'} is not a readable image" in refusal(
        "verify", exports / "random", "--images", tmp_path
    )


@pytest.mark.parametrize(
    "name", ["fc.bias", "layer3.0.conv1.attention.projections.0.kernel", "layer2.0.conv1.attention.bias_table"]
)
def test_verify_catches_a_changed_weight_even_with_its_hash_on_record(call, export, name):
    folder = export("random")
    tensor = load_file(folder / "model.safetensors")[name].clone()
    tensor.view(-1)[0] += 1e-4
    rewrite(folder, **{name: tensor})
    code, printed, _ = call("verify", folder)
    assert code == 1
    assert "differs" in printed
    assert "not equal to its source" in printed


def test_verify_finds_moved_weights_and_refuses_others(call, refusal, export, exports, tmp_path):
    folder = export("file")
    change_record(folder, source={**read_record(folder)["source"], "weights": "gone.safetensors"})
    assert "gone.safetensors" in refusal("verify", folder)
    assert call("verify", folder, "--weights", exports / "weights.safetensors")[0] == 0
    other = tmp_path / "other.safetensors"
    save_file(timm.create_model("resnet8_cifar").state_dict(), other)
    message = refusal("verify", folder, "--weights", other)
    assert f"weights of {other}" in message
    assert "these are not the weights that were converted" in message


def test_weights_that_the_conversion_computed_agree_in_float64_too(call, tmp_path):
    cnn = timm.create_model("nf_resnet26", num_classes=2)  # standardizes its weights
    state = {name: tensor + 0.03 * torch.randn_like(tensor) for name, tensor in cnn.state_dict().items()}
    save_file(state, tmp_path / "weights.safetensors")
    arguments = ("--weights", tmp_path / "weights.safetensors", "--img-size", "32", "--max-grid", "2")
    assert call("convert", "nf_resnet26", *arguments, "--out", tmp_path / "out")[0] == 0
    code, printed, _ = call("verify", tmp_path / "out", "--json")
    assert code == 0
    for row in json.loads(printed)["sets"]:
        assert row["float64_error"] < 1e-13
        assert row["float32_error"] > 1e-9


def test_verify_says_where_the_logits_do_not_see_the_attention(call, tmp_path):
    state = timm.create_model("resnet8_cifar").state_dict()
    state["layer3.0.bn2.weight"].zero_()  # as in random weights of some timm networks
    save_file(state, tmp_path / "weights.safetensors")
    arguments = ("--weights", tmp_path / "weights.safetensors", "--img-size", "16", "--stages", "layer3.0.conv2")
    assert call("convert", "resnet8_cifar", *arguments, "--out", tmp_path / "out")[0] == 0
    code, printed, _ = call("verify", tmp_path / "out")
    assert code == 0
    assert "note: the logits are the same without the attention layers" in printed
    assert "use trained weights" in printed


def test_verify_uses_the_tolerance_of_the_conversion(call, tmp_path):
    capped = ("--head-weights", "free", "--values", "factorized", "--rank", "8", "--tolerance", "0.95")
    assert call(*RANDOM, *capped, "--out", tmp_path / "out")[0] == 0
    code, printed, _ = call("verify", tmp_path / "out", "--json")
    document = json.loads(printed)
    assert (code, document["limits"]) == (0, {"float64": 0.95, "float32": 0.95})
    assert document["sets"][0]["float64_error"] > 0.1


def test_an_export_is_a_source_too(call, exports, tmp_path):
    source, out = f"local-dir:{exports / 'file'}", tmp_path / "out"
    code, printed, errors = call("convert", source, "--stages", "layer1", "--out", out)
    assert (code, errors) == (0, "")
    assert "image size: 16x24, the source's own" in printed
    assert len(json.loads(call("inspect", out, "--json")[1])["layers"]) == 6
    code, printed, _ = call("verify", out, "--json")
    assert code == 0
    assert json.loads(printed)["sets"][0]["float64_error"] < 1e-13


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of finished runs of finetune.py."""
    folder, arms = tmp_path_factory.mktemp("runs"), {
        "trained": {"train": {"epochs": 1, "batch_size": 10, "warmup_epochs": 0}},
        "untrained": {},
        "stage 1": {"source": {"model": "train:resnet8_cifar", "epochs": 1}},
        "random": {"init": "random"},
        "source": {"model": "source"},
    }  # fmt: skip
    for name, changes in arms.items():
        raw = {
            "source": {"model": "resnet8_cifar", "pretrained": False}, "train": {"epochs": 0, "batch_size": 10},
            "data": {"name": "digits", "img_size": 16, "images_per_class": 2}, "seed": 3,
        }  # fmt: skip
        run_recipe(recipe_from_dict({**raw, **changes}), out=folder / name)
    return folder


def test_a_fine_tuned_export_is_no_longer_expected_to_be_equal(call, runs):
    code, printed, errors = call("verify", runs / "trained")
    assert (code, errors) == (1, "")
    assert "has been trained since it was converted, so it is no longer expected to equal its source" in printed
    assert f"vitinit inspect {runs / 'trained'} says how far it moved" in printed
    document = json.loads(call("verify", runs / "trained", "--json")[1])
    assert document["equal"] is False
    assert "trained since" in call("inspect", runs / "trained")[1]


def test_an_export_of_a_run_without_epochs_equals_its_source(call, refusal, runs):
    assert call("verify", runs / "untrained")[0] == 0
    message = refusal("verify", runs / "stage 1")
    assert "the source train:resnet8_cifar was trained in its run: give its weights" in message
    weights = runs / "stage 1" / "source" / "model" / "model.safetensors"
    assert call("verify", runs / "stage 1", "--weights", weights)[0] == 0


def test_an_export_from_random_weights_is_not_its_source(call, runs):
    code, printed, _ = call("verify", runs / "random")
    assert code == 1
    assert "started from random weights, so it does not compute what its source computes" in printed


def test_an_export_of_the_cnn_itself_says_so(call, refusal, runs):
    assert "has no attention layers, it is the CNN itself: there is no conversion to verify" in refusal(
        "verify", runs / "source"
    )
    code, printed, _ = call("inspect", runs / "source")
    assert code == 0
    assert "no attention layers: this is the CNN itself" in printed
