"""Find labelled images in the forms people have them, and split them reproducibly."""

import hashlib
import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kit.errors import UserError
from kit.image_files import ImageItem, read_image
from kit.image_folders import (
    LISTS,
    SPLIT_NAMES,
    UNLABELLED,
    folder_splits,
    list_folder,
    official_splits,
    split_of,
)
from kit.image_options import PETS

WAYS_ON = "Ways on: a folder of images (--data_dir); a filled cache of a machine that has it"


@dataclass(frozen=True)
class ImageSplits:
    """Splits sorted by name; they share no name, and are a function of the names and the seed alone."""

    train: list[ImageItem]
    validation: list[ImageItem]
    test: list[ImageItem]  # empty where there is none
    label_names: tuple[str, ...]  # the position is the class id
    source: dict  # for run.json: where from, images and SHA-256 of each split, whether validation was carved
    notes: list[str]  # what the user should know, to be printed once
    tables: dict = field(default_factory=dict)  # {split: the hub dataset, images as bytes}

    def __iter__(self):
        return iter((*self.train, *self.validation, *self.test))

    def read(self, item: ImageItem) -> bytes:
        return read_image(item, self.tables)


def find_images(
    *,
    data_dir: str | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    validation_fraction: float = 0.1,
    seed: int = 0,
) -> ImageSplits:
    """Return the splits of a folder, of the Oxford pets (`dataset_name` oxford-iiit-pet) or of a hub dataset.

    A folder has one sub-folder per class (with train, validation and test above, or not) or files named
    class_number.jpg; official lists annotations/{trainval,test}.txt beside such files are followed. Without a
    validation split one is carved from train. A test folder of files without any class gets label -1.
    Nothing is decoded here: `image_checks.check_images` does that. Raises `UserError`.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"validation_fraction: {validation_fraction} must lie between 0 and 1")
    tables, notes = {}, []
    if dataset_name is not None and dataset_name != PETS:
        if data_dir is not None:
            raise UserError(f"data_dir {data_dir!r} and dataset_name {dataset_name!r} are both given: set one to null")
        found, label_names, tables = _hub_images(dataset_name, dataset_config_name, image_column, label_column)
    elif not data_dir:
        raise UserError("no images: give data_dir (a folder) or dataset_name")
    else:
        root = _pets_folder(Path(data_dir).expanduser()) if dataset_name == PETS else Path(data_dir).expanduser()
        if (root / LISTS / "trainval.txt").is_file() and (root / "images").is_dir():
            root = root / "images"
        if not root.is_dir():
            raise UserError(f"data_dir: no such folder: {data_dir!r}")
        listing = list_folder(root.resolve())
        lists = root.absolute().parent / LISTS
        if root.absolute().name == "images" and (lists / "trainval.txt").is_file():
            found = official_splits(data_dir, lists, listing)
        else:
            found = folder_splits(data_dir, listing)
        label_names = sorted({label for _, label, _ in found.get("train", ())})
        if listing.ignored:
            kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(listing.ignored.items()))
            notes.append(f"ignored in {data_dir}: {kinds}")
        notes += listing.notes
    where = dataset_name if data_dir is None else data_dir
    if len(label_names) < 2:
        raise UserError(
            f"{where}: {len(label_names)} classes in train{': ' if label_names else ''}{', '.join(label_names)}; two at"
            " least are needed: one sub-folder per class, or files named class_number.jpg"
        )
    ids = {label: position for position, label in enumerate(label_names)} | {UNLABELLED: -1}
    for names in _twins(label_names):
        notes.append(f"classes {' and '.join(map(repr, names))}: probably one class, spelled in several ways")
    splits = {}
    for split in ("train", "validation", "test"):
        rows = sorted(found.get(split, ()))
        unknown = sorted({label for _, label, _ in rows} - ids.keys())
        if unknown:
            raise UserError(f"{where}: {split} has classes that train has not: {_with_twins(unknown[:5], label_names)}")
        splits[split] = [ImageItem(name, ids[label], place) for name, label, place in rows]
    carved = "validation" not in found
    if carved:
        splits["train"], splits["validation"] = carve(splits["train"], validation_fraction, seed)
        notes.append(
            f"no validation split: {len(splits['validation'])} images carved from train, stratified, seed {seed}"
        )
    source = {"data_dir": data_dir, "dataset_name": dataset_name, "validation_carved": carved}
    return _checked(ImageSplits(**splits, label_names=tuple(label_names), source=source, notes=notes, tables=tables))


def carve(items: list[ImageItem], fraction: float, seed: int) -> tuple[list[ImageItem], list[ImageItem]]:
    """Return (train, validation), with `fraction` of each class, but one at least, in validation; a lone image stays.

    Images are ranked by a hash of seed and name: no generator, no order of listing, no process can change the choice.
    """
    ranked: dict[int, list] = {}
    for item in items:
        rank = hashlib.sha256(f"{seed}/{item.name}".encode()).digest()
        ranked.setdefault(item.label, []).append((rank, item.name))
    chosen = set()
    for ranks in ranked.values():
        count = min(max(round(len(ranks) * fraction), 1), len(ranks) - 1)
        chosen |= {name for _, name in sorted(ranks)[:count]}
    return [item for item in items if item.name not in chosen], [item for item in items if item.name in chosen]


def leave_out(splits: ImageSplits, bad: Iterable[str]) -> ImageSplits:
    """Return the splits without the images of these names, for `skip_bad_images`; the others stay where they are."""
    bad = set(bad)
    kept = {
        split: [item for item in getattr(splits, split) if item.name not in bad]
        for split in ("train", "validation", "test")
    }
    count = sum(item.name in bad for item in splits)
    assert count == len(bad), "a bad image that is in no split"
    for label in sorted({item.label for item in splits.train} - {item.label for item in kept["train"]}):
        files = [item.where for item in splits.train if item.label == label]
        raise UserError(
            f"no image of {splits.label_names[label]} left in train: none of its {len(files)} can be decoded"
            f" ({', '.join(files[:5])}{', ...' if len(files) > 5 else ''}): replace them, or take the class out"
        )
    return _checked(replace(splits, **kept, notes=[*splits.notes, f"{count} skipped: images that cannot be decoded"]))


def _twins(label_names: Iterable[str]) -> list[list[str]]:
    """Return the groups of labels that differ only in case, separators, invisible characters or spelling of accents."""
    groups: dict[str, list[str]] = {}
    for name in label_names:
        groups.setdefault(_likeness(name), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _likeness(name: str) -> str:
    visible = (c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf")
    return re.sub(r"[\s_-]+", " ", "".join(visible)).strip().casefold() or name


def _with_twins(unknown: list[str], label_names: list[str]) -> str:
    like = {_likeness(name): name for name in label_names}
    twins = {name: like[_likeness(name)] for name in unknown if _likeness(name) in like}
    return ", ".join(f"{name} (train has {twins[name]})" if name in twins else name for name in unknown)


def _checked(splits: ImageSplits) -> ImageSplits:
    """Refuse empty splits, assert that no image is in two, and note sizes and hashes in `source`."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    where = splits.source["data_dir"] or splits.source["dataset_name"]
    label_names = {-1: UNLABELLED, **dict(enumerate(splits.label_names))}
    lost = set(range(len(splits.label_names))) - {item.label for item in splits.train}
    if lost:
        names = ", ".join(splits.label_names[label] for label in sorted(lost))
        raise UserError(f"{where}: no image of {names} in train: add some, or drop the class")
    if not splits.validation:
        raise UserError(f"{where}: no image for validation: give more than one of some class, or a validation split")
    assert len({item.name for item in splits}) == sum(map(len, parts.values())), "an image is in two splits"
    lines = {
        split: "".join(f"{item.name}\t{label_names[item.label]}\n" for item in items) for split, items in parts.items()
    }
    digests = {split: hashlib.sha256(text.encode()).hexdigest() for split, text in lines.items()}
    sizes = {split: len(items) for split, items in parts.items()}
    return replace(splits, source={**splits.source, "rows": sizes, "sha256": digests})


