"""Decode every image of a data set before hours are spent on it, and say what is wrong.

    PYTHONPATH=templates python examples/resnet50_pets/check_data.py --data_dir DATA [--json FILE]

Lists bad files, odd ones (used all the same), exact duplicates, also between the splits, and images per class. Exit
code 0; 1 if there are bad files or the same image is in two splits; 2 if the data cannot be made sense of.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from kit.errors import exit_codes
from kit.image_sources import ImageSplits, ScanReport, find_images, scan


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
    parser.add_argument("--data_dir", help="a folder of images")
    parser.add_argument("--dataset_name", help="oxford-iiit-pet (below data_dir), or a dataset of the hub")
    parser.add_argument("--num_workers", type=int, help="threads; default: the cores of this machine")
    parser.add_argument("--json", type=Path, help="write all of it here as well")
    arguments = parser.parse_args()
    splits = find_images(data_dir=arguments.data_dir, dataset_name=arguments.dataset_name)
    report = scan(splits, arguments.num_workers)
    show(splits, report)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        result = {
            **asdict(report),
            "source": splits.source,
            "notes": splits.notes,
            "classes": class_counts(splits),
        }
        arguments.json.write_text(json.dumps(result, indent=1), "utf-8")
    return 1 if report.bad or report.leaks or report.contradictions else 0


if __name__ == "__main__":
    with exit_codes():
        sys.exit(main())
