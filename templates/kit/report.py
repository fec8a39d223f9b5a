"""The report of a run, report.html: one file that opens without a network, made from the files of the run directory."""

import base64
import io
import os
import shlex
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from kit.errors import MachineError, one_line
from kit.report_figures import (
    MOST_CLASSES,
    SERIES,
    Curve,
    Marks,
    draw_calibration,
    draw_confusion,
    draw_curves,
)
from kit.report_reading import Predictions, RunFiles, read_predictions, read_run_files

PAGE = Path(__file__).with_name("report_page.html")
MOST_EXAMPLES = 12
LONGEST_TEXT = 600  # characters of an example
IMAGES = (".jpg", ".jpeg", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".avif")


def write_report(output_dir: Path) -> Path:
    """Write report.html into a run directory and return its path. Replaces an older one at once.

    Raises `UserError` if there is no run, `MachineError` if it cannot be written.
    """
    run = read_run_files(output_dir)
    path = Path(output_dir) / "report.html"
    write(path, render(title=_title_of(run), run=_page_of(run), is_running=run.status == "running"))
    return path


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
        "results": [(name, number(value)) for name, value in run.results.items() if not isinstance(value, dict | list)],
        "last_evaluation": evaluation
        and {
            "title": f"Validation at step {evaluation['step']}" + (" (best)" * (evaluation["step"] == run.best_step)),
            "rows": [(name, number(value)) for name, value in evaluation.items() if name.startswith("eval_")],
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
            if (rows := flat(run.dict_of(name)))
        ],
    }


def _progress_of(run: RunFiles) -> str:
    total = run.dict_of("batch").get("total_steps")
    of_total = f" of {total} ({100 * run.last_step / total:.0f} %)" if total else ""
    starts = run.facts.get("starts", 1)
    took = f", {duration(run.facts['seconds'])}" if run.facts.get("seconds") else ""
    return f"step {run.last_step}{of_total}{took}{f', {starts} starts' if starts != 1 else ''}"


def _about(run: RunFiles) -> list[tuple[str, str]]:
    """Return what ran, where and on what, as rows."""
    world, data, batch = (run.dict_of(name) for name in ("world", "data", "batch"))
    rows, sha256 = (part if isinstance(part := data.get(name), dict) else {} for name in ("rows", "sha256"))
    memory = run.facts.get("peak_memory_gb")
    command = run.facts.get("command")
    found = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        "started": run.facts.get("started"),
        "world": world.get("summary"),
        "data": ", ".join(
            f"{count} {split}" + (f" (sha256 {str(sha256[split])[:12]}…)" if split in sha256 else "")
            for split, count in rows.items()
        ),
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
            unchanged.append((name, number(value)))
            continue
        origin = "command line" if name in options else "recipe" if name in defaults and "config" in options else ""
        changed.append({"name": name, "value": number(value), "default": number(defaults.get(name)), "origin": origin})
    return changed, unchanged


def _column(rows: list[dict], name: str) -> np.ndarray:
    """Return the numbers [n] of one name; NaN where there is none."""
    values = (row.get(name) for row in rows)
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], dtype=np.float64)


def _names(rows: list[dict], prefix: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name.startswith(prefix)))


def metric_names(evaluations: list[dict]) -> list[str]:
    """Return the names of the metrics in the evaluation lines: eval_accuracy, ..."""
    return [name for name in _names(evaluations, "eval_") if name not in ("eval_loss", "eval_samples")]


