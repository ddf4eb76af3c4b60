"""The strict recipe reader: what it accepts, and the message for everything that it does not."""

import dataclasses
import textwrap

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vitinit.errors import RecipeError
from vitinit.recipe import (
    AugmentConfig,
    ConvertConfig,
    DataConfig,
    Recipe,
    SourceConfig,
    TrainConfig,
    dump_recipe,
    list_recipes,
    load_recipe,
    recipe_from_dict,
    recipe_to_dict,
)

MINIMAL = {"source": {"model": "resnet20_cifar"}, "data": {"name": "digits"}}
TEXT = "source:\n  model: resnet20_cifar\ndata:\n  name: digits\n"


@pytest.fixture
def read(tmp_path):
    """Writes lines below a minimal recipe's and loads the file."""

    def read(text, *overrides, base=TEXT):
        path = tmp_path / "trial.yaml"
        path.write_text(base + textwrap.dedent(text), encoding="utf-8")
        return load_recipe(path, overrides=overrides)

    return read


def refusal(action, *args, **kwargs):
    with pytest.raises(RecipeError) as caught:
        action(*args, **kwargs)
    return str(caught.value)


# Accepted


def test_minimal_recipe_has_the_defaults_and_the_name_of_its_file(read):
    recipe = read("")
    assert recipe == Recipe(name="trial", source=SourceConfig(model="resnet20_cifar"), data=DataConfig(name="digits"))
    assert (recipe.convert, recipe.augment, recipe.train) == (ConvertConfig(), AugmentConfig(), TrainConfig())


def test_every_key_is_read_with_its_type(read):
    recipe = read(
        """\
        convert: {stages: [layer2, layer3], sharpness: 5e-1, patch: 2, values: factorized, rank: 8,
                  weights: free, content_dim: 16}
        augment:
          hflip: true
          mixup: 1
        train:
          lr: 1e-3
          weight_decay: .05
          warmup_epochs: 0.5
          clip_grad: null
          ema_decay: 0.99
          precision: no
          batch_size: +32
        """,
        base=TEXT.replace("digits", "digits\n  img_size: [24, 32]\n  fraction: 1e-1"),
    )
    assert recipe.convert == ConvertConfig(
        stages=("layer2", "layer3"),
        sharpness=0.5,
        patch=2,
        values="factorized",
        rank=8,
        weights="free",
        content_dim=16,
    )
    assert recipe.augment == AugmentConfig(hflip=True, mixup=1.0)
    assert isinstance(recipe.augment.mixup, float)
    assert recipe.train == TrainConfig(
        lr=0.001,
        weight_decay=0.05,
        warmup_epochs=0.5,
        clip_grad=None,
        ema_decay=0.99,
        precision="no",
        batch_size=32,
    )
    assert recipe.data.img_size == (24, 32)
    assert recipe.data.fraction == 0.1


@pytest.mark.parametrize("written", ["1e-3", "1E-3", "1.0e-3", "0.001", ".001", "+1e-3", "1.e-3"])
def test_a_number_may_be_written_in_any_usual_way(read, written):
    assert read(f"train: {{lr: {written}}}").train.lr == 0.001


def test_an_empty_section_has_the_defaults(read):
    assert read("train:\n  # lr: 1e-3\n").train == TrainConfig()


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert load_recipe(tmp_path / "a.yaml").data.name == "digits"


