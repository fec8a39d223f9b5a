"""The settings that every training has, and which of them identify a run."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

# Settings that may differ between two starts of one run: they move no number beyond rounding (the last: none before
# the step that could not be counted).
NEUTRAL = frozenset(
    "output_dir overwrite_output_dir resume_from_checkpoint micro_batch_size eval_batch_size num_workers"
    " dataloader_timeout logging_steps checkpointing_steps checkpoints_total_limit max_train_time ddp_timeout"
    " find_unused_parameters gradient_checkpointing torch_compile torch_compile_backend skip_nonfinite_steps"
    " report_to push_to_hub hub_model_id hub_private_repo".split()
)


@dataclass(kw_only=True)
class TrainingSettings:
    """What every training has. A template inherits these and adds its own."""

    output_dir: str = "outputs/run"
    """The run directory: everything that a run leaves behind."""
    overwrite_output_dir: bool = False
    """Delete the run in output_dir and start anew."""
    resume_from_checkpoint: str = "auto"
    """Where to go on: auto (the newest complete checkpoint of this run), a path, or none."""
    num_train_epochs: PositiveInt = 3
    """Passes over the training data."""
    max_train_steps: PositiveInt | None = None
    """Total number of optimizer steps. Overrides num_train_epochs."""
    global_batch_size: PositiveInt = 32
    """Samples in one optimizer step, over all processes. The accumulation is derived from it."""
    micro_batch_size: PositiveInt | Literal["auto"] = 16
    """Samples in one forward pass on one process: as many as fit into memory. auto finds the number."""
    eval_batch_size: PositiveInt = 32
    """Samples in one forward pass of an evaluation, on one process."""
    learning_rate: NonNegativeFloat = 5e-5
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """For matrices only, not for biases and norms."""
    warmup_ratio: ClosedUnitInterval = 0.1
    """Share of all steps in which the learning rate rises from 0."""
    lr_scheduler_type: Literal["linear", "cosine", "constant_with_warmup", "constant"] = "linear"
    """Course of the learning rate after the warm-up, counted in optimizer steps."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip gradients to this norm, once per step. 0: do not clip."""
    seed: NonNegativeInt = 42
    """Decides the order of samples, new layers, dropout, augmentation and a carved split."""
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Unset: what the profile says."""
    torch_compile: bool = False
    """Compile the model."""
    torch_compile_backend: str = "inductor"
    """Backend of torch.compile."""
    find_unused_parameters: bool = False
    """Let DDP look for parameters that a forward pass did not use, where the model has some. Costs time."""
    num_workers: NonNegativeInt | None = 0
    """Worker processes that load data, for each training process. null: one for each spare core."""
    dataloader_timeout: NonNegativeFloat = 0.0
    """Seconds to wait for a batch from a worker before the run fails. 0: wait without a limit."""
    logging_steps: PositiveInt = 10
    """Write a training line every N steps."""
    eval_steps: PositiveInt | Literal["epoch"] = "epoch"
    """Evaluate every N steps, or at the end of each epoch. Always after the last step."""
    metric_for_best_model: Literal["loss"] = "loss"
    """The evaluation's number that decides which model is the best."""
    greater_is_better: bool | None = None
    """Direction of that metric. Unset: less is better for a loss, more for anything else."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after N evaluations in a row without improvement."""
    checkpointing_steps: PositiveInt | Literal["epoch"] = "epoch"
    """Save every N steps, or at the end of each epoch. Always after the last step and with each new best model."""
    checkpoints_total_limit: PositiveInt | None = 2
    """Keep at most N checkpoints. The newest and the best always stay."""
    skip_nonfinite_steps: NonNegativeInt = 0
    """Skip up to N steps whose gradient is not finite instead of failing. Waits for the device at each step."""
    report_to: list[str] | None = None
    """Trackers, as '[tensorboard, mlflow]'. Also wandb, trackio, comet_ml, aim, clearml, dvclive, swanlab."""
    max_train_time: PositiveFloat | None = None
    """Seconds after which this start of the run saves and stops."""
    push_to_hub: bool = False
    """Upload the best model, the card and the report to the hub after training."""
    hub_model_id: str | None = None
    """Name of the repository, as OWNER/NAME. Unset: the name of output_dir, in your own namespace."""
    hub_private_repo: bool = True
    """Make the repository private. A public one is refused unless this is false."""
    ddp_timeout: PositiveFloat = 600.0
    """Seconds that a process waits for the others before it fails."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, str) and (value == "~" or value.startswith("~/")):  # no shell expands it in a recipe
                setattr(self, name, str(Path(value).expanduser()))

    @property
    def is_greater_better(self) -> bool:
        """The direction of the metric that decides on the best model."""
        is_loss = self.metric_for_best_model.endswith("loss")
        return not is_loss if self.greater_is_better is None else self.greater_is_better


def save_settings(settings, path: Path) -> None:
    """Write the settings in force as YAML that `--config` reads again."""
    import yaml

    header = "# The settings in force of this run; read again with --config.\n"
    path.write_text(header + yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False, allow_unicode=True), "utf-8")


def numbers_in_force(settings) -> dict:
    """Return the settings that change the numbers of a run: two starts of one run must agree on them."""
    return {name: value for name, value in dataclasses.asdict(settings).items() if name not in NEUTRAL}


def differences(before: dict, now: dict) -> list[str]:
    """Return one text for each name whose value differs: 'seed 0 -> 1'."""
    names = [*before, *(name for name in now if name not in before)]
    return [f"{name} {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]
