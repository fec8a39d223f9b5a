"""kit/images.py: crops, augmentation and mixing depend on seed, epoch and sample alone."""

import hashlib
import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import normalize

from kit.batches import Sample, WeightedSamples
from kit.image_cache import open_cache
from kit.image_files import EncodedImage, ImageItem
from kit.image_sources import find_images
from kit.images import Box, ImageDataset, Mixing, NormalisedBatches, centre_box, random_box, resized_crop
from photos import TRAINING, make_pets, photo, seen


def test_a_crop_equals_pillows_resize_of_the_box():
    picture = photo(300, 200)
    for box in (Box(0, 0, 200, 300), Box(13, 40, 150, 200), Box(100, 250, 20, 30)):
        for name, method in (("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)):
            corners = (box.left, box.top, box.left + box.width, box.top + box.height)
            expected = np.asarray(picture.crop(corners).resize((64, 64), method))
            ours = resized_crop(np.array(picture), (200, 300), box, 64, name).permute(1, 2, 0).numpy()
            assert np.abs(ours.astype(int) - expected).max() <= 1, (box, name)  # bicubic may round one level apart


def test_evaluation_sees_the_centre_that_resize_and_centre_crop_see():
    from torchvision.transforms import CenterCrop, Resize

    for width, height in ((300, 200), (200, 300), (257, 255)):
        picture = photo(width, height)
        expected = np.asarray(CenterCrop(56)(Resize(64)(picture))).astype(int)
        ours = resized_crop(np.array(picture), (height, width), centre_box(height, width, 56 / 64), 56)
        assert np.abs(ours.permute(1, 2, 0).numpy() - expected).mean() < 1.5


def test_a_large_photo_is_decoded_small_and_looks_the_same(tmp_path, monkeypatch):
    photo(2000, 1500).save(tmp_path / "big_1.jpg", quality=95)
    dataset = ImageDataset([ImageItem("big_1.jpg", 0, str(tmp_path / "big_1.jpg"))], 200)
    shrinks, pixels_of = [], EncodedImage.pixels
    monkeypatch.setattr(EncodedImage, "pixels", lambda self, shrink: shrinks.append(shrink) or pixels_of(self, shrink))
    small = dataset[0]["image"].int()
    assert shrinks == [4], "the box is 1312 pixels wide: a quarter is still more than 200, an eighth is not"
    assert pixels_of(EncodedImage((tmp_path / "big_1.jpg").read_bytes(), ""), 4).shape == (375, 500, 3)
    monkeypatch.setattr(EncodedImage, "pixels", lambda self, shrink: pixels_of(self))
    assert (small - dataset[0]["image"].int()).abs().float().mean() < 1.5


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (6000, 20), (2, 2)])
def test_one_pixel_sides_and_panoramas_can_be_used(tmp_path, size):
    photo(*size).save(tmp_path / "a_1.png")
    photo(*size).save(tmp_path / "a_2.jpg")
    items = [ImageItem(name, 0, str(tmp_path / name)) for name in ("a_1.png", "a_2.jpg")]
    for training in ({}, TRAINING):
        for index in (0, 1):
            for epoch in range(3):
                sample = seen(ImageDataset(items, 48, **training), index, epoch)
                assert sample["image"].shape == (3, 48, 48)


def test_a_box_of_less_than_a_pixel_of_a_smaller_copy_is_one_pixel():
    pixels = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    for place, kept in ((110, 1), (399, 3)):
        crop = resized_crop(pixels, (400, 400), Box(place, place, 1, 1), 2)
        assert np.array_equal(crop.permute(1, 2, 0), np.broadcast_to(pixels[kept, kept], (2, 2, 3)))