# Refused: keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian: {lr: 1}", "trian: unknown key; did you mean train?"),
        ("train: {lrr: 1}", "train.lrr: unknown key; did you mean train.lr?"),
        (
            "train: {images_per_clas: 1}",
            "train.images_per_clas: unknown key; expected one of epochs, batch_size",
        ),
        ("batch_size: 8", "batch_size: unknown key; did you mean train.batch_size?"),
        ("lr: 1e-3", "lr: unknown key; did you mean source.lr or train.lr?"),
        ("train: {seed: 1}", "train.seed: unknown key; did you mean seed?"),
        ("train: {<<: {lr: 1}}", "train.<<: unknown key"),
        ("train: {1: 2}", "train.1: unknown key"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(read, text, message):
    assert message in refusal(read, text)


def test_a_key_given_twice_is_refused_with_both_lines(read):
    message = refusal(read, "train:\n  lr: 1\n  epochs: 3\n  lr: 2\n")
    assert "line 8: train.lr is given twice, first in line 6" in message
    assert "line 6: data is given twice, first in line 3" in refusal(read, "seed: 1\ndata: {name: b}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {name: a}", "source.model: missing"),
        ("source: {model: a}", "data.name: missing"),
        ("source: {model: a}\ndata: {path: b}", "data.name: missing"),
        ("", "source.model and data.name at least), got nothing"),
        ("# nothing\n", "got nothing"),
        ("- a\n- b\n", "expected keys and values (source.model and data.name at least), got a list"),
        ("seed", "got the text 'seed'"),
        (
            "source: resnet\ndata: {name: a}",
            "source: expected a section of keys and values, got the text 'resnet'",
        ),
        ("source: [a]\ndata: {name: a}", "source: expected a section of keys and values, got a list"),
    ],
)
def test_a_missing_or_misplaced_section_is_refused(read, text, message):
    full = refusal(read, text, base="")
    assert message in full
    assert "trial.yaml: " in full


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n\tlr: 1\n",
            "line 6: not a valid recipe: found character '\\t' that cannot start any token",
        ),
        ("train: [1\n", "line 6: not a valid recipe"),
        ("seed: 1\n---\nseed: 2\n", "line 6: not a valid recipe"),
        ("train: &a {lr: 1}\naugment: *a\n", "line 6: not a valid recipe: an alias (*name) is not allowed"),
        (
            "seed: !!python/object:os.system x\n",
            "line 5: not a valid recipe: could not determine a constructor",
        ),
        ("? [a]\n: 1\n", "line 5: expected a word as key"),
        ("seed: \x07\n", "not valid YAML"),
        ("seed: " + "9" * 5000, "not valid YAML"),
        ("seed: " + "[" * 5000, "not valid YAML"),
    ],
)
def test_text_that_is_no_yaml_is_refused_with_its_line(read, text, message):
    assert message in refusal(read, text)


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"name: \xff\xfe\n")
    assert "a.yaml: 'utf-8' codec" in refusal(load_recipe, tmp_path / "a.yaml")
    (tmp_path / "recipes").mkdir()
    assert "no recipe" in refusal(load_recipe, tmp_path / "recipes")


