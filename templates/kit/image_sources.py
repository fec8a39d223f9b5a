"""Find labelled images in the forms people have them, split them reproducibly, and check every file."""

import hashlib
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from kit.errors import UserError
from kit.images import EncodedImage, ImageItem, read_image
from kit.world import visible_cores

PETS = "oxford-iiit-pet"  # torchvision's name of the folder, and our dataset_name
LISTS = "annotations"  # the folder of official lists beside images/
SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"}
SPLIT_NAMES = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}
UNLABELLED = ""  # in place of a class
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
    Nothing is decoded here: `check_images` does that. Raises `UserError`.
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
            raise UserError(f"data_dir: there is no folder {data_dir!r}")
        files, ignored = _walk(root.resolve())
        lists = root.absolute().parent / LISTS
        if root.absolute().name == "images" and (lists / "trainval.txt").is_file():
            found = _official_splits(data_dir, lists, files, ignored)
        else:
            found = _folder_splits(data_dir, files, ignored)
        label_names = sorted({label for _, label, _ in found.get("train", ())})
        if +ignored:
            kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted((+ignored).items()))
            notes.append(f"ignored in {data_dir}: {kinds}")
    where = dataset_name if data_dir is None else data_dir
    if len(label_names) < 2:
        raise UserError(
            f"{where}: {len(label_names)} classes in train{': ' if label_names else ''}{', '.join(label_names)}; two at"
            " least are needed: one sub-folder per class, or files named class_number.jpg"
        )
    ids = {label: position for position, label in enumerate(label_names)} | {UNLABELLED: -1}
    splits = {}
    for split in ("train", "validation", "test"):
        rows = sorted(found.get(split, ()))
        unknown = sorted({label for _, label, _ in rows} - ids.keys())
        if unknown:
            raise UserError(f"{where}: {split} has classes that train has not: {', '.join(unknown[:5])}")
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


def check_images(splits: ImageSplits, folder: Path, skip_bad_images: bool) -> ImageSplits:
    """Return the splits without the images that cannot be decoded, or raise `UserError` that names them.

    What a scan found is kept in `folder`, under the names, sizes and times of the files (or the fingerprint of a hub
    dataset): the other processes of a node, and the next start, need not decode everything again.
    """
    items = list(splits)
    marks = [(item.name, *_mark(item, splits.tables)) for item in items]
    digest = hashlib.sha256(repr(marks).encode()).hexdigest()
    path = folder / f"scan-{digest[:32]}.json"
    if path.exists():
        bad = json.loads(path.read_text("utf-8"))
    else:
        bad = scan(splits).bad
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(bad), "utf-8")
        temporary.replace(path)
    if not bad:
        return splits
    if skip_bad_images:
        return leave_out(splits, bad)
    shown = [*list(bad.values())[:5], *([f"and {len(bad) - 5} more"] if len(bad) > 5 else [])]
    raise UserError(
        f"{len(bad)} of {len(items)} images cannot be used: {'; '.join(shown)}. Take them out (all are named in"
        f" {path}), or leave them out of this run with --skip_bad_images true"
    )


def _mark(item: ImageItem, tables: dict) -> tuple:
    """Return what changes when an image's bytes do."""
    if not isinstance(item.place, str):
        return (tables[item.place[0]]._fingerprint, item.place[1])
    try:
        stat = os.stat(item.place)
    except OSError as error:
        raise UserError(f"{item.place}: cannot be read ({error.strerror})") from error
    return (item.place, stat.st_size, stat.st_mtime_ns)


def leave_out(splits: ImageSplits, bad: Iterable[str]) -> ImageSplits:
    """Return the splits without the images of these names, for `skip_bad_images`; the others stay where they are."""
    bad = set(bad)
    kept = {
        split: [item for item in getattr(splits, split) if item.name not in bad]
        for split in ("train", "validation", "test")
    }
    count = sum(item.name in bad for item in splits)
    assert count == len(bad), "a bad image that is in no split"
    return _checked(replace(splits, **kept, notes=[*splits.notes, f"{count} skipped: images that cannot be decoded"]))


