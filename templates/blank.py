"""Train your own model on your own data, here a made regression: replace what is marked OWN, keep the loop.

accelerate launch --config_file configs/cpu.yaml blank.py --config RECIPE.yaml
"""

from dataclasses import dataclass

from jsonargparse.typing import NonNegativeFloat, PositiveInt

from kit.command_line import start
from kit.run_directory import check_run_directory as check
from kit.settings import TrainingSettings


@dataclass(kw_only=True)
class Settings(TrainingSettings):
    """What to train. Where it runs is the profile's business (configs/)."""

    num_train_epochs: PositiveInt = 10
    """Passes over the training data."""
    learning_rate: NonNegativeFloat = 1e-2
    """Peak learning rate."""
    output_dir: str = "outputs/blank"
    """The run directory: everything that a run leaves behind."""


if __name__ == "__main__":
    settings = start(Settings, check, __doc__)  # before the slow imports: a mistake costs a second

from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch.utils.data import Dataset, default_collate

from kit.batches import EvaluationSampler, build_loader, build_sampler, seed_all
from kit.dropout import dropout_notes, exact_dropout
from kit.errors import exit_codes
from kit.evaluation import gather_in_order
from kit.model_card import TORCH
from kit.run import Run, is_finished
from kit.world import FirstOnNode, build_accelerator, on_main, share_buffers


class OwnDataset(Dataset):  # OWN, 1 of 4: items are dicts of tensors
    def __init__(self, num_samples: int, seed: int):
        self.inputs = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(seed))
        self.label = self.inputs[:, :4].sum(1).sin() + self.inputs[:, 4:].mean(1)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "label": self.label[index]}


def load_data(settings: Settings) -> tuple[Dataset, Dataset, Dataset | None]:
    """Return train, validation and test (or None)."""
    return OwnDataset(2005, seed=0), OwnDataset(301, seed=1), OwnDataset(299, seed=2)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    batch = default_collate(rows)
    return batch | {"weight": batch["weight"].float()}  # Apple's devices have no float64


class OwnModel(torch.nn.Sequential):  # OWN, 2 of 4: any torch.nn.Module
    def __init__(self):
        layers = torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Dropout(0.05), torch.nn.Linear(64, 1)
        super().__init__(*layers, torch.nn.Flatten(0))


def forward(model, batch: dict) -> torch.Tensor:
    return model(batch["inputs"]).float()


