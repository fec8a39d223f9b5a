"""The same training through Accelerate: one prepare() for devices, processes, dealing of batches and DDP.

    torchrun --nproc_per_node 2 examples/parallelism/accelerate_way.py [--micro_batch_size 3]

Expected: the losses of problem.py and the collectives of ddp_accumulation.py. What is left to write: which
samples form a step, what the loss is divided by, and when to communicate. `templates/` has it in full.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import problem  # isort: skip (before torch: it sets how threads wait)
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from processes import World, run
from record import Record


# --- settings -----------------------------------------------------------------------------------------------
@dataclass
class Settings(problem.Settings):
    """
    Args:
        micro_batch_size: samples in one forward pass on one process; how many make up a step follows from it
    """

    micro_batch_size: int = 3


# --- method -------------------------------------------------------------------------------------------------
class Samples(Dataset):
    def __init__(self, data: problem.Data) -> None:
        self.data = data

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.data.batch(indices, torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.data.labels)


class DealtBatches:
    """All processes' micro-batches in the order in which Accelerate deals: batch i to process i mod N."""

    batch_size = None

    def __init__(self, settings: Settings, world: World) -> None:
        self.samplers = [problem.StepSampler(settings, rank, world.size) for rank in range(world.size)]
        self.micro_batch_size = settings.micro_batch_size

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        for shares in zip(*self.samplers, strict=True):
            pieces = (share.micro_batches(self.micro_batch_size) for share in shares)
            for batches in zip(*pieces, strict=True):
                yield from batches

    def __len__(self) -> int:
        return sum(1 for _ in self)


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data
    accelerator = Accelerator(
        cpu=world.device.type == "cpu", dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    assert accelerator.num_processes == world.size
    batches = DealtBatches(settings, world)
    loader = DataLoader(Samples(problem.make_data(settings)), batch_sampler=batches, collate_fn=tuple)
    sampler = problem.StepSampler(settings, world.rank, world.size)

    # model and optimizer
    model = problem.make_model(settings)
    optimizer = problem.make_optimizer(model.parameters(), settings)
    parallel, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    record.begin(model, optimizer)

    # loop
    for epoch in range(settings.num_train_epochs):
        loader.set_epoch(epoch)  # else Accelerate sets a lone process's sampler to the epochs it has counted
        batches.set_epoch(epoch)
        sampler.set_epoch(epoch)
        stream = iter(loader)
        for share in sampler:
            step_loss = 0
            micro_batches = share.micro_batches(settings.micro_batch_size)
            for number in range(1, len(micro_batches) + 1):
                tokens, labels = next(stream)
                with nullcontext() if number == len(micro_batches) else accelerator.no_sync(parallel):
                    loss = problem.loss_sum(parallel(tokens), labels) / share.num_samples
                    accelerator.backward(loss * world.size)
                step_loss += loss.detach()
            optimizer.step()
            record.end_step(share.indices, step_loss)
            optimizer.zero_grad()

    # result
    record.weights = accelerator.unwrap_model(parallel).state_dict()
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__)
