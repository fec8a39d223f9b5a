"""The report of a run, report.html: one file that opens without a network, made from the files of the run directory."""

import base64
import csv
import io
import json
import os
import shlex
import statistics
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import yaml

from kit.errors import MachineError, UserError, one_line

PAGE = Path(__file__).with_name("report_page.html")
MOST_EXAMPLES = 12
LONGEST_TEXT = 600  # characters of an example
IMAGES = (".jpg", ".jpeg", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".avif")


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
        return self.facts.get("best_step", self.results.get("best_step"))

    @property
    def best_evaluation(self) -> dict | None:
        """The evaluation of the best step, the last one where none is known to be the best."""
        best = [row for row in self.evaluations if row["step"] == self.best_step]
        return (best or self.evaluations or [None])[-1]

    def dict_of(self, name: str) -> dict:
        """Return a part of run.json that is a dict; empty where it is missing."""
        part = self.facts.get(name)
        return part if isinstance(part, dict) else {}


def write_report(output_dir: Path) -> Path:
    """Write report.html into a run directory and return its path. Replaces an older one at once.

    Raises `UserError` if there is no run, `MachineError` if it cannot be written.
    """
    run = read_run_files(output_dir)
    path = Path(output_dir) / "report.html"
    _write(path, _render(title=_title_of(run), run=_page_of(run), is_running=run.status == "running"))
    return path


def write_comparison(output_dirs: list[Path], path: Path) -> None:
    """Write a page that shows several runs side by side; those that differ in the seed only are one group."""
    runs = [read_run_files(output_dir) for output_dir in output_dirs]
    _write(path, _render(title=f"{len(runs)} runs", comparison=_comparison_of(runs)))


# ------------------------------------------------------------------------------------------------------- reading


def read_run_files(output_dir: Path) -> RunFiles:
    """Return what the files of a run directory say. Raises `UserError` if there is no run."""
    path = Path(output_dir)
    if not path.is_dir():
        raise UserError(f"no such run directory: {path}")
    if not any((path / name).exists() for name in ("run.json", "metrics.jsonl")):
        raise UserError(f"{path} contains no run: neither run.json nor metrics.jsonl is there")
    run = RunFiles(path)
    run.facts = _read_dict(run, "run.json", json.loads)
    run.settings = _read_dict(run, "settings.yaml", yaml.safe_load)
    for row in read_metrics(path / "metrics.jsonl"):
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
    if first < 2 or header[first - 2 : first] != ["label", "prediction"] or first == len(header):
        raise ValueError("its columns do not end with label, prediction and a p_ column for each label")
    names = [str(i) for i in range(len(header))]  # the header's own may be there twice
    table = pyarrow.csv.read_csv(
        path,
        pyarrow.csv.ReadOptions(column_names=names, skip_rows_after_names=1),
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


# ------------------------------------------------------------------------------------------------------- one run


def _title_of(run: RunFiles) -> str:
    model = run.settings.get("model_name_or_path")
    return run.name + (f": {Path(model).name}" if isinstance(model, str) else "")


def _page_of(run: RunFiles) -> dict:
    """Return what the page of one run shows."""
    splits = [split for name in ("test", "validation") if (split := _split_of(run, name))]
    defaults = run.dict_of("defaults")
    changed, unchanged = _settings_of(run, defaults)
    evaluation = run.best_evaluation
    notes = run.facts.get("notes")
    return {
        "status": run.status,
        "progress": _progress_of(run),
        "cause": run.facts.get("cause"),
        "traceback": run.facts.get("traceback") if run.status == "failed" else None,
        "faults": run.faults,
        "splits": splits,
        "f1_of": splits and (f"of {splits[0]['labels'][1]}" if len(splits[0]["labels"]) == 2 else "mean over labels"),
        "results": [(name, _number(value)) for name, value in run.results.items()],
        "last_evaluation": evaluation
        and {
            "title": f"Validation at step {evaluation['step']}" + (" (best)" * (evaluation["step"] == run.best_step)),
            "rows": [(name, _number(value)) for name, value in evaluation.items() if name.startswith("eval_")],
        },
        "charts": _charts_of(run),
        "marks": _describe_marks(run),
        "time": _time_of(run),
        "notes": notes if isinstance(notes, list) else [],
        "about": _about(run),
        "has_defaults": bool(defaults),
        "settings": changed,
        "defaults": unchanged,
        "more": [
            (title, rows)
            for title, name in (("World", "world"), ("Profile", "profile"), ("Versions", "versions"), ("Data", "data"))
            if (rows := _flat(run.dict_of(name)))
        ],
    }


def _progress_of(run: RunFiles) -> str:
    total = run.dict_of("batch").get("total_steps")
    share = f" of {total} ({100 * run.last_step / total:.0f} %)" if total else ""
    starts = run.facts.get("starts", 1)
    took = f", {_duration(run.facts['seconds'])}" if run.facts.get("seconds") else ""
    return f"step {run.last_step}{share}{took}{f', {starts} starts' if starts != 1 else ''}"


def _about(run: RunFiles) -> list[tuple[str, str]]:
    world, data, batch = (run.dict_of(name) for name in ("world", "data", "batch"))
    rows = data.get("rows") if isinstance(data.get("rows"), dict) else {}
    memory = run.facts.get("peak_memory_gb")
    command = run.facts.get("command")
    found = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        "started": run.facts.get("started"),
        "world": world.get("summary"),
        "data": ", ".join(f"{count} {split}" for split, count in rows.items()),
        "batch": batch.get("arithmetic"),
        "peak memory": f"{memory:.2f} GB" if isinstance(memory, int | float) else None,
        "git commit": run.facts.get("git_commit"),
        "run directory": run.path,
    }
    return [(name, value) for name, value in found.items() if value]


