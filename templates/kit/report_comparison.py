"""Several runs side by side on one page; those that differ in the seed only are one group."""

import json
import statistics
from pathlib import Path

import numpy as np

from kit.report import chart, cut, duration, flat, metric_names, number, render, write
from kit.report_figures import SERIES, Curve, Marks
from kit.report_reading import RunFiles, read_run_files


def write_comparison(output_dirs: list[Path], path: Path) -> None:
    """Write a page that shows several runs side by side; those that differ in the seed only are one group."""
    runs = [read_run_files(output_dir) for output_dir in output_dirs]
    write(path, render(title=f"Comparison of {len(runs)} runs", comparison=_comparison_of(runs)))


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
    found = (run.best_evaluation or {}) | run.results
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and name.startswith(("eval_", "test_")) and not name.endswith("_samples")
    }


def _comparison_of(runs: list[RunFiles]) -> dict:
    groups = _grouped(runs)
    differences = _differences(groups)
    results = list(dict.fromkeys(name for run in runs for name in _outcome(run)))
    colors = [SERIES[i % len(SERIES)] for i in range(len(groups))]
    names = [_name_of(group, [(name, values[i]) for name, values in differences]) for i, group in enumerate(groups)]
    charts = []
    training = ("loss", "learning_rate", "grad_norm", "samples_per_second", "memory_gb")
    metrics = list(dict.fromkeys(name for run in runs for name in metric_names(run.evaluations)))
    for key in ("eval_loss", *metrics, *training):
        curves = [
            Curve(name, *curve, color=color)
            for name, color, group in zip(names, colors, groups, strict=True)
            if (curve := _group_curve(group, key))
        ]
        if curves:
            charts.append(chart(key, curves, Marks()))
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
                "name": run.name if [other.name for other in runs].count(run.name) == 1 else str(run.path),
                "color": color,
                "status": run.status,
                "seed": _numbers_of(run).get("seed", "-"),
                "time": duration(run.facts["seconds"]) if run.facts.get("seconds") else "-",
                "results": [number(_outcome(run).get(key)) for key in results],
            }
            for color, group in zip(colors, groups, strict=True)
            for run in group
        ],
    }


def _name_of(group: list[RunFiles], differences: list[tuple[str, str]]) -> str:
    """Return the name of a group: the settings that set it apart if they are few, else the name of its first run."""
    numbers = _numbers_of(group[0])
    settings = [f"{name} {value}" for name, value in differences if name in numbers]
    if 1 <= len(settings) <= 2:
        return cut(", ".join(settings))
    return group[0].name + (f" and {len(group) - 1} more" if len(group) > 1 else "")


def _differences(groups: list[list[RunFiles]]) -> list[tuple[str, list[str]]]:
    """Return what is not the same in all groups, with its value in each: settings first, then where they ran."""

    def described(run: RunFiles) -> dict[str, str]:
        world, data = run.dict_of("world"), run.dict_of("data")
        numbers = {name: value for name, value in _numbers_of(run).items() if name not in ("seed", "output_dir")}
        sha256 = {} if data.get("validation_carved") else flat({"sha256 of": data.get("sha256") or {}})
        more = {name: world.get(name) for name in ("num_processes", "num_nodes", "device")}
        versions = {f"version of {name}": version for name, version in run.dict_of("versions").items()}
        found = {**numbers, **more, **dict(sha256), "git commit": run.facts.get("git_commit"), **versions}
        return {name: number(value) for name, value in found.items()}

    of_groups = [[described(run) for run in group] for group in groups]
    names = dict.fromkeys(name for group in of_groups for run in group for name in run)
    table = [
        (name, [", ".join(sorted({run.get(name, "-") for run in group})) for group in of_groups]) for name in names
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
        return number(values[0]) if values else "-"
    return f"{number(statistics.mean(values))} ± {statistics.stdev(values):.2g}"
