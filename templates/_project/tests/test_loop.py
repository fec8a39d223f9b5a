"""What the loop promises, proven on this project's script: change it as you like, and keep these tests green.

A run here is small and takes about a second. Each promise that has to hold on several processes is tried on several.
"""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

import worlds
from conftest import PROJECT, SCRIPT
from kit.batches import Window
from worlds import World, largest_difference, lines, numbers, same_weights, samples_by_step

MODULE = importlib.import_module(SCRIPT)
OPTIONS = MODULE.Settings.__dataclass_fields__
predicts = pytest.mark.skipif(not hasattr(MODULE, "write_predictions"), reason="the script's test split has labels")


def needs(option: str):
    return pytest.mark.skipif(option not in OPTIONS, reason=f"the script has no {option}")


def run(num_processes: int, settings: dict, expected: int = 0, **options) -> World:
    return worlds.run(num_processes, settings, expected, template=SCRIPT, **options)


def start(num_processes: int, settings: dict, fault: str, patches=(), **options) -> World:
    return World(num_processes, settings, SCRIPT, [f"faults:{fault}", *patches], {"FAULT": json.dumps(options)})


def facts(output_dir) -> dict:
    return json.loads((output_dir / "run.json").read_text("utf-8"))


def saved_steps(output_dir) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (output_dir / "checkpoints").iterdir())


def note_saves(folder) -> dict:
    return {"patches": ["spies:note_saves"], "environment": {"SPY": str(folder / "saves")}}


def begun_saves(folder) -> list[int]:
    return [int(line) for line in (folder / "saves.txt").read_text().split()]


@pytest.fixture(scope="module")
def settings(small) -> dict:
    return small | {"checkpointing_steps": 2, "eval_steps": 3}


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory):
    """The run that the others are compared with: one process, each step in one forward pass."""
    output_dir = tmp_path_factory.mktemp("whole") / "run"
    one_pass = {"output_dir": str(output_dir), "micro_batch_size": settings["global_batch_size"]}
    run(
        1,
        settings | one_pass,
        patches=["faults:record_samples"],
        environment={"SAMPLES": str(output_dir / "samples")},
    )
    return output_dir


@pytest.fixture(scope="module")
def unbroken(settings, tmp_path_factory):
    """The unbroken run on two processes, with dropout."""
    output_dir = tmp_path_factory.mktemp("unbroken") / "run"
    world = run(2, settings | {"output_dir": str(output_dir)})
    (output_dir / "screen.txt").write_text(world.output(0), "utf-8")
    return output_dir


def assert_same(output_dir, unbroken) -> None:
    assert numbers(output_dir) == numbers(unbroken)
    assert same_weights(output_dir / "best", unbroken / "best")
    assert same_weights(output_dir / "final", unbroken / "final")
    assert facts(output_dir)["status"] == "done"
    assert facts(output_dir)["results"] == facts(unbroken)["results"]


# ------------------------------------------------------------------------------------------------------ the same run


def test_it_is_the_plain_loop(settings, tmp_path):
    """With dropout: loss, gradient, learning rate and evaluations are those of the loop that everybody can write."""
    here = settings | {"output_dir": str(tmp_path / "run"), "micro_batch_size": settings["global_batch_size"]}
    run(1, here, patches=["spies:train_plainly"], environment={"SPY": str(tmp_path / "plain")})
    plain = json.loads((tmp_path / "plain.json").read_text())
    rows = [row for row in numbers(tmp_path / "run") if "test_loss" not in row]
    rows = [{key: row[key] for key in expected} for row, expected in zip(rows, plain, strict=True)]
    assert largest_difference(rows, plain) <= 1e-5
    assert [row["step"] for row in plain if "eval_loss" in row] == [3, 6, 9, 10]
    assert max(row["step"] for row in rows) == facts(tmp_path / "run")["batch"]["total_steps"] == 10


