"""Read labelled texts from the hub or from the files people have, check them, and hand out clean splits.

Chunks of rows come out of the files (table_files.py), are checked (table_rows.py, table_labels.py) and go into Arrow
files that the next start finds again (table_cache.py): what stays in memory is some ten bytes a row.
"""

import difflib
import glob
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import UserError
from kit.table_cache import Reading, open_split, work_folder
from kit.table_files import KINDS, Table, dataset_table, expanded, kind_of, open_table, show
from kit.table_labels import as_truth_values, class_order, look_alike_of, look_alikes
from kit.table_rows import Rows, carve, read_rows, write_rows

if TYPE_CHECKING:
    import datasets

PAIRS = "sentence1+sentence2 premise+hypothesis question1+question2 question+sentence"
KNOWN_TEXT_COLUMNS = [tuple(names.split("+")) for names in f"{PAIRS} sentence text".split()]
HUB_SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "dev", "val", "validation_matched"),
    "test": ("test", "test_matched"),
}


@dataclass(frozen=True)
class TextSplits:
    """Splits in the order of their source; columns: the text columns (string), `label` (int64, -1 hidden)."""

    train: "datasets.Dataset"
    validation: "datasets.Dataset"
    test: "datasets.Dataset | None"
    text_columns: tuple[str, ...]  # one or two names, as in the data
    label_names: tuple[str, ...]  # the position is the class id
    source: dict  # for run.json: where from, rows and SHA-256 of each split, whether validation was carved
    notes: list[str]  # what the user should know, to be printed once


def check_text_sources(
    *, train_file, validation_file, test_file, dataset_name, text_columns, label_column, validation_fraction
) -> None:
    """Raise `UserError` for what can be seen without reading data or importing anything heavy."""
    files = {"train_file": train_file, "validation_file": validation_file, "test_file": test_file}
    files = {option: path for option, path in files.items() if path is not None}
    if dataset_name is not None and files:
        given = f"{' and '.join(files)} and dataset_name {dataset_name!r}"
        raise UserError(f"{given} are both given: set one side to null")
    if dataset_name is None and train_file is None:
        raise UserError("no training data: give train_file (with validation_file, test_file) or dataset_name")
    if dataset_name is not None and Path(dataset_name).exists():
        raise UserError(f"dataset_name: {dataset_name!r} is on this disk: name its files with train_file")
    for option, name in files.items():
        check_files(option, name)
    texts = list(text_columns or [])
    if text_columns is not None and (len(texts) not in (1, 2) or len(set(texts)) != len(texts)):
        raise UserError(f"text_columns: {texts} must be one name or two different ones")
    if {"label", label_column} & set(texts):
        raise UserError(f"text_columns: {texts} must not hold 'label' or the label_column {label_column!r}")
    if not 0 < validation_fraction < 1:
        raise UserError(f"validation_fraction: {validation_fraction} must lie between 0 and 1")


def check_files(option: str, name: str) -> None:
    """Raise `UserError` where a name or a pattern stands for no files that can be read as one."""
    path, place = expanded(name), f"{option}: {name!r}"
    if path.is_dir():
        raise UserError(f"{place} is a folder: name one file in it, or several by a pattern such as '{path}/*.csv'")
    found = matching(name)
    if not found:
        if glob.has_magic(name):
            raise UserError(f"{place} matches no file")
        if not path.parent.is_dir():
            raise UserError(f"{place} does not exist, nor does the folder {str(path.parent)!r}")
        raise UserError(f"{place} does not exist{_near(path.name, os.listdir(path.parent), 3)}")
    for one in found:
        place = f"{option}: {one!r}"
        if kind_of(one) is None:
            raise UserError(f"{place} is of no kind that is read: {', '.join(KINDS)} (text kinds also as .gz)")
        if kind_of(one) != kind_of(found[0]):
            raise UserError(f"{option}: {name!r} matches files of several kinds: {found[0]!r}, {one!r}")
        if expanded(one).stat().st_size == 0:
            raise UserError(f"{place} is an empty file")
        if not os.access(expanded(one), os.R_OK):
            raise UserError(f"{place} may not be read by you: see its permissions")


