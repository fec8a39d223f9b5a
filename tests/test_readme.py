"""Every command of the README, run as a user would: from the repository's folder, with a time limit."""

import importlib
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

from conftest import REPOSITORY, TEMPLATES
from tiny import make_tiny, settings_for
from worlds import lines

COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", (REPOSITORY / "README.md").read_text("utf-8"), re.DOTALL)
    for line in block.strip().splitlines()
]
LAUNCH_PY = "python templates/launch.py --config_file configs/single_gpu.yaml templates/text_classification.py --config examples/bert_mrpc/recipe.yaml"  # noqa: E501 (as in the README)
ACCELERATE_LAUNCH = "accelerate launch --config_file configs/single_gpu.yaml templates/text_classification.py --config examples/bert_mrpc/recipe.yaml"  # noqa: E501 (as in the README)
# The environment that runs these tests is the one that make uses: no other is made.
VENV = f'VENV="{sys.prefix}"'


def shell(command: str, limit: float = 300, **environment) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        shell=True,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=limit,
        env=os.environ | {"PATH": path} | environment,
    )


def test_the_readme_has_no_command_that_is_not_run_here():
    tested = "\n".join(Path(__file__).with_name(name).read_text("utf-8") for name in TESTED_IN)
    assert len(COMMANDS) >= 8
    missing = [command for command in COMMANDS if command not in tested]
    assert not missing, missing


TESTED_IN = ["test_readme.py", "test_new_project.py"]
# This suite itself; two that are started below; one that test_new_project.py runs for each template.
OTHERS = ["make test", "make prove", "make compare-methods", "make new TEMPLATE=text_classification DEST=../mine"]


def test_what_the_readme_and_pyproject_call_the_license_is_there():
    text = (REPOSITORY / "LICENSE").read_text("utf-8")
    assert "Apache License\n                           Version 2.0" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (REPOSITORY / "pyproject.toml").read_text("utf-8")
    assert "[Apache-2.0](LICENSE)" in (REPOSITORY / "README.md").read_text("utf-8")


@pytest.fixture(scope="module", autouse=True)
def environment_is_made():
    """`make` takes the environment of these tests as made from this pyproject.toml: nothing is installed."""
    stamp = Path(sys.prefix) / ".installed-templates"
    before = stamp.read_bytes() if stamp.exists() else None
    shutil.copy(REPOSITORY / "pyproject.toml", stamp)
    yield
    if before is None:
        stamp.unlink()
    else:
        stamp.write_bytes(before)


@pytest.mark.timeout(900)
def test_make_demo():
    """The main job, offline: far above a majority vote and a bag of words, exported, three pairs predicted."""
    answer = shell(f"make demo {VENV}", limit=600)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    facts = json.loads((REPOSITORY / "outputs" / "demo" / "run.json").read_text())
    assert facts["status"] == "done"
    baseline = dict(re.findall(r"(majority class|bag of words) +accuracy ([\d.]+)", answer.stdout))
    assert facts["results"]["test_accuracy"] > 0.85, facts["results"]
    assert facts["results"]["test_accuracy"] > float(baseline["bag of words"]) + 0.15, answer.stdout
    assert facts["results"]["test_accuracy"] > float(baseline["majority class"]) + 0.15, answer.stdout
    assert len(re.findall(r"model: (?:paraphrase|different) \(\d+%\), really: ", answer.stdout)) == 3, answer.stdout
    for word in ("outputs/demo", "make bert-mrpc", "synthetic"):
        assert word in answer.stdout, answer.stdout


@pytest.mark.timeout(900)
def test_bert_mrpc_without_a_hub_says_what_to_do_in_one_line():
    for command in ("make bert-mrpc", LAUNCH_PY, ACCELERATE_LAUNCH):
        answer = shell(f"{command} {VENV if command.startswith('make') else ''}")
        assert answer.returncode != 0 if command == ACCELERATE_LAUNCH else answer.returncode == 2
        errors = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, answer.stderr
        for word in ("nyu-mll/glue", "train_file", "HF_HOME", "make demo"):
            assert word in errors[0], errors[0]


