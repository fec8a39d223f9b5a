"""DistributedDataParallel with accumulation: one round of communication a step, not one a micro-batch.

    torchrun --nproc_per_node 2 examples/parallelism/ddp_accumulation.py [--micro_batch_size 3]

Expected: the losses of problem.py, and as many collectives in a step as ddp.py has, whatever the micro-batch.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import problem  # isort: skip (before torch: it sets how threads wait)
from torch.nn.parallel import DistributedDataParallel

from processes import World, run
from record import Record


# --- settings -----------------------------------------------------------------------------------------------
@dataclass
class Settings(problem.Settings):
    """
    Args:
        micro_batch_size: samples in one forward pass on one process; how many make up a step follows from it
        bucket_cap_mb: gradients are collected into buckets of this many MiB (torch's own default: 25)
    """

    micro_batch_size: int = 3
    bucket_cap_mb: float = 1.0


# --- method -------------------------------------------------------------------------------------------------
# no_sync() has to be around forward AND backward: in forward DDP decides whether the coming backward will
# communicate. The last micro-batch communicates what has been added up. Every process has as many
# micro-batches (problem.Share).


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data
    data, sampler = problem.make_data(settings), problem.StepSampler(settings, world.rank, world.size)

    # model and optimizer
    model = problem.make_model(settings).to(world.device)
    optimizer = problem.make_optimizer(model.parameters(), settings)
    parallel = DistributedDataParallel(model, bucket_cap_mb=settings.bucket_cap_mb, gradient_as_bucket_view=True)
    record.begin(model, optimizer)

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)
        for share in sampler:
            step_loss = 0
            micro_batches = share.micro_batches(settings.micro_batch_size)
            for number, indices in enumerate(micro_batches, 1):
                with nullcontext() if number == len(micro_batches) else parallel.no_sync():
                    tokens, labels = data.batch(indices, world.device)
                    loss = problem.loss_sum(parallel(tokens), labels) / share.num_samples
                    (loss * world.size).backward()
                step_loss += loss.detach()
            optimizer.step()
            record.end_step(share.indices, step_loss)
            optimizer.zero_grad()

    # result
    record.weights = model.state_dict()
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__)
