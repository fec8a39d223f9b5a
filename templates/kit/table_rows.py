"""Check the rows of a split chunk by chunk, carve a validation split, and write what is kept as Arrow files.

Texts go through files. What stays in memory is a label code, a hash and a rank for each row: 20 bytes.
"""

import datetime
import hashlib
import json
import numbers
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import UserError
from kit.table_cache import keep
from kit.table_files import Table, show
from kit.table_labels import HALF_CHARACTER, label_name

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Rows:
    """The checked rows of a split: texts and label codes in `file` (an Arrow stream), and a little of each row here."""

    where: str
    file: Path
    names: list[str] = field(default_factory=list)  # of the labels; the position is the code
    places: list[str] = field(default_factory=list)  # where each label is first seen
    codes: array = field(default_factory=lambda: array("i"))  # of each row; -1: hidden
    texts: array = field(
        default_factory=lambda: array("q")
    )  # hashes of the texts; they mean nothing to other processes
    ranks: bytearray = field(default_factory=bytearray)  # 8 bytes a row: those with the smallest are carved out
    first_hidden: str = ""  # the place of the first row without a label
    first_blank: str = ""  # the place of the first label with blanks around it


def read_rows(shards: list[Table], text_columns, label_column: str | None, file: Path, seed: int | None) -> Rows:
    """Return the rows of all `shards`, checked. No `label_column`: all labels are hidden. `seed`: rank the rows."""
    import pyarrow

    rows, codes_of = Rows(shards[0].where, file), {}
    schema = pyarrow.schema([*((name, pyarrow.string()) for name in text_columns), ("label", pyarrow.int64())])
    with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, schema) as writer:
        for table in shards:
            row, to_codes = 1, _coder(table, label_column, rows, codes_of)
            for values in table.chunks([*text_columns, *filter(None, [label_column])]):
                texts = [_texts(table, row, *column) for column in zip(text_columns, values, strict=False)]
                codes = to_codes(row, values[-1]) if label_column else [-1] * len(texts[0])
                if -1 in codes and not rows.first_hidden:
                    place = "" if len(shards) == 1 else f"{table.where}, "
                    rows.first_hidden = f"{place}row {row + codes.index(-1)}"
                rows.codes.extend(codes)
                rows.texts.extend(map(hash, zip(*texts, strict=True)))
                if seed is not None:
                    for line in _lines([seed] * len(codes), texts, codes, rows.names):
                        rows.ranks += hashlib.sha256(line.encode()).digest()[:8]
                columns = [*(pyarrow.array(column, pyarrow.string()) for column in texts), pyarrow.array(codes)]
                writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=schema))
                row += len(codes)
    return rows


def _texts(table: Table, row: int, name: str, values: list) -> list[str]:
    """Return a column from `row` on as texts; numbers and dates become text, an empty text is allowed."""
    with suppress(UnicodeEncodeError):
        if all(type(value) is str for value in values) and "".join(values).encode() is not None:
            return values
    for number, value in enumerate(values, row):
        if value is None or value != value:
            cure = "null or absent; an empty text is allowed"
            raise UserError(f"{table.where}, row {number}: the text in {name!r} is missing ({cure})")
        if not isinstance(value, (str, numbers.Number, datetime.date)) or HALF_CHARACTER.search(str(value)):
            cure = " (bytes: cast the column to strings)" if isinstance(value, bytes) else ""
            raise UserError(f"{table.where}, row {number}: {name!r} is not a text: {show.repr(value)}{cure}")
    return [str(value) for value in values]


