"""Runs over several machines, under mpirun and Slurm: started for real where this machine has what they need."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import launch
import slurm
from conftest import REPOSITORY, TEMPLATES
from kit.profile import read_profile
from nodes import free_port, two_nodes
from worlds import largest_difference, lines, numbers, run

LIMIT = 120  # seconds
CLUSTERS = REPOSITORY / "examples" / "clusters"
CLOSE = 1e-5  # relative: fp32 sums in another order, over 60 steps of Adam
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


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


@pytest.fixture(scope="module")
def one(tiny_settings, tmp_path_factory) -> Path:
    """The run directory of the same training on one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(1, settings_of(tiny_settings, folder))
    return folder


# ------------------------------------------------------------------------------------------------------ two machines


def test_two_machines_train_as_one_process_and_survive_the_loss_of_one(one, tiny_settings, tmp_path):
    both = settings_of(tiny_settings, tmp_path / "both", ddp_timeout=20.0)
    log, port = [tmp_path / f"node{rank}.log" for rank in range(2)], str(free_port())

    def start(rank: int) -> subprocess.Popen:
        command = [
            *words[rank],
            sys.executable,
            str(TEMPLATES / "launch.py"),
            "--config_file",
            "configs/multi_node.yaml",
        ]
        command += ["--num_processes", "2", "--main_process_ip", address, "--main_process_port", port]
        command += ["--machine_rank", str(rank)]
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
        assert f"machine 0 of 2, 2 processes, meeting at {address}:{port}" in text
        last = text.strip().splitlines()[-1]
        assert last.startswith("error: lost the connection to ") and str(tmp_path / "both") in last
        if words[0]:
            assert last.startswith(f"error: lost the connection to machine 1, {address[:-1]}2 (Connection ")
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
    assert largest_difference(numbers(one), numbers(tmp_path / "both")) < CLOSE


