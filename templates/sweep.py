"""Train one recipe with several seeds and settings, one run after the other, and put the results into one table.

    python sweep.py SCRIPT --config RECIPE.yaml --seeds "0 1 2" -- --config_file configs/cpu.yaml
    python sweep.py SCRIPT --config RECIPE.yaml --seeds "0 1" --grid learning_rate=1e-5,3e-5 weight_decay=0,0.1 -- ...

Options of SCRIPT may follow; after `--` stand those of launch.py. The same command goes on where a sweep was stopped.
It leaves results.csv, results.md and comparison.html, beside one run directory for each run.
Exit code: 0 all runs are done, 2 a mistake, 75 stopped, 1 some run failed.
"""

from kit.stopping import EXIT_STOPPED, catch_signals

if __name__ == "__main__":
    catch_signals()  # before the slow imports below

import argparse
import csv
import dataclasses
import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import launch
from kit.command_line import parse_settings
from kit.errors import UserError, exit_codes
from kit.profile import read_profile
from kit.settings import TrainingSettings

OWN = {"seed": "--seeds", "output_dir": "--output_dir of the sweep"}  # what differs between the runs


@dataclass
class Sweep:
    """What is asked for: the runs are all combinations of `grid` and `seeds`."""

    script: Path
    recipe: str
    seeds: list[str]
    grid: dict[str, list[str]]  # values by setting
    output_dir: Path | None
    script_options: list[str]
    launch_options: list[str]


@dataclass
class Trial:
    """One run of a sweep."""

    values: dict[str, str]  # of the settings in the grid
    seed: str
    path: Path
    options: list[str]  # of the script

    @property
    def name(self) -> str:
        return self.path.name


# -- what is asked for -------------------------------------------------------------------------------------------------


def read_arguments(arguments: list[str]) -> Sweep:
    """Return what the command line asks for. Raises `UserError` for a mistake in it."""
    own, launch_options = arguments, []
    if "--" in arguments:
        place = arguments.index("--")
        own, launch_options = arguments[:place], arguments[place + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = _refuse
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument("--config", required=True, metavar="RECIPE")
    parser.add_argument("--seeds", required=True, help="such as '0 1 2'")
    parser.add_argument("--grid", nargs="+", action="extend", default=[], metavar="SETTING=VALUE,VALUE")
    parser.add_argument("--output_dir", type=Path, help="of the sweep; unset: beside the recipe's output_dir")
    options, script_options = parser.parse_known_args(own)
    for name, place in OWN.items():
        if any(option.split("=")[0] == f"--{name}" for option in script_options):
            raise UserError(f"--{name} is set by the sweep: give {place}")
    return Sweep(
        options.script,
        options.config,
        _read_seeds(options.seeds),
        _read_grid(options.grid),
        options.output_dir and options.output_dir.expanduser(),
        script_options,
        launch_options,
    )


def _refuse(message: str) -> None:
    raise UserError(f"{message} (see sweep.py --help)")


def _read_seeds(text: str) -> list[str]:
    seeds = text.replace(",", " ").split()
    for seed in seeds or [""]:
        if not (seed.isascii() and seed.isdigit()):
            raise UserError(f"--seeds {text!r}: {seed!r} is not a whole number >= 0; give them as '0 1 2'")
    seeds = [str(int(seed)) for seed in seeds]
    if twice := {seed for seed in seeds if seeds.count(seed) > 1}:
        raise UserError(f"--seeds {text!r}: seed {min(twice)} is given twice")
    return seeds


def _read_grid(parts: list[str]) -> dict[str, list[str]]:
    grid = {}
    for part in parts:
        name, equals, text = part.removeprefix("--").partition("=")
        values = [value.strip() for value in text.split(",")]
        if not equals or not all(values):
            raise UserError(f"--grid {part}: write SETTING=VALUE,VALUE, such as learning_rate=1e-5,3e-5")
        if name in OWN:
            raise UserError(f"--grid {part}: {name} is set by the sweep: give {OWN[name]}")
        if name in grid:
            raise UserError(f"--grid: {name} is given twice")
        grid[name] = values
    return grid


def plan(sweep: Sweep) -> tuple[Path, list[Trial]]:
    """Return the sweep's folder and its runs, checked as the script itself would check them, but for the data."""
    if not sweep.script.is_file():
        raise UserError(f"no such script: {sweep.script}")
    launched = [*sweep.launch_options, str(sweep.script)]
    place = launch.read_plain(launched) or launch.read_all(launched)
    if place.config_file is None:
        raise UserError("give a profile after --: -- --config_file configs/cpu.yaml")
    if place.training_script != str(sweep.script):
        raise UserError(f"{place.training_script} stands alone after --: only options of launch.py belong there")
    read_profile(Path(place.config_file))
    module = launch.load_script(sweep.script)
    if not hasattr(module, "Settings"):
        raise UserError(f"{sweep.script} has no Settings: it is not a training script")

    def settings_of(options: list[str]) -> TrainingSettings:
        return parse_settings(module.Settings, module.__doc__, options)

    common = ["--config", sweep.recipe, *sweep.script_options]
    usual = Path(settings_of(common).output_dir)
    folder = sweep.output_dir or usual.with_name(f"sweep_{usual.name}")
    trials, seen = [], []
    for combination in itertools.product(*sweep.grid.values()):
        values = dict(zip(sweep.grid, combination, strict=True))
        for seed in sweep.seeds:
            # A value may be a path: quoted, it is one part of the folder's name, and no two values share a name.
            parts = [f"{name}={quote(value, safe='')}" for name, value in values.items()]
            path = folder / ",".join([*parts, f"seed={seed}"])
            differing = [f"--{name}={value}" for name, value in (values | {"seed": seed}).items()]
            trial = Trial(values, seed, path, [*common, *differing, "--output_dir", str(path)])
            settings = settings_of(trial.options)
            module.check(settings)
            content = dataclasses.asdict(settings) | {"output_dir": None}
            if content.get("push_to_hub"):
                raise UserError("push_to_hub: a sweep uploads nothing; upload its best run with `make push RUN=...`")
            if content in seen:
                raise UserError(f"--grid: {trials[seen.index(content)].name} and {trial.name} are the same run")
            trials, seen = [*trials, trial], [*seen, content]
    return folder, trials


# -- the runs ----------------------------------------------------------------------------------------------------------


def run_all(sweep: Sweep, trials: list[Trial]) -> tuple[dict[str, str], bool]:
    """Run all trials, those that are done too: that takes seconds and makes sure that the data are still the same.

    Returns what became of each that is not done, and whether a signal stopped the sweep.
    """
    program = [sys.executable, str(Path(launch.__file__).resolve()), *sweep.launch_options, str(sweep.script)]
    unfinished = {}
    for i, trial in enumerate(trials, 1):
        print(f"sweep      run {i} of {len(trials)}: {trial.path}", flush=True)
        code, is_signalled = launch.run_one([*program, *trial.options])
        catch_signals()  # until there is another run to pass a signal on to
        if code == EXIT_STOPPED:
            unfinished[trial.name] = "stopped"
        elif code:
            unfinished[trial.name] = f"failed with exit code {code}"
        if is_signalled:
            return unfinished, True
    return unfinished, False


# -- the results -------------------------------------------------------------------------------------------------------


def numbers_of(run: dict) -> dict[str, float]:
    """Return the numbers that a finished run is judged by: of its best model, on validation and test data."""
    results = run.get("results") or {}
    found = {name: value for name, value in results.items() if name.startswith(("best_", "test_"))}
    details = results.get("validation") or {}
    found |= {f"validation_{name}": details[name]["value"] for name in ("accuracy", "f1") if name in details}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and name != "best_step" and not name.endswith("_samples")
    }


