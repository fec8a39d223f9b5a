"""fp16 and bf16 on the CPU: the scaler grows, backs off and skips, the schedule waits, a checkpoint holds the scale.

Accelerate leaves fp16 out on a CPU. Torch has both halves of it there, autocast and GradScaler: the tests put them into
the Accelerator that the template builds, and nothing else is changed.
"""

import json
import os
import signal

import pytest

from worlds import largest_difference, numbers, run, same_weights

GROWTH = 3  # steps without an overflow, after which the scale doubles
TOO_HIGH = 2.0**20  # as a first scale: gradients in fp16 are infinite until it has halved a few times


@pytest.fixture(scope="module")
def settings(tiny_settings) -> dict:
    return tiny_settings | {"test_file": None, "checkpointing_steps": 2, "warmup_ratio": 0.0}


def train(num_processes: int, settings: dict, output_dir, scale: float, stop_after: int = 0) -> list[dict]:
    """Train in fp16 with this first scale; return what process 0 did in each step."""
    environment = {"FIRST_SCALE": str(scale), "STOP_AFTER": str(stop_after)}
    options = {"patches": ["test_precision:fp16_on_cpu"], "environment": environment}
    world = run(num_processes, settings | {"output_dir": str(output_dir)}, 75 if stop_after else 0, **options)
    rows = [line.split("SCALER ", 1)[1] for line in world.output(0).splitlines() if "SCALER " in line]
    assert rows
    return [json.loads(row) for row in rows]


def losses(output_dir) -> list[dict]:
    """The training lines: loss, norm, learning rate."""
    return [row for row in numbers(output_dir) if "loss" in row]


def fp16_on_cpu(template) -> None:
    """Give the Accelerator that the template builds torch's GradScaler and fp16 autocast for the CPU; log each step."""
    import torch
    from accelerate.state import AcceleratorState

    build, train_step = template.build_accelerator, template.train_step

    def build_with_scaler(settings):
        accelerator = build(settings)
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
        accelerator.native_amp = True
        scale = float(os.environ["FIRST_SCALE"])
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=GROWTH)
        return accelerator

    def logged_step(accelerator, model, criterion, optimizer, schedule, batches, window, settings):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scale, count = accelerator.scaler.get_scale(), schedule.last_epoch
        result = train_step(accelerator, model, criterion, optimizer, schedule, batches, window, settings)
        row = {"step": window.step, "scale": scale, "after": accelerator.scaler.get_scale()}
        row["skipped"] = accelerator.optimizer_step_was_skipped
        row["scheduled"] = schedule.last_epoch - count
        row["moved"] = any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        if accelerator.is_main_process:
            print(f"SCALER {json.dumps(row)}", flush=True)
        if window.step == int(os.environ["STOP_AFTER"]):
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    template.build_accelerator, template.train_step = build_with_scaler, logged_step


@pytest.fixture(scope="module")
def overflowing(settings, tmp_path_factory):
    """A run whose first scale is far too high, and what it did."""
    output_dir = tmp_path_factory.mktemp("fp16") / "run"
    return output_dir, train(1, settings, output_dir, TOO_HIGH)


def test_a_step_that_overflows_is_skipped_and_the_schedule_waits_for_it(overflowing):
    _, rows = overflowing
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert {row["skipped"] for row in rows} == {True, False}
    for row in rows:
        assert row["moved"] == (not row["skipped"])
        assert row["scheduled"] == (not row["skipped"])
        if row["skipped"]:
            assert row["after"] == row["scale"] / 2


def test_the_scale_grows_after_steps_without_an_overflow(overflowing):
    _, rows = overflowing
    assert any(row["after"] == 2 * row["scale"] for row in rows)


def test_gradients_are_clipped_by_their_true_size(settings, tmp_path):
    """With the scale still in it the norm would be a thousand times that of fp32, and each step would be clipped."""
    run(1, settings | {"output_dir": str(tmp_path / "plain")})
    rows = train(1, settings, tmp_path / "half", 1024.0)
    assert not any(row["skipped"] for row in rows)
    difference = largest_difference(losses(tmp_path / "plain"), losses(tmp_path / "half"))
    assert 1e-6 < difference < 0.02  # rounding of fp16 in norm and loss: so autocast was at work


def test_bf16_is_the_same_run_within_its_rounding(settings, tmp_path):
    run(1, settings | {"output_dir": str(tmp_path / "plain")})
    run(1, settings | {"output_dir": str(tmp_path / "half"), "mixed_precision": "bf16"})
    difference = largest_difference(losses(tmp_path / "plain"), losses(tmp_path / "half"))
    assert 1e-6 < difference < 0.1  # bf16 has 8 bits


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_stopped_run_goes_on_bit_for_bit_with_its_scale(num_processes, settings, overflowing, tmp_path):
    output_dir, whole = overflowing
    if num_processes > 1:
        output_dir = tmp_path / "whole"
        whole = train(num_processes, settings, output_dir, TOO_HIGH)
    first = train(num_processes, settings, tmp_path / "parts", TOO_HIGH, stop_after=4)
    rest = train(num_processes, settings, tmp_path / "parts", 8.0)  # the checkpoint's scale counts, not this one
    assert first + rest == whole
    assert numbers(output_dir) == numbers(tmp_path / "parts")
    assert same_weights(output_dir / "final", tmp_path / "parts" / "final")