def _checked(splits: ImageSplits) -> ImageSplits:
    """Refuse empty splits, assert that no image is in two, and note sizes and hashes in `source`."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    where = splits.source["data_dir"] or splits.source["dataset_name"]
    label_names = {-1: UNLABELLED, **dict(enumerate(splits.label_names))}
    lost = set(range(len(splits.label_names))) - {item.label for item in splits.train}
    if lost:
        raise UserError(f"{where}: no image of {', '.join(splits.label_names[i] for i in sorted(lost))} left in train")
    if not splits.validation:
        raise UserError(f"{where}: no image for validation: give more than one of some class, or a validation split")
    assert len({item.name for item in splits}) == sum(map(len, parts.values())), "an image is in two splits"
    lines = {
        split: "".join(f"{item.name}\t{label_names[item.label]}\n" for item in items) for split, items in parts.items()
    }
    digests = {split: hashlib.sha256(text.encode()).hexdigest() for split, text in lines.items()}
    sizes = {split: len(items) for split, items in parts.items()}
    return replace(splits, source={**splits.source, "rows": sizes, "sha256": digests})


def class_from_name(path: str) -> str | None:
    """Return the class in a file name: .../great_pyrenees_12.jpg gives great_pyrenees; None without a _number."""
    match = re.fullmatch(r"(.+)_\d+\.\w+", re.split(r"[\\/]", path)[-1])
    return match[1] if match else None


def _walk(root: Path) -> tuple[dict[str, str], Counter]:
    """Return {name below root: path} of the files with an image's suffix, and how many others there are of each kind.

    Links to folders, and to files outside, are not followed: they can loop, and the data would not be what is here.
    """
    files, ignored = {}, Counter()
    for folder, folders, names in os.walk(root):
        ignored["links to folders"] += sum(Path(folder, name).is_symlink() for name in folders)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if name.startswith("."):
                ignored["hidden files"] += 1
            elif path.suffix.lower() not in SUFFIXES:
                ignored[path.suffix or "no suffix"] += 1
            elif path.is_symlink() and not path.resolve().is_relative_to(root):
                ignored["links out of the folder"] += 1
            else:
                # a name that is not UTF-8 (from an old archive) is written out, caf%e9; the path stays as it is
                name = os.fsencode(path.relative_to(root).as_posix())
                name = name.decode("utf-8", "backslashreplace").replace("\\x", "%")
                name = unicodedata.normalize("NFC", name)  # one spelling of accents: macOS decomposes them
                if name in files:
                    raise UserError(f"{path}: two files have this name, with accents spelt in two ways: rename one")
                files[name] = str(path)
    return files, +ignored


def _folder_splits(data_dir: str, files: dict[str, str], ignored: Counter) -> dict[str, list]:
    """Return {split: [(name, class, path)]}, decided from the names alone."""
    flat = [name for name in files if "/" not in name]
    tops = {name.split("/")[0] for name in files if "/" in name}
    if not files:
        found = ", ".join(f"{kind} ({count})" for kind, count in sorted(ignored.items())) or "nothing"
        raise UserError(f"{data_dir}: no images ({', '.join(sorted(SUFFIXES))}) in it, only: {found}")
    if flat and tops:
        raise UserError(
            f"{data_dir}: holds images ({min(flat)}) and folders of images ({min(tops)}) side by side: move one of them"
        )
    known = {top: SPLIT_NAMES[top.lower()] for top in tops if top.lower() in SPLIT_NAMES}
    train_is_a_class = set(known.values()) == {"train"} and len(tops) > 1  # beside "bus" and "car"
    if not known or train_is_a_class:
        return {"train": [(name, _class_of(data_dir, name, name), path) for name, path in files.items()]}
    if len(known) < len(tops) or len(set(known.values())) < len(known) or "train" not in known.values():
        raise UserError(
            f"{data_dir}: folders {', '.join(sorted(tops))}: above the classes only train, validation (or valid, val)"
            " and test may stand, each once, train always"
        )
    found: dict[str, list] = {}
    rests = {name: name.split("/", 1) for name in files}
    of_test = [rest for top, rest in rests.values() if known[top] == "test"]
    of_train = {_class_of(data_dir, top, rest) for top, rest in rests.values() if known[top] == "train"}
    # Names like IMG_0001.jpg hold no class, unless some image of the test has one of the training's.
    is_unlabelled = not any("/" in rest or class_from_name(rest) in of_train for rest in of_test)
    for name, path in files.items():
        top, rest = rests[name]
        has_no_class = known[top] == "test" and is_unlabelled
        label = UNLABELLED if has_no_class else _class_of(data_dir, name, rest)
        found.setdefault(known[top], []).append((name, label, path))
    return found


def _class_of(data_dir: str, name: str, rest: str) -> str:
    label = rest.split("/")[0] if "/" in rest else class_from_name(rest)
    if label is None:
        raise UserError(f"{data_dir}: no class in the name {name!r}: use class_number.jpg, or a sub-folder per class")
    return label


def _official_splits(data_dir: str, lists: Path, files: dict[str, str], ignored: Counter) -> dict[str, list]:
    """Follow the lists of the Oxford pets: lines of a file's name without suffix, and numbers."""
    stems = {name.rsplit(".", 1)[0]: name for name in sorted(files, reverse=True)}
    found, seen = {}, set()
    for split, file in (("train", "trainval.txt"), ("test", "test.txt")):
        lines = (lists / file).read_text("utf-8").splitlines() if (lists / file).is_file() else []
        listed = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
        missing = [stem for stem in listed if stem not in stems]
        if missing:
            raise UserError(
                f"{lists / file}: {len(missing)} of {len(listed)} listed images are not in {data_dir}, such as"
                f" {missing[0]}: take the lines out, or bring the files"
            )
        if seen & set(listed) or len(set(listed)) < len(listed):
            twice = next(stem for stem, count in Counter([*seen, *listed]).items() if count > 1)
            raise UserError(f"{lists / file}: {twice} is listed twice, here or in the other split: take one out")
        seen |= set(listed)
        found[split] = [(stems[stem], _class_of(data_dir, stem, stems[stem]), files[stems[stem]]) for stem in listed]
    ignored["in no official list"] += len(files) - len(seen)
    return found


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
    splits = {SPLIT_NAMES[split]: data for split, data in loaded.items() if split in SPLIT_NAMES}
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


