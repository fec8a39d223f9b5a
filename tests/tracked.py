"""A run that only talks to its trackers, as kit/runlog.py does: what test_trackers.py starts, kills and resumes."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from kit.settings import TrainingSettings
from kit.trackers import Trackers

ODD = {
    "none": None,
    "list": ["a", 1],
    "long": "x" * 10_000,
    "empty": "",
    "not_finite": float("nan"),
    "nested": {"a b": 1},
}


@dataclass(kw_only=True)
class Settings(TrainingSettings):
    report_to: list[str] | None = None
    first: int = 1
    last: int = 8
    is_killed: bool = False


def main(settings: Settings) -> None:
    from accelerate import Accelerator

    accelerator, folder = Accelerator(), Path(settings.output_dir)
    folder.mkdir(exist_ok=True)
    log = Trackers(settings, ODD, folder) if accelerator.is_main_process else None
    for step in range(settings.first, settings.last + 1):
        if log:
            log.log(step, {"loss": 1 / step, "epoch": step / 4})
        if log and step % 4 == 0:
            log.log(step, {"eval_loss": 2 / step, "epoch": step / 4})
    accelerator.wait_for_everyone()
    if log and settings.is_killed:
        while not all(sent_by(folder, name) == settings.last for name in settings.report_to):
            time.sleep(0.01)
        time.sleep(4)  # Trackio keeps its lines in memory for a while: a kill within that time loses them
        os.kill(os.getpid(), signal.SIGKILL)
    if log:
        log.close("done")


def sent_by(folder: Path, name: str) -> int | None:
    path = folder / "trackers" / "state.json"
    return json.loads(path.read_text("utf-8")).get(name, {"sent": {}})["sent"].get("loss") if path.exists() else None
