"""The files of a run directory: whose they are, and what may be done with them. Imports nothing heavy."""

import json
import os
import shutil
from pathlib import Path

from kit.errors import UserError
from kit.settings import TrainingSettings, differences, numbers_in_force

LEFT_BEHIND = (  # run.json goes last when a run is deleted: without it nobody could tell whose the rest is
    "settings.yaml metrics.jsonl README.md report.html predictions_validation.csv predictions_test.csv predictions onnx"
    " checkpoints best final trackers run.json".split()
)


# Set by torchrun, Slurm, and launch.py when the memory ran out.
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "TEMPLATES_RESTART_COUNT")


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
            f"output_dir {output_dir} contains metrics or checkpoints but no run.json, so this script did not write it:"
            " choose another --output_dir"
        ) from None
    except ValueError:
        run = None
    if not isinstance(run, dict) or not {"status", "numbers", "data"} <= run.keys():
        raise UserError(
            f"{path} is unreadable: choose another --output_dir, or delete that run with --overwrite_output_dir true"
        )
    return run


def overwrites(settings: TrainingSettings) -> bool:
    """Return whether the run in output_dir is to be deleted: not when a scheduler or launcher starts it again."""
    restarts = (os.environ.get(name, "") for name in RESTART_COUNTS)
    return settings.overwrite_output_dir and all(count in ("", "0") for count in restarts)


def check_run_directory(settings: TrainingSettings, data_sha256: dict | None = None) -> str | None:
    """Refuse a run directory that holds another run, with the differences named; return the status of the same run.

    `data_sha256` (by split) is None while the data are not known yet. Changes nothing on disk.
    """
    output_dir = Path(settings.output_dir)
    if not settings.output_dir:
        raise UserError("output_dir is empty: give a folder")
    if not settings.resume_from_checkpoint:
        raise UserError("resume_from_checkpoint is empty: give auto, none or the path of a checkpoint")
    for path in (output_dir, *output_dir.parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"output_dir {output_dir}: {path} is a file; choose another --output_dir")
    others = [name for name in LEFT_BEHIND if (output_dir / name).exists()]
    if others and not has_progress(output_dir) and "run.json" not in others:
        raise UserError(
            f"output_dir {output_dir} contains {', '.join(others)}, which no run wrote: choose another --output_dir"
        )
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
    if run["status"] == "done" and changes and all(change.startswith("test_file ") for change in changes):
        raise UserError(
            f"{output_dir} is done, with another test_file ({'; '.join(changes)}): to score more data"
            f" with its best model use `make predict RUN={output_dir} DATA=FILE`"
        )
    if changes:
        raise UserError(
            f"{output_dir} holds another run: {'; '.join(changes)}. Choose another --output_dir,"
            " or give --overwrite_output_dir true to delete that run"
        )
    return run["status"]


def delete_run(output_dir: Path) -> None:
    """Delete what a run has left behind, and nothing else."""
    for name in LEFT_BEHIND:
        path = output_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def lock(output_dir: Path):
    """Make the folder and return its lock, held. Raises `UserError` if another run has it, or it cannot be written."""
    from filelock import FileLock, Timeout

    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        held = FileLock(output_dir / ".lock")
        held.acquire(timeout=0)
        return held
    except Timeout:
        raise UserError(
            f"another run is writing into {output_dir}: wait for it, or choose another --output_dir"
        ) from None
    except (OSError, NotImplementedError) as error:  # filelock turns ENOSYS into the latter
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"output_dir {output_dir}: cannot be written or locked ({cause}): choose another") from None


def write_json(path: Path, content: dict) -> None:
    """Replace a JSON file at once: a reader sees the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    os.replace(temporary, path)
