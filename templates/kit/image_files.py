"""Decode any image file that people bring to upright RGB bytes.

Pillow opens everything and decides what an image is. The pixels of ordinary JPEGs come from simplejpeg (libjpeg-turbo;
it needs numpy only), which gives bit for bit what Pillow gives in 0.73 of its time, notices truncation, and can decode
at 1/2, 1/4 or 1/8 of the size. torchvision.io takes 0.8 of Pillow's time and cannot.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kit.errors import UserError

if TYPE_CHECKING:
    import PIL.Image

# What Pillow may open, whatever the suffix says, and the suffixes by which image files are found.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF", "JPEG2000", "PPM")
SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .gif .bmp .webp .tif .tiff .avif .jp2 .j2k .ppm .pgm .pbm .pnm".split()
)
ORIENTATION, BITS_PER_SAMPLE, MAX_SAMPLE_VALUE, SIGNED_MAX_SAMPLE_VALUE = 0x0112, 258, 281, 341  # tags of TIFF and Exif


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
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


class EncodedImage:
    """An image whose header is read: `height` and `width` in pixels, upright; `pixels` decodes. Raises `UserError`.

    Decoding sets `damaged` for a complete JPEG that libjpeg-turbo doubts, and `dark` to a remark where the pixels use
    only a part of their bits, as scanners of 10 to 14 bits and masks do: the picture then looks almost black.
    """

    def __init__(self, data: bytes, name: str):
        from PIL import Image

        self.data, self.name, self.damaged, self.dark = data, name, False, ""
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
        kind = self.opened.format
        if kind == "TIFF" or (kind in ("JPEG", "MPO") and not {"exif", "xmp"} & self.opened.info.keys()):
            return 1  # Pillow turns TIFF itself
        value = self.opened.getexif().get(ORIENTATION)
        return value if isinstance(value, int) and 1 <= value <= 8 else 1

    def _undecodable(self, error: Exception) -> UserError:
        return UserError(f"{self.name}: cannot be decoded ({type(error).__name__}: {' '.join(str(error).split())})")

    def pixels(self, shrink: int = 1) -> np.ndarray:
        """Return upright RGB uint8 [height, width, 3]; of a JPEG each side is divided by `shrink` (1, 2, 4 or 8)."""
        pixels = self._jpeg_pixels(shrink)
        if pixels is None:
            try:
                pixels = self._pillow_pixels()
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

    def _pillow_pixels(self) -> np.ndarray:
        """Return [height, width, 3] of any mode, not rotated; an animation's first frame; transparency is white."""
        from PIL import Image

        image = self.opened
        image.load()
        if image.mode == "F":
            raise ValueError("32-bit float pixels have no known range: store it with 8 or 16 bits")
        if image.mode.startswith("I"):
            return np.repeat(self._grey_of_many_bits()[..., None], 3, axis=2)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        pixels = np.array(image.convert("RGB"))
        used = int(pixels.max()).bit_length()
        if self._has_16_bits_per_colour():  # of which Pillow keeps the upper 8
            self._note_unused_bits(8 + used, 16)
        else:
            self._note_unused_bits(used, 8)
        return pixels

    def _grey_of_many_bits(self) -> np.ndarray:
        """Scale 12, 16 or 32 bits to 8, uint8 [height, width]: convert() clips or wraps them, by mode and version."""
        values = np.asarray(self.opened).astype(np.float64)
        used = int(values.max()).bit_length()
        bits = next(size for size in (8, 16, 32) if used <= size) if self.opened.mode == "I" else 16
        said = self._said_bits()
        if said and used <= said:  # else the file contradicts itself
            bits = said
        else:
            self._note_unused_bits(used, bits)
        return np.clip(values * (255 / (2**bits - 1)), 0, 255).round().astype(np.uint8)

    def _said_bits(self) -> int:
        """Return the bits in use by a TIFF's own word, 0 where it has none."""
        tags = getattr(self.opened, "tag_v2", {})
        largest = tags.get(MAX_SAMPLE_VALUE, tags.get(SIGNED_MAX_SAMPLE_VALUE))
        if largest is None:
            return 12 if tags.get(BITS_PER_SAMPLE) == (12,) else 0
        return int(np.max(largest)).bit_length()

    def _has_16_bits_per_colour(self) -> bool:
        if self.opened.format == "PNG":
            return self.data[24] == 16  # the depth in its header
        return max(getattr(self.opened, "tag_v2", {}).get(BITS_PER_SAMPLE, (8,))) == 16

    def _note_unused_bits(self, used: int, bits: int) -> None:
        """Night photos have bright spots: a picture whose brightest pixel is this dark is rarely meant to be."""
        if 0 < used <= {8: 4, 16: 14}.get(bits, 0):
            self.dark = f"uses {used} of {bits} bits"


def decode(source: str | Path | bytes) -> torch.Tensor:
    """Return any image as upright RGB uint8 [3, height, width], transparency on white. Raises `UserError`: its path."""
    name = "image" if isinstance(source, bytes) else str(source)
    data = source if isinstance(source, bytes) else read_image(ImageItem(name, 0, name), {})
    return torch.from_numpy(EncodedImage(data, name).pixels()).permute(2, 0, 1)


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an Exif orientation: 2 to 4 mirror or turn by 180 degrees, 5 to 8 swap the sides as well."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(pixels[::rows, ::columns])