def matching(name: str) -> list[str]:
    """Return the files that a name or a pattern stands for, sorted."""
    if expanded(name).exists():
        return [name]
    return sorted(path for path in glob.glob(str(expanded(name)), recursive=True) if Path(path).is_file())


def read_text_splits(
    *,
    train_file: str | None = None,
    validation_file: str | None = None,
    test_file: str | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    text_columns: list[str] | None = None,
    label_column: str = "label",
    validation_fraction: float = 0.1,
    seed: int = 0,
) -> TextSplits:
    """Return the checked splits of local files or of a hub dataset; validation is carved where not given.

    A file may be packed with gzip and may be a pattern ('data/*.csv.gz'): its files are read in sorted order as one.
    Unchanged data are not read again (see table_cache.py). Raises `UserError` for whatever is wrong with the data.
    """
    files = {"train_file": train_file, "validation_file": validation_file, "test_file": test_file}
    columns = {"text_columns": text_columns, "label_column": label_column}
    check_text_sources(**files, dataset_name=dataset_name, **columns, validation_fraction=validation_fraction)
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    fingerprints, found = {}, {}
    if dataset_name is not None:
        source = {"dataset_name": dataset_name, "dataset_config_name": dataset_config_name}
        hub = _hub_splits(dataset_name, dataset_config_name)
        fingerprints = {split: [name, data._fingerprint] for split, (name, data) in hub.items()}
    else:
        source = {option: path for option, path in files.items() if path is not None}
        found = {option.removesuffix("_file"): matching(path) for option, path in source.items()}
    options = {**source, **columns, "fraction": validation_fraction, "seed": seed, "config": dataset_config_name}
    reading = Reading(options, [expanded(name) for names in found.values() for name in names], fingerprints)
    result = reading.recall()
    if result is None:
        if dataset_name is not None:
            tables = {split: [dataset_table(f"{dataset_name} ({name})", data)] for split, (name, data) in hub.items()}
            notes = [f"{split}: {t[0].where}" for split, t in tables.items() if not t[0].where.endswith(f"({split})")]
        else:
            tables = {split: open_shards(names, text_columns or [], label_column) for split, names in found.items()}
            notes = [
                f"{len(names)} files match {source[f'{s}_file']!r}" for s, names in found.items() if len(names) > 1
            ]
            if dataset_config_name is not None:
                notes.append(f"dataset_config_name {dataset_config_name!r} is not used: the data come from files")
        with work_folder() as work:
            result = _read(tables, text_columns, label_column, validation_fraction, seed, work, notes)
            reading.remember(result, work)
    stored = {split: open_split(name) for split, name in result["splits"].items()}
    return TextSplits(
        stored["train"],
        stored["validation"],
        stored.get("test"),
        tuple(result["text_columns"]),
        tuple(result["label_names"]),
        source | result["facts"],
        result["notes"],
    )


def _hub_splits(dataset_name: str, config: str | None) -> dict[str, tuple[str, "datasets.Dataset"]]:
    """Return {train, validation, test: (name there, data)}, as far as they exist."""
    import datasets

    try:
        found = datasets.load_dataset(dataset_name, config)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        wrong = f"dataset_name: {dataset_name!r} (config {config}) cannot be loaded: {reason}"
        ways = "local files (--train_file, --validation_file); a filled cache (HF_HOME from a machine with it"
        raise UserError(f"{wrong}. Three ways on: {ways}, HF_HUB_OFFLINE=1); make demo") from error
    splits = {}
    for split, known in HUB_SPLITS.items():
        name = next((name for name in known if name in found), None)
        if name is not None:
            splits[split] = (name, found[name])
        elif split == "train":
            raise UserError(f"dataset_name: {dataset_name!r} has no split 'train', only {show.repr([*found])}")
    return splits


