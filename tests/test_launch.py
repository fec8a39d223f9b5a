"""Profiles, and the launcher of the make targets: mistakes before anything starts, signals and exit codes kept."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import launch
from conftest import REPOSITORY, TEMPLATES
from kit.errors import MachineError, UserError
from nodes import free_port
from worlds import lines

FAKE = """
import json, os, sys, time
from dataclasses import dataclass
from pathlib import Path

from kit.settings import TrainingSettings


@dataclass
class Settings(TrainingSettings):
    \"\"\"What a training script has.\"\"\"
    output_dir: str = "nowhere"


def check(settings):
    pass


load_data = check

if __name__ == "__main__":
    folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
    causes = json.loads((folder / "causes").read_text())
    counts = [int(os.environ.get(name, "0")) for name in ("TEMPLATES_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    cause = causes[min(sum(counts), len(causes) - 1)]
    if os.environ.get("RANK", "0") == "0":
        with open(folder / "starts", "a") as file:
            file.write(f"{sum(counts)}{os.environ.get('WORLD_SIZE', '')} ")
        if cause == "killed":
            os.kill(os.getpid(), 9)
        (folder / "run.json").write_text(json.dumps({"status": "stopped" if cause else "done", "cause": cause}))
    else:
        time.sleep(1)  # process 0 ends first
    sys.exit(75 if cause else 0)
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["blank.py"], "give a profile"),
        (["--config_file"], "config-file: expected one argument"),
        (["--config_file=multi_cpu.yaml", "--num_processes", "two", "blank.py"], "invalid int value: 'two'"),
        (
            ["--config_file=multi_cpu.yaml", "--num_processes", "0", "blank.py"],
            "0 processes on 1 machine .* must be 1 or more",
        ),
        (["--config_file=multi_cpu.yaml", "nothing.py"], "no such script: nothing.py"),
        (["--config_file=multi_cpu.yaml"], "required: training_script"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, words, monkeypatch):
    monkeypatch.chdir(TEMPLATES)
    arguments = [part.replace("=", f"={REPOSITORY / 'configs'}/") for part in arguments]
    with pytest.raises(UserError, match=words) as mistake:
        launch.main(arguments)
    assert len(str(mistake.value).splitlines()) == 1


# -- one process: quick, and never alone ---------------------------------------------------------------------------


def start_fake(folder, causes: list, profile="configs/cpu.yaml", *options: str, before: str = "") -> subprocess.Popen:
    """Start FAKE through launch.py; `causes` is why each start stops, None when it is done."""
    folder.mkdir(exist_ok=True)
    (folder / "fake.py").write_text(before + FAKE)
    (folder / "causes").write_text(json.dumps(causes))
    command = [sys.executable, str(TEMPLATES / "launch.py"), "--config_file", str(profile), *options]
    return subprocess.Popen(
        [*command, str(folder / "fake.py"), "--output_dir", str(folder)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(TEMPLATES)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize("profile", ["cpu", "single_gpu"])
def test_one_process_is_started_as_accelerate_starts_it_without_importing_torch(profile, monkeypatch, tmp_path):
    from accelerate.commands import launch as accelerate_launch

    script = tmp_path / "environment.py"
    script.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    arguments = ["--config_file", f"configs/{profile}.yaml", str(script)]
    monkeypatch.chdir(REPOSITORY)
    options, _, _ = accelerate_launch._validate_launch_command(launch.read_all(arguments))
    command, theirs = accelerate_launch.prepare_simple_launcher_cmd_env(options)
    spy = "import sys, launch; code = launch.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    answer = subprocess.run(
        [sys.executable, "-c", spy, *arguments], env=os.environ | {"PYTHONPATH": str(TEMPLATES)}, capture_output=True
    )
    assert answer.returncode == 0, answer.stderr
    ours = json.loads(answer.stdout)
    assert command == [sys.executable, str(script)]
    added = {name: value for name, value in theirs.items() if os.environ.get(name) != value}
    assert len(added) > 5
    assert {name: ours[name] for name in theirs if name != "PYTHONPATH"} == theirs
    assert {*ours} - {*theirs} == {"PYTHONPATH", "TEMPLATES_PROFILE"}
    assert ours["TEMPLATES_PROFILE"] == f"configs/{profile}.yaml"


def test_a_run_whose_memory_ran_out_is_started_again_five_times_at_most(tmp_path):
    for name, causes, code, starts in (
        ("twice", ["out of memory at step 3", "out of memory", None], 0, ["0", "1", "2"]),
        ("always", ["out of memory"], 75, ["0", "1", "2", "3", "4", "5"]),
        ("signal", ["signal SIGTERM", None], 75, ["0"]),
    ):
        process = start_fake(tmp_path / name, causes)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code, output
        assert (tmp_path / name / "starts").read_text().split() == starts
        assert output.count("memory     ran out: starting the same command again") == len(starts) - 1


def test_several_processes_whose_memory_ran_out_are_started_again(tmp_path):
    """From a profile as `accelerate config` writes it for CPUs, of which Accelerate's launcher starts one process."""
    written = "distributed_type: MULTI_CPU\nnum_processes: '2'\nmixed_precision: no\nmain_process_port: 0\n"
    (tmp_path / "own.yaml").write_text(written)
    process = start_fake(tmp_path, ["out of memory at step 3", None], tmp_path / "own.yaml")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (tmp_path / "starts").read_text().split() == ["02", "12"]


def test_what_an_earlier_start_left_behind_says_nothing_about_this_one(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"status": "stopped", "cause": "out of memory"}))
    fails = "if __name__ == '__main__':\n    raise ValueError\n"
    process = start_fake(tmp_path, [None], "configs/multi_cpu.yaml", before=fails)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "the same command again" not in output


