"""Sends a run's lines to experiment trackers: one tracker run, whatever the number of processes and starts."""

import builtins
import getpass
import json
import logging
import math
import os
import queue
import re
import threading
import time
import uuid
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from kit.errors import UserError, one_line
from kit.run_directory import write_json

# Tracker, as Accelerate calls it, its module -> what to install. MLflow's default store is SQLite.
PACKAGES = {name: name for name in "tensorboard trackio wandb comet_ml aim clearml dvclive swanlab".split()}
PACKAGES["mlflow"] = "mlflow-skinny sqlalchemy alembic"
PROJECTS = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "comet_ml": "COMET_PROJECT_NAME"}
LIMIT = 60.0  # seconds that the end of a run waits for all its trackers together
LONGEST = 500  # characters of a setting: MLflow servers before 2.9 store no more


def check_trackers(report_to: list[str] | None) -> None:
    """Raise `UserError` for a tracker that is unknown or not installed. Imports no tracker."""
    for name in report_to or []:
        if name not in PACKAGES:
            raise UserError(f"report_to: {name!r} is not a tracker: choose from {', '.join(sorted(PACKAGES))}")
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # the latter: a folder of that name, such as the one wandb writes
            raise UserError(f"report_to: {name} is not installed: pip install {PACKAGES[name]}")


def flatten(values: dict, prefix: str = "") -> dict:
    """Return nested values as one level of numbers, booleans and short strings, which every tracker can store."""
    flat = {}
    for name, value in values.items():
        name = re.sub(r"[^\w./-]", "_", f"{prefix}{name}", flags=re.ASCII)
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
            continue
        if not isinstance(value, bool | int | str) and not (isinstance(value, float) and math.isfinite(value)):
            value = json.dumps(value, default=str, ensure_ascii=False)
        if isinstance(value, str):
            value = value.encode("utf-8", "backslashreplace").decode("utf-8")  # names of files may be no Unicode
            value = value if len(value) <= LONGEST else value[: LONGEST - 3] + "..."
        flat[name] = value
    return flat


