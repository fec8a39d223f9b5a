"""Decode any image to upright RGB, crop it reproducibly, and hand it out as bytes that the device normalises.

Why these libraries. Pillow opens everything and decides what an image is. The pixels of ordinary JPEGs come from
simplejpeg (libjpeg-turbo; it needs numpy only), which answers bit for bit what Pillow answers, in 0.73 of its time,
notices truncation, and can decode at 1/2, 1/4 or 1/8 of the size; torchvision.io takes 0.8 of Pillow's time and cannot.
Cropping and resizing uint8 in torch also equals Pillow's bit for bit, in 0.35 of its time.
"""

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from kit.errors import UserError

if TYPE_CHECKING:
    import PIL.Image

    from kit.image_cache import ImageCache

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")  # what Pillow may open, whatever the suffix says


class ImageItem(NamedTuple):
    name: str  # below the data folder, with "/" on every platform; split/row in a hub dataset
    label: int
    place: str | tuple[str, int]  # the file, or (split, row) of the hub dataset

    @property
    def where(self) -> str:
        """What errors name: the file's path, or split/row."""
        return self.place if isinstance(self.place, str) else self.name


def read_image(item: ImageItem, tables: dict) -> bytes:
    """Return the bytes of an image as they are stored. Raises `UserError` with its path where that fails."""
    path = item.place
    if not isinstance(path, str):
        split, row = item.place
        stored = tables[split][row]["image"]
        if stored["bytes"] is not None:
            return stored["bytes"]
        path = stored["path"]
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


class EncodedImage:
    """An image whose header is read: `height` and `width` in pixels, upright; `pixels` decodes. Raises `UserError`."""

    def __init__(self, data: bytes, name: str):
        from PIL import Image

        self.data, self.name, self.damaged = data, name, False
        if not data:
            raise UserError(f"{name}: an empty file, not an image")
        try:
            self.opened: PIL.Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
            self.orientation = self._exif_orientation()
        except Image.UnidentifiedImageError:
            raise UserError(f"{name}: not an image that can be read (begins with {data[:12]!r})") from None
        except Exception as error:  # Pillow's readers raise many kinds on damaged or huge files
            raise self._undecodable(error) from error
        self.width, self.height = self.opened.size if self.orientation < 5 else self.opened.size[::-1]

    def _exif_orientation(self) -> int:
        """Return 1 to 8; an illegal value (0 is in the real pets) counts as 1, upright."""
        jpeg = self.opened.format in ("JPEG", "MPO")
        if self.opened.format == "TIFF" or (jpeg and not {"exif", "xmp"} & self.opened.info.keys()):
            return 1  # Pillow turns TIFF itself
        value = self.opened.getexif().get(0x0112)
        return value if isinstance(value, int) and 1 <= value <= 8 else 1

    def _undecodable(self, error: Exception) -> UserError:
        return UserError(f"{self.name}: cannot be decoded ({type(error).__name__}: {' '.join(str(error).split())})")

    def pixels(self, shrink: int = 1) -> np.ndarray:
        """Return upright RGB uint8 [height, width, 3]; of a JPEG each side is divided by `shrink` (1, 2, 4 or 8)."""
        pixels = self._jpeg_pixels(shrink)
        if pixels is None:
            try:
                pixels = _rgb_pixels(self.opened)
            except Exception as error:
                raise self._undecodable(error) from error
        return _upright(pixels, self.orientation)

    def _jpeg_pixels(self, shrink: int) -> np.ndarray | None:
        """Decode a JPEG strictly; None where Pillow is to judge: other formats, CMYK, what libjpeg-turbo doubts."""
        import simplejpeg

        if self.opened.format not in ("JPEG", "MPO") or self.opened.mode not in ("RGB", "L"):
            return None
        width, height = self.opened.size
        try:
            return simplejpeg.decode_jpeg(self.data, min_height=-(-height // shrink), min_width=-(-width // shrink))
        except ValueError:
            self.damaged = True
            return None


def decode(source: str | Path | bytes) -> torch.Tensor:
    """Return any image as upright RGB uint8 [3, height, width], transparency on white. Raises `UserError`: its path."""
    name = "image" if isinstance(source, bytes) else str(source)
    data = source if isinstance(source, bytes) else read_image(ImageItem(name, 0, name), {})
    return torch.from_numpy(EncodedImage(data, name).pixels()).permute(2, 0, 1)


def _rgb_pixels(image: "PIL.Image.Image") -> np.ndarray:
    """Return [height, width, 3] of any mode, not rotated; of an animation its first frame."""
    from PIL import Image

    image.load()
    if image.mode == "F":
        raise ValueError("32-bit float pixels have no known range: store it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits, which convert() would clip or wrap, by mode and version
        grey = np.asarray(image).astype(np.float32)
        grey = np.clip(grey / 257 if image.mode != "I" or grey.max() > 255 else grey, 0, 255).round().astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an Exif orientation: 2 to 4 mirror or turn by 180 degrees, 5 to 8 swap the sides as well."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(pixels[::rows, ::columns])


class Box(NamedTuple):
    """A crop in pixels of the upright original."""

    top: int
    left: int
    height: int
    width: int


def random_box(height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float] = (3 / 4, 4 / 3)) -> Box:
    """Return a random part of the area (`scale`) and aspect (`ratio`, log-uniform): torchvision's RandomResizedCrop.

    Drawn from Python's global generator: torchvision's draws, from PyTorch's, are a fifth of an image from the cache.
    """
    for _ in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * random.random())
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + (high - low) * random.random())
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            return Box(int(random.random() * (height - h + 1)), int(random.random() * (width - w + 1)), h, w)
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def centre_box(height: int, width: int, crop_pct: float) -> Box:
    """Return the square that resizing the short side to size / crop_pct and cropping the centre would keep."""
    side = max(1, round(min(height, width) * crop_pct))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def resized_crop(
    pixels: np.ndarray, original: tuple[int, int], box: Box, size: int, interpolation: str = "bilinear"
) -> torch.Tensor:
    """Return the box as uint8 [3, size, size]; `pixels` [h, w, 3] may be a smaller copy of the `original`."""
    down, right = pixels.shape[0] / original[0], pixels.shape[1] / original[1]
    top, left = round(box.top * down), round(box.left * right)
    bottom, end = round((box.top + box.height) * down), round((box.left + box.width) * right)
    top, left = min(top, pixels.shape[0] - 1), min(left, pixels.shape[1] - 1)
    crop = torch.from_numpy(pixels[top : max(bottom, top + 1), left : max(end, left + 1)]).permute(2, 0, 1)[None]
    # uint8 in and out, antialiased: equal to Pillow's resize(box=...)
    return torch.nn.functional.interpolate(crop, (size, size), mode=interpolation, antialias=True)[0]


