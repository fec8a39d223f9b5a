"""Distributed data parallel by hand: equal models, different samples, gradients averaged after backward.

    torchrun --nproc_per_node 2 examples/parallelism/ddp_from_scratch.py

Expected: the losses of problem.py on any number of processes; one collective for each parameter and step.
"""

import problem  # isort: skip (before torch: it sets how threads wait)
import torch
import torch.distributed as dist
from torch import nn

from processes import World, run
from record import Record

# --- settings -----------------------------------------------------------------------------------------------
Settings = problem.Settings


# --- method -------------------------------------------------------------------------------------------------
def check_equal_start(model: nn.Module, world: World) -> None:
    """Equal weights that get equal gradients stay equal. (DDP does not check, it overwrites.)"""
    for name, parameter in model.named_parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, src=0)
        if not torch.equal(first, parameter):
            raise RuntimeError(f"process {world.rank} does not start with process 0's {name}: was the seed set?")


def average_gradients(model: nn.Module, world: World) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world.size


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data
    data, sampler = problem.make_data(settings), problem.StepSampler(settings, world.rank, world.size)

    # model and optimizer
    model = problem.make_model(settings).to(world.device)
    check_equal_start(model, world)
    optimizer = problem.make_optimizer(model.parameters(), settings)
    record.begin(model, optimizer)

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        for share in sampler:
            tokens, labels = data.batch(share.indices, world.device)
            loss = problem.loss_sum(model(tokens), labels) / share.num_samples
            (loss * world.size).backward()  # undoes the division in average_gradients: the sum is already divided
            average_gradients(model, world)
            optimizer.step()
            record.end_step(share.indices, loss)
            optimizer.zero_grad()

    # result
    record.weights = model.state_dict()
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__)
