"""The rules about a launch and a machine, tried on made-up machines; and scripts that srun or mpirun start."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

import doctor
import launch
from conftest import REPOSITORY, TEMPLATES
from kit.doctor import (
    Devices,
    Launch,
    Machine,
    check_environment,
    examine,
    find_devices,
    find_machine,
    first_node,
    world_of_scheduler,
)
from kit.errors import UserError
from kit.profile import read_profile

ADDRESSES = {"node0": "10.0.0.1", "10.0.0.1": "10.0.0.1", "127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}
CUDA = Devices("cuda", 1, has_bf16=True, has_fp8=True)


def machine(devices=0, **more) -> Machine:
    """Return a machine with so many (or these) devices on which everything else fits."""
    kinds = devices if isinstance(devices, Devices) else replace(CUDA, count=devices) if devices else Devices()
    fits = {"cores": 16, "shared_memory": 8 << 30, "disk": 99 << 30, "compiler": "g++", "resolve": ADDRESSES.get}
    return Machine(devices=kinds, **fits | more)


def asked(name: str, *options: str) -> Launch:
    """Return what a profile of configs/ and these options ask for."""
    path = f"{REPOSITORY}/configs/{name}.yaml"
    parsed = launch.read_plain(["--config_file", path, *options, "script.py"])
    return replace(launch.what_is_asked(read_profile(REPOSITORY / "configs" / f"{name}.yaml"), parsed), name=name)


def errors(asked_for: Launch, there: Machine) -> list[str]:
    return [finding.text for finding in examine(asked_for, there) if finding.is_error]


def notes(asked_for: Launch, there: Machine) -> list[str]:
    return [finding.text for finding in examine(asked_for, there) if not finding.is_error]


NODE = ("--main_process_ip", "node0")


@pytest.mark.parametrize(
    ("name", "options", "devices", "verdict"),
    [
        ("cpu", (), 0, None),
        ("cpu", (), 8, None),
        (
            "cpu",
            ("--num_processes", "2"),
            0,
            "starts one process (distributed_type NO), but num_processes is 2: use PROFILE=",
        ),
        ("single_gpu", (), 0, None),
        ("single_gpu", (), 2, None),
        ("single_gpu", ("--num_processes", "2"), 2, "but num_processes is 2"),
        ("single_gpu", ("--gpu_ids", "2"), 2, "gpu_ids 2: no device 2, devices found: 0 to 1"),
        ("multi_gpu", (), 0, None),  # on the CPU
        ("multi_gpu", (), 1, "2 processes asked for on this machine, 1 device found: use NUM_PROCESSES=1"),
        ("multi_gpu", (), 2, None),
        ("multi_gpu", ("--num_processes", "8"), 2, "8 processes asked for on this machine, 2 devices found"),
        ("multi_gpu", ("--num_processes", "8"), 8, None),
        ("multi_gpu", ("--gpu_ids", "0,1", "--num_processes", "4"), 8, "gpu_ids 0,1 name 2: use NUM_PROCESSES=2"),
        ("multi_gpu", ("--num_processes", "0"), 8, "0 processes on 1 machine (multi_gpu): both must be 1 or more"),
        ("multi_cpu", ("--num_processes", "4"), 1, None),
        ("multi_node", NODE, 1, "2 processes asked for on this machine, 1 device found: use NUM_PROCESSES=2"),
        ("multi_node", NODE, 2, None),
        ("multi_node", (*NODE, "--num_machines", "0"), 2, "4 processes on 0 machines"),
        (
            "multi_node",
            (*NODE, "--num_processes", "3"),
            2,
            "3 processes on 2 machines (multi_node): give a multiple of 2",
        ),
        ("multi_node", (*NODE, "--machine_rank", "2"), 2, "machine rank 2 of 2 machines: give --machine_rank 0 to 1"),
        ("multi_node", (), 2, "multi_node has no main_process_ip: give an address of machine 0"),
        ("multi_node", ("--main_process_ip", "nowhere"), 2, "main_process_ip nowhere cannot be resolved"),
        (
            "multi_node",
            (*NODE, "--main_process_port", "0"),
            2,
            "main_process_port 0: all machines must use the same port",
        ),
        ("multi_node", (*NODE, "--main_process_port", "70000"), 2, "main_process_port 70000: all machines"),
    ],
)
def test_the_devices_and_machines_asked_for_are_those_there(name, options, devices, verdict):
    found = errors(asked(name, *options), machine(devices))
    assert found == [] if verdict is None else len(found) == 1 and verdict in found[0], found


def test_machines_meet_at_an_address_that_the_others_reach():
    here = asked("multi_node", "--main_process_ip", "localhost")
    assert errors(here, machine(2)) == []  # said on the command line: several launchers on one machine
    assert "is this machine itself, which no other machine reaches" in notes(here, machine(2))[0]
    assert "which no other machine reaches" in errors(replace(here, is_address_given=False), machine(2))[0]
    elsewhere = machine(2, is_own_address=lambda address: False)
    assert "is not an address of this machine (rank 0)" in notes(asked("multi_node", *NODE), elsewhere)[0]
    assert notes(asked("multi_node", *NODE, "--machine_rank", "1"), elsewhere) == []


def test_a_name_that_is_not_known_yet_is_waited_for(capsys):
    answers = [None, None, "10.0.0.1"]
    launch.wait_for_name("node0", timeout=5.0, resolve=lambda name: answers.pop(0))
    assert answers == []
    assert capsys.readouterr().out == "waiting up to 5 s until the name node0 is known\n"
    launch.wait_for_name("node0", timeout=0.2, resolve=lambda name: None)  # ends; the rules then name it
    launch.wait_for_name("node0", timeout=5.0, resolve=ADDRESSES.get)
    assert capsys.readouterr().out == "waiting up to 0.2 s until the name node0 is known\n"


def test_a_port_that_is_taken_is_named_on_the_machine_that_needs_it():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        there = replace(find_machine(Devices()), resolve=ADDRESSES.get)
        (found,) = errors(asked("multi_node", *NODE, "--main_process_port", str(port)), there)
        assert f"main_process_port {port} is in use on this machine" in found
        rank_1 = asked("multi_node", *NODE, "--main_process_port", str(port), "--machine_rank", "1")
        assert errors(rank_1, there) == []
        assert f"port {port} is in use" in str(notes(asked("multi_cpu", "--main_process_port", str(port)), there))
    assert there.is_port_free(port)


@pytest.mark.parametrize(
    ("precision", "devices", "packages", "verdict"),
    [
        ("no", Devices(), (), None),
        ("fp16", Devices(), (), "mixed_precision fp16 needs a GPU, and this run uses the CPU"),
        ("fp16", CUDA, (), None),
        ("bf16", CUDA, (), None),
        ("bf16", replace(CUDA, has_bf16=False), (), "needs a GPU with bf16 (Ampere or newer): fp16 or no"),
        ("bf16", Devices("mps", 1), (), None),
        ("bf16", Devices(), (), None),
        ("fp8", CUDA, (), "needs one of transformer_engine, torchao, msamp, none is installed"),
        ("fp8", CUDA, ("torchao",), None),
        ("fp8", replace(CUDA, has_fp8=False), ("torchao",), "needs a GPU with fp8"),
        ("fp8", Devices(), ("torchao",), "needs a GPU with fp8"),
    ],
)
def test_a_precision_that_the_hardware_lacks_is_refused(precision, devices, packages, verdict):
    there = machine(devices, has_package=packages.__contains__)
    found = errors(asked("single_gpu", "--mixed_precision", precision), there)
    assert found == [] if verdict is None else len(found) == 1 and verdict in found[0], found
    on_cpu = errors(asked("cpu", "--mixed_precision", precision), there)
    assert bool(on_cpu) == (precision in ("fp16", "fp8"))
    assert errors(asked("cpu", "--mixed_precision", precision), replace(there, devices=None)) == on_cpu


def test_bf16_on_a_cpu_without_instructions_for_it_is_said_to_be_slow():
    slow, fast = (machine(Devices(has_bf16=has_bf16)) for has_bf16 in (False, True))
    assert "slower than full precision" in str(notes(asked("cpu", "--mixed_precision", "bf16"), slow))
    assert notes(asked("cpu", "--mixed_precision", "bf16"), fast) == notes(asked("cpu"), slow) == []


def test_what_makes_a_run_slow_or_short_is_a_note_with_its_cure():
    several = asked("multi_cpu", "--num_processes", "4")
    assert notes(several, machine()) == []
    assert notes(several, machine(cores=2)) == ["4 processes share 2 cores: this works but is slow"]
    assert "unset it, or OMP_NUM_THREADS=4" in str(notes(several, machine(threads=8)))
    assert "/dev/shm has 64 MiB free" in str(notes(several, machine(shared_memory=64 << 20)))
    assert "has 900 MiB free: checkpoints may not fit" in str(notes(several, machine(disk=900 << 20)))
    assert notes(several, machine(untested=["torch 9 is outside"])) == ["torch 9 is outside"]
    assert "PyTorch sees no accelerator, so the run uses the CPU" in str(notes(asked("multi_gpu"), machine()))


def test_compiling_needs_a_compiler():
    compiled = replace(asked("cpu"), dynamo_backend="INDUCTOR")
    assert (
        errors(compiled, machine()) == errors(replace(compiled, dynamo_backend="EAGER"), machine(compiler=None)) == []
    )
    assert "the inductor backend needs a C++ compiler" in errors(compiled, machine(compiler=None))[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "FSDP"}, "FSDP is not supported by these scripts yet"),
        ({"kind": "DEEPSPEED"}, "DeepSpeed is not supported by these scripts yet"),
        ({"kind": "MEGATRON_LM"}, "Megatron-LM is not supported by these scripts yet"),
        ({"parallelism": {"parallelism_config_tp_size": 2}}, "a parallelism_config is not supported"),
        ({"kind": "XLA", "num_processes": 1}, "needs the package torch_xla, which is not installed"),
        ({"is_remote": True}, "needs the package sagemaker, which is not installed"),
        ({"num_processes": None}, "has no num_processes: add it, or give --num_processes"),
    ],
)
def test_a_kind_of_launch_that_is_not_supported_is_refused_without_looking_further(change, words):
    found = errors(replace(asked("multi_gpu"), **change), machine(0, has_package=lambda name: False))
    assert len(found) == 1 and words in found[0], found


def test_the_machine_that_this_is_can_be_described():
    here = find_machine(find_devices())
    assert here.cores >= 1 and here.disk > 0
    assert here.resolve("localhost") in ("127.0.0.1", "::1")
    assert here.resolve("no such name.invalid") is None
    assert here.is_own_address("127.0.0.1") and not here.is_own_address("192.0.2.1")  # TEST-NET-1 is nobody's
    assert here.has_package("torch") and not here.has_package("no_such_package")


# ------------------------------------------------------------------------------------- a script that is started somehow


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP: FSDP is not supported by these scripts yet"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "TEMPLATES_PROFILE": "a.yaml"}, "a.yaml: DeepSpeed is not supported"),
        ({"ACCELERATE_USE_MEGATRON_LM": "True"}, "Megatron-LM is not supported"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "a parallelism_config is not supported"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision fp8 needs one of"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun started 2 processes without saying where"),
    ],
)
def test_what_a_script_cannot_do_is_one_line_before_torch_is_imported(variables, words):
    code = "import sys\nfrom kit.errors import exit_codes\nfrom kit.doctor import check_environment\n"
    code += "with exit_codes():\n    try:\n        check_environment()\n    finally:\n"
    code += "        assert 'torch' not in sys.modules"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(TEMPLATES)} | variables,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.startswith("error: ") and words in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("template", ["blank", "image_classification", "text_classification"])
def test_a_template_started_with_a_sharded_profile_says_so_at_once(template):
    variables = {"ACCELERATE_USE_FSDP": "true", "TEMPLATES_PROFILE": "fsdp.yaml"}
    answer = subprocess.run(
        [sys.executable, str(TEMPLATES / f"{template}.py")], env=os.environ | variables, capture_output=True, text=True
    )
    assert (answer.returncode, len(answer.stderr.splitlines())) == (2, 1), answer.stderr
    assert answer.stderr.startswith("error: fsdp.yaml: FSDP is not supported by these scripts yet")


def test_an_ordinary_environment_is_left_alone(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    before = dict(os.environ)
    check_environment()
    assert dict(os.environ) == before


OMPI = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
OMPI |= {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
SLURM = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
SLURM |= {
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}


def test_srun_and_mpirun_say_who_a_process_is():
    world = world_of_scheduler(OMPI)
    assert world.items() >= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items()
    assert (world["MASTER_ADDR"], world["MASTER_PORT"]) == ("127.0.0.1", "29500")
    jobs = {world_of_scheduler(OMPI | {"PMIX_NAMESPACE": job})["MASTER_PORT"] for job in ("a", "b")}
    assert len(jobs) == 2 and all(20000 <= int(port) < 30000 for port in jobs)
    pmi = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert world_of_scheduler(pmi)["RANK"] == "1"
    world = world_of_scheduler(SLURM)
    assert world.items() >= {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items()
    assert world["MASTER_ADDR"] == "n1"
    assert world["MASTER_PORT"] == world_of_scheduler(SLURM | {"SLURM_PROCID": "0"})["MASTER_PORT"]
    assert world["MASTER_PORT"] != world_of_scheduler(SLURM | {"SLURM_JOB_ID": "8"})["MASTER_PORT"]
    given = world_of_scheduler(SLURM | {"MASTER_ADDR": "login", "MASTER_PORT": "9"})
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("login", "9")
    for alone in ({}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, SLURM | {"WORLD_SIZE": "3"}, {"PMI_SIZE": "1"}):
        assert world_of_scheduler(alone) == {}, "a batch script, another launcher, or one process"
    for lost in (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, {"PMI_SIZE": "2", "PMI_RANK": "0"}):
        with pytest.raises(UserError, match="each would train alone: export MASTER_ADDR"):
            world_of_scheduler(lost)
    assert [first_node(nodes) for nodes in ("n1", "gpu[03-05,9],a", "a,b", "r[1,3]n", "x2,y[1-2]")] == [
        *("n1", "gpu03", "a", "r1n", "x2")
    ]


def test_copies_of_the_launcher_take_their_rank_or_are_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    copies = asked("multi_node", *NODE)
    launch.take_rank(copies)
    assert copies.machine_rank == 1
    told = asked("multi_node", *NODE, "--machine_rank", "0")
    launch.take_rank(told)
    assert told.machine_rank == 0
    with pytest.raises(UserError, match=re.escape("srun started 2 copies of launch.py, multi_cpu has num_machines 1")):
        launch.take_rank(asked("multi_cpu"))


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_doctor_prints_a_line_for_each_finding_and_says_whether_it_fits(capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert doctor.main(["--config_file", "configs/cpu.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "profile    configs/cpu.yaml: num_processes 1, num_machines 1, CPU, precision no"
    assert lines[-1] == "fits"
    assert doctor.main(["--config_file", "configs/multi_node.yaml", "--machine_rank", "5", "--launch"]) == 2
    lines = capsys.readouterr().out.splitlines()
    mismatches = [line for line in lines if line.startswith("mismatch   ")]
    assert len(mismatches) == 2 and "machine rank 5" in mismatches[0] and "main_process_ip" in mismatches[1]
    assert lines[-1] == "does not fit"
