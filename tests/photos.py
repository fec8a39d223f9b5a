"""Made pictures in every form that people have them, for the tests of images."""

import io
import runpy
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import v2

from kit.batches import Sample, WeightedSamples
from kit.images import ImageDataset

ROOT = Path(__file__).parent.parent
TRAINING = {"crop_scale": (0.08, 1.0), "augment": v2.Compose([v2.RandomHorizontalFlip()])}


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


def write_classes(folder: Path, classes: dict[str, int], seed: int = 0) -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            photo(seed=zlib.crc32(f"{name} {number} {seed}".encode())).save(folder / name / f"{number}.jpg")


def spoil(data: Path) -> list[str]:
    """Add a JPEG cut to half, an empty file and a text named .jpg; return their names."""
    (data / "Abyssinian_91.jpg").write_bytes(jpeg_bytes(photo(200, 150))[:2000])
    (data / "Abyssinian_92.jpg").touch()
    (data / "Abyssinian_93.jpg").write_text("<html>404 not found</html>")
    return ["Abyssinian_91.jpg", "Abyssinian_92.jpg", "Abyssinian_93.jpg"]


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
