"""Read labelled texts from the hub or from the files people have, check them, and hand out clean splits.

CSV, TSV and JSON are parsed here: the readers of `datasets` pad short rows, turn the word "NA" into nothing
and "2003-06-15" into a timestamp, and know no row numbers. Row 1 is the first row of data.
"""

import contextlib
import csv
import datetime
import difflib
import hashlib
import io
import json
import numbers
import os
import re
import reprlib
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import UserError

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
PAIRS = "sentence1+sentence2 premise+hypothesis question1+question2 question+sentence"
KNOWN_TEXT_COLUMNS = [tuple(names.split("+")) for names in f"{PAIRS} sentence text".split()]
HUB_SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "dev", "val", "validation_matched"),
    "test": ("test", "test_matched"),
}
HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON can hold it, UTF-8 cannot
_show = reprlib.Repr()
_show.maxlist, _show.maxtuple, _show.maxstring = 20, 20, 80


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


@dataclass(frozen=True)
class _Table:
    where: str  # what errors name: a file, or a split of a hub dataset
    names: list[str]
    rows: int
    column: Callable[[str], list]
    class_names: Callable[[str], list[str] | None] = lambda name: None


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
        path, place = _path(name), f"{option}: {name!r}"
        if path.is_dir():
            raise UserError(f"{place} is a folder: name one file in it")
        if not path.parent.is_dir():
            raise UserError(f"{place} does not exist, nor does the folder {str(path.parent)!r}")
        if not path.exists():
            raise UserError(f"{place} does not exist{_near(path.name, os.listdir(path.parent), 3)}")
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"{place} is of no kind that is read: {', '.join(SUFFIXES)}")
        if path.stat().st_size == 0:
            raise UserError(f"{place} is an empty file")
        if not os.access(path, os.R_OK):
            raise UserError(f"{place} may not be read by you: see its permissions")
    texts = list(text_columns or [])
    if text_columns is not None and (len(texts) not in (1, 2) or len(set(texts)) != len(texts)):
        raise UserError(f"text_columns: {texts} must be one name or two different ones")
    if {"label", label_column} & set(texts):
        raise UserError(f"text_columns: {texts} must not hold 'label' or the label_column {label_column!r}")
    if not 0 < validation_fraction < 1:
        raise UserError(f"validation_fraction: {validation_fraction} must lie between 0 and 1")


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

    They lie as Arrow files in HF_DATASETS_CACHE/text_splits/HASH-OF-CONTENT, where `map` caches too:
    equal data find them again, changed data cannot. Raises `UserError` for whatever is wrong with the data.
    """
    files = {"train_file": train_file, "validation_file": validation_file, "test_file": test_file}
    columns = {"text_columns": text_columns, "label_column": label_column}
    check_text_sources(**files, dataset_name=dataset_name, **columns, validation_fraction=validation_fraction)
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    notes = []
    if dataset_name is not None:
        source = {"dataset_name": dataset_name, "dataset_config_name": dataset_config_name}
        tables = _hub_tables(dataset_name, dataset_config_name)
        notes += [f"{split}: {t.where}" for split, t in tables.items() if not t.where.endswith(f"({split})")]
    else:
        source = {option: path for option, path in files.items() if path is not None}
        tables = {option.removesuffix("_file"): _file_table(path) for option, path in source.items()}
        if dataset_config_name is not None:
            notes.append(f"dataset_config_name {dataset_config_name!r} is not used: the data come from files")
    for table in tables.values():
        if not table.rows:
            raise UserError(f"{table.where}: has no rows")
    text_columns = tuple(text_columns or _known_text_columns(tables["train"], label_column))
    rows = {split: _rows(split, table, text_columns, label_column, notes) for split, table in tables.items()}
    label_names = _label_names(tables["train"], label_column, rows["train"])
    for split in tables:
        known = {label for _, _, label in rows["train"]} | {None}
        unknown = Counter(label for _, _, label in rows[split] if label not in known)
        if unknown:
            found = ", ".join(f"{label!r} ({unknown[label]} rows)" for label in sorted(unknown)[:5])
            where = f"{tables[split].where}: {split} has labels that train has not"
            raise UserError(f"{where}: {found}; train has {_show.repr(label_names)}")
    if "validation" not in rows:
        chosen, count = _carve(rows["train"], validation_fraction, seed), len(rows["train"])
        if not chosen:
            raise UserError(f"{tables['train'].where}: too few rows ({count}) to carve a validation split")
        rows["validation"] = [row for row in rows["train"] if row[0] in chosen]
        rows["train"] = [row for row in rows["train"] if row[0] not in chosen]
        part = f"{validation_fraction * 100:g} % of train ({len(chosen)} of {count} rows)"
        notes.append(f"no validation split: {part}, stratified by label, seed {seed}")
    seen = {texts for _, texts, _ in rows["train"]}
    for split in ("validation", "test"):
        count = sum(texts in seen for _, texts, _ in rows.get(split, []))
        if count:
            notes.append(f"{count} of {len(rows[split])} {split} rows have the same texts as a row of train")
    source["rows"] = {split: len(kept) for split, kept in rows.items()}
    source["validation_carved"] = "validation" not in tables
    source["sha256"] = {split: _sha256(kept) for split, kept in rows.items()}
    stored = {split: _store(kept, text_columns, label_names) for split, kept in rows.items()}
    test = stored.get("test")
    return TextSplits(stored["train"], stored["validation"], test, text_columns, label_names, source, notes)


def _hub_tables(dataset_name: str, config: str | None) -> dict[str, _Table]:
    import datasets

    try:
        found = datasets.load_dataset(dataset_name, config)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        wrong = f"dataset_name: {dataset_name!r} (config {config}) cannot be loaded: {reason}"
        ways = "local files (--train_file, --validation_file); a filled cache (HF_HOME from a machine with it"
        raise UserError(f"{wrong}. Three ways on: {ways}, HF_HUB_OFFLINE=1); make demo") from error
    tables = {}
    for split, known in HUB_SPLITS.items():
        name = next((name for name in known if name in found), None)
        if name is not None:
            tables[split] = _dataset_table(f"{dataset_name} ({name})", found[name])
        elif split == "train":
            raise UserError(f"dataset_name: {dataset_name!r} has no split 'train', only {_show.repr([*found])}")
    return tables


def _dataset_table(where: str, data: "datasets.Dataset") -> _Table:
    class_names = {name: getattr(feature, "names", None) for name, feature in data.features.items()}
    return _Table(where, data.column_names, len(data), lambda name: data[name][:], class_names.get)


def _file_table(path: str) -> _Table:
    data, suffix = _path(path).read_bytes(), Path(path).suffix.lower()
    if suffix == ".parquet":
        import datasets
        import pyarrow.parquet

        try:
            return _dataset_table(path, datasets.Dataset(pyarrow.parquet.read_table(io.BytesIO(data))))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path}: not readable as Parquet ({error})") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        cure = "save it as UTF-8, or: iconv -f CP1252 -t UTF-8 OLD > NEW (CP1252: Latin-1 of Windows; or UTF-16)"
        raise UserError(f"{path}, line {line}: not UTF-8 (byte {data[error.start]:#04x}): {cure}") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{path}, line {line}: holds a NUL byte: damaged, or not UTF-8")
    if suffix in (".json", ".jsonl"):
        objects = _json_objects(path, text)
        names = list(dict.fromkeys(name for row in objects for name in row))
        return _Table(path, names, len(objects), lambda name: [row.get(name) for row in objects])
    header, *rows = _csv_rows(path, text) if suffix == ".csv" else _tsv_rows(path, text)
    return _Table(path, header, len(rows), lambda name: [row[header.index(name)] for row in rows])


def _tsv_rows(path: str, text: str) -> list[list[str]]:
    """Return header and rows, read with quoted cells (spreadsheets) or with quotes as they are (GLUE).

    A quote not meant to open a cell swallows rows or breaks one: the reading with more rows is right.
    """
    readings = []
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        try:
            readings.append(_csv_rows(path, text, "\t", quoting))
        except UserError as error:
            mistake = error
    if not readings:
        raise mistake
    return max(readings, key=len)


def _csv_rows(path: str, text: str, delimiter=",", quoting=csv.QUOTE_MINIMAL) -> list[list[str]]:
    """Return header and rows, all of one length; every cell is text."""
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 KiB
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
    rows = []
    try:
        for cells in filter(None, reader):  # without blank lines
            rows.append(cells)
            if len(cells) != len(rows[0]):
                place, wrong = f"row {len(rows) - 1} (line {reader.line_num})", f"{len(cells)} cells"
                cure = f"a cell that holds {delimiter!r}, a quote or a line end needs quotes around it"
                raise UserError(f"{path}, {place}: {wrong}, the header has {len(rows[0])}: {cure}")
            if len(rows) == 1:
                other = re.search(r"[,;|\t]", cells[0])
                if len(cells) == 1 and other:
                    wrong = f"the only column is {cells[0]!r}: separated by {other[0]!r}?"
                    raise UserError(f"{path}: {wrong} {Path(path).suffix} needs {delimiter!r}")
                twice = [name for name, count in Counter(cells).items() if name and count > 1]
                if twice:
                    raise UserError(f"{path}: the header has {_show.repr(twice)} more than once")
    except csv.Error as error:
        cure = "a quote inside a quoted cell is written twice"
        raise UserError(f"{path}, row {len(rows)} (line {reader.line_num}): {error}: {cure}") from None
    return rows or [[]]


def _json_objects(path: str, text: str) -> list[dict]:
    """Return the objects of a JSON list or of JSON lines: people use either suffix for either."""
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("["):
            raise UserError(f"{path}: broken JSON ({error})") from None
        rows = []
        for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut at U+2028 inside a text
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as broken:
                where = f"{path}, line {number}, column {broken.colno}"
                raise UserError(f"{where}: broken JSON ({broken.msg})") from None
    if isinstance(rows, dict) and all(isinstance(value, (list, dict)) for value in rows.values()):
        wanted = "a list of objects, or one object a line, is needed"
        raise UserError(f"{path}: one JSON object with the keys {_show.repr(list(rows))}: {wanted}")
    rows = rows if isinstance(rows, list) else [rows]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, row {number}: {_show.repr(row)} is not an object with columns as keys")
    return rows


def _known_text_columns(train: _Table, label_column: str) -> tuple[str, ...]:
    there = set(train.names) - {label_column, "label"}
    for names in KNOWN_TEXT_COLUMNS:
        if there.issuperset(names):
            return names
    cure = f"name one or two with text_columns; columns there: {_show.repr(train.names)}"
    raise UserError(f"{train.where}: no text column is known by its name: {cure}")


def _rows(split: str, table: _Table, text_columns, label_column: str, notes: list) -> list[tuple]:
    """Return (row number, texts, label or None) for each row; only a test split may lack labels."""
    unlabelled = split == "test" and label_column not in table.names
    for name in text_columns if unlabelled else (*text_columns, label_column):
        if name not in table.names:
            missing = f"no column {name!r} for {split}{_near(name, table.names)}"
            raise UserError(f"{table.where}: {missing}; columns there: {_show.repr(table.names)}")
    texts = zip(*(_texts(table, name) for name in text_columns), strict=True)
    labels = [None] * table.rows if unlabelled else _labels(table, label_column)
    hidden = [row for row, label in enumerate(labels, 1) if label is None]
    if split == "test" and len(hidden) == table.rows:
        why = f"no column {label_column!r} among {_show.repr(table.names)}" if unlabelled else "hidden"
        notes.append(f"test has no labels ({why}): predictions only")
    elif hidden:
        wrong = f"{len(hidden)} of {table.rows} rows of {split} have no label (empty, null or -1)"
        cure = "label them or take them out, and call no class -1"
        raise UserError(f"{table.where}: {wrong} in {label_column!r}, the first is row {hidden[0]}: {cure}")
    return list(zip(range(1, table.rows + 1), texts, labels, strict=True))


def _texts(table: _Table, name: str) -> list[str]:
    """Return a column as texts; numbers and dates become text, an empty text is allowed."""
    values = table.column(name)
    for row, value in enumerate(values, 1):
        if value is None or value != value:
            cure = "null or absent; an empty text is allowed"
            raise UserError(f"{table.where}, row {row}: the text in {name!r} is missing ({cure})")
        if not isinstance(value, (str, numbers.Number, datetime.date)) or HALF_CHARACTER.search(str(value)):
            raise UserError(f"{table.where}, row {row}: {name!r} is not a text: {_show.repr(value)}")
    return [str(value) for value in values]


def _labels(table: _Table, name: str) -> list[str | None]:
    """Return labels as names: words, whole numbers of any type as '3', None for empty, null and -1."""
    labels, class_names = [], table.class_names(name)
    for row, value in enumerate(table.column(name), 1):
        if isinstance(value, str):
            value = value.strip()
            if re.fullmatch(r"-?(0|[1-9][0-9]*)", value):
                value = int(value)
            elif re.fullmatch(r"[+-]?[0-9]*\.[0-9]+([eE][+-]?[0-9]+)?", value):
                value = float(value)
        if value is None or value in ("", -1) or value != value:
            labels.append(None)
        elif isinstance(value, str) and not HALF_CHARACTER.search(value):
            labels.append(value)
        elif isinstance(value, numbers.Number) and value == value // 1:
            labels.append(class_names[value] if class_names else str(int(value)))
        else:
            cure = "a label is a word or a whole number (regression is not supported)"
            raise UserError(f"{table.where}, row {row}: {name!r} is {_show.repr(value)}: {cure}")
    return labels


def _label_names(train: _Table, label_column: str, rows: list[tuple]) -> tuple[str, ...]:
    """Return the names whose position is the class id: a ClassLabel's as they are, others sorted."""
    found = {label for _, _, label in rows}
    if len(found) == 1:
        raise UserError(f"{train.where}: every row of train has the same {label_column!r}, {found.pop()!r}")
    if len(found) == len(rows) > 10 or (len(found) > 50 and 2 * len(found) >= len(rows)):
        wrong = f"{len(found)} different labels in {len(rows)} rows: is {label_column!r} the label_column?"
        raise UserError(f"{train.where}: {wrong} Columns there: {_show.repr(train.names)}")
    are_numbers = all(re.fullmatch(r"-?[0-9]+", name) for name in found)
    return tuple(train.class_names(label_column) or sorted(found, key=int if are_numbers else str))


