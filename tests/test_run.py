"""Whole runs: the files they leave, what they measure, what they refuse, and the command line."""

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from conftest import load_few
from PIL import Image
from safetensors.torch import load_file, save_file

import finetune
import vitinit
from vitinit import plots, run
from vitinit.checkpoint import hash_tensors
from vitinit.data import load_splits
from vitinit.errors import CheckpointError, RecipeError, SourceError, VitinitError
from vitinit.recipe import Recipe, dump_recipe, list_recipes, load_recipe, recipe_from_dict, recipe_to_dict
from vitinit.run import run_recipe

pytestmark = pytest.mark.usefixtures("small_and_fast")
ROOT = Path(__file__).parents[1]
PICTURE = plots.plot_summary


def describe(**changes) -> dict:
    """A recipe of two steps as plain values; `train={"epochs": 3}` changes that key of the section alone."""
    raw = {
        "name": "trial",
        "source": {"model": "resnet8_cifar", "pretrained": False},
        "data": {"name": "digits", "img_size": 16, "images_per_class": 2},
        "train": {"epochs": 1, "batch_size": 10, "warmup_epochs": 0},
    }
    for key, value in changes.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return raw


def make_recipe(**changes) -> Recipe:
    return recipe_from_dict(describe(**changes))


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(kind: type[VitinitError], *args, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        run_recipe(*args, **kwargs)
    return str(caught.value)


# A finished run


@dataclasses.dataclass(frozen=True)
class Finished:
    out: Path
    recipe: Recipe
    metrics: dict
    printed: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Stage 1, stage 2 and the random arm, with a picture."""
    recipe = make_recipe(
        source={"model": "train:resnet8_cifar", "pretrained": True, "epochs": 12, "lr": 4e-3},
        data={"images_per_class": 5, "holdout": 0.2},
        compare_random=True,
        seed=3,
    )
    out, printed = tmp_path_factory.mktemp("finished") / "deep" / "out", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "plot_summary", PICTURE)
        patch.setattr(run.tqdm, "write", printed.append)
        metrics = run_recipe(recipe, out=out)
    return Finished(out, recipe, metrics, "\n".join(printed))


def test_finished_run_leaves_these_files_and_no_state(finished):
    export = ("README.md", "config.json", "model.safetensors")
    assert set(read_files(finished.out)) == {
        "metrics.json", "recipe.resolved.yaml", "subset.json", "conversion.json", "summary.png", "log.txt",
        *(f"model/{name}" for name in (*export, "recipe.yaml")), "source/record.json",
        *(f"source/model/{name}" for name in export), "random/metrics.json", "random/conversion.json",
        *(f"random/model/{name}" for name in (*export, "recipe.yaml")),
    }  # fmt: skip


def test_metrics_say_what_was_trained_how_long_and_on_what(finished):
    metrics = finished.metrics
    assert json.loads((finished.out / "metrics.json").read_text()) == metrics
    assert (metrics["name"], metrics["model"], metrics["init"], metrics["seed"]) == (
        "trial", "converted", "construction", 3,
    )  # fmt: skip
    assert (metrics["n_train"], metrics["n_holdout"], metrics["n_test"]) == (40, 10, 50)
    assert (metrics["steps"], metrics["images_seen"], len(metrics["epochs"])) == (4, 40, 1)
    assert metrics["recipe"] == recipe_to_dict(finished.recipe)
    assert (metrics["source"]["steps"], len(metrics["source"]["epochs"])) == (12 * 4, 12)
    assert min(metrics["seconds"], metrics["source"]["seconds"], metrics["convert_seconds"]) > 0
    assert metrics["parameters"] == sum(p.numel() for p in vitinit.load(finished.out).parameters())
    environment = metrics["environment"]
    assert torch.__version__.startswith(environment["versions"]["torch"])
    assert environment["versions"]["timm"] == timm.__version__
    assert environment["versions"]["vitinit"] == vitinit.__version__
    assert environment["device"]
    assert environment["date"].endswith("+00:00")


def test_subset_is_recorded_with_its_hash(finished):
    subset = json.loads((finished.out / "subset.json").read_text())
    assert len(set(subset["indices"])) == 50
    digest = hashlib.sha256(",".join(map(str, subset["indices"])).encode()).hexdigest()
    assert digest == subset["sha256"] == finished.metrics["subset_sha256"]


@pytest.mark.parametrize("name", ["recipe.resolved.yaml", "model/recipe.yaml"])
def test_resolved_recipe_is_read_back_to_the_same_recipe(finished, name):
    assert load_recipe(finished.out / name) == finished.recipe


def test_summary_is_a_picture(finished):
    with Image.open(finished.out / "summary.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 400
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10


def test_log_holds_every_printed_line(finished):
    assert (finished.out / "log.txt").read_text() == finished.printed + "\n"
    accuracy = f"construction init, fine-tuned {finished.metrics['accuracy']:.1%}"
    assert accuracy in " ".join(finished.printed.split())
    gain = 100 * (finished.metrics["accuracy"] - finished.metrics["random"]["accuracy"])
    assert f"gained over random init: {gain:+.1f} points" in finished.printed


def test_conversion_report_counts_the_attention_layers(finished):
    report = json.loads((finished.out / "conversion.json").read_text())
    converted = [layer["name"] for layer in report["layers"] if layer["reason"] is None]
    assert converted == ["layer2.0.conv1", "layer2.0.conv2", "layer3.0.conv1", "layer3.0.conv2"]
    assert report["logits_error"] <= 1e-5
    assert report["params_after"] == finished.metrics["parameters"]


def test_step_0_of_the_construction_is_exactly_as_accurate_as_its_source(finished):
    metrics = finished.metrics
    assert metrics["source"]["accuracy"] > 0.3  # well above chance, so that equality says something
    assert metrics["step0"]["accuracy"] == metrics["source"]["accuracy"]
    assert metrics["step0"]["probe_accuracy"] is None  # its classifier is kept


def test_random_arm_is_the_same_network_with_as_many_epochs_and_without_a_source(finished):
    arm = finished.metrics["random"]
    assert json.loads((finished.out / "random" / "metrics.json").read_text()) == arm
    assert (arm["init"], arm["parameters"]) == ("random", finished.metrics["parameters"])
    assert arm["subset_sha256"] == finished.metrics["subset_sha256"]
    assert (arm["recipe"]["train"]["epochs"], arm["recipe"]["train"]["lr"], arm["steps"]) == (13, 4e-3, 13 * 4)
    assert arm["step0"]["probe_accuracy"] is None
    assert "source" not in arm
    assert arm["step0"]["accuracy"] < finished.metrics["step0"]["accuracy"]


# Arms


def test_exports_record_whether_they_were_trained_and_from_what(finished, tmp_path):
    run_recipe(make_recipe(train={"epochs": 0}), out=tmp_path)
    folders = (finished.out, finished.out / "random", tmp_path)
    records = [json.loads((folder / "model" / "config.json").read_text())["vitinit"] for folder in folders]
    assert [record["trained"] for record in records] == [True, True, False]
    assert [record["init"] for record in records] == ["construction", "random", "construction"]
    cnn = load_file(finished.out / "source" / "model" / "model.safetensors")
    assert records[0]["source"]["sha256"] == hash_tensors(cnn)  # as stage 1 has trained it
    assert records[0]["source"]["model"] == "train:resnet8_cifar"


def test_source_arm_trains_the_cnn_itself(tmp_path):
    metrics = run_recipe(make_recipe(model="source"), out=tmp_path)
    assert type(vitinit.load(tmp_path)).__name__ == "CifarResNet"
    assert not (tmp_path / "conversion.json").exists()
    assert metrics["step0"]["probe_accuracy"] > 0.1
    assert metrics["parameters"] == sum(p.numel() for p in timm.create_model("resnet8_cifar").parameters())


def test_random_arm_does_not_see_the_source_weights(tmp_path):
    weights = tmp_path / "weights.safetensors"
    save_file(timm.create_model("resnet8_cifar").state_dict(), weights)
    source, nothing = {"weights": str(weights), "pretrained": True}, {"epochs": 0}
    with_file = run_recipe(make_recipe(init="random", source=source, train=nothing), out=tmp_path / "a")
    without = run_recipe(make_recipe(init="random", train=nothing), out=tmp_path / "b")
    built = run_recipe(make_recipe(source=source, train=nothing), out=tmp_path / "c")
    assert with_file["step0"] == without["step0"]
    a, b, c = (load_file(tmp_path / name / "model" / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    key = "layer3.0.conv1.attention.projections.0.kernel"
    assert torch.equal(c[key], load_file(weights)["layer3.0.conv1.weight"])
    assert not torch.equal(a[key], c[key])
    assert built["step0"]["probe_accuracy"] is not None
    assert with_file["step0"]["probe_accuracy"] is None


def test_the_seed_decides_the_weights(tmp_path):
    names = {"one": 0, "again": 0, "other": 1}
    augment = {"crop_padding": 2, "mixup": 0.2}
    runs = {
        name: run_recipe(make_recipe(seed=seed, augment=augment), out=tmp_path / name) for name, seed in names.items()
    }
    one, again, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in names)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])
    for key in ("accuracy", "step0", "subset_sha256"):
        assert runs["one"][key] == runs["again"][key]
    assert runs["one"]["subset_sha256"] != runs["other"]["subset_sha256"]


def test_holdout_runs_never_evaluate_a_test_image(tmp_path, monkeypatch):
    splits = load_few(**describe(data={"images_per_class": 5, "holdout": 0.4})["data"], seed=0,
                      label=None, path=None, fraction=None, on_corrupt="error")  # fmt: skip
    poisoned = dataclasses.replace(splits.test, labels=torch.full_like(splits.test.labels, -1))
    monkeypatch.setattr(run, "load_splits", lambda *_, **__: dataclasses.replace(splits, test=poisoned))
    recipe = make_recipe(evaluate="holdout", data={"images_per_class": 5, "holdout": 0.4}, train={"epochs": 2})
    metrics = run_recipe(recipe, out=tmp_path)
    assert metrics["n_test"] == metrics["n_holdout"] == len(splits.holdout) == 20
    assert metrics["accuracy"] == metrics["epochs"][-1]["holdout_accuracy"]
    assert metrics["step0"]["probe_accuracy"] > 0  # no image of the poisoned test set is ever right
    assert "20 holdout images" in (tmp_path / "log.txt").read_text()
    assert "test accuracy" not in (tmp_path / "model" / "README.md").read_text()


# Folders


@pytest.fixture
def results(tmp_path):
    out = tmp_path / "out"
    run_recipe(make_recipe(), out=out)
    return out


def test_a_finished_folder_is_kept_without_overwrite_and_replaced_with_it(results):
    before = read_files(results)
    message = refusal(CheckpointError, make_recipe(seed=1), out=results)
    assert "holds a finished run: pass --overwrite to replace it, --out DIR to keep it" in message
    assert "--resume" not in message
    assert "nothing to resume" in refusal(CheckpointError, make_recipe(), out=results, resume=True)
    assert "pass one of them" in refusal(CheckpointError, make_recipe(), out=results, resume=True, overwrite=True)
    assert read_files(results) == before
    (results / "notes.txt").write_text("left by the run before")
    assert run_recipe(make_recipe(seed=1), out=results, overwrite=True)["seed"] == 1
    assert set(read_files(results)) == set(before)


def test_an_unfinished_folder_is_refused_with_resume_as_a_way_on(results):
    (results / "metrics.json").unlink()
    message = refusal(CheckpointError, make_recipe(), out=results)
    assert "holds an unfinished run: pass --overwrite" in message
    assert "or --resume to go on with it" in message


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_foreign_files_is_never_touched(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("years of work")
    message = refusal(CheckpointError, make_recipe(), out=tmp_path, overwrite=overwrite)
    assert "holds files that are not of a vitinit run: pass another --out DIR" in message
    assert list(read_files(tmp_path)) == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("a file")
    assert "is not a folder" in refusal(CheckpointError, make_recipe(), out=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "a file"


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "out").mkdir()
    assert run_recipe(make_recipe(train={"epochs": 0}), out=tmp_path / "out", overwrite=True)["steps"] == 0


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(SourceError, {"source": {"weights": "missing.safetensors"}}, id="weights"),
        pytest.param(SourceError, {"source": {"model": "resnet9_cifar"}}, id="model"),
        pytest.param(RecipeError, {"source": {"keep_head": True, "model": "resnet18"}}, id="head"),
        pytest.param(VitinitError, {"data": {"images_per_class": 10_000}}, id="data"),
        pytest.param(VitinitError, {"convert": {"stages": 9}}, id="stages"),
        pytest.param(VitinitError, {"augment": {"crop_padding": 16}}, id="crop"),
    ],
)
def test_overwrite_with_a_recipe_that_cannot_run_leaves_the_old_results(results, kind, changes):
    before = read_files(results)
    refusal(kind, make_recipe(**changes), out=results, overwrite=True)
    assert read_files(results) == before


def test_kept_classifier_of_another_width_is_refused(tmp_path):
    recipe = make_recipe(source={"model": "resnet18", "keep_head": True})
    message = refusal(RecipeError, recipe, out=tmp_path / "out")
    assert "source.keep_head: the source has 1000 classes and the data 10: set it to false" in message
    assert not (tmp_path / "out").exists()


def test_kept_classifier_starts_where_the_source_is(tmp_path):
    cnn = timm.create_model("resnet8_cifar")
    save_file(cnn.state_dict(), tmp_path / "weights.safetensors")
    source = {"weights": str(tmp_path / "weights.safetensors"), "pretrained": True, "keep_head": True}
    metrics = run_recipe(make_recipe(source=source, train={"epochs": 0}), out=tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert torch.equal(exported["fc.weight"], cnn.state_dict()["fc.weight"])
    assert metrics["step0"]["probe_accuracy"] is None


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = {"model": "train:resnet8_cifar", "pretrained": True, "epochs": 7}
    recipe = make_recipe(source=source, compare_random=True, train={"epochs": 3, "tracker": "tensorboard"})
    plan = run_recipe(recipe, out=tmp_path / "out", dry_run=True)
    assert plan["steps"] == 3 * 2
    assert plan["seconds_per_step"] > 0
    printed = capsys.readouterr().out
    assert dump_recipe(recipe) in printed
    assert "4 of 9 convolutions are attention at 16x16 px" in printed
    line = next(line for line in printed.splitlines() if line.startswith("plan "))
    # The random arm trains for the epochs of both stages.
    assert {"14", "6", "20"} <= set(re.findall(r"\d+(?= steps)", line))
    assert list(tmp_path.iterdir()) == []


# The command line


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """finetune.py in an empty folder: exit code, standard output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VITINIT_DATA", raising=False)
    monkeypatch.setattr(run, "load_splits", load_splits)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["finetune.py", *arguments])
        code = finetune.main()
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--recipe", "digits"], "no recipe 'digits'; did you mean digits_10pct?", id="recipe"),
        pytest.param(["--set", "train.lr=fast"], "train.lr: expected a number above 0, got the text", id="value"),
        pytest.param(["--set", "train.lrr=1"], "train.lrr: unknown key; did you mean train.lr?", id="key"),
        pytest.param(["--set", "data.path=nowhere"], "data.path: nowhere does not exist", id="no data"),
        pytest.param(["--set", "data.path=empty"], "data.path: empty holds nothing; expected a folder", id="no images"),
        pytest.param(["--set", "source.model=train:resnet9_cifar"], "no model 'resnet9_cifar'", id="source"),
        pytest.param(["--set", "augment.crop_padding=16"], "crop_padding", id="crop"),
        pytest.param(["--out", "full"], "full holds files that are not of a vitinit run", id="out"),
        pytest.param(["--resume"], "holds no state.pt to resume from", id="resume"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    recipe = [] if "--recipe" in arguments else ["--recipe", "digits_10pct"]
    code, _, errors = command(*recipe, *arguments)
    assert code == 2
    assert message in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert {path.name for path in tmp_path.rglob("*")} == {"empty", "full", "thesis.tex"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in fp16")
def test_fp16_without_a_gpu_is_refused_rather_than_ignored(command):
    code, _, errors = command("--recipe", "digits_10pct", "--set", "train.precision=fp16", "--dry-run")
    assert code == 2
    assert errors.startswith("error: train.precision: ")
    assert errors.count("\n") == 1


def test_results_are_in_a_folder_of_the_recipes_name_by_default(command, tmp_path):
    (tmp_path / "mine.yaml").write_text(dump_recipe(make_recipe()).replace("name: trial\n", "", 1))
    code, printed, errors = command("--recipe", "mine.yaml", "--set", "train.epochs=0")
    assert (code, errors) == (0, "")
    assert json.loads((tmp_path / "runs" / "mine" / "metrics.json").read_text())["steps"] == 0
    assert f"results in {Path('runs') / 'mine'}: metrics.json" in printed


def test_help_lists_the_recipes(command, capsys):
    with pytest.raises(SystemExit) as stop:
        command("--help")
    assert stop.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    names = [path.stem for path in (ROOT / "recipes").glob("*.yaml")]
    assert len(names) >= 3
    for name in names:
        assert name in printed


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "recipes").glob("*.yaml"))])
def test_recipe_of_the_checkout_is_understood_and_is_a_record(name):
    assert name in list_recipes()
    assert load_recipe(name).name == name
    lines = (ROOT / "recipes" / f"{name}.yaml").read_text().splitlines()
    header = "\n".join(line for line in lines if line.startswith("#"))
    assert len(lines) <= 60
    assert f"--recipe {name}" in header
    assert "Expected: " in header


def test_finetune_is_short():
    assert len((ROOT / "finetune.py").read_text().splitlines()) <= 40


@pytest.mark.slow
def test_import_is_silent_light_and_registers_the_models():
    code = """if True:
        import sys, vitinit
        heavy = {"matplotlib", "datasets", "sklearn"} & sys.modules.keys()
        import timm
        assert not heavy, heavy
        assert timm.is_model("vitinit_attention_cnn") and timm.is_model("resnet20_cifar")
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "vitinit" not in done.stderr
