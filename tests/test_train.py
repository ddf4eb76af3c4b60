"""Training: the loss falls, an interrupted run ends like an uninterrupted one, two processes train like one."""

import copy
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from accelerate import Accelerator
from conftest import load_few
from safetensors.torch import load_file
from timm.layers import BatchNormAct2d
from torch import nn

import finetune
from vitinit import run, train
from vitinit.augment import Augmentation, normalize
from vitinit.checkpoint import STATE_FILE, load_state
from vitinit.errors import CheckpointError, RecipeError, VitinitError
from vitinit.recipe import Recipe, dump_recipe, recipe_from_dict
from vitinit.run import run_recipe
from vitinit.sync_norm import synchronize_batch_norms
from vitinit.train import Interrupted, evaluate

pytestmark = pytest.mark.usefixtures("small_and_fast")
ROOT = Path(__file__).parents[1]


def make_recipe(**changes) -> Recipe:
    """Three steps an epoch; `train={"epochs": 3}` changes that key and leaves the section's others."""
    raw = {
        "name": "trial",
        "source": {"model": "resnet8_cifar", "pretrained": False},
        "data": {"name": "digits", "img_size": 16, "images_per_class": 3},
        "train": {"epochs": 2, "batch_size": 10, "lr": 4e-3},
    }
    for key, value in changes.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return recipe_from_dict(raw)


def stop_at(monkeypatch, step: int) -> None:
    """Ask the run to stop after this many steps of all its trainings together."""
    calls = iter(range(1, step + 1))
    monkeypatch.setattr(train._StopRequest, "requested", lambda *_: next(calls, step) == step)


def read_weights(folder: Path) -> dict:
    """Every exported tensor of a run: of the network, of stage 1 and of the random arm."""
    files = sorted(folder.glob("**/model.safetensors"))
    return {f"{file.parent.relative_to(folder)}:{k}": v for file in files for k, v in load_file(file).items()}


def assert_same_weights(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


# One run


def test_loss_falls_and_accuracy_rises(tmp_path):
    source = {"model": "resnet8_cifar", "pretrained": False}
    metrics = run_recipe(make_recipe(model="source", source=source, train={"epochs": 12}), out=tmp_path)
    first, last = metrics["epochs"][0], metrics["epochs"][-1]
    assert last["loss"] < 0.5 * first["loss"]
    assert last["train_accuracy"] > 0.8
    assert metrics["accuracy"] > metrics["step0"]["accuracy"] + 0.2


def test_record_has_a_line_an_epoch_with_the_rate_of_its_last_step(tmp_path):
    recipe = make_recipe(train={"epochs": 3, "eval_every": 2, "min_lr": 1e-4}, data={"holdout": 0.3})
    metrics = run_recipe(recipe, out=tmp_path)
    lines = metrics["epochs"]
    assert [(line["epoch"], line["step"]) for line in lines] == [(1, 2), (2, 4), (3, 6)]
    assert (metrics["steps"], metrics["images_seen"]) == (6, 60)
    assert ["holdout_accuracy" in line for line in lines] == [False, True, True]
    # Two steps of warm-up, so the first epoch ends two thirds up.
    assert lines[0]["lr"] == pytest.approx(4e-3 * 2 / 3)
    assert lines[-1]["lr"] == pytest.approx(1e-4)
    assert all(line["grad_norm"] > 0 and line["images_per_second"] > 0 for line in lines)


def test_without_clipping_the_gradient_norm_is_not_measured_and_the_weights_differ(tmp_path):
    clipped = run_recipe(make_recipe(train={"clip_grad": 1e-3, "opt": "sgd"}), out=tmp_path / "clipped")
    free = run_recipe(make_recipe(train={"clip_grad": None, "opt": "sgd"}), out=tmp_path / "free")
    assert clipped["epochs"][0]["grad_norm"] > 1e-3  # the norm before it is clipped
    assert free["epochs"][0]["grad_norm"] is None
    start = clipped["epochs"][0]["loss"]
    assert abs(clipped["epochs"][1]["loss"] - start) < abs(free["epochs"][1]["loss"] - start)


def test_positions_at_rate_zero_stay_where_they_are(tmp_path):
    run_recipe(make_recipe(train={"epochs": 0}), out=tmp_path / "start")
    run_recipe(make_recipe(train={"position_lr_scale": 0}), out=tmp_path / "end")
    start, end = read_weights(tmp_path / "start"), read_weights(tmp_path / "end")
    same = {name.rpartition(".")[2] for name in start if torch.equal(start[name], end[name])}
    moved = {name.rpartition(".")[2] for name in start if "attention" in name} - same
    assert "bias_table" in same
    assert moved == {"kernel"}


def test_no_epochs_evaluate_the_start(tmp_path):
    metrics = run_recipe(make_recipe(train={"epochs": 0}), out=tmp_path)
    assert metrics["accuracy"] == metrics["step0"]["accuracy"]
    assert (metrics["steps"], metrics["epochs"]) == (0, [])
    assert (tmp_path / "metrics.json").exists()


def test_average_of_the_weights_follows_them_and_is_exported(tmp_path, monkeypatch):
    recipe, out, states = make_recipe(train={"ema_decay": 0.8}), tmp_path / "out", []
    for step in (3, 4, 6):
        with monkeypatch.context() as patch, pytest.raises(Interrupted, match=f"step {step} of 6"):
            stop_at(patch, step - (states[-1]["step"] if states else 0))
            run_recipe(recipe, out=out, resume=bool(states))
        states.append(load_state(out))
    before, after, last = states
    for name, average in after["ema"].items():
        if average.is_floating_point():
            expected = 0.8 * before["ema"][name] + 0.2 * after["model"][name]
            torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-7)
    run_recipe(recipe, out=out, resume=True)
    exported = load_file(out / "model" / "model.safetensors")
    assert_same_weights(exported, last["ema"])
    assert not torch.equal(exported["fc.weight"], last["model"]["fc.weight"])


