"""Tensor parallel (Megatron-LM): every layer is cut, so that all processes work on all samples at once.

    torchrun --nproc_per_node 2 examples/parallelism/tensor_parallel.py [--implementation dtensor]

Expected: the losses of problem.py; by hand four all-reduces of the activations for each block and step, two
in forward and two in backward, on the way of the computation: nothing hides them, so it wants the fastest
links, inside one node.
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

# The first linear layers are cut by output (columns of Megatron's XA; the rows of torch's weight): each
# process has some of the heads or hidden units. The second are cut by input, so the pieces need not meet in
# between: their outputs add up.
COLUMN, ROW = ("attention.q", "attention.k", "attention.v", "mlp.up"), ("attention.out", "mlp.down")


# --- settings -----------------------------------------------------------------------------------------------
@dataclass
class Settings(problem.Settings):
    """
    Args:
        implementation: the cuts by hand, or torch's parallelize_module with DTensor
    """

    implementation: Literal["by_hand", "dtensor"] = "by_hand"


# --- method -------------------------------------------------------------------------------------------------
class CopyToParts(torch.autograd.Function):
    """Megatron's f: nothing in forward; in backward the parts' gradients of the common input are added up."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad


class SumOfParts(torch.autograd.Function):
    """Megatron's g: adds up the parts' outputs in forward; nothing in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class RowLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        total = SumOfParts.apply(nn.functional.linear(x, self.weight))
        return total + self.bias  # once, and not once a process


def cut_by_hand(model: nn.Sequential, world: World) -> Callable[[str, Tensor], Tensor]:
    """Leaves this process its part of each block. Returns what makes a parameter or gradient whole again."""
    dimensions = {}  # in which each parameter is cut; the others are whole and equal everywhere
    for name, module in model.named_modules():
        if name.endswith(("attention", "mlp")):
            module.register_forward_pre_hook(lambda module, inputs: CopyToParts.apply(inputs[0]))
        if not name.endswith(COLUMN + ROW):
            continue
        if name.endswith(ROW):
            module.__class__ = RowLinear
        for key, parameter in list(module.named_parameters()):
            if name.endswith(COLUMN) or key == "weight":
                dimensions[f"{name}.{key}"] = dimension = 0 if name.endswith(COLUMN) else 1
                part = parameter.detach().chunk(world.size, dimension)[world.rank]
                setattr(module, key, nn.Parameter(part.clone()))

    def whole(name: str, tensor: Tensor) -> Tensor:
        if name not in dimensions:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(world.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dimensions[name])

    return whole


def cut_with_dtensor(model: nn.Sequential, world: World) -> Callable[[str, Tensor], Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(world.device.type, (world.size,))
    plan = {name: ColwiseParallel() for name in COLUMN} | {name: RowwiseParallel() for name in ROW}
    for block in model[1:-1]:
        parallelize_module(block, mesh, plan, src_data_rank=None)  # None: all have the weights, send nothing
    return lambda name, tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data: every process has all samples of the step
    data, sampler = problem.make_data(settings), problem.StepSampler(settings)

    # model and optimizer
    if settings.num_attention_heads % world.size:
        raise UserError(f"--num_attention_heads {settings.num_attention_heads}: not a multiple of {world.size}")
    model = problem.make_model(settings).to(world.device)
    whole = {"by_hand": cut_by_hand, "dtensor": cut_with_dtensor}[settings.implementation](model, world)
    optimizer = problem.make_optimizer(model.parameters(), settings)
    record.begin(model, optimizer, whole)

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)
        for share in sampler:
            tokens, labels = data.batch(share.indices, world.device)
            loss = problem.loss_sum(model(tokens), labels) / share.num_samples
            loss.backward()
            optimizer.step()
            record.end_step(share.indices, loss / world.size)  # every process has the whole loss
            optimizer.zero_grad()

    # result
    record.weights = {name: whole(name, tensor) for name, tensor in model.state_dict().items()}
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__, at_least=2)
