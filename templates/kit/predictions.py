"""Predictions with the model of a finished run: what the run left behind, and the rows that are written."""

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.errors import MachineError, UserError

SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run says about its model."""

    path: Path
    model: Path  # the folder of the exported model: best or final
    template: str  # the script that trained it
    settings: dict
    label_names: tuple[str, ...]  # the position is the class id
    precision: str  # that of its own evaluations


def read_finished_run(path: Path, which: str) -> FinishedRun:
    """Return what is known of the run in `path`. Imports nothing heavy; raises `UserError`."""
    import yaml

    if not path.is_dir():
        raise UserError(f"RUN: no such run directory: {path}")
    try:
        facts = json.loads((path / "run.json").read_text("utf-8"))
        settings = yaml.safe_load((path / "settings.yaml").read_text("utf-8"))
        status, precision = facts["status"], facts["world"]["mixed_precision"]
    except OSError as error:
        raise UserError(
            f"RUN: {error.filename} cannot be read ({error.strerror}): give the output_dir of a training"
        ) from None
    except (ValueError, KeyError, TypeError, yaml.YAMLError):
        raise UserError(f"RUN: run.json or settings.yaml in {path} is damaged: train again") from None
    if status != "done":
        raise UserError(
            f"RUN: {path} is not done (status {status}): start its training again, which goes on from there"
        )
    model = path / which
    if not (model / "config.json").is_file():
        if not (model / "model.safetensors").is_file():
            raise UserError(f"RUN: {model} holds no model: it was deleted or moved away; train again")
        raise UserError(
            f"RUN: {model} has weights but no config.json, so the class of the model is unknown, as in every run of"
            f" blank.py. Predict with a few lines of your own: model = OwnModel(), then"
            f" safetensors.torch.load_model(model, '{model / 'model.safetensors'}'), then model.eval()(...)"
        )
    try:
        config = json.loads((model / "config.json").read_text("utf-8"))
        if "pretrained_cfg" in config:
            template, label_names = "image_classification", config["label_names"]
        else:
            names = {int(number): name for number, name in config["id2label"].items()}
            template, label_names = "text_classification", [names[number] for number in sorted(names)]
    except (ValueError, KeyError, AttributeError):
        raise UserError(f"RUN: {model / 'config.json'} names no labels: it was not written by a template") from None
    return FinishedRun(path, model, template, settings, tuple(label_names), precision)


def settings_for(run: FinishedRun, settings_class: type, batch_size: int | None):
    """Return the settings of the run, with its exported model as the model, for evaluation alone."""
    values = run.settings | {"model_name_or_path": str(run.model), "mixed_precision": run.precision}
    values |= {"eval_batch_size": batch_size or run.settings["eval_batch_size"]}
    values |= {"torch_compile": False, "gradient_checkpointing": False}
    if unknown := values.keys() - settings_class.__dataclass_fields__.keys():
        raise UserError(
            f"RUN: {run.path / 'settings.yaml'} has {', '.join(sorted(unknown))}, unknown to {run.template}.py:"
            " use the version that trained it (git_commit in run.json)"
        )
    return settings_class(**values)


def output_for(run: FinishedRun, data: str, output: str | None, overwrite: bool) -> Path:
    """Return the file to write: by default RUN/predictions/NAME_OF_THE_DATA.csv. Raises `UserError`."""
    if output is None:
        name = re.sub(r"[^\w.-]+", "_", Path(data).name).strip("._-") or "data"
        name = name if Path(data).is_dir() else name.removesuffix(".gz").rpartition(".")[0] or name
        path = run.path / "predictions" / f"{name.rstrip('._-')}.csv"
    else:
        path = Path(output).expanduser()
    if path.suffix not in SUFFIXES:
        raise UserError(f"--output {path}: give a name that ends in {' or '.join(SUFFIXES)}")
    if path.is_dir():
        raise UserError(f"--output {path} is a folder: name a file in it")
    if path.exists() and Path(data).exists() and path.samefile(data):
        raise UserError(f"--output {path} is the data themselves: name another file")
    if path.exists() and not overwrite:
        raise UserError(f"--output {path} exists: name another one, or give --overwrite true")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--output {path}: {above} is no folder that you may write to")
    return path


def scores_path(output: Path) -> Path:
    return output.with_suffix(".scores.json")


def predicted_names(label_names: tuple[str, ...], top_k: int) -> list[str]:
    """Return the names of the columns that `predicted_rows` fills."""
    return ["prediction", *(f"p_{name}" for name in label_names), *(f"top_{place + 1}" for place in range(top_k))]


def predicted_rows(probabilities, label_names: tuple[str, ...], top_k: int) -> Iterator[list]:
    """Yield the predicted label, the probability of each label and the `top_k` labels; `probabilities` [n, k]."""
    for shares in probabilities:
        best = [label_names[place] for place in (-shares).argsort(kind="stable")[:top_k]]
        yield [label_names[shares.argmax()], *shares.tolist(), *best]


def check_names(names: list[str], label_names: tuple[str, ...], top_k: int, where: str) -> None:
    """Refuse columns of the data that the predictions would be taken for."""
    if taken := [name for name in predicted_names(label_names, top_k) if name in names]:
        raise UserError(f"{where}: has columns named as the predictions will be: {', '.join(taken)}: rename them")


def write_rows(path: Path, names: list[str], inputs: Iterable[list], predicted: Iterable[list]) -> None:
    """Write a table as CSV or Parquet, by its suffix: the whole of it or, where that fails, nothing.

    Each row is one of `inputs`, as it was read, and one of `predicted`; CSV gets probabilities with six digits.
    """
    temporary = path.with_name(path.name + ".tmp")
    rows = zip(inputs, predicted, strict=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (_write_csv if path.suffix == ".csv" else _write_parquet)(temporary, names, rows)
        os.replace(temporary, path)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_csv(path: Path, names: list[str], rows: Iterable[tuple[list, list]]) -> None:
    # JSON may hold half a character, which UTF-8 cannot.
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for given, predicted in rows:
            shares = (f"{value:.6f}" if isinstance(value, float) else value for value in predicted)
            writer.writerow([*map(_text, given), *shares])


def _write_parquet(path: Path, names: list[str], rows: Iterable[tuple[list, list]]) -> None:
    import pyarrow
    import pyarrow.parquet

    columns: list[list] = [[] for _ in names]
    for given, predicted in rows:
        for column, value in zip(columns, [*given, *predicted], strict=True):
            column.append(value)
    arrays = []
    for values in columns:
        try:
            arrays.append(pyarrow.array(values))
        except (pyarrow.ArrowException, UnicodeEncodeError):  # values of several types, as JSON may have
            texts = [None if value is None else _text(value) for value in values]
            arrays.append(pyarrow.array([text and text.encode("utf-8", "backslashreplace").decode() for text in texts]))
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names), path)


def _text(value) -> str:
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