# Refused: values


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.lr=fast", "train.lr: expected a number above 0, got the text 'fast'"),
        ("train.lr='1e-3'", "train.lr: expected a number above 0, got the text '1e-3'"),
        ("train.lr=nan", "train.lr: expected a number above 0, got the text 'nan'"),
        ("train.lr=.nan", "got the text '.nan'"),
        ("train.lr=!!float nan", "train.lr: expected a number above 0, got nan"),
        ("train.lr=.inf", "got the text '.inf'"),
        ("train.lr=1e999", "train.lr: expected a number above 0, got inf"),
        ("train.lr=true", "train.lr: expected a number above 0, got true"),
        ("train.lr=", "train.lr: expected a number above 0, got null"),
        ("train.lr=[1]", "train.lr: expected a number above 0, got a list, [1]"),
        ("train.warmup_epochs=12:30", "expected a number of at least 0, got the text '12:30'"),
        ("train.epochs=1.5", "train.epochs: expected a whole number of at least 0, got 1.5"),
        ("train.epochs=1e1", "train.epochs: expected a whole number of at least 0, got 10.0"),
        ("train.epochs=010", "train.epochs: expected a whole number of at least 0, got the text '010'"),
        ("train.epochs=0x10", "got the text '0x10'"),
        ("train.epochs=1_000", "got the text '1_000'"),
        ("train.epochs=true", "train.epochs: expected a whole number of at least 0, got true"),
        ("augment.hflip=1", "augment.hflip: expected true or false, got 1"),
        ("augment.hflip=0", "augment.hflip: expected true or false, got 0"),
        ("augment.hflip=yes", "augment.hflip: expected true or false, got the text 'yes'"),
        ("augment.hflip='true'", "augment.hflip: expected true or false, got the text 'true'"),
        ("compare_random=off", "compare_random: expected true or false, got the text 'off'"),
        ("init=no", "init: expected construction or random, got the text 'no'"),
        ("init=false", "init: expected construction or random, got false"),
        ("train.precision=false", "train.precision: expected no or bf16 or fp16, got false"),
        ("train.precision=null", "train.precision: expected no or bf16 or fp16, got null"),
        ("name=12", "name: expected text, got 12"),
        ("name=2020-01-01", None),
        ("name=!!timestamp 2020-01-01", "name: expected text, got datetime.date(2020, 1, 1)"),
        ("name=no", None),
        ("source.weights=5", "source.weights: expected text or null, got 5"),
        ("convert.stages=layer3", "expected a whole number of at least 1 or a list of text or null"),
        ("convert.stages=[layer3, 2]", "got a list, ['layer3', 2]"),
        ("convert.patch=auto", None),
        ("convert.patch=0", "convert.patch: expected auto or a whole number of at least 1, got 0"),
        ("data.img_size=[32]", "expected a whole number of at least 1 or a list of 2 times a whole number"),
        ("data.img_size=[32, 0]", "got a list, [32, 0]"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_key_and_expectation(read, setting, message):
    if message is None:
        read("", setting)
    else:
        assert message in refusal(read, "", setting)


OUTSIDE = {
    "seed": [-1, 2**32],
    "source.weights_classes": [0],
    "source.epochs": [-1],
    "source.lr": [0],
    "convert.stages": [0],
    "convert.sharpness": [0, 1, 1.5, -0.1],
    "convert.alpha": [0],
    "convert.rank": [0],
    "convert.content_dim": [-1],
    "data.img_size": [0],
    "data.images_per_class": [0],
    "data.fraction": [0, 1.01],
    "data.holdout": [-0.1, 1],
    "augment.crop_padding": [-1],
    "augment.mixup": [-1],
    "augment.cutmix": [-1],
    "augment.smoothing": [-0.1, 1],
    "train.epochs": [-1],
    "train.batch_size": [0],
    "train.lr": [0, -1],
    "train.momentum": [1],
    "train.weight_decay": [-1],
    "train.warmup_epochs": [-1],
    "train.min_lr": [-1],
    "train.clip_grad": [0],
    "train.ema_decay": [0, 1],
    "train.layer_decay": [0, 1.1],
    "train.position_lr_scale": [-1],
    "train.drop_path": [1],
    "train.eval_every": [0],
    "train.save_every": [0],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in OUTSIDE.items() for value in values])
def test_a_value_out_of_range_is_refused(read, key, value):
    message = refusal(read, "", f"{key}={value}")
    assert f"{key}: expected " in message
    assert f"got {value}" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["convert.values=factorized"], "set convert.weights: free"),
        (["convert.rank=4"], "convert.rank: only for"),
        (["data.images_per_class=1", "data.fraction=0.5"], "give only one"),
        (["convert.sharpness=0.9", "convert.alpha=30"], "two names for one setting, give only one"),
        (["source.model=train:resnet8_cifar"], "source.epochs: a train: source needs at least 1 epoch"),
        (["source.epochs=3"], "only a train: source is trained"),
        (["source.model=train:a", "source.epochs=1", "source.weights=b.pth"], "starts from random weights"),
        (["train.min_lr=1"], "train.min_lr: expected at most train.lr"),
        (["convert.stages=2", "convert.max_grid=16"], "convert.stages, convert.max_grid: give only one"),
        (["init=random", "compare_random=true"], "compare_random: with init: random both would be the same"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(read, settings, message):
    assert message in refusal(read, "", *settings)


def test_a_recipe_made_in_python_is_checked_too():
    recipe = recipe_from_dict(MINIMAL)
    changed = dataclasses.replace(recipe, train=TrainConfig(lr=1, clip_grad=None))
    assert isinstance(changed.train.lr, float)
    message = refusal(dataclasses.replace, recipe, train=TrainConfig(lr=-1.0))
    assert message == "train.lr: expected a number above 0, got -1.0"
    assert "init: expected construction" in refusal(dataclasses.replace, recipe, init="zeros")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.seed = 1
    assert "recipe: expected a section" in refusal(recipe_from_dict, [1])


# Overrides


def test_overrides_replace_and_add_keys(read):
    recipe = read(
        "train: {lr: 1}\naugment:\n",
        "train.lr=1e-3",
        "train.lr=2e-3",
        "init=random",
        "augment.hflip=true",
        "convert.stages=[layer3]",
        "source.weights=a=b.pth",
        "name='12'",
        "source.model=local-dir:/a/b",
    )
    assert recipe.train.lr == 2e-3
    assert recipe.init == "random"
    assert recipe.augment.hflip is True
    assert recipe.convert.stages == ("layer3",)
    assert recipe.source.weights == "a=b.pth"
    assert recipe.name == "12"
    assert recipe.source.model == "local-dir:/a/b"


def test_an_override_takes_the_place_of_the_rival_setting_in_the_file(read):
    recipe = read("convert: {sharpness: 0.5}", "convert.alpha=30", "data.images_per_class=5")
    assert recipe.convert.alpha == 30
    recipe = read("convert: {alpha: 30}", "convert.sharpness=0.5")
    assert recipe.convert == ConvertConfig(sharpness=0.5)
    assert read("convert: {stages: 2}", "convert.max_grid=8").convert == ConvertConfig(max_grid=8)
    base = TEXT + "  fraction: 0.1\n"
    assert read("", "data.images_per_class=5", base=base).data.fraction is None
    assert read("", "data.fraction=0.5", base=base).data.fraction == 0.5
    assert read("", "data.images_per_class=null", base=base).data.fraction == 0.1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "override 'train.lr': expected key=value, as in train.lr=1e-3"),
        ("=3", "override '=3': expected key=value"),
        ("train={lr: 1}", "expected key=value"),
        ("seed.x=1", "override 'seed.x=1': seed is a value, not a section"),
        ("convert.stages=[a", "override 'convert.stages=[a': line 1: not a valid recipe"),
        ("trian.lr=1", "trian: unknown key; did you mean train?"),
        ("lr=1", "did you mean source.lr or train.lr?"),
        ("train=3", "train: expected a section of keys and values, got 3"),
        ("train.lr.x=1", "train.lr: expected a number above 0, got a section"),
    ],
)
def test_an_override_that_is_not_understood_is_refused(read, override, message):
    assert message in refusal(read, "seed: 1", override)


