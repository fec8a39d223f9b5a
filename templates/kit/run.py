"""The books of a training run: where it stands, what is due, what all processes agreed on, what is written."""

import math
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kit import checkpoints
from kit.batches import StepSampler, Window, seed_all
from kit.ending import explain
from kit.errors import MachineError, UserError, one_line
from kit.memory import Trial, micro_batch_trials
from kit.model_card import write_card
from kit.run_directory import check_run_directory
from kit.runlog import RunLog, short
from kit.settings import TrainingSettings, differences, numbers_in_force
from kit.share import push_after_training
from kit.stopping import EXIT_STOPPED, Stopper
from kit.world import describe_world, on_main


@dataclass
class Progress:
    """Where a run stands: what a checkpoint says in JSON beside its tensors. Steps count optimizer steps."""

    step: int = 0
    evaluated_step: int = 0
    saved_step: int = 0
    best_step: int | None = None
    best_metric: float | None = None
    best_loss: float | None = None
    evaluations_without_improvement: int = 0
    skipped_steps: int = 0


def is_finished(accelerator, settings: TrainingSettings, data: dict) -> bool:
    """Return whether output_dir holds this run, done. Raises `UserError` if it holds another one."""
    status = on_main(accelerator, check_run_directory, settings, data["sha256"])
    if status == "done":
        accelerator.print(f"{settings.output_dir} is done; to run it again: --overwrite_output_dir true")
    return status == "done"