def test_bfloat16_trains_exports_float32_and_is_resumed(tmp_path, monkeypatch):
    exact = run_recipe(make_recipe(), out=tmp_path / "exact")
    recipe = make_recipe(train={"precision": "bf16"})  # another precision in the same process
    metrics = run_recipe(recipe, out=tmp_path / "bf16")
    weights = read_weights(tmp_path / "bf16")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32, torch.int64}
    assert all(tensor.isfinite().all() for tensor in weights.values())
    losses = [[line["loss"] for line in arm["epochs"]] for arm in (metrics, exact)]
    assert losses[0] != losses[1]  # autocast was on
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_at(patch, 2)
        run_recipe(recipe, out=tmp_path / "cut")
    run_recipe(recipe, out=tmp_path / "cut", resume=True)
    assert_same_weights(read_weights(tmp_path / "cut"), weights)


def test_a_loss_that_is_not_finite_stops_the_run_with_advice(tmp_path):
    recipe = make_recipe(train={"opt": "sgd", "lr": 1e30, "clip_grad": None, "warmup_epochs": 0})
    with pytest.raises(VitinitError, match=r"the loss is (nan|inf) in epoch 1, learning rate 1e\+30: lower train\.lr"):
        run_recipe(recipe, out=tmp_path)
    assert not (tmp_path / "metrics.json").exists()


def test_evaluation_counts_every_image_once_in_evaluation_mode():
    images = load_few("digits", img_size=16, images_per_class=3).test
    model = timm.create_model("resnet8_cifar", drop_rate=0.5).train()
    augmentation = Augmentation(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), num_classes=10)
    with torch.no_grad():
        pixels = normalize(images.images, mean=augmentation.mean, std=augmentation.std)
        right = (model.eval()(pixels).argmax(dim=1) == images.labels).sum().item()
    model.train()
    for batch_size in (7, 50):
        got = evaluate(model, images, augmentation=augmentation, accelerator=Accelerator(), batch_size=batch_size)
        assert got == pytest.approx(right / 50)
    assert model.training


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (3599.7, "1h00m"), (7800, "2h10m")],
)
def test_seconds_are_written_as_a_person_reads_them(seconds, text):
    assert train.format_seconds(seconds) == text


# Interrupted and resumed

TRAINED = {"model": "train:resnet8_cifar", "pretrained": True, "epochs": 2}
MIXED = {"mixup": 0.4, "cutmix": 1.0, "crop_padding": 2, "hflip": True, "smoothing": 0.1}


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        # Where each run is stopped, in steps since it was started or resumed.
        pytest.param({"train": {"opt": "sgd"}}, [2, 2], id="in the middle of epochs"),
        pytest.param({}, [3, 3], id="at the ends of epochs"),
        pytest.param({"augment": MIXED, "train": {"drop_path": 0.3}}, [4], id="mixup and stochastic depth"),
        pytest.param({"source": TRAINED, "train": {"ema_decay": 0.8}}, [2, 6], id="in stage 1 and after it, with ema"),
        pytest.param({"source": TRAINED, "convert": {"content_dim": 4}}, [6], id="at the end of stage 1"),
        pytest.param({"source": TRAINED, "compare_random": True}, [4, 4, 9], id="in every arm"),
    ],
)
def test_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path, monkeypatch, changes, steps):
    recipe, out = make_recipe(**changes), tmp_path / "cut"
    expected = run_recipe(recipe, out=tmp_path / "whole")
    for i, step in enumerate(steps):
        with monkeypatch.context() as patch, pytest.raises(Interrupted, match="stopped at step"):
            stop_at(patch, step)
            run_recipe(recipe, out=out, resume=i > 0)
        assert list(out.glob("**/state.pt"))
        assert not (out / "metrics.json").exists()
    metrics = run_recipe(recipe, out=out, resume=True)
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert not list(out.glob("**/state.pt"))
    assert_same_weights(read_weights(out), read_weights(tmp_path / "whole"))
    assert describe_result(metrics) == describe_result(expected)


