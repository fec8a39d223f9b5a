"""Runs over several machines, under mpirun and Slurm: started for real where this machine has what they need."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import REPOSITORY, TEMPLATES
from nodes import two_nodes
from worlds import largest_difference, lines, numbers, run

LIMIT = 120  # seconds


def wait_for(condition, process: subprocess.Popen, log: Path) -> None:
    """Wait until `condition()` holds while a process runs."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def end(process: subprocess.Popen) -> None:
    """Kill a process with its group, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def children_of(pid: int) -> list[int]:
    """Return the ids of all processes below one."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in table.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, above in pairs if above == parent]
    return found[1:]


def settings_of(tiny_settings: dict, folder: Path, **more) -> dict:
    """Return settings of a run without dropout, which draws by process."""
    model = Path(tiny_settings["model_name_or_path"]).with_name("bert_still")
    still = {"model_name_or_path": str(model), "output_dir": str(folder), "learning_rate": 1e-4}
    return tiny_settings | still | {"num_train_epochs": 12, "checkpointing_steps": 10} | more


def options_of(settings: dict) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


# ------------------------------------------------------------------------------------------------------ two machines


def test_two_machines_train_as_one_process_and_survive_the_loss_of_one(tiny_settings, tmp_path, record_property):
    one = settings_of(tiny_settings, tmp_path / "one")
    run(1, one)
    both = settings_of(tiny_settings, tmp_path / "both", ddp_timeout=20.0)
    log = [tmp_path / f"node{rank}.log" for rank in range(2)]

    def start(rank: int) -> subprocess.Popen:
        command = [
            *words[rank],
            sys.executable,
            str(TEMPLATES / "launch.py"),
            "--config_file",
            "configs/multi_node.yaml",
        ]
        command += ["--num_processes", "2", "--main_process_ip", address, "--machine_rank", str(rank)]
        command += [str(TEMPLATES / "text_classification.py"), *options_of(both)]
        with open(log[rank], "w") as file:
            return subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=file, start_new_session=True)

    with two_nodes() as (address, words), contextlib.ExitStack() as started:
        where = (
            "two network namespaces" if words[0] else "two launchers on the loopback: namespaces are not allowed here"
        )
        print(f"several machines: {where}")
        nodes = [start(rank) for rank in range(2)]
        for node in nodes:
            started.callback(end, node)
        metrics = tmp_path / "both" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(lines(tmp_path / "both", "loss")) > 12, nodes[0], log[0])
        for child in children_of(nodes[1].pid):
            os.kill(child, signal.SIGKILL)
        end(nodes[1])
        assert nodes[0].wait(60) == 1, log[0].read_text()
        text = log[0].read_text()
        assert f"machine 0 of 2, 2 processes, meeting at {address}:29500" in text
        last = text.strip().splitlines()[-1]
        assert last.startswith("error: lost the connection to ") and str(tmp_path / "both") in last
        if words[0]:
            assert last.startswith(f"error: lost the connection to {address[:-1]}2 (Connection ")
        assert json.loads((tmp_path / "both" / "run.json").read_text())["status"] == "failed"
        kept = sorted(path.name for path in (tmp_path / "both" / "checkpoints").iterdir())
        assert "step_00000010" in kept

        nodes = [start(rank) for rank in range(2)]
        for node in nodes:
            started.callback(end, node)
        assert [node.wait(LIMIT) for node in nodes] == [0, 0], log[0].read_text() + log[1].read_text()
    facts = json.loads((tmp_path / "both" / "run.json").read_text())
    assert (facts["world"]["num_processes"], facts["world"]["num_nodes"], facts["starts"]) == (2, 2, 2)
    assert "Traceback" not in log[1].read_text(), "the machine that ends last is quiet"
    # Sums of fp32 numbers in another order, over 60 steps of Adam.
    assert largest_difference(numbers(tmp_path / "one"), numbers(tmp_path / "both")) < 1e-5