def summarise(sweep: Sweep, trials: list[Trial]) -> list[dict]:
    """Return a row for each combination of the grid, with mean and standard deviation (n - 1) over its seeds."""
    rows = []
    for values, group in itertools.groupby(trials, lambda trial: trial.values):
        runs = [run for trial in group if (run := launch.read_run(str(trial.path))).get("status") == "done"]
        found = [numbers_of(run) for run in runs]
        row = values | {"runs": len(runs)}
        for name in dict.fromkeys(name for numbers in found for name in numbers):
            measured = [numbers[name] for numbers in found if name in numbers]
            row[f"{name}_mean"] = statistics.fmean(measured)
            row[f"{name}_std"] = statistics.stdev(measured) if len(measured) > 1 else None
        rows.append(row)
    return rows


def as_markdown(rows: list[dict], num_seeds: int) -> str:
    """Return the rows of a summary as a table in which 0.8 ± 0.1 is a mean and its standard deviation."""
    columns = list(dict.fromkeys(name.removesuffix("_mean") for row in rows for name in row if name[-4:] != "_std"))
    table = [columns]
    for row in rows:
        cells = []
        for name in columns:
            if name == "runs":
                cells.append(f"{row['runs']} of {num_seeds}")
            elif name in row:
                cells.append(row[name].replace("|", "\\|"))
            elif (mean := row.get(f"{name}_mean")) is not None:
                deviation = row[f"{name}_std"]
                cells.append(f"{mean:.4g}" + ("" if deviation is None else f" ± {deviation:.2g}"))
            else:
                cells.append("-")
        table.append(cells)
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    table.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
    return "".join(f"| {line} |\n" for line in lines)


def write_results(folder: Path, sweep: Sweep, trials: list[Trial]) -> None:
    """Write results.csv, results.md and comparison.html from the runs that are done; print the table."""
    from kit.report_comparison import write_comparison

    rows = summarise(sweep, trials)
    done = [trial.path for trial in trials if launch.read_run(str(trial.path)).get("status") == "done"]
    if not done:  # also on every machine but the first
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(folder / "results.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    table = as_markdown(rows, len(sweep.seeds))
    (folder / "results.md").write_text(
        f"Mean ± standard deviation over the seeds {', '.join(sweep.seeds)}.\n\n{table}", "utf-8"
    )
    write_comparison(done, folder / "comparison.html")
    print(f"\n{table}\n{folder / 'results.csv'}, {folder / 'results.md'}, {folder / 'comparison.html'}", flush=True)


def main(arguments: list[str]) -> int:
    sweep = read_arguments(arguments)
    folder, trials = plan(sweep)
    unfinished, is_signalled = run_all(sweep, trials)
    if not is_signalled:
        write_results(folder, sweep, trials)
    for name, outcome in unfinished.items():
        run = launch.read_run(str(folder / name))
        cause = f" ({run.get('cause')})" if run.get("status") == "failed" else ""
        print(f"sweep      {name}: {outcome}{cause}", flush=True)
    if is_signalled or set(unfinished.values()) == {"stopped"}:
        print("stopped    the same command goes on from here", flush=True)
        return EXIT_STOPPED
    return 1 if unfinished else 0


if __name__ == "__main__":
    with exit_codes():
        sys.exit(main(sys.argv[1:]))
