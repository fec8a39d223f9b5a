"""What a run leaves behind: settings.yaml, run.json, metrics.jsonl; and what it says on the screen."""

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
import uuid
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from kit import checkpoints
from kit.errors import UserError, one_line
from kit.evaluation import Progress
from kit.settings import differences, numbers_in_force, save_settings
from kit.stopping import EXIT_STOPPED
from kit.world import on_main

LEFT_BEHIND = (  # run.json goes last when a run is deleted: without it the rest would be nobody's
    "settings.yaml metrics.jsonl README.md report.html predictions.csv checkpoints best final run.json".split()
)
SHARED_WITHIN = 30.0  # seconds in which a new file on a network disk must be seen by every node
# What the tests ran with: from this version to below that one, as in pyproject.toml.
TESTED = {
    "torch": ("2.14", "3"),
    "accelerate": ("1.15", "2"),
    "transformers": ("5.20", "6"),
    "datasets": ("5.2", "6"),
    "evaluate": ("0.4.6", "0.5"),
    "timm": ("1.0.31", "2"),
    "torchvision": ("0.29", "1"),
    "scikit-learn": ("1.7", "2"),
    "numpy": ("2.2", "3"),
    "safetensors": ("0.8", "1"),
}


def has_progress(output_dir: Path) -> bool:
    """Return whether a folder holds a run that has something to lose."""
    return (output_dir / "metrics.jsonl").exists() or any((output_dir / "checkpoints").glob("step_*"))


def read_run(output_dir: Path) -> dict | None:
    """Return run.json of a run directory that has something to lose; None when there is no such run."""
    if not has_progress(output_dir):
        return None
    path = output_dir / "run.json"
    try:
        run = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"output_dir {output_dir} holds metrics or checkpoints but no run.json: it is not a run of this script;"
            " choose another --output_dir"
        ) from None
    except ValueError:
        run = None
    if not isinstance(run, dict) or not {"status", "numbers", "data"} <= run.keys():
        raise UserError(
            f"{path} is unreadable: choose another --output_dir, or delete that run with --overwrite_output_dir true"
        )
    return run