@dataclass
class ImageDataset(Dataset):
    """Images as uint8 [3, image_size, image_size] in RGB, a quarter of the bytes of floats; the device normalises them.

    With `crop_scale`, the least and greatest share of the area, a random part is taken, chosen before anything is
    decoded; without, the centre. `augment` then changes the pixels: any transforms of torchvision v2. Both draw from
    the global generators, which `kit.batches.build_loader` seeds from (seed, epoch, sample). Picklable.
    """

    items: list[ImageItem]
    image_size: int
    crop_scale: tuple[float, float] | None = None
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None
    crop_pct: float = 0.875
    interpolation: str = "bilinear"
    tables: dict = field(default_factory=dict)
    cache: "ImageCache | None" = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict:
        item, size = self.items[index], self.image_size
        cached = self.cache and self.cache[item.name]
        image = cached or EncodedImage(read_image(item, self.tables), item.where)
        if self.crop_scale is None:
            box = centre_box(image.height, image.width, self.crop_pct)
        else:
            box = random_box(image.height, image.width, self.crop_scale)
        # decode at 1/2, 1/4 or 1/8 where the crop still has as many pixels as are wanted
        shrink = next(part for part in (8, 4, 2, 1) if part == 1 or min(box.height, box.width) >= size * part)
        pixels = resized_crop(image.pixels(shrink), (image.height, image.width), box, size, self.interpolation)
        return {"image": pixels if self.augment is None else self.augment(pixels), "label": item.label}


class BatchTransform:
    """Turn a batch of bytes into what the model sees, on its device: normalised, and in training mixed.

    `mean` and `std` [3] are of pixels from 0 to 1. `mixup` (arXiv 1710.09412) and `cutmix` (arXiv 1905.04899) are the
    alpha of their Beta distribution, 0: not at all; with both, each batch gets one of them. They draw from PyTorch's
    global generator, which a training loop seeds at each step. With mixing or smoothing, labels become shares of
    classes, float [batch, classes].
    """

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        num_classes: int,
        device: torch.device,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ):
        self.mean, self.std = (255 * torch.tensor(value, device=device).view(3, 1, 1) for value in (mean, std))
        self.label_smoothing, self.num_classes = label_smoothing, num_classes
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.mixers = []
        if mixup or cutmix:
            from torchvision.transforms import v2

            kinds = ((v2.MixUp, mixup), (v2.CutMix, cutmix))
            self.mixers = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]

    def __call__(self, batch: dict, training: bool = False) -> dict:
        """Return the batch with `image` as float [batch, 3, height, width]."""
        image, label = batch["image"].float().sub_(self.mean).div_(self.std), batch["label"]
        image = image.contiguous(memory_format=self.layout)
        if training and self.mixers:
            place = int(torch.randint(len(self.mixers), ()))  # on the CPU: no device is waited for
            image, label = self.mixers[place](image, label)
        if training and self.label_smoothing:
            shares = label if label.ndim == 2 else torch.nn.functional.one_hot(label, self.num_classes).float()
            label = shares * (1 - self.label_smoothing) + self.label_smoothing / self.num_classes
        return {**batch, "image": image, "label": label}
