"""Predict the labels of texts in any file that training reads. Every column of the file is kept."""

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import UserError
from kit.predictions import FinishedRun
from kit.table_cache import Reading, open_split, work_folder
from kit.table_files import Table, expanded, show
from kit.table_labels import as_truth_values
from kit.table_rows import read_rows, write_rows
from kit.tables import TextSplits, check_columns, check_files, matching, open_shards

if TYPE_CHECKING:
    import datasets

ALL_KEYS = "\0"  # no column has this name: all objects of a JSON file are looked through for their keys


@dataclass(frozen=True)
class Texts:
    """The rows to predict, in their order."""

    shards: list[Table]
    rows: "datasets.Dataset"  # the text columns and `label`: class ids, -1 hidden, and beyond the known ones unknown
    notes: list[str]

    @property
    def names(self) -> list[str]:
        """All columns; in JSON some may be in a part of the files only."""
        return list(dict.fromkeys(name for table in self.shards for name in table.names))

    def inputs(self) -> Iterator[list]:
        """Yield the rows as they stand in the files."""
        for table in self.shards:
            for chunk in table.chunks(self.names):
                yield from map(list, zip(*chunk, strict=True))


def check_data(data: str) -> None:
    """Refuse what is no file of texts. Imports nothing heavy."""
    check_files("DATA", data)


def text_columns(run: FinishedRun) -> list[str]:
    """Return the columns that the model was trained on."""
    if run.settings["text_columns"]:
        return run.settings["text_columns"]
    path = run.path / "predictions_validation.csv"  # they were found in the data: index, texts, label, prediction, ...
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file))
            return header[1 : header.index("label")]
    except (OSError, StopIteration, ValueError):
        raise UserError(f"RUN: {path} is not there or damaged: it says which columns were trained on") from None


def read_texts(run: FinishedRun, data: str) -> Texts:
    """Return the rows of `data`, a file or a pattern, as training would read them. Raises `UserError`."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    columns, label_column, files = text_columns(run), run.settings["label_column"], matching(data)
    shards = [table for table in open_shards(files, [*columns, ALL_KEYS], label_column) if not table.is_empty]
    if not shards:
        raise UserError(f"{data}: has no rows")
    is_labelled = any(label_column in table.names for table in shards)
    for table in shards:
        check_columns("the prediction", table, [*columns, label_column] if is_labelled else columns)
    reading = Reading({"predict": [columns, label_column, run.label_names]}, [expanded(name) for name in files], {})
    result = reading.recall()
    if result is None:
        with work_folder() as work:
            result = _read(run, shards, columns, label_column if is_labelled else None, work)
            reading.remember(result, work)
    notes = [*(note for table in shards for note in table.notes), *result["notes"]]
    return Texts(shards, open_split(result["splits"]["data"]), notes)


def _read(run: FinishedRun, shards: list[Table], columns: list[str], label_column: str | None, work: Path) -> dict:
    """Store the checked rows; return the name of the split and what there is to say of the labels."""
    import numpy as np

    rows = read_rows(shards, columns, label_column, work / "data.rows", None)
    rows.names = as_truth_values(rows.names, run.label_names)
    unknown = list(dict.fromkeys(name for name in rows.names if name not in run.label_names))
    notes = []
    if unknown:
        codes = [code for code, name in enumerate(rows.names) if name in unknown]
        count = int(np.isin(np.frombuffer(rows.codes, np.int32), codes).sum())
        notes.append(f"{count} rows have labels that the model does not know: {show.repr(unknown)}")
    names = [*run.label_names, *unknown]
    _, stored = write_rows(rows, np.ones(len(rows.codes), bool), columns, names, work)
    return {"splits": {"data": stored}, "notes": notes}


class TextPredictor:
    """The model of a run of the text template, and the texts for it."""

    def __init__(self, template, settings, run: FinishedRun, data: str):
        self.texts = read_texts(run, data)
        splits = TextSplits(None, None, self.texts.rows, tuple(text_columns(run)), run.label_names, {}, [])
        tokenizer, self.model, _ = template.build_model(settings, splits)
        self.rows = template.tokenize(splits, tokenizer, settings.max_length)[2]
        self.lengths = self.rows["length"]
        self.collate = template.PadToLongest(tokenizer)
        self.names, self.inputs, self.notes = self.texts.names, self.texts.inputs, self.texts.notes

    def on_device(self, loader, device):
        """Return the batches as the model takes them."""
        return loader
