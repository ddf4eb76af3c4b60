"""Where a number comes from: date, commit, device and versions, written beside every result."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from vitinit.version import __version__


def describe_environment() -> dict:
    """Plain values for a JSON file."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "threads": torch.get_num_threads(),
        "versions": {
            "vitinit": __version__, "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "torchvision", "timm", "accelerate", "datasets")},
        },
    }  # fmt: skip


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+changes" if changed else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
