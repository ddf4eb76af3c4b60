"""The sweep over timm: one model of each family is measured again, and the page shows the committed rows."""

import csv
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import timm_sweep  # noqa: E402
from tables import table  # noqa: E402


def read_rows(path=timm_sweep.RESULTS):
    with path.open() as file:
        return list(csv.DictReader(file))


def pick_models():
    """The quickest model of each family that was converted."""
    quickest = {}
    for row in read_rows():
        if row["pass"] == "first" and row["status"] == "passed":
            best = quickest.setdefault(row["family"], row)
            if float(row["seconds"]) < float(best["seconds"]):
                quickest[row["family"]] = row
    return sorted(row["model"] for row in quickest.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", pick_models())
def test_one_model_of_each_family(name):
    recorded = {row["pass"]: row for row in read_rows() if row["model"] == name}
    for row in timm_sweep.measure(name, max_params=1000):
        assert row["status"] in ("passed", "rounding"), row
        for column in ("img_size", "convolutions", "converted", "local", "kept", "reason"):
            assert str(row[column]) == recorded[row["pass"]][column]
        assert float(row["worst_layer_f64"]) < 1e-13


def test_the_page_shows_the_rows():
    page, rows = timm_sweep.PAGE.read_text(), read_rows()
    tried = [row for row in rows if row["status"] not in ("none", "too large")]
    for key in timm_sweep.PASSES:
        line = timm_sweep.total(key, [row for row in tried if row["pass"] == key])
        assert table(line, []).splitlines()[0] in page
    assert len(rows) == len(timm_sweep.PASSES) * len({row["model"] for row in rows})


@pytest.mark.slow
def test_a_sweep_goes_on_where_its_file_ends(monkeypatch, tmp_path, capfd):
    def sweep(*options):
        monkeypatch.setattr(
            sys, "argv", ["timm_sweep.py", "--out", str(tmp_path / "out.csv"), "--workers", "1", *options]
        )
        timm_sweep.main()
        return [(row["model"], row["status"]) for row in read_rows(tmp_path / "out.csv")], capfd.readouterr().out

    rows, _ = sweep("--models", "resnet10t", "--max-params", "1")
    assert rows == [("resnet10t", "too large")] * 2
    rows, _ = sweep("--models", "resnet1[04]t", "--limit", "0.01")
    assert rows == [("resnet10t", "too large")] * 2 + [("resnet14t", "stopped")] * 2
    rows, shown = sweep("--models", "resnet1[04]t", "--again", "stopped")
    assert rows == [("resnet10t", "too large")] * 2 + [("resnet14t", "passed")] * 2
    assert "resnet14t" in shown and "resnet10t" not in shown


def test_random_networks_have_no_silent_branch():
    model, side = timm_sweep.build("resnet10t", max_params=1000)
    assert side == 32
    for name, parameter in model.named_parameters():
        assert parameter.any(), name
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert all(not torch.allclose(m.running_var, torch.ones_like(m.running_var)) for m in norms)
