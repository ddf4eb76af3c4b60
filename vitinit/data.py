"""Labelled images: exactly k per class for training, a held-out slice of them, and the whole test split.

    splits = load_splits("cifar100", label="fine_label", img_size=32, images_per_class=50, seed=0)

Which rows are drawn depends on (seed, class, row) alone, so a smaller subset is a part of a larger one, and
the same on every machine. Only the rows in use are decoded, once, to uint8.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from vitinit.errors import DataError
from vitinit.locate import TEST_SPLITS, locate_tables

if TYPE_CHECKING:  # imported where it is used: it costs a second
    from datasets import Dataset

_CHUNK = 512  # encoded images in memory at a time


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Decoded images with their labels.

    Attributes:
        images: uint8 (n, 3, H, W), RGB.
        labels: int64 (n,), positions in `classes`.
        classes: Names.
        indices: int64 (n,), ascending row numbers in the split that the images are from (of digits, which has
            no splits: in the whole data set).
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    indices: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str) -> ImageSet:
        """Returns the same set with its tensors on a device."""
        images, labels, indices = (part.to(device) for part in (self.images, self.labels, self.indices))
        return replace(self, images=images, labels=labels, indices=indices)


@dataclass(frozen=True, eq=False)
class LowDataSplits:
    """The images of a run.

    Attributes:
        train: The subset without its held-out slice.
        holdout: The held-out slice, to select models on; may be empty.
        test: The test split.
        subset: Plain values for a JSON file: where the data come from, what was drawn and how. `indices` are
            the sorted rows of train and holdout together, `sha256` hashes these numbers joined by commas.
    """

    train: ImageSet
    holdout: ImageSet
    test: ImageSet
    subset: dict


def load_splits(
    name: str,
    *,
    path: str | os.PathLike | None = None,
    label: str | None = None,
    img_size: int | tuple[int, int],
    images_per_class: int | None = None,
    fraction: float | None = None,
    holdout: float = 0.0,
    seed: int = 0,
    on_corrupt: Literal["error", "skip"] = "error",
    log: Callable[[str], None] = print,
) -> LowDataSplits:
    """Returns a training subset with its held-out slice, and the test split, decoded.

    The data are looked for in `path`, then in the folder `$VITINIT_DATA/<name>`, then on the Hugging Face
    hub. A folder holds parquet files in the hub's layout, or one folder of images a class. `digits` is
    scikit-learn's set of 1,797 grey images of 8x8 pixels; it has no official split, so the last 50 images of
    each class, in the data set's own order, are the test set here.

    Subsets are nested: for one seed, the training images (and the held-out ones) for k images a class are
    among those for k + 1.

    Args:
        name: `digits`, a name in `locate.HUB_SETS`, or any `owner/name` on the hub; with `path`, a name of your own.
        path: A folder with the data.
        label: The label column; needed where there are several.
        img_size: Side in pixels, or (height, width). Images of another size are scaled to cover it (bicubic,
            antialiased) and cropped in the centre. Transparency is dropped.
        images_per_class: k, the size of the subset. With `fraction` absent too: all training images.
        fraction: The same as a part of the training images: k = round(fraction · images / classes). 1 is all.
        holdout: Part of the subset to hold out, in every class and at least one image of each; 0 for none.
        seed: Of the subset.
        on_corrupt: What an unreadable image does: stop, or be replaced by the next one of its class (a test
            image is left out), which is logged and recorded.
        log: Takes one line of text.

    Raises:
        DataError: Data that cannot be found or read, an ambiguous or wrong label column, too few images, an
            unreadable image, or arguments that contradict each other.

    Example:
        >>> splits = load_splits("digits", img_size=16, images_per_class=10)
        >>> splits.train.images.shape
        torch.Size([100, 3, 16, 16])
    """
    _check_arguments(images_per_class, fraction, holdout, on_corrupt)
    size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
    with _quiet():
        tables, found = locate_tables(name, path, log)
        train, test = _choose_splits(tables, label, found)
        order = _order_rows(train, seed)
        k, asked = images_per_class, f"images_per_class={images_per_class}"
        if fraction is not None and fraction < 1:
            k = round(fraction * sum(map(len, order)) / len(order))
            asked = f"fraction={fraction}, which is {k} images a class"
        if k is not None:
            _check_enough(order, k, train.classes, asked)
        subset, skipped = _decode_rows(
            train, [row for rows in order for row in rows[:k]], size=size, on_corrupt=on_corrupt,
            spares=None if k is None else [iter(rows[k:]) for rows in order],
        )  # fmt: skip
        is_held = _hold_out(subset, order, holdout)
        test_rows = np.flatnonzero(test.labels >= 0).tolist()
        test_set, skipped_test = _decode_rows(test, test_rows, size=size, on_corrupt=on_corrupt)
    skipped += skipped_test
    if skipped:
        shown = [f"{entry['split']} row {entry['row']} ({entry['file']})" for entry in skipped[:3]]
        more = ["..."] if len(skipped) > 3 else []
        log(f"{name}: {len(skipped)} unreadable images skipped: {', '.join(shown + more)}")
    kept, held = (
        ImageSet(subset.images[mask], subset.labels[mask], subset.classes, subset.indices[mask])
        for mask in (~is_held, is_held)
    )
    indices = subset.indices.tolist()
    record = {
        "dataset": name, "found": found, "split": train.name, "test_split": test.name, "label": train.label,
        "images_per_class": k, "fraction": fraction, "holdout": holdout, "seed": seed,
        "n_train": len(kept), "n_holdout": len(held), "n_test": len(test_set),
        "sha256": hashlib.sha256(",".join(map(str, indices)).encode()).hexdigest(),
        "indices": indices, "holdout_indices": held.indices.tolist(), "skipped": skipped,
    }  # fmt: skip
    return LowDataSplits(kept, held, test_set, record)


@dataclass(frozen=True, eq=False)
class _Split:
    """A split before decoding."""

    name: str
    images: Dataset  # one column of {"bytes", "path"}
    label: str
    labels: np.ndarray  # positions in classes; -1: a row not to use
    classes: tuple[str, ...]


def _check_arguments(k: int | None, fraction: float | None, holdout: float, on_corrupt: str) -> None:
    if k is not None and fraction is not None:
        raise DataError(f"images_per_class={k} and fraction={fraction} both size the subset: give one")
    for name, value, is_right, expected in (
        ("images_per_class", k, k is None or k >= 1, "at least 1"),
        ("fraction", fraction, fraction is None or 0 < fraction <= 1, "a number above 0 and at most 1"),
        ("holdout", holdout, 0 <= holdout < 1, "a number of at least 0 and below 1"),
        ("on_corrupt", on_corrupt, on_corrupt in ("error", "skip"), "error or skip"),
    ):
        if not is_right:
            raise DataError(f"{name}: expected {expected}, got {value}")


# Which column, which rows


def _choose_splits(tables: dict[str, Dataset], label: str | None, found: str) -> tuple[_Split, _Split]:
    candidates = [name for name in TEST_SPLITS if name in tables]
    if "train" not in tables or not candidates:
        raise DataError(f"{found}: expected the splits train and test (or validation), got {', '.join(tables)}")
    train = _open_split("train", tables["train"], label)
    for name in candidates:
        test = _open_split(name, tables[name], label)
        unknown = sorted(set(test.classes) - set(train.classes))
        if unknown:
            raise DataError(f"{found}: class {unknown[0]!r} is in the split {name} but not in train")
        if test.labels.max(initial=-1) >= 0:  # a challenge keeps the labels of its test split to itself
            places = np.array([*map(train.classes.index, test.classes), -1])
            return train, replace(test, labels=places[test.labels], classes=train.classes)
    raise DataError(f"{found}: no labels in the split {' or '.join(candidates)}")


def _open_split(name: str, table: Dataset, label: str | None) -> _Split:
    from datasets import ClassLabel, Image

    features = table.features
    labels = [column for column, kind in features.items() if isinstance(kind, ClassLabel)]
    images = [column for column, kind in features.items() if isinstance(kind, Image)]
    if not labels or (label is not None and label not in labels):
        wanted = "no label column" if label is None else f"data.label: no label column {label!r}"
        raise DataError(f"{wanted}; with class names: {', '.join(labels) or 'none'}, of {', '.join(features)}")
    if label is None and len(labels) > 1:
        raise DataError(f"several label columns: {', '.join(labels)}; choose one with data.label")
    usual = [column for column in ("image", "img") if column in images] or images
    if not usual or (len(images) > 1 and usual == images):
        raise DataError(f"expected one image column, or one named image; found {', '.join(images) or 'none'}")
    label = label or labels[0]
    encoded = table.select_columns([usual[0]]).cast_column(usual[0], Image(decode=False))
    values = table.data.column(label).fill_null(-1).to_numpy()
    return _Split(name, encoded, label, values, tuple(features[label].names))


def _order_rows(split: _Split, seed: int) -> list[list[int]]:
    """Rows of each class in the order in which subsets take them: that of a hash, the same everywhere."""

    def rank(row: int) -> bytes:
        return hashlib.sha256(f"{seed}:{split.labels[row]}:{row}".encode()).digest()

    classes = range(len(split.classes))
    return [sorted(np.flatnonzero(split.labels == place).tolist(), key=rank) for place in classes]


def _check_enough(order: list[list[int]], k: int, classes: tuple[str, ...], asked: str) -> None:
    count, name = min((len(rows), name) for rows, name in zip(order, classes, strict=True))
    if k < 1:
        raise DataError(f"{asked}: expected at least 1 image a class")
    if count < k:
        raise DataError(f"{asked}, but class {name!r} has {count} training images: ask for at most {count}")


def _hold_out(subset: ImageSet, order: list[list[int]], holdout: float) -> Tensor:
    """Which images of the subset are held out, a bool (n,).

    The i-th image of a class is held out where the count max(1, round(holdout · i)) rises, which spreads the
    held-out images along the order and so keeps both parts nested.
    """
    held: set[int] = set()
    used = set(subset.indices.tolist())
    for rows, name in zip(order, subset.classes, strict=True):
        drawn = [row for row in rows if row in used]
        if not drawn or not holdout:
            continue
        counts = [0, *(max(1, round(holdout * n)) for n in range(1, len(drawn) + 1))]
        if counts[-1] == len(drawn):
            raise DataError(
                f"holdout={holdout} takes all of the {len(drawn)} images of class {name!r}, so none are left "
                "to train on: hold out less, or ask for more images per class"
            )
        held.update(row for i, row in enumerate(drawn) if counts[i + 1] > counts[i])
    return torch.tensor([row in held for row in subset.indices.tolist()], dtype=torch.bool)


# Decoding


def _decode_rows(
    split: _Split, rows: list[int], *, size: tuple[int, int], on_corrupt: str,
    spares: list[Iterator[int]] | None = None,
) -> tuple[ImageSet, list[dict]]:  # fmt: skip
    """The images of these rows in ascending order, and a record of the unreadable ones.

    An unreadable image is replaced by the next one of its class in `spares`, or left out without spares.
    """
    rows, skipped, (column,) = sorted(rows), [], split.images.column_names
    images = torch.empty((len(rows), 3, *size), dtype=torch.uint8)
    pixels = images.numpy()

    def fill(slot: int, item: dict) -> str | None:
        try:
            pixels[slot] = _decode_image(item, size)
        except Exception as error:  # a damaged file makes PIL raise nearly anything
            return f"{type(error).__name__}: {error}"
        return None

    pending = list(range(len(rows)))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        while pending:
            slots, pending = pending[:_CHUNK], pending[_CHUNK:]
            items = split.images[[rows[slot] for slot in slots]][column]
            for slot, item, reason in zip(slots, items, pool.map(fill, slots, items), strict=True):
                if reason is None:
                    continue
                row, file, place = rows[slot], item["path"] or "no file name", split.labels[rows[slot]]
                skipped.append({"split": split.name, "row": row, "file": file, "reason": reason})
                advice = "Repair or remove it, or set data.on_corrupt=skip"
                rows[slot] = -1
                if on_corrupt == "skip" and spares is not None:
                    advice = f"Class {split.classes[place]!r} has too few readable images: ask for fewer"
                    rows[slot] = next(spares[place], -1)
                    pending.append(slot)
                if rows[slot] < 0 and (on_corrupt == "error" or spares is not None):
                    raise DataError(
                        f"unreadable image in the split {split.name}, row {row} ({file}): {reason}. {advice}"
                    )
    indices = torch.tensor(rows, dtype=torch.int64)
    if skipped:  # back into ascending order, without the slots that stayed empty
        places = indices.argsort()[(indices < 0).sum() :]
        images, indices = images[places], indices[places]
    labels = torch.from_numpy(split.labels[indices.numpy()].astype(np.int64))
    return ImageSet(images, labels, split.classes, indices), skipped


def _decode_image(item: dict, size: tuple[int, int]) -> np.ndarray:
    """uint8 (3, H, W) of an encoded image, upright, RGB."""
    from PIL import Image, ImageOps

    with Image.open(item["path"] if item["bytes"] is None else BytesIO(item["bytes"])) as file:
        image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I"):  # 16 bits: PIL's own conversion would clip most of them to white
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    image = image.convert("RGB")
    if image.size != size[::-1]:
        image = ImageOps.fit(image, size[::-1], method=Image.Resampling.BICUBIC)  # covers the size, centred
    return np.asarray(image).transpose(2, 0, 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars, log lines and warnings of the libraries that read and decode."""
    import datasets
    import huggingface_hub.utils

    libraries = (datasets, huggingface_hub.utils)
    had_bars = [library for library in libraries if not library.are_progress_bars_disabled()]
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("datasets", "huggingface_hub"))}
    try:
        for library in libraries:
            library.disable_progress_bars()
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)
        for library in had_bars:
            library.enable_progress_bars()
