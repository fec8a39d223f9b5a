"""ZeRO: data parallel in which no process stores what another one stores already.

    torchrun --nproc_per_node 2 examples/parallelism/zero.py --stage 1     # or 2, 3

Expected: the losses of problem.py. Stage 1 (by hand) shards the optimizer's state and sends what DDP sends;
stages 2 and 3 (fully_shard) shard gradients and parameters too: 3 gathers each layer twice, so half as much
again on the wire.
"""

from dataclasses import dataclass
from typing import Literal

import problem  # isort: skip (before torch: it sets how threads wait)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from processes import World, run
from record import Record


# --- settings -----------------------------------------------------------------------------------------------
@dataclass
class Settings(problem.Settings):
    """
    Args:
        stage: what is sharded: 1 optimizer state; 2 gradients too, parameters whole from forward to backward;
            3 parameters too, whole for the one layer at work
    """

    stage: Literal[1, 2, 3] = 1


# --- method -------------------------------------------------------------------------------------------------
class FlatShards:
    """Stage 1: parameters and gradients become views of two flat tensors; each process updates one part."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.world, self.named = world, dict(model.named_parameters())
        length = sum(p.numel() for p in self.named.values())
        length += -length % world.size  # equal parts
        self.flat, self.flat_grad = (torch.zeros(length, device=world.device) for _ in range(2))
        for p, view, grad in zip(self.named.values(), self.views(self.flat), self.views(self.flat_grad), strict=True):
            view.copy_(p.detach())
            p.data, p.grad = view, grad
        self.shard = nn.Parameter(self.flat.chunk(world.size)[world.rank])
        self.shard.grad = torch.empty_like(self.shard)

    def views(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.named.values()]
        return [part.view_as(p) for part, p in zip(flat[: sum(sizes)].split(sizes), self.named.values(), strict=True)]

    def reduce_scatter(self) -> None:
        """My part of the averaged gradient: the first half of an all-reduce."""
        dist.reduce_scatter(self.shard.grad, list(self.flat_grad.chunk(self.world.size)))
        self.shard.grad /= self.world.size

    def all_gather(self) -> None:
        """Everybody's updated part of the parameters: the second half."""
        dist.all_gather(list(self.flat.chunk(self.world.size)), self.shard.detach().clone())

    def whole_gradients(self) -> dict[str, Tensor]:
        whole = torch.empty_like(self.flat)
        dist.all_gather(list(whole.chunk(self.world.size)), self.shard.grad)
        return dict(zip(self.named, self.views(whole), strict=True))


def shard_fully(model: nn.Sequential, stage: int, world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in model:  # the unit that is gathered and freed again
        fully_shard(layer, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh)


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data
    data, sampler = problem.make_data(settings), problem.StepSampler(settings, world.rank, world.size)

    # model and optimizer
    model = problem.make_model(settings).to(world.device)
    if settings.stage == 1:
        shards = FlatShards(model, world)
        optimizer = problem.make_optimizer([shards.shard], settings)
        record.begin(model, optimizer, gradients=shards.whole_gradients)
    else:
        shard_fully(model, settings.stage, world)
        optimizer = problem.make_optimizer(model.parameters(), settings)
        record.begin(model, optimizer, whole=lambda name, tensor: tensor.full_tensor())

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)
        for share in sampler:
            tokens, labels = data.batch(share.indices, world.device)
            loss = problem.loss_sum(model(tokens), labels) / share.num_samples
            (loss * world.size).backward()  # fully_shard's hooks reduce-scatter and average in here
            if settings.stage == 1:
                shards.reduce_scatter()
            optimizer.step()
            if settings.stage == 1:
                shards.all_gather()
            record.end_step(share.indices, loss)
            shards.flat_grad.zero_() if settings.stage == 1 else optimizer.zero_grad()

    # result
    sharded = settings.stage > 1
    record.weights = {n: t.full_tensor() if sharded else t for n, t in model.state_dict().items()}
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__)
