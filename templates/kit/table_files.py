"""Read tables from files (CSV, TSV, JSON, JSON lines, Parquet) and from hub datasets, a thousand rows at a time.

CSV, TSV and JSON are parsed here: the readers of `datasets` pad short rows, turn the word "NA" into nothing
and "2003-06-15" into a timestamp, and know no row numbers. Row 1 is the first row of data.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import re
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import UserError

if TYPE_CHECKING:
    import datasets

KINDS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")  # all but the last also with .gz behind
CHUNK = 1000  # rows
BLOCK = 2**20  # characters or bytes
show = reprlib.Repr()
show.maxlist, show.maxtuple, show.maxstring = 20, 20, 80


@dataclass(frozen=True)
class Table:
    """One file, or one split of a hub dataset; `chunks(names)` yields the values of these columns, one list each."""

    where: str  # what errors name
    names: list[str]
    is_empty: bool
    chunks: Callable[[list[str]], Iterator[list[list]]]
    class_names: dict[str, list[str]] = field(default_factory=dict)  # of ClassLabel columns
    notes: list[str] = field(default_factory=list)


def expanded(name: str) -> Path:
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises on '~$open.csv'


def kind_of(name: str) -> str | None:
    """Return the suffix that says how a file is read, None where it is not."""
    plain = name.lower().removesuffix(".gz")
    kind = next((kind for kind in KINDS if plain.endswith(kind)), None)
    return None if kind == ".parquet" and name.lower().endswith(".gz") else kind


def open_table(name: str, columns: list[str], label_column: str) -> Table:
    """Return the table in a file. `columns` are those that will be asked for, as far as they are known."""
    kind = kind_of(name)
    if kind == ".parquet":
        return _parquet_table(name)
    if kind in (".json", ".jsonl"):
        return _json_table(name, [*columns, label_column])
    delimiter, quoting, notes = ",", csv.QUOTE_MINIMAL, []
    if kind == ".tsv":
        delimiter = "\t"
        quoting = _tsv_quoting(name, label_column, notes)
    header, *first = list(itertools.islice(_csv_rows(name, delimiter, quoting), 2)) or [[]]

    def chunks(names: list[str]) -> Iterator[list[list]]:
        places = [header.index(column) for column in names]
        for rows in _chunked(itertools.islice(_csv_rows(name, delimiter, quoting), 1, None)):
            yield [[row[place] for row in rows] for place in places]

    return Table(name, header, not first, chunks, notes=notes)


def dataset_table(where: str, data: "datasets.Dataset") -> Table:
    """Return the table of a split of a hub dataset."""
    class_names = {name: feature.names for name, feature in data.features.items() if hasattr(feature, "names")}

    def chunks(names: list[str]) -> Iterator[list[list]]:
        for part in data.select_columns(names).with_format("arrow").iter(CHUNK):
            yield [part.column(name).to_pylist() for name in names]

    return Table(where, data.column_names, not len(data), chunks, class_names)


# Text files


@contextlib.contextmanager
def _opened(name: str, binary: bool = False):
    """Open a file, gzip or not, as text: UTF-8, with or without a mark at its beginning, line ends as they are."""
    path = expanded(name)
    try:
        with gzip.open(path) if name.lower().endswith(".gz") else path.open("rb") as raw:
            yield raw if binary else io.TextIOWrapper(raw, "utf-8-sig", newline="")
    except UnicodeDecodeError as error:
        line, byte = _undecodable(name) if not binary else (0, error.object[error.start])
        cure = "save it as UTF-8, or: iconv -f CP1252 -t UTF-8 OLD > NEW (CP1252: Latin-1 of Windows; or UTF-16)"
        raise UserError(f"{name}, line {line}: not UTF-8 (byte {byte:#04x}): {cure}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{name}: not readable as gzip ({error}): copy it again, or unpack it") from None


def _undecodable(name: str) -> tuple[int, int]:
    """Return line and value of the first byte that is not UTF-8."""
    with _opened(name, binary=True) as file:
        for line, content in enumerate(file, 1):
            try:
                content.decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError as error:
                return line, content[error.start]
    raise AssertionError(f"{name} was not UTF-8 a moment ago")


def _lines(name: str) -> Iterator[str]:
    with _opened(name) as file:
        for number, line in enumerate(file, 1):
            if "\0" in line:
                raise UserError(f"{name}, line {number}: holds a NUL byte: damaged, or not UTF-8")
            yield line


def _chunked(rows: Iterable) -> Iterator[list]:
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, CHUNK)):
        yield chunk


# CSV and TSV


def _csv_rows(name: str, delimiter: str, quoting: int) -> Iterator[list[str]]:
    """Yield the header and the rows, all of one length; every cell is text."""
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 KiB
    reader = csv.reader(_lines(name), delimiter=delimiter, quoting=quoting, strict=True)
    row, width = 0, None
    try:
        for cells in filter(None, reader):  # without blank lines
            if width is None:
                _check_header(name, cells, delimiter)
                width = len(cells)
            elif len(cells) != width:
                place, wrong = f"row {row} (line {reader.line_num})", f"{len(cells)} cells, the header has {width}"
                cure = f"a cell that holds {delimiter!r}, a quote or a line end needs quotes around it"
                raise UserError(f"{name}, {place}: {wrong}: {cure}")
            yield cells
            row += 1
    except csv.Error as error:
        cure = "a quote inside a quoted cell is written twice"
        raise UserError(f"{name}, row {row} (line {reader.line_num}): {error}: {cure}") from None


def _check_header(name: str, cells: list[str], delimiter: str) -> None:
    other = re.search(r"[,;|\t]", cells[0])
    if len(cells) == 1 and other:
        wrong = f"the only column is {cells[0]!r}: separated by {other[0]!r}?"
        raise UserError(f"{name}: {wrong} {kind_of(name)} needs {delimiter!r}")
    twice = [column for column, count in Counter(cells).items() if column and count > 1]
    if twice:
        raise UserError(f"{name}: the header has {show.repr(twice)} more than once")


def _tsv_quoting(name: str, label_column: str, notes: list[str]) -> int:
    """Return how to read a TSV: with quoted cells (spreadsheets) or with quotes as they are (GLUE).

    Where only one way gives rows of one length, it is that one. Where both do, a quoted cell spans several lines that
    could be rows themselves. They are rows, unless most of them would bring in labels that no other row has.
    """
    with _opened(name, binary=True) as file:
        if not any(b'"' in block for block in iter(lambda: file.read(BLOCK), b"")):
            return csv.QUOTE_NONE
    readings, mistake = {}, None
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        try:
            rows = _csv_rows(name, "\t", quoting)
            header = next(rows, [])
            place = header.index(label_column) if label_column in header else None
            readings[quoting] = Counter(None if place is None else cells[place].strip() for cells in rows)
        except UserError as error:
            mistake = error
    if not readings:
        raise mistake
    if len(readings) == 1:
        return next(iter(readings))
    quoted, plain = readings.values()
    if quoted.total() == plain.total():
        return csv.QUOTE_MINIMAL
    strange = sum(count for label, count in plain.items() if label not in quoted)
    is_quoted = 2 * strange > plain.total() - quoted.total()
    how = "cells in quotes may span lines" if is_quoted else "quotes are read as they are"
    counts = f"{quoted.total()} rows with quoted cells, {plain.total()} with quotes as they are"
    notes.append(f"{name}: {how} (can be read both ways: {counts})")
    return csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE


# JSON


def _json_table(name: str, needed: list[str]) -> Table:
    """Return the table of JSON objects; its columns are the keys of the first object, or of all where that is short."""
    first = list(itertools.islice(_json_rows(name), 2))
    if len(first) == 1 and all(isinstance(value, (list, dict)) for value in first[0].values()):
        wanted = "a list of objects, or one object a line, is needed"
        raise UserError(f"{name}: one JSON object with the keys {show.repr(list(first[0]))}: {wanted}")
    names = dict.fromkeys(first[0] if first else ())
    if not names.keys() >= set(needed):
        for row in _json_rows(name):
            names.update(dict.fromkeys(row))

    def chunks(names: list[str]) -> Iterator[list[list]]:
        for rows in _chunked(_json_rows(name)):
            yield [[row.get(column) for row in rows] for column in names]

    return Table(name, list(names), not first, chunks)


def _json_rows(name: str) -> Iterator[dict]:
    """Yield the objects of a JSON list or of JSON lines: people use either suffix for either."""
    with _opened(name) as file:
        while (begin := file.read(1)).isspace():
            pass
        rows = _json_list(name) if begin == "[" else _json_lines(name)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{name}, row {number}: {show.repr(row)} is not an object with columns as keys")
        yield row


def _json_lines(name: str) -> Iterator:
    lines = _lines(name)
    is_first = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if is_first and error.pos >= len(line.rstrip()):  # one object on several lines
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line + "".join(lines))
                    return
            where = f"{name}, line {number}, column {error.colno}"
            raise UserError(f"{where}: broken JSON ({error.msg})") from None
        is_first = False


def _json_list(name: str) -> Iterator:
    """Yield the items of a JSON list; reads on where an item is not complete yet."""
    decode, mark = json.JSONDecoder().raw_decode, re.compile(r"\s*(\[\s*\]|[\[,\]])\s*")
    text, place, line, expected = "", 0, 1, "["
    with _opened(name) as file:
        while True:
            try:
                found = mark.match(text, place)
                if not found or found[1][0] not in expected:
                    raise json.JSONDecodeError(f"Expecting {' or '.join(expected)}", text, place)
                if found[1][-1] == "]":
                    if (text[found.end() :] + file.read(BLOCK)).strip():
                        raise json.JSONDecodeError("Extra data", text, found.end())
                    return
                item, end = decode(text, found.end())
            except json.JSONDecodeError as error:
                more = file.read(max(BLOCK, len(text)))
                if not more:
                    number = line + text.count("\n", 0, error.pos)
                    raise UserError(f"{name}, line {number}: broken JSON ({error.msg})") from None
                line += text.count("\n", 0, place)
                text, place = text[place:] + more, 0
                continue
            yield item
            place, expected = end, ",]"


# Parquet


def _parquet_table(name: str) -> Table:
    import pyarrow.parquet

    @contextlib.contextmanager
    def opened():
        try:
            with pyarrow.parquet.ParquetFile(expanded(name)) as file:
                yield file
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{name}: not readable as Parquet ({' '.join(str(error).split())})") from error

    with opened() as file:
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
        described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = described.get("info", {}).get("features", {})
    is_class = {
        column: isinstance(kind, dict) and kind.get("_type") == "ClassLabel" for column, kind in features.items()
    }
    class_names = {column: kind["names"] for column, kind in features.items() if is_class[column]}

    def chunks(names: list[str]) -> Iterator[list[list]]:
        twice = [column for column in names if schema.names.count(column) > 1]
        if twice:
            raise UserError(f"{name}: has {show.repr(twice)} more than once")
        with opened() as file:
            for part in file.iter_batches(CHUNK, columns=names, use_threads=False):
                yield [part.column(column).to_pylist() for column in names]

    return Table(name, schema.names, not num_rows, chunks, class_names)