def open_shards(names: list[str], text_columns: list[str], label_column: str) -> list[Table]:
    """Open the files of a split; all of them have the same columns."""
    tables = [open_table(name, text_columns, label_column) for name in names]
    named = [table for table in tables if table.names]  # a file of blank lines has no columns
    is_json = kind_of(names[0]) in (".json", ".jsonl")  # whose objects may have different keys
    for table in named[1:]:
        if set(table.names) != set(named[0].names) and not is_json:
            there = f"{show.repr(table.names)}, those of {named[0].where} are {show.repr(named[0].names)}"
            raise UserError(f"{table.where}: its columns are {there}: one split needs the same in all files")
        if table.class_names != named[0].class_names:
            raise UserError(f"{table.where}: its class names are not those of {named[0].where}")
    return tables


def _read(tables: dict[str, list[Table]], text_columns, label_column, fraction, seed, work: Path, notes) -> dict:
    """Read, check, carve and store all splits; return what a second start needs to know."""
    import numpy as np

    for split, shards in tables.items():
        notes += [note for table in shards for note in table.notes]
        tables[split] = [table for table in shards if not table.is_empty]
        if not tables[split]:
            raise UserError(f"{shards[0].where}: has no rows")
    train, is_carved = tables["train"][0], "validation" not in tables
    text_columns = tuple(text_columns or _find_text_columns(train, label_column, notes))
    rows = {}
    for split, shards in tables.items():
        ranked_by = seed if is_carved and split == "train" else None
        rows[split] = _read_split(split, shards, text_columns, label_column, work / f"{split}.rows", ranked_by, notes)
    label_names = _label_names(train, label_column, rows["train"], notes)
    for split in tables:
        _check_known(split, rows[split], rows["train"].names, label_names)
    masks = {split: np.ones(len(part.codes), bool) for split, part in rows.items()}
    if is_carved:
        rows["validation"], masks["validation"] = rows["train"], carve(rows["train"], fraction)
        masks["train"] = ~masks["validation"]
        chosen, count = int(masks["validation"].sum()), len(masks["train"])
        if not chosen:
            raise UserError(f"{train.where}: too few rows ({count}) to carve a validation split")
        part = f"{fraction * 100:g} % of train ({chosen} of {count} rows)"
        if chosen > round(count * fraction) + 1:
            part = f"{chosen} of {count} rows of train (more than {fraction * 100:g} %: one of each label at least)"
        notes.append(f"no validation split: {part}, stratified by label, seed {seed}")
    texts = {split: np.frombuffer(part.texts, np.int64)[masks[split]] for split, part in rows.items()}
    for split in ("validation", "test"):
        count = int(np.isin(texts[split], texts["train"]).sum()) if split in texts else 0
        if count:
            notes.append(f"{count} of {len(texts[split])} {split} rows have the same texts as a row of train")
    stored = {split: write_rows(part, masks[split], text_columns, label_names, work) for split, part in rows.items()}
    return {
        "text_columns": text_columns,
        "label_names": label_names,
        "facts": {
            "rows": {split: len(kept) for split, kept in texts.items()},
            "validation_carved": is_carved,
            "sha256": {split: digest for split, (digest, _) in stored.items()},
        },
        "notes": notes,
        "splits": {split: name for split, (_, name) in stored.items()},
    }


def _read_split(split: str, shards: list[Table], text_columns, label_column, file: Path, seed, notes) -> Rows:
    """Return the checked rows of a split; only a test split may lack labels. `seed`: rank the rows to be carved."""
    is_labelled = split != "test" or any(label_column in table.names for table in shards)
    for table in shards:
        check_columns(split, table, [*text_columns, label_column] if is_labelled else text_columns)
    rows = read_rows(shards, text_columns, label_column if is_labelled else None, file, seed)
    if rows.first_blank:
        notes.append(f"labels in {label_column!r} have blanks around them ({rows.first_blank}): read without them")
    hidden, count = rows.codes.count(-1), len(rows.codes)
    if split == "test" and hidden == count:
        why = "hidden" if is_labelled else f"no column {label_column!r} among {show.repr(shards[0].names)}"
        notes.append(f"test has no labels ({why}): predictions only")
    elif hidden:
        wrong = f"{hidden} of {count} rows of {split} have no label (empty, null or -1) in {label_column!r}"
        cure = "label them or take them out, and call no class -1"
        raise UserError(f"{rows.where}: {wrong}, the first is {rows.first_hidden}: {cure}")
    return rows