def overwrites(settings) -> bool:
    """Return whether the run in output_dir is to be deleted: not when a scheduler or launcher starts it again."""
    restarts = (os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return settings.overwrite_output_dir and all(count in ("", "0") for count in restarts)


def check_run_directory(settings, data_sha256: dict | None = None) -> str | None:
    """Refuse a run directory that holds another run, with the differences named; return the status of the same run.

    `data_sha256` (by split) is None while the data are not known yet. Changes nothing on disk.
    """
    output_dir = Path(settings.output_dir)
    if not settings.output_dir:
        raise UserError("output_dir is empty: give a folder")
    for path in (output_dir, *output_dir.parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"output_dir {output_dir}: {path} is a file; choose another --output_dir")
    others = [name for name in LEFT_BEHIND if (output_dir / name).exists()]
    if others and not has_progress(output_dir) and "run.json" not in others:
        raise UserError(f"output_dir {output_dir} holds {', '.join(others)} of no run: choose another --output_dir")
    if overwrites(settings) or (run := read_run(output_dir)) is None:
        return None
    if settings.resume_from_checkpoint == "none":
        raise UserError(
            f"{output_dir} holds a run, and resume_from_checkpoint none would start anew over it: choose another"
            " --output_dir, or give --overwrite_output_dir true to delete that run"
        )
    changes = differences(run["numbers"], numbers_in_force(settings))
    if data_sha256 is not None:
        changes += [f"data of {change}" for change in differences(run["data"]["sha256"], data_sha256)]
    if changes:
        raise UserError(
            f"{output_dir} holds another run: {'; '.join(changes)}. Choose another --output_dir,"
            " or give --overwrite_output_dir true to delete that run"
        )
    return run["status"]


class RunDirectory:
    """The run directory of this run; a context that records how the run ended. Only process 0 writes and prints.

    `facts` go into run.json: at least `world`, `data` (its `rows` and `sha256` by split) and `batch`. Entering raises
    `UserError` if another run is writing into the same folder, or if it cannot be written.
    """

    def __init__(self, accelerator, settings, facts: dict):
        self.accelerator, self.settings, self.facts = accelerator, settings, facts
        self.path, self.is_main = Path(settings.output_dir), accelerator.is_main_process
        # What has to be the same for a checkpoint to go on from, and what may change if it is said.
        numbers = numbers_in_force(settings) | {"data": facts["data"]["sha256"]}
        world = {name: value for name, value in facts["world"].items() if name != "summary"}
        self.identity = json.loads(json.dumps({"numbers": numbers, "world": world}))
        self._bar = self._log = self._lock = None

    # -- begin -------------------------------------------------------------------------------------------------------

    def __enter__(self):
        if hasattr(sys.stdout, "reconfigure"):  # a name that the screen cannot show must not end a run
            sys.stdout.reconfigure(errors="backslashreplace")
        self._assert_shared(on_main(self.accelerator, self._open))
        return self

    def _open(self) -> str:
        self._lock = _lock(self.path)
        before = {} if overwrites(self.settings) else read_run(self.path) or {}
        if overwrites(self.settings) and has_progress(self.path):
            for name in LEFT_BEHIND:
                path = self.path / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self._began, self._seconds_before = time.monotonic(), before.get("seconds", 0.0)
        self.facts = {
            "status": "running",
            "cause": None,
            "started": before.get("started") or datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "starts": before.get("starts", 0) + 1,
            "seconds": 0.0,  # of all starts together
            "command": sys.argv,
            "versions": {"python": platform.python_version()} | _versions(),
            "git_commit": _git_commit(),
            "profile": {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "FSDP_"))},
            "numbers": numbers_in_force(self.settings),
            **self.facts,
        }
        self._write_facts()
        # Who reads the settings again to go on must not delete the run by it.
        save_settings(replace(self.settings, overwrite_output_dir=False), self.path / "settings.yaml")
        for old in self.path.glob(".start_*"):  # of a start that was killed at once
            old.unlink()
        token = f".start_{uuid.uuid4().hex}"
        (self.path / token).touch()
        return token

    def _assert_shared(self, token: str) -> None:
        """Raise `UserError` on all processes unless each sees what process 0 has just written."""
        from accelerate.utils import gather_object

        deadline = time.monotonic() + SHARED_WITHIN
        # A listing, not a look at the file: network disks remember for a while that a name was not there.
        while not (is_seen := self.path.is_dir() and token in os.listdir(self.path)) and time.monotonic() < deadline:
            time.sleep(0.2)
        blind = [process for process, seen in enumerate(gather_object([is_seen])) if not seen]
        if self.is_main:
            (self.path / token).unlink()
        if blind:
            raise UserError(
                f"output_dir {self.path}: process {blind[0]} does not see there what process 0 writes: give a folder on"
                " a disk that all nodes share"
            )

    def introduce(self, schedule: str, notes: list[str]) -> None:
        """Print once where the settings came from, where and on what the run happens, and its arithmetic."""
        world, data, batch = (self.facts[name] for name in ("world", "data", "batch"))
        last = batch["samples_in_last_step_of_epoch"]
        ragged = "" if last == batch["global_batch_size"] else f", the last of an epoch with {last} samples"
        lines = {
            "settings": " < ".join(getattr(self.settings, "sources", ["a Settings object"])),
            "world": world["summary"],
            "data": ", ".join(f"{count} {split}" for split, count in data["rows"].items()),
            "steps": f"{batch['total_steps']} steps, {batch['steps_per_epoch']} an epoch{ragged}",
            "batch": batch["arithmetic"],
            "schedule": schedule,
            "run": f"{self.path} (start {self.facts['starts']})" if self.is_main else "",
        }
        notes = [*notes, *untested(_versions())]
        for name, text in [*lines.items(), *(("note", note) for note in notes)]:
            self.say(f"{name:<10} {text}")

    def choose_checkpoint(self) -> Path | None:
        """Return the checkpoint to go on from, the same on every process; say what is passed over or has changed."""
        resume_from = self.settings.resume_from_checkpoint
        path, notes = on_main(self.accelerator, checkpoints.choose, self.path / "checkpoints", resume_from)
        for note in notes:
            self.say(note)
        if path is None:
            return None
        before = checkpoints.read_document(path, "run")
        if changes := differences(before["numbers"], self.identity["numbers"]):
            raise UserError(f"resume_from_checkpoint {path} belongs to another run: {'; '.join(changes)}")
        moved = differences(before["world"], self.identity["world"])
        self.say(f"resume     {path}" + (f"; changed since: {'; '.join(moved)}" if moved else ""))
        best_step = checkpoints.read_document(path, "progress")["best_step"]
        return on_main(self.accelerator, checkpoints.adopt, path, self.path / "checkpoints", best_step)

    def read_progress(self, checkpoint: Path) -> Progress:
        """Return where a checkpoint stands. A best model that is nowhere any more is forgotten, and that is said."""
        progress = Progress(**checkpoints.read_document(checkpoint, "progress"))
        best = checkpoint.with_name(checkpoints.folder_name(progress.best_step or 0))
        is_elsewhere = progress.best_step is not None and best != checkpoint
        if is_elsewhere and on_main(self.accelerator, checkpoints.fault_of, best):
            self.say(f"note       the best model so far (step {progress.best_step}) is gone: the next one counts")
            progress.best_step = progress.best_metric = None
        return progress

    def start_log(self, progress: Progress, total_steps: int, steps_per_epoch: int) -> None:
        """Open metrics.jsonl without the lines after `progress`: a resumed run does those steps again."""
        self._steps_per_epoch = steps_per_epoch
        if not self.is_main:
            return
        from tqdm import tqdm

        path = self.path / "metrics.jsonl"
        rows = [json.loads(line) for line in _complete_lines(path)] if progress.step else []
        last = {"loss": progress.step, "eval_loss": progress.evaluated_step}
        kept = [json.dumps(row) for row in rows for kind in last.keys() & row.keys() if row["step"] <= last[kind]]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept), "utf-8")
        os.replace(temporary, path)
        self._log = open(path, "a", encoding="utf-8")  # closed in __exit__
        # A bar belongs on a terminal; in a file every refresh would be one more line.
        self._bar = tqdm(total=total_steps, initial=progress.step, unit="step", disable=not sys.stderr.isatty())

    # -- during ------------------------------------------------------------------------------------------------------

    def log(self, step: int, **values: float) -> None:
        """Write one line of metrics.jsonl and show it. Non-finite numbers become null."""
        if not self.is_main:
            return
        epoch = step / self._steps_per_epoch
        self._log.write(json.dumps(_plain({"step": step, "epoch": epoch, **values})) + "\n")
        self._log.flush()
        text = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        if self._bar.disable or "loss" not in values:
            self.say(f"step {step}/{self._bar.total}  epoch {epoch:.2f}  {text}")
        else:
            self._bar.set_postfix_str(text, refresh=False)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`."""
        if self.is_main:
            self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """Print a line once, without disturbing the progress bar."""
        if self.is_main:
            from tqdm import tqdm

            try:
                tqdm.write(text)
                sys.stdout.flush()
            except OSError:  # the terminal is closed, or its reader has gone: the run directory has what counts
                sys.stdout = open(os.devnull, "w", encoding="utf-8")  # to the end of the process

    def record(self, **facts) -> None:
        """Add facts to run.json."""
        if self.is_main:
            self.facts |= facts
            self._write_facts()

    def _write_facts(self) -> None:
        self.facts["seconds"] = round(self._seconds_before + time.monotonic() - self._began, 3)
        temporary = self.path / "run.json.tmp"
        temporary.write_text(json.dumps(_plain(self.facts), indent=1) + "\n", "utf-8")
        os.replace(temporary, self.path / "run.json")

    def write_card(self, title: str, results: dict, load: str) -> None:
        """Write README.md, the model card: what was trained on what, the measured numbers, and how to load it."""
        if not self.is_main:
            return
        world, data = self.facts["world"], self.facts["data"]
        rows = "\n".join(f"| {name} | {_short(value)} |" for name, value in results.items())
        sizes = ", ".join(f"{count} {split}" for split, count in data["rows"].items())
        (self.path / "README.md").write_text(
            f"# {title}\n\n| measured | value |\n| --- | --- |\n{rows}\n\n"
            f"Data: {sizes}.\nTrained on: {world['summary']}, in {self.facts['seconds']:.0f} seconds.\n"
            f"Settings: settings.yaml; everything else that is known of the run: run.json, metrics.jsonl.\n\n"
            f"```python\n{load}\n```\n",
            "utf-8",
        )

    # -- end ---------------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the run before its time, after everything is saved. Raises `SystemExit(75)`."""
        self.record(cause=reason)
        command = "the same command" + (" without --overwrite_output_dir" if self.settings.overwrite_output_dir else "")
        self.say(f"stopped    {reason}; {command} goes on from here")
        self.accelerator.end_training()
        raise SystemExit(EXIT_STOPPED)

    def __exit__(self, kind, error, trace) -> None:
        is_stop = isinstance(error, SystemExit) and error.code == EXIT_STOPPED
        if not self.is_main:
            # Process 0 only sees the connection break: leave it the true cause.
            if error is not None and not is_stop:
                name = f".failed_process_{self.accelerator.process_index}"
                cause = f"process {self.accelerator.process_index}: {kind.__name__}: {one_line(error)}"
                with suppress(OSError):  # what ended the run matters more
                    (self.path / name).write_text(cause, "utf-8")
            return
        if self._bar is not None:
            self._bar.close()
            self._log.close()
        outcome = {"status": "done" if error is None else "stopped", "peak_memory_gb": _peak_memory_gb()}
        if error is not None and not is_stop:
            time.sleep(0.5)  # a process that failed before this one may be leaving its note
            causes = [path.read_text("utf-8") for path in sorted(self.path.glob(".failed_process_*"))]
            outcome |= {
                "status": "failed",
                "cause": (causes or [f"{kind.__name__}: {one_line(error)}"])[0],
                "traceback": "".join(traceback.format_exception(kind, error, trace)),
            }
        for path in self.path.glob(".failed_process_*"):
            path.unlink(missing_ok=True)
        try:
            self.record(**outcome)
        except OSError as full:  # what ended the run matters more: let that be seen
            print(f"run.json could not be written: {full}", file=sys.stderr)
        self._lock.release()


def _lock(output_dir: Path):
    from filelock import FileLock, Timeout

    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output_dir / ".lock")
        lock.acquire(timeout=0)
        return lock
    except Timeout:
        raise UserError(
            f"another run is writing into {output_dir}: wait for it, or choose another --output_dir"
        ) from None
    except OSError as error:
        raise UserError(f"output_dir {output_dir} cannot be written: {error.strerror}") from None


def _complete_lines(path: Path) -> list[str]:
    """Return the lines of a file; a last one that a crash cut off is dropped."""
    return path.read_text("utf-8").split("\n")[:-1] if path.exists() else []


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _short(value: float) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


def _versions() -> dict[str, str]:
    found = {}
    for name in TESTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def untested(versions: dict[str, str]) -> list[str]:
    """Return a line for each package whose version lies outside of what was tested."""
    from packaging.version import Version

    ranges = {name: tuple(map(Version, TESTED[name])) for name in versions}
    return [
        f"{name} {version} is outside of what was tested ({TESTED[name][0]} to below {TESTED[name][1]})"
        for name, version in versions.items()
        if not ranges[name][0] <= Version(version) < ranges[name][1]
    ]


def _peak_memory_gb() -> float | None:
    """Return the most memory of this process: of its GPU, else of the host; None where it cannot be asked."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    if os.name != "posix":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in kB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _git_commit() -> str | None:
    """Return the commit that this file belongs to, with '-dirty' where files differ; None outside of a repository."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
