"""Where a data set is: in a folder, in scikit-learn, or on the Hugging Face hub. Nothing is decoded here."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitinit.errors import DataError

if TYPE_CHECKING:  # imported where it is used: it costs a second
    from datasets import Dataset

# Name -> data set on the hub and, where it has several configurations, the folder of the one to use.
HUB_SETS: dict[str, tuple[str, str | None]] = {
    "cifar10": ("uoft-cs/cifar10", None),
    "cifar100": ("uoft-cs/cifar100", None),
    "imagenet": ("ILSVRC/imagenet-1k", None),
    "imagenette": ("frgfm/imagenette", "320px"),
    "tiny-imagenet": ("zh-plus/tiny-imagenet", None),
}
DIGITS_TEST_PER_CLASS = 50
TEST_SPLITS = ("test", "validation", "valid", "val")  # the first that has labels is the test set

_LAYOUT = (
    "a folder with train-*.parquet and test-*.parquet (or validation-*.parquet), or with a folder of images "
    "for each class: train/CLASS/*.jpg and test/CLASS/*.jpg (or validation, val)"
)


def locate_tables(
    name: str, path: str | os.PathLike | None, log: Callable[[str], None]
) -> tuple[dict[str, Dataset], str]:
    """Undecoded splits by name, and the place they were found in: see `data.load_splits` for the order of the search.

    Args:
        name: `digits`, a name in `HUB_SETS`, or `owner/name` on the hub.
        path: A folder with the data, or None.
        log: Takes one line: where the data were found.

    Raises:
        DataError: Data that are nowhere, or in a layout that is not understood.
    """
    root = os.environ.get("VITINIT_DATA")
    folder = Path(path).expanduser() if path is not None else Path(root).expanduser() / name if root else None
    if path is not None or (folder is not None and folder.is_dir()):
        log(f"{name}: {folder}")
        return _read_folder(folder), str(folder)
    if name == "digits":
        log("digits: scikit-learn's own copy")
        return _read_digits(), "scikit-learn"
    hub_id, part = HUB_SETS.get(name, (name, None))
    if "/" not in hub_id:
        known = ["digits", *HUB_SETS]
        near = difflib.get_close_matches(name, known, n=1)
        raise DataError(
            f"no data set {name!r}{f'; did you mean {near[0]}?' if near else ''} Known: {', '.join(known)}, "
            f"any owner/name of the hub. Or set data.path to {_LAYOUT}"
        )
    log(f"{name}: {hub_id} on the Hugging Face hub, or its local cache")
    return _read_folder(_download(hub_id, part, name=name, missed=folder)), f"hub: {hub_id}"


def _download(hub_id: str, part: str | None, *, name: str, missed: Path | None) -> Path:
    """Folder of a hub data set's parquet files; without a connection, that of an earlier download."""
    from huggingface_hub import snapshot_download

    cause, pattern = None, f"{part}/*.parquet" if part else "*.parquet"
    for revision in ("main", "refs/convert/parquet"):  # the second is the copy that the hub itself converts
        try:
            root = Path(snapshot_download(hub_id, repo_type="dataset", revision=revision, allow_patterns=pattern))
            if any((root / (part or "")).rglob("*.parquet")):
                return root / (part or "")
        except Exception as error:  # the hub's client raises its own errors, its HTTP library's and OSError
            cause = cause or error
    reason = f"{type(cause).__name__}: {str(cause).splitlines()[0]}" if cause else "it holds no parquet files"
    options = f" --revision refs/convert/parquet --include '{part}/*'" if part else ""
    raise DataError(
        f"{hub_id} could not be read from the Hugging Face hub ({reason})"
        f"{f', and there is no folder {missed}' if missed else ''}. Where there is a connection: "
        f"hf download {hub_id} --repo-type dataset{options} --local-dir DIR/{name}; "
        f"then set VITINIT_DATA=DIR, or data.path=DIR/{name}"
    ) from cause


def _read_folder(folder: Path) -> dict[str, Dataset]:
    from datasets import load_dataset

    splits, names = ("train", *TEST_SPLITS), sorted(os.listdir(folder)) if folder.is_dir() else []
    if any(entry.is_dir() for split in splits for entry in folder.glob(f"{split}/[!.]*")):
        kind = "imagefolder"
        groups = {folder: {name: [escape(f"{folder / name}") + "/**"] for name in splits if name in names}}
    else:
        kind, groups = "parquet", {}  # folder of one configuration -> split -> files
        for file in sorted(folder.rglob("*.parquet")):
            is_in_split = file.parent.name in splits
            split = file.parent.name if is_in_split else re.split(r"[-_.]", file.name)[0]
            if split in splits:
                group = groups.setdefault(file.parents[1] if is_in_split else file.parent, {})
                group.setdefault(split, []).append(escape(str(file)))
    if not groups:
        holds = f"holds {', '.join(names[:5]) or 'nothing'}" if folder.is_dir() else "is not a folder"
        problem = holds if folder.exists() else "does not exist"
        raise DataError(f"data.path: {folder} {problem}; expected {_LAYOUT}")
    if len(groups) > 1:
        raise DataError(f"data.path: several data sets in {folder}: give one of {', '.join(map(str, groups))}")
    files = groups.popitem()[1]
    try:
        # One by one: together, the second split would be read with the class numbers of the first.
        return {split: load_dataset(kind, data_files={split: files[split]}, split=split) for split in files}
    except Exception as error:  # of datasets, around one of the reader's own, which says more
        reason = str(error.__cause__ or error).splitlines()[0]
        raise DataError(f"{folder}: cannot be read as {kind} ({reason}); expected {_LAYOUT}") from error


def _read_digits() -> dict[str, Dataset]:
    from datasets import ClassLabel, Dataset, Features, Image

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("digits needs scikit-learn: pip install scikit-learn") from error
    values, digits = load_digits(return_X_y=True)
    images = list((values.reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8))  # from 0..16
    is_test = np.zeros(len(digits), dtype=bool)
    for digit in range(10):
        is_test[np.flatnonzero(digits == digit)[-DIGITS_TEST_PER_CLASS:]] = True
    features = Features({"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])})
    # Both splits have all rows, so that row numbers are those of the data set; label -1 leaves a row out.
    labels = {"train": np.where(is_test, -1, digits), "test": np.where(is_test, digits, -1)}
    return {split: Dataset.from_dict({"image": images, "label": labels[split]}, features=features) for split in labels}
