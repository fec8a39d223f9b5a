"""A template's trackers have the lines of metrics.jsonl, over a kill and a resume."""

import json
import signal

import pytest

import text_classification
from kit import trackers
from kit.command_line import parse_settings
from kit.errors import UserError
from test_trackers import tensorboard_scalars
from worlds import World, lines, run


def test_a_template_sends_its_lines_over_a_kill_and_a_resume(tiny_settings, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    settings = tiny_settings | {"output_dir": str(folder), "report_to": ["tensorboard"], "checkpointing_steps": 2}
    world = World(2, settings, patches=["faults:die_in_window"], environment={"FAULT": json.dumps({"call": 9})})
    assert world.wait()[0] == -signal.SIGKILL
    world = run(2, settings)
    assert "note       tracker" not in world.output()
    scalars = tensorboard_scalars(folder / "trackers" / "tensorboard")
    for kind in ("loss", "eval_loss", "test_loss"):
        rows = [(row["step"], row[kind]) for row in lines(folder, kind)]
        assert scalars[kind] == [(step, pytest.approx(value, rel=1e-6)) for step, value in rows]
    run(1, settings | {"overwrite_output_dir": True, "max_train_steps": 2})
    again = tensorboard_scalars(folder / "trackers" / "tensorboard")
    assert [step for step, _ in again["loss"]] == [1, 2], "an overwritten run starts its trackers anew"
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        parse_settings(text_classification.Settings, "", ["--report_to=[wandb]", "--train_file=x"])