def test_augmentation_depends_on_seed_epoch_and_sample_alone(tmp_path):  # report 33
    splits = find_images(data_dir=str(make_pets(tmp_path, count=8)))
    dataset = WeightedSamples(ImageDataset(splits.train, 24, **TRAINING), seed=5)
    plan = [[Sample(i, epoch, 1.0) for i in range(start, start + 7)] for epoch in (0, 1) for start in (0, 7)]

    def pictures(plan, num_workers: int, dataset=dataset) -> dict:
        """Return {(sample, epoch): digest}, with the global generators in another state each time."""
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(random.SystemRandom().randrange(2**31))
        loader = DataLoader(dataset, batch_sampler=plan, num_workers=num_workers)
        rows = {}
        for samples, batch in zip(plan, loader, strict=True):
            for sample, image in zip(samples, batch["image"], strict=True):
                rows[sample.index, sample.epoch] = hashlib.sha256(image.numpy().tobytes()).hexdigest()
        return rows

    alone = pictures(plan, 0)
    assert len(alone) == 28 == len(set(alone.values())), "two samples or epochs look the same"
    assert pictures(plan, 2) == alone
    one_file = WeightedSamples(ImageDataset(splits.train[:1] * 14, 24, **TRAINING), seed=5)
    assert len(set(pictures(plan, 0, one_file).values())) == 28, "samples share their crops"
    assert pictures(plan[::-1], 1) == alone, "the place in the order matters"
    assert pictures(plan, 0, WeightedSamples(dataset.dataset, seed=6)) != alone
    evaluated = pictures(plan, 0, WeightedSamples(ImageDataset(splits.train, 24), seed=5))
    assert all(evaluated[i, 0] == evaluated[i, 1] for i in range(14)), "evaluation must not be random"


def test_random_crops_have_the_areas_and_aspects_asked_for():
    random.seed(0)
    boxes = [random_box(300, 400, (0.25, 0.64), (0.5, 2.0)) for _ in range(4000)]
    areas = np.array([box.height * box.width / 120_000 for box in boxes])
    aspects = np.array([box.width / box.height for box in boxes])
    assert 0.245 < areas.min() < 0.26 and 0.62 < areas.max() < 0.645
    assert 0.49 < aspects.min() < 0.55 and 1.85 < aspects.max() < 2.05
    assert all(0 <= box.top <= 300 - box.height and 0 <= box.left <= 400 - box.width for box in boxes)
    assert min(box.top for box in boxes) == 0 and max(box.top + box.height for box in boxes) == 300


def test_half_of_the_pictures_are_mirrored(tmp_path):
    photo().save(tmp_path / "a_1.png")
    item = ImageItem("a", 0, str(tmp_path / "a_1.png"))
    dataset = ImageDataset([item], 40, crop_scale=(1, 1), augment=TRAINING["augment"])  # always the same crop
    plain = seen(dataset)["image"]
    images_seen = [seen(dataset, 0, epoch)["image"] for epoch in range(200)]
    same = sum(torch.equal(image, plain) for image in images_seen)
    assert sum(torch.equal(image, plain.flip(-1)) for image in images_seen) == 200 - same
    assert 70 < same < 130


def test_the_dataset_works_in_spawned_workers(tmp_path):  # report 52
    splits = find_images(data_dir=str(make_pets(tmp_path / "data")))
    cache = open_cache(splits, str(tmp_path / "cache"), 24, max_gb=1)
    dataset = WeightedSamples(ImageDataset(splits.train, 24, **TRAINING, cache=cache), seed=0)
    pickle.loads(pickle.dumps((splits, dataset)))
    assert len(pickle.dumps(cache)) < 500, "the pixels travel with the pickle"
    plan = [[Sample(0, 0, 1.0), Sample(1, 0, 0.0)]]
    here = next(iter(DataLoader(dataset, batch_sampler=plan)))
    there = next(iter(DataLoader(dataset, batch_sampler=plan, num_workers=1, multiprocessing_context="spawn")))
    assert torch.equal(here["image"], there["image"]) and there["weight"].tolist() == [1, 0]


# ----------------------------------------------------------------------------------------------------- mixup and cutmix