def _steps_in(run: RunFiles, name: str) -> list[int]:
    steps = run.facts.get(name)
    return [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []


def _charts_of(run: RunFiles) -> list[dict]:
    training, evaluations = run.training, run.evaluations
    metrics = metric_names(evaluations)
    shares = [name for name in metrics if np.nanmax(np.abs(_column(evaluations, name) - 0.5), initial=0) <= 0.5]
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
    for title, lines in plan:
        curves = [
            Curve(name, _column(rows, "step"), _column(rows, key), color=SERIES[i % len(SERIES)])
            for i, (name, rows, key) in enumerate(lines)
            if _names(rows, key)
        ]
        if any(np.isfinite(curve.values).any() for curve in curves):
            found.append(chart(title, curves, marks))
    return found


def chart(title: str, curves: list[Curve], marks: Marks) -> dict:
    """Return what the page shows of a chart."""
    names = ", ".join(curve.name for curve in curves if curve.name)
    alt = f"{title} over the steps{f': {names}' if names else ''}"
    return {"title": title, "curves": curves, "svg": draw_curves(alt, curves, marks)}


def _describe_marks(run: RunFiles) -> str:
    """Return what the marks in the charts mean, with the steps."""

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
    """Return where the time went: `time` of run.json, else the sums of seconds_* over the training lines."""
    parts = {name: value for name, value in run.dict_of("time").items() if isinstance(value, int | float)}
    if not parts:
        names = _names(run.training, "seconds_")
        parts = {name.removeprefix("seconds_"): float(np.nansum(_column(run.training, name))) for name in names}
    if not parts:
        return []
    total = max(sum(parts.values()), run.facts.get("seconds") or 0.0) or 1.0
    parts["everything else"] = total - sum(parts.values())
    return [
        {"name": name.replace("_", " "), "text": duration(value), "share": value / total}
        for name, value in parts.items()
        if value > 0
    ]


# --------------------------------------------------------------------------------------------- errors of a split


def _split_of(run: RunFiles, name: str) -> dict | None:
    """Return what the page shows of a split's predictions, None where there are none."""
    path = run.path / f"predictions_{name}.csv"
    if not path.exists():
        return None
    from kit.scores import score_classifier  # takes scikit-learn a second

    try:
        found = read_predictions(path)
        if found is None:
            return None
        scores = score_classifier(found.labels, found.probabilities, found.label_names, found.predictions)
    except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
        run.faults.append(f"{path.name} cannot be read: {one_line(error)}")
        return None
    return _errors_of(run, name, found, scores)


def _errors_of(run: RunFiles, name: str, found: Predictions, scores: dict) -> dict:
    from kit.scores import confused_pairs

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
            f" ({share(majority['accuracy'])})."
        )
    classes = [(row["f1"], i) for i, row in enumerate(scores["classes"]) if row["f1"] is not None and row["support"]]
    f1, weakest = min(classes)
    if f1 < 1:
        row = scores["classes"][weakest]
        taken = next(((j, count) for i, j, count in pairs if i == weakest), None)
        lines.append(
            f"The weakest label is “{names[weakest]}”: F1 {share(f1)}, recall {share(row['recall'])} of"
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
    first, *columns = found.inputs
    examples = []
    for i in hardest:
        name = found.inputs[first][i] if first == "name" else f"{first} {found.inputs[first][i]}"
        texts = [(column, found.inputs[column][i]) for column in columns]
        files = (_image(run, text) for text in (found.inputs[first][i], *(text for _, text in texts)))
        image = next((uri for uri in files if uri), None)
        likely = np.argsort(-found.probabilities[i], kind="stable")[:3].tolist()
        shown = list(dict.fromkeys([*likely, found.labels[i], found.predictions[i]]))
        examples.append(
            {
                "name": cut(name),
                "image": image,
                # A path has nothing to say beside its picture.
                "texts": [] if image else [(column, cut(text)) for column, text in texts],
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


def cut(text: str) -> str:
    """Return a text, cut off where it is long."""
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


# ------------------------------------------------------------------------------------------------- text and file


def share(value: float | None) -> str:
    """Return a share from 0 to 1 in percent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def number(value) -> str:
    """Return a value as text, a float with four digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def duration(seconds: float) -> str:
    """Return a time as one reads it: 59.2 s, 12 min, 2 h 5 min."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def flat(values: dict, prefix: str = "") -> list[tuple[str, str]]:
    """Return a nested dict as rows: 'sha256 train' and its value."""
    rows = []
    for name, value in values.items():
        name = f"{prefix}{name}"
        rows += flat(value, f"{name} ") if isinstance(value, dict) else [(name, number(value))]
    return rows


def render(title: str, run: dict | None = None, comparison: dict | None = None, is_running: bool = False) -> str:
    """Return the page of one run or of a comparison. Everything is escaped but our own pictures."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["share"] = share
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return environment.from_string(PAGE.read_text("utf-8")).render(
        title=title, run=run, comparison=comparison, is_running=is_running, made=made
    )


def write(path: Path, page: str) -> None:
    """Replace a file at once: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # the run and a watcher may write at the same time
    try:
        temporary.write_text(page, "utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