@dataclass(frozen=True)
class ScanReport:
    """What a full decode of every image found; images are named as in `ImageItem`."""

    num_images: int
    bad: dict[str, str]  # {name: why it cannot be used}
    odd: dict[str, str]  # {name: what is unusual}, used all the same
    duplicates: list[list[str]]  # groups of files with the same bytes
    leaks: list[list[str]]  # the groups of which not all are in the same split; a carved validation counts as train
    contradictions: list[list[str]]  # the groups of more than one class


def scan(splits: ImageSplits, num_workers: int | None = None) -> ScanReport:
    """Decode every image in threads (the decoders let go of the interpreter's lock), with a bar on a terminal."""
    from tqdm import tqdm

    items = list(splits)
    bad, odd, same = {}, {}, {}
    with ThreadPoolExecutor(num_workers or visible_cores()) as pool:
        looks = pool.map(lambda item: _look(item, splits.tables), items)
        for item, (reason, remark, digest) in tqdm(
            zip(items, looks, strict=True), total=len(items), desc="checking", unit="image", disable=None
        ):
            if reason:
                bad[item.name] = reason
            elif remark:
                odd[item.name] = remark
            if digest:
                same.setdefault(digest, []).append(item.name)
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    side = {"validation": "train"} if splits.source["validation_carved"] else {}
    split_of = {item.name: side.get(split, split) for split, part in parts.items() for item in part}
    duplicates = [names for names in same.values() if len(names) > 1]
    leaks = [names for names in duplicates if len({split_of[name] for name in names}) > 1]
    classes = {item.name: item.label for item in items if item.label >= 0}
    contradictions = [names for names in duplicates if len({classes[name] for name in names if name in classes}) > 1]
    return ScanReport(len(items), bad, odd, duplicates, leaks, contradictions)


def _look(item: ImageItem, tables: dict) -> tuple[str, str, bytes]:
    """Return (why bad, what is odd, a hash of the bytes), each empty where there is nothing to say."""
    from PIL import Image

    digest = b""
    try:
        data = read_image(item, tables)
        digest = hashlib.sha256(data).digest() if data else b""
        image = EncodedImage(data, item.where)
        image.pixels()
    except UserError as error:
        return str(error), "", digest
    kind, mode = image.opened.format, image.opened.mode
    suffix = Path(item.name).suffix.lower()
    jpeg = kind in ("JPEG", "MPO")
    remarks = [
        f"{kind} named {suffix}"
        if suffix and Image.registered_extensions()[suffix] != ("JPEG" if jpeg else kind)
        else "",
        f"mode {mode}" if mode != "RGB" else "",
        "transparency" if mode == "P" and image.opened.has_transparency_data else "",
        f"Exif orientation {image.orientation}" if image.orientation != 1 else "",
        "a damaged JPEG, but complete" if image.damaged else "",
        f"{image.width} x {image.height} pixels" if min(image.width, image.height) < 16 else "",
    ]
    return "", ", ".join(filter(None, remarks)), digest