@pytest.mark.parametrize(("num_processes", "share"), [(1, 3), (2, 4), (3, 4)])
def test_any_split_of_a_step_is_the_same_run(num_processes, share, settings, whole, tmp_path):
    output_dir = tmp_path / "run"
    here = settings | {"output_dir": str(output_dir), "micro_batch_size": -(-settings["global_batch_size"] // share)}
    patches = ["faults:record_samples"]
    environment = {
        "SAMPLES": str(output_dir / "samples"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    }  # of a profile
    run(num_processes, here, patches=patches, environment=environment)
    # Rounding differs with the order of sums; 1e-5 relative is 100 times the rounding of fp32.
    assert largest_difference(numbers(whole), numbers(output_dir)) <= 1e-5
    seen = samples_by_step(output_dir / "samples")
    assert seen == samples_by_step(whole / "samples")
    epoch = sorted(sample for step in range(1, 6) for sample in seen[step])
    assert epoch == list(range(len(epoch))), "each sample once an epoch"


def test_gradients_are_exchanged_once_a_step(settings, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run"), "micro_batch_size": settings["global_batch_size"] // 8}
    run(2, here, patches=["spies:count_exchanges"], environment={"SPY": str(tmp_path / "count")})
    exchanges = (tmp_path / "count.txt").read_text()
    buckets = len(exchanges) // 10
    assert exchanges == "x" * 10 * buckets
    assert buckets <= 2, "one for each bucket of parameters; the network is small"


@pytest.mark.parametrize(
    ("changed", "scaler", "grad_norm", "is_scaler_skipping", "expected"),
    [
        ({}, None, 1.0, False, "optimizer schedule zero"),
        ({}, None, float("nan"), False, "optimizer schedule zero"),  # ends the run before anything is saved
        ({"skip_nonfinite_steps": 1}, None, 1.0, False, "optimizer schedule zero"),
        ({"skip_nonfinite_steps": 1}, None, float("nan"), False, "zero"),
        ({"skip_nonfinite_steps": 1}, "scaler", float("inf"), True, "optimizer zero"),  # the scaler wants to know
        ({"max_grad_norm": 0.0}, "scaler", 1.0, False, "optimizer schedule zero"),
    ],
)
def test_a_step_clips_skips_and_counts(changed, scaler, grad_norm, is_scaler_skipping, expected, small, monkeypatch):
    done, limits = [], []
    model = torch.nn.Linear(1, 1)
    settings = MODULE.Settings(**small | changed)
    accelerator = SimpleNamespace(
        device="cpu",
        num_processes=1,
        gradient_accumulation_steps=1,
        scaler=scaler,
        backward=lambda loss: loss.backward(),
        clip_grad_norm_=lambda parameters, limit: limits.append(limit) or torch.tensor(grad_norm),
        optimizer_step_was_skipped=is_scaler_skipping,
    )
    optimizer = SimpleNamespace(step=lambda: done.append("optimizer"), zero_grad=lambda: done.append("zero"))
    schedule = SimpleNamespace(step=lambda: done.append("schedule"))
    monkeypatch.setattr(MODULE, "summed_loss", lambda model, criterion, batch: model(torch.ones(1, 1)).sum())
    batches = iter([{"sample_id": torch.tensor([0])}])
    MODULE.train_step(accelerator, model, None, optimizer, schedule, batches, Window(1, 1, 1), settings)
    assert " ".join(done) == expected
    assert limits == [settings.max_grad_norm or float("inf")]


def test_a_model_is_judged_with_the_buffers_of_process_0(monkeypatch):
    """Those of the others differ: the running statistics of BatchNorm come from their own micro-batches."""
    shared, model = [], torch.nn.Linear(1, 1)
    monkeypatch.setattr(MODULE, "share_buffers", lambda accelerator, model: shared.append((model, model.training)))
    monkeypatch.setattr(MODULE, "gather_in_order", lambda *arguments: {})
    run = SimpleNamespace(evaluation_batches=lambda loader: iter(()), is_stopped=False)
    MODULE.predict(None, model, None, SimpleNamespace(dataset=[]), run)
    assert shared == [(model, False)]
    assert model.training


# ------------------------------------------------------------------------------------------------ what it leaves behind


def test_it_announces_what_it_does_and_keeps_what_it_should(unbroken):
    screen = (unbroken / "screen.txt").read_text("utf-8")
    for words in ("10 steps, 5 an epoch", "2 processes on 1 node, gloo", "end at step 10", "done "):
        assert screen.count(words) == 1, words
    training, evaluations = lines(unbroken, "loss"), lines(unbroken, "eval_loss")
    assert [row["step"] for row in training] == list(range(1, 11)), "announced and done are the same"
    assert all(row["samples_per_second"] > 0 for row in training)
    assert [row["step"] for row in evaluations] == [3, 6, 9, 10]
    results, num_test_samples = facts(unbroken)["results"], facts(unbroken)["data"]["rows"].get("test", 0)
    assert [row["test_samples"] for row in lines(unbroken, "test_loss")] == [num_test_samples] * (num_test_samples > 0)
    assert ("test_loss" in results) == (num_test_samples > 0)
    best = results["best_step"]
    assert best in [row["step"] for row in evaluations]
    saved = saved_steps(unbroken)
    assert {best, 10} <= set(saved) and len(saved) == 2, "two are kept, never without the best and the newest"
    card = (unbroken / "README.md").read_text("utf-8")
    assert "```python\n" in card and f"| best_step | {best} |" in card


def test_lines_come_when_due_with_the_speed_since_the_last_and_the_bar_goes_to_the_end(settings, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run"), "logging_steps": 4}
    world = run(1, here, patches=["spies:on_a_terminal", "spies:one_second_a_step"])
    batch = facts(tmp_path / "run")["batch"]
    full, tail = batch["global_batch_size"], batch["samples_in_last_step_of_epoch"]
    speeds = {row["step"]: row["samples_per_second"] for row in lines(tmp_path / "run", "loss")}
    assert speeds == {4: full, 8: (tail + 3 * full) / 4, 10: (full + tail) / 2}
    assert "| 10/10 [" in world.output()


def test_the_best_model_is_the_one_with_the_best_number(settings, tmp_path):
    from safetensors.torch import load_file

    here = settings | {"output_dir": str(tmp_path / "run"), "checkpointing_steps": 100}
    here["metric_for_best_model"] = "loss"
    noting = note_saves(tmp_path)
    run(1, here, patches=[*noting["patches"], "faults:worse_each_time"], environment=noting["environment"])
    assert facts(tmp_path / "run")["results"]["best_step"] == 3
    assert begun_saves(tmp_path) == saved_steps(tmp_path / "run") == [3, 10], "the best one and the last"
    for name, step in (("best", 3), ("final", 10)):
        saved = load_file(tmp_path / "run" / "checkpoints" / f"step_{step:08d}" / "model.safetensors")
        exported = worlds.weights(tmp_path / "run" / name)
        assert all(saved[key].equal(exported[key]) for key in saved), name


def test_without_a_number_to_judge_by_the_last_model_is_the_best(settings, tmp_path):
    world = run(2, settings | {"output_dir": str(tmp_path / "run")}, patches=["faults:no_number"])
    assert facts(tmp_path / "run")["results"]["best_step"] is None
    assert same_weights(tmp_path / "run" / "best", tmp_path / "run" / "final")
    assert world.output(0).count("the last model is taken as the best") == 1


def test_it_runs_without_a_test_split(settings, tmp_path):
    run(1, settings | {"output_dir": str(tmp_path / "run")}, patches=["spies:without_test_split"])
    assert "best_step" in facts(tmp_path / "run")["results"]
    assert not lines(tmp_path / "run", "test_loss")


@predicts
def test_a_test_split_without_labels_gets_predictions_from_one_process(settings, unbroken, tmp_path):
    rows = facts(unbroken)["data"]["rows"]
    environment = {"SPY": str(tmp_path / "writers"), "NUM_SAMPLES": str(rows["test"])}
    assert rows["test"] != rows["validation"]
    here = settings | {"output_dir": str(tmp_path / "run")}
    world = run(2, here, patches=["spies:hide_test_labels"], environment=environment)
    assert (tmp_path / "writers.txt").read_text() == "00", "validation and test, each by process 0"
    assert len((tmp_path / "run" / "predictions_test.csv").read_text("utf-8").splitlines()) == 1 + rows["test"]
    assert world.output(0).count("has no labels: predictions are in") == 1
    assert not lines(tmp_path / "run", "test_loss"), "nothing was measured"


def test_one_process_exports(settings, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run")}
    run(2, here, patches=["spies:note_exports"], environment={"SPY": str(tmp_path / "exports")})
    assert (tmp_path / "exports.txt").read_text() == "00", "final and best, each by process 0"


def test_the_export_waits_for_a_slow_disk(settings, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run"), "checkpointing_steps": 100, "eval_steps": 100}
    here["metric_for_best_model"] = "loss"
    run(1, here, patches=["faults:better_each_time", "faults:slow_disk"])
    assert facts(tmp_path / "run")["results"]["best_step"] == 10
    assert same_weights(tmp_path / "run" / "best", tmp_path / "run" / "final")


# ---------------------------------------------------------------------------------------------------- before, after


@pytest.mark.parametrize(
    ("fault", "call"),
    [("die_in_window", 8), ("die_in_window", 17), ("die_after_evaluation", 2), ("die_while_saving", 3)],
)
def test_killed_it_goes_on_exactly(fault, call, settings, unbroken, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run"), "num_workers": 2 if call == 17 else 0}
    world = start(2, here, fault, call=call)
    codes = world.wait()
    assert codes[0] == -signal.SIGKILL, f"the fault never came\n{world.output()}"
    assert codes[1] != 0, "the other process must not end as if all were well"
    world = run(2, here, **note_saves(tmp_path))
    resumed = re.search(r"resume .*step_(\d+)", world.output(0))
    assert resumed, f"it began anew\n{world.output(0)}"
    assert min(begun_saves(tmp_path)) > int(resumed[1]), "a complete checkpoint is never written again"
    assert_same(tmp_path / "run", unbroken)


@pytest.mark.parametrize("fault", ["slow_steps", "signal_in_evaluation"])
def test_after_a_signal_it_saves_and_goes_on_exactly(fault, settings, unbroken, tmp_path):
    output_dir = tmp_path / "run"
    here = settings | {"output_dir": str(output_dir)}
    world = start(2, here, fault, patches=["faults:slow_disk"], call=1, rank=1)
    if fault == "slow_steps":
        world.wait_for(lambda: (output_dir / "metrics.jsonl").exists() and lines(output_dir))
        world.signal(signal.SIGTERM, rank=1)
    world.processes[1].join(30)  # when one process has left, the launcher ends the others: nothing may be undone
    assert saved_steps(output_dir)[-1] == lines(output_dir, "loss")[-1]["step"]
    assert world.wait(30) == [75, 75], world.output()
    assert (facts(output_dir)["status"], facts(output_dir)["cause"]) == ("stopped", "signal SIGTERM")
    assert lines(output_dir, "loss")[-1]["step"] < 10, "the signal came too late to prove anything"
    assert not (output_dir / "final").exists(), "it has not come to its end"
    run(2, here)
    assert_same(output_dir, unbroken)


def test_after_a_signal_while_the_test_is_scored_it_scores_it_whole(settings, unbroken, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run")}
    batches_before = 4 * 2  # four evaluations of two batches on each process
    world = start(2, here, "signal_in_evaluation", call=batches_before + 1)
    assert world.wait() == [75, 75], world.output()
    assert saved_steps(tmp_path / "run")[-1] == 10
    assert not lines(tmp_path / "run", "test_loss"), "half a test is no number"
    run(2, here)
    assert_same(tmp_path / "run", unbroken)


def test_a_finished_run_stays_as_it_is_and_another_one_is_refused(settings, unbroken):
    before = (unbroken / "metrics.jsonl").read_bytes()
    run(1, settings | {"output_dir": str(unbroken)})
    assert (unbroken / "metrics.jsonl").read_bytes() == before
    world = run(1, settings | {"output_dir": str(unbroken), "seed": 7}, expected=2)
    assert "seed 42 -> 7" in world.output()
    assert "Traceback" not in world.output()


# ------------------------------------------------------------------------------------------------- when things go wrong


def test_a_loss_that_is_not_finite_ends_the_run_and_is_never_saved(settings, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run"), "checkpointing_steps": 1, "eval_steps": 1}
    world = start(2, here, "not_finite_loss", call=5, rank=1)
    assert all(code not in (0, 75) for code in world.wait()), world.output()
    broken = facts(tmp_path / "run")
    assert broken["status"] == "failed"
    assert "not finite at step 3" in broken["cause"] or "not finite at step 2" in broken["cause"], broken["cause"]
    step = int(broken["cause"].split("at step ")[1].split(";")[0])
    assert saved_steps(tmp_path / "run")[-1] < step


def test_the_learning_rate_waits_for_a_step_that_fp16_skipped(settings, unbroken, tmp_path):
    run(1, settings | {"output_dir": str(tmp_path / "run")}, patches=["spies:skip_third_step"])
    usual = [row["learning_rate"] for row in lines(unbroken, "loss")]
    rates = [row["learning_rate"] for row in lines(tmp_path / "run", "loss")]
    assert rates == pytest.approx([*usual[:2], usual[1], *usual[2:-1]])


def test_a_step_that_is_not_finite_is_skipped_on_all_processes(settings, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run"), "skip_nonfinite_steps": 1}
    world = start(2, here, "not_finite_loss", call=5, rank=1)
    assert world.wait() == [0, 0], world.output()
    assert world.output(0).count("is skipped") == 1
    assert facts(tmp_path / "run")["results"]["skipped_steps"] == 1, "they are counted, for there are only so many"
    assert [row["step"] for row in lines(tmp_path / "run", "loss")] == list(range(1, 11))


def test_it_stops_when_nothing_gets_better(settings, tmp_path):
    here = settings | {
        "output_dir": str(tmp_path / "run"),
        "metric_for_best_model": "loss",
        "early_stopping_patience": 2,
    }
    run(1, here, patches=["faults:worse_each_time"])
    assert [row["step"] for row in lines(tmp_path / "run", "eval_loss")] == [3, 6, 9]
    assert saved_steps(tmp_path / "run") == [3, 9]


# --------------------------------------------------------------------------------------------- what not all can do


@needs("freeze_backbone")
def test_a_frozen_backbone_does_not_move_nor_do_its_statistics(settings, tmp_path):
    here = {"freeze_backbone": True, "model_name_or_path": "test_resnet", "output_dir": str(tmp_path / "run")}
    run(2, settings | here)
    _, fresh = MODULE.build_model(MODULE.Settings(**settings | here), 3)
    before, after = fresh.state_dict(), worlds.weights(tmp_path / "run" / "final")
    assert any(name.endswith("running_mean") for name in before)
    assert {name for name in before if not before[name].equal(after[name])} == {"fc.weight", "fc.bias"}


@needs("ema_decay")
def test_the_average_is_the_average_and_is_exported_where_it_is_asked_for(settings, tmp_path):
    from safetensors.torch import load_file

    here = {"ema_decay": 0.45, "metric_for_best_model": "ema_loss", "max_train_steps": 3, "eval_steps": 1}
    here |= {"checkpointing_steps": 1, "checkpoints_total_limit": None, "output_dir": str(tmp_path / "run")}
    run(1, settings | here, patches=["faults:worse_each_time"])
    folders = [tmp_path / "run" / "checkpoints" / f"step_{step:08d}" for step in (1, 2, 3)]
    raw = [load_file(folder / "model.safetensors") for folder in folders]
    average = [load_file(folder / "ema.safetensors") for folder in folders]
    best, final = (worlds.weights(tmp_path / "run" / name) for name in ("best", "final"))
    assert average[0].keys() == raw[0].keys() == best.keys()
    for name, value in average[0].items():
        assert value.equal(raw[0][name]), name
        for step in (2, 3):
            decay = min(0.45, 1 - step ** (-2 / 3))
            before, now = average[step - 2][name], raw[step - 1][name]
            expected = decay * before + (1 - decay) * now if value.is_floating_point() else now
            assert average[step - 1][name].allclose(expected, rtol=1e-5, atol=1e-7), (name, step)
        assert best[name].equal(average[0][name]), name
        assert final[name].equal(average[2][name]), name
    assert any(not final[name].equal(raw[2][name]) for name in final)


@needs("ema_decay")
def test_the_average_is_judged_in_the_precision_of_the_training(settings, tmp_path):
    """With next to no memory the average is the model itself, so its numbers are the same bit for bit."""
    here = {"ema_decay": 1e-12, "mixed_precision": "bf16", "max_train_steps": 1, "output_dir": str(tmp_path / "run")}
    run(1, settings | here)
    (row,) = lines(tmp_path / "run", "eval_loss")
    averaged = {name: value for name, value in row.items() if name.startswith("eval_ema_")}
    assert averaged == {name: row[name.replace("ema_", "")] for name in averaged}
    assert "eval_ema_loss" in averaged


def test_auto_finds_the_micro_batch_that_fits_and_goes_on_with_less_memory(settings, whole, tmp_path):
    output_dir = tmp_path / "run"
    fault = {"limit": 3, "then": 2, "after": 9, "rank": 1}
    here = settings | {"output_dir": str(output_dir), "micro_batch_size": "auto", "eval_batch_size": 2}
    patches = ["faults:limited_memory", "faults:record_samples"]
    options = {"environment": {"FAULT": json.dumps(fault), "SAMPLES": str(output_dir / "samples")}, "patches": patches}
    world = run(2, here, expected=75, **options)
    assert "micro-batches of 3 fit" in world.output(0)
    assert "out of memory" in facts(output_dir)["cause"] and "the next start takes 1" in facts(output_dir)["cause"]
    options["environment"]["FAULT"] = json.dumps({"limit": 1})
    run(2, here, **options)
    assert facts(output_dir)["batch"]["micro_batch_size"] == 1
    assert largest_difference(numbers(whole), numbers(output_dir)) <= 1e-5


def test_a_resumed_run_does_not_search_again(settings, tmp_path):
    here = settings | {"output_dir": str(tmp_path / "run"), "micro_batch_size": "auto"}
    environment = {"FAULT": json.dumps({"limit": 3, "call": 15})}
    world = World(2, here, SCRIPT, ["faults:limited_memory_in_backward", "faults:die_in_window"], environment)
    assert -signal.SIGKILL in world.wait(), world.output()
    world = run(2, here)  # with all the memory in the world a search would find 4
    assert "resume " in world.output(0)
    assert "micro-batches of 3 fit" in world.output(0)


# ----------------------------------------------------------------------------------------------------- as you start it


def test_the_launcher_starts_two_processes_from_any_folder(small, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small | {"num_train_epochs": 1}), "utf-8")
    command = [sys.executable, str(PROJECT / "launch.py"), "--config_file", str(PROJECT / "configs" / "multi_cpu.yaml")]
    command += [str(PROJECT / f"{SCRIPT}.py"), "--config", "recipe.yaml", "--output_dir", "a run"]
    answer = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("2 processes on 1 node, gloo") == 1
    assert facts(tmp_path / "a run")["status"] == "done"
    answer = subprocess.run(
        [*command, "--learning_rte", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert (answer.returncode, len(answer.stderr.strip().splitlines())) == (2, 1), answer.stderr
    assert "did you mean learning_rate?" in answer.stderr
