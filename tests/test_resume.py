"""Killed at any moment and started again by the same command, a run is bit for bit the unbroken one."""

import json
import random
import re
import shutil
import signal
import time

import pytest
from safetensors.torch import load_file

import worlds
from kit.errors import UserError
from kit.run_directory import check_run_directory
from text_classification import Settings
from worlds import World, largest_difference, lines, numbers, run, same_weights


@pytest.fixture(scope="module")
def settings(tiny_settings) -> dict:
    return tiny_settings | {"checkpointing_steps": 2, "eval_steps": 3, "num_workers": 0}


@pytest.fixture(scope="module")
def unbroken(settings, tmp_path_factory) -> dict:
    """The run directory of the unbroken run, by number of processes."""
    folders = {}
    for num_processes in (1, 2):
        folders[num_processes] = tmp_path_factory.mktemp("unbroken") / str(num_processes)
        run(num_processes, settings | {"output_dir": str(folders[num_processes])})
    return folders


def assert_same(output_dir, unbroken) -> None:
    assert numbers(output_dir) == numbers(unbroken)
    for name in ("best", "final"):
        assert same_weights(output_dir / name, unbroken / name), name
    facts, expected = (json.loads((folder / "run.json").read_text("utf-8")) for folder in (output_dir, unbroken))
    assert facts["status"] == "done"
    assert facts["results"] == expected["results"]


MOMENTS = [
    ("die_in_window", 2, "before the first checkpoint"),
    ("die_in_window", 8, "in the middle of a window"),
    ("die_while_saving", 3, "while a checkpoint is being written"),
    ("die_before_rename", 4, "when a checkpoint is complete but not yet named"),
    ("die_in_evaluation", 2, "in evaluation"),
    ("die_after_evaluation", 2, "between evaluation and checkpoint, at an epoch's last steps"),
    ("die_in_export", 1, "after the last step, in the export"),
]


@pytest.mark.parametrize(("fault", "call", "moment"), MOMENTS, ids=[f"{name}-{call}" for name, call, _ in MOMENTS])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_killed_at_that_moment_the_run_goes_on_exactly(
    num_processes, fault, call, moment, settings, unbroken, tmp_path
):
    output_dir = tmp_path / "run"
    here = settings | {"output_dir": str(output_dir), "num_workers": 2 if fault == "die_in_window" else 0}
    world = World(num_processes, here, patches=[f"faults:{fault}"], environment={"FAULT": json.dumps({"call": call})})
    codes = world.wait()
    assert codes[0] == -signal.SIGKILL, f"{moment}: the fault never came\n{world.output()}"
    assert all(codes), "the other process must not end as if all were well"
    run(num_processes, here)
    assert_same(output_dir, unbroken[num_processes])


