"""Crop images reproducibly, mix them, and hand them out as bytes that the device normalises.

Cropping and resizing uint8 in torch equals Pillow's bit for bit, in 0.35 of its time.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from kit.image_cache import ImageCache
from kit.image_files import EncodedImage, ImageItem, read_image


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
    return F.interpolate(crop, (size, size), mode=interpolation, antialias=True)[0]


@dataclass
class Mixing:
    """Mix each training image with another one, chosen by sample: no batch has a say in it.

    `mixup` (arXiv 1710.09412) and `cutmix` (arXiv 1905.04899) are the alpha of their Beta distributions, 0: not at all;
    with both, each image gets one of them. Draws from Python's global generator. Loading takes twice as long, because
    two images are decoded for each sample.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __call__(self, own: torch.Tensor, partner: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the mixture of two uint8 images [3, height, width] and the share of `own` in it."""
        is_cutmix = random.random() < 0.5 if self.mixup and self.cutmix else bool(self.cutmix)
        alpha = self.cutmix if is_cutmix else self.mixup
        share = random.betavariate(alpha, alpha)
        if not is_cutmix:
            return own.float().lerp_(partner.float(), 1 - share).round_().byte(), share
        box = patch_box(own.shape[1], own.shape[2], 1 - share)
        mixed = own.clone()
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        mixed[:, rows, columns] = partner[:, rows, columns]
        return mixed, 1 - box.height * box.width / own[0].numel()


def patch_box(height: int, width: int, area: float) -> Box:
    """Return a box of this share of the area and the image's aspect around a random point, cut at the borders."""
    half_height, half_width = (int(0.5 * math.sqrt(area) * side) for side in (height, width))
    row, column = random.randrange(height), random.randrange(width)
    top, left = max(row - half_height, 0), max(column - half_width, 0)
    return Box(top, left, min(row + half_height, height) - top, min(column + half_width, width) - left)


@dataclass
class ImageDataset(Dataset):
    """Images as uint8 [3, image_size, image_size] in RGB, a quarter of the bytes of floats; the device normalises them.

    With `crop_scale`, the least and greatest share of the area, a random part is taken, chosen before anything is
    decoded; without, the centre. `augment` then changes the pixels: any transforms of torchvision v2. `mixing` blends
    the image with one of the others, cropped and augmented likewise; the item then has `partner_label` and `share`, the
    own label's part. All draw from the global generators, which `kit.batches.build_loader` seeds from (seed, epoch,
    sample). Picklable.
    """

    items: list[ImageItem]
    image_size: int
    crop_scale: tuple[float, float] | None = None
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None
    mixing: Mixing | None = None
    crop_pct: float = 0.875
    interpolation: str = "bilinear"
    tables: dict = field(default_factory=dict)
    cache: ImageCache | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict:
        item = {"image": self.pixels(index), "label": self.items[index].label}
        if self.mixing is None:
            return item
        partner = (index + random.randrange(1, max(len(self), 2))) % len(self)
        image, share = self.mixing(item["image"], self.pixels(partner))
        return item | {"image": image, "partner_label": self.items[partner].label, "share": np.float32(share)}

    def pixels(self, index: int) -> torch.Tensor:
        """Return an image cropped, resized and augmented, uint8 [3, image_size, image_size]."""
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
        return pixels if self.augment is None else self.augment(pixels)


def layout_for(device: torch.device) -> torch.memory_format:
    """Return the memory format in which convolutions run fastest on a device, for images and models alike."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


class NormalisedBatches:
    """Iterate over the batches of a loader as the model sees them, on its device. Nothing here is random.

    `image` becomes float [batch, 3, height, width], normalised by `mean` and `std` [3] of pixels from 0 to 1. Where
    images were mixed, or with `label_smoothing` (for training only), `label` becomes shares of classes, float
    [batch, classes]; else it stays int64 [batch].
    """

    def __init__(
        self,
        loader,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        num_classes: int,
        device: torch.device,
        label_smoothing: float = 0.0,
    ):
        self.loader, self.num_classes, self.label_smoothing = loader, num_classes, label_smoothing
        self.mean, self.std = (255 * torch.tensor(value, device=device).view(3, 1, 1) for value in (mean, std))
        self.layout = layout_for(device)
        self.dataset, self.collate_fn = loader.dataset, loader.collate_fn

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict]:
        return map(self.normalise, self.loader)

    def normalise(self, batch: dict) -> dict:
        """Return a collated batch that lies on the device, with its image normalised and its label of either kind."""
        image = batch["image"].float().sub_(self.mean).div_(self.std).contiguous(memory_format=self.layout)
        return batch | {"image": image, "label": self._label(batch)}

    def _label(self, batch: dict) -> torch.Tensor:
        label, smoothing = batch["label"], self.label_smoothing
        if "share" not in batch and not smoothing:
            return label
        shares = F.one_hot(label, self.num_classes).float()
        if "share" in batch:
            shares = shares.lerp(
                F.one_hot(batch["partner_label"], self.num_classes).float(), 1 - batch["share"][:, None]
            )
        return shares * (1 - smoothing) + smoothing / self.num_classes