def _coder(table: Table, label_column: str | None, rows: Rows, codes: dict[str, int]) -> Callable:
    """Return a function from values to label codes; labels not seen before get the next code."""
    known, class_names = {}, table.class_names.get(label_column)

    def enter(number: int, value) -> int:
        try:
            name = label_name(value, class_names)
        except ValueError as error:
            raise UserError(f"{table.where}, row {number}: {label_column!r} {error}") from None
        if name is None:
            return -1
        if isinstance(value, str) and value != value.strip():
            rows.first_blank = rows.first_blank or f"{table.where}, row {number}"
        if name not in codes:
            codes[name] = len(codes)
            rows.names.append(name)
            rows.places.append(f"{table.where}, row {number}")
        return codes[name]

    def to_codes(row: int, values: list) -> list[int]:
        found = []
        for number, value in enumerate(values, row):
            try:
                code = known.get((type(value), value))  # by type: True is not 1 here
            except TypeError:  # a list: refused in one line
                code = enter(number, value)
            if code is None:
                code = known[type(value), value] = enter(number, value)
            found.append(code)
        return found

    return to_codes


def _lines(numbers: Iterable[int], texts: list[list[str]], codes: Iterable[int], names: list[str]) -> Iterator[str]:
    """Yield the rows as json.dumps writes (number, texts, label): what hashes are made of."""
    labels = [*map(quoted, names), "null"]  # the code -1 is the last
    for number, row, code in zip(numbers, zip(*texts, strict=True), codes, strict=True):
        yield f"[{number}, [{', '.join(map(quoted, row))}], {labels[code]}]"


def carve(rows: Rows, fraction: float) -> "np.ndarray":
    """Return a mask of the rows of a validation split with `fraction` of each class.

    Rows are ranked by a hash of seed and content: the same choice on every machine and in any order of rows.
    A class of two rows or more has at least one on both sides; a lone row stays in train.
    """
    import numpy as np

    codes, ranks = np.frombuffer(rows.codes, np.int32), np.frombuffer(rows.ranks, ">u8")
    counts = np.bincount(codes, minlength=len(rows.names))
    sizes = {name: int(size) for name, size in sorted(zip(rows.names, counts, strict=True)) if size > 1}
    take = {name: min(max(int(size * fraction), 1), size - 1) for name, size in sizes.items()}
    short = max(round(len(codes) * fraction) - sum(take.values()), 0)
    for name in sorted(take, key=lambda name: take[name] - sizes[name] * fraction)[:short]:
        take[name] = min(take[name] + 1, sizes[name] - 1)
    order = np.lexsort((ranks, codes))  # by class, in it by rank, in that by row
    begins = np.cumsum(counts) - counts
    chosen = np.zeros(len(codes), bool)
    for code, name in enumerate(rows.names):
        chosen[order[begins[code] :][: take.get(name, 0)]] = True
    return chosen


def write_rows(rows: Rows, mask: "np.ndarray", text_columns, label_names, work: Path) -> tuple[str, str]:
    """Store the rows under `mask` with their class ids. Return the SHA-256 of their content and the split's name."""
    import numpy as np
    import pyarrow

    places = {name: place for place, name in enumerate(label_names)}
    ids = np.array([*(places[name] for name in rows.names), -1])  # the code -1 is the last
    digest, separator, begin, stored = hashlib.sha256(), "", 0, work / "split"
    with (
        pyarrow.OSFile(str(rows.file)) as file,
        pyarrow.ipc.open_stream(file) as batches,
        pyarrow.OSFile(str(stored), "wb") as out,
        pyarrow.ipc.new_stream(out, batches.schema) as writer,
    ):
        for batch in batches:
            kept = np.flatnonzero(mask[begin : begin + len(batch)])
            *texts, codes = batch.take(pyarrow.array(kept)).columns
            numbers = (kept + begin + 1).tolist()
            lines = _lines(numbers, [column.to_pylist() for column in texts], codes.to_pylist(), rows.names)
            content = "\n".join(lines)
            digest.update(f"{separator if content else ''}{content}".encode())
            separator = "\n" if content else separator
            columns = [*texts, pyarrow.array(ids[codes.to_numpy()])]
            writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=batches.schema))
            begin += len(batch)
    content = json.dumps([text_columns, label_names, digest.hexdigest()])
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    keep(stored, name)
    return digest.hexdigest(), name