@pytest.mark.timeout(900)
def test_killed_at_twenty_random_moments_the_run_goes_on_exactly(settings, unbroken, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    began = time.monotonic()
    run(1, settings | {"output_dir": str(tmp_path / "timed")})
    duration = time.monotonic() - began
    kills = 0
    while kills < 20:
        num_processes = draw.choice([1, 1, 2])
        output_dir = tmp_path / f"run{kills}"
        here = settings | {"output_dir": str(output_dir), "num_workers": draw.choice([0, 0, 2])}
        for _ in range(draw.choice([1, 2])):  # also twice in one run
            world = World(num_processes, here)
            time.sleep(draw.uniform(0.1, 1.0) * duration * (2 if num_processes == 2 else 1))
            world.signal(signal.SIGKILL)
            world.wait()
            kills += 1
        run(num_processes, here)
        assert_same(output_dir, unbroken[num_processes])


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_one_process_saves_that_step_on_all(number, num_processes, settings, unbroken, tmp_path):
    output_dir = tmp_path / "run"
    here = settings | {"output_dir": str(output_dir), "checkpointing_steps": "epoch", "eval_steps": "epoch"}
    world = World(num_processes, here, patches=["faults:slow_steps"])
    world.wait_for(lambda: (output_dir / "metrics.jsonl").exists() and lines(output_dir))
    world.signal(number, rank=num_processes - 1)
    assert world.wait(30) == [75] * num_processes
    facts = json.loads((output_dir / "run.json").read_text("utf-8"))
    assert (facts["status"], facts["cause"]) == ("stopped", f"signal {signal.Signals(number).name}")
    last = lines(output_dir, "loss")[-1]["step"]
    assert last < 10, "the signal came too late to prove anything"
    assert [path.name for path in (output_dir / "checkpoints").iterdir()] == [f"step_{last:08d}"]
    whole = tmp_path / "whole"
    if number == signal.SIGTERM:
        run(num_processes, here | {"output_dir": str(whole)})
        run(num_processes, here)
        assert_same(output_dir, whole)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_signal_in_evaluation_saves_and_evaluates_again(num_processes, settings, unbroken, tmp_path):
    output_dir = tmp_path / "run"
    here = settings | {"output_dir": str(output_dir)}
    fault = {"FAULT": json.dumps({"call": 1, "rank": num_processes - 1})}
    world = World(num_processes, here, patches=["faults:signal_in_evaluation"], environment=fault)
    assert world.wait(30) == [75] * num_processes, world.output()
    assert not lines(output_dir, "eval_loss")
    assert lines(output_dir, "loss")[-1]["step"] == 3
    run(num_processes, here)
    assert_same(output_dir, unbroken[num_processes])


def test_resumed_on_other_numbers_of_processes_it_is_the_same_run(settings, tiny, tmp_path):
    still = settings | {"model_name_or_path": str(tiny / "bert_still"), "checkpointing_steps": 4}
    run(1, still | {"output_dir": str(tmp_path / "whole")})
    here = still | {"output_dir": str(tmp_path / "run")}
    for num_processes, call in ((2, 11), (1, 12), (3, None)):
        fault = [] if call is None else ["faults:die_in_window"]
        patches = {"patches": fault, "environment": {"FAULT": json.dumps({"call": call})}}
        world = World(num_processes, here, **patches)
        codes = world.wait()
        assert (codes == [0] * num_processes) == (call is None), world.output()
    assert re.search(r"changed since: num_processes \d -> 3", world.output(0))
    assert largest_difference(numbers(tmp_path / "whole"), numbers(tmp_path / "run")) <= 1e-5


def test_a_finished_run_is_not_run_again(settings, unbroken):
    before = (unbroken[1] / "metrics.jsonl").read_bytes()
    world = run(1, settings | {"output_dir": str(unbroken[1])})
    assert "is done" in world.output()
    assert (unbroken[1] / "metrics.jsonl").read_bytes() == before


def test_another_run_in_the_same_folder_is_refused_with_the_differences(settings, unbroken, tiny):
    for changed, words in (
        ({"learning_rate": 2e-3}, "learning_rate 0.001 -> 0.002"),
        ({"seed": 7}, "seed 42 -> 7"),
        ({"train_file": str(tiny / "test.jsonl")}, "train_file"),
        ({"resume_from_checkpoint": "none"}, "would start anew over it"),
    ):
        world = run(1, settings | changed | {"output_dir": str(unbroken[1])}, expected=2)
        assert words in world.output()
        assert "Traceback" not in world.output()


# -- run directories ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best_is_there", [True, False])
def test_going_on_in_another_folder_takes_the_best_model_along(best_is_there, settings, tmp_path):
    here = settings | {"metric_for_best_model": "loss", "checkpointing_steps": "epoch"}
    first = here | {"output_dir": str(tmp_path / "first")}
    fault = {"FAULT": json.dumps({"call": 20})}  # in the second epoch, behind the evaluation of step 9
    patches = ["faults:worse_each_time", "faults:die_in_window"]
    assert World(1, first, patches=patches, environment=fault).wait() == [-9]
    assert [path.name for path in (tmp_path / "first" / "checkpoints").iterdir()]
    saved = sorted((tmp_path / "first" / "checkpoints").glob("step_????????"))
    if not best_is_there:
        shutil.rmtree(saved[0])
    second = here | {"output_dir": str(tmp_path / "second"), "resume_from_checkpoint": str(saved[-1])}
    world = run(1, second, patches=["faults:worse_each_time"])
    results = json.loads((tmp_path / "second" / "run.json").read_text())["results"]
    kept = worlds.weights(tmp_path / "second" / "best")
    best = load_file(tmp_path / "second" / "checkpoints" / f"step_{results['best_step']:08d}" / "model.safetensors")
    assert all(best[name].equal(kept[name]) for name in best)
    assert (results["best_step"] == int(saved[0].name[5:])) == best_is_there
    assert (" is gone: the next one counts" in world.output()) != best_is_there


def test_a_second_crash_leaves_no_evaluation_twice(settings, unbroken, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run")}
    fault = {"environment": {"FAULT": json.dumps({"call": 1})}}
    assert World(1, here, patches=["faults:signal_in_evaluation"], **fault).wait() == [75]
    assert World(1, here, patches=["faults:die_in_window"], **fault).wait() == [-9]
    run(1, here)
    assert_same(tmp_path / "run", unbroken[1])


def test_overwriting_is_done_once_and_never_by_a_restart(settings, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run")}
    run(1, here | {"max_train_steps": 1})
    time_limit = {"max_train_time": 0.001, "overwrite_output_dir": True}
    world = run(1, here | time_limit, expected=75)
    assert "the same command without --overwrite_output_dir goes on from here" in world.output()
    assert "overwrite_output_dir: false" in (tmp_path / "run" / "settings.yaml").read_text()
    world = run(1, here | {"overwrite_output_dir": True}, environment={"SLURM_RESTART_COUNT": "1"})
    assert "resume " in world.output()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["starts"] == 2


def test_files_that_no_run_wrote_are_never_overwritten(settings, tmp_path):
    (tmp_path / "mine" / "best").mkdir(parents=True)
    (tmp_path / "mine" / "README.md").write_text("mine")
    for output_dir, words in (
        ("", "output_dir is empty"),
        (str(tmp_path / "mine"), "contains README.md, best, which no run wrote"),
    ):
        for overwrite in (False, True):
            with pytest.raises(UserError, match=words):
                check_run_directory(
                    Settings(**settings | {"output_dir": output_dir, "overwrite_output_dir": overwrite})
                )
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"


@pytest.mark.parametrize("content", ["{}", "[]", "nothing", '{"status": "done"}'])
def test_a_damaged_run_json_is_one_line_and_can_be_overwritten(content, settings, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(content)
    here = settings | {"output_dir": str(tmp_path / "run"), "max_train_steps": 1}
    with pytest.raises(UserError, match=r"run.json is unreadable: .*--overwrite_output_dir true"):
        check_run_directory(Settings(**here))
    if content == "{}":
        run(1, here | {"overwrite_output_dir": True})
