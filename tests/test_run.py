"""What the books of a run decide: when to evaluate, save and end, which model is the best, what an end is called."""

import json
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from kit import runlog
from kit.batches import build_sampler
from kit.errors import MachineError
from kit.run import Run
from kit.settings import TrainingSettings
from kit.stopping import EXIT_STOPPED, Blocked

SETTINGS = {"num_train_epochs": 2, "global_batch_size": 8, "micro_batch_size": 8, "logging_steps": 1, "eval_steps": 100}
SETTINGS |= {"checkpointing_steps": 100, "checkpoints_total_limit": None}
STOPPED = SystemExit, str(EXIT_STOPPED)
ONE, NAN, INFINITE = torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(float("inf"))


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(runlog.time, "sleep", lambda seconds: None)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.fixture
def begin(accelerator, tmp_path):
    """Begin a run of 6 steps over 20 samples, of which the third and the last have 4; `raises`: how it has to end."""

    @contextmanager
    def begin(raises=None, match=None, **changed):
        settings = TrainingSettings(output_dir=str(tmp_path / "run"), **SETTINGS | changed)
        state = {"model": torch.nn.Linear(2, 1)}
        sampler = build_sampler(settings, 20, 1)
        ends = pytest.raises(raises, match=match) if raises else nullcontext()
        with ends, Run(accelerator, settings, sampler, state, {"rows": {"train": 20}, "sha256": {}}) as run:
            run.resume()
            yield run

    return begin


def step(run, loss_sum=ONE, grad_norm=ONE) -> None:
    run.next_window()
    run.note_step(loss_sum, grad_norm, 0.1)


def live(run, scores=()) -> tuple[list[int], list[int]]:
    """Do what a loop does but train; return the steps that were evaluated and those that were saved."""
    scores, evaluated, saved = iter(scores), [], []
    while True:
        if run.is_evaluation_due():
            evaluated.append(run.progress.step)
            run.note_evaluation(next(scores, {"loss": 1.0}))
        if run.is_save_due():
            saved.append(run.progress.step)
            run.save()
        if run.is_over():
            run.writer.finish()
            return evaluated, saved
        step(run)


def facts(run) -> dict:
    return json.loads((run.path / "run.json").read_text("utf-8"))


def saved_steps(run) -> list[int]:
    run.writer.finish()
    return sorted(int(path.name.removeprefix("step_")) for path in run.writer.folder.glob("step_*"))


# ---------------------------------------------------------------------------------------------------- what is due


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (4, [4, 6]), ("epoch", [3, 6]), (100, [6])])
def test_it_evaluates_and_saves_when_due_and_at_the_end(every, steps, begin):
    with begin(eval_steps=every) as run:
        assert live(run, [{"loss": float("nan")}] * 6) == (steps, [6]), "no model was better: only the last is saved"
    with begin(checkpointing_steps=every, overwrite_output_dir=True) as run:
        assert live(run) == ([6], steps)
        assert saved_steps(run) == steps


def test_each_new_best_model_is_saved_and_no_other(begin):
    with begin(eval_steps=1) as run:
        scores = [{"loss": loss} for loss in (3.0, 4.0, 2.0, 2.0, 5.0, 6.0)]
        assert live(run, scores) == ([1, 2, 3, 4, 5, 6], [1, 3, 6])
        assert (run.progress.best_step, run.progress.best_loss) == (3, 2.0)


def test_it_ends_when_patience_does_and_is_complete_then(begin):
    with begin(eval_steps=1, early_stopping_patience=2) as run:
        scores = [{"loss": loss} for loss in (3.0, 4.0, 2.0, 2.0, 5.0, 1.0)]
        assert live(run, scores) == ([1, 2, 3, 4, 5], [1, 3, 5])
        run.finish_training()  # does not leave


def test_a_stopped_run_saves_once_and_leaves_and_goes_on_with_the_evaluation_that_is_missing(begin):
    with begin(*STOPPED, eval_steps=2) as run:
        step(run)
        step(run)
        run.stop.reason = "signal SIGTERM"
        assert run.is_over() and run.is_stopped and run.is_evaluation_due()
        run.note_evaluation(None)  # cut short
        assert run.is_save_due()
        run.save()
        assert not run.is_save_due()
        run.finish_training()
    assert (facts(run)["status"], facts(run)["cause"]) == ("stopped", "signal SIGTERM")
    with begin(eval_steps=2) as run:
        assert (run.progress.step, run.sampler.start_step, run.is_evaluation_due(), run.is_save_due()) == (
            2,
            2,
            True,
            False,
        )
        run.note_evaluation({"loss": 1.0})
        assert not run.is_evaluation_due()
        assert run.is_save_due() is False, "this step is saved"
        assert facts(run)["resumes"] == [2]


