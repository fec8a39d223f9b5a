"""`make sweep`: seeds and settings one after the other, stopped and continued, and their results in one table."""

import csv
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest

import sweep
from conftest import REPOSITORY, TEMPLATES
from kit.errors import UserError

FAKE = '''"""Not a training: it leaves what one leaves."""
import json, sys, time
from dataclasses import dataclass
from pathlib import Path

from kit.command_line import start
from kit.run_directory import check_run_directory
from kit.settings import TrainingSettings, numbers_in_force


@dataclass(kw_only=True)
class Settings(TrainingSettings):
    """What a training script has."""
    output_dir: str = "outputs/fake"
    """Where."""
    push_to_hub: bool = False
    """Upload."""
    name: str = "any"
    """A text."""


check = check_run_directory

if __name__ == "__main__":
    settings = start(Settings, check, __doc__)
    folder = Path(settings.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "metrics.jsonl").exists():
        print("is done")
        sys.exit()
    with open(folder.parent / "starts", "a") as file:
        print(folder.name, file=file)
    run = {"numbers": numbers_in_force(settings), "data": {"sha256": {"train": "0"}}, "status": "done"}
    if settings.learning_rate == 0.3:
        (folder / "run.json").write_text(json.dumps(run | {"status": "failed", "cause": "the loss is not finite"}))
        sys.exit(1)
    if settings.learning_rate == 0.2 and settings.seed == 1 and not (folder / "waited").exists():
        (folder / "waited").touch()
        time.sleep(60)
    score = settings.learning_rate * (1 + settings.seed)
    details = {"accuracy": {"value": score / 2}, "f1": {"value": None}}
    results = {"best_step": 3, "best_loss": 1 - score, "test_accuracy": score, "test_samples": 9, "validation": details}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "epoch": 1, "eval_loss": 1 - score}) + "\\n")
    (folder / "run.json").write_text(json.dumps(run | {"results": results}))
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder with a script that leaves what a training leaves, and its recipe."""
    monkeypatch.setenv("PYTHONPATH", str(TEMPLATES))  # where the kit is
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "recipe.yaml").write_text(f"output_dir: {tmp_path}/outputs/fake\n")
    return tmp_path


def command(fake, *options: str, profile: str = str(REPOSITORY / "configs" / "cpu.yaml")) -> list[str]:
    recipe = ["--config", str(fake / "recipe.yaml")]
    return [str(fake / "fake.py"), *recipe, *options, "--", "--config_file", profile]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "required: --seeds"),
        (["--seeds", ""], "--seeds '': '' is not a whole number"),
        (["--seeds", "0 -1"], "'-1' is not a whole number >= 0"),
        (["--seeds", "1 2 01"], "seed 1 is given twice"),
        (["--seeds", "0", "--grid", "learning_rate"], "write SETTING=VALUE,VALUE"),
        (["--seeds", "0", "--grid", "learning_rate=1,"], "write SETTING=VALUE,VALUE"),
        (["--seeds", "0", "--grid", "learning_rate=1", "learning_rate=2"], "learning_rate is given twice"),
        (["--seeds", "0", "--grid", "learning_rat=1"], "unknown option learning_rat .*learning_rate"),
        (["--seeds", "0", "--grid", "learning_rate=0.1,high"], "learning_rate: 'high' is not a number >= 0"),
        (["--seeds", "0", "--grid", "learning_rate=0.1,1e-1"], "learning_rate=1e-1,seed=0 are the same run"),
        (["--seeds", "0", "--grid", "seed=1,2"], "give --seeds"),
        (["--seeds", "0", "--seed", "1"], "--seed is set by the sweep"),
        (["--seeds", "0", "--push_to_hub", "true"], "a sweep uploads nothing"),
        (["--seeds", "0", "--max_train_step", "1"], "did you mean max_train_steps"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_started(options, words, fake):
    with pytest.raises(UserError, match=words) as mistake:
        sweep.main(command(fake, *options))
    assert len(str(mistake.value).splitlines()) == 1
    assert not (fake / "outputs").exists()


def test_a_mistake_in_the_profile_is_found_once_for_all_runs(fake):
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        sweep.main(command(fake, "--seeds", "0", profile="nowhere.yaml"))
    with pytest.raises(UserError, match="give a profile after --"):
        sweep.main(command(fake, "--seeds", "0")[:-2])
    assert not (fake / "outputs").exists()


def test_a_folder_with_another_run_is_named_before_anything_is_started(fake):
    options = ["--seeds", "0 1", "--output_dir", str(fake / "mine")]
    assert sweep.main(command(fake, *options)) == 0
    (fake / "recipe.yaml").write_text("learning_rate: 0.7\n")
    with pytest.raises(UserError, match=r"seed=0 holds another run: learning_rate 5e-05 -> 0\.7"):
        sweep.main(command(fake, *options))
    assert len((fake / "mine" / "starts").read_text().split()) == 2


def test_values_with_slashes_and_commas_in_their_names_stay_in_the_folder_of_the_sweep(fake):
    arguments = command(
        fake, "--seeds", "0", "--grid", "name=../../../../a,..%2F..%2F..%2F..%2Fa,a b", "--output_dir", str(fake / "s")
    )
    folder, trials = sweep.plan(sweep.read_arguments(arguments))
    assert folder == fake / "s"
    assert len({trial.path.resolve() for trial in trials}) == 3
    assert {trial.path.resolve().parent for trial in trials} == {folder.resolve()}


def test_a_sweep_goes_on_where_it_was_stopped_names_what_failed_and_ends_in_one_table(fake):
    options = ["--seeds", "0 1 2", "--grid", "learning_rate=0.1,0.2,0.3"]
    program = [sys.executable, str(TEMPLATES / "sweep.py"), *command(fake, *options)]
    folder = fake / "outputs" / "sweep_fake"

    process = subprocess.Popen(program, cwd=fake, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        waited = folder / "learning_rate=0.2,seed=1" / "waited"
        end = time.monotonic() + 120
        while not waited.exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)[0]
    finally:
        process.kill()
    assert process.returncode == 75, output
    assert "sweep      learning_rate=0.2,seed=1: stopped" in output
    assert "run 6 of 9" not in output
    starts = (folder / "starts").read_text().split()
    assert starts == [*(f"learning_rate=0.1,seed={seed}" for seed in range(3)), *(
        f"learning_rate=0.2,seed={seed}" for seed in range(2))]  # fmt: skip
    assert not (folder / "results.csv").exists()

    again = subprocess.run(program, cwd=fake, text=True, capture_output=True, timeout=200)
    output = again.stdout + again.stderr
    assert again.returncode == 1, output
    assert "sweep      learning_rate=0.3,seed=1: failed with exit code 1 (the loss is not finite)" in output
    starts = (folder / "starts").read_text().split()[len(starts) :]
    assert starts == ["learning_rate=0.2,seed=1", "learning_rate=0.2,seed=2"] + [
        f"learning_rate=0.3,seed={seed}" for seed in range(3)
    ]  # those that failed do not end the others, those that were done are not trained again

    with open(folder / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["learning_rate"] for row in rows] == ["0.1", "0.2", "0.3"]
    assert [row["runs"] for row in rows] == ["3", "3", "0"]
    for row, rate in zip(rows[:2], (0.1, 0.2), strict=True):
        scores = [rate, 2 * rate, 3 * rate]
        assert float(row["test_accuracy_mean"]) == pytest.approx(statistics.mean(scores))
        assert float(row["test_accuracy_std"]) == pytest.approx(statistics.stdev(scores))
        assert float(row["validation_accuracy_std"]) == pytest.approx(statistics.stdev(scores) / 2)
    assert not [name for name in rows[0] if "samples" in name or "best_step" in name or "f1" in name]
    table = (folder / "results.md").read_text()
    assert re.search(r"\| 0\.2 +\| 3 of 3 \| 0\.6 ± 0\.2 +\| 0\.4 ± 0\.2 ", table), table
    assert re.search(r"\| 0\.3 +\| 0 of 3 \| - ", table), table
    assert table.partition("\n\n")[2] in output
    page = (folder / "comparison.html").read_text()
    assert "Comparison of 6 runs" in page and "learning_rate 0.2" in page
