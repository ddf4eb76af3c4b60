"""Subsets, splits and decoding, on digits, on small drawn data sets, and on the real ones where they are."""

import ast
import io
import json
import os
import sys
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image

import vitinit.data
from vitinit.data import load_splits
from vitinit.errors import DataError

CLASSES = ("ant", "bee", "cat")
REAL_DATA = Path(os.environ.get("VITINIT_DATA") or Path(__file__).parents[1].parent / "shared" / "data")


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _apart_from_the_machine(monkeypatch, hub_cache):
    """Nothing is cached in the home folder, nothing is found by environment, no network is tried."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", hub_cache)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub_cache))
    monkeypatch.delenv("VITINIT_DATA", raising=False)


@pytest.fixture
def real(request):
    """Folder of a real data set."""
    folder = REAL_DATA / request.param
    if not folder.is_dir():
        pytest.skip(f"{request.param} is not here: neither ../shared/data beside the checkout nor $VITINIT_DATA")
    return folder


def load(name="drawn", **settings):
    return load_splits(name, **{"img_size": 8, "log": lambda _: None, **settings})


def picture(label, number, *, size=(10, 10), mode="RGB"):
    """One colour all over that names the class and the row: it survives any scaling."""
    return Image.new("RGB", size, (40 * label, number, 255)).convert(mode)


def encode(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def write_parquet(file, images, labels, *, names=CLASSES, column="label", **more):
    """A parquet file as the hub has them; images are PIL images or encoded bytes, `more` further columns."""
    items = [
        {"bytes": item if isinstance(item, bytes) else encode(item), "path": f"{i}.png"}
        for i, item in enumerate(images)
    ]
    features = {"image": datasets.Image(), column: datasets.ClassLabel(names=list(names))}
    columns = {"image": items, column: labels}
    for name, (kind, values) in more.items():
        features[name], columns[name] = kind, values
    file.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(file)


@pytest.fixture
def parquet(tmp_path):
    """30 training images, the classes by turns, and 6 test images; row i is picture(i % 3, i)."""
    for split, count in (("train", 30), ("test", 6)):
        labels = [i % 3 for i in range(count)]
        pictures = [picture(label, i) for i, label in enumerate(labels)]
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", pictures, labels)
    return tmp_path


@pytest.fixture
def folders(tmp_path):
    """train/CLASS/NUMBER.png with 5 images a class, val/CLASS/NUMBER.png with 2."""
    for split, count in (("train", 5), ("val", 2)):
        for label, name in enumerate(CLASSES):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                picture(label, number).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


def rows(images):
    return set(images.indices.tolist())


def names(images):
    """(class, number) as the colours of the drawn pictures say."""
    return {(int(p[0, 0, 0]) // 40, int(p[1, 0, 0])) for p in images.images}


# digits


def test_digits_without_settings_are_all_rows():
    splits = load("digits")
    assert splits.test.labels.bincount().tolist() == [50] * 10
    assert len(splits.train) + len(splits.test) == 1797 and len(splits.holdout) == 0
    assert not rows(splits.train) & rows(splits.test)
    assert splits.train.classes == tuple("0123456789")


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    values, targets = load_digits(return_X_y=True)
    splits = load("digits")
    for part in (splits.train, splits.test):
        assert part.images.shape[1:] == (3, 8, 8) and part.images.dtype == torch.uint8
        expected = torch.from_numpy(values[part.indices.numpy()] * 255 / 16).round().view(-1, 1, 8, 8)
        assert torch.equal(part.images.double(), expected.expand(-1, 3, -1, -1))
        assert torch.equal(part.labels, torch.from_numpy(targets[part.indices.numpy()]))
    for digit in range(10):
        of_digit = np.flatnonzero(targets == digit).tolist()
        assert rows(splits.test) & set(of_digit) == set(of_digit[-50:])


# Subsets


@pytest.mark.parametrize("holdout", [0.0, 0.1, 0.2, 0.5])
def test_subsets_are_exact_and_nested(parquet, holdout):
    smaller = None
    for k in range(2, 11):
        splits = load(path=parquet, images_per_class=k, holdout=holdout)
        held = max(1, round(k * holdout)) if holdout else 0
        assert splits.train.labels.bincount(minlength=3).tolist() == [k - held] * 3
        assert splits.holdout.labels.bincount(minlength=3).tolist() == [held] * 3
        assert not rows(splits.train) & rows(splits.holdout)
        assert splits.subset["indices"] == sorted(rows(splits.train) | rows(splits.holdout))
        if smaller is not None:
            assert set(smaller.subset["indices"]) < set(splits.subset["indices"])
            assert rows(smaller.train) <= rows(splits.train)
            assert rows(smaller.holdout) <= rows(splits.holdout)
        smaller = splits


def test_the_same_seed_draws_the_same_rows_on_every_machine(parquet):
    """The literal was written when the order was defined: results of old and new versions must stay comparable."""
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    subset = load(path=parquet, images_per_class=3, seed=0).subset
    assert subset == load(path=parquet, images_per_class=3, seed=0).subset
    assert subset["indices"] == [2, 4, 10, 12, 14, 17, 19, 21, 27]
    assert subset["sha256"].startswith("46d9ff0af6f3dad6")
    others = [load(path=parquet, images_per_class=3, seed=seed).subset for seed in (1, 2, 3)]
    assert len({subset["sha256"], *(other["sha256"] for other in others)}) == 4
    assert torch.equal(torch.get_rng_state(), state[0]) and (np.random.get_state()[1] == state[1]).all()


@pytest.mark.parametrize(("fraction", "k"), [(0.1, 1), (0.34, 3), (0.5, 5), (1.0, None)])
def test_a_fraction_is_a_number_per_class(parquet, fraction, k):
    splits = load(path=parquet, fraction=fraction)
    assert splits.train.labels.bincount().tolist() == [k or 10] * 3
    assert splits.subset["images_per_class"] == k and splits.subset["fraction"] == fraction


def test_without_a_size_all_rows_train(parquet):
    splits = load(path=parquet)
    assert splits.subset["indices"] == list(range(30))
    assert splits.test.indices.tolist() == list(range(6))


def test_pixels_labels_and_rows_belong_together(parquet):
    splits = load(path=parquet, images_per_class=5, holdout=0.4)
    for part in (splits.train, splits.holdout, splits.test):
        assert part.images.dtype == torch.uint8 and part.labels.dtype == part.indices.dtype == torch.int64
        assert names(part) == {(row % 3, row) for row in rows(part)}
        assert torch.equal(part.labels, part.indices % 3)
        assert torch.equal(part.indices, part.indices.sort().values)
        assert part.classes == CLASSES and len(part) == len(part.images)
        assert part.to("meta").images.is_meta and part.to("meta").classes == CLASSES


def test_the_record_says_what_was_drawn(parquet):
    splits = load("mine", path=parquet, images_per_class=4, holdout=0.25, seed=7)
    subset = json.loads(json.dumps(splits.subset))
    assert subset == splits.subset
    expected = {
        "dataset": "mine", "found": str(parquet), "split": "train", "test_split": "test", "label": "label",
        "images_per_class": 4, "fraction": None, "holdout": 0.25, "seed": 7, "n_train": 9, "n_holdout": 3,
        "n_test": 6, "skipped": [],
    }  # fmt: skip
    assert {key: subset[key] for key in expected} == expected
    assert set(subset["holdout_indices"]) == rows(splits.holdout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"images_per_class": 2, "fraction": 0.1}, "images_per_class=2 and fraction=0.1"),
        ({"images_per_class": 0}, "images_per_class: expected at least 1, got 0"),
        ({"fraction": 1.5}, "fraction: expected a number above 0 and at most 1, got 1.5"),
        ({"holdout": 1.0}, "holdout: expected a number of at least 0 and below 1, got 1.0"),
        ({"on_corrupt": "ignore"}, "on_corrupt: expected error or skip, got ignore"),
        ({"images_per_class": 125}, "images_per_class=125, but class '8' has 124 .* at most 124"),
        ({"fraction": 0.99}, "fraction=0.99, which is 128 images a class, but class '8' has 124"),
        ({"fraction": 0.001}, "fraction=0.001, which is 0 images a class: expected at least 1"),
        ({"images_per_class": 1, "holdout": 0.1}, "holdout=0.1 takes all of the 1 images of class '0'"),
        ({"label": "digit"}, "data.label: no label column 'digit'; with class names: label, of image, label"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(DataError, match=message):
        load("digits", **settings)


# Label and image columns


def test_several_label_columns_are_a_question(tmp_path):
    coarse = datasets.ClassLabel(names=["insect", "mammal"])
    for split in ("train", "test"):
        pictures = [picture(label, 0) for label in range(3)]
        file = tmp_path / f"{split}.parquet"
        write_parquet(file, pictures, [0, 1, 2], column="fine", coarse=(coarse, [0, 0, 1]))
    with pytest.raises(DataError, match=r"several label columns: fine, coarse; choose one with data\.label"):
        load(path=tmp_path)
    with pytest.raises(DataError, match="no label column 'label'; with class names: fine, coarse, of image, fine"):
        load(path=tmp_path, label="label")
    assert load(path=tmp_path, label="fine").train.labels.tolist() == [0, 1, 2]
    splits = load(path=tmp_path, label="coarse")
    assert splits.train.labels.tolist() == [0, 0, 1] and splits.train.classes == ("insect", "mammal")


def test_a_label_column_without_names_is_refused(tmp_path):
    items = {"image": [{"bytes": encode(picture(0, 0)), "path": None}], "label": [0]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for split in ("train", "test"):
        datasets.Dataset.from_dict(items, features=features).to_parquet(tmp_path / f"{split}.parquet")
    with pytest.raises(DataError, match="no label column; with class names: none, of image, label"):
        load(path=tmp_path)


def test_the_usual_image_column_is_taken_and_others_are_a_question(tmp_path):
    mask = (datasets.Image(), [{"bytes": encode(picture(2, 9)), "path": None}])
    for split in ("train", "test"):
        write_parquet(tmp_path / "a" / f"{split}.parquet", [picture(1, 1)], [1], mask=mask)
        items = {"left": mask[1], "right": mask[1], "label": [0]}
        features = {"left": mask[0], "right": mask[0], "label": datasets.ClassLabel(names=["x"])}
        table = datasets.Dataset.from_dict(items, features=datasets.Features(features))
        (tmp_path / "b").mkdir(exist_ok=True)
        table.to_parquet(tmp_path / "b" / f"{split}.parquet")
    assert names(load(path=tmp_path / "a").train) == {(1, 1)}
    with pytest.raises(DataError, match="expected one image column, or one named image; found left, right"):
        load(path=tmp_path / "b")


def test_class_numbers_of_the_test_split_follow_the_names_of_train(tmp_path):
    write_parquet(tmp_path / "train.parquet", [picture(i, 0) for i in range(3)], [0, 1, 2])
    write_parquet(tmp_path / "test.parquet", [picture(2, 0)], [0], names=CLASSES[::-1])
    assert load(path=tmp_path).test.labels.tolist() == [2]
    write_parquet(tmp_path / "test.parquet", [picture(2, 0)], [0], names=["cow", "ant"])
    with pytest.raises(DataError, match="class 'cow' is in the split test but not in train"):
        load(path=tmp_path)


def test_a_test_split_without_labels_gives_way_to_validation(tmp_path):
    pictures = [picture(i, i) for i in range(3)]
    write_parquet(tmp_path / "train.parquet", pictures, [0, 1, 2])
    write_parquet(tmp_path / "test.parquet", pictures, [-1, -1, -1])
    with pytest.raises(DataError, match="no labels in the split test"):
        load(path=tmp_path)
    write_parquet(tmp_path / "validation.parquet", pictures, [0, -1, 2])
    splits = load(path=tmp_path)
    assert splits.subset["test_split"] == "validation"
    assert splits.test.indices.tolist() == [0, 2] and splits.test.labels.tolist() == [0, 2]


# Where the data are


def test_class_folders(folders):
    (folders / "train" / "bee" / "notes.txt").write_text("not an image")
    (folders / "train" / "bee" / "._1.png").write_bytes(b"left behind by a file manager")
    splits = load(path=folders, images_per_class=5, img_size=10)
    assert splits.train.classes == CLASSES and splits.subset["test_split"] == "val"
    assert names(splits.train) == {(label, number) for label in range(3) for number in range(5)}
    assert torch.equal(splits.test.images[:, 0, 0, 0], 40 * splits.test.labels)


@pytest.mark.parametrize("file", ["{}/0000.parquet", "data/{}-00000-of-00001.parquet", "data/{}/0000.parquet"])
def test_layouts_of_the_hub(tmp_path, file):
    for split in ("train", "test"):
        write_parquet(tmp_path / file.format(split), [picture(1, 2)], [1])
    assert names(load(path=tmp_path).test) == {(1, 2)}


def test_odd_characters_in_a_path(tmp_path):
    for split in ("train", "test"):
        write_parquet(tmp_path / "a[1] b*" / f"{split}.parquet", [picture(1, 2)], [1])
    assert len(load(path=tmp_path / "a[1] b*").train) == 1


def test_path_comes_before_the_environment_and_that_before_the_hub(parquet, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setenv("VITINIT_DATA", str(parquet.parent))
    assert load(parquet.name, log=lines.append).subset["found"] == str(parquet)
    monkeypatch.setenv("VITINIT_DATA", str(tmp_path / "nowhere"))
    assert load("cifar100", path=parquet, log=lines.append).subset["found"] == str(parquet)
    assert lines == [f"{parquet.name}: {parquet}", f"cifar100: {parquet}"]
    with pytest.raises(DataError, match=f"there is no folder {tmp_path}/nowhere/cifar100"):
        load("cifar100", log=lines.append)
    assert lines[-1] == "cifar100: uoft-cs/cifar100 on the Hugging Face hub, or its local cache"


def test_a_data_set_from_the_hub(tmp_path, monkeypatch):
    """main holds no parquet files, the converted branch does, and only the chosen configuration is read."""
    asked = []

    def download(repo, *, repo_type, revision, allow_patterns):
        asked.append((repo, repo_type, revision, allow_patterns))
        (tmp_path / revision).mkdir(parents=True, exist_ok=True)
        return str(tmp_path / revision)

    for config in ("160px", "320px"):
        for split in ("train", "validation"):
            number = int(config[:3]) // 10
            file = tmp_path / "refs/convert/parquet" / config / split / "0000.parquet"
            write_parquet(file, [picture(0, number)], [0])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    splits = load("imagenette")
    assert names(splits.train) == {(0, 32)} and splits.subset["found"] == "hub: frgfm/imagenette"
    assert asked == [
        ("frgfm/imagenette", "dataset", revision, "320px/*.parquet") for revision in ("main", "refs/convert/parquet")
    ]
    with pytest.raises(DataError, match=r"several data sets in .*parquet: give one of .*160px, .*320px"):
        load("somebody/imagenette")


def test_a_hub_out_of_reach_is_one_error_with_the_way_out():
    with pytest.raises(DataError) as caught:
        load("cifar100")
    message = str(caught.value)
    assert "uoft-cs/cifar100 could not be read from the Hugging Face hub (LocalEntryNotFoundError" in message
    assert "hf download uoft-cs/cifar100 --repo-type dataset --local-dir DIR/cifar100" in message
    assert "VITINIT_DATA=DIR, or data.path=DIR/cifar100" in message
    with pytest.raises(DataError, match=r"--revision refs/convert/parquet --include '320px/\*' --local-dir"):
        load("imagenette")


def test_unknown_names_get_a_suggestion():
    with pytest.raises(DataError, match=r"no data set 'cifra100'; did you mean cifar100\? Known: digits, cifar10"):
        load("cifra100")


def test_paths_without_data_are_named(tmp_path):
    layout = r"expected a folder with train-\*\.parquet and test-\*\.parquet .*train/CLASS/\*\.jpg"
    with pytest.raises(DataError, match=rf"data\.path: .*nowhere does not exist; {layout}"):
        load(path=tmp_path / "nowhere")
    with pytest.raises(DataError, match=rf"holds nothing; {layout}"):
        load(path=tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match=rf"holds notes\.txt; {layout}"):
        load(path=tmp_path)
    with pytest.raises(DataError, match=rf"is not a folder; {layout}"):
        load(path=tmp_path / "notes.txt")
    (tmp_path / "train" / "ant").mkdir(parents=True)
    with pytest.raises(DataError, match=rf"cannot be read as imagefolder .*; {layout}"):
        load(path=tmp_path)


def test_a_missing_split_is_named(parquet):
    (parquet / "test-00000-of-00001.parquet").rename(parquet / "train-00001-of-00002.parquet")
    with pytest.raises(DataError, match=r"expected the splits train and test \(or validation\), got train"):
        load(path=parquet)


def test_a_parquet_file_that_is_none_is_named(parquet):
    (parquet / "test-00000-of-00001.parquet").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DataError, match=r"cannot be read as parquet \(.*[Pp]arquet"):
        load(path=parquet)


# Decoding


def with_broken_rows(folder, broken):
    """The parquet fixture's training split with these rows cut off after a few bytes."""
    labels = [i % 3 for i in range(30)]
    noise = np.random.default_rng(0).integers(0, 255, (10, 10, 3), dtype=np.uint8)
    pictures = [
        encode(Image.fromarray(noise))[:100] if i in broken else picture(label, i) for i, label in enumerate(labels)
    ]
    write_parquet(folder / "train-00000-of-00001.parquet", pictures, labels)