def test_one_process_of_a_profile_for_several_devices_is_started_simply(tmp_path):
    written = "distributed_type: MULTI_GPU\nnum_processes: 1\nnum_machines: 1\ngpu_ids: 0\nmixed_precision: no\n"
    (tmp_path / "own.yaml").write_text(written)
    process = start_fake(tmp_path, [None], tmp_path / "own.yaml")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (tmp_path / "starts").read_text().split() == ["0"]


def test_a_process_that_is_lost_is_started_again_where_restarts_are_given(tmp_path):
    process = start_fake(tmp_path, ["killed", None], "configs/multi_cpu.yaml", "--max_restarts", "2")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (tmp_path / "starts").read_text().split() == ["02", "12"]


def test_several_machines_whose_memory_ran_out_meet_again(tmp_path):
    options = ["--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    causes = ["out of memory", "out of memory", None]
    nodes = [
        start_fake(tmp_path, causes, "configs/multi_node.yaml", *options, "--machine_rank", str(rank))
        for rank in (0, 1)
    ]
    try:
        outputs = [node.communicate(timeout=60)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert (tmp_path / "starts").read_text().split() == ["02", "12", "22"]


SLEEPER = """
import os, signal, sys, time
if __name__ == "__main__":
    from kit.stopping import catch_signals
    catch_signals()
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl: Linux only")
def test_a_killed_launcher_leaves_no_orphan(tmp_path):
    process = start_fake(tmp_path, [], before=SLEEPER)
    child = int(process.stdout.readline())
    process.kill()
    process.wait(10)
    deadline = time.monotonic() + 10
    status = Path(f"/proc/{child}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the script goes on alone"
        time.sleep(0.05)


def test_the_exit_code_is_that_of_the_script(tmp_path):
    for before, code in (
        ("raise SystemExit(2)", 2),
        ("raise ValueError", 1),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ):
        process = start_fake(tmp_path, [None], before=f"if __name__ == '__main__':\n    {before}\n")
        output, _ = process.communicate(timeout=60)
        assert process.returncode == code, output


# -- as a user starts it -------------------------------------------------------------------------------------------


def start(profile: str, settings: dict, *options: str, environment=None, **more) -> subprocess.Popen:
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, str(TEMPLATES / "launch.py"), "--config_file", f"configs/{profile}.yaml", *options]
    command += [str(TEMPLATES / "text_classification.py"), *arguments]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | (environment or {}),
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | more,
    )


def test_two_processes_run_with_the_profile_and_the_output_says_so_once(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": tmp_path / "a b", "max_train_steps": 3}
    process = start("multi_cpu", settings)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert output.count("2 processes on 1 node, gloo, cpu") == 1
    assert "forked" not in output
    facts = json.loads((tmp_path / "a b" / "run.json").read_text())
    assert (facts["status"], facts["world"]["num_processes"], facts["world"]["backend"]) == ("done", 2, "gloo")
    assert [row["step"] for row in lines(tmp_path / "a b", "loss")] == [1, 2, 3]
    saved = yaml.safe_load((tmp_path / "a b" / "settings.yaml").read_text())
    assert saved["output_dir"] == str(tmp_path / "a b")


def test_a_mistake_is_found_before_two_processes_are_started(tiny_settings, tmp_path):
    for changed, words in (
        ({"label_column": "lable"}, "did you mean 'label'"),
        ({"train_file": tmp_path / "nothing.csv"}, "nothing.csv"),
    ):
        process = start("multi_cpu", tiny_settings | {"output_dir": tmp_path / "run"} | changed)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output
        assert len(output.strip().splitlines()) == 1, output
        assert words in output
    process = start("multi_cpu", tiny_settings, "--mixed_precision", "fp16")
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, len(output.strip().splitlines())) == (2, 1), output
    assert "fp16 needs a GPU" in output


@pytest.mark.parametrize(
    ("profile", "number"), [("cpu", signal.SIGUSR1), ("multi_cpu", signal.SIGTERM), ("multi_cpu", signal.SIGINT)]
)
def test_a_signal_to_the_launcher_saves_and_exits_with_75(profile, number, tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": tmp_path / "run", "num_train_epochs": 500, "checkpointing_steps": 1000}
    process = start(profile, settings | {"eval_steps": 1000})
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not lines(tmp_path / "run"):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "stopped"
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_ctrl_c_before_the_first_step_ends_everything_at_once(tiny_settings, tmp_path):
    process = start("multi_cpu", tiny_settings | {"output_dir": tmp_path / "run"}, start_new_session=True)
    time.sleep(3)  # in the slow imports
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75, output
    assert "Traceback" not in output


def test_on_a_terminal_there_is_a_bar_and_closing_it_saves_and_stops(tiny_settings, tmp_path):
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))

    def become_the_terminals_session() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    settings = tiny_settings | {"output_dir": tmp_path / "run", "num_train_epochs": 500, "checkpointing_steps": 1000}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": become_the_terminals_session}
    process = start("multi_cpu", settings | {"eval_steps": 1000}, **streams)
    os.close(theirs)
    screen, deadline = b"", time.monotonic() + 120
    while b"/2500 [" not in screen:
        assert time.monotonic() < deadline, screen.decode()
        screen += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(60) == 75
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["status"], facts["cause"]) == ("stopped", "signal SIGHUP")
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_when_a_launcher_of_one_process_is_killed_the_script_saves_and_ends(tiny_settings, tmp_path):
    """Accelerate's own launcher does not pass signals on; on Linux its death is enough."""
    settings = tiny_settings | {"output_dir": tmp_path / "run", "num_train_epochs": 500, "eval_steps": 1000}
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/cpu.yaml"]
    command += [str(TEMPLATES / "text_classification.py"), *arguments, "--checkpointing_steps", "1000"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not lines(tmp_path / "run"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait(10)
    while json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running":
        assert time.monotonic() < deadline, "the script goes on alone"
        time.sleep(0.1)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "stopped"


def test_a_machine_that_nobody_answers_gives_up_with_a_hint(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": tmp_path / "run"}
    options = ["--machine_rank", "1", "--main_process_ip", "127.0.0.1", "--main_process_port", "9"]
    options += ["--num_processes", "2", "--rdzv_conf", "timeout=5"]
    process = start("multi_node", settings, *options)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "machine 1 of 2, 2 processes, meeting at 127.0.0.1:9" in output
    assert "Is machine 0 started" in output.splitlines()[-1]


def test_a_machine_that_is_lost_is_named_from_the_cause_of_the_run(tmp_path):
    asked = launch.Launch(name="own.yaml", num_processes=2, num_machines=2, machine_rank=0)
    reset = "RuntimeError: Read error [10.0.0.2]:4711: Connection reset by peer"
    for cause, words in (
        (reset, "machine 1, 10.0.0.2 (Connection reset by peer)"),
        (
            "process 1: RuntimeError: Connection closed by peer [fd77:1::2]:4711",
            "machine 1, fd77:1::2 (Connection closed",
        ),
        ("RuntimeError: Timed out waiting 10000ms for recv operation", "machine 1 (Timed out waiting)"),
        (
            "RuntimeError: Read error [127.0.0.1]:4711: Connection reset by peer",
            "another process of this machine, 127.",
        ),
    ):
        with pytest.raises(MachineError) as lost:
            launch.code_of_all({"status": "failed", "cause": cause}, "run", asked, 1, is_signalled=False)
        assert str(lost.value).startswith(f"lost the connection to {words}")
    third = launch.Launch(name="own.yaml", num_processes=3, num_machines=3, machine_rank=2, address="10.0.0.2")
    assert launch.lost_peer(reset, third) == "machine 0, 10.0.0.2"
    assert launch.lost_peer(reset.replace("0.2", "0.3"), third) == "another machine, 10.0.0.3"
    # Machine 0 writes run.json. Where it is lost, what the processes of this machine noted tells the cause.
    running = {"status": "running", "cause": None}
    (tmp_path / "run.json").write_text(json.dumps(running))
    note = {"status": "failed", "cause": reset, "time": 100.0}
    (tmp_path / ".ended_process_1").write_text(json.dumps(note))
    assert launch.end_of_run(str(tmp_path), {"status": "stopped"}, began=99.0) == note
    assert launch.end_of_run(str(tmp_path), {"status": "stopped"}, began=101.0) == running, "a note of an earlier start"
    assert launch.code_of_all({"status": "failed", "cause": "ValueError: shapes"}, "run", asked, 1, False) == 1
    for code in (0, 1):  # 0: to torchrun's agent a run whose time is up is done, else it would be started again
        assert launch.code_of_all({"status": "stopped", "cause": "signal"}, str(tmp_path), asked, code, True) == 75
