"""DistributedDataParallel: gradients travel in buckets while backward still computes the earlier layers'.

    torchrun --nproc_per_node 2 examples/parallelism/ddp.py [--bucket_cap_mb 0.2] [--comm_hook fp16]

Expected: the losses of problem.py with one collective for each bucket; half the bytes with fp16 or bf16
compression, and then gradients that agree to about three digits.
"""

import time
from dataclasses import dataclass
from typing import Literal

import problem  # isort: skip (before torch: it sets how threads wait)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from processes import World, run
from record import Record

HOOKS = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


# --- settings -----------------------------------------------------------------------------------------------
@dataclass
class Settings(problem.Settings):
    """
    Args:
        bucket_cap_mb: gradients are collected into buckets of this many MiB (torch's own default: 25)
        comm_hook: what the buckets are compressed to on the wire
    """

    bucket_cap_mb: float = 1.0
    comm_hook: Literal["none", "fp16", "bf16"] = "none"


# --- method -------------------------------------------------------------------------------------------------
class Buckets:
    """The communication hook: called when a bucket's last gradient is there, in the middle of backward."""

    def __init__(self, comm_hook: str) -> None:
        self.hook = HOOKS[comm_hook]
        self.sent: list[float] = []  # when each bucket of this step left

    def send(self, state: None, bucket):
        self.sent.append(time.perf_counter())
        # A future: backward goes on meanwhile. The hook divides by the number of processes.
        return self.hook(None, bucket)


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data
    data, sampler = problem.make_data(settings), problem.StepSampler(settings, world.rank, world.size)

    # model and optimizer
    model = problem.make_model(settings).to(world.device)
    optimizer = problem.make_optimizer(model.parameters(), settings)
    # gradient_as_bucket_view: .grad lies inside the bucket, so that gradients are not in memory twice
    parallel = DistributedDataParallel(model, bucket_cap_mb=settings.bucket_cap_mb, gradient_as_bucket_view=True)
    buckets = Buckets(settings.comm_hook)
    parallel.register_comm_hook(None, buckets.send)
    record.begin(model, optimizer)

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)
        for share in sampler:
            tokens, labels = data.batch(share.indices, world.device)
            loss = problem.loss_sum(parallel(tokens), labels) / share.num_samples
            buckets.sent, start = [], time.perf_counter()
            (loss * world.size).backward()
            duration = time.perf_counter() - start
            optimizer.step()
            record.end_step(share.indices, loss)
            optimizer.zero_grad()

    # result
    left = ", ".join(f"{(sent - start) / duration:.0%}" for sent in buckets.sent)
    record.notes.append(f"In the last step {len(buckets.sent)} bucket(s) left after {left} of the backward pass.")
    record.weights = model.state_dict()  # of the model inside: no "module." in front of the names
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__)