def describe_result(metrics: dict) -> dict:
    """What of the metrics a resume must not change; an epoch's own numbers are of its part after the resume."""
    epochs = [(line["epoch"], line["step"], line["lr"]) for line in metrics["epochs"]]
    kept = ("accuracy", "step0", "steps", "images_seen", "parameters")
    arms = {arm: describe_result(metrics[arm]) for arm in ("source", "random") if arm in metrics}
    return {**{key: metrics.get(key) for key in kept}, "epochs": epochs, **arms}


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that was stopped at step 2 of 6, and its recipe."""
    recipe, out = make_recipe(), tmp_path / "stopped"
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="step 2 of 6"):
        stop_at(patch, 2)
        run_recipe(recipe, out=out)
    return out, recipe


def refusal(action, *args, **kwargs):
    with pytest.raises(CheckpointError) as caught:
        action(*args, **kwargs)
    return str(caught.value)


def test_state_of_another_recipe_is_refused_with_the_keys_that_differ(stopped):
    out, recipe = stopped
    other = make_recipe(seed=1, train={"lr": 1e-2, "ema_decay": 0.9})
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.name != "log.txt"}
    message = refusal(run_recipe, other, out=out, resume=True)
    assert "these keys differ: seed, train.ema_decay, train.lr." in message
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.name != "log.txt"} == before
    run_recipe(recipe, out=out, resume=True)
    assert (out / "metrics.json").exists()


def test_finished_stage_1_of_another_recipe_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "killed"
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(run, "evaluate", lambda *_, **__: 1 / 0)  # dies between stage 1 and stage 2
        run_recipe(make_recipe(source=TRAINED), out=out)
    other = make_recipe(source={**TRAINED, "lr": 0.5})
    assert "source.lr" in refusal(run_recipe, other, out=out, resume=True)


def test_truncated_state_is_refused(stopped):
    out, recipe = stopped
    content = (out / STATE_FILE).read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 1):
        (out / STATE_FILE).write_bytes(content[:size])
        message = refusal(run_recipe, recipe, out=out, resume=True)
        assert "state.pt is incomplete or not a vitinit state" in message
        assert "--overwrite" in message


def test_foreign_state_is_refused(stopped):
    out, recipe = stopped
    torch.save({"step": 3, "model": {}}, out / STATE_FILE)
    assert "not a vitinit state (KeyError)" in refusal(run_recipe, recipe, out=out, resume=True)
    torch.save(nn.Linear(2, 2), out / STATE_FILE)  # would run code to load
    assert "not a vitinit state (UnpicklingError)" in refusal(run_recipe, recipe, out=out, resume=True)


def test_missing_state_is_refused(stopped, tmp_path):
    out, recipe = stopped
    (out / STATE_FILE).unlink()
    assert "holds no state.pt to resume from" in refusal(run_recipe, recipe, out=out, resume=True)
    assert "holds no state.pt to resume from" in refusal(run_recipe, recipe, out=tmp_path / "new", resume=True)
    assert not (tmp_path / "new").exists()
    assert "holds no state.pt to resume from" in refusal(load_state, tmp_path)


def test_a_batch_that_the_processes_cannot_share_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 4)
    for asked, size in ((10, 10), (64, 30)):  # a batch is at most the training set
        message = f"train.batch_size: {size} images cannot be shared by 4 processes: use a multiple of 4"
        with pytest.raises(RecipeError, match=message):
            run_recipe(make_recipe(train={"batch_size": asked}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Other processes


def test_norm_over_all_processes_is_pytorchs_over_one():
    """With one process, PyTorch's own batch norm is what the outputs, gradients and statistics must be."""
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.Conv2d(4, 2, 1, bias=False),
        BatchNormAct2d(2),
    )
    nn.init.normal_(plain[1].bias)
    synced, x = copy.deepcopy(plain), torch.randn(6, 3, 8, 8)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert synchronize_batch_norms(synced) is synced
        assert [type(module) for module in synced] != [type(module) for module in plain]
        for network in (plain, synced):
            (network(x) ** 3).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(synced.state_dict()[name], tensor, msg=name)
    for (name, parameter), other in zip(plain.named_parameters(), synced.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-3, msg=name)
    torch.testing.assert_close(synced.eval()(x), plain.eval()(x))