def test_a_mixture_does_not_depend_on_batch_workers_or_order(tmp_path):
    items = find_images(data_dir=str(make_pets(tmp_path, count=8))).train
    dataset = WeightedSamples(ImageDataset(items, 24, **TRAINING, mixing=Mixing(mixup=0.4, cutmix=1.0)), seed=5)
    samples = [Sample(index, epoch, 1.0) for epoch in (0, 1) for index in range(14)]

    def rows(samples: list[Sample], size: int, num_workers: int) -> dict:
        """Return {(sample, epoch): image, soft label} as the model sees them, cut into batches of `size`."""
        cut = [samples[start : start + size] for start in range(0, len(samples), size)]
        loader = DataLoader(dataset, batch_sampler=cut, num_workers=num_workers)
        batches = NormalisedBatches(loader, (0.5,) * 3, (0.2,) * 3, 2, torch.device("cpu"), label_smoothing=0.1)
        random.seed(random.SystemRandom().randrange(2**31))
        rows = [
            (image, label) for batch in batches for image, label in zip(batch["image"], batch["label"], strict=True)
        ]
        return {sample[:2]: row for sample, row in zip(samples, rows, strict=True)}

    alone = rows(samples, 1, 0)
    assert len({image.numpy().tobytes() for image, _ in alone.values()}) == 28
    for order, size, num_workers in ((samples, 28, 0), (samples[::-1], 5, 2), (samples[7:] + samples[:7], 3, 1)):
        for sample, (image, label) in rows(order, size, num_workers).items():
            assert torch.equal(image, alone[sample][0]) and torch.equal(label, alone[sample][1]), sample


@pytest.fixture(scope="module")
def plain_colours(tmp_path_factory) -> list[ImageItem]:
    """Eight grey images, of level 20 * (index + 1) throughout: crops do not change them."""
    folder = tmp_path_factory.mktemp("plain")
    for index in range(8):
        Image.new("RGB", (40, 30), (20 * (index + 1),) * 3).save(folder / f"{index}.png")
    return [ImageItem(f"{index}.png", index % 3, str(folder / f"{index}.png")) for index in range(8)]


class RecordingDataset(ImageDataset):
    """Notes which images are loaded."""

    def pixels(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return super().pixels(index)


@pytest.mark.parametrize("alphas", [{"mixup": 0.8}, {"cutmix": 1.0}])
def test_pixels_and_label_have_the_same_share_of_both_images(alphas, plain_colours):
    dataset, partners = RecordingDataset(plain_colours, 32, (0.08, 1.0), mixing=Mixing(**alphas)), []
    for index in range(8):
        for epoch in range(30):
            dataset.loaded = []
            item = seen(dataset, index, epoch)
            loaded, partner = dataset.loaded
            assert loaded == index != partner
            partners.append((partner - index) % 8)
            assert item["label"] == index % 3 and item["partner_label"] == partner % 3
            own, other, pixels = 20 * (index + 1), 20 * (partner + 1), item["image"].float()
            assert pixels.mean().item() == pytest.approx(item["share"] * own + (1 - item["share"]) * other, abs=0.5)
            levels = set(pixels.unique().tolist())
            assert levels <= {own, other} if "cutmix" in alphas else len(levels) == 1
    # uniform over the seven others: 240 / 7 = 34 each, with a standard deviation of 5.4
    assert sorted(set(partners)) == list(range(1, 8)) and max(map(partners.count, range(1, 8))) < 34 + 4 * 5.4


def test_shares_are_drawn_as_in_the_papers():
    random.seed(0)
    own, other = torch.zeros(3, 64, 48, dtype=torch.uint8), torch.full((3, 64, 48), 255, dtype=torch.uint8)
    shares = {alpha: np.array([Mixing(mixup=alpha)(own, other)[1] for _ in range(4000)]) for alpha in (0.2, 1.0)}
    for alpha, values in shares.items():  # the variance of Beta(a, a) is 1 / (4 (2 a + 1))
        assert values.mean() == pytest.approx(0.5, abs=0.025)
        assert values.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)
    patches = [Mixing(cutmix=1.0)(own, other) for _ in range(4000)]
    for image, share in patches:
        rows, columns = (image[0] == 255).any(1), (image[0] == 255).any(0)
        assert (image[0] == 255).sum() == rows.sum() * columns.sum() == round((1 - share) * 64 * 48), "not one box"
    # torchvision draws the same way: a box of that share around a uniform point, cut at the borders
    torch.manual_seed(0)
    theirs = v2.CutMix(alpha=1.0, num_classes=2)
    batch = torch.stack([own, other])
    wanted = np.array([theirs(batch, torch.tensor([0, 1]))[1][0, 0].item() for _ in range(4000)])
    ours = np.array([share for _, share in patches])
    for moment in (np.mean, np.std):
        assert moment(ours) == pytest.approx(moment(wanted), abs=0.02)
    both = [Mixing(mixup=1.0, cutmix=1.0)(own, other)[0] for _ in range(1000)]
    blends = sum(image.unique().numel() == 1 and 0 < image[0, 0, 0] < 255 for image in both)
    assert 420 < blends < 580


