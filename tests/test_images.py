"""kit/images.py, image_sources.py, image_cache.py: any image people have is used rightly, or named in one line."""

import ctypes
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import random
import runpy
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from kit import image_cache, images
from kit.batches import Sample, WeightedSamples
from kit.errors import UserError
from kit.image_cache import open_cache
from kit.image_sources import check_images, class_from_name, find_images, leave_out, scan
from kit.images import Box, EncodedImage, ImageDataset, centre_box, decode, random_box, resized_crop

ROOT = Path(__file__).parent.parent
TRAINING = {"crop_scale": (0.08, 1.0), "augment": v2.Compose([v2.RandomHorizontalFlip()])}
PETS = Path(os.environ["TEMPLATES_DATA"], "pets") if "TEMPLATES_DATA" in os.environ else None
needs_pets = pytest.mark.skipif(PETS is None, reason="TEMPLATES_DATA is not set: no real pets here")


def photo(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    """Return a smooth RGB picture without any symmetry."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def jpeg_bytes(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 90, **options})
    return buffer.getvalue()


def make_pets(folder: Path, breeds=("Abyssinian", "great_pyrenees"), count: int = 6) -> Path:
    """Write `count` JPEGs breed_number.jpg of each breed, all different."""
    folder.mkdir(parents=True, exist_ok=True)
    for label, breed in enumerate(breeds):
        for number in range(1, count + 1):
            photo(seed=100 * label + number).save(folder / f"{breed}_{number}.jpg", quality=90)
    return folder


def seen(dataset: ImageDataset, index: int = 0, epoch: int = 0) -> dict:
    """Return an item as the loader of a training run would hand it out."""
    return WeightedSamples(dataset, seed=0)[Sample(index, epoch, 1.0)]


def names(items) -> list[str]:
    return [item.name for item in items]


def write_every_mode(folder: Path) -> dict[str, np.ndarray | None]:
    """Write one file of each mode; return {file: what it shows, uint8 RGB, or None where that is lossy}."""
    rgb = photo()
    grey, pixels = rgb.convert("L"), np.asarray(rgb)
    grey_pixels = np.repeat(np.asarray(grey)[..., None], 3, 2)
    half = np.zeros((40, 60), np.uint8)
    half[:, 30:] = 255  # the left half can be seen through: white shows
    on_white, grey_on_white = pixels.copy(), grey_pixels.copy()
    on_white[:, :30] = grey_on_white[:, :30] = 255
    rgba, la = rgb.copy(), grey.copy()
    rgba.putalpha(Image.fromarray(half))
    la.putalpha(Image.fromarray(half))
    palette = Image.fromarray((np.arange(60, dtype=np.uint8) // 20)[None].repeat(40, 0), "P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    flags = np.array([[255, 0, 0], [255, 255, 255], [0, 0, 255]], np.uint8)[np.asarray(palette)]
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    bits = grey.point(lambda value: 255 * (value > 127)).convert("1")
    cmyk = rgb.convert("CMYK")
    shown = {
        "l_1.png": grey_pixels,
        "la_1.png": grey_on_white,
        "p_1.png": flags,
        "rgba_1.png": on_white,
        "cmyk_1.tif": np.asarray(cmyk.convert("RGB")),
        "cmyk_2.jpg": None,
        "i16_1.png": grey_pixels,
        "bit_1.png": np.repeat(np.asarray(bits)[..., None].astype(np.uint8) * 255, 3, 2),
        "gif_1.jpg": None,
        "png_1.jpg": pixels,
        "webp_1.webp": None,
        "bmp_1.BMP": pixels,
        "tiff_1.tiff": pixels,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in {
        "l_1.png": grey, "la_1.png": la, "rgba_1.png": rgba, "cmyk_1.tif": cmyk, "i16_1.png": wide, "bit_1.png": bits,
        "webp_1.webp": rgb, "bmp_1.BMP": rgb, "tiff_1.tiff": rgb,
    }.items():  # fmt: skip
        image.save(folder / name)
    palette.save(folder / "p_1.png", transparency=1)
    cmyk.save(folder / "cmyk_2.jpg", quality=95)
    rgb.save(folder / "gif_1.jpg", "GIF", save_all=True, append_images=[grey.convert("RGB")])
    rgb.save(folder / "png_1.jpg", "PNG")
    opened = {name: Image.open(folder / name) for name in shown}
    assert {image.mode for image in opened.values()} >= {"L", "LA", "P", "RGBA", "CMYK", "I;16", "1", "RGB"}
    return shown


# ----------------------------------------------------------------------------------------------------- bytes to pixels


def test_every_mode_is_decoded_to_the_rgb_that_it_shows(tmp_path):  # report 26
    shown = write_every_mode(tmp_path)
    for name, expected in shown.items():
        pixels = decode(tmp_path / name)
        assert pixels.shape == (3, 40, 60) and pixels.dtype == torch.uint8, name
        if expected is not None:
            assert np.array_equal(pixels.permute(1, 2, 0).numpy(), expected), name
        else:  # lossy formats
            distance = np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - np.asarray(photo()).astype(int)).mean()
            assert distance < 6, (name, distance)


def test_an_epoch_over_every_mode_has_one_shape(tmp_path):  # report 26
    write_every_mode(tmp_path)
    splits = find_images(data_dir=str(tmp_path), validation_fraction=0.4)
    assert len(splits.train) + len(splits.validation) == 13
    dataset = ImageDataset(sorted(splits), 32, **TRAINING)
    batch = next(iter(DataLoader(dataset, batch_size=13)))
    assert batch["image"].shape == (13, 3, 32, 32) and batch["image"].dtype == torch.uint8
    assert batch["label"].dtype == torch.int64


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {"subsampling": 2}),
        ("RGB", {"subsampling": 0}),
        ("RGB", {"subsampling": 1}),
        ("RGB", {"progressive": True}),
        ("RGB", {"keep_rgb": True}),
        ("L", {}),
    ],
)
def test_the_fast_jpeg_decoder_answers_bit_for_bit_what_pillow_answers(mode, options, monkeypatch):
    data = jpeg_bytes(photo(97, 61).convert(mode), **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    monkeypatch.setattr(images, "_rgb_pixels", lambda image: pytest.fail("not the fast decoder"))
    assert np.array_equal(decode(data).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_exactly_once_and_an_illegal_one_never(kind):
    for orientation in range(11):
        exif, buffer = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        photo().save(buffer, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
        stored = Image.open(buffer)
        upright = np.asarray(ImageOps.exif_transpose(stored).convert("RGB"))
        pixels = decode(buffer.getvalue())
        assert pixels.shape[1:] == ((60, 40) if 5 <= orientation <= 8 else (40, 60)), orientation
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), upright), (kind, orientation)


def test_a_turned_photo_is_cropped_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = photo(800, 600)
    for name, image, options in (
        ("turned_1.jpg", stored, {"exif": exif}),
        ("b_1.jpg", stored.rotate(-90, expand=True), {}),
    ):
        image.save(tmp_path / name, quality=100, subsampling=0, **options)
    items = [images.ImageItem(name, 0, str(tmp_path / name)) for name in ("turned_1.jpg", "b_1.jpg")]
    for training in ({}, TRAINING):
        both = []
        for item in items:  # index 0 twice, so that both get the same crop
            both.append(seen(ImageDataset([item], 64, **training), 0, epoch=3)["image"].int())
        assert (both[0] - both[1]).abs().float().mean() < 1.5


@pytest.mark.parametrize("kept", [0.3, 0.5, 0.9, -300, -20, -3])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"mode": "CMYK"}, {"mode": "L"}])
def test_a_truncated_jpeg_is_refused_with_its_path(tmp_path, kept, options):
    options = dict(options)
    data = jpeg_bytes(photo(200, 150).convert(options.pop("mode", "RGB")), **options)
    (tmp_path / "cut.jpg").write_bytes(data[: int(kept * len(data)) if 0 < kept < 1 else kept])
    with pytest.raises(UserError, match=r"cut\.jpg: .*truncated"):
        decode(tmp_path / "cut.jpg")


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "WEBP", "TIFF"])
def test_other_truncated_files_are_refused_with_their_path(tmp_path, kind):
    photo(200, 150).save(tmp_path / "whole", kind)
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole").read_bytes()[: (tmp_path / "whole").stat().st_size // 2])
    with pytest.raises(UserError, match=r"cut\.png: "):
        decode(tmp_path / "cut.png")


def test_stray_bytes_after_the_end_do_no_harm():
    data = jpeg_bytes(photo())
    for tail in (b"\r", b"\0" * 100, data):
        assert torch.equal(decode(data + tail), decode(data))


def test_nothing_makes_truncated_files_pass_for_the_whole_program():
    files = [*ROOT.glob("templates/**/*.py"), *ROOT.glob("examples/**/*.py")]
    assert len(files) > 5
    assert not [file for file in files if "LOAD_TRUNCATED" in file.read_text("utf-8")]
    assert "LOAD_TRUNCATED" in Path(__file__).read_text("utf-8")


def test_a_decompression_bomb_is_refused_by_its_header(tmp_path):
    data = bytearray(jpeg_bytes(photo()))
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", 65000, 65000)
    (tmp_path / "bomb.jpg").write_bytes(data)
    with pytest.raises(UserError, match=r"bomb\.jpg: .*DecompressionBomb"):
        decode(tmp_path / "bomb.jpg")


# ------------------------------------------------------------------------------------------------- crops, augmentation


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
    dataset = ImageDataset([images.ImageItem("big_1.jpg", 0, str(tmp_path / "big_1.jpg"))], 200)
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
    items = [images.ImageItem(name, 0, str(tmp_path / name)) for name in ("a_1.png", "a_2.jpg")]
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
    item = images.ImageItem("a", 0, str(tmp_path / "a_1.png"))
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


# ------------------------------------------------------------------------------------------- which images, which split


def test_strangers_in_the_folder_are_ignored_and_counted(tmp_path):  # report 70
    make_pets(tmp_path, count=2)
    (tmp_path / "x.mat").write_bytes(b"MATLAB 5.0 MAT-file")
    (tmp_path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (tmp_path / "._Abyssinian_1.jpg").write_bytes(b"\0\5\x16\7")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    photo().save(tmp_path / ".ipynb_checkpoints" / "Abyssinian_1-checkpoint.jpg")
    before = find_images(data_dir=str(tmp_path))
    photo(seed=7).save(tmp_path / "great_pyrenees_20.JPG")
    photo(seed=8).save(tmp_path / "Abyssinian_30.jpg", "GIF")
    splits = find_images(data_dir=str(tmp_path))
    assert len(list(splits)) == 6 == len(list(before)) + 2
    assert f"ignored in {tmp_path}: .mat (1), hidden files (2)" in splits.notes
    report = scan(splits)
    assert not report.bad and report.odd == {"Abyssinian_30.jpg": "GIF named .jpg, mode P"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("staffordshire_bull_terrier_2.jpg", "staffordshire_bull_terrier"),
        ("data/images/great_pyrenees_12.JPG", "great_pyrenees"),
        (r"C:\data\my_pets\Abyssinian_100.jpeg", "Abyssinian"),
        ("IMG.jpg", None),
        ("1_2_3.png", "1_2"),
    ],
)
def test_the_class_is_the_name_without_its_number_on_any_platform(path, expected):  # report 70, 78
    assert class_from_name(path) == expected


def write_classes(folder: Path, classes: dict[str, int], seed: int = 0) -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            photo(seed=zlib.crc32(f"{name} {number} {seed}".encode())).save(folder / name / f"{number}.jpg")


def test_folders_of_classes_may_stand_below_splits(tmp_path):
    write_classes(tmp_path / "bare", {"cat": 5, "dog": 10, "train": 5})
    splits = find_images(data_dir=str(tmp_path / "bare"))
    assert splits.label_names == ("cat", "dog", "train") and not splits.test
    assert splits.source["rows"] == {"train": 17, "validation": 3, "test": 0} and splits.source["validation_carved"]
    for validation in ("validation", "valid", "val", "Val"):
        data = tmp_path / f"with {validation} and ümlaut"
        write_classes(data / "train", {"dog": 3, "cat": 2})
        write_classes(data / validation, {"dog": 1}, seed=1)
        write_classes(data / "test", {"cat": 2}, seed=2)
        splits = find_images(data_dir=str(data))
        assert splits.source["rows"] == {"train": 5, "validation": 1, "test": 2}
        assert not splits.source["validation_carved"] and splits.label_names == ("cat", "dog")
        assert names(splits.test) == ["test/cat/0.jpg", "test/cat/1.jpg"]
    make_pets(tmp_path / "flat" / "train")
    make_pets(tmp_path / "flat" / "test")
    splits = find_images(data_dir=str(tmp_path / "flat"))
    assert splits.source["rows"] == {"train": 10, "validation": 2, "test": 12}


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ({}, "no images .* only: nothing"),
        ({"a/notes": 0}, "no images"),
        ({"a": 3}, "1 classes in train: a; two at least"),
        ({"train/a": 2, "train/b": 2, "val/a": 1, "val/c": 1}, "validation has classes that train has not: c"),
        ({"train/a": 2, "train/b": 2, "test/z": 1}, "test has classes that train has not: z"),
        ({"train/a": 2, "val/a": 1, "valid/a": 1}, "above the classes only train, validation"),
        ({"train/a": 2, "train/b": 2, "val/a": 1, "extra/a": 1}, "above the classes only train, validation"),
        ({"val/a": 2, "test/a": 2}, "above the classes only train, validation"),
        ({"": 2, "a": 2}, r"holds images \(0.jpg\) and folders of images \(a\) side by side"),
        ({"": 2}, "no class in the name '[01].jpg'"),
        ({"a": 1, "b": 1}, "no image for validation"),
    ],
)
def test_a_folder_that_makes_no_sense_is_refused_in_one_line(tmp_path, folders, message):
    write_classes(tmp_path, folders)
    with pytest.raises(UserError, match=message) as caught:
        find_images(data_dir=str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_folders_and_double_sources_are_refused():
    for arguments, message in (
        ({"data_dir": "nowhere"}, "no folder 'nowhere'"),
        ({}, "give data_dir"),
        ({"data_dir": "x", "dataset_name": "beans"}, "both given"),
        ({"data_dir": "x", "validation_fraction": 1.0}, "between 0 and 1"),
    ):
        with pytest.raises(UserError, match=message):
            find_images(**arguments)


def test_links_are_not_followed_out_of_the_folder_nor_in_circles(tmp_path):
    data = make_pets(tmp_path / "data", count=3)
    photo().save(tmp_path / "secret_1.jpg")
    (data / "secret_1.jpg").symlink_to(tmp_path / "secret_1.jpg")
    (data / "Abyssinian_9.jpg").symlink_to(data / "Abyssinian_1.jpg")
    (data / "again").symlink_to(data, target_is_directory=True)
    splits = find_images(data_dir=str(data))
    assert len(list(splits)) == 7 and "Abyssinian_9.jpg" in names(splits)
    assert splits.notes[0].endswith("links out of the folder (1), links to folders (1)")


def test_the_split_is_a_function_of_names_and_seed_alone(tmp_path, monkeypatch):  # reports 8 and 13
    data = make_pets(tmp_path / "data", ("b_b", "a", "c"), count=20)
    splits = find_images(data_dir=str(data), seed=3)
    assert splits.label_names == ("a", "b_b", "c")
    assert splits.source["rows"] == {"train": 54, "validation": 6, "test": 0}
    assert [sum(item.label == label for item in splits.validation) for label in range(3)] == [2, 2, 2]
    assert not set(names(splits.train)) & set(names(splits.validation))
    assert names(splits.train) == sorted(names(splits.train))
    assert find_images(data_dir=str(data), seed=4).source["sha256"] != splits.source["sha256"]
    # the pixels do not matter, nor where the folder is, nor the order of listing, nor the hash seed of another process
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in sorted(names(splits), key=lambda name: name[::-1]):
        photo().save(copy / name)
    with monkeypatch.context() as patch:
        walk = os.walk
        patch.setattr(os, "walk", lambda root: ((top, dirs, files[::-1]) for top, dirs, files in walk(root)))
        random.seed(99)
        torch.manual_seed(99)
        assert find_images(data_dir=str(copy), seed=3).source["sha256"] == splits.source["sha256"]
    code = "import sys; from kit.image_sources import find_images; s = find_images(data_dir=sys.argv[1], seed=3)\n"
    code += "import json; print(json.dumps([s.source['sha256'], s.label_names]))"
    environment = {**os.environ, "PYTHONHASHSEED": "2", "PYTHONPATH": str(ROOT / "templates")}
    answer = subprocess.run(
        [sys.executable, "-c", code, str(copy)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=True,
    )
    assert json.loads(answer.stdout) == [splits.source["sha256"], list(splits.label_names)]


def write_lists(folder: Path, **lists: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, stems in lists.items():
        (folder / f"{name}.txt").write_text("#Image CLASS-ID\n" + "".join(f"{stem} 1 1 1\n" for stem in stems))


def test_official_lists_beside_the_images_are_followed(tmp_path):
    make_pets(tmp_path / "images", count=6)
    trainval = [f"{breed}_{number}" for breed in ("Abyssinian", "great_pyrenees") for number in (1, 2, 3)]
    write_lists(tmp_path / "annotations", trainval=trainval, test=["Abyssinian_4", "great_pyrenees_4"])
    for data_dir in (tmp_path, tmp_path / "images"):
        splits = find_images(data_dir=str(data_dir))
        assert splits.source["rows"] == {"train": 4, "validation": 2, "test": 2}
        assert names(splits.test) == ["Abyssinian_4.jpg", "great_pyrenees_4.jpg"]
        assert splits.notes[0].endswith("in no official list (4)")
    write_lists(tmp_path / "annotations", test=["Abyssinian_4", "Abyssinian_99"])
    with pytest.raises(UserError, match=r"1 of 2 listed images are not in .*Abyssinian_99"):
        find_images(data_dir=str(tmp_path))
    write_lists(tmp_path / "annotations", test=["Abyssinian_4", "Abyssinian_1"])
    with pytest.raises(UserError, match="Abyssinian_1 is listed twice"):
        find_images(data_dir=str(tmp_path))


def check_against_torchvision(root: Path) -> None:
    from torchvision.datasets import OxfordIIITPet

    splits = find_images(data_dir=str(root), dataset_name="oxford-iiit-pet")
    # its classes are those of the list at hand; ours are all of train's, as the ids in both lists are
    theirs = {split: OxfordIIITPet(str(root), split=split, download=False) for split in ("trainval", "test")}
    classes = [name.replace(" ", "_").lower() for name in theirs["trainval"].classes]
    ours = {"trainval": [*splits.train, *splits.validation], "test": splits.test}
    for split, items in ours.items():
        labels = zip(theirs[split]._images, theirs[split]._labels, strict=True)
        expected = sorted((path.name, classes[label]) for path, label in labels)
        assert sorted((item.name, splits.label_names[item.label].lower()) for item in items) == expected
        assert expected


def test_the_pets_are_torchvisions_with_the_official_lists(tmp_path, monkeypatch):
    folder = tmp_path / "oxford-iiit-pet"
    make_pets(folder / "images", ("Abyssinian", "great_pyrenees", "Birman"), count=3)
    folder.joinpath("annotations").mkdir()
    for file, numbers in (("trainval", (1, 2)), ("test", (3,))):
        rows = [
            f"{b}_{n} {i} 1 {i}" for i, b in enumerate(("Abyssinian", "Birman", "great_pyrenees"), 1) for n in numbers
        ]
        (folder / "annotations" / f"{file}.txt").write_text("\n".join(rows) + "\n")
    check_against_torchvision(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set. Ways on: ") as caught:
        find_images(data_dir=str(tmp_path / "empty"), dataset_name="oxford-iiit-pet")
    assert "\n" not in str(caught.value)


@needs_pets
def test_the_real_pets_are_torchvisions_with_the_official_lists(tmp_path):
    folder = tmp_path / "oxford-iiit-pet"
    folder.mkdir()
    for part in ("images", "annotations"):
        (folder / part).symlink_to(PETS / part, target_is_directory=True)
    check_against_torchvision(tmp_path)


def test_a_hub_dataset_keeps_the_bytes_and_the_classes_as_they_are(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    stored = [jpeg_bytes(photo(seed=i)) for i in range(8)]
    features = datasets.Features({"photo": datasets.Image(), "kind": datasets.ClassLabel(names=["zebra", "ant"])})
    rows = {"photo": [{"bytes": data, "path": None} for data in stored], "kind": [0, 1] * 4}
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "hub" / "train.parquet")
    splits = find_images(dataset_name=str(tmp_path / "hub"))
    assert splits.label_names == ("zebra", "ant"), "the order of the dataset is its contract"
    assert {splits.read(item) for item in splits} == set(stored)
    dataset = ImageDataset(splits.train, 16, tables=splits.tables)
    assert pickle.loads(pickle.dumps(dataset))[0]["image"].shape == (3, 16, 16)
    assert not scan(splits).bad and scan(splits).num_images == 8
    # the usual names; hidden labels of a test get predictions; of two columns of classes one has to be named
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["zebra", "ant"])})
    rows = {"image": rows["photo"], "label": rows["kind"]}
    (tmp_path / "usual").mkdir()
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "usual" / "train.parquet")
    hidden = {"image": rows["image"][:3], "label": [-1] * 3}
    datasets.Dataset.from_dict(hidden, features).to_parquet(tmp_path / "usual" / "test.parquet")
    splits = find_images(dataset_name=str(tmp_path / "usual"))
    assert [item.label for item in splits.test] == [-1] * 3
    assert {splits.read(item) for item in splits} == set(stored)
    (tmp_path / "two").mkdir()
    both = datasets.Features({**features, "cat": features["label"]})
    datasets.Dataset.from_dict({**rows, "cat": [1, 0] * 4}, both).to_parquet(tmp_path / "two" / "train.parquet")
    with pytest.raises(UserError, match="give --label_column; columns there: image, label, cat"):
        find_images(dataset_name=str(tmp_path / "two"))
    named = find_images(dataset_name=str(tmp_path / "two"), label_column="cat")
    assert [item.label for item in sorted(named) if item.name == "train/00000000"] == [1]
    with pytest.raises(UserError, match="no column 'image' or 'kind' among photo, kind"):
        find_images(dataset_name=str(tmp_path / "hub"), image_column="image")
    with pytest.raises(UserError, match=r"cannot load 'nobody/nothing'.*Ways on") as caught:
        find_images(dataset_name="nobody/nothing")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="only there a name may be any bytes")
def test_names_that_are_not_utf8_are_used_and_written_out(tmp_path):
    make_pets(tmp_path / "train", count=3)
    (tmp_path / "test").mkdir()
    for number, name in enumerate((b"train/caf\xe9_77.jpg", b"train/caf\xe9_78.jpg", b"test/caf\xe9.jpg")):
        (tmp_path / os.fsdecode(name)).write_bytes(jpeg_bytes(photo(seed=number)))
    splits = find_images(data_dir=str(tmp_path))
    assert splits.label_names == ("Abyssinian", "caf%e9", "great_pyrenees")
    assert [(item.name, item.label) for item in splits.test] == [("test/caf%e9.jpg", -1)]
    assert not scan(splits).bad
    assert not check_images(splits, tmp_path / "scans", False).notes[1:]


def test_a_test_of_names_without_a_class_of_the_training_is_unlabelled(tmp_path):
    make_pets(tmp_path / "train", count=3)
    (tmp_path / "test").mkdir()
    for number in range(2):
        photo(seed=number).save(tmp_path / "test" / f"IMG_{number:04}.jpg")
    assert [item.label for item in find_images(data_dir=str(tmp_path)).test] == [-1, -1]
    photo(seed=7).save(tmp_path / "test" / "Abyssinian_7.jpg")
    with pytest.raises(UserError, match="test has classes that train has not: IMG"):
        find_images(data_dir=str(tmp_path))


# ----------------------------------------------------------------------------------------------- files that are broken


def spoil(data: Path) -> list[str]:
    """Add a JPEG cut to half, an empty file and a text named .jpg; return their names."""
    (data / "Abyssinian_91.jpg").write_bytes(jpeg_bytes(photo(200, 150))[:2000])
    (data / "Abyssinian_92.jpg").touch()
    (data / "Abyssinian_93.jpg").write_text("<html>404 not found</html>")
    return ["Abyssinian_91.jpg", "Abyssinian_92.jpg", "Abyssinian_93.jpg"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_file_stops_training_with_its_path(tmp_path, num_workers):  # report 27
    bad = spoil(make_pets(tmp_path))
    items = [item for item in find_images(data_dir=str(tmp_path)) if item.name in bad]
    batches = iter(DataLoader(ImageDataset(items, 16, **TRAINING), batch_size=1, num_workers=num_workers))
    for item in items:
        with pytest.raises(UserError, match=str(tmp_path / item.name)):
            next(batches)
    assert len(items) == 3 and next(batches, None) is None


def test_a_scan_names_every_bad_file_and_they_can_be_left_out(tmp_path):  # report 27
    bad = spoil(make_pets(tmp_path))
    splits = find_images(data_dir=str(tmp_path))
    report = scan(splits, num_workers=2)
    assert list(report.bad) == [name for name in names(splits) if name in bad] and len(report.bad) == 3
    reasons = " ".join(report.bad.values())
    assert all(str(tmp_path / name) in reasons for name in bad)
    assert "truncated" in reasons and "empty" in reasons and "<html>" in reasons
    kept = leave_out(splits, report.bad)
    assert kept.notes[-1].startswith("3 skipped") and len(list(kept)) == 12
    assert {*names(kept.validation)} == {*names(splits.validation)} - set(bad), "the others have moved"
    assert not scan(kept).bad
    pyrenees = [name for name in names(splits) if name.startswith("great")]
    with pytest.raises(UserError, match="no image of great_pyrenees left in train"):
        leave_out(splits, pyrenees)


def test_a_scan_tells_duplicates_and_which_of_them_leak(tmp_path):
    for split in ("train", "test"):
        write_classes(tmp_path / split, {"a": 3, "b": 3}, seed=len(split))
    (tmp_path / "train/a/copy.jpg").write_bytes((tmp_path / "train/b/1.jpg").read_bytes())
    (tmp_path / "test/b/leak.jpg").write_bytes((tmp_path / "train/a/2.jpg").read_bytes())
    report = scan(find_images(data_dir=str(tmp_path)))
    assert [sorted(group) for group in report.leaks] == [["test/b/leak.jpg", "train/a/2.jpg"]]
    assert sorted(map(sorted, report.duplicates)) == [
        ["test/b/leak.jpg", "train/a/2.jpg"],
        ["train/a/copy.jpg", "train/b/1.jpg"],
    ]
    assert run_script("examples/resnet50_pets/check_data.py", "--data_dir", str(tmp_path)) == 1
    assert [sorted(group) for group in scan(find_images(data_dir=str(tmp_path))).contradictions] == [
        ["test/b/leak.jpg", "train/a/2.jpg"],
        ["train/a/copy.jpg", "train/b/1.jpg"],
    ]
    (tmp_path / "test/b/leak.jpg").unlink()
    assert run_script("examples/resnet50_pets/check_data.py", "--data_dir", str(tmp_path)) == 1
    (tmp_path / "train/a/copy.jpg").write_bytes((tmp_path / "train/a/2.jpg").read_bytes())
    assert run_script("examples/resnet50_pets/check_data.py", "--data_dir", str(tmp_path)) == 0


def test_a_scan_tells_what_is_odd(tmp_path):
    write_every_mode(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    photo().save(tmp_path / "l_2.jpg", exif=exif)
    photo(1, 50).save(tmp_path / "l_3.png")
    data = bytearray(jpeg_bytes(photo(200, 150)))
    data[-2:-2] = b"\1\2\3\4\5\6\7\x08"  # bytes between the last row and the end: libjpeg warns, the picture is whole
    (tmp_path / "l_4.jpg").write_bytes(data)
    odd = scan(find_images(data_dir=str(tmp_path), validation_fraction=0.4)).odd
    assert odd["png_1.jpg"] == "PNG named .jpg" and odd["p_1.png"] == "mode P, transparency"
    assert odd["l_2.jpg"] == "Exif orientation 6" and odd["l_3.png"] == "1 x 50 pixels"
    assert odd["l_4.jpg"] == "a damaged JPEG, but complete" and odd["cmyk_2.jpg"] == "mode CMYK"
    assert not {"bmp_1.BMP", "tiff_1.tiff", "webp_1.webp"} & odd.keys()


def run_script(path: str, *arguments: str) -> int:
    """Run a script of examples/ in this process and return its exit code."""
    before = sys.argv
    sys.argv = [path, *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / path), run_name="__main__")
    finally:
        sys.argv = before
    return ended.value.code or 0


def test_check_data_answers_0_1_or_2(tmp_path, capsys):
    check = "examples/resnet50_pets/check_data.py"
    data = make_pets(tmp_path / "data")
    assert run_script(check, "--data_dir", str(data), "--json", str(tmp_path / "out" / "report.json")) == 0
    result = json.loads((tmp_path / "out" / "report.json").read_text())
    assert result["classes"]["Abyssinian"] == {"train": 5, "validation": 1, "test": 0} and result["bad"] == {}
    bad = spoil(data)
    capsys.readouterr()
    assert run_script(check, "--data_dir", str(data)) == 1
    printed = capsys.readouterr().out
    assert "bad, cannot be used: 3" in printed and all(str(data / name) in printed for name in bad)
    for folder in (tmp_path / "nowhere", ""):
        assert run_script(check, "--data_dir", str(folder)) == 2
        assert capsys.readouterr().err.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------- the cache


@pytest.fixture
def pets(tmp_path):
    return find_images(data_dir=str(make_pets(tmp_path / "data")))


def count_decoding(monkeypatch) -> list[str]:
    decoded, pixels_of = [], EncodedImage.pixels
    monkeypatch.setattr(
        EncodedImage, "pixels", lambda self, shrink=1: decoded.append(self.name) or pixels_of(self, shrink)
    )
    return decoded


def test_the_cache_shows_the_same_crops(tmp_path):
    for number in range(4):
        for label in "ab":
            photo(500 + 50 * number, 400, seed=number).save(tmp_path / f"{label}_{number}.jpg", quality=95)
    splits = find_images(data_dir=str(tmp_path))
    items = sorted(splits)
    for size, tolerance in ((300, 0), (128, 2)):  # 300: the short side, 400 pixels, is below 450, and all is kept
        cache = open_cache(splits, str(tmp_path / "cache"), size, max_gb=1)
        assert min(cache["a_0.jpg"].kept.shape[:2]) == min(400, size * 3 // 2)
        assert (cache["a_0.jpg"].height, cache["a_0.jpg"].width) == (400, 500)
        for training in ({}, TRAINING):
            plain, cached = (ImageDataset(items, size, **training, cache=kept) for kept in (None, cache))
            for index in range(len(items)):
                one, other = (seen(dataset, index, epoch=1)["image"].int() for dataset in (plain, cached))
                assert (one - other).abs().float().mean() <= tolerance


def test_the_cache_is_made_once_and_never_stale(tmp_path, pets, monkeypatch):
    decoded = count_decoding(monkeypatch)
    folder = str(tmp_path / "cache")
    first = open_cache(pets, folder, 16, max_gb=1)
    assert len(decoded) == 12
    path = Path(pets.train[0].place)
    os.utime(path)  # another time, the same bytes
    assert open_cache(pets, folder, 16, max_gb=1).folder == first.folder and len(decoded) == 12
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-20] ^= 1  # the same size and time, other bytes
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    second = open_cache(pets, folder, 16, max_gb=1)
    assert second.folder != first.folder and len(decoded) == 24
    larger = open_cache(pets, folder, 32, max_gb=1)
    assert larger.folder not in (first.folder, second.folder), "the size is not in the key"
    monkeypatch.setattr(image_cache, "FORMAT", 2)
    assert open_cache(pets, folder, 16, max_gb=1).folder != second.folder, "the format is not in the key"


@pytest.mark.parametrize("torn", ["cut pixels", "no pixels", "no index", "half an index", "another index"])
def test_a_torn_cache_is_said_and_made_again(tmp_path, pets, torn, capsys):
    folder = Path(open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1).folder)
    whole = (folder / "pixels.bin").read_bytes()
    index = (folder / "index.json").read_text()
    if torn.endswith("pixels"):
        (folder / "pixels.bin").unlink()
    if torn == "cut pixels":
        (folder / "pixels.bin").write_bytes(whole[:-1])
    if torn.endswith("index"):
        text = {"no index": None, "half an index": index[:50], "another index": "[1]"}[torn]
        (folder / "index.json").unlink()
        if text is not None:
            (folder / "index.json").write_text(text)
    again = open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1)
    assert again.folder == str(folder) and (folder / "pixels.bin").read_bytes() == whole
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{folder} is torn" in said


def test_what_a_killed_builder_left_is_no_cache(tmp_path, pets, monkeypatch):
    monkeypatch.setattr(image_cache, "_shrunk", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1)
    assert not list((tmp_path / "cache").glob("*/pixels.bin")), "an unfinished cache has a name"
    monkeypatch.undo()
    folder = Path(open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1).folder)
    work = folder.rename(folder.with_suffix(".partial"))  # as SIGKILL leaves it
    (work / "index.json").unlink()
    cache = open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1)
    assert cache[pets.train[0].name].pixels().shape == (24, 36, 3) and not work.exists()


def test_a_cache_that_does_not_fit_is_refused_before_it_is_made(tmp_path, pets, monkeypatch):
    folder = tmp_path / "cache"
    with pytest.raises(UserError, match="more than the limit of 1e-09 GB"):
        open_cache(pets, str(folder), 16, max_gb=1e-9)
    usage = image_cache.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(image_cache.shutil, "disk_usage", lambda _: usage._replace(free=10))
        with pytest.raises(UserError, match=r"0.00 GB free: choose another"):
            open_cache(pets, str(folder), 16, max_gb=1)
    assert not list(folder.glob("*/pixels.bin"))
    needed = Path(open_cache(pets, str(folder), 16, max_gb=1).folder, "pixels.bin").stat().st_size / 1e9
    with pytest.raises(UserError, match=r"others in .* take 0.00 GB: delete"):
        open_cache(pets, str(folder), 20, max_gb=needed * 2)


def test_a_cache_of_a_bad_image_is_refused_with_its_path(tmp_path, pets):
    path = Path(pets.train[0].place)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=rf"{path}: .*truncated"):
        open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1)


def _build_and_count(splits, folder, decoded):
    pixels_of = EncodedImage.pixels

    def counted(self, shrink=1):
        with decoded.get_lock():
            decoded.value += 1
        return pixels_of(self, shrink)

    EncodedImage.pixels = counted
    torch.set_num_threads(1)
    open_cache(splits, folder, 16, max_gb=1, num_workers=1)


def test_one_process_makes_the_cache_while_others_wait(tmp_path, pets):
    context = multiprocessing.get_context("fork")
    decoded = context.Value(ctypes.c_int, 0)
    processes = [context.Process(target=_build_and_count, args=(pets, str(tmp_path / "c"), decoded)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert decoded.value == 12


# -------------------------------------------------------------------------------------------- the examples, real files


def test_the_demo_images_are_the_same_for_a_seed_and_differ_between_seeds(tmp_path):
    write_images = runpy.run_path(str(ROOT / "examples/demo_images/make_images.py"))["write_images"]
    digests = []
    for seed, folder in ((0, "one"), (0, "two"), (1, "three")):
        write_images(tmp_path / folder, seed, {"train": 4, "test": 2})
        files = sorted((tmp_path / folder).rglob("*.jpg"))
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
        assert len(set(digests[-1])) == 24
    assert digests[0] == digests[1] and not set(digests[0]) & set(digests[2])
    splits = find_images(data_dir=str(tmp_path / "one"))
    assert splits.label_names == ("bear", "cat", "dog", "rabbit") and splits.source["rows"]["test"] == 8
    assert not scan(splits).bad and not scan(splits).odd and not scan(splits).duplicates


def test_the_benchmark_measures_the_pipelines_in_one_run(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TEMPLATES_DATA", raising=False)
    threads = torch.get_num_threads()
    assert (
        run_script("examples/resnet50_pets/bench_images.py", "--rounds", "1", "--json", str(tmp_path / "b.json")) == 0
    )
    torch.set_num_threads(threads)
    result = json.loads((tmp_path / "b.json").read_text())
    assert set(result["rounds"]) == {"plain", "decode", "jpeg", "cache"} and "made JPEGs" in result["origin"]
    (plain,), (cache,) = result["rounds"]["plain"], result["rounds"]["cache"]
    assert result["ratio_to_plain"]["cache"] == cache / plain > 0
    assert "made JPEGs" in capsys.readouterr().out


@needs_pets
def test_the_odd_files_of_the_real_pets_are_used(tmp_path):
    files = sorted((PETS / "odd").glob("*.jpg"))
    assert len(files) == 10
    for file in files:
        picture = ImageOps.exif_transpose(Image.open(file)).convert("RGBA")
        seen = np.asarray(picture)[..., 3:] == 255  # what lies under full transparency is not to be seen
        assert np.array_equal(decode(file).permute(1, 2, 0).numpy() * seen, np.asarray(picture)[..., :3] * seen), file
        (tmp_path / file.name).write_bytes(file.read_bytes())
    make_pets(tmp_path, ("Abyssinian", "Bengal"), count=4)
    (tmp_path / "Abyssinian_100.mat").write_bytes((PETS / "odd" / "Abyssinian_100.mat.head128").read_bytes())
    for name in ("american_bulldog_1", "miniature_pinscher_1", "Egyptian_Mau_1"):
        photo().save(tmp_path / f"{name}.jpg")
    splits = find_images(data_dir=str(tmp_path))
    report = scan(splits)
    assert not report.bad and splits.notes[0].endswith(": .mat (1)")
    assert report.odd == {
        "Abyssinian_34.jpg": "GIF named .jpg, mode P",
        "Abyssinian_5.jpg": "PNG named .jpg, mode RGBA",
    }
    dataset = ImageDataset(sorted(splits), 32, **TRAINING)
    assert all(dataset[i]["image"].shape == (3, 32, 32) for i in range(len(dataset)))


@needs_pets
def test_the_real_pets_are_clean_and_split_as_published():
    splits = find_images(data_dir=str(PETS))
    assert splits.source["rows"] == {"train": 628, "validation": 64, "test": 335} and len(splits.label_names) == 37
    report = scan(splits)
    assert report.num_images == 1027 and not report.bad and not report.duplicates


def test_the_kit_imports_no_image_library_at_its_top():
    code = "import sys; import kit.images, kit.image_sources, kit.image_cache\n"
    code += "print([n for n in ('PIL', 'torchvision', 'timm', 'datasets', 'simplejpeg') if n in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "templates")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environment)
    assert done.stdout.strip() == "[]", done.stderr