def test_an_unreadable_image_is_named(parquet):
    with_broken_rows(parquet, {17})
    with pytest.raises(DataError, match=r"split train, row 17 \(17\.png\): .*set data\.on_corrupt=skip"):
        load(path=parquet)
    with_broken_rows(parquet, set())
    write_parquet(parquet / "test-00000-of-00001.parquet", [picture(0, 0), b""], [0, 1])
    with pytest.raises(DataError, match=r"split test, row 1 \(1\.png\)"):
        load(path=parquet)


def test_unreadable_images_are_replaced_by_the_next_of_their_class(parquet):
    whole = [load(path=parquet, images_per_class=k).subset["indices"] for k in range(1, 11)]
    in_order = [[row for row in whole[-1] if row % 3 == c] for c in range(3)]
    for c in range(3):  # rows of a class in the order of drawing: by the smallest subset that has them
        in_order[c].sort(key=lambda row: sum(row not in subset for subset in whole))
    broken = {in_order[0][1], in_order[0][2], in_order[2][0]}
    with_broken_rows(parquet, broken)
    write_parquet(parquet / "test-00000-of-00001.parquet", [picture(0, 0), b"no image", picture(2, 2)], [0, 1, 2])
    lines = []
    splits = load(path=parquet, images_per_class=3, on_corrupt="skip", log=lines.append)
    expected = [[row for row in drawn if row not in broken][:3] for drawn in in_order]
    assert splits.subset["indices"] == sorted(row for drawn in expected for row in drawn)
    assert names(splits.train) == {(row % 3, row) for row in splits.subset["indices"]}
    assert torch.equal(splits.train.labels, splits.train.indices % 3)
    assert splits.test.indices.tolist() == [0, 2] and names(splits.test) == {(0, 0), (2, 2)}
    skipped = {(entry["split"], entry["row"]) for entry in splits.subset["skipped"]}
    assert skipped == {("train", row) for row in broken} | {("test", 1)}
    assert all(entry["file"] and entry["reason"] for entry in splits.subset["skipped"])
    assert "4 unreadable images skipped: train row" in lines[-1]
    assert json.dumps(splits.subset)


