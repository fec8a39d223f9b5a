"""Decode every image of a data set before hours are spent on it, and say what is wrong.

    PYTHONPATH=templates python examples/resnet50_pets/check_data.py --data_dir DATA [--json FILE]

Lists bad files, odd ones (used all the same), exact duplicates, also between the splits, and images per class. The
options that decide on the splits are the template's, with its defaults: give those of your recipe, and the splits are
those of the run. Exit code 0; 1 if there are bad files, or the same image is in two splits or classes; 2 if the data
cannot be made sense of.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from kit.errors import exit_codes
from kit.image_checks import ScanReport, scan
from kit.image_sources import ImageSplits, find_images


def class_counts(splits: ImageSplits) -> dict[str, dict[str, int]]:
    """Return {class: {split: images}}."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    counts = {split: Counter(item.label for item in items) for split, items in parts.items()}
    return {name: {split: counts[split][label] for split in parts} for label, name in enumerate(splits.label_names)}


def show(splits: ImageSplits, report: ScanReport) -> None:
    for note in splits.notes:
        print(note)
    print(f"\n{'class':40}{'train':>8}{'validation':>12}{'test':>8}")
    for name, counts in class_counts(splits).items():
        print(f"{name:40}{counts['train']:8}{counts['validation']:12}{counts['test']:8}")
    rows = splits.source["rows"]
    print(f"{'all':40}{rows['train']:8}{rows['validation']:12}{rows['test']:8}")
    for title, lines in (
        ("bad, cannot be used", [f"{reason}" for reason in report.bad.values()]),
        ("odd, used all the same", [f"{name}: {remark}" for name, remark in report.odd.items()]),
        ("the same bytes in two classes", [" = ".join(names) for names in report.contradictions]),
        ("the same bytes on both sides, of training and of a test", [" = ".join(names) for names in report.leaks]),
        (
            "the same bytes twice on one side",
            [" = ".join(names) for names in report.duplicates if names not in report.leaks],
        ),
    ):
        print(f"\n{title}: {len(lines)}")
        for line in lines:
            print(f"  {line}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    source = parser.add_argument_group("the same as in the recipe")
    source.add_argument("--data_dir", help="a folder of images")
    source.add_argument("--dataset_name", help="oxford-iiit-pet (below data_dir), or a dataset of the hub")
    source.add_argument("--dataset_config_name", help="its configuration, where it has several")
    source.add_argument("--image_column", help="of a dataset of the hub; default: the only column of images")
    source.add_argument("--label_column", help="of a dataset of the hub; default: the only column of classes")
    source.add_argument("--validation_fraction", type=float, default=0.1, help="default: %(default)s")
    source.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    parser.add_argument("--num_workers", type=int, help="threads; default: the cores of this machine")
    parser.add_argument("--json", type=Path, help="write all of it here as well")
    arguments = vars(parser.parse_args())
    num_workers, path = arguments.pop("num_workers"), arguments.pop("json")
    splits = find_images(**arguments)
    report = scan(splits, num_workers)
    show(splits, report)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            **asdict(report),
            "source": splits.source,
            "notes": splits.notes,
            "classes": class_counts(splits),
        }
        path.write_text(json.dumps(result, indent=1), "utf-8")
    return 1 if report.bad or report.leaks or report.contradictions else 0


if __name__ == "__main__":
    with exit_codes():
        sys.exit(main())
