"""How a run ends before its time: all processes together, nothing lost, nothing waiting."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from conftest import TEMPLATES
from kit.stopping import SIGNALS, begin_worker, catch_signals, is_launcher
from worlds import World, lines, numbers, run, same_weights


def facts_of(output_dir) -> dict:
    return json.loads((output_dir / "run.json").read_text("utf-8"))


def test_an_exception_on_one_process_ends_all_with_the_true_cause(tiny_settings, tmp_path):
    fault = {"FAULT": json.dumps({"rank": 1, "call": 6})}
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "ddp_timeout": 600.0}
    began = time.monotonic()
    world = World(2, settings, patches=["faults:raise_in_window"], environment=fault)
    codes = world.wait(60)
    assert time.monotonic() - began < 60
    assert all(codes), codes
    assert 'raise KeyError("the true cause")' in world.output(1)
    facts = facts_of(tmp_path / "run")
    assert (facts["status"], facts["cause"]) == ("failed", "process 1: KeyError: 'the true cause'")


def test_a_checkpoint_that_is_being_written_is_completed_when_another_process_fails(tiny_settings, tmp_path):
    fault = {"FAULT": json.dumps({"rank": 1, "call": 7, "seconds": 3})}  # two micro-batches a step: in step 4
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "checkpointing_steps": 3, "eval_steps": 100}
    world = World(2, settings, patches=["faults:raise_in_window", "faults:slow_disk"], environment=fault)
    assert all(world.wait()), world.output()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000003"]


def test_a_folder_that_not_all_processes_see_is_one_line(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run")}
    world = run(2, settings, 2, patches=["faults:own_folder"], environment={"FAULT": json.dumps({"rank": 1})})
    assert "process 1 does not see there what process 0 writes: give a folder on a disk that all nodes" in world.output(
        0
    )
    assert "Traceback" not in world.output()


def test_a_process_that_hangs_is_left_after_the_timeout(tiny_settings, tmp_path):
    fault = {"FAULT": json.dumps({"rank": 1, "call": 6})}
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "ddp_timeout": 4.0}
    world = World(2, settings, patches=["faults:hang_in_window"], environment=fault)
    world.processes[0].join(60)
    assert world.processes[0].exitcode == 1, world.output(0)
    assert re.search("[Tt]imed out", world.output(0))
    world.kill()


def test_long_data_preparation_is_not_a_timeout(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "ddp_timeout": 15.0, "max_train_steps": 1}
    run(2, settings, patches=["faults:slow_data"])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_time_limit_saves_and_stops_like_a_signal(num_processes, tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "num_train_epochs": 100, "eval_steps": 500}
    world = World(num_processes, settings | {"max_train_time": 0.01}, patches=["faults:slow_steps"])
    assert world.wait() == [75] * num_processes, world.output()
    facts = facts_of(tmp_path / "run")
    assert (facts["status"], facts["cause"]) == ("stopped", "max_train_time of 0.01 s is up")
    step = lines(tmp_path / "run", "loss")[-1]["step"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step:08d}"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_not_finite_stops_all_and_names_step_process_and_samples(rank, tiny_settings, tmp_path):
    fault = {"FAULT": json.dumps({"rank": rank, "call": 8})}  # two micro-batches a step: the second of step 4
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "checkpointing_steps": 3, "eval_steps": 100}
    world = World(2, settings, patches=["faults:not_finite_loss"], environment=fault)
    assert world.wait() == [1, 1], world.output()
    message = facts_of(tmp_path / "run")["cause"]
    found = re.search(r"the loss of process (\d) is not finite at step (\d+); samples of that step: \[(.*?)\]", message)
    assert found, message
    assert (int(found[1]), int(found[2])) == (rank, 4)
    assert len(found[3].split(",")) == 4
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000003"]
    run(2, settings)
    run(2, settings | {"output_dir": str(tmp_path / "whole")})
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_steps_that_are_not_finite_can_be_skipped_together_and_are_counted(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "skip_nonfinite_steps": 1}
    fault = {"FAULT": json.dumps({"rank": 1, "call": 8})}
    world = run(2, settings, patches=["faults:not_finite_loss"], environment=fault)
    assert "step 4 is skipped (1 of at most 1): its gradient is not finite" in world.output(0)
    rows = lines(tmp_path / "run", "loss")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[3]["loss"] is None
    assert rows[3]["learning_rate"] == rows[2]["learning_rate"], "a skipped step leaves the schedule"
    assert all(row["loss"] for row in rows if row["step"] != 4)
    assert facts_of(tmp_path / "run")["results"]["skipped_steps"] == 1


def test_more_steps_than_allowed_are_not_skipped(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "skip_nonfinite_steps": 2}
    world = World(1, settings | {"learning_rate": 1e30, "max_grad_norm": 0.0})
    assert world.wait() == [1], world.output()
    assert "is not finite at step" in facts_of(tmp_path / "run")["cause"]


def test_compiled_or_with_checkpointed_activations_it_is_the_same_run_and_the_same_keys(tiny, tiny_settings, tmp_path):
    still = tiny_settings | {"model_name_or_path": str(tiny / "bert_still"), "checkpointing_steps": 2}
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    for name, options in (("plain", {}), ("compiled", compiled), ("checkpointed", {"gradient_checkpointing": True})):
        run(1, still | options | {"output_dir": str(tmp_path / name)})
    from worlds import largest_difference, weights

    for name in ("compiled", "checkpointed"):
        assert largest_difference(numbers(tmp_path / "plain"), numbers(tmp_path / name)) <= 1e-4
        for folder in ("best", "final"):
            assert weights(tmp_path / name / folder).keys() == weights(tmp_path / "plain" / folder).keys()
    # Stopped plain, gone on compiled, then with checkpointed activations.
    here = still | {"output_dir": str(tmp_path / "mixed")}
    for options, call in (({}, 20), (compiled, 8)):  # late enough: a save waits until the one before is complete
        fault = {"FAULT": json.dumps({"call": call})}
        assert World(1, here | options, patches=["faults:die_in_window"], environment=fault).wait() == [-9]
    world = run(1, here | {"gradient_checkpointing": True})
    assert "resume" in world.output()
    assert largest_difference(numbers(tmp_path / "plain"), numbers(tmp_path / "mixed")) <= 1e-4


def test_the_learning_rate_goes_on_where_it_was(tiny_settings, tmp_path):
    settings = tiny_settings | {"warmup_ratio": 0.5, "checkpointing_steps": 2, "lr_scheduler_type": "cosine"}
    run(2, settings | {"output_dir": str(tmp_path / "whole")})
    for call in (7, 15):  # inside the warm-up and after it
        here = settings | {"output_dir": str(tmp_path / f"run{call}")}
        fault = {"FAULT": json.dumps({"call": call})}
        assert -signal.SIGKILL in World(2, here, patches=["faults:die_in_window"], environment=fault).wait()
        run(2, here)
        rates = [
            [row["learning_rate"] for row in lines(folder, "loss")]
            for folder in (tmp_path / f"run{call}", tmp_path / "whole")
        ]
        assert rates[0] == rates[1]
        assert same_weights(tmp_path / f"run{call}" / "final", tmp_path / "whole" / "final")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_signal_in_data_preparation_ends_it_at_once(num_processes, tiny_settings, tmp_path):
    world = World(num_processes, tiny_settings | {"output_dir": str(tmp_path / "run")}, patches=["faults:slow_data"])
    time.sleep(3)
    world.signal(signal.SIGTERM)
    assert world.wait(15) == [75] * num_processes, world.output()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python3 /opt/venv/bin/accelerate launch train.py", True),
        ("/opt/venv/bin/python3 -m accelerate.commands.launch train.py", True),
        ("python /opt/venv/bin/torchrun train.py", True),
        ("python templates/launch.py --config_file cpu.yaml", True),
        ("python templates/sweep.py templates/blank.py --seeds 0", True),
        ("bash /home/me/accelerate-templates/start.sh", False),
        ("/home/me/accelerate-templates/.venv/bin/python search.py", False),
    ],
)
def test_only_a_launcher_takes_its_script_with_it(command, expected):
    assert is_launcher([word.encode() for word in command.split()]) == expected


def test_under_nohup_a_closed_terminal_stays_without_effect():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        catch_signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) not in (before[signal.SIGTERM], signal.SIG_DFL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_where_signals_cannot_be_waited_for_ctrl_c_leaves_the_workers_alone():
    def work(ready) -> None:
        del signal.sigwaitinfo  # as on macOS and Windows
        begin_worker(0)
        ready.set()
        time.sleep(30)

    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    worker = fork.Process(target=work, args=(ready,))
    worker.start()
    assert ready.wait(20)
    os.kill(worker.pid, signal.SIGINT)
    worker.join(1)
    assert worker.is_alive()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == -signal.SIGTERM


def test_no_worker_outlives_a_killed_process(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "num_workers": 2, "num_train_epochs": 100}
    for start_method in ("fork", "forkserver"):
        world = World(1, settings | {"overwrite_output_dir": True, "eval_steps": 999}, start_method=start_method)
        world.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and lines(tmp_path / "run"))
        workers = psutil.Process(world.processes[0].pid).children(recursive=True)
        assert len(workers) >= 2
        world.kill()
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive, start_method
        (tmp_path / "run" / "metrics.jsonl").unlink()


def test_workers_live_through_a_signal_to_everybody_until_the_run_has_saved(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "num_workers": 2, "num_train_epochs": 100}
    world = World(1, settings | {"eval_steps": 999}, patches=["faults:slow_steps"])
    world.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and lines(tmp_path / "run"))
    for process in psutil.Process(world.processes[0].pid).children(recursive=True):
        process.send_signal(signal.SIGTERM)
    world.signal(signal.SIGTERM)
    assert world.wait(30) == [75], world.output()
    assert facts_of(tmp_path / "run")["status"] == "stopped"


def last_checkpoint(output_dir) -> int:
    return max(int(path.name.removeprefix("step_")) for path in (output_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("num_processes", "reason"), [(1, "signal SIGTERM"), (1, "max_train_time"), (2, "signal SIGTERM")]
)
def test_a_worker_that_blocks_does_not_keep_the_run_from_saving(num_processes, reason, tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "num_workers": 1, "checkpointing_steps": 100}
    fault = {"FAULT": json.dumps({"call": 9, "rank": num_processes - 1})}
    limit = {"max_train_time": 0.1} if reason == "max_train_time" else {}
    patches = ["faults:block_a_worker"]
    if reason == "max_train_time":  # counted from the start of the imports
        patches.append("faults:late_time_limit")
    world = World(num_processes, settings | limit, patches=patches, environment=fault)
    last_step = 2 if num_processes == 1 else 3  # one batch is fetched ahead, and the ninth never comes
    path = tmp_path / "run" / "metrics.jsonl"
    world.wait_for(lambda: path.exists() and len(lines(tmp_path / "run", "loss")) >= last_step)
    if not limit:
        world.signal(signal.SIGTERM)
    assert world.wait(60) == [75] * num_processes, world.output()
    facts = facts_of(tmp_path / "run")
    assert facts["status"] == "stopped"
    assert reason in facts["cause"] and "the next batch does not come" in facts["cause"]
    assert last_checkpoint(tmp_path / "run") == lines(tmp_path / "run", "loss")[-1]["step"] < 10
    run(num_processes, settings)
    run(num_processes, settings | {"output_dir": str(tmp_path / "whole")})
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


@pytest.mark.parametrize(
    ("fault", "changed", "words"),
    [
        ("kill_a_worker", {}, ("a data-loading worker died", "/dev/shm", "--num_workers")),
        ("block_a_worker", {"dataloader_timeout": 2.0}, ("no batch came in time", "--dataloader_timeout")),
    ],
)
def test_a_worker_that_is_killed_or_too_slow_is_one_line(fault, changed, words, tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "num_workers": 1} | changed
    world = run(1, settings, 1, patches=[f"faults:{fault}"], environment={"FAULT": json.dumps({"call": 5})})
    (line,) = [line for line in world.output().splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert "Traceback" not in world.output()
    assert facts_of(tmp_path / "run")["status"] == "failed"


def test_unused_parameters_name_the_option_and_with_it_the_run_is_the_same(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run")}
    world = run(2, settings, 2, patches=["faults:unused_parameters"])
    line = next(line for line in world.output(0).splitlines() if line.startswith("error: "))
    assert "forgotten.weight" in line and "--find_unused_parameters true" in line
    run(2, settings | {"find_unused_parameters": True}, patches=["faults:unused_parameters"])
    run(2, settings | {"output_dir": str(tmp_path / "plain")})
    assert numbers(tmp_path / "run") == numbers(tmp_path / "plain")


def test_threads_of_a_library_do_not_keep_a_run_of_several_processes_from_ending(tmp_path):
    """As inductor's: they end in a function that runs at exit, so nobody may wait for them before."""
    script = (
        "import concurrent.futures, sys; sys.path.insert(0, sys.argv[1]); from kit.errors import exit_codes\n"
        "pool = concurrent.futures.ThreadPoolExecutor(1)\n"
        "with exit_codes():\n    pool.submit(print, 'done').result()\n"
    )
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0"}
    command = [sys.executable, "-c", script, str(TEMPLATES)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert (answer.returncode, answer.stdout) == (0, "done\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_screen_ends_no_run(closed, tmp_path):
    script = TEMPLATES / "blank.py"
    command = f'"{sys.executable}" "{script}" --max_train_steps 2 --output_dir run {closed}'
    answer = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert facts_of(tmp_path / "run")["status"] == "done"