def _settings_of(run: RunFiles, defaults: dict) -> tuple[list[dict], list[tuple[str, str]]]:
    """Return the settings that differ from the defaults, with who gave them, and the others."""
    command = [str(part) for part in run.facts.get("command") or []]
    options = {part[2:].split("=")[0] for part in command if part.startswith("--")}
    changed, unchanged = [], []
    for name, value in run.settings.items():
        if name in defaults and defaults[name] == value:
            unchanged.append((name, _number(value)))
            continue
        origin = "command line" if name in options else "recipe" if name in defaults and "config" in options else ""
        changed.append(
            {"name": name, "value": _number(value), "default": _number(defaults.get(name)), "origin": origin}
        )
    return changed, unchanged


def _column(rows: list[dict], name: str) -> np.ndarray:
    """Return the numbers [n] of one name; NaN where there is none."""
    values = (row.get(name) for row in rows)
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], dtype=np.float64)


def _names(rows: list[dict], prefix: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name.startswith(prefix)))


def _metric_names(evaluations: list[dict]) -> list[str]:
    return [name for name in _names(evaluations, "eval_") if name not in ("eval_loss", "eval_samples")]


def _steps_in(run: RunFiles, name: str) -> list[int]:
    steps = run.facts.get(name)
    return [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []


def _charts_of(run: RunFiles) -> list[dict]:
    from kit.report_figures import Marks

    training, evaluations = run.training, run.evaluations
    metrics = _metric_names(evaluations)
    shares = [name for name in metrics if 0 <= np.nanmin(_column(evaluations, name), initial=0)]
    shares = [name for name in shares if np.nanmax(_column(evaluations, name), initial=0) <= 1]
    plan = [
        ("Loss", [("training", training, "loss"), ("validation", evaluations, "eval_loss")]),
        ("Metrics on validation", [(name.removeprefix("eval_"), evaluations, name) for name in shares]),
        *((name.removeprefix("eval_"), [("validation", evaluations, name)]) for name in metrics if name not in shares),
        ("Learning rate", [("", training, "learning_rate")]),
        ("Gradient norm", [("", training, "grad_norm")]),
        ("Samples per second", [("", training, "samples_per_second")]),
        ("Memory in GB", [("", training, "memory_gb")]),
    ]
    marks = Marks(_steps_in(run, "resumes"), _steps_in(run, "skipped"), run.best_step)
    found = []
    for title, curves in plan:
        curves = [(name, _column(rows, "step"), _column(rows, key)) for name, rows, key in curves if _names(rows, key)]
        if any(np.isfinite(values).any() for _, _, values in curves):
            found.append(_chart(title, curves, marks))
    return found


def _chart(title: str, curves: list[tuple], marks) -> dict:
    """Return a chart of (name, steps, values, ...) in the colours of their order."""
    from kit.report_figures import SERIES, Curve, draw_curves

    curves = [Curve(*curve, color=SERIES[i % len(SERIES)]) for i, curve in enumerate(curves)]
    names = ", ".join(curve.name for curve in curves if curve.name)
    alt = f"{title} over the steps{f': {names}' if names else ''}"
    return {"title": title, "curves": curves, "legend": False, "svg": draw_curves(alt, curves, marks)}


def _describe_marks(run: RunFiles) -> str:
    def listed(steps: list[int]) -> str:
        return ", ".join(map(str, steps[:8])) + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")

    resumes, skipped = _steps_in(run, "resumes"), _steps_in(run, "skipped")
    missing = run.training and [row["step"] for row in run.training if row["loss"] is None]
    lines = [
        run.best_step is not None and f"Green line: best step ({run.best_step}).",
        resumes and f"Dotted line: resumed after step {listed(resumes)}.",
        skipped and f"Red tick: step skipped ({listed(skipped)}).",
        missing and f"Red cross: not finite (loss at step {listed(missing)}).",
    ]
    return " ".join(line for line in lines if line)


def _time_of(run: RunFiles) -> list[dict]:
    parts = {name: value for name, value in run.dict_of("time").items() if isinstance(value, int | float)}
    if not parts:
        names = _names(run.training, "seconds_")
        parts = {name.removeprefix("seconds_"): float(np.nansum(_column(run.training, name))) for name in names}
    if not parts:
        return []
    total = max(sum(parts.values()), run.facts.get("seconds") or 0.0) or 1.0
    parts["everything else"] = total - sum(parts.values())
    return [
        {"name": name.replace("_", " "), "text": _duration(value), "share": value / total}
        for name, value in parts.items()
        if value > 0
    ]


# --------------------------------------------------------------------------------------------- errors of a split


def _split_of(run: RunFiles, name: str) -> dict | None:
    """Return what the page shows of a split's predictions, None where there are none."""
    path = run.path / f"predictions_{name}.csv"
    if not path.exists():
        return None
    try:
        found = read_predictions(path)
        return found and _errors_of(run, name, found)
    except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
        run.faults.append(f"{path.name} cannot be read: {one_line(error)}")
        return None


def _errors_of(run: RunFiles, name: str, found: Predictions) -> dict:
    from kit.report_figures import MOST_CLASSES, draw_calibration, draw_confusion
    from kit.scores import confused_pairs, score_classifier

    scores = score_classifier(found.labels, found.probabilities, found.label_names, found.predictions)
    confusion = np.array(scores["confusion"])
    errors = confusion.sum(0) + confusion.sum(1) - 2 * confusion.diagonal()
    shown = np.sort(np.argsort(-errors, kind="stable")[:60]) if len(errors) > MOST_CLASSES else np.arange(len(errors))
    pairs = confused_pairs(confusion)
    names = found.label_names
    return {
        "name": name,
        "labels": names,
        "scores": scores,
        "findings": _findings(scores, pairs, names),
        "classes": sorted(scores["classes"], key=lambda row: 2.0 if row["f1"] is None else row["f1"]),
        "confusion": draw_confusion(f"confusion matrix, {name}", [names[i] for i in shown], confusion[shown][:, shown]),
        "confusion_left_out": len(errors) - len(shown),
        "confusion_shown": len(shown),
        "pairs": [
            {"label": names[i], "prediction": names[j], "count": count, "share": count / confusion[i].sum()}
            for i, j, count in pairs[:15]
        ],
        "calibration": draw_calibration(f"reliability diagram, {name}", scores["calibration"]["bins"]),
        "hardest": _hardest(run, found),
    }


def _findings(scores: dict, pairs: list[tuple[int, int, int]], names: list[str]) -> list[str]:
    """Return in words what stands out."""
    lines = []
    majority = scores["majority"]
    if scores["accuracy"]["low"] <= majority["accuracy"]:
        lines.append(
            f"Accuracy is not clearly above what always answering “{majority['label']}” reaches"
            f" ({_share(majority['accuracy'])})."
        )
    classes = [(row["f1"], i) for i, row in enumerate(scores["classes"]) if row["f1"] is not None and row["support"]]
    f1, weakest = min(classes)
    if f1 < 1:
        row = scores["classes"][weakest]
        taken = next(((j, count) for i, j, count in pairs if i == weakest), None)
        lines.append(
            f"The weakest label is “{names[weakest]}”: F1 {_share(f1)}, recall {_share(row['recall'])} of"
            f" {row['support']} samples"
            + (f"; most often predicted as “{names[taken[0]]}” ({taken[1]} times)." if taken else ".")
        )
    never = [row["label"] for row in scores["classes"] if row["precision"] is None and row["support"]]
    if never:
        lines.append(f"Never predicted: {', '.join(never[:10])}{', …' if len(never) > 10 else ''}.")
    return lines


def _hardest(run: RunFiles, found: Predictions) -> list[dict]:
    """Return the samples whose label got the lowest probability."""
    of_label = found.probabilities[np.arange(len(found.labels)), found.labels]
    hardest = np.argsort(of_label, kind="stable")[:MOST_EXAMPLES]
    first, *columns = found.inputs or {"": [""] * len(found.labels)}
    examples = []
    for i in hardest:
        inputs = {column: found.inputs[column][i] for column in columns}
        name = f"{first} {found.inputs[first][i]}" if found.inputs else f"row {i}"
        image = next((uri for value in [found.inputs.get(first, [""])[i], *inputs.values()] if (uri := _image(run, value))), None)
        # A path has nothing to say beside its picture.
        texts = [] if image else [(column, _cut(text)) for column, text in inputs.items()]
        likely = np.argsort(-found.probabilities[i], kind="stable")[:3].tolist()
        shown = list(dict.fromkeys([*likely, found.labels[i], found.predictions[i]]))
        examples.append(
            {
                "name": _cut(name),
                "image": image,
                "texts": texts,
                "probabilities": [
                    {
                        "label": found.label_names[j],
                        "probability": found.probabilities[i, j],
                        "is_label": j == found.labels[i],
                        "is_prediction": j == found.predictions[i],
                    }
                    for j in shown
                ],
            }
        )
    return examples


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " …"


def _image(run: RunFiles, name: str) -> str | None:
    """Return a small copy of an image file as a data URI; None for what is no image file that can be read."""
    if not name.lower().endswith(IMAGES):
        return None
    from PIL import Image, ImageOps

    path = Path(str(run.settings.get("data_dir") or "")).expanduser() / name  # an absolute name stays as it is
    try:
        with Image.open(path) as image:
            image.draft("RGB", (640, 640))
            small = ImageOps.exif_transpose(image)
            if small.mode.startswith(("I", "F")):  # more than 8 bits
                pixels = np.asarray(small, dtype=np.float64)
                span = max(pixels.max() - pixels.min(), 1e-9)
                small = Image.fromarray(((pixels - pixels.min()) * 255 / span).astype(np.uint8))
            small = small.convert("RGB")
            small.thumbnail((320, 320))
            file = io.BytesIO()
            small.save(file, "JPEG", quality=75)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


# -------------------------------------------------------------------------------------------------- several runs


def _numbers_of(run: RunFiles) -> dict:
    """Return the settings that decide on a run's numbers."""
    numbers = run.dict_of("numbers") or run.settings
    precision = run.dict_of("world").get("mixed_precision")
    return numbers | ({"mixed_precision": precision} if precision else {})


def _grouped(runs: list[RunFiles]) -> list[list[RunFiles]]:
    """Return the runs in groups that differ in the seed only."""
    groups = {}
    for run in runs:
        data = run.dict_of("data")
        # A split that was carved out by seed is another one for each seed.
        sha256 = None if data.get("validation_carved") else data.get("sha256")
        numbers = {name: value for name, value in _numbers_of(run).items() if name not in ("seed", "output_dir")}
        groups.setdefault(json.dumps([numbers, sha256], sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def _outcome(run: RunFiles) -> dict[str, float]:
    """Return the numbers that a run is compared by: of its best evaluation and its results."""
    found = {
        name: value for name, value in (run.best_evaluation or {}).items() if name.startswith("eval_")
    } | run.results
    left_out = ("eval_samples", "test_samples", "skipped_steps")
    return {name: v for name, v in found.items() if isinstance(v, int | float) and name not in left_out}


def _comparison_of(runs: list[RunFiles]) -> dict:
    from kit.report_figures import SERIES, Marks

    groups = _grouped(runs)
    differences = _differences(groups)
    results = list(dict.fromkeys(name for run in runs for name in _outcome(run)))
    colors = [SERIES[i % len(SERIES)] for i in range(len(groups))]
    names = [_name_of(group, [(name, values[i]) for name, values in differences]) for i, group in enumerate(groups)]
    charts = []
    training = ("loss", "learning_rate", "grad_norm", "samples_per_second", "memory_gb")
    metrics = list(dict.fromkeys(name for run in runs for name in _metric_names(run.evaluations)))
    for key in ("eval_loss", *metrics, *training):
        curves = [
            (name, *curve) for name, group in zip(names, groups, strict=True) if (curve := _group_curve(group, key))
        ]
        if curves:
            charts.append(_chart(key, curves, Marks()) | {"legend": True})
    return {
        "results": results,
        "groups": [
            {
                "name": name,
                "color": color,
                "runs": group,
                "results": [_mean([_outcome(run)[key] for run in group if key in _outcome(run)]) for key in results],
            }
            for name, color, group in zip(names, colors, groups, strict=True)
        ],
        "differences": differences,
        "charts": charts,
        "runs": [
            {
                "name": str(run.path),
                "color": color,
                "status": run.status,
                "seed": _numbers_of(run).get("seed", "–"),
                "time": _duration(run.facts["seconds"]) if run.facts.get("seconds") else "–",
                "results": [_number(_outcome(run).get(key)) for key in results],
            }
            for color, group in zip(colors, groups, strict=True)
            for run in group
        ],
    }


def _name_of(group: list[RunFiles], differences: list[tuple[str, str]]) -> str:
    numbers = _numbers_of(group[0])
    settings = [f"{name} {value}" for name, value in differences if name in numbers]
    if 1 <= len(settings) <= 2:
        return _cut(", ".join(settings))
    return group[0].name + (f" and {len(group) - 1} more" if len(group) > 1 else "")


def _differences(groups: list[list[RunFiles]]) -> list[tuple[str, list[str]]]:
    """Return what is not the same in all groups, with its value in each: settings first, then where they ran."""

    def described(run: RunFiles) -> dict[str, str]:
        world, data = run.dict_of("world"), run.dict_of("data")
        numbers = {name: value for name, value in _numbers_of(run).items() if name not in ("seed", "output_dir")}
        sha256 = {} if data.get("validation_carved") else _flat({"sha256 of": data.get("sha256") or {}})
        more = {name: world.get(name) for name in ("num_processes", "num_nodes", "device")}
        versions = {f"version of {name}": version for name, version in run.dict_of("versions").items()}
        found = {**numbers, **more, **dict(sha256), "git commit": run.facts.get("git_commit"), **versions}
        return {name: _number(value) for name, value in found.items()}

    of_groups = [[described(run) for run in group] for group in groups]
    names = dict.fromkeys(name for group in of_groups for run in group for name in run)
    table = [
        (name, [", ".join(sorted({run.get(name, "–") for run in group})) for group in of_groups]) for name in names
    ]
    return [(name, values) for name, values in table if len(set(values)) > 1]


def _group_curve(group: list[RunFiles], key: str) -> tuple | None:
    """Return steps, mean, lowest and highest over the runs of a group; steps and values of a single run."""
    values = {}
    for run in group:
        for row in run.evaluations if key.startswith("eval_") else run.training:
            if isinstance(row.get(key), int | float):
                values.setdefault(row["step"], []).append(row[key])
    if not values:
        return None
    steps = sorted(values)
    mean = np.array([np.mean(values[step]) for step in steps])
    if len(group) == 1:
        return np.array(steps), mean
    return np.array(steps), mean, *(np.array([edge(values[step]) for step in steps]) for edge in (min, max))


def _mean(values: list[float]) -> str:
    if len(values) < 2:
        return _number(values[0]) if values else "–"
    return f"{_number(statistics.mean(values))} ± {statistics.stdev(values):.2g}"


# ------------------------------------------------------------------------------------------------- text and file


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _number(value) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _flat(values: dict, prefix: str = "") -> list[tuple[str, str]]:
    """Return a nested dict as rows: 'sha256 train' and its value."""
    rows = []
    for name, value in values.items():
        name = f"{prefix}{name}"
        rows += _flat(value, f"{name} ") if isinstance(value, dict) else [(name, _number(value))]
    return rows


def _render(title: str, run: dict | None = None, comparison: dict | None = None, is_running: bool = False) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def with_pictures(value):
        """Return the same with our own SVG marked as safe: everything else is escaped."""
        if isinstance(value, dict):
            pictures = ("svg", "confusion", "calibration")
            return {
                key: Markup(part) if key in pictures and isinstance(part, str) else with_pictures(part)
                for key, part in value.items()
            }
        return [with_pictures(part) for part in value] if isinstance(value, list) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["share"] = _share
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return environment.from_string(PAGE.read_text("utf-8")).render(
        title=title, run=with_pictures(run), comparison=with_pictures(comparison), is_running=is_running, made=made
    )


def _write(path: Path, page: str) -> None:
    """Replace a file at once: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # the run and a watcher may write at the same time
    try:
        temporary.write_text(page, "utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