def test_make_hands_options_on_intact_and_a_signal_to_make_saves(tmp_path):
    """make bert-mrpc PROFILE=multi_gpu NUM_PROCESSES=8 PRECISION=bf16 ARGS='--seed 3 --output_dir "outputs/seed 3"'"""
    tiny = make_tiny(tmp_path)
    output_dir = tmp_path / "outputs" / "seed 3"
    changed = settings_for(tiny) | {"dataset_name": "null", "dataset_config_name": "null", "num_train_epochs": 300}
    changed |= {"eval_steps": 9999, "checkpointing_steps": 9999, "output_dir": output_dir, "seed": 3}
    arguments = " ".join(f'--{name} "{value}"' for name, value in changed.items())
    command = [
        "make",
        "bert-mrpc",
        f"VENV={sys.prefix}",
        "PROFILE=multi_gpu",
        "NUM_PROCESSES=2",
        "PRECISION=no",
        f"ARGS={arguments}",
    ]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 180
    while not (output_dir / "metrics.jsonl").exists() or not lines(output_dir):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    facts = json.loads((output_dir / "run.json").read_text())
    while facts["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
        facts = json.loads((output_dir / "run.json").read_text())
    assert facts["status"] == "stopped", output
    assert facts["numbers"]["seed"] == 3
    assert facts["world"]["num_processes"] == 2
    assert "precision no" in output
    assert "cpu (no accelerator is visible)" in output or "GPU" in output


def test_help_through_the_module_form():
    command = (
        "python -m accelerate.commands.launch --config_file configs/cpu.yaml templates/text_classification.py --help"
    )
    answer = shell(command)
    assert answer.returncode == 0, answer.stderr
    assert "Peak learning rate." in answer.stdout


def test_copied_by_hand_it_runs_from_any_folder(tmp_path):
    """cp -r templates/text_classification.py templates/kit configs ../mine/"""
    mine = tmp_path / "mein Projekt ä"
    mine.mkdir()
    shell(f'cp -r templates/text_classification.py templates/kit configs "{mine}"/')
    settings = settings_for(make_tiny(tmp_path)) | {"output_dir": "runs/first", "max_train_steps": 2}
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-W", "error::FutureWarning:__main__", str(mine / "text_classification.py"), *arguments]
    answer = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=180)
    assert answer.returncode == 0, answer.stderr
    assert (elsewhere / "runs" / "first" / "best" / "model.safetensors").is_file()
    assert str(TEMPLATES) not in (elsewhere / "runs" / "first" / "run.json").read_text()


def test_make_ddp_from_scratch_on_two_processes():
    answer = shell(f"make ddp-from-scratch NUM_PROCESSES=2 {VENV} ARGS='--max_train_steps 3'")
    assert answer.returncode == 0, answer.stderr
    assert "2 process(es), cpu (gloo)" in answer.stdout or "nccl" in answer.stdout


def test_an_unknown_profile_is_one_line_with_those_there_are():
    answer = shell(f"make bert-mrpc PROFILE=eight {VENV}")
    assert "profiles in configs/: cpu, mps, multi_cpu, multi_gpu, multi_node, sagemaker, " in answer.stderr
    assert "Traceback" not in answer.stderr


def test_help_lists_every_job():
    answer = shell("make help")
    targets = set(re.findall(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert len(targets) > 10
    for target in targets:
        assert f"make {target}" in answer.stdout, target


@pytest.mark.timeout(900)
def test_make_prove_trains_in_every_way():
    answer = shell(f"make prove {VENV}", limit=900)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "22 of 22 ways are the same run" in answer.stdout


def test_the_methods_are_measured_at_the_size_that_each_script_has_by_itself(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples" / "parallelism"))
    import compare_methods
    import problem

    measured, alone = compare_methods.Settings(), problem.Settings()
    readme = (REPOSITORY / "examples" / "parallelism" / "README.md").read_text("utf-8")
    assert (
        f"{measured.hidden_size} hidden units" in readme and f"steps of {measured.global_batch_size} samples" in readme
    )
    for name in ("hidden_size", "global_batch_size"):
        assert getattr(measured, name) == getattr(alone, name), name
    (ddp,) = {options["bucket_cap_mb"] for method, options in compare_methods.TOGETHER.values() if method == "ddp"}
    assert ddp == importlib.import_module("ddp").Settings().bucket_cap_mb


@pytest.mark.timeout(600)
def test_make_compare_methods_measures_all_of_them(tmp_path):
    small = "--num_rounds 1 --num_steps 1 --hidden_size 32 --global_batch_size 8"
    answer = shell(f"make compare-methods {VENV} ARGS='{small} --output_dir \"{tmp_path}/a b\"'", limit=600)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    table = json.loads((tmp_path / "a b" / "table.json").read_text("utf-8"))
    for row in table["methods"]:
        assert f"\n| {row['method']} | {row['processes']} | " in answer.stdout
        assert row["measured"]["seconds"] > 0
        assert row["measured"]["bytes_sent"] == pytest.approx(row["predicted"]["bytes_sent"]), row["method"]
    scripts = {path.name for path in (REPOSITORY / "examples" / "parallelism").glob("*.py")}
    assert len({row["script"] for row in table["methods"]} & scripts) >= 10
    report = (tmp_path / "a b" / "report.html").read_text("utf-8")
    pictures = sorted(path.name for path in (tmp_path / "a b").glob("*.png"))
    assert pictures == ["costs.png", "idle.png", "memory.png", "timelines.png"]
    assert report.count("<img") == 4
    assert report.count("src='data:image/png;base64,") == 4, "one file, to be sent around"