def _pets_folder(root: Path) -> Path:
    """Return root/oxford-iiit-pet, downloaded by one process of the node where it is not there yet."""
    from filelock import FileLock

    folder = root / PETS
    if not (folder / "annotations" / "trainval.txt").is_file() or not (folder / "images").is_dir():
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
            raise UserError(f"{folder}: images/ and annotations/ are not there, and HF_HUB_OFFLINE is set. {WAYS_ON}")
        from torchvision.datasets import OxfordIIITPet

        try:
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f".{PETS}.lock"):
                OxfordIIITPet(str(root), download=True)
        except (OSError, RuntimeError) as error:  # no network; a damaged archive
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(f"dataset_name: cannot download {PETS} to {root}: {reason}. {WAYS_ON}") from error
    return folder


def _hub_images(dataset_name: str, config: str | None, image_column: str | None, label_column: str | None):
    """Return ({split: [(name, class, (split, row))]}, the class names, {split: the Dataset with images as bytes})."""
    import datasets

    try:
        loaded = datasets.load_dataset(dataset_name, config)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"dataset_name: cannot load {dataset_name!r}: {reason}. {WAYS_ON}") from error
    splits = {}
    for split in sorted(loaded, key=lambda split: split not in SPLIT_NAMES):  # test goes before test_2
        if name := split_of(split):
            splits.setdefault(name, loaded[split])
    if "train" not in splits:
        raise UserError(f"dataset_name: {dataset_name!r} has no split 'train', only {', '.join(loaded)}")
    features = splits["train"].features
    image_column = image_column or _only_column(dataset_name, features, "image_column", datasets.Image)
    label_column = label_column or _only_column(dataset_name, features, "label_column", datasets.ClassLabel)
    if image_column not in features or label_column not in features:
        raise UserError(f"{dataset_name}: no column {image_column!r} or {label_column!r} among {', '.join(features)}")
    names = features[label_column].names if isinstance(features[label_column], datasets.ClassLabel) else None
    found, tables = {}, {}
    for split, data in splits.items():
        labels = list(data[label_column]) if label_column in data.column_names else [None] * len(data)
        missing = [label is None or label == -1 for label in labels]
        is_hidden = split == "test" and all(missing)
        if any(missing) and not is_hidden:
            raise UserError(f"{dataset_name}: {split} has rows without a {label_column!r} (null or -1): take them out")
        data = data.select_columns([image_column]).cast_column(image_column, datasets.Image(decode=False))
        tables[split] = data.rename_columns({image_column: "image"} if image_column != "image" else {})
        found[split] = [
            (f"{split}/{row:08d}", UNLABELLED if is_hidden else names[label] if names else str(label), (split, row))
            for row, label in enumerate(labels)
        ]
    if names is None:
        names = sorted({label for _, label, _ in found["train"]}, key=lambda name: (name.isdigit() and int(name), name))
    return found, names, tables


def _only_column(dataset_name: str, features: dict, option: str, kind: type) -> str:
    columns = [name for name, feature in features.items() if isinstance(feature, kind)]
    if len(columns) != 1:
        raise UserError(f"{dataset_name}: give --{option}; columns there: {', '.join(features)}")
    return columns[0]