def criterion(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:  # OWN, 3 of 4: one loss for each sample
    return (output - label).square()


def score(predicted: dict[str, torch.Tensor]) -> dict[str, float]:  # OWN, 4 of 4: the metrics, beside the mean loss
    error = (predicted["output"] - predicted["label"]).abs().mean().item()
    return {"loss": predicted["loss"].double().mean().item(), "samples": len(predicted["loss"]), "mae": error}


def build_optimizer(settings: Settings, model, total_steps: int):
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    warmup_steps = round(settings.warmup_ratio * total_steps)
    return optimizer, get_scheduler(settings.lr_scheduler_type, optimizer, warmup_steps, total_steps)


def summed_loss(model, criterion, batch: dict) -> torch.Tensor:
    """Return the loss summed over the samples: a step divides once, by the samples that it has over all processes."""
    return (criterion(forward(model, batch), batch["label"]) * batch["weight"]).sum()


def train_step(accelerator, model, criterion, optimizer, schedule, batches, window, settings: Settings):
    """Make one optimizer step over a window of micro-batches. Returns this process's summed loss and the norm."""
    loss_sum = torch.zeros((), device=accelerator.device)
    # DDP averages over the processes and backward() divides by the accumulation: undo both, so that the gradient is
    # that of the mean over the whole step, however it is split.
    scale = accelerator.num_processes * accelerator.gradient_accumulation_steps / window.num_samples
    for is_last in window:
        batch = next(batches)
        with (
            nullcontext() if is_last else accelerator.no_sync(model),  # gradients are exchanged once a step
            exact_dropout(model, batch["sample_id"], settings.seed, window.step),  # the same masks for any split
        ):
            loss = summed_loss(model, criterion, batch)
            accelerator.backward(loss * scale)
        loss_sum += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
    # A gradient that is not finite: fp16's scaler skips the step by itself, skip_nonfinite_steps does where it is set.
    if accelerator.scaler or not settings.skip_nonfinite_steps or grad_norm.isfinite():
        optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            schedule.step()
    optimizer.zero_grad()
    return loss_sum, grad_norm


@torch.no_grad()
def predict(accelerator, model, criterion, loader, run: Run) -> dict[str, torch.Tensor] | None:
    """Return `output` [n, ...], `loss` [n] and `label` [n] in the order of the data; None if the run was stopped."""
    share_buffers(accelerator, model.eval())
    parts = []
    for batch in run.evaluation_batches(loader):
        output = forward(model, batch)
        kept = {"output": output, "loss": criterion(output, batch["label"])}
        kept |= {name: batch[name] for name in ("label", "sample_id", "weight")}
        parts.append({name: value.cpu() for name, value in kept.items()})
    model.train()
    return None if run.is_stopped else gather_in_order(accelerator, parts, len(loader.dataset))


def evaluate(accelerator, model, criterion, loader, run: Run) -> dict[str, float] | None:
    """Return the scores over all samples of `loader`, the same on every process; None if the run was stopped."""
    predicted = predict(accelerator, model, criterion, loader, run)
    return None if predicted is None else on_main(accelerator, score, predicted)


def export(model, folder: Path) -> None:
    """Write the weights as model.safetensors."""
    folder.mkdir(exist_ok=True)
    save_model(model, str(folder / "model.safetensors"))


def main(settings: Settings) -> None:
    # Accelerator
    check(settings)
    preparation = FirstOnNode("data")
    accelerator = build_accelerator(settings)

    # Data and model
    with preparation:  # one process of a node at a time: the others find its work cached
        train, validation, test = load_data(settings)
    seed_all(settings.seed, "model")
    model = OwnModel()
    if settings.torch_compile:
        model.compile(backend=settings.torch_compile_backend)
    splits = {"train": train, "validation": validation, "test": test}
    data = {"rows": {name: len(rows) for name, rows in splits.items() if rows}, "sha256": {}}
    notes = dropout_notes(model)
    if is_finished(accelerator, settings, data):
        return
    sampler = build_sampler(settings, len(train), accelerator.num_processes, process_index=accelerator.process_index)
    optimizer, schedule = build_optimizer(settings, model, sampler.total_steps)

    # Prepare (not the schedule: Accelerate would step it once per process)
    def evaluation_loader(rows):
        rows_sampler = EvaluationSampler(
            len(rows), settings.eval_batch_size, accelerator.num_processes, process_index=accelerator.process_index
        )
        return accelerator.prepare(build_loader(rows, rows_sampler, collate, settings))

    model, optimizer = accelerator.prepare(model, optimizer)
    train_loader = accelerator.prepare(build_loader(train, sampler, collate, settings))
    validation_loader = evaluation_loader(validation)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}

    with Run(accelerator, settings, sampler, state, data, notes) as run:
        # Resume
        run.resume()
        model.train()
        for trial in run.micro_batch_trials(model):  # micro_batch_size: auto
            with trial:
                accelerator.backward(summed_loss(model, criterion, next(iter(train_loader))))
        batches = run.batches(train_loader)

        # Loop: a resumed run enters where the stopped one left
        while True:
            if run.is_evaluation_due():
                run.note_evaluation(evaluate(accelerator, model, criterion, validation_loader, run))
            if run.is_save_due():
                run.save()
            if run.is_over():
                break
            window = run.next_window()
            loss, grad_norm = train_step(accelerator, model, criterion, optimizer, schedule, batches, window, settings)
            run.note_step(loss, grad_norm, schedule.get_last_lr()[0])

        # Export and test
        run.finish_training()
        plain_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        on_main(accelerator, export, plain_model, run.path / "final")
        run.load_best("model", plain_model)
        on_main(accelerator, export, plain_model, run.path / "best")
        if test is not None:
            scores = evaluate(accelerator, model, criterion, evaluation_loader(test), run)
            if scores is None:
                run.leave()
            run.note_split("test", scores)
        run.finish(None, TORCH)
    accelerator.end_training()


if __name__ == "__main__":
    with exit_codes():
        main(settings)