def test_a_reason_to_stop_at_the_last_step_comes_too_late(begin):
    with begin() as run:
        live(run)
        run.stop.reason = "signal SIGTERM"
        run.finish_training()


# ---------------------------------------------------------------------------------------------------- the best model

GREATER = [
    ([(0.5, 1.0), (0.5, 0.9), (0.5, 0.9), (0.4, 0.1), (float("nan"), 0.1)], 2, 3),  # a tie goes to the lower loss
    ([(0.5, 1.0), (0.5, 1.1), (0.6, 9.0)], 3, 0),
    ([(float("nan"), 1.0), (0.1, 1.0), (0.0, 1.0)], 2, 1),
    ([(float("nan"), 1.0)], None, 1),
]
LESS = [([(3.0, 3.0), (2.0, 2.0), (2.0, 2.0), (float("nan"), 2.0), (4.0, 4.0)], 2, 3), ([(0.5, 0.1), (0.1, 9.0)], 2, 0)]


@pytest.mark.parametrize(
    ("is_greater_better", "scores", "best_step", "without"),
    [(True, *case) for case in GREATER] + [(False, *case) for case in LESS],
)
def test_the_best_model(is_greater_better, scores, best_step, without, begin):
    with begin(metric_for_best_model="figure", greater_is_better=is_greater_better, num_train_epochs=9) as run:
        for figure, loss in scores:
            step(run)
            run.note_evaluation({"figure": figure, "loss": loss})
            assert run.progress.evaluated_step == run.progress.step
        assert run.progress.best_step == best_step
        assert run.progress.evaluations_without_improvement == without
        if best_step is not None:
            assert (run.progress.best_metric, run.progress.best_loss) == scores[best_step - 1]


def test_a_model_is_the_best_when_all_processes_find_so(begin):
    with begin() as run:
        step(run)
        asked = []
        run.stop.on_any_process = lambda is_against: asked.append(is_against) or True
        run.note_evaluation({"loss": 1.0})
        assert asked == [False]
        assert (run.progress.best_step, run.progress.evaluations_without_improvement) == (None, 1)


# ---------------------------------------------------------------------------------------------------- a step


def test_a_line_has_the_mean_loss_of_its_step_and_comes_when_due(begin):
    with begin(logging_steps=2, max_train_steps=3) as run:
        for loss_sum in (8.0, 16.0, 2.0):
            step(run, torch.tensor(loss_sum), torch.tensor(0.5))
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text("utf-8").splitlines()]
    keys = ("step", "loss", "grad_norm", "learning_rate")
    assert [tuple(row[key] for key in keys) for row in rows] == [(2, 2.0, 0.5, 0.1), (3, 0.5, 0.5, 0.1)]


def test_as_many_steps_are_skipped_as_are_allowed_and_the_next_one_ends_the_run(begin):
    with begin(FloatingPointError, "the gradient norm is not finite at step 4", skip_nonfinite_steps=2) as run:
        step(run, NAN, NAN)
        step(run)
        step(run, ONE, INFINITE)
        run.save()
        assert run.progress.skipped_steps == 2
        step(run, ONE, NAN)
        assert run.progress.skipped_steps == 2
        run.save()
    assert saved_steps(run) == [3]
    assert facts(run)["status"] == "failed"


@pytest.mark.parametrize(("loss_sum", "grad_norm"), [(NAN, ONE), (ONE, NAN)])
def test_a_number_that_is_not_finite_is_never_saved(loss_sum, grad_norm, begin):
    with begin(FloatingPointError, "at step 1") as run:
        step(run, loss_sum, grad_norm)
        run.save()
    assert saved_steps(run) == []


def test_with_a_scaler_only_the_loss_has_to_be_finite(begin, accelerator, monkeypatch):
    monkeypatch.setattr(accelerator, "scaler", SimpleNamespace(state_dict=dict))
    with begin(FloatingPointError, "the loss of process 0 is not finite at step 2", skip_nonfinite_steps=1) as run:
        step(run, ONE, INFINITE)
        run.save()
        assert run.progress.skipped_steps == 0
        assert "scaler" in run.state
        step(run, NAN, ONE)
        run.save()


# ---------------------------------------------------------------------------------------------------- memory


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory (planted)")


