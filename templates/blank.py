"""Train your own model on your own data, here a made regression: replace what is marked OWN, keep the loop.

accelerate launch --config_file configs/cpu.yaml blank.py --config RECIPE.yaml
"""

from kit.stopping import Stopper, catch_signals

if __name__ == "__main__":
    catch_signals()  # before the slow imports below: from here on a signal ends the run in good order

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch.utils.data import Dataset, default_collate

from kit import checkpoints
from kit.batches import EvaluationSampler, StepSampler, build_loader, seed_all
from kit.errors import exit_codes
from kit.evaluation import Progress, gather_in_order, is_due, note_evaluation
from kit.runlog import RunDirectory, check_run_directory as check
from kit.settings import parse_settings
from kit.world import build_accelerator, describe_world, share_buffers


@dataclass
class Settings:  # what to train; where it runs is the profile's business (configs/)
    output_dir: str = "outputs/blank"
    overwrite_output_dir: bool = False
    resume_from_checkpoint: str = "auto"
    num_train_epochs: PositiveInt = 10
    global_batch_size: PositiveInt = 32  # samples in one optimizer step, over all processes
    micro_batch_size: PositiveInt = 16  # samples in one forward pass on one process
    learning_rate: NonNegativeFloat = 1e-2
    max_grad_norm: NonNegativeFloat = 1.0
    seed: NonNegativeInt = 42
    num_workers: NonNegativeInt = 0
    logging_steps: PositiveInt = 10
    eval_steps: PositiveInt = 100
    checkpointing_steps: PositiveInt = 100


class OwnDataset(Dataset):  # OWN, 1 of 3: items are dicts of tensors
    def __init__(self, num_samples: int, seed: int):
        self.inputs = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(seed))
        self.label = self.inputs[:, :4].sum(1).sin() + self.inputs[:, 4:].mean(1)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "label": self.label[index]}


def load_data(settings: Settings) -> tuple[Dataset, Dataset]:
    return OwnDataset(2005, seed=0), OwnDataset(301, seed=1)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    batch = default_collate(rows)
    return batch | {"weight": batch["weight"].float()}  # Apple's devices have no float64


class OwnModel(torch.nn.Sequential):  # OWN, 2 of 3: any torch.nn.Module
    def __init__(self):
        layers = torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Dropout(0.05), torch.nn.Linear(64, 1)
        super().__init__(*layers, torch.nn.Flatten(0))


def forward(model, batch: dict) -> torch.Tensor:
    return model(batch["inputs"]).float()


def weighted_loss(output, label, weight) -> torch.Tensor:  # OWN, 3 of 3: summed, the loop divides by the step's samples
    return ((output - label).square() * weight).sum()


def build_optimizer(settings: Settings, model, total_steps: int):
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)


@torch.no_grad()
def predict(accelerator, model, loader, num_samples: int, stop: Stopper) -> dict[str, torch.Tensor] | None:
    """Return `output` and `label` in the order of the data; None when all agreed to stop."""
    share_buffers(accelerator, model.eval())
    parts = []
    for batch in loader:
        if stop.poll():
            break
        kept = {"output": forward(model, batch)} | {name: batch[name] for name in ("label", "sample_id", "weight")}
        parts.append({name: value.cpu() for name, value in kept.items()})
    model.train()
    return None if stop.reason else gather_in_order(accelerator, parts, num_samples)


