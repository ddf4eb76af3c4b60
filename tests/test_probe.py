"""The linear probe: what it reaches on features whose answer is known, and what it must not look at."""

import pytest
import timm
import torch
from torch import Tensor

import vitinit.resnet_cifar  # noqa: F401 (registers its names)
from vitinit import probe
from vitinit.augment import normalize
from vitinit.probe import extract_features, linear_probe

CLASSES = 5
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """A team of threads would only wait here, and for long where something else is running."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw_clusters(n: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Features (n, 8) around one of five corners, and the corner's number."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return 4.0 * torch.eye(CLASSES, 8)[labels] + 0.3 * torch.randn(n, 8, generator=generator), labels


def draw_noise(n: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 8, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def test_separable_features_are_read_off_without_error():
    assert linear_probe(*draw_clusters(100, seed=1), *draw_clusters(300, seed=2), num_classes=CLASSES) == 1.0


def test_random_labels_are_read_off_at_chance():
    accuracy = linear_probe(*draw_noise(500, seed=1), *draw_noise(2000, seed=2), num_classes=CLASSES)
    assert accuracy == pytest.approx(1 / CLASSES, abs=0.04)


def test_test_labels_change_the_score_but_not_the_predictions():
    (x, y), (x_test, y_test) = draw_noise(200, seed=1), draw_noise(300, seed=2)
    # Against "all are of class c" the score is the part that is predicted as c: of one set of predictions, these add
    # up to one. A probe that chose its penalty by the test labels would predict anew for every c, and add up to more.
    parts = [linear_probe(x, y, x_test, torch.full_like(y_test, c), num_classes=CLASSES) for c in range(CLASSES)]
    assert sum(parts) == pytest.approx(1.0, abs=1e-12)
    assert min(parts) > 0


def test_a_test_image_is_classified_alike_in_any_company():
    x, y = draw_clusters(100, seed=1)
    x_test, y_test = draw_clusters(50, seed=2)
    outliers = torch.cat([x_test, torch.full((50, 8), 1e4)])
    nobody = torch.cat([y_test, torch.full((50,), -1)])
    assert linear_probe(x, y, outliers, nobody, num_classes=CLASSES) == 0.5


@pytest.mark.parametrize("penalties", [(100.0, 1e-3), (1e-3, 100.0)])
def test_the_penalty_that_holds_on_the_chosen_fifth_is_used(monkeypatch, penalties):
    x, y = draw_clusters(300, seed=1)
    common = (y == 0) | (torch.arange(300) < 60)  # more than half are of class 0
    sets = x[common], y[common], *draw_clusters(100, seed=2)
    monkeypatch.setattr(probe, "PENALTIES", (100.0,))  # leaves the bias alone, which knows the commonest class
    assert linear_probe(*sets, num_classes=CLASSES) < 0.5
    monkeypatch.setattr(probe, "PENALTIES", penalties)
    assert linear_probe(*sets, num_classes=CLASSES) == 1.0


def test_units_offsets_and_constant_features_do_not_matter():
    (x, y), (x_test, y_test) = draw_clusters(100, seed=1), draw_clusters(100, seed=2)

    def change_units(x):
        return torch.cat([x * torch.logspace(-3, 3, 8) + 100, torch.full((len(x), 2), 7.0)], dim=1)

    assert linear_probe(change_units(x), y, change_units(x_test), y_test, num_classes=CLASSES) == 1.0


@pytest.fixture
def network():
    return timm.create_model("resnet8_cifar", drop_rate=0.5, drop_path_rate=0.5)


@pytest.fixture
def images():
    return torch.randint(256, (12, 3, 16, 16), dtype=torch.uint8)


@pytest.mark.parametrize("training", [True, False])
def test_features_are_those_of_evaluation_and_the_mode_is_put_back(network, images, training):
    network.train(training)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    got = extract_features(network, images, **IMAGENET)
    assert network.training is training
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    with torch.no_grad():
        maps = network.eval().forward_features(normalize(images, **IMAGENET))
    assert got.shape == (12, network.num_features)
    torch.testing.assert_close(got, maps.mean(dim=(2, 3)))
    assert not got.requires_grad


def test_features_do_not_depend_on_the_batch_size(network, images):
    whole = extract_features(network, images, **IMAGENET)
    torch.testing.assert_close(extract_features(network, images, **IMAGENET, batch_size=5), whole)
