"""Measure the input pipeline: images per second of one core, decode + augment + collate at 224 px.

    PYTHONPATH=templates python examples/resnet50_pets/bench_images.py --json outputs/bench_images.json

`plain` is what people copy (Pillow, torchvision's v1 transforms, floats); `jpeg` is this template from the same files;
`cache` is this template from `cache_images`. `decode` reads and decodes the files as `jpeg` does, and no more: no
pipeline that decodes whole photos can be quicker. They take turns in one run, in the same thread, over the same images,
each with its own random crops of scale 0.08 to 1. CPU time is counted, so that other programs disturb less.
The files are pets/originals below TEMPLATES_DATA; without it, JPEGs of similar size are made, and the table says so.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one core is what is measured

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.transforms import v2

from kit.batches import Sample, WeightedSamples
from kit.image_cache import open_cache
from kit.image_sources import find_images
from kit.images import EncodedImage, ImageDataset, read_image

BATCH, SIZE = 32, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GOALS = {"jpeg": 3.0, "cache": 9.0}


class PlainDataset:
    """The pipeline of most tutorials."""

    def __init__(self, items):
        self.items = items
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        return self.transform(Image.open(item.place).convert("RGB")), item.label


class DecodedOnly:
    """What the JPEGs themselves cost."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        return {"image": len(EncodedImage(read_image(item, {}), item.where).pixels())}


def make_images(folder: Path, count: int = 96) -> None:
    """Write photos' stand-ins: smooth colour and some grain, 446 x 390, about 95 kB, as the pets are on average."""
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (13, 15, 3), np.uint8)).resize((446, 390), Image.BICUBIC)
        pixels = np.asarray(coarse, np.int16) + random.normal(0, 12, (390, 446, 1)).astype(np.int16)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(folder / f"class{number % 2}_{number}.jpg", quality=92)


def measure(loaders: dict, num_images: int, rounds: int) -> dict[str, list[float]]:
    """Return {name: images per CPU second in each round}; the order turns round from one round to the next."""
    speeds = {name: [] for name in loaders}
    for number in range(-1, rounds):  # round -1 warms up
        for name in list(loaders)[:: 1 if number % 2 else -1]:
            start = time.process_time()
            seen = sum(len(batch[0]) if name == "plain" else len(batch["image"]) for batch in loaders[name](number + 1))
            assert seen == num_images
            if number >= 0:
                speeds[name].append(seen / (time.process_time() - start))
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(os.environ.get("TEMPLATES_DATA", ""), "pets", "originals")
        origin = "real pets (pets/originals)"
        if "TEMPLATES_DATA" not in os.environ or not data.is_dir():
            data, origin = Path(folder, "made"), "made JPEGs (TEMPLATES_DATA is not set): not photos"
            data.mkdir()
            make_images(data)
        splits = find_images(data_dir=str(data))
        items = sorted(splits)
        cache = open_cache(splits, str(Path(folder, "cache")), SIZE, max_gb=2)

        def ours(dataset):
            def batches(epoch):
                samples = [Sample(index, epoch, 1.0) for index in range(len(items))]
                cut = [samples[start : start + BATCH] for start in range(0, len(items), BATCH)]
                return DataLoader(WeightedSamples(dataset, seed=0), batch_sampler=cut)

            return batches

        flip = v2.Compose([v2.RandomHorizontalFlip()])
        loaders = {
            "plain": lambda epoch: DataLoader(PlainDataset(items), batch_size=BATCH),
            "decode": ours(DecodedOnly(items)),
            "jpeg": ours(ImageDataset(items, SIZE, (0.08, 1), flip)),
            "cache": ours(ImageDataset(items, SIZE, (0.08, 1), flip, cache=cache)),
        }
        speeds = measure(loaders, len(items), arguments.rounds)
        kilobytes = statistics.mean(Path(item.place).stat().st_size for item in items) / 1000

    batch = torch.zeros(BATCH, 3, SIZE, SIZE, dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (MEAN, STD))
    start = time.process_time()
    for _ in range(20):
        (batch - mean) / std
    normalise = (time.process_time() - start) / 20 / BATCH * 1000
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    # a ratio of the same round, so that a slow minute of the machine hits both
    ratios = {
        name: statistics.median(ours / plain for ours, plain in zip(speeds[name], speeds["plain"], strict=True))
        for name in speeds
    }
    print(
        f"{len(items)} images, {origin}, {kilobytes:.0f} kB on average; {arguments.rounds} rounds, {platform.machine()}"
    )
    print(f"{'pipeline':10}{'images/s per core':>20}{'lowest':>10}{'highest':>10}{'ratio':>8}{'goal':>7}")
    for name, values in speeds.items():
        goal = f"{GOALS[name]:7.0f}" if name in GOALS else ""
        print(f"{name:10}{medians[name]:20.0f}{min(values):10.0f}{max(values):10.0f}{ratios[name]:8.2f}{goal}")
    print(
        f"Normalising is part of plain. Here the device does it; a CPU would take {normalise:.2f} ms more per image"
        f" ({', '.join(f'{name} {1000 / speed:.2f} ms' for name, speed in medians.items())})."
    )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "origin": origin,
            "images": len(items),
            "mean_kilobytes": kilobytes,
            "image_size": SIZE,
            "batch": BATCH,
            "images_per_second_per_core": medians,
            "rounds": speeds,
            "ratio_to_plain": ratios,
            "goals": GOALS,
            "normalise_ms_per_image_on_cpu": normalise,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        arguments.json.write_text(json.dumps(result, indent=1), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
