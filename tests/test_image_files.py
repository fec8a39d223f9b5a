"""kit/image_files.py: any image people have is decoded to what it shows, or named in one line."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, TiffImagePlugin
from torch.utils.data import DataLoader

from kit.errors import UserError
from kit.image_files import SUFFIXES, EncodedImage, ImageItem, decode
from kit.image_sources import find_images
from kit.images import ImageDataset
from photos import ROOT, TRAINING, jpeg_bytes, photo, seen, write_every_mode


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
    monkeypatch.setattr(EncodedImage, "_pillow_pixels", lambda self: pytest.fail("not the fast decoder"))
    assert np.array_equal(decode(data).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
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
    items = [ImageItem(name, 0, str(tmp_path / name)) for name in ("turned_1.jpg", "b_1.jpg")]
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


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_every_suffix_that_is_looked_for_can_be_decoded(tmp_path, suffix):
    image = photo().convert({".pgm": "L", ".pbm": "1"}.get(suffix, "RGB"))
    image.save(tmp_path / f"a_1{suffix}")
    pixels = decode(tmp_path / f"a_1{suffix}").permute(1, 2, 0).numpy().astype(int)
    assert np.abs(pixels - np.asarray(image.convert("RGB"))).mean() < 12


def tiff_bytes(values: np.ndarray, tags: dict[int, int] | None = None) -> bytes:
    """Return a grey TIFF of 16 bits with more tags, of type SHORT."""
    info, buffer = TiffImagePlugin.ImageFileDirectory_v2(), io.BytesIO()
    for tag, value in (tags or {}).items():
        info[tag] = value
        info.tagtype[tag] = 3
    Image.fromarray(values.astype(np.uint16)).save(buffer, "TIFF", tiffinfo=info)
    return buffer.getvalue()


def twelve_bit_tiff(values: np.ndarray) -> bytes:
    """Return a grey TIFF of 12 bits in the file: two pixels in three bytes."""
    height, width = values.shape
    pairs = values.reshape(-1, 2).astype(np.uint32)
    packed = (pairs[:, 0] << 12 | pairs[:, 1])[:, None] >> np.array([16, 8, 0]) & 255
    data = packed.astype(np.uint8).tobytes()
    tags = [(256, width), (257, height), (258, 12), (259, 1), (262, 1), (273, 122), (277, 1), (278, height)]
    tags += [(279, len(data))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + struct.pack("<I", 0)
    return head + data


def test_twelve_bits_are_scaled_by_what_the_file_says():
    values = np.arange(40 * 60).reshape(40, 60) * 4095 // 2399
    wanted = np.repeat((values * 255 / 4095).round().astype(np.uint8)[..., None], 3, 2)
    for data in (tiff_bytes(values, {281: 4095}), tiff_bytes(values, {281: 3000}), twelve_bit_tiff(values)):
        image = EncodedImage(data, "")
        assert image.opened.mode == "I;16" and np.array_equal(image.pixels(), wanted) and not image.dark
    full = values * 16  # all 16 bits are used: a tag that says less contradicts the pixels
    for tags in ({}, {281: 4095}):
        image = EncodedImage(tiff_bytes(full, tags), "")
        assert np.array_equal(image.pixels()[..., 0], (full / 257).round()) and not image.dark


def test_pixels_that_use_a_part_of_their_bits_are_called_dark():
    values = np.arange(40 * 60).reshape(40, 60) * 4095 // 2399
    rgb16 = np.repeat((values.astype(">u2"))[..., None], 3, 2)
    header = struct.pack(">IIBBBBB", 60, 40, 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in rgb16)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    for data in (tiff_bytes(values), png):
        image = EncodedImage(data, "")
        assert image.pixels().max() <= 16 and image.dark == "uses 12 of 16 bits"
    buffer = io.BytesIO()
    Image.fromarray(values.astype(np.uint8) % 16).save(buffer, "PNG")
    image = EncodedImage(buffer.getvalue(), "a mask")
    assert image.pixels().max() == 15 and image.dark == "uses 4 of 8 bits"
    for data in (tiff_bytes(values * 0), jpeg_bytes(Image.new("RGB", (8, 8))), jpeg_bytes(photo())):
        image = EncodedImage(data, "")
        image.pixels()
        assert not image.dark