# Looking up, writing


def test_recipes_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "zz-digits-low.yaml").write_text(TEXT)
    assert "zz-digits-low" in list_recipes()
    assert load_recipe("zz-digits-low").name == "zz-digits-low"
    assert load_recipe("zz-digits-low.yaml") == load_recipe("recipes/zz-digits-low.yaml")
    message = refusal(load_recipe, "zz-digit-low")
    assert "no recipe 'zz-digit-low'; did you mean zz-digits-low?; recipes: " in message


def test_a_folder_of_ones_own(tmp_path):
    assert list_recipes(folder=tmp_path) == []
    assert refusal(load_recipe, "a", folder=tmp_path) == "no recipe 'a'; recipes: none"
    (tmp_path / "a.yaml").write_text(TEXT + "name: other\n")
    assert list_recipes(folder=tmp_path) == ["a"]
    assert load_recipe("a", folder=tmp_path).name == "other"


@pytest.mark.parametrize("name", list_recipes())
def test_the_recipes_of_the_checkout_load(name):
    assert load_recipe(name).name


def test_a_recipe_written_is_the_recipe_read(tmp_path):
    recipe = recipe_from_dict(
        {
            **MINIMAL,
            "convert": {"alpha": 30, "stages": ["layer3"]},
            "train": {"lr": 1e-5, "precision": "no", "weight_decay": 1e-20, "min_lr": 1e-7},
        }
    )
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    (tmp_path / "out.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "out.yaml") == recipe
    plain = yaml.safe_load(dump_recipe(recipe))  # other readers of YAML see the same words
    assert plain["train"]["precision"] == "no"
    assert list(plain) == [field.name for field in dataclasses.fields(Recipe)]


WORDS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=20),
    st.sampled_from(["no", "1e-3", "010", "12:30", "null", "~", "", "true", "0x1", "1_0", ".inf", "<<", "=", "- a"]),
)


@given(
    words=st.lists(WORDS, min_size=1, max_size=3),
    lr=st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False),
)
def test_any_text_and_number_survives_writing_and_reading(tmp_path_factory, words, lr):
    recipe = Recipe(
        name=words[0],
        source=SourceConfig(model="a", weights=words[-1]),
        data=DataConfig(name=words[0]),
        convert=ConvertConfig(stages=tuple(words)),
        train=TrainConfig(lr=lr),
    )
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