def main(settings: Settings) -> None:
    # Accelerator
    check(settings)
    accelerator = build_accelerator(mixed_precision=None, ddp_timeout=600.0)
    num_processes, process_index = accelerator.num_processes, accelerator.process_index
    # Data
    train, validation = load_data(settings)
    source = {"rows": {"train": len(train), "validation": len(validation)}, "sha256": {}}
    total_steps = settings.num_train_epochs * -(-len(train) // settings.global_batch_size)
    sizes = len(train), settings.global_batch_size, settings.micro_batch_size
    sampler = StepSampler(*sizes, num_processes, settings.seed, total_steps)
    evaluation_sampler = EvaluationSampler(len(validation), settings.micro_batch_size, num_processes)
    # Model, optimizer, schedule
    seed_all(settings.seed, "model")
    model = OwnModel()
    optimizer, schedule = build_optimizer(settings, model, total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)  # not the schedule: it would step once per process
    train_loader = accelerator.prepare(build_loader(train, sampler, collate, settings.num_workers, settings.seed))
    validation_loader = accelerator.prepare(build_loader(validation, evaluation_sampler, collate, 0, settings.seed))
    plain_model = accelerator.unwrap_model(model)
    schedules = {"schedule": schedule} | ({"scaler": accelerator.scaler} if accelerator.scaler else {})
    state = {"modules": {"model": plain_model}, "optimizers": {"optimizer": optimizer}, "schedules": schedules}
    facts = {"world": describe_world(accelerator), "data": source, "batch": sampler.describe()}
    with Stopper(accelerator, None, timeout=600.0) as stop, RunDirectory(accelerator, settings, facts) as run:
        # Resume
        run.introduce(f"cosine from {settings.learning_rate:g}, end at step {total_steps}", [])
        progress = Progress()
        if checkpoint := run.choose_checkpoint():
            checkpoints.restore(checkpoint, **state)
            progress = run.read_progress(checkpoint)
        run.start_log(progress, total_steps, sampler.steps_per_epoch)
        writer = checkpoints.CheckpointWriter(run.path / "checkpoints", total_limit=2)
        sampler.start_step = progress.step
        batches = iter(train_loader)
        num_samples, seconds = 0, 0.0  # since the last training line
        # Loop
        while True:
            # Between two steps: evaluate, save, stop. A resumed run enters here, where the stopped one left.
            step = progress.step
            if progress.evaluated_step < step and is_due(step, settings.eval_steps, sampler):
                predicted = predict(accelerator, model, validation_loader, len(validation), stop)
                if predicted is not None:
                    total = weighted_loss(predicted["output"], predicted["label"], torch.ones(len(validation))).item()
                    run.log(step, eval_loss=total / len(validation), eval_samples=len(predicted["label"]))
                    note_evaluation(progress, total / len(validation), greater_is_better=False)
            is_over = step == total_steps
            is_save_due = is_due(step, settings.checkpointing_steps, sampler) or progress.best_step == step
            if progress.saved_step < step and (is_save_due or is_over or stop.reason):
                stop.raise_if_failed(sampler)  # a checkpoint never holds numbers that are not finite
                progress.saved_step = step
                if accelerator.is_main_process:
                    documents = {"progress": asdict(progress), "run": run.identity}
                    writer.save(step, state, documents, progress.best_step)
            if is_over or stop.reason:
                break
            # One step
            began = time.perf_counter()
            step += 1
            seed_all(settings.seed, "step", step, process_index)  # dropout: nothing to save, nothing to restore
            window = sampler.window(step)
            loss_sum = torch.zeros((), device=accelerator.device)
            # DDP averages over the processes and backward() divides by the accumulation: undo both, so that the
            # gradient is that of the mean over the whole step, however it is split.
            scale = num_processes * accelerator.gradient_accumulation_steps / window.num_samples
            for micro_batch in range(window.num_micro_batches):
                batch = next(batches)
                is_last = micro_batch == window.num_micro_batches - 1
                with nullcontext() if is_last else accelerator.no_sync(model):  # one exchange of gradients a step
                    loss = weighted_loss(forward(model, batch), batch["label"], batch["weight"])
                    accelerator.backward(loss * scale)
                    loss_sum += loss.detach()
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
            optimizer.step()
            if not accelerator.optimizer_step_was_skipped:  # fp16 skips a step whose scaled gradient overflows
                schedule.step()
            stop.poll(step, loss_sum, grad_norm if accelerator.scaler is None else loss_sum)
            optimizer.zero_grad()
            progress.step = step
            run.advance(step)
            is_logged = step % settings.logging_steps == 0 or step == total_steps
            mean_loss = accelerator.reduce(loss_sum).item() / window.num_samples if is_logged else None  # waits
            num_samples, seconds = num_samples + window.num_samples, seconds + time.perf_counter() - began
            if is_logged:
                numbers = {"loss": mean_loss, "learning_rate": schedule.get_last_lr()[0], "grad_norm": grad_norm.item()}
                run.log(step, **numbers, samples_per_second=num_samples / seconds)
                num_samples, seconds = 0, 0.0
        # Final evaluation and export
        writer.finish()
        accelerator.wait_for_everyone()  # a process that ends early would make the launcher end the others
        if not is_over:
            run.stop(stop.reason)
        for name, saved_step in {"final": step, "best": progress.best_step or step}.items():
            checkpoints.load_module(writer.folder / checkpoints.folder_name(saved_step), "model", plain_model)
            accelerator.save_model(plain_model, run.path / name)
        run.record(results={"best_step": progress.best_step, "best_loss": progress.best_metric})
        run.say(f"done       {run.path}: the model with the best loss is in best/")
    accelerator.end_training()


if __name__ == "__main__":
    with exit_codes():
        main(parse_settings(Settings, __doc__))
