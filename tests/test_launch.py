"""Profiles, and the launcher of the make targets: mistakes before anything starts, signals and exit codes kept."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

import launch
from conftest import REPOSITORY, TEMPLATES
from kit.errors import UserError
from worlds import lines

PROFILES = sorted((REPOSITORY / "configs").glob("*.yaml"))


def test_there_are_the_profiles_that_the_readme_names():
    assert [path.stem for path in PROFILES] == ["cpu", "multi_cpu", "multi_gpu", "multi_node", "single_gpu"]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_is_known_to_accelerate_and_begins_with_its_command(path):
    config = load_config_from_file(str(path))
    profile = launch.read_profile(path)
    assert profile["mixed_precision"] == "no", "quoted: a bare no is false"
    assert config.num_processes == profile["num_processes"]
    head = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
    assert f"accelerate launch --config_file configs/{path.name}" in "\n".join(head)
    if path.stem in ("cpu", "single_gpu"):
        assert (profile["distributed_type"], profile["num_processes"]) == ("NO", 1)


@pytest.mark.parametrize(
    ("name", "devices", "asked", "verdict"),
    [
        ("multi_gpu", 0, None, None),  # on the CPU: any number
        ("multi_gpu", 1, None, "2 processes asked for on this machine, 1 devices found: use NUM_PROCESSES=1"),
        ("multi_gpu", 2, None, None),
        ("multi_gpu", 2, 8, "8 processes asked for on this machine, 2 devices found: use NUM_PROCESSES=2"),
        ("multi_cpu", 1, 4, None),
        ("multi_node", 1, None, "2 processes asked for on this machine, 1 devices found: use NUM_PROCESSES=2"),
        ("multi_node", 2, None, None),
        ("multi_node", 2, 3, "3 processes on 2 machines (multi_node): give a multiple"),
        ("single_gpu", 2, None, None),
        ("single_gpu", 2, 2, "starts one process (distributed_type NO), 2 are asked for"),
        ("cpu", 0, 2, "use PROFILE=multi_cpu"),
    ],
)
def test_profile_and_machine_are_compared(name, devices, asked, verdict):
    profile = launch.read_profile(REPOSITORY / "configs" / f"{name}.yaml")
    call = (profile, asked or profile["num_processes"], profile["num_machines"], name, devices)
    if verdict is None:
        launch.check_devices(*call)
    else:
        with pytest.raises(UserError, match=re.escape(verdict)):
            launch.check_devices(*call)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("foo: 1\ndistributed_type: 'NO'\n", "has keys that Accelerate does not know: foo"),
        ("mixed_precision: no\ndistributed_type: 'NO'\n", "quote it: 'no'"),
        ("num_processes: 1\n", "has no distributed_type"),
        ("- a\n", "has no distributed_type"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_a_wrong_profile_is_one_line(text, words, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        launch.read_profile(tmp_path / "own.yaml")


def test_an_unknown_profile_lists_those_there_are():
    with pytest.raises(UserError, match="cpu, multi_cpu, multi_gpu, multi_node, single_gpu"):
        launch.read_profile(REPOSITORY / "configs" / "eight_gpus.yaml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["blank.py"], "give a profile"),
        (["--config_file"], "config-file: expected one argument"),
        (["--config_file=multi_cpu.yaml", "--num_processes", "two", "blank.py"], "invalid int value: 'two'"),
        (
            ["--config_file=multi_cpu.yaml", "--num_processes", "0", "blank.py"],
            "0 processes on .*give 1 at least",
        ),
        (["--config_file=multi_cpu.yaml", "nothing.py"], "there is no script nothing.py"),
        (["--config_file=multi_cpu.yaml"], "required: training_script"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, words, monkeypatch):
    monkeypatch.chdir(TEMPLATES)
    arguments = [part.replace("=", f"={REPOSITORY / 'configs'}/") for part in arguments]
    with pytest.raises(UserError, match=words) as mistake:
        launch.main(arguments)
    assert len(str(mistake.value).splitlines()) == 1


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
    options = ["--machine_rank", "1", "--main_process_port", "9", "--num_processes", "2", "--rdzv_conf", "timeout=5"]
    process = start("multi_node", settings, *options)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "machine 1 of 2, 2 processes, meeting at 127.0.0.1:9" in output
    assert "Is machine 0 started" in output.splitlines()[-1]