def test_too_few_readable_images_are_an_error_unless_all_are_wanted(parquet):
    with_broken_rows(parquet, {0, 3, 6})
    assert load(path=parquet, images_per_class=7, on_corrupt="skip").train.labels.bincount().tolist() == [7] * 3
    with pytest.raises(DataError, match="Class 'ant' has too few readable images: ask for fewer"):
        load(path=parquet, images_per_class=8, on_corrupt="skip")
    assert load(path=parquet, on_corrupt="skip").train.labels.bincount().tolist() == [7, 10, 10]


def test_unreadable_files_in_class_folders(folders):
    (folders / "train" / "bee" / "3.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"unreadable image in the split train, row 8 \(.*bee/3\.png\)"):
        load(path=folders)
    splits = load(path=folders, images_per_class=4, on_corrupt="skip")
    assert splits.train.labels.bincount().tolist() == [4, 4, 4]
    assert (1, 3) not in names(splits.train)
    assert all(entry["file"].endswith("bee/3.png") for entry in splits.subset["skipped"])


def load_one(folder, item, img_size):
    """One decoded image, uint8 (3, H, W)."""
    for split in ("train", "test"):
        write_parquet(folder / f"{split}.parquet", [item], [0])
    return load(path=folder, img_size=img_size).train.images[0]


@pytest.mark.parametrize(
    ("mode", "format"),
    [("L", "PNG"), ("LA", "PNG"), ("RGBA", "PNG"), ("1", "PNG"), ("CMYK", "JPEG"), ("L", "JPEG")],
)
def test_every_mode_becomes_rgb(tmp_path, mode, format):
    image = Image.new("RGB", (10, 10), (255, 255, 255) if mode == "1" else (90, 90, 90)).convert(mode)
    pixels = load_one(tmp_path, encode(image, format), 10)
    assert pixels.shape == (3, 10, 10)
    assert (pixels.int() - (255 if mode == "1" else 90)).abs().max() <= 2


def test_a_palette_becomes_rgb(tmp_path):
    image = Image.new("P", (10, 10), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    pixels = load_one(tmp_path, encode(image, transparency=bytes([0, 128])), 5)
    assert (pixels == torch.tensor([200, 100, 50]).view(3, 1, 1)).all()


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    values = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    pixels = load_one(tmp_path, encode(Image.fromarray(values)), 16)
    assert torch.equal(pixels, torch.arange(256).view(1, 16, 16).expand(3, -1, -1).to(torch.uint8))


def test_images_stand_upright(tmp_path):
    """Orientation 6: the camera was turned, the rows of the file are columns from right to left."""
    upright = np.zeros((10, 6, 3), dtype=np.uint8)
    upright[:5] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.fromarray(np.rot90(upright).copy())
    pixels = load_one(tmp_path, encode(turned, "JPEG", exif=exif, quality=100), (10, 6))
    assert (pixels.int() - torch.from_numpy(upright).permute(2, 0, 1).int()).abs().max() <= 3


def test_an_image_of_the_right_size_keeps_its_pixels(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (9, 13, 3), dtype=np.uint8)
    pixels = load_one(tmp_path, encode(Image.fromarray(noise)), (9, 13))
    assert torch.equal(pixels, torch.from_numpy(noise).permute(2, 0, 1))


@pytest.mark.parametrize("img_size", [(8, 8), (16, 24), (12, 6), (30, 30)])
def test_other_sizes_are_covered_and_cropped_in_the_centre(tmp_path, img_size):
    """Against a bicubic resize of the shorter side and a centre crop, on a smooth picture of odd proportions."""
    x, y = np.meshgrid(np.linspace(0, 255, 40), np.linspace(0, 255, 20))
    image = Image.fromarray(np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8))
    height, width = img_size
    scale = max(height / 20, width / 40)
    whole = image.resize((round(40 * scale), round(20 * scale)), Image.Resampling.BICUBIC)
    left, top = (whole.width - width) // 2, (whole.height - height) // 2
    expected = torch.from_numpy(np.asarray(whole.crop((left, top, left + width, top + height))).copy())
    pixels = load_one(tmp_path, encode(image), img_size)
    assert pixels.shape == (3, height, width)
    assert (pixels.int() - expected.permute(2, 0, 1).int()).abs().max() <= 8


def test_loading_is_silent_but_for_the_log(parquet, capfd):
    with_broken_rows(parquet, {1})
    capfd.readouterr()
    load(path=parquet, on_corrupt="skip")
    with pytest.raises(DataError):
        load("cifar100")
    load_splits("digits", img_size=8, images_per_class=1)
    out, err = capfd.readouterr()
    assert out == "digits: scikit-learn's own copy\n" and err == ""
    assert not datasets.are_progress_bars_disabled(), "the user's setting must come back"


def test_the_import_is_cheap():
    """Nothing but numpy, torch and the errors on top; what costs a second is imported where it is used."""
    body = ast.parse(Path(vitinit.data.__file__).read_text(encoding="utf-8")).body
    imported = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in body if isinstance(node, ast.ImportFrom)}
    ours = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"numpy", "torch", "vitinit.errors", "vitinit.locate"}


