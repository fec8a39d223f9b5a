"""Find the images, classes and splits of a folder from the names in it. Nothing is opened here."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kit.errors import UserError
from kit.image_files import SUFFIXES

LISTS = "annotations"  # the folder of official lists beside images/
UNLABELLED = ""  # in place of a class
SYSTEM_FOLDERS = (".", "__", "@")  # as in .ipynb_checkpoints, __MACOSX, @eaDir
SPLIT_NAMES = {
    "train": ("train", "training", "trn"),
    "validation": ("validation", "valid", "val", "dev", "development", "eval", "evaluation"),
    "test": ("test", "testing", "tst"),
}
_SPLIT_WORDS = {word: split for split, words in SPLIT_NAMES.items() for word in words}
_BESIDE = r"(?:data|set|split|folder|images?|imgs?|photos?|pictures?)*"
_SPLIT = re.compile(rf"{_BESIDE}({'|'.join(_SPLIT_WORDS)}){_BESIDE}")


@dataclass
class Listing:
    """What lies in a folder. Names are below it, with "/" on every platform."""

    files: dict[str, str] = field(default_factory=dict)  # {name: path} of the files with an image's suffix
    others: dict[str, Counter] = field(default_factory=dict)  # {folder: {kind: how many}} of each folder, also if empty
    notes: list[str] = field(default_factory=list)  # names that are likely mistakes

    @property
    def ignored(self) -> Counter:
        return sum(self.others.values(), Counter())


def split_of(name: str) -> str | None:
    """Return the split that a name says, in the usual spellings and any case (Training, val2017, Test-Images)."""
    match = _SPLIT.fullmatch(re.sub(r"[\W\d_]+", "", name.lower()))
    return _SPLIT_WORDS[match[1]] if match else None


def class_from_name(path: str) -> str | None:
    """Return the class in a file name: .../great_pyrenees_12.jpg gives great_pyrenees; None without a _number."""
    match = re.fullmatch(r"(.+)_\d+\.\w+", re.split(r"[\\/]", path)[-1])
    return match[1] if match else None


def list_folder(root: Path) -> Listing:
    """List the images below `root` and count everything else.

    Links to folders, and to files outside, are not followed: they can loop, and the data would not be what is here.
    """
    listing, waiting = Listing(), [("", str(root))]
    while waiting:
        folder, path = waiting.pop()
        others = listing.others.setdefault(folder, Counter())
        prefix, inner = folder and f"{folder}/", set()
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(f"{path}: cannot be listed ({error.strerror})") from error
        for entry in entries:
            name = prefix + _written_out(entry.name, listing.notes)
            if entry.is_dir():
                if entry.is_symlink():
                    listing.others.setdefault(name, Counter())["links to folders"] += 1
                elif not entry.name.startswith(SYSTEM_FOLDERS):
                    if name in inner:
                        listing.notes.append(f"two folders are named {name}, spelled in two ways: read as one class")
                    inner.add(name)
                    waiting.append((name, entry.path))
                continue
            _, dot, suffix = entry.name.rpartition(".")
            if entry.name.startswith("."):
                others["hidden files"] += 1
            elif not dot or f".{suffix.lower()}" not in SUFFIXES:
                others[f".{suffix}" if dot else "no suffix"] += 1
            elif entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
                others["links out of the folder"] += 1
            elif name in listing.files:
                raise UserError(f"{entry.path}: two files have this name, spelled in two ways: rename one")
            else:
                listing.files[name] = entry.path
    return listing


def _written_out(name: str, notes: list[str]) -> str:
    """Return a name that can be printed and compared.

    Bytes that are not UTF-8 (from an old archive) and line ends are written out, caf%e9 and oak%0a; accents are spelled
    in one way (macOS decomposes them).
    """
    if name.isascii() and name.isprintable():
        return name
    written = os.fsencode(name).decode("utf-8", "backslashreplace").replace("\\x", "%")
    written = unicodedata.normalize("NFC", written)
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in written):
        written = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda match: f"%{ord(match[0]):02x}", written)
        notes.append(f"a line end or control character in a name, written as {written}: probably a mistake, rename it")
    return written


def folder_splits(data_dir: str, listing: Listing) -> dict[str, list]:
    """Return {split: [(name, class, path)]}, decided from the names alone. May add to the notes of the listing."""
    files = listing.files
    flat = [name for name in files if "/" not in name]
    tops = {name.split("/")[0] for name in files if "/" in name}
    if not files:
        raise UserError(f"{data_dir}: no images ({_suffixes()}) in it, only: {_counted(listing.ignored) or 'nothing'}")
    if flat and tops:
        raise UserError(
            f"{data_dir}: contains both images ({min(flat)}) and folders of images ({min(tops)}): move one of them"
        )
    known = {top: split for top in tops if (split := split_of(top))}
    train_is_a_class = set(known.values()) == {"train"} and len(tops) > len(known)  # beside "bus" and "car"
    if not known or train_is_a_class:
        if tops:
            _refuse_splits_in_disguise(data_dir, files, tops)
            _refuse_empty_classes(data_dir, listing)
        return {"train": [(name, _class_of(data_dir, name, name), path) for name, path in files.items()]}
    if len(known) < len(tops) or len(set(known.values())) < len(known) or "train" not in known.values():
        raise UserError(
            f"{data_dir}: folders {', '.join(sorted(tops))}: above the classes, use train (required), validation and"
            " test, each at most once, and nothing else"
        )
    splits = {folder for folder in listing.others if "/" not in folder and split_of(folder)}
    _refuse_empty(data_dir, listing, splits - known.keys(), "split")
    if renamed := [f"{top} is {split}" for top, split in sorted(known.items()) if top.lower() != split]:
        listing.notes.append(f"splits in {data_dir}: {', '.join(renamed)}")
    return _classes_below_splits(data_dir, listing, known)


def _classes_below_splits(data_dir: str, listing: Listing, known: dict[str, str]) -> dict[str, list]:
    """Return {split: [(name, class, path)]}; a test whose names hold no class of the training is unlabelled."""
    found: dict[str, list] = {}
    rests = {name: name.split("/", 1) for name in listing.files}
    of_test = [rest for top, rest in rests.values() if known[top] == "test"]
    of_train = {_class_of(data_dir, top, rest) for top, rest in rests.values() if known[top] == "train"}
    # Names like IMG_0001.jpg hold no class, unless some image of the test has one of the training's.
    is_unlabelled = not any("/" in rest or class_from_name(rest) in of_train for rest in of_test)
    for name, path in listing.files.items():
        top, rest = rests[name]
        has_no_class = known[top] == "test" and is_unlabelled
        label = UNLABELLED if has_no_class else _class_of(data_dir, name, rest)
        found.setdefault(known[top], []).append((name, label, path))
    for top in known:
        if any("/" in rest for other, rest in rests.values() if other == top):
            _refuse_empty_classes(data_dir, listing, f"{top}/")
    return found


def _class_of(data_dir: str, name: str, rest: str) -> str:
    label = rest.split("/")[0] if "/" in rest else class_from_name(rest)
    if label is None:
        raise UserError(f"{data_dir}: no class in the name {name!r}: use class_number.jpg, or a sub-folder per class")
    return label


def _refuse_splits_in_disguise(data_dir: str, files: Iterable[str], tops: set[str]) -> None:
    """Refuse folders that look like splits though their names are unknown, and splits that lie below the classes."""
    shown, words = ", ".join(sorted(tops)[:5]), [re.split(r"[\W\d_]+", top.lower()) for top in sorted(tops)]
    rename = "rename splits to train, validation and test"
    said = [{_SPLIT_WORDS[word] for word in parts if word in _SPLIT_WORDS} for parts in words]
    rests = {tuple(word for word in parts if word not in _SPLIT_WORDS) for parts in words}
    if len(tops) > 1 and all(said) and len(rests) == 1:  # as in pets_train and pets_test
        raise UserError(f"{data_dir}: the folders {shown} look like splits, not classes: {rename}")
    below: dict[str, set[str]] = {top: set() for top in tops}
    for name in files:
        top, *folders, _ = name.split("/")
        if not folders:
            return  # an image directly in it: `top` is a class
        below[top].add(folders[0])
    shared = set.intersection(*below.values())
    inner = ", ".join(sorted(shared or set.union(*below.values()))[:5])
    if len(tops) == 1:
        raise UserError(f"{data_dir}: contains a single folder, {shown}: use --data_dir {Path(data_dir, shown)}")
    if all(split_of(folder) for folders in below.values() for folder in folders):
        raise UserError(
            f"{data_dir}: the folders {shown} contain splits ({inner}): put the splits above the classes, as in"
            " train/CLASS and test/CLASS"
        )
    splits = set.union(*said)
    if len(shared) > 1 or (len(splits) > 1 and "train" in splits):
        raise UserError(
            f"{data_dir}: the folders {shown} look like splits, not classes, because they contain folders ({inner}):"
            f" {rename}; if these are the classes, put the images directly into them"
        )


def _refuse_empty_classes(data_dir: str, listing: Listing, prefix: str = "") -> None:
    """Refuse folders at the place of classes (below `prefix`) without any image: a class must not vanish silently."""
    place = prefix.count("/")
    filled = {name.split("/")[place] for name in listing.files if name.startswith(prefix)}
    folders = {name.split("/")[place] for name in listing.others if name.startswith(prefix)} - {""}
    _refuse_empty(data_dir, listing, {prefix + folder for folder in folders - filled}, "class")


def _refuse_empty(data_dir: str, listing: Listing, folders: set[str], kind: str) -> None:
    if not folders:
        return
    folder = min(folders)
    below = (kinds for name, kinds in listing.others.items() if f"{name}/".startswith(f"{folder}/"))
    held = _counted(sum(below, Counter())) or "empty"
    raise UserError(
        f"{Path(data_dir, folder)}: a {kind} without images ({held}): add images of a supported kind ({_suffixes()})"
        " or remove the folder"
    )


def _counted(kinds: Counter) -> str:
    return ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))


def _suffixes() -> str:
    return ", ".join(sorted(SUFFIXES))


def official_splits(data_dir: str, lists: Path, listing: Listing) -> dict[str, list]:
    """Follow the lists of the Oxford pets: lines of a file's name without suffix, and numbers."""
    files = listing.files
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
    listing.others.setdefault("", Counter())["in no official list"] += len(files) - len(seen)
    return found