class Trackers:
    """Sends settings, facts and lines to the trackers of `report_to`. For process 0 alone; never raises or waits.

    `say` prints a line and may be called from another thread. trackers/state.json in the run directory remembers the
    tracker runs and the last step of each number that was sent.
    """

    def __init__(self, settings, facts: dict, output_dir: Path, say=print):
        names = list(dict.fromkeys(settings.report_to or []))
        self._folder, self._say, self._lock = Path(output_dir).resolve() / "trackers", say, threading.Lock()
        self._config = flatten(asdict(settings) | {"run": facts})
        _refuse_prompts()
        self._queues = {name: queue.Queue(10_000) for name in names}
        # A thread for each: one that waits for its service delays neither the training nor the others. Libraries
        # cannot replace our signal handlers from a thread, either. The interpreter does not wait for daemons.
        self._threads = [threading.Thread(target=self._run, args=[name], name=f"tracker {name}") for name in names]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send one line. Numbers that are not finite are left out."""
        self._put((step, {name: value for name, value in values.items() if math.isfinite(value)}))

    def close(self, status: str) -> None:
        """Finish with status done, stopped or failed, after at most `LIMIT` seconds."""
        self._put((None, status))
        end = time.monotonic() + LIMIT
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self._say(f"note       {thread.name} did not finish in {LIMIT:.0f} s: its last lines may be missing")

    def _put(self, item: tuple) -> None:
        for name, lines in list(self._queues.items()):
            try:
                lines.put_nowait(item)
            except queue.Full:
                del self._queues[name]
                self._say(
                    f"note       tracker {name} does not answer and gets nothing more; metrics.jsonl has all lines"
                )

    # -- in the thread of one tracker ----------------------------------------------------------------------------------

    def _run(self, name: str) -> None:
        lines = self._queues[name]
        try:
            state = self._remember(name, {})
            tracker = self._start(name, state)
            while (item := lines.get())[0] is not None:
                step, values = item
                new = {key: value for key, value in values.items() if step > state["sent"].get(key, -1)}
                if new:
                    # Remembered first: a kill in between costs a line, but never sends one twice.
                    state = self._remember(name, {"sent": state["sent"] | dict.fromkeys(new, step)})
                    tracker.log(new, step=step)
            _finish(name, tracker, item[1])
        except (Exception, SystemExit) as error:
            self._queues.pop(name, None)
            what = one_line(error)[:300] or type(error).__name__
            self._say(
                f"note       tracker {name} failed and gets nothing more ({what}). The training goes on, and"
                " metrics.jsonl has all lines; mend the cause or leave it out of report_to"
            )

    def _remember(self, name: str, news: dict) -> dict:
        """Add to what state.json says of one tracker, at once, and return it."""
        with self._lock:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / "state.json"
            states = json.loads(path.read_text("utf-8")) if path.exists() else {}
            project = os.environ.get(PROJECTS.get(name, ""), Path.cwd().name)
            project = re.sub(r"[^\w.-]+", "-", project, flags=re.ASCII)[:64].strip("-.") or "training"
            first = {"project": project, "key": uuid.uuid4().hex, "id": None, "is_configured": False, "sent": {}}
            states[name] = states.get(name, first) | news
            write_json(path, states)
            return states[name]

    def _start(self, name: str, state: dict):
        """Return Accelerate's tracker, which goes on with the run that `state` names."""
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        key, known, folder = state["key"], state["id"], str(self._folder / name)
        run = re.sub(r"[^\w.-]+", "-", f"{self._folder.parent.name}-{key[:6]}", flags=re.ASCII)
        options = {
            "tensorboard": {"logging_dir": self._folder},
            "wandb": {"id": key, "name": run, "resume": "allow", "dir": self._folder},
            "trackio": {"name": run, "resume": "allow", "auto_log_gpu": False, "auto_log_cpu": False, "embed": False},
            "mlflow": {"run_name": run, "run_id": known},
            "comet_ml": {"experiment_key": key},
            "aim": {"logging_dir": self._folder, "run_hash": known},
            "clearml": {
                "task_name": run,
                "reuse_last_task_id": False,
                "continue_last_task": known or False,
                "auto_connect_frameworks": False,
                "auto_connect_arg_parser": False,
            },
            "dvclive": {"dir": folder, "resume": True, "save_dvc_exp": False, "dvcyaml": None},
            "swanlab": {
                "id": key[:21],
                "experiment_name": run,
                "resume": "allow",
                "logdir": folder,
            },  # its ids are short
        }[name] | _prepare(name)
        # Two of them take the name of the run, or of its folder, where the others take the project.
        tracker = LOGGER_TYPE_TO_CLASS[name]({"tensorboard": name, "aim": run}.get(name, state["project"]), **options)
        tracker.start()
        if name in ("mlflow", "aim", "clearml"):  # these name their runs themselves
            its = tracker.tracker
            self._remember(name, {"id": its.info.run_id if name == "mlflow" else its.hash if name == "aim" else its.id})
        if name == "clearml":
            tracker.tracker.set_initial_iteration(0)  # or a continued task adds its last step to each step
        # Once: MLflow refuses to change a parameter, as num_workers after a resume. Trackio forgets them at each start.
        if not state["is_configured"] or name == "trackio":
            self._remember(name, {"is_configured": True})
            if name == "tensorboard":  # Accelerate's way makes a second run of it, at every start
                text = "\n".join(f"| {key} | {value} |" for key, value in self._config.items())
                tracker.tracker.add_text("settings", f"| setting | value |\n|---|---|\n{text}", 0)
            else:
                tracker.store_init_configuration(self._config)
        return tracker


def _finish(name: str, tracker, status: str) -> None:
    if name == "mlflow":  # Accelerate's way calls every run finished
        import mlflow

        mlflow.end_run({"done": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))
    elif name == "wandb":
        tracker.tracker.finish(exit_code=int(status == "failed"))
    else:
        tracker.finish()


def _prepare(name: str) -> dict:
    """Make a tracker quiet and see that it is logged in; return options for that."""
    if name == "trackio":  # it greets with escape codes
        import trackio

        for module in (trackio, trackio.run, trackio.utils):
            module.print = lambda *values, **options: None
    if name != "wandb":
        return {}
    import wandb

    settings = wandb.Settings(silent=True, console="off", finish_timeout=LIMIT / 2)  # at exit too
    if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
        raise RuntimeError("not logged in: run `wandb login`, or set WANDB_MODE=offline")
    return {"settings": settings}


def _refuse_prompts() -> None:
    """Let a tracker that asks for a login fail instead of waiting for an answer."""
    for module, name in ((builtins, "input"), (getpass, "getpass")):
        ask = getattr(module, name)

        def answer(*arguments, ask=ask, **keywords):
            if threading.current_thread().name.startswith("tracker "):
                raise EOFError("it asks for a login: log in before the run")
            return ask(*arguments, **keywords)

        setattr(module, name, answer)
