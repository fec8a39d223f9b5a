"""Decode every image before hours are spent on a data set, once for each file, and say what is wrong with it."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kit.errors import MachineError, UserError
from kit.image_files import EncodedImage, ImageItem, read_image
from kit.image_sources import ImageSplits, leave_out
from kit.world import visible_cores

FORMAT = 2  # raise it when another image counts as bad or dark


class Look(NamedTuple):
    """What decoding one image found; empty where there is nothing to say."""

    bad: str  # why it cannot be used
    dark: str  # why it will look almost black
    odd: str  # what is unusual
    digest: bytes  # of its bytes


@dataclass(frozen=True)
class ScanReport:
    """What a full decode of every image found; images are named as in `ImageItem`."""

    num_images: int
    bad: dict[str, str]  # {name: why it cannot be used}
    odd: dict[str, str]  # {name: what is unusual}, used all the same
    duplicates: list[list[str]]  # groups of files with the same bytes
    leaks: list[list[str]]  # the groups of which not all are in the same split; a carved validation counts as train
    contradictions: list[list[str]]  # the groups of more than one class


def check_images(splits: ImageSplits, folder: Path, skip_bad_images: bool) -> ImageSplits:
    """Return the splits without the images that cannot be decoded, or raise `UserError` that names them.

    What was found is kept in `folder`, under the names, sizes and times of the files (or the fingerprint of a hub
    dataset): the other processes of a node, and the next start, decode only what is new or has changed.
    """
    items = list(splits)
    path = folder / f"scan-{FORMAT}-{_hash(repr(splits.source['data_dir'] or splits.source['dataset_name']))}.json"
    known = json.loads(path.read_text("utf-8")) if path.exists() else {"fine": [], "bad": {}, "dark": {}}
    fine, marks = set(known["fine"]), [_mark(item, splits.tables) for item in items]
    new = [
        (item, mark)
        for item, mark in zip(items, marks, strict=True)
        if not (mark in fine or mark in known["bad"] or mark in known["dark"])
    ]
    if new:
        for (_, mark), look in zip(new, _looks([item for item, _ in new], splits.tables), strict=True):
            if look.bad:
                known["bad"][mark] = look.bad
            elif look.dark:
                known["dark"][mark] = look.dark
            else:
                fine.add(mark)
        here = set(marks)  # what is no longer there is forgotten
        known = {kind: {mark: said for mark, said in known[kind].items() if mark in here} for kind in ("bad", "dark")}
        _write(path, known | {"fine": sorted(fine & here)})
    named = dict(zip(marks, items, strict=True))
    if known["dark"]:
        shown = [f"{item.where} {known['dark'][mark]}" for mark, item in named.items() if mark in known["dark"]]
        more = f" and {len(shown) - 1} more" if len(shown) > 1 else ""
        note = f"almost black: {shown[0]}{more}. Store the full range of brightness"
        splits = replace(splits, notes=[*splits.notes, note])
    bad = {item.name: known["bad"][mark] for mark, item in named.items() if mark in known["bad"]}
    if not bad:
        return splits
    if skip_bad_images:
        return leave_out(splits, bad)
    shown = [*list(bad.values())[:5], *([f"and {len(bad) - 5} more"] if len(bad) > 5 else [])]
    raise UserError(
        f"{len(bad)} of {len(items)} images cannot be used: {'; '.join(shown)}. Take them out (all are named in"
        f" {path}), or leave them out of this run with --skip_bad_images true"
    )


def _write(path: Path, content: dict) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise MachineError(
            f"{path.parent}: cannot be written ({error.strerror}): set HF_HOME to a folder that can be written"
        ) from error


def _mark(item: ImageItem, tables: dict) -> str:
    """Return a hash of what changes when an image's bytes do."""
    if not isinstance(item.place, str):
        split, row = item.place
        return _hash(f"{tables[split]._fingerprint} {split} {row}")
    try:
        stat = os.stat(item.place)
    except OSError as error:
        raise UserError(f"{item.place}: cannot be read ({error.strerror})") from error
    return _hash(f"{item.place} {stat.st_size} {stat.st_mtime_ns}")


def _hash(text: str) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=8).hexdigest()


def scan(splits: ImageSplits, num_workers: int | None = None) -> ScanReport:
    """Decode every image and compare their bytes."""
    items = list(splits)
    bad, odd, same = {}, {}, {}
    for item, look in zip(items, _looks(items, splits.tables, num_workers), strict=True):
        if look.bad:
            bad[item.name] = look.bad
        elif look.odd:
            odd[item.name] = look.odd
        if look.digest:
            same.setdefault(look.digest, []).append(item.name)
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    side = {"validation": "train"} if splits.source["validation_carved"] else {}
    split_of = {item.name: side.get(split, split) for split, part in parts.items() for item in part}
    duplicates = [names for names in same.values() if len(names) > 1]
    leaks = [names for names in duplicates if len({split_of[name] for name in names}) > 1]
    classes = {item.name: item.label for item in items if item.label >= 0}
    contradictions = [names for names in duplicates if len({classes[name] for name in names if name in classes}) > 1]
    return ScanReport(len(items), bad, odd, duplicates, leaks, contradictions)


def _looks(items: list[ImageItem], tables: dict, num_workers: int | None = None) -> Iterator[Look]:
    """Look at images in threads (the decoders let go of the interpreter's lock), with a bar on a terminal."""
    from tqdm import tqdm

    with (
        ThreadPoolExecutor(num_workers or visible_cores()) as pool,
        tqdm(total=len(items), desc="checking", unit="image", disable=None) as bar,
    ):
        for start in range(0, len(items), 1024):  # a task for each of a million images would fill the memory
            for look in pool.map(lambda item: _look(item, tables), items[start : start + 1024]):
                bar.update()
                yield look


def _look(item: ImageItem, tables: dict) -> Look:
    from PIL import Image

    digest = b""
    try:
        data = read_image(item, tables)
        digest = hashlib.sha256(data).digest() if data else b""
        image = EncodedImage(data, item.where)
        image.pixels()
    except UserError as error:
        return Look(str(error), "", "", digest)
    kind, mode = image.opened.format, image.opened.mode
    kind = "JPEG" if kind == "MPO" else kind  # several JPEGs in one file
    suffix = Path(item.name).suffix.lower()
    is_misnamed = suffix and Image.registered_extensions()[suffix] != kind
    remarks = [
        f"{kind} named {suffix}" if is_misnamed else "",
        f"mode {mode}" if mode != "RGB" else "",
        "transparency" if mode == "P" and image.opened.has_transparency_data else "",
        f"Exif orientation {image.orientation}" if image.orientation != 1 else "",
        "a damaged JPEG, but complete" if image.damaged else "",
        f"{image.dark}: looks almost black" if image.dark else "",
        f"{image.width} x {image.height} pixels" if min(image.width, image.height) < 16 else "",
    ]
    return Look("", image.dark, ", ".join(filter(None, remarks)), digest)