def test_draws_of_samples_and_epochs_are_independent(plain_colours):
    dataset = ImageDataset(plain_colours, 8, mixing=Mixing(mixup=1.0))
    shares = np.array([[seen(dataset, index, epoch)["share"] for epoch in range(250)] for index in range(8)])
    correlation = np.corrcoef(shares)[~np.eye(8, dtype=bool)]
    assert np.abs(correlation).max() < 4 / 250**0.5  # four standard deviations
    assert abs(np.corrcoef(shares[:, :-1].ravel(), shares[:, 1:].ravel())[0, 1]) < 4 / 2000**0.5


def test_without_mixing_nothing_is_added_and_a_lone_image_mixes_with_itself(plain_colours):
    assert seen(ImageDataset(plain_colours, 8)).keys() == {"image", "label", "sample_id", "weight"}
    item = seen(ImageDataset(plain_colours[:1], 8, mixing=Mixing(mixup=1.0)))
    assert item["image"].unique().tolist() == [20] and item["partner_label"] == 0


def test_batches_are_normalised_and_labels_smoothed_as_pytorch_does():
    torch.manual_seed(0)
    data = [
        {"image": torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8), "label": label} for label in (0, 1, 2, 3, 0, 1)
    ]
    mean, std, cpu = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1), torch.device("cpu")
    loader = DataLoader(data, batch_size=4)
    plain = NormalisedBatches(loader, mean, std, 4, cpu)
    assert len(plain) == 2 and plain.dataset is data and plain.collate_fn is loader.collate_fn
    (first, second), again = plain, list(plain)
    assert torch.equal(again[1]["image"], second["image"]), "it can be iterated once only"
    stored = torch.stack([row["image"] for row in data])
    assert torch.cat([first["image"], second["image"]]).allclose(normalize(stored / 255, mean, std), atol=1e-5)
    assert first["label"].tolist() == [0, 1, 2, 3] and first["label"].dtype == torch.int64
    (smoothed, _), logits = NormalisedBatches(loader, mean, std, 4, cpu, label_smoothing=0.2), torch.randn(4, 4)
    wanted = F.cross_entropy(logits, first["label"], reduction="none", label_smoothing=0.2)
    assert F.cross_entropy(logits, smoothed["label"], reduction="none").allclose(wanted)
    half = [row | {"partner_label": 3, "share": np.float32(0.75)} for row in data]
    (mixed, _) = NormalisedBatches(DataLoader(half, batch_size=4), mean, std, 4, cpu)
    assert mixed["label"].tolist()[:2] == [[0.75, 0, 0, 0.25], [0, 0.75, 0, 0.25]]
    assert mixed["label"].dtype == torch.float32 and mixed["label"][3].tolist() == [0, 0, 0, 1]
