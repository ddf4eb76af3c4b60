"""Augmentation against slow references, and the same pixels on any number of processes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import functional as TF

from vitinit.augment import Augmentation, epoch_batches, normalize

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
N, CLASSES = 48, 6
SETTINGS = {
    "none": {},
    "crop": {"crop_padding": 3},
    "flip": {"hflip": True},
    "smoothing": {"smoothing": 0.1},
    "mixup": {"mixup": 0.8, "hflip": True},
    "cutmix": {"cutmix": 1.0, "crop_padding": 2},
    "all": {"crop_padding": 3, "hflip": True, "mixup": 0.4, "cutmix": 1.0, "smoothing": 0.1},
}


@pytest.fixture
def images():
    return torch.randint(0, 256, (N, 3, 8, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def labels():
    return torch.arange(N) % CLASSES


def augmentation(**settings):
    return Augmentation(**{**PLAIN, "num_classes": CLASSES, **settings})


def test_an_epoch_visits_every_image_once_in_an_order_of_its_own():
    batches = epoch_batches(20, batch_size=5, seed=3, epoch=0)
    assert batches.shape == (4, 5)
    assert sorted(batches.flatten().tolist()) == list(range(20))
    assert torch.equal(batches, epoch_batches(20, batch_size=5, seed=3, epoch=0))
    for seed, epoch in ((3, 1), (4, 0), (0, 3)):
        assert not torch.equal(batches, epoch_batches(20, batch_size=5, seed=seed, epoch=epoch))


@pytest.mark.parametrize(
    ("n", "batch_size", "shape"), [(23, 5, (4, 5)), (5, 5, (1, 5)), (3, 5, (1, 3)), (1, 1, (1, 1))]
)
def test_the_incomplete_batch_is_dropped_unless_it_is_the_only_one(n, batch_size, shape):
    batches = epoch_batches(n, batch_size=batch_size, seed=0, epoch=0)
    assert batches.shape == shape
    assert len(batches.unique()) == batches.numel()


def test_epoch_batches_refuses_nothing_to_draw_from():
    with pytest.raises(ValueError, match="n=0"):
        epoch_batches(0, batch_size=5, seed=0, epoch=0)


def test_normalize_equals_torchvision(images):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = TF.normalize(images.float() / 255, list(mean), list(std))
    normalized = normalize(images, mean=mean, std=std)
    assert normalized.dtype == torch.float32
    torch.testing.assert_close(normalized, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_processes_see_the_pixels_of_a_single_one(images, labels, name, world):
    augment = augmentation(**SETTINGS[name])
    for step, indices in enumerate(epoch_batches(N, batch_size=16, seed=1, epoch=0)):
        x, y = augment.batch(images, labels, indices, seed=1, step=step)
        parts = [
            augment.batch(images, labels, indices, seed=1, step=step, rank=rank, world=world) for rank in range(world)
        ]
        assert torch.equal(x, torch.cat([part for part, _ in parts]))
        assert torch.equal(y, torch.cat([part for _, part in parts]))
        assert x.shape == (16, 3, 8, 11)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("none", "smoothing")])
def test_a_step_repeats_itself_and_no_other(images, labels, name):
    augment, indices = augmentation(**SETTINGS[name]), torch.arange(16)
    state = torch.get_rng_state()
    x, y = augment.batch(images, labels, indices, seed=0, step=5)
    again = augment.batch(images, labels, indices, seed=0, step=5)
    assert torch.equal(x, again[0]) and torch.equal(y, again[1])
    assert not torch.equal(x, augment.batch(images, labels, indices, seed=0, step=6)[0])
    assert not torch.equal(x, augment.batch(images, labels, indices, seed=1, step=5)[0])
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"


def test_without_settings_only_normalization_happens(images, labels):
    indices = torch.tensor([5, 3, 3, 40])
    x, y = augmentation().batch(images, labels, indices, seed=0, step=0)
    assert torch.equal(x, normalize(images[indices], **PLAIN))
    assert torch.equal(y, labels[indices]) and y.dtype == torch.int64


def test_flip_mirrors_about_half_of_the_images(images, labels):
    x, _ = augmentation(hflip=True).batch(images, labels, torch.arange(N), seed=0, step=0)
    plain = normalize(images, **PLAIN)
    is_same, is_mirrored = ((x == other).flatten(1).all(dim=1) for other in (plain, plain.flip(-1)))
    assert torch.equal(is_same, ~is_mirrored)
    assert 0.25 * N < is_mirrored.sum() < 0.75 * N


@pytest.mark.parametrize("hflip", [False, True])
def test_crops_are_windows_of_the_reflected_image(images, labels, hflip):
    """Every sample is one of the windows that a loop over all offsets cuts out, and all windows occur."""
    pad, (height, width) = 2, images.shape[-2:]
    x = torch.cat([
        augmentation(crop_padding=pad, hflip=hflip).batch(images, labels, torch.arange(N), seed=0, step=step)[0]
        for step in range(8)
    ])  # fmt: skip
    padded = F.pad(normalize(images, **PLAIN), (pad, pad, pad, pad), mode="reflect")
    times_chosen = torch.zeros(len(x))
    seen = set()
    for window in itertools.product(range(2 * pad + 1), range(2 * pad + 1), {False, hflip}):
        top, left, is_mirrored = window
        reference = padded[:, :, top : top + height, left : left + width]
        reference = (reference.flip(-1) if is_mirrored else reference).repeat(8, 1, 1, 1)
        is_chosen = (x == reference).flatten(1).all(dim=1)
        times_chosen += is_chosen
        seen |= {window} if is_chosen.any() else set()
    assert (times_chosen == 1).all()
    assert len(seen) == (2 * pad + 1) ** 2 * (2 if hflip else 1)


def test_the_flip_leaves_the_crops_alone(images, labels):
    symmetric = torch.cat([images[..., :5], images[..., :5].flip(-1)], dim=-1)  # mirrors to itself
    crops = Augmentation(**PLAIN, num_classes=CLASSES, crop_padding=3)
    both = Augmentation(**PLAIN, num_classes=CLASSES, crop_padding=3, hflip=True)
    x, _ = crops.batch(symmetric, labels, torch.arange(N), seed=0, step=0)
    flipped, _ = both.batch(symmetric, labels, torch.arange(N), seed=0, step=0)
    is_same, is_mirrored = ((x == other).flatten(1).all(dim=1) for other in (flipped, flipped.flip(-1)))
    assert (is_same | is_mirrored).all() and not is_same.all()


def test_smoothing_is_that_of_cross_entropy(images, labels):
    _, targets = augmentation(smoothing=0.15).batch(images, labels, torch.arange(N), seed=0, step=0)
    logits = torch.randn(N, CLASSES)
    torch.testing.assert_close(F.cross_entropy(logits, targets), F.cross_entropy(logits, labels, label_smoothing=0.15))


@pytest.mark.parametrize("settings", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.5, "cutmix": 0.5}])
def test_targets_weigh_what_is_in_the_picture(settings):
    """Images of one grey value a class: the mean of a mixed image is the mean value under its target."""
    values = 20 * torch.arange(CLASSES)
    labels = torch.arange(N) % CLASSES
    images = values[labels].to(torch.uint8)[:, None, None, None].expand(-1, 3, 9, 7).contiguous()
    for step in range(20):
        x, targets = augmentation(**settings, smoothing=0.0).batch(images, labels, torch.arange(N), seed=0, step=step)
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(N))
        assert (targets >= 0).all()
        torch.testing.assert_close(255 * x.mean(dim=(1, 2, 3)), targets @ values.float(), rtol=1e-4, atol=1e-3)


def test_mixup_and_cutmix_take_turns(images, labels):
    constant = (5 * torch.arange(N)).to(torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8).contiguous()

    def is_cut(step, **settings):
        x, targets = augmentation(**settings).batch(constant, labels, torch.arange(N), seed=0, step=step)
        mixed = (targets > 0).sum(dim=1) > 1
        return bool((x[mixed].std(dim=(2, 3)) > 0).any())

    assert not any(is_cut(step, mixup=1.0) for step in range(20))
    assert sum(is_cut(step, cutmix=1.0) for step in range(20)) > 15  # a box may be empty
    assert 4 < sum(is_cut(step, mixup=1.0, cutmix=1.0) for step in range(20)) < 16


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_partners_are_mixed_as_they_are_augmented(images, kind):
    """With a class for every image the target names the partner; what is mixed are the augmented images."""
    each, indices = torch.arange(N), torch.randperm(N, generator=torch.Generator().manual_seed(1))
    shared = {**PLAIN, "num_classes": N, "crop_padding": 2, "hflip": True}
    x, targets = Augmentation(**shared, **{kind: 1.0}).batch(images, each, indices, seed=0, step=3)
    alone, _ = Augmentation(**shared).batch(images, each, indices, seed=0, step=3)
    position = indices.argsort()  # of an image in the batch
    partners = []
    for i, (picture, target) in enumerate(zip(x, targets, strict=True)):
        weight = target[indices[i]]
        others = [int(place) for place in target.nonzero().flatten() if place != indices[i]]
        partner = position[others[0]] if others else i
        partners.append(int(partner))
        if kind == "mixup":
            torch.testing.assert_close(picture, weight * alone[i] + (1 - weight) * alone[partner])
        else:
            is_other = (picture != alone[i]).any(dim=0)
            assert torch.equal(torch.where(is_other, alone[partner], alone[i]), picture)
            rows, columns = is_other.any(dim=1).nonzero(), is_other.any(dim=0).nonzero()
            if len(rows):
                area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
                torch.testing.assert_close(1 - weight, area / is_other.numel())
    assert sorted(partners) == list(range(N))


@pytest.mark.parametrize(("padding", "message"), [(8, "at most 7"), (30, "8x11 pixels")])
def test_padding_beyond_the_image_is_refused(images, labels, padding, message):
    with pytest.raises(ValueError, match=message):
        augmentation(crop_padding=padding).batch(images, labels, torch.arange(4), seed=0, step=0)


def test_a_batch_that_cannot_be_shared_is_refused(images, labels):
    with pytest.raises(ValueError, match="10 images cannot be shared evenly by 4 processes"):
        augmentation().batch(images, labels, torch.arange(10), seed=0, step=0, world=4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", SETTINGS)
def test_devices_see_the_same_pixels(images, labels, name):
    augment = augmentation(**SETTINGS[name])
    x, y = augment.batch(images, labels, torch.arange(16), seed=0, step=0)
    x_gpu, y_gpu = augment.batch(images.cuda(), labels.cuda(), torch.arange(16), seed=0, step=0)
    assert x_gpu.is_cuda and y_gpu.is_cuda
    torch.testing.assert_close(x_gpu.cpu(), x)
    torch.testing.assert_close(y_gpu.cpu(), y)
