"""Evaluation: every sample predicted exactly once, put back into order; which model is the best so far."""

import math
from dataclasses import dataclass

import torch


@dataclass
class Progress:
    """Where a run stands: what a checkpoint says in JSON beside its tensors. Steps count optimizer steps."""

    step: int = 0
    evaluated_step: int = 0
    saved_step: int = 0
    best_step: int | None = None
    best_metric: float | None = None
    evaluations_without_improvement: int = 0
    skipped_steps: int = 0
    micro_batch_size: int | None = None  # what `auto` found to fit


def note_evaluation(progress: Progress, metric: float, greater_is_better: bool) -> bool:
    """Record the evaluation of the current step; return whether it is the best so far. NaN never is."""
    progress.evaluated_step = progress.step
    best = progress.best_metric
    is_best = not math.isnan(metric) and (best is None or (metric > best if greater_is_better else metric < best))
    if is_best:
        progress.best_step, progress.best_metric = progress.step, metric
    progress.evaluations_without_improvement = 0 if is_best else progress.evaluations_without_improvement + 1
    return is_best


def is_due(step: int, every: int | str, sampler) -> bool:
    """Return whether something is due after a step: every N steps or at each 'epoch' end, and always at the last."""
    interval = sampler.steps_per_epoch if every == "epoch" else every
    return step > 0 and (step % interval == 0 or step == sampler.total_steps)


def gather_in_order(accelerator, parts: list[dict[str, torch.Tensor]], num_samples: int) -> dict[str, torch.Tensor]:
    """Return the values of all processes in the order of the data set, on the CPU, on every process.

    `parts` holds this process's batches: `sample_id` [n] int64, `weight` [n] (0 marks a filler) and any other
    tensors [n, ...] of the same trailing shape everywhere. Each sample must have been seen exactly once.
    """
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if accelerator.num_processes > 1:
        # A collective needs the same shape everywhere: pad with weight 0.
        values = {name: value.to(accelerator.device) for name, value in values.items()}
        values = {name: accelerator.pad_across_processes(value, dim=0) for name, value in values.items()}
        values = accelerator.gather(values)
    values = {name: value.cpu() for name, value in values.items()}
    is_real = values.pop("weight") > 0
    ids = values.pop("sample_id")[is_real]
    order = ids.argsort()
    assert torch.equal(ids[order], torch.arange(num_samples)), "a sample was missed or predicted twice"
    return {name: value[is_real][order] for name, value in values.items()}
