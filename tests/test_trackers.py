"""Trackers get one run with strictly increasing steps over kills and resumes, and never stop a training."""

import getpass
import signal
import threading
import time
from pathlib import Path

import pytest

from kit import trackers
from kit.errors import UserError
from kit.trackers import PACKAGES, Trackers, check_trackers, flatten
from tracked import ODD, Settings
from worlds import World, run


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()
    assert "settings/text_summary" in tags["tensors"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}


def mlflow_scalars(uri: str) -> dict[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [found.experiment_id for found in client.search_experiments()]
    (found,) = client.search_runs(experiments)
    assert found.info.status == "FINISHED"
    parameters = found.data.params
    assert parameters["seed"] == "42"
    assert parameters["run.list"] == '["a", 1]'
    assert parameters["first"] == "1"  # of the first start: MLflow refuses to change one
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return {name: [(metric.step, metric.value) for metric in history] for name, history in histories.items()}


def trackio_scalars() -> dict[str, list[tuple[int, float]]]:
    from trackio.sqlite_storage import SQLiteStorage

    (project,) = SQLiteStorage.get_projects()
    (name,) = SQLiteStorage.get_runs(project)
    rows = SQLiteStorage.get_logs(project, name)
    assert SQLiteStorage.get_run_config(project, name)["seed"] == 42
    return {tag: [(row["step"], row[tag]) for row in rows if tag in row] for tag in ("loss", "eval_loss", "epoch")}


@pytest.mark.parametrize(
    ("num_processes", "names"), [(1, ["tensorboard", "mlflow"]), (1, ["trackio"]), (2, ["tensorboard"])]
)
def test_killed_and_resumed_a_run_is_one_run_of_each_tracker_with_increasing_steps(
    num_processes, names, tmp_path, monkeypatch
):
    for name in names:
        if not trackers.find_spec(name):
            pytest.skip(f"{name} is not installed")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    environment = {"MLFLOW_TRACKING_URI": uri, "TRACKIO_DIR": str(tmp_path / "trackio")}
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported, here too
    folder = tmp_path / "run"
    settings = {"output_dir": str(folder), "report_to": names}
    options = {"template": "tracked", "environment": environment}
    world = World(num_processes, settings | {"is_killed": True}, **options)
    codes = world.wait(90)
    assert codes[0] == -signal.SIGKILL, world.output()
    world = run(num_processes, settings | {"first": 6, "last": 12}, **options)
    assert "note " not in world.output(), world.output()
    assert "\x1b" not in world.output()
    assert "* " not in world.output()
    logs, stored = folder / "trackers" / "tensorboard", {}
    if "tensorboard" in names:
        assert not [path for path in logs.iterdir() if path.is_dir()], "TensorBoard shows each folder as a run"
        stored["tensorboard"] = tensorboard_scalars(logs)
    if "mlflow" in names:
        stored["mlflow"] = mlflow_scalars(uri)
    if "trackio" in names:
        stored["trackio"] = trackio_scalars()
    assert stored.keys() == set(names)
    for name, scalars in stored.items():
        assert scalars.keys() == {"loss", "eval_loss", "epoch"}, name
        steps = {tag: [step for step, _ in values] for tag, values in scalars.items()}
        assert steps == {"loss": [*range(1, 13)], "epoch": [*range(1, 13)], "eval_loss": [4, 8, 12]}, name
        assert all(value == pytest.approx(1 / step, rel=1e-6) for step, value in scalars["loss"]), name


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self, project, **options):
        self.rows, self.config, self.tracker = [], None, self
        self.KEPT[self.name] = self

    def start(self):
        pass

    def add_text(self, name, text, step):
        self.config = text

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self, **options):
        self.rows.append("finished")


@pytest.fixture
def kept(monkeypatch):
    """Put in the place of Accelerate's trackers; return a function that does, and what they kept by name."""
    from accelerate import tracking

    found = {}

    def put(**classes):
        for name, kind in classes.items():
            monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, type(name, (kind,), {"name": name, "KEPT": found}))
        return found

    return put


def test_a_tracker_that_raises_in_the_middle_says_so_once_and_the_others_go_on(kept, tmp_path):
    class Broken(Kept):
        def log(self, values, step):
            if step == 3:
                raise OSError(28, "No space left on device")
            super().log(values, step)

    found, said = kept(dvclive=Broken, comet_ml=Kept), []
    log = Trackers(Settings(report_to=["dvclive", "comet_ml", "comet_ml"]), ODD, tmp_path, said.append)
    for step in range(1, 6):
        log.log(step, {"loss": 1.0, "nothing": float("nan")})
    log.close("done")
    assert found["dvclive"].rows == [(1, {"loss": 1.0}), (2, {"loss": 1.0})]
    assert found["comet_ml"].rows == [*((step, {"loss": 1.0}) for step in range(1, 6)), "finished"]
    assert len(said) == 1
    assert "dvclive" in said[0]
    assert "No space left on device" in said[0]


def test_a_tracker_that_asks_for_a_login_or_never_answers_holds_nobody_up(kept, tmp_path, monkeypatch):
    waiting, said = threading.Event(), []

    class Asks(Kept):
        def start(self):
            getpass.getpass() if self.name == "aim" else input()

    class Hangs(Kept):
        def start(self):
            waiting.wait()

    kept(aim=Asks, comet_ml=Asks, dvclive=Hangs)
    monkeypatch.setattr(trackers, "LIMIT", 0.5)
    began = time.monotonic()
    log = Trackers(Settings(report_to=["aim", "comet_ml", "dvclive"]), ODD, tmp_path, said.append)
    for step in range(10_002):  # more than wait for a tracker
        log.log(step, {"loss": 1.0})
    log.close("failed")
    waiting.set()
    assert time.monotonic() - began < 5
    assert len([line for line in said if "log in" in line]) == 2
    assert len([line for line in said if "dvclive" in line and "answer" in line]) == 1


def test_no_setting_is_refused_by_a_tracker():
    flat = flatten(ODD)
    assert flat["none"] == "null"
    assert flat["list"] == '["a", 1]'
    assert len(flat["long"]) == 500
    assert flat["not_finite"] == "NaN"
    assert flat["nested.a_b"] == 1
    assert flatten({"a": "\udc80"}) == {"a": "\\udc80"}


def test_the_trackers_are_those_that_accelerate_knows():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert LOGGER_TYPE_TO_CLASS.keys() == PACKAGES.keys()


def test_a_tracker_that_is_missing_or_unknown_is_refused_with_the_cure(tmp_path, monkeypatch):
    check_trackers(None)
    check_trackers(["tensorboard"])
    (tmp_path / "aim").mkdir()  # a folder is no package
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="aim is not installed: pip install aim"):
        check_trackers(["tensorboard", "aim"])
    with pytest.raises(UserError, match="'tensorbord' is not a tracker: choose from aim,"):
        check_trackers(["tensorbord"])
