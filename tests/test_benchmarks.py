"""Committed figures: made by the scripts, complete, and shown as they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from low_data import confidence_interval  # noqa: E402


def environments(content):
    """Every environment in a result, at any depth."""
    if isinstance(content, dict):
        if "environment" in content:
            yield content["environment"]
        content = list(content.values())
    if isinstance(content, list):
        for part in content:
            yield from environments(part)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path):
    content = json.loads(path.read_text())
    assert (ROOT / content["script"]).is_file()
    found = list(environments(content))
    assert found
    for environment in found:
        assert environment["date"] and environment["commit"] and environment["device"]
        assert {"torch", "timm", "accelerate"} <= set(environment["versions"])


def test_the_readme_shows_the_results():
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_confidence_interval():
    """Against the textbook: three values 1, 2, 3 have s = 1 and t(0.975, 2) = 4.303."""
    assert confidence_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert confidence_interval([0.4]) is None
    with pytest.raises(IndexError):
        confidence_interval([0.0] * 20)
