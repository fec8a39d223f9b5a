"""Made images of three classes, for `make demo` and the tests; the tiny network comes with timm.

python tests/made_image_classification.py made
"""

import random
import sys
from pathlib import Path

COLOURS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (200, 50, 40)}


def write_images(folder: Path, count: int, seed: int) -> None:
    """Write `count` JPEGs of each class, folder/CLASS/NUMBER.jpg: its colour under coarse noise."""
    from PIL import Image

    draw = random.Random(seed)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = bytes(max(0, min(255, level + draw.randint(-60, 60))) for _ in range(30) for level in colour)
            image = Image.frombytes("RGB", (6, 5), pixels).resize((60, 50), Image.Resampling.BICUBIC)
            image.save(folder / name / f"{number}.jpg")


def settings_for(folder: Path) -> dict:
    """Return settings of the image template for such a folder: steps of 8, micro-batches of 3."""
    return {
        "data_dir": str(folder),
        "model_name_or_path": "test_convnext",  # no BatchNorm: a step may be split in any way
        "pretrained": False,
        "image_size": 32,
        "global_batch_size": 8,
        "micro_batch_size": 3,
        "eval_batch_size": 4,
        "learning_rate": 1e-3,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "num_workers": 0,
        "ddp_timeout": 30.0,
    }


def make(folder: Path) -> dict:
    """Fill `folder`; return the settings of a run on it: 39 images."""
    for seed, (split, count) in enumerate({"train": 13, "validation": 4, "test": 3}.items()):
        write_images(folder / split, count, seed)
    return settings_for(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