# Steps that take a while, so that machines can leave and return between them; longest while one is awaited.
SLOW = """import os, runpy, sys, time, torch
step = torch.optim.AdamW.step
def slow_step(self, *arguments):
    time.sleep(0.2 if os.environ["WORLD_SIZE"] == "2" else 1.5)
    return step(self, *arguments)
torch.optim.AdamW.step = slow_step
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""


def test_an_elastic_run_goes_on_with_the_machine_that_is_left_and_takes_the_other_one_back(
    one, tiny_settings, tmp_path
):
    output, script = tmp_path / "run", tmp_path / "slow.py"
    names = {"folder": str(TEMPLATES), "script": str(TEMPLATES / "text_classification.py")}
    script.write_text(SLOW.format(**names))
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    with two_nodes() as (address, words), contextlib.ExitStack() as started:
        addresses, port = [address, f"{address[:-1]}2" if words[0] else address], free_port()

        def start(rank: int) -> subprocess.Popen:
            command = [*words[rank], sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
            command += ["--nproc_per_node", "1", "--max_restarts", "3", "--local_addr", addresses[rank]]
            command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{address}:{port}", "--rdzv_id", "elastic"]
            conf = f"is_host={int(rank == 0)},last_call_timeout=3,keep_alive_interval=1"
            command += ["--rdzv_conf", conf, str(script)]
            command += options_of(settings_of(tiny_settings, output, ddp_timeout=20.0))
            with open(tmp_path / f"node{rank}.log", "a") as file:
                process = subprocess.Popen(
                    command,
                    cwd=REPOSITORY,
                    env=os.environ | variables,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            started.callback(end, process)
            return process

        def trains_on(num_processes: int) -> bool:
            """Whether so many processes have made a few steps since their start."""
            facts = read_run(output)
            if facts.get("world", {}).get("num_processes") != num_processes or not (output / "metrics.jsonl").exists():
                return False
            return len(lines(output, "loss")) > max([9, *facts.get("resumes", [])]) + 3

        nodes = [start(rank) for rank in range(2)]
        log = tmp_path / "node0.log"
        wait_for(lambda: trains_on(2), nodes[0], log)
        for child in children_of(nodes[1].pid):
            os.kill(child, signal.SIGKILL)
        end(nodes[1])
        wait_for(lambda: trains_on(1), nodes[0], log)
        nodes[1] = start(1)
        wait_for(lambda: trains_on(2), nodes[0], log)
        assert [node.wait(LIMIT) for node in nodes] == [0, 0], log.read_text()
    facts = read_run(output)
    assert (facts["status"], facts["starts"], len(facts["resumes"])) == ("done", 3, 2)
    assert largest_difference(numbers(one), numbers(output)) < CLOSE


# ------------------------------------------------------------------------------------------------ schedulers and files


def test_under_mpirun_a_script_trains_as_one_process(one, tiny_settings, tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here: apt-get install openmpi-bin")
    mpi = tmp_path / "mpi"
    answer = subprocess.run(
        [
            str(CLUSTERS / "mpi.sh"),
            "2",
            "templates/text_classification.py",
            *options_of(settings_of(tiny_settings, mpi)),
        ],
        env=os.environ
        | ROOT
        | {"PYTHON": sys.executable, "MPI_OPTIONS": "--oversubscribe", "ACCELERATE_USE_CPU": "true"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "2 processes on 1 node, gloo, cpu" in answer.stdout
    assert largest_difference(numbers(one), numbers(mpi)) < CLOSE


def test_a_job_of_slurm_is_queued_again_after_a_signal_and_goes_on_to_the_end(one, tiny_settings, tmp_path):
    if reason := slurm.why_not():
        pytest.skip(reason)
    output = tmp_path / "run"
    with slurm.cluster(tmp_path / "slurm") as environment:
        # The nodes' names resolve on a real cluster; here both are this machine.
        environment |= {"PYTHON": sys.executable, "MAIN_IP": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}

        def submit(*options: str) -> str:
            return slurm.ask(environment, "sbatch", "--parsable", "--chdir", str(REPOSITORY), *options).strip()

        job = submit(
            f"--output={tmp_path}/job.log",
            str(CLUSTERS / "slurm.sbatch"),
            "templates/text_classification.py",
            *options_of(settings_of(tiny_settings, output)),
        )
        log = tmp_path / "job.log"
        slurm.wait_for(
            lambda: (output / "metrics.jsonl").exists() and len(lines(output, "loss")) > 12, tmp_path / "slurm"
        )
        slurm.ask(environment, "scancel", "--signal=USR1", job)  # as --signal does before the time limit
        slurm.wait_for(lambda: read_run(output).get("status") == "stopped", tmp_path / "slurm")
        # Meanwhile an array, each of whose jobs only says what it would start.
        environment["PYTHON"] = "echo"
        submit("--array=0-1", f"--output={tmp_path}/array_%a.log", str(CLUSTERS / "slurm.sbatch"), "train.py")
        slurm.wait_for(lambda: not slurm.ask(environment, "squeue", "--noheader"), tmp_path / "slurm", limit=LIMIT)
        finished = (tmp_path / "slurm" / "finished").read_text()
        assert re.search(rf"^JobId={job} .* JobState=COMPLETED", finished, re.MULTILINE), finished
        for seed in range(2):
            said = (tmp_path / f"array_{seed}.log").read_text().splitlines()
            assert len(said) == 2, "one launcher on each node"
            assert said[0].endswith(f"train.py --seed {seed} --output_dir outputs/seed_{seed}")
            assert "--num_machines 2 --num_processes 2" in said[0]
    text = log.read_text()
    assert "machine 1 of 2, 2 processes, meeting at 127.0.0.1:2" in text
    assert "stopped    signal SIGUSR1" in text
    facts = json.loads((output / "run.json").read_text())
    assert (facts["world"]["num_nodes"], facts["starts"]) == (2, 2)
    assert largest_difference(numbers(one), numbers(output)) < CLOSE


def read_run(output: Path) -> dict:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((output / "run.json").read_text())
    return {}


def test_shell_files_are_sound():
    shells = [path for path in sorted(CLUSTERS.iterdir()) if path.suffix in (".sh", ".sbatch")]
    assert len(shells) >= 2
    for path in shells:
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert path.suffix == ".sbatch" or os.access(path, os.X_OK), "started by its name"
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck here, only bash -n was run: apt-get install shellcheck")
    answer = subprocess.run(["shellcheck", *map(str, shells)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


def test_the_manifest_is_one_of_kubeflow_trainer_and_starts_the_launcher(tmp_path):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = yaml.safe_load((CLUSTERS / "kubernetes.yaml").read_text())
    job = models.TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job.to_dict() == manifest, "a key that the schema does not have is dropped"
    trainer = manifest["spec"]["trainer"]
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    world = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"}
    world |= {"PET_MASTER_ADDR": "bert-mrpc-node-0-0.bert-mrpc", "PET_MASTER_PORT": "29400"}
    answer = subprocess.run(
        [*trainer["command"], *trainer["args"]],
        env=world | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = answer.stdout.splitlines()
    assert [arguments[0], arguments[-6]] == ["templates/launch.py", "29400"]
    options = launch.read_plain(arguments[1:])
    assert (REPOSITORY / options.training_script).is_file() and (REPOSITORY / options.training_script_args[1]).is_file()
    asked = launch.what_is_asked(read_profile(REPOSITORY / options.config_file), options)
    assert (asked.num_processes, asked.num_machines, asked.machine_rank, asked.local_processes) == (16, 2, 1, 8)
    assert (asked.address, asked.port) == (world["PET_MASTER_ADDR"], 29400)


def test_a_job_for_sagemaker_starts_the_launcher_on_each_instance(monkeypatch):
    """As far as it goes without an account: Accelerate's conversion of the profile, and what the job then starts."""
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import prepare_sagemager_args_inputs

    monkeypatch.chdir(REPOSITORY)
    for name in ("AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.setenv(name, "")  # set below, and put back
    sent = []
    monkeypatch.setattr(accelerate_launch, "sagemaker_launcher", lambda *call: sent.append(call))
    entry = str(CLUSTERS / "sagemaker_entry.py")
    command = ["--config_file", "configs/sagemaker.yaml", entry, "--script", "train.py", "--config", "recipe.yaml"]
    assert launch.send_job(read_profile(REPOSITORY / "configs" / "sagemaker.yaml"), launch.read_all(command)) == 0
    job, _ = prepare_sagemager_args_inputs(*sent[0])
    assert (job["entry_point"], job["source_dir"]) == ("sagemaker_entry.py", str(CLUSTERS))
    assert (job["instance_type"], job["instance_count"]) == ("ml.g5.xlarge", 1)
    assert job["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    options = [word for name, value in job["hyperparameters"].items() for word in (f"--{name}", value)]

    sys.path.insert(0, str(CLUSTERS))
    import sagemaker_entry

    sys.path.remove(str(CLUSTERS))
    for hosts, gpus, expected in (
        (["algo-1"], "0", ("configs/single_gpu.yaml", 1, 1, 0)),
        (["algo-1"], "4", ("configs/multi_gpu.yaml", 4, 1, 0)),
        (["algo-1", "algo-2"], "8", ("configs/multi_node.yaml", 16, 2, 1)),
    ):
        variables = {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": hosts[-1], "SM_NUM_GPUS": gpus}
        started = sagemaker_entry.command_of(options, variables | job["environment"])
        assert started[:2] == [sys.executable, "launch.py"]
        parsed = launch.read_plain(started[2:])
        asked = launch.what_is_asked(read_profile(REPOSITORY / parsed.config_file), parsed)
        assert (asked.name, asked.num_processes, asked.num_machines, asked.machine_rank) == expected
        assert asked.mixed_precision == "bf16" and (len(hosts) == 1 or asked.address == "algo-1")
        assert parsed.training_script == "train.py"
        assert parsed.training_script_args == ["--config", "recipe.yaml", "--output_dir", sagemaker_entry.OUTPUT_DIR]
