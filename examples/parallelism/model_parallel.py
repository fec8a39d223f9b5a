"""Model parallel: the layers lie on several devices, one after the other; so do their working hours.

    python examples/parallelism/model_parallel.py [--devices '["cpu", "cpu", "cpu"]']

Expected: the losses of problem.py; of p devices each stands idle for about (p-1)/p of the step (printed at
the end). It makes a model fit that is too large for one device and makes nothing faster; pipeline_parallel.py
fills the gaps.
"""

import time
from dataclasses import dataclass
from itertools import pairwise

import problem  # isort: skip (before torch: it sets how threads wait)
import torch
from torch import Tensor, nn

from processes import UserError, World, run
from record import Record


# --- settings -----------------------------------------------------------------------------------------------
@dataclass
class Settings(problem.Settings):
    """
    Args:
        devices: one stage on each; all GPUs where there are two or more, else two stages on the CPU
    """

    devices: list[str] | None = None


# --- method -------------------------------------------------------------------------------------------------
class Stages(nn.Module):
    """Carries activations from device to device, and notes which stage takes over when."""

    def __init__(self, stages: list[nn.Module], devices: list[torch.device]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage.to(device) for stage, device in zip(stages, devices, strict=True))
        self.devices = devices
        self.handovers: list[tuple[float, int | None]] = []  # (time, stage that works from now on)

    def hand_over(self, stage: int | None) -> None:
        if self.devices[0].type == "cuda":
            torch.cuda.synchronize()  # else the clock would time the launching of kernels
        self.handovers.append((time.perf_counter(), stage))

    def forward(self, x: Tensor) -> Tensor:
        for index, (stage, device) in enumerate(zip(self.stages, self.devices, strict=True)):
            x = x.to(device)  # autograd carries the gradient back the same way
            self.hand_over(index)
            x = stage(x)
            # the gradient of a stage's output arrives when backward enters the stage
            x.register_hook(lambda grad, index=index: self.hand_over(index))
        return x

    def idle_shares(self) -> list[float]:
        """For each stage the part of the recorded time in which it did not work."""
        busy = [0.0] * len(self.devices)
        for (start, stage), (end, _) in pairwise(self.handovers):
            if stage is not None:
                busy[stage] += end - start
        return [1 - time_busy / sum(busy) for time_busy in busy]


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data
    data, sampler = problem.make_data(settings), problem.StepSampler(settings)

    # model and optimizer
    devices = [torch.device(name) for name in settings.devices or []]
    if not devices and torch.cuda.device_count() > 1:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    elif not devices:
        devices = [torch.device("cpu")] * 2
        record.notes.append("No two GPUs: both stages ran on the CPU.")
    if any(device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count() for device in devices):
        raise UserError(f"--devices {settings.devices}: {torch.cuda.device_count()} GPU(s) found")
    model = problem.make_model(settings)
    stages = Stages([model[layers] for layers in problem.cut(len(model), len(devices))], devices)
    optimizer = problem.make_optimizer(model.parameters(), settings)
    record.begin(model, optimizer)

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)
        for share in sampler:
            tokens, labels = data.batch(share.indices, devices[0])
            loss = problem.loss_sum(stages(tokens), labels.to(devices[-1])) / share.num_samples
            loss.backward()
            stages.hand_over(None)
            optimizer.step()
            record.end_step(share.indices, loss)
            optimizer.zero_grad()

    # result
    idle = ", ".join(f"{share:.0%}" for share in stages.idle_shares())
    record.notes.append(
        f"Of forward and backward the stages idled for {idle}; equal ones for {1 - 1 / len(devices):.0%}."
    )
    record.weights = model.state_dict()
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__, most_processes=1)