class Run:
    """Keeps the books of a training run, the same on every process. A context; it never trains.

    `state` names what a checkpoint holds: modules, optimizers, schedules. `data` is where the data came from, with
    `rows` and `sha256` by split. Entering raises `UserError` if another run is writing into the same directory.
    """

    def __init__(
        self,
        accelerator,
        settings: TrainingSettings,
        sampler: StepSampler,
        state: dict,
        data: dict,
        notes: list[str] = (),
    ):
        self.accelerator, self.settings, self.sampler = accelerator, settings, sampler
        self.path, self.notes = Path(settings.output_dir), list(notes)
        self.state = {
            name: accelerator.unwrap_model(part, keep_torch_compile=False)
            if isinstance(part, torch.nn.Module)
            else part
            for name, part in state.items()
        }
        if accelerator.scaler is not None:
            self.state["scaler"] = accelerator.scaler
        self.progress = Progress()
        facts = {"world": describe_world(accelerator), "data": data, "batch": sampler.describe()}
        self.log = RunLog(accelerator, settings, facts)
        # What has to be the same for a checkpoint to go on from, and what may change if it is said.
        world = {name: value for name, value in facts["world"].items() if name != "summary"}
        self.identity = {"numbers": numbers_in_force(settings) | {"data": data["sha256"]}, "world": world}
        self.stop = Stopper(accelerator, settings.max_train_time, settings.ddp_timeout)
        self.writer = checkpoints.CheckpointWriter(self.path / "checkpoints", settings.checkpoints_total_limit)
        self.seconds = dict.fromkeys(("data", "steps", "evaluation"), 0.0)
        self.results: dict = {}  # of the splits
        self._window: Window | None = None  # of the step that is being made
        self._since_line = [0, 0.0]  # samples and seconds since the last training line

    # -- begin -------------------------------------------------------------------------------------------------------

    def __enter__(self):
        self.stop.__enter__()
        self._before = self.log.open()
        return self

    def resume(self) -> None:
        """Introduce the run and go on from the newest complete checkpoint, if there is one."""
        settings = self.settings
        warmup = round(settings.warmup_ratio * self.sampler.total_steps)
        peak = f"up to {settings.learning_rate:g} at step {warmup}, end at step {self.sampler.total_steps}"
        self.log.introduce(f"{settings.lr_scheduler_type}, {peak}", self.notes)
        path, notes = on_main(self.accelerator, checkpoints.choose, self.writer.folder, settings.resume_from_checkpoint)
        for note in notes:
            self.say(note)
        if path is None:
            self.say("resume     no checkpoint yet: starts at step 1")
        else:
            self._restore(path)
        if size := self._known_micro_batch_size():
            self.sampler.micro_batch_size = size
            self._announce_micro_batch(
                "fit" if settings.micro_batch_size == "auto" else "are taken: more ran out of memory"
            )
        progress = self.progress
        self.log.start(progress.step, progress.evaluated_step, self.sampler.total_steps, self.sampler.steps_per_epoch)
        self.sampler.start_step = progress.step

    def _restore(self, path: Path) -> None:
        before = checkpoints.read_document(path, "run")
        if changes := differences(before["numbers"], self.identity["numbers"]):
            raise UserError(f"resume_from_checkpoint {path} belongs to another run: {'; '.join(changes)}")
        moved = differences(before["world"], self.identity["world"])
        self.say(f"resume     {path}" + (f"; changed since: {'; '.join(moved)}" if moved else ""))
        best_step = checkpoints.read_document(path, "progress")["best_step"]
        path = on_main(self.accelerator, checkpoints.adopt, path, self.writer.folder, best_step)
        checkpoints.restore(path, self.state)
        self.progress = progress = Progress(**checkpoints.read_document(path, "progress"))
        best = path.with_name(checkpoints.folder_name(progress.best_step or 0))
        is_elsewhere = progress.best_step is not None and best != path
        if is_elsewhere and on_main(self.accelerator, checkpoints.fault_of, best):
            self.say(f"note       the best model so far (step {progress.best_step}) is gone: the next one counts")
            progress.best_step = progress.best_metric = progress.best_loss = None
        self.log.record(resumes=[*self._before.get("resumes", []), progress.step])

    def micro_batch_trials(self, model: torch.nn.Module) -> Iterator[Trial]:
        """Yield trials of one forward and backward pass, for `micro_batch_size: auto`; none if the size is known."""
        if self.settings.micro_batch_size != "auto" or self._known_micro_batch_size():
            return
        yield from micro_batch_trials(self.accelerator, model, self.sampler, self.stop)
        self.log.record(memory=self._memory_facts(self.sampler.micro_batch_size))
        self._announce_micro_batch("fit")

    def _announce_micro_batch(self, why: str) -> None:
        batch = self.sampler.describe()
        self.log.record(batch=batch)
        self.say(f"memory     micro-batches of {self.sampler.micro_batch_size} {why}: {batch['arithmetic']}")

    def _memory_facts(self, micro_batch_size: int) -> dict:
        world = self.identity["world"]
        asked = {
            "asked": self.settings.micro_batch_size,
            "processes": world["num_processes"],
            "device": world["device"],
        }
        return asked | {"micro_batch_size": micro_batch_size}

    def _known_micro_batch_size(self) -> int | None:
        """Return what an earlier start found to fit, with the same setting on as many processes of the same device."""
        known = self._before.get("memory")
        return known["micro_batch_size"] if known and known == self._memory_facts(known["micro_batch_size"]) else None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable) -> Iterator[dict]:
        """Iterate over a prepared loader. A signal or the time limit ends the waiting for a batch that never comes."""
        iterator = iter(loader)
        while True:
            began = time.perf_counter()
            try:
                batch = self.stop.next_of(iterator)
            except (ConnectionError, EOFError) as error:  # the connection to a worker, unless its own error came back
                if self.settings.num_workers == 0 or str(error).startswith("Caught "):
                    raise
                raise RuntimeError("DataLoader worker was lost: its connection broke") from error
            self.seconds["data"] += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def evaluation_batches(self, loader: Iterable) -> Iterator[dict]:
        """Iterate over a prepared loader, until all processes agree to stop (`is_stopped`)."""
        began = time.perf_counter()
        for batch in self.batches(loader):
            if self.stop.poll():
                return
            yield batch
        self.seconds["evaluation"] += time.perf_counter() - began

    @property
    def is_stopped(self) -> bool:
        """Whether all processes agreed to end before the last step."""
        return self.stop.reason is not None

    def is_evaluation_due(self) -> bool:
        """Return whether the model of the current step is to be evaluated."""
        return self.progress.evaluated_step < self.progress.step and self._is_due(self.settings.eval_steps)

    def note_evaluation(self, scores: dict[str, float] | None) -> None:
        """Record the numbers of an evaluation, and whether this model is the best so far; None if it was cut short."""
        if scores is None:
            return
        progress, settings = self.progress, self.settings
        self.log.write(progress.step, **{f"eval_{name}": value for name, value in scores.items()})
        metric, loss = scores[settings.metric_for_best_model], scores["loss"]
        is_best = not math.isnan(metric) and (
            progress.best_metric is None
            or (metric > progress.best_metric if settings.is_greater_better else metric < progress.best_metric)
            or (metric == progress.best_metric and loss < progress.best_loss)
        )
        is_best = not self.stop.on_any_process(not is_best)  # patience is a decision of all, like every other
        if is_best:
            progress.best_step, progress.best_metric, progress.best_loss = progress.step, metric, loss
        progress.evaluated_step = progress.step
        progress.evaluations_without_improvement = 0 if is_best else progress.evaluations_without_improvement + 1
        self.log.record(best_step=progress.best_step, time=self._time())
        self.log.report()

    def is_save_due(self) -> bool:
        """Return whether the current step is to be saved: when due, at the best model, and before the run ends."""
        progress = self.progress
        is_due = self._is_due(self.settings.checkpointing_steps) or progress.best_step == progress.step
        return progress.saved_step < progress.step and (is_due or self.is_over())

    def save(self) -> None:
        """Copy the state to host memory; the rest is written beside the training.

        Raises `FloatingPointError` on all processes if a loss or gradient up to now was not finite.
        """
        self.stop.raise_if_failed(self.sampler)
        self._save()

    def _save(self) -> None:
        self.progress.saved_step = self.progress.step
        if self.accelerator.is_main_process:
            documents = {"progress": asdict(self.progress), "run": self.identity}
            self.writer.save(self.progress.step, self.state, documents, self.progress.best_step)

    def is_over(self) -> bool:
        """Return whether the run ends here: last step, patience, or a reason to stop that all agreed on."""
        return self._is_complete() or self.is_stopped

    def _is_complete(self) -> bool:
        patience = self.settings.early_stopping_patience
        is_impatient = patience is not None and self.progress.evaluations_without_improvement >= patience
        return self.progress.step == self.sampler.total_steps or is_impatient

    def _is_due(self, every: int | str) -> bool:
        step, interval = self.progress.step, self.sampler.steps_per_epoch if every == "epoch" else every
        return step > 0 and (step % interval == 0 or step == self.sampler.total_steps)

    def next_window(self) -> Window:
        """Begin the next step: return its micro-batches. Seeds the global generators from (seed, step, process)."""
        self._step_began = time.perf_counter()
        self._window = self.sampler.window(self.progress.step + 1)
        seed_all(self.settings.seed, "step", self._window.step, self.accelerator.process_index)
        return self._window

    def note_step(self, loss_sum: torch.Tensor, grad_norm: torch.Tensor, learning_rate: float) -> None:
        """Record a step that was made: this process's summed loss, the gradient's norm, the new learning rate."""
        window, self._window = self._window, None
        step = self.progress.step = window.step
        settings = self.settings
        if self.accelerator.scaler is not None:
            self.stop.poll(step, loss_sum, loss_sum)  # an overflow of the gradient is the scaler's business
        elif self.progress.skipped_steps < settings.skip_nonfinite_steps and not grad_norm.isfinite():
            self.progress.skipped_steps += 1
            counted = f"{self.progress.skipped_steps} of at most {settings.skip_nonfinite_steps}"
            self.say(f"step {step} is skipped ({counted}): its gradient is not finite")
            self.log.record(skipped=[*self.log.facts.get("skipped", []), step])
            self.stop.poll()
        else:
            self.stop.poll(step, loss_sum, grad_norm)
        self.log.advance(step)
        is_logged = step % settings.logging_steps == 0 or step == self.sampler.total_steps
        mean_loss = self.accelerator.reduce(loss_sum).item() / window.num_samples if is_logged else None  # waits
        seconds = time.perf_counter() - self._step_began
        self.seconds["steps"] += seconds
        self._since_line = [self._since_line[0] + window.num_samples, self._since_line[1] + seconds]
        if is_logged:
            self.log.write(
                step,
                loss=mean_loss,
                learning_rate=learning_rate,
                grad_norm=grad_norm.item(),
                samples_per_second=self._since_line[0] / self._since_line[1],
            )
            self._since_line = [0, 0.0]

    def say(self, text: str) -> None:
        """Print a line once."""
        self.log.say(text)

    # -- end ---------------------------------------------------------------------------------------------------------

    def finish_training(self) -> None:
        """Wait until everything is written. Raises `SystemExit(75)` if the run was stopped before its end."""
        self.writer.finish()
        self.accelerator.wait_for_everyone()  # a process that ends early would make the launcher end the others
        if not self._is_complete():
            self.leave()

    def leave(self) -> None:
        """End the run before its time, after everything is saved. Raises `SystemExit(75)`."""
        self._say_stopped(self.stop.reason)
        self.accelerator.end_training()
        raise SystemExit(EXIT_STOPPED)

    def _say_stopped(self, reason: str) -> None:
        command = "the same command" + (" without --overwrite_output_dir" if self.settings.overwrite_output_dir else "")
        self.say(f"stopped    {reason}; {command} goes on from here")

    def load_best(self, name: str, module: torch.nn.Module) -> None:
        """Load the best model's part `name` of `state` into a module; where none is known, the last one stays."""
        best = self.writer.folder / checkpoints.folder_name(self.progress.best_step or 0)
        if on_main(self.accelerator, best.is_dir):
            checkpoints.load_module(best, name, module)
        else:
            self.say("there is no checkpoint of a best model: the last model is taken as the best")

    def note_split(self, split: str, scores: dict[str, float] | None, details: dict | None = None) -> None:
        """Record the numbers of the best model on a split, and how they come about (`kit.scores`); None: no labels."""
        if scores is None:
            self.say(f"{split:<10} has no labels: predictions are in {self.path / f'predictions_{split}.csv'}")
            return
        if split == "test":
            self.log.write(self.progress.step, **{f"test_{name}": value for name, value in scores.items()})
            self.results |= {f"test_{name}": value for name, value in scores.items()}
        if details is not None:
            self.results[split] = details
            shown = [
                f"{name} {short(part['value'])} (95 % interval {short(part['low'])} to {short(part['high'])})"
                for name in ("accuracy", "f1")
                if (part := details[name])["value"] is not None
            ]
            majority = f"always {details['majority']['label']}: accuracy {short(details['majority']['accuracy'])}"
            self.say(f"{split:<10} {', '.join(shown)}; {majority}")

    def finish(self, task: str | None, how_to_load: str) -> None:
        """Record the results and write the model card; `task` is the hub's name for it."""
        metric = self.settings.metric_for_best_model
        best = {"best_step": self.progress.best_step, f"best_{metric}": self.progress.best_metric}
        results = {"skipped_steps": self.progress.skipped_steps} | best | self.results
        self.log.record(results=results, time=self._time(), checkpoint_stalls_in_seconds=self.writer.stalls)
        if self.accelerator.is_main_process:
            write_card(self.path / "README.md", self.settings, results, task, how_to_load, self.log.facts)
        self.say(f"done       {self.path}: the model with the best {metric} is in best/")

    def _time(self) -> dict[str, float]:
        """Return the seconds of all starts by what they were spent on."""
        now = self.seconds | {"saving": sum(self.writer.stalls)}
        before = self._before.get("time") or {}
        return {name: round(before.get(name, 0.0) + value, 3) for name, value in now.items()}

    def __exit__(self, kind, error, trace) -> None:
        try:
            if error is None:
                self.log.close(status="done")
                if self.settings.push_to_hub and self.accelerator.is_main_process:
                    push_after_training(self.settings)  # with the report, which says that the run is done
            elif isinstance(error, SystemExit) and error.code == EXIT_STOPPED:
                self.log.close(status="stopped", cause=self.stop.reason)
            else:
                self._end_early(error)
        finally:
            self.stop.__exit__(kind, error, trace)

    def _end_early(self, error: BaseException) -> None:
        """End a run in which some process failed, cannot go on, or only lost its connection to one that did."""
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises once more for a dead worker
        size = min(self.sampler.micro_batch_size, self.sampler.largest_share) if self._window else None
        ending = explain(error, self.stop, size, self.state)
        process = f"process {index}: " if (index := self.accelerator.process_index) else ""
        memory = self._memory_facts(ending.smaller_micro_batch_size) if ending.smaller_micro_batch_size else None
        note = {"status": ending.status, "cause": process + ending.cause, "memory": memory}
        note["is_lost_connection"] = ending.is_lost_connection
        self.log.leave_note(note)
        first = self.log.first_note() or note
        is_stopped = first["status"] == "stopped"
        if is_stopped:
            if self.accelerator.is_main_process and first["memory"] is None:
                self._save_alone()
            self._say_stopped(first["cause"])
        outcome = {"status": first["status"], "cause": first["cause"]}
        if first["memory"]:
            outcome["memory"] = first["memory"]
        if not is_stopped:
            outcome["traceback"] = "".join(traceback.format_exception(error))
        self.log.close(**outcome)
        if is_stopped:
            raise SystemExit(EXIT_STOPPED) from error
        if ending.clear_error is not None:
            raise ending.clear_error from error

    def _save_alone(self) -> None:
        """Save the last complete step, where the processes cannot agree any more: all of them have the same state."""
        values = (
            value for part in self.state.values() if isinstance(part, torch.nn.Module) for value in part.parameters()
        )
        try:
            if self.progress.saved_step < self.progress.step and all(value.isfinite().all() for value in values):
                self._save()
            self.writer.finish()
        except (MachineError, RuntimeError) as broken:
            self.say(f"note       step {self.progress.step} could not be saved: {one_line(broken)}")