# Columns


def _find_text_columns(train: Table, label_column: str, notes: list[str]) -> tuple[str, ...]:
    """Return the text columns: those known by their names, else the only one with words in it."""
    others = [name for name in train.names if name not in (label_column, "label")]
    for names in KNOWN_TEXT_COLUMNS:
        if set(others) >= set(names):
            return names
    check_columns("train", train, [label_column])
    once = [name for name in others if name and others.count(name) == 1]
    values = next(train.chunks(once)) if once else []
    with_words = [name for name, column in zip(once, values, strict=True) if any(map(_has_words, column))]
    if len(with_words) == 1:
        notes.append(f"text column: {with_words[0]!r}, the only one with words beside {label_column!r}")
        return tuple(with_words)
    cure = f"name one or two with text_columns; columns there: {show.repr(train.names)}"
    found = f"several columns hold texts: {show.repr(with_words)}" if with_words else "no column holds texts"
    raise UserError(f"{train.where}: no text column is known by its name and {found}: {cure}")


def _has_words(value) -> bool:
    is_mark = str(value).strip().lower() in ("true", "false", "nan", "none", "null")
    return isinstance(value, str) and not is_mark and any(map(str.isalpha, value))


def check_columns(split: str, table: Table, needed) -> None:
    """Raise `UserError` where the table lacks one of the `needed` columns."""
    for name in needed:
        if name not in table.names:
            missing = f"no column {name!r} for {split}{_near(name, table.names)}"
            raise UserError(f"{table.where}: {missing}; columns there: {show.repr(table.names)}")


# Labels


def _label_names(train: Table, label_column: str, rows: Rows, notes: list[str]) -> tuple[str, ...]:
    """Return the names whose position is the class id: a ClassLabel's as they are, others sorted."""
    found, count = rows.names, len(rows.codes)
    if len(found) == 1:
        raise UserError(f"{train.where}: every row of train has the same {label_column!r}, {found[0]!r}")
    many = f"{len(found)} different labels in {count} rows: is {label_column!r} the label_column?"
    if len(found) == count > 10 or len(found) > max(50, 0.9 * count):
        raise UserError(f"{train.where}: {many} Columns there: {show.repr(train.names)}")
    if len(found) > 50 and 2 * len(found) >= count:
        notes.append(many)
    same, close = look_alikes(found)
    places = dict(zip(found, rows.places, strict=True))
    for group in same:
        spelt = ", ".join(f"{label!a} ({places[label]})" for label in group)
        raise UserError(f"{label_column!r} has labels that look the same on a screen: {spelt}: write them alike")
    for group in close:
        spelt = ", ".join(f"{label!a} ({places[label]})" for label in group)
        notes.append(f"labels that may be meant as one: {spelt}; they are trained as different ones")
    return tuple(train.class_names.get(label_column) or class_order(found))


def _check_known(split: str, rows: Rows, known: list[str], label_names: tuple[str, ...]) -> None:
    """Refuse labels that train has not; 'true' and TRUE are its True where it has nothing but truth values."""
    rows.names = as_truth_values(rows.names, known)
    unknown = sorted(set(rows.names) - set(known))
    if unknown:
        found = []
        for name in unknown[:5]:
            meant = look_alike_of(name, known)
            hint = f", looks like {meant!a}: write them alike" if meant else ""
            spelt = ascii(name) if meant else repr(name)
            found.append(f"{spelt} ({rows.codes.count(rows.names.index(name))} rows{hint})")
        where = f"{rows.where}: {split} has labels that train has not"
        raise UserError(f"{where}: {', '.join(found)}; train has {show.repr(label_names)}")


def _near(name: str, there, count: int = 1) -> str:
    plain = {other.strip().lower(): other for other in there}
    found = difflib.get_close_matches(name.strip().lower(), plain, n=count)
    return f" (did you mean {' or '.join(repr(plain[other]) for other in found)}?)" if found else ""