def search(run, limit: int) -> list[int]:
    """Answer the trials of a device on which `limit` samples fit; return the sizes that were tried."""
    sizes = []
    for trial in run.micro_batch_trials(run.state["model"]):
        sizes.append(run.sampler.rehearsed_size)
        with trial:
            if sizes[-1] > limit:
                out_of_memory()
    return sizes


def test_what_fits_is_searched_once_for_the_same_setting_on_the_same_device(begin):
    with begin(micro_batch_size="auto") as run:
        assert search(run, limit=5) == [8, 4, 6, 5]
        assert run.sampler.micro_batch_size == 5
        assert facts(run)["batch"]["micro_batch_size"] == 5
    with begin(micro_batch_size="auto") as run:
        assert run.sampler.micro_batch_size == 5
        assert search(run, limit=8) == []
    with begin(micro_batch_size=7) as run:  # asked for: nothing to search, nothing to know better
        assert run.sampler.micro_batch_size == 7
        assert search(run, limit=1) == []


@pytest.mark.parametrize("other", [{"processes": 2}, {"device": "another"}, {"asked": 7}])
def test_what_fitted_elsewhere_says_nothing_here(other, begin):
    with begin(micro_batch_size="auto") as run:
        search(run, limit=5)
    document = facts(run)
    document["memory"] |= other
    (run.path / "run.json").write_text(json.dumps(document), "utf-8")
    with begin(micro_batch_size="auto") as run:
        assert search(run, limit=3) == [8, 4, 2, 3]


@pytest.mark.parametrize(("asked", "half"), [(8, 4), (5, 2), (100, 4)])
def test_a_step_that_runs_out_of_memory_ends_the_run_and_the_next_start_takes_half(asked, half, begin):
    with begin(*STOPPED, micro_batch_size=asked) as run:
        step(run)
        run.next_window()
        out_of_memory()
    assert facts(run)["status"] == "stopped" and f"the next start takes {half}" in facts(run)["cause"]
    assert saved_steps(run) == [], "where memory ran out none is asked for"
    with begin(micro_batch_size=asked) as run:
        assert run.sampler.micro_batch_size == facts(run)["batch"]["micro_batch_size"] == half


@pytest.mark.parametrize(
    ("micro_batch_size", "words"), [(8, "give a smaller --eval_batch_size"), (1, "of 1 does not fit")]
)
def test_where_half_a_micro_batch_is_no_cure_the_run_fails(micro_batch_size, words, begin):
    with begin(MachineError, words, micro_batch_size=micro_batch_size) as run:
        step(run)
        if micro_batch_size == 1:
            run.next_window()
        out_of_memory()
    assert facts(run)["status"] == "failed" and facts(run)["memory"] is None


# ---------------------------------------------------------------------------------------------------- an early end


def test_an_error_ends_the_run_as_itself_and_is_written_down(begin):
    with begin(KeyError, "the true cause") as run:
        step(run)
        raise KeyError("the true cause")
    assert (facts(run)["status"], facts(run)["cause"]) == ("failed", "KeyError: 'the true cause'")
    assert "KeyError: 'the true cause'" in facts(run)["traceback"]
    assert saved_steps(run) == []


@pytest.mark.parametrize(
    ("is_finite", "is_saved", "steps"), [(True, False, [1]), (False, False, []), (True, True, [1])]
)
def test_a_run_that_waits_in_vain_saves_its_last_step_once_and_only_if_it_is_sound(is_finite, is_saved, steps, begin):
    with begin(*STOPPED, max_train_time=1000.0) as run:
        step(run)
        if is_saved:
            run.save()
        if not is_finite:
            torch.nn.init.constant_(run.state["model"].weight, float("nan"))
        run.next_window()
        raise Blocked
    assert facts(run)["status"] == "stopped" and "the next batch does not come" in facts(run)["cause"]
    assert saved_steps(run) == steps
    assert len(run.writer.stalls) == len(steps)


@pytest.mark.parametrize("memory", [None, {"micro_batch_size": 2}])
@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_process_that_lost_its_connection_tells_what_the_other_one_said(status, memory, begin):
    ending = STOPPED if status == "stopped" else (RuntimeError, "Connection closed")
    with begin(*ending) as run:
        step(run)
        note = {"status": status, "cause": "process 1: the true cause", "memory": memory, "is_lost_connection": False}
        (run.path / ".ended_process_1").write_text(json.dumps(note | {"time": 1e12}), "utf-8")
        raise RuntimeError("Connection closed by peer")
    assert (facts(run)["status"], facts(run)["cause"]) == (status, "process 1: the true cause")
    assert facts(run)["memory"] == memory
    assert saved_steps(run) == ([1] if status == "stopped" and memory is None else [])
