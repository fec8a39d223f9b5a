"""Pipeline parallel: a stage of the layers in each process, and one micro-batch after the other through all.

    torchrun --nproc_per_node 2 examples/parallelism/pipeline_parallel.py [--schedule 1f1b]

Expected: the losses of problem.py with any number of stages and micro-batches; of p stages and m
micro-batches a stage stands idle for (p-1)/(m+p-1) of the step. 1F1B idles as long, but keeps p micro-batches
in memory where GPipe keeps m.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import problem  # isort: skip (before torch: it sets how threads wait)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from processes import UserError, World, run
from record import Record


# --- settings -----------------------------------------------------------------------------------------------
@dataclass
class Settings(problem.Settings):
    """
    Args:
        num_micro_batches: pieces that a step is cut into (chunks)
        schedule: GPipe with send and recv by hand, or torch.distributed.pipelining's GPipe or 1F1B
    """

    num_micro_batches: int = 4
    schedule: Literal["by_hand", "gpipe", "1f1b"] = "by_hand"


# --- method -------------------------------------------------------------------------------------------------
def gpipe(
    stage: nn.Module, inputs: list[Tensor], targets: list[Tensor], loss: Callable, size: tuple, world: World
) -> Tensor:
    """One step: all forward passes (fill), all backward passes (drain). Returns the loss (last stage).

    inputs, targets: of each micro-batch (the first stage reads these, the last those). size: of one sample's
    activations between stages. Micro-batches may differ in length: every process knows them all.
    """
    before, after = world.rank - 1, world.rank + 1
    first, last = before < 0, after == world.size
    done, sends, total = [], [], torch.zeros((), device=world.device)
    for x, target in zip(inputs, targets, strict=True):
        if not first:
            x = torch.empty(len(x), *size, device=world.device)
            dist.recv(x, before)
            x.requires_grad_()
        y = stage(x)
        if last:
            y = loss(y, target)
            total += y.detach()
        else:
            sends.append(dist.isend(y.detach(), after))  # does not wait: the next micro-batch is to come
        done.append((x, y))
    for x, y in reversed(done):
        grad = None if last else torch.empty_like(y)
        if not last:
            dist.recv(grad, after)
        y.backward(grad)
        if not first:
            sends.append(dist.isend(x.grad, before))
    for send in sends:
        send.wait()
    return total


def torch_schedule(kind: str, stage: nn.Module, num_micro_batches: int, loss: Callable, world: World):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    if kind == "1f1b" and num_micro_batches < world.size:
        raise UserError(f"--num_micro_batches {num_micro_batches}: 1f1b needs one for each of the {world.size} stages")
    stage = PipelineStage(stage, world.rank, world.size, world.device)
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind]
    return schedule(stage, num_micro_batches, loss, scale_grads=False)  # our loss is a sum, already divided


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data: every process has the whole step; num_samples of the step under way is what the loss is divided by
    data, sampler, num_samples = problem.make_data(settings), problem.StepSampler(settings), 0
    pieces = settings.num_micro_batches

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return problem.loss_sum(logits, labels) / num_samples

    # model and optimizer
    model = problem.make_model(settings)
    mine = problem.cut(len(model), world.size)[world.rank]
    stage = model[mine].to(world.device)  # the layers keep their names
    optimizer = problem.make_optimizer(stage.parameters(), settings)
    by_hand = settings.schedule == "by_hand"
    schedule = None if by_hand else torch_schedule(settings.schedule, stage, pieces, loss, world)
    # torch's stages want micro-batches of one and the same length in all steps: fill up with weight 0
    length = -(-min(settings.global_batch_size, settings.num_samples) // pieces) * pieces
    size = (problem.SEQUENCE_LENGTH, settings.hidden_size)
    record.begin(stage, optimizer)

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)
        for share in sampler:
            num_samples = share.num_samples
            indices = share.indices + [problem.FILLER] * (0 if by_hand else length - num_samples)
            tokens, labels = data.batch(indices, world.device)
            if by_hand:
                # 10 samples in 4 pieces: 3, 3, 2, 2; 3 samples in 4 pieces: 1, 1, 1
                inputs, targets = (whole.tensor_split(min(pieces, num_samples)) for whole in (tokens, labels))
                step_loss = gpipe(stage, inputs, targets, loss, size, world)
            else:
                losses = []
                schedule.step(*[tokens] * (world.rank == 0), target=labels, losses=losses)
                step_loss = sum(losses, torch.zeros((), device=world.device))
            optimizer.step()
            record.end_step(indices if world.rank == 0 else [], step_loss)  # all have the same samples
            optimizer.zero_grad()

    # result
    parts = [None] * world.size
    dist.all_gather_object(parts, {name: tensor.cpu() for name, tensor in stage.state_dict().items()})
    record.weights = {name: tensor for part in parts for name, tensor in part.items()}
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__, at_least=2)
