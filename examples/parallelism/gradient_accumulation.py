"""Gradient accumulation: a step of any size on one device that holds only a micro-batch.

    python examples/parallelism/gradient_accumulation.py --global_batch_size 16 --micro_batch_size 5

Expected: the losses of problem.py, digit for digit as printed, with the activations of 5 samples in memory,
not of 32.
"""

from dataclasses import dataclass

import problem  # isort: skip (before torch: it sets how threads wait)
from processes import World, run
from record import Record


# --- settings -----------------------------------------------------------------------------------------------
@dataclass
class Settings(problem.Settings):
    """
    Args:
        micro_batch_size: samples in one forward pass; how many make up a step follows from it
    """

    micro_batch_size: int = 5


# --- method -------------------------------------------------------------------------------------------------
# backward() adds to .grad: call it for each micro-batch and step once. The micro-batches differ in size (5,
# 5, 5, 1), so the mean of their means is not the mean over the samples. A sum, divided once by the samples of
# the whole step, is.


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data
    data, sampler = problem.make_data(settings), problem.StepSampler(settings)

    # model and optimizer
    model = problem.make_model(settings).to(world.device)
    optimizer = problem.make_optimizer(model.parameters(), settings)
    record.begin(model, optimizer)

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)
        for share in sampler:
            step_loss = 0
            for indices in share.micro_batches(settings.micro_batch_size):
                tokens, labels = data.batch(indices, world.device)
                loss = problem.loss_sum(model(tokens), labels) / share.num_samples
                loss.backward()
                step_loss += loss.detach()
            optimizer.step()
            record.end_step(share.indices, step_loss)
            optimizer.zero_grad()

    # result
    record.weights = model.state_dict()
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__, most_processes=1)