# Real data


@pytest.mark.parametrize("real", ["cifar100"], indirect=True)
def test_cifar100(real):
    with pytest.raises(DataError, match="several label columns: fine_label, coarse_label"):
        load("cifar100", path=real, images_per_class=1)
    splits = load("cifar100", path=real, label="fine_label", img_size=32, images_per_class=10, holdout=0.2)
    assert splits.train.labels.bincount().tolist() == [8] * 100
    assert splits.holdout.labels.bincount().tolist() == [2] * 100
    assert splits.test.labels.bincount().tolist() == [100] * 100
    assert splits.train.classes[:3] == ("apple", "aquarium_fish", "baby")
    source = datasets.load_dataset("parquet", data_files=str(real / "train-*.parquet"), split="train")
    for i in range(0, 800, 97):
        row = source[int(splits.train.indices[i])]
        assert row["fine_label"] == splits.train.labels[i]
        assert (np.asarray(row["img"].convert("RGB")) == splits.train.images[i].permute(1, 2, 0).numpy()).all()


@pytest.mark.parametrize("real", ["imagenette"], indirect=True)
def test_imagenette(real):
    splits = load("imagenette", path=real, img_size=64, images_per_class=5)
    assert splits.train.images.shape == (50, 3, 64, 64) and splits.train.labels.bincount().tolist() == [5] * 10
    assert splits.test.images.shape == (1500, 3, 64, 64) and splits.subset["test_split"] == "validation"
    assert splits.train.classes[0] == "tench"
