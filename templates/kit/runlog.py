"""What a run says: settings.yaml, run.json and metrics.jsonl in its directory, and the lines on the screen."""

import json
import math
import os
import platform
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path

from kit.errors import UserError, one_line, prepare_screen
from kit.run_directory import delete_run, has_progress, lock, overwrites, read_run, write_json
from kit.settings import TrainingSettings, numbers_in_force, save_settings
from kit.trackers import Trackers, check_trackers
from kit.versions import git_commit, untested, versions
from kit.world import on_main, profile_in_force

SHARED_WITHIN = 30.0  # seconds in which a new file on a network disk must be seen by every node
NOTES = ".ended_process_*"  # why each process ended early, for the others to read; the next start deletes them


class RunLog:
    """Writes and prints what a run has to say, on process 0 alone. Only `open` is collective.

    `facts` go into run.json: at least `world`, `data` (its `rows` and `sha256` by split) and `batch`.
    """

    def __init__(self, accelerator, settings: TrainingSettings, facts: dict):
        self.accelerator, self.settings, self.facts = accelerator, settings, facts
        self.path, self.is_main = Path(settings.output_dir), accelerator.is_main_process
        self._bar = self._metrics = self._lock = self._trackers = None
        self._next_report = time.monotonic() + 30  # it imports matplotlib first

    # -- begin -------------------------------------------------------------------------------------------------------

    def open(self) -> dict:
        """Take the run directory and return what run.json said before, {} for a new run.

        Raises `UserError` on every process if another run is writing there, or if not all processes see the folder.
        """
        prepare_screen()
        token, before = on_main(self.accelerator, self._open)
        self._assert_shared(token)
        return before

    def _open(self) -> tuple[str, dict]:
        check_trackers(self.settings.report_to)
        self._lock = lock(self.path)
        before = {} if overwrites(self.settings) else read_run(self.path) or {}
        if overwrites(self.settings) and has_progress(self.path):
            delete_run(self.path)
        self._began, self._seconds_before = time.monotonic(), before.get("seconds", 0.0)
        variables = {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
        self.facts = {
            "status": "running",
            "cause": None,
            "started": before.get("started") or datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "starts": before.get("starts", 0) + 1,
            "resumes": before.get("resumes", []),
            "skipped": before.get("skipped", []),
            "seconds": 0.0,  # of all starts together
            "command": sys.argv,
            "versions": {"python": platform.python_version()} | versions(),
            "git_commit": git_commit(),
            "profile": {"file": profile_in_force()} | variables,
            "numbers": numbers_in_force(self.settings),
            "defaults": {field.name: field.default for field in fields(self.settings)},
            "memory": before.get("memory"),
            **self.facts,
        }
        self._write_facts()
        # A run that is started from these settings must go on, not delete itself.
        save_settings(replace(self.settings, overwrite_output_dir=False), self.path / "settings.yaml")
        for old in [*self.path.glob(".start_*"), *self.path.glob(NOTES)]:  # of a start that was killed
            old.unlink()
        token = f".start_{uuid.uuid4().hex}"
        (self.path / token).touch()
        return token, before

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
        """Print where the settings came from, where and on what the run happens, and its arithmetic."""
        world, data, batch = (self.facts[name] for name in ("world", "data", "batch"))
        last = batch["samples_in_last_step_of_epoch"]
        ragged = "" if last == batch["global_batch_size"] else f", the last of an epoch with {last} samples"
        notes = [*notes, *untested(versions())]
        self.record(notes=notes)
        lines = {
            "settings": " < ".join(getattr(self.settings, "sources", ["a Settings object"])),
            "profile": profile_in_force() or "none",
            "world": world["summary"],
            "data": ", ".join(f"{count} {split}" for split, count in data["rows"].items()),
            "steps": f"{batch['total_steps']} steps, {batch['steps_per_epoch']} an epoch{ragged}",
            "batch": batch["arithmetic"],
            "schedule": schedule,
            "run": f"{self.path} (start {self.facts['starts']})" if self.is_main else "",
        }
        for name, text in [*lines.items(), *(("note", note) for note in notes)]:
            self.say(f"{name:<10} {text}")

    def start(self, step: int, evaluated_step: int, total_steps: int, steps_per_epoch: int) -> None:
        """Open metrics.jsonl, without the lines after `step`: a resumed run does those steps again."""
        self._steps_per_epoch = steps_per_epoch
        if not self.is_main:
            return
        from tqdm import tqdm

        path = self.path / "metrics.jsonl"
        rows = [json.loads(line) for line in _complete_lines(path)] if step else []
        last = {"loss": step, "eval_loss": evaluated_step}
        kept = [json.dumps(row) for row in rows for kind in last.keys() & row.keys() if row["step"] <= last[kind]]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept), "utf-8")
        os.replace(temporary, path)
        self._metrics = open(path, "a", encoding="utf-8")  # closed in `close`
        facts = {name: self.facts[name] for name in ("world", "data", "batch", "versions", "git_commit")}
        self._trackers = Trackers(self.settings, facts, self.path, self.say) if self.settings.report_to else None
        # A bar belongs on a terminal; in a file every refresh would be one more line.
        self._bar = tqdm(total=total_steps, initial=step, unit="step", disable=not sys.stderr.isatty())

    # -- during ------------------------------------------------------------------------------------------------------

    def write(self, step: int, **values: float) -> None:
        """Write one line of metrics.jsonl and show it. Non-finite numbers become null."""
        if not self.is_main:
            return
        epoch = step / self._steps_per_epoch
        self._metrics.write(json.dumps(_plain({"step": step, "epoch": epoch, **values})) + "\n")
        self._metrics.flush()
        if self._trackers is not None:
            self._trackers.log(step, {"epoch": epoch, **values})
        text = "  ".join(f"{name} {short(value)}" for name, value in values.items())
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
            except (OSError, ValueError, AttributeError):  # the terminal or its reader is gone, or there never was one
                sys.stdout = open(os.devnull, "w", encoding="utf-8")  # to the end of the process

    def record(self, **facts) -> None:
        """Add facts to run.json."""
        if self.is_main:
            self.facts |= facts
            self._write_facts()

    def report(self, is_last: bool = False) -> None:
        """Write report.html: at the end, and before it while that takes at most a twentieth of the time."""
        if not self.is_main or not (is_last or time.monotonic() > self._next_report):
            return
        began = time.monotonic()
        try:
            from kit.report import write_report

            write_report(self.path)
        except Exception as error:  # a picture is never worth a training
            if self._next_report < math.inf:
                self.say(f"note       report.html could not be written: {type(error).__name__}: {one_line(error)}")
            self._next_report = math.inf
            return
        self._next_report = time.monotonic() + 20 * (time.monotonic() - began)

    def _write_facts(self) -> None:
        self.facts["seconds"] = round(self._seconds_before + time.monotonic() - self._began, 3)
        write_json(self.path / "run.json", _plain(self.facts))

    # -- end ---------------------------------------------------------------------------------------------------------

    def leave_note(self, note: dict) -> None:
        """Write down for the other processes why this one ends early."""
        name = NOTES.replace("*", str(self.accelerator.process_index))
        with suppress(OSError):  # what ends the run matters more
            write_json(self.path / name, note | {"time": time.time()})

    def first_note(self) -> dict | None:
        """Return the note of the process that ended first: the others only saw their connection to it break."""
        time.sleep(0.5)  # a process that failed before this one may be leaving its note
        notes = []
        for path in self.path.glob(NOTES):
            with suppress(OSError, ValueError):
                notes.append(json.loads(path.read_text("utf-8")))
        return min(notes, key=lambda note: (note["is_lost_connection"], note["time"]), default=None)

    def close(self, **outcome) -> None:
        """Write how the run ended, and let go of its directory."""
        if not self.is_main:
            return
        if self._bar is not None:
            self._bar.close()
            self._metrics.close()
        try:
            self.record(peak_memory_gb=_peak_memory_gb(), **outcome)
            self.report(is_last=True)
        except OSError as full:  # what ended the run matters more: let that be seen
            print(f"run.json could not be written: {full}", file=sys.stderr)
        if self._trackers is not None:
            self._trackers.close(self.facts["status"])
        self._lock.release()


def short(value: float) -> str:
    """Return a number as people read it: four digits."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


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