def _carve(rows: list[tuple], fraction: float, seed: int) -> set[int]:
    """Return the row numbers of a validation split with `fraction` of each class.

    Rows are ranked by a hash of seed and content: the same choice on every machine and in any order of rows.
    A class of two rows or more has at least one on both sides; a lone row stays in train.
    """
    ranked = {}
    for number, texts, label in rows:
        ranked.setdefault(label, []).append((_sha256([(seed, texts, label)]), number))
    sizes = {label: len(ranked[label]) for label in sorted(ranked) if len(ranked[label]) > 1}
    take = {label: min(max(int(size * fraction), 1), size - 1) for label, size in sizes.items()}
    short = max(round(len(rows) * fraction) - sum(take.values()), 0)
    for label in sorted(take, key=lambda label: take[label] - sizes[label] * fraction)[:short]:
        take[label] = min(take[label] + 1, sizes[label] - 1)
    return {number for label, count in take.items() for _, number in sorted(ranked[label])[:count]}


def _sha256(rows: list) -> str:
    return hashlib.sha256("\n".join(map(json.dumps, rows)).encode()).hexdigest()


def _store(rows: list[tuple], text_columns: tuple, label_names: tuple) -> "datasets.Dataset":
    """Write the rows once, under the hash of their content, and return them mapped from there."""
    import datasets

    ids = {None: -1, **{name: position for position, name in enumerate(label_names)}}
    columns = {name: [texts[i] for _, texts, _ in rows] for i, name in enumerate(text_columns)}
    columns["label"] = [ids[label] for _, _, label in rows]
    kinds = {name: datasets.Value("int64" if name == "label" else "string") for name in columns}
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "text_splits" / _sha256([list(columns), columns])[:32]
    if not folder.exists():
        work = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")  # gets its name when it is complete
        datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(str(work))
        with contextlib.suppress(OSError):  # another process was quicker
            work.rename(folder)
        shutil.rmtree(work, ignore_errors=True)
    return datasets.Dataset.load_from_disk(str(folder))


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises on '~$open.csv'


def _near(name: str, there, count: int = 1) -> str:
    plain = {other.strip().lower(): other for other in there}
    found = difflib.get_close_matches(name.strip().lower(), plain, n=count)
    return f" (did you mean {' or '.join(repr(plain[other]) for other in found)}?)" if found else ""
