"""A mistake costs one line that names the value, the place and the cure."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from conftest import TEMPLATES
from kit.command_line import parse_settings
from kit.errors import UserError
from kit.settings import NEUTRAL, save_settings
from text_classification import Settings

MISTAKES = {
    "--learning_rte 3": "unknown option learning_rte (command line): did you mean learning_rate?",
    "--learning 3": "did you mean learning_rate?",  # no abbreviations
    "--learning-rate 3": "did you mean learning_rate?",
    "--gradient_accumulation_steps 0": "it is derived from global_batch_size",
    "--gradient_accumulation_steps -1": "it is derived from global_batch_size",
    "--batch_size 0": "set global_batch_size (one step) and micro_batch_size",
    "--global_batch_size 0": "'0' is not a whole number > 0 (command line)",
    "--micro_batch_size x": "micro_batch_size: 'x' is not a whole number > 0 or one of auto",
    "--num_train_epochs -1": "num_train_epochs: '-1' is not a whole number > 0",
    "--num_train_epochs 1.5": "num_train_epochs: '1.5' is not a whole number",
    "--learning_rate nan": "learning_rate: 'nan' is not a number >= 0",
    "--learning_rate inf": "learning_rate: inf is not a finite number",
    "--learning_rate=": "learning_rate: '' is not a number",
    "--seed": "argument --seed: expected one argument",
    "--validation_fraction 1": "is not a number > 0 and < 1",
    "--lr_scheduler_type reduce_lr_on_plateau": "is not one of linear, cosine, constant_with_warmup, constant",
    "--mixed_precision bf17": "'bf17' is not one of no, fp16, bf16",
    "--text_columns sentence1": "is not a list such as '[a, b]'",
    "--overwrite_output_dir maybe": "is not true or false",
    "sentence1": "stands alone on the command line",
    "--num_processes 2": "it belongs to the launcher",
}


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.items())
def test_a_mistake_on_the_command_line_is_one_line(arguments, words):
    with pytest.raises(UserError) as caught:
        parse_settings(Settings, "", arguments.split())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


RECIPES = {
    "learning_rte: 1": "unknown option learning_rte (recipe {}): did you mean learning_rate?",
    "seed: -1": "seed: '-1' is not a whole number >= 0 (recipe {})",
    "mixed_precision: no": "is not one of no, fp16, bf16 (recipe {}); quote it in YAML: 'no'",
    "- a": "recipe {}: ",
    "a: [1": "recipe {}: it is not YAML",
    "": "recipe {}: not a line for each setting",
    "seed: 2.5": "seed: '2.5' is not a whole number >= 0 (recipe {})",
    "num_train_epochs: [1, 2]": "num_train_epochs: '[1, 2]' is not a whole number > 0 (recipe {})",
    "global_batch_size: true": "global_batch_size: 'true' is not a whole number > 0 (recipe {})",
    "seed: 1\nseed: 2": "recipe {}: seed is there twice",
    "1: 2": "recipe {}: 1 is no name of a setting",
    b"\xff\xfe": "recipe {}: it is not YAML",
    "seed: 012": "recipe {}: seed: YAML reads 012 as 10: write that number",
    "max_train_steps: 1:30": "recipe {}: max_train_steps: YAML reads 1:30 as 90: write that number",
    "label_column: on": "label_column: 'on' is not a text (recipe {}); quote it in YAML: 'on'",
    "output_dir: 2024": "output_dir: '2024' is not a text (recipe {}); quote it in YAML: '2024'",
}


@pytest.mark.parametrize(("text", "words"), RECIPES.items())
def test_a_mistake_in_a_recipe_names_the_recipe(text, words, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        parse_settings(Settings, "", ["--config", str(recipe)])
    assert words.format(recipe) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--config: .*nothing\.yaml"):
        parse_settings(Settings, "", ["--config", str(tmp_path / "nothing.yaml")])


def test_the_command_line_wins_over_the_recipe_and_that_over_the_default(tmp_path):
    (tmp_path / "recipe.yaml").write_text("seed: 1\nlearning_rate: 1e-3\n")
    settings = parse_settings(Settings, "", ["--seed", "2", "--config", str(tmp_path / "recipe.yaml")])
    assert settings.learning_rate == 1e-3, "1e-3 is a text to PyYAML"
    assert settings.max_length == 128
    assert settings.mixed_precision is None, "unset never overrides the profile"
    settings = parse_settings(Settings, "", ["--config", str(tmp_path / "recipe.yaml"), "--seed", "2"])
    assert settings.seed == 2
    assert settings.sources == ["defaults", str(tmp_path / "recipe.yaml"), "command line"]


def test_saved_settings_are_read_again_the_same(tmp_path):
    settings = Settings(text_columns=["a", "b ä"], mixed_precision="no", learning_rate=1e-5, max_train_steps=7)
    save_settings(settings, tmp_path / "settings.yaml")
    assert parse_settings(Settings, "", ["--config", str(tmp_path / "settings.yaml")]) == settings
    assert yaml.safe_load((tmp_path / "settings.yaml").read_text("utf-8"))["mixed_precision"] == "no"


def test_names_that_may_change_between_starts_exist_in_a_template():
    assert Settings.__dataclass_fields__.keys() >= NEUTRAL


def test_help_and_mistakes_import_nothing_heavy(tmp_path):
    """The scripts themselves, as a user starts them: what they had imported when they answered."""
    text, image, blank = (TEMPLATES / f"{name}.py" for name in ("text_classification", "image_classification", "blank"))
    heavy = "{'torch', 'accelerate', 'transformers', 'datasets', 'evaluate', 'timm', 'torchvision', 'sklearn', 'numpy'}"
    probe = (
        "import atexit, runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv.pop());"
        f"atexit.register(lambda: print('heavy', {heavy} & set(sys.modules)));"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    wrong = tmp_path / "with a space"
    for script, arguments, code, words in (
        (text, ["--help"], 0, "Peak learning rate."),
        (image, ["--help"], 0, "Peak learning rate."),
        (blank, ["--help"], 0, "Peak learning rate."),
        (text, ["--seed", "x"], 2, "error: seed: 'x'"),
        (text, ["--train_file", str(wrong / "no.csv")], 2, "error: train_file: "),
        (text, ["--train_file", str(text)], 2, "is of no kind that is read"),
        (text, ["--model_name_or_path", str(wrong), "--train_file", __file__], 2, "error: "),
        (image, ["--data_dir", str(wrong)], 2, "error: data_dir: no such folder"),
        (image, ["--data_dir", ".", "--model_name_or_path", "./no"], 2, "error: model_name_or_path: no such file"),
        (blank, ["--resume_from_checkpoint="], 2, "error: resume_from_checkpoint is empty"),
    ):
        command = [sys.executable, "-c", probe, str(script), *arguments, str(TEMPLATES)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert answer.returncode == code, answer.stderr
        assert words in answer.stdout + answer.stderr
        assert "heavy set()" in answer.stdout
        if code:
            assert len(answer.stderr.strip().splitlines()) == 1, answer.stderr


def test_the_tested_ranges_are_those_of_pyproject():
    import re

    from conftest import REPOSITORY
    from kit.versions import TESTED, untested

    text = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    for name, (low, high) in TESTED.items():
        assert re.search(rf'"{name}>={re.escape(low)},<{re.escape(high)}"', text), name
    assert untested({"torch": "2.14.1+cu130"}) == []
    assert untested({"torch": "3.0"}) == ["torch 3.0 is outside the tested range (2.14 to below 3)"]


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "recipe.yaml").write_text("output_dir: ~/runs/a\nmodel_name_or_path: ~/model\nlabel_column: ~\n")
    for arguments in (["--config=~/recipe.yaml"], ["--config", "~/recipe.yaml"]):
        settings = parse_settings(Settings, "", [*arguments, "--train_file=~/a.csv", "--label_column", "~odd"])
        assert settings.output_dir == str(tmp_path / "runs" / "a")
        assert settings.model_name_or_path == str(tmp_path / "model")
        assert settings.train_file == str(tmp_path / "a.csv")
        assert settings.label_column == "~odd", "no path of anybody's"


@pytest.mark.parametrize("script", ["text_classification", "image_classification", "blank"])
def test_a_reader_that_has_enough_ends_help_quietly(script):
    for reader in ("head -1", "true"):  # the second has gone before anything is written
        command = f'"{sys.executable}" "{TEMPLATES / script}.py" --help | {reader}'
        answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert answer.stderr == ""
        assert answer.stdout.startswith(f"usage: {script}.py") or reader == "true"


def test_a_folder_for_caches_that_cannot_be_used_is_one_line_with_its_variable(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for variable in ("HF_HOME", "HOME"):
        environment = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "XDG_CACHE_HOME")}
        environment |= {variable: str(tmp_path / "file")}
        command = [sys.executable, str(TEMPLATES / "blank.py"), "--output_dir", str(tmp_path / "run")]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert answer.returncode == 1, answer.stderr
        (line,) = answer.stderr.strip().splitlines()
        assert str(tmp_path / "file") in line and "HF_HOME" in line


def test_a_screen_that_cannot_show_a_name_ends_no_run(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "cp1252"}
    command = [
        sys.executable,
        str(TEMPLATES / "blank.py"),
        "--output_dir",
        str(tmp_path / "日本"),
        "--max_train_steps",
        "1",
    ]
    for words in (b"done ", b"is done"):
        answer = subprocess.run(command, env=environment, capture_output=True, timeout=100)
        assert answer.returncode == 0, answer.stderr
        assert words in answer.stdout


def test_a_launcher_of_several_processes_ends_its_own_traceback_with_the_line(tmp_path):
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    command = [sys.executable, str(TEMPLATES / "blank.py"), "--seed", "x"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    shown = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert (
        shown == answer.stderr.strip().splitlines()[-1] == "error: seed: 'x' is not a whole number >= 0 (command line)"
    )