def start(*arguments, launcher: tuple[str, ...] = (), **environment) -> subprocess.Popen:
    """finetune.py as a user starts it, on one CPU core."""
    core = {min(os.sched_getaffinity(0))} if hasattr(os, "sched_getaffinity") else None
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VITINIT", "ACCELERATE"))}
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "finetune.py"), *map(str, arguments)], cwd=ROOT,
        env={**kept, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=None if core is None or launcher else lambda: os.sched_setaffinity(0, core),
    )  # fmt: skip


def finish(process: subprocess.Popen, *, seconds: float = 100) -> tuple[int, str, str]:
    """Exit code, standard output and errors; ends the process and its children if it takes too long."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    return process.returncode, output, errors


@pytest.fixture
def write_recipe(tmp_path):
    def write(**changes) -> Path:
        path = tmp_path / "trial.yaml"
        path.write_text(dump_recipe(make_recipe(**changes)), encoding="utf-8")
        return path

    return write


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_ctrl_c_saves_the_state_and_the_same_command_with_resume_goes_on(tmp_path, write_recipe, monkeypatch, capsys):
    recipe, out = write_recipe(train={"epochs": 20}), tmp_path / "out"
    process = start("--recipe", recipe, "--out", out)
    for line in process.stdout:  # as it is printed: a log that is piped must not wait in a buffer
        if line.startswith("epoch "):
            break
    process.send_signal(signal.SIGINT)
    code, _, errors = finish(process)
    assert code == 130, errors
    assert errors.strip().splitlines()[-1].endswith("go on with the same command and --resume")
    assert "Traceback" not in errors
    stopped = load_state(out)["step"]
    assert 3 <= stopped < 60
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["finetune.py", "--recipe", str(recipe), "--out", str(out), "--resume"])
        assert finetune.main() == 0
    assert f"resumed at step {stopped} of 60" in capsys.readouterr().out
    assert json.loads((out / "metrics.json").read_text())["steps"] == 60


def start_two(*arguments) -> subprocess.Popen:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1")
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return start(*arguments, launcher=(*launcher, "--master_port", port), OMP_NUM_THREADS="1", **loopback)


@pytest.mark.slow
def test_two_processes_train_the_same_network_as_one(tmp_path, write_recipe):
    # The norms are synchronized, mixup's partners come from the whole batch, and holdout's count is summed up. The
    # activations are smooth: a ReLU turns the rounding of a value near zero into a step of its gradient.
    changes = {
        "source": {"model": "test_efficientnet"},
        "train": {"epochs": 2, "opt": "sgd", "lr": 0.02, "ema_decay": 0.5},
        "augment": MIXED,
        "data": {"holdout": 0.34, "img_size": 32},
        "evaluate": "holdout",
    }
    recipe, out = write_recipe(**changes), tmp_path / "two"
    process = start_two("--recipe", recipe, "--out", out)
    expected = run_recipe(make_recipe(**changes), out=tmp_path / "one")
    code, output, errors = finish(process)
    assert code == 0, errors
    assert output.count("epoch 1/2") == 1  # one of the two prints
    weights, one = read_weights(out), read_weights(tmp_path / "one")
    assert weights.keys() == one.keys()
    for name, tensor in weights.items():
        # The second part is for a bias before a norm, whose gradient is nothing but rounding.
        allowed = 1e-5 * one[name].double().norm() + 1e-7 * tensor.numel() ** 0.5
        assert (tensor - one[name]).double().norm() <= allowed, name
    metrics = json.loads((out / "metrics.json").read_text())
    for key in ("subset_sha256", "n_train", "steps", "images_seen", "accuracy"):
        assert metrics[key] == expected[key], key
    assert metrics["step0"]["accuracy"] == expected["step0"]["accuracy"]
    for got, line in zip(metrics["epochs"], expected["epochs"], strict=True):
        assert got["loss"] == pytest.approx(line["loss"], rel=1e-5)
        assert got["holdout_accuracy"] == line["holdout_accuracy"]
