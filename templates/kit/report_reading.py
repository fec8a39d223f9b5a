"""What the files of a run directory say, for a report: nothing in them has to be there or complete."""

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from kit.errors import UserError, one_line


@dataclass
class RunFiles:
    """What the files of a run directory say; whatever is missing or cut off is empty, and `faults` says so."""

    path: Path
    facts: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    training: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def status(self) -> str:
        status = self.facts.get("status")
        return status if status in ("done", "stopped", "failed", "running") else "unknown"

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in [*self.training, *self.evaluations]), default=0)

    @property
    def results(self) -> dict:
        return self.dict_of("results")

    @property
    def best_step(self) -> int | None:
        return self.facts.get("best_step") or self.results.get("best_step")

    @property
    def best_evaluation(self) -> dict | None:
        """The evaluation of the best step, the last one where none is known to be the best."""
        best = [row for row in self.evaluations if row["step"] == self.best_step]
        return (best or self.evaluations or [None])[-1]

    def dict_of(self, name: str) -> dict:
        """Return a part of run.json that is a dict; empty where it is missing."""
        part = self.facts.get(name)
        return part if isinstance(part, dict) else {}


def read_run_files(output_dir: Path, with_metrics: bool = True) -> RunFiles:
    """Return what the files of a run directory say. Raises `UserError` if there is no run."""
    path = Path(output_dir)
    if not path.is_dir():
        raise UserError(f"no such run directory: {path}")
    if not any((path / name).exists() for name in ("run.json", "metrics.jsonl")):
        raise UserError(f"{path} contains no run: neither run.json nor metrics.jsonl is there")
    run = RunFiles(path)
    run.facts = _read_dict(run, "run.json", json.loads)
    run.settings = _read_dict(run, "settings.yaml", yaml.safe_load)
    for row in read_metrics(path / "metrics.jsonl") if with_metrics else []:
        if "loss" in row:
            run.training.append(row)
        elif "eval_loss" in row:
            run.evaluations.append(row)
    return run


def _read_dict(run: RunFiles, name: str, parse) -> dict:
    try:
        content = parse((run.path / name).read_text("utf-8"))
    except FileNotFoundError:
        run.faults.append(f"{name} is missing.")
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        run.faults.append(f"{name} cannot be read: {one_line(error)}")
        return {}
    return content if isinstance(content, dict) else {}


def read_metrics(path: Path) -> list[dict]:
    """Return the lines of metrics.jsonl; one that is cut off is left out."""
    rows = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


@dataclass
class Predictions:
    """A predictions_*.csv: n samples whose labels are known, k classes."""

    label_names: list[str]
    labels: np.ndarray  # [n] class ids
    predictions: np.ndarray  # [n] class ids
    probabilities: np.ndarray  # [n, k]
    inputs: dict[str, list[str]]  # the columns before the label, each [n]


def read_predictions(path: Path) -> Predictions | None:
    """Return the predictions of a split, None where no label is known. Raises `ValueError` for any other file."""
    import pyarrow.compute
    import pyarrow.csv

    with open(path, encoding="utf-8", newline="") as file:
        header = next(csv.reader(file), [])
    # From the end: an input column may be called label too.
    first = len(header)
    while first and header[first - 1].startswith("p_"):
        first -= 1
    if first < 3 or header[first - 2 : first] != ["label", "prediction"] or first == len(header):
        raise ValueError("its columns are not: index or name, inputs, label, prediction, p_... for each label")
    names = [str(i) for i in range(len(header))]  # the header's own may be there twice
    table = pyarrow.csv.read_csv(
        path,
        pyarrow.csv.ReadOptions(column_names=names, skip_rows_after_names=1, block_size=1 << 24),
        pyarrow.csv.ParseOptions(newlines_in_values=True),
        pyarrow.csv.ConvertOptions(
            column_types={name: "string" if i < first else "float64" for i, name in enumerate(names)}
        ),
    )
    labels = table[first - 2]
    table = table.filter(pyarrow.compute.not_equal(labels, ""))
    if not len(table):
        return None
    label_names = [name.removeprefix("p_") for name in header[first:]]
    ids = {name: i for i, name in enumerate(label_names)}
    try:
        labels, predictions = ([ids[name] for name in table[i].to_pylist()] for i in (first - 2, first - 1))
    except KeyError as error:
        raise ValueError(f"label {error} has no column of probabilities") from None
    probabilities = np.stack([column.to_numpy() for column in table.columns[first:]], axis=1)
    inputs = {header[i]: table[i].to_pylist() for i in range(first - 2)}
    return Predictions(label_names, np.array(labels), np.array(predictions), probabilities, inputs)
