"""Copy three breeds of the Oxford-IIIT Pets with their official lists into a folder of their own: a small real task.

    python examples/resnet50_pets/three_breeds.py FROM outputs/three_breeds

FROM holds images/ and annotations/. Abyssinian, Bengal and american_bulldog are 300 images for training and 298 of the
official test list. Copies and not links, for the templates do not follow links out of a folder.
"""

import argparse
import shutil
import sys
from pathlib import Path

BREEDS = ("Abyssinian", "Bengal", "american_bulldog")


def copy_breeds(source: Path, target: Path) -> dict[str, int]:
    """Return the number of images of each list."""
    counts = {}
    for folder in ("images", "annotations"):
        (target / folder).mkdir(parents=True, exist_ok=True)
    for name in ("trainval.txt", "test.txt"):
        lines = (source / "annotations" / name).read_text("utf-8").splitlines(keepends=True)
        lines = [line for line in lines if line.split(" ")[0].rsplit("_", 1)[0] in BREEDS]
        (target / "annotations" / name).write_text("".join(lines), "utf-8")
        for line in lines:
            shutil.copyfile(*(folder / "images" / f"{line.split(' ')[0]}.jpg" for folder in (source, target)))
        counts[name] = len(lines)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if not (arguments.source / "annotations" / "trainval.txt").is_file():
        print(f"error: {arguments.source} has no annotations/trainval.txt: give the pets' folder", file=sys.stderr)
        sys.exit(2)
    print(copy_breeds(arguments.source, arguments.target))
