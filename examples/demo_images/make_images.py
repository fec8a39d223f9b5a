"""Draw a small set of labelled images offline: heads of four animals that differ in their ears.

    python examples/demo_images/make_images.py outputs/demo_images/data --seed 0

writes train/CLASS/CLASS_0000.jpg and test/CLASS/..., 96 x 96 pixels or a little more, colour. Colours, size, place,
tilt, expression, background, light, grain and JPEG quality vary freely and alike in all classes, so that only the form
of the ears tells them apart: a network has to learn it. A number measured on these drawings is about nothing else.
"""

import argparse
import math
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

CLASSES = ("bear", "cat", "dog", "rabbit")
IMAGES_PER_CLASS = {"train": 250, "test": 50}
SIDE = 96  # pixels; drawn twice as large and shrunk, which smooths the edges


def draw_image(label: str, draw: random.Random) -> Image.Image:
    """Return one drawing, RGB, of `label`; everything but the ears is drawn without looking at it."""
    width, height = (2 * (SIDE + draw.randrange(33)) for _ in range(2))
    image = _background(width, height, draw)
    fur = tuple(draw.randrange(30, 240) for _ in range(3))
    inner = tuple(min(255, max(0, value + draw.choice((-60, 60)))) for value in fur)
    radius = min(width, height) * draw.uniform(0.24, 0.29)
    head = Image.new("RGBA", (int(radius * 5.2),) * 2)
    _ears(label, head, radius, fur, inner, draw)
    _face(head, radius, fur, inner, draw)
    head = head.rotate(draw.uniform(-25, 25), Image.Resampling.BICUBIC)
    room_x, room_y = width - 3.2 * radius, height - 3.2 * radius
    place = (
        int(1.6 * radius + draw.random() * room_x - head.width / 2),
        int(1.6 * radius + draw.random() * room_y - head.height / 2),
    )
    image.paste(head, place, head)
    for _ in range(draw.randrange(3)):  # something in front
        x, y, size = draw.randrange(width), draw.randrange(height), draw.randrange(6, 26)
        ImageDraw.Draw(image).ellipse((x, y, x + size, y + size), fill=tuple(draw.choices(range(256), k=3)))
    image = image.resize((width // 2, height // 2), Image.Resampling.BOX)
    light, offset = draw.uniform(0.6, 1.3), draw.uniform(-25, 25)
    image = image.point([max(0, min(255, round(level * light + offset))) for level in range(256)] * 3)
    noise = Image.frombytes("RGB", image.size, draw.randbytes(3 * image.width * image.height))
    image = Image.blend(image, noise, draw.uniform(0, 0.1))
    return image.filter(ImageFilter.GaussianBlur(draw.choice((0, 0, 0.7))))


def _background(width: int, height: int, draw: random.Random) -> Image.Image:
    """Return large soft patches of colour with a few lines through them."""
    patches = Image.frombytes("RGB", (4, 4), draw.randbytes(48)).resize((width, height), Image.Resampling.BICUBIC)
    image = Image.blend(Image.new("RGB", patches.size, tuple(draw.choices(range(256), k=3))), patches, 0.35)
    pen = ImageDraw.Draw(image)
    for _ in range(draw.randrange(4)):
        ends = [(draw.randrange(width), draw.randrange(height)) for _ in range(2)]
        pen.line(ends, fill=tuple(draw.choices(range(256), k=3)), width=draw.randrange(2, 9))
    return image


def _ears(label: str, head: Image.Image, radius: float, fur, inner, draw: random.Random) -> None:
    """Draw two ears: round on a bear, pointed on a cat, hanging on a dog, long on a rabbit."""
    centre = head.width / 2
    size = radius * draw.uniform(0.85, 1.15)
    spread = {"bear": 0.75, "cat": 0.62, "dog": 1.05, "rabbit": 0.4}[label] * draw.uniform(0.9, 1.1)
    for side in (-1, 1):
        pen = ImageDraw.Draw(head)
        x = centre + side * radius * math.sin(spread)
        y = centre - radius * math.cos(spread)
        for colour, part in ((fur, 1.0), (inner, 0.55)):
            if label == "bear":
                reach = 0.45 * size * part
                pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill=colour)
            elif label == "cat":
                foot, tip = 0.5 * size * part, 0.95 * size * part
                corners = [(x - foot, y + foot), (x + foot, y + foot), (x + side * 0.25 * size, y - tip)]
                pen.polygon(corners, fill=colour)
            else:
                wide, long = (0.32 * size, 0.85 * size) if label == "dog" else (0.26 * size, 0.95 * size)
                middle = y + 0.75 * size if label == "dog" else y - 0.65 * size
                lean = side * (0.12 if label == "dog" else 0.1) * size
                box = (
                    x + lean - wide * part,
                    middle - long * part,
                    x + lean + wide * part,
                    middle + long * part,
                )
                pen.ellipse(box, fill=colour)


def _face(head: Image.Image, radius: float, fur, inner, draw: random.Random) -> None:
    pen, centre = ImageDraw.Draw(head), head.width / 2

    def disc(x: float, y: float, wide: float, high: float, colour) -> None:
        x, y = centre + x * radius, centre + y * radius
        pen.ellipse((x - wide * radius, y - high * radius, x + wide * radius, y + high * radius), fill=colour)

    disc(0, 0, draw.uniform(0.95, 1.1), draw.uniform(0.9, 1.05), fur)
    eye, apart = draw.uniform(0.1, 0.2), draw.uniform(0.3, 0.5)
    for side in (-1, 1):
        disc(side * apart, -0.2, eye, eye * draw.uniform(0.6, 1.3), "white")
        disc(side * apart, -0.2, eye / 2, eye / 2, "black")
    disc(0, 0.4, draw.uniform(0.25, 0.45), draw.uniform(0.2, 0.35), inner)
    disc(0, 0.25, draw.uniform(0.08, 0.15), 0.08, "black")


def write_images(folder: Path, seed: int = 0, images_per_class: dict[str, int] = IMAGES_PER_CLASS) -> None:
    """Write folder/SPLIT/CLASS/CLASS_NUMBER.jpg; each drawing depends on seed, split, class and number alone."""
    for split, count in images_per_class.items():
        for label in CLASSES:
            (folder / split / label).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                draw = random.Random(f"{seed}/{split}/{label}/{number}")
                image = draw_image(label, draw)
                image.save(folder / split / label / f"{label}_{number:04}.jpg", quality=draw.randrange(70, 96))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_images(arguments.folder, arguments.seed)
    print(f"{sum(IMAGES_PER_CLASS.values()) * len(CLASSES)} images of {len(CLASSES)} classes in {arguments.folder}")


if __name__ == "__main__":
    sys.exit(main())
