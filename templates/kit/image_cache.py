"""Decode every image once, keep the pixels in one memory-mapped file, and never use a file that is not these images.

A cache is a folder named by a hash of every image's bytes, of the size kept and of the format. The bytes are hashed at
each start (a second for 7,000 photos): a changed, added or removed image, even of the same size and time, is another
cache. Images are shrunk, never enlarged, until the short side is 1.5 times `image_size`: at 224 px the crops of the
Oxford pets then differ from those of the originals by 1.1 of 255 levels on average.
"""

import hashlib
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kit.errors import MachineError, UserError
from kit.image_files import EncodedImage, ImageItem
from kit.image_sources import ImageSplits
from kit.world import visible_cores

FORMAT = 1  # raise it when the layout or the pixels change
PIXELS, INDEX = "pixels.bin", "index.json"


@dataclass(frozen=True)
class CachedImage:
    """Stands for an `EncodedImage`: the size is that of the upright original, the pixels are those kept."""

    height: int
    width: int
    kept: np.ndarray  # uint8 [h, w, 3], a view of the file

    def pixels(self, shrink: int = 1) -> np.ndarray:
        return self.kept


class ImageCache:
    """The images of one cache by name. Pickled as its path: each worker maps the file, the system keeps one copy."""

    def __init__(self, folder: str):
        self.folder = folder
        index = json.loads(Path(folder, INDEX).read_text("utf-8"))
        self.places: dict[str, list[int]] = index["images"]
        if Path(folder, PIXELS).stat().st_size != index["bytes"]:
            raise ValueError(f"{PIXELS} does not have {index['bytes']} bytes")
        # mode "c": nothing is written to the file, and torch does not complain about read-only memory
        self.memory = np.memmap(Path(folder, PIXELS), np.uint8, mode="c")

    def __reduce__(self):
        return ImageCache, (self.folder,)

    def __getitem__(self, name: str) -> CachedImage:
        offset, rows, columns, height, width = self.places[name]
        pixels = self.memory[offset : offset + rows * columns * 3]
        return CachedImage(height, width, np.asarray(pixels).reshape(rows, columns, 3))


def open_cache(
    splits: ImageSplits,
    folder: str,
    image_size: int,
    max_gb: float,
    num_workers: int | None = None,
) -> ImageCache:
    """Return the cache of these images below `folder`; one process of a node makes it where it is missing or torn.

    Raises `UserError` for an image that cannot be decoded, and where the caches of the folder would take more than
    `max_gb` (10^9 bytes) or the disk is too small.
    """
    from filelock import FileLock

    short_side = image_size * 3 // 2
    items = sorted(splits)
    num_workers = num_workers or visible_cores()
    with ThreadPoolExecutor(num_workers) as pool:
        digests = pool.map(lambda item: hashlib.sha256(splits.read(item)).hexdigest(), items)
        key = json.dumps(
            [FORMAT, short_side, [(item.name, digest) for item, digest in zip(items, digests, strict=True)]]
        )
    path = Path(folder).expanduser() / hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # let go by the system if its owner dies
            if path.exists():
                try:
                    return ImageCache(str(path))
                except (OSError, ValueError, KeyError, TypeError) as error:
                    print(f"cache_images: {path} is torn ({error}): made again", file=sys.stderr)
                    shutil.rmtree(path)
            work = path.with_suffix(".partial")
            shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
            work.mkdir()
            try:
                _build(splits, items, work, short_side, max_gb, num_workers)
                work.rename(path)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            return ImageCache(str(path))
    except (OSError, NotImplementedError) as error:  # read-only, full, or a file system without locks
        cause = getattr(error, "strerror", None) or error
        raise MachineError(
            f"cache_images: {path.parent} cannot be written or locked ({cause}): set HF_HOME to a folder on a local"
            " disk, or train without the cache"
        ) from error


def _build(splits: ImageSplits, items: list[ImageItem], work: Path, short_side: int, max_gb: float, num_workers: int):
    from tqdm import tqdm

    with ThreadPoolExecutor(num_workers) as pool:
        places, total = {}, 0
        sizes = pool.map(lambda item: _sizes(EncodedImage(splits.read(item), item.where), short_side), items)
        for item, (rows, columns, height, width) in zip(items, sizes, strict=True):
            places[item.name] = [total, rows, columns, height, width]
            total += rows * columns * 3
        _refuse_too_large(work.parent, total, max_gb)
        with (
            open(work / PIXELS, "wb") as file,
            tqdm(total=len(items), desc="caching", unit="image", disable=None) as bar,
        ):
            for start in range(0, len(items), 256):  # so many at a time wait for the disk
                part = items[start : start + 256]
                for pixels in pool.map(lambda item: _shrunk(splits, item, *places[item.name][1:3]), part):
                    file.write(pixels)
                    bar.update()
            assert file.tell() == total
            file.flush()
            os.fsync(file.fileno())
    with open(work / INDEX, "w", encoding="utf-8") as file:
        json.dump({"bytes": total, "images": places}, file)
        file.flush()
        os.fsync(file.fileno())


def _sizes(image: EncodedImage, short_side: int) -> tuple[int, int, int, int]:
    """Return rows and columns to keep, and height and width of the original."""
    factor = min(1.0, short_side / min(image.height, image.width))
    return round(image.height * factor), round(image.width * factor), image.height, image.width


def _shrunk(splits: ImageSplits, item: ImageItem, rows: int, columns: int) -> np.ndarray:
    image = EncodedImage(splits.read(item), item.where)
    shrink = next(part for part in (8, 4, 2, 1) if part == 1 or image.height >= rows * part)
    pixels = image.pixels(shrink)
    if pixels.shape[:2] == (rows, columns):
        return pixels
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    planes = torch.nn.functional.interpolate(planes, (rows, columns), mode="bilinear", antialias=True)
    return planes[0].permute(1, 2, 0).contiguous().numpy()


def _refuse_too_large(folder: Path, needed: int, max_gb: float) -> None:
    others = sum(file.stat().st_size for file in folder.glob(f"*/{PIXELS}"))
    if needed + others > max_gb * 1e9:
        held = f"; others in {folder} take {others / 1e9:.2f} GB: delete what is no longer used" if others else ""
        raise UserError(f"cache_images: {needed / 1e9:.2f} GB are needed, more than the limit of {max_gb:g} GB{held}")
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"cache_images: {needed / 1e9:.2f} GB are needed, {folder} has {free / 1e9:.2f} GB free: choose another"
            " folder, or train without the cache"
        )
