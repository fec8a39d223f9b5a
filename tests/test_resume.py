"""Killed at any moment and started again by the same command, a run is bit for bit the unbroken one."""

import json
import random
import re
import signal
import time

import pytest

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
