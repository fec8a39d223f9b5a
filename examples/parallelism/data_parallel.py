"""DataParallel: one process, a thread for each device; the model is copied out anew in every step.

    python examples/parallelism/data_parallel.py [--devices '["cpu", "cpu", "cpu"]']

Expected: the losses of problem.py. On a CPU no gain: the replicas share its cores, and the interpreter runs
one thread at a time. On GPUs device 0 carries the outputs and the optimizer besides: PyTorch recommends
ddp.py, also on one machine.
"""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass

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
        devices: one replica on each; all GPUs where there are two or more, else two replicas on the CPU
    """

    devices: list[str] | None = None


# --- method: four moves in each step ------------------------------------------------------------------------
def replicate(model: nn.Module, replicas: list[nn.Module]) -> None:
    with torch.no_grad():
        for replica in replicas:
            for source, target in zip(model.parameters(), replica.parameters(), strict=True):
                target.copy_(source)
                target.grad = None


def scatter(tensor: Tensor, devices: list[torch.device]) -> list[Tensor]:
    """7 samples on 3 devices: chunks of 3, 3 and 1. 4 samples: 2 and 2, and the third device rests."""
    return [chunk.to(device) for chunk, device in zip(tensor.chunk(len(devices)), devices, strict=False)]


def parallel_apply(replicas: list[nn.Module], chunks: list[Tensor], use_threads: bool = True) -> list[Tensor]:
    if not use_threads:
        return [replica(chunk) for replica, chunk in zip(replicas, chunks, strict=False)]
    with ThreadPoolExecutor(len(chunks)) as pool:
        return list(pool.map(lambda replica, chunk: replica(chunk), replicas, chunks))


def gather(chunks: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat([chunk.to(device) for chunk in chunks])


def reduce(model: nn.Module, replicas: list[nn.Module]) -> None:
    parameters = (module.parameters() for module in (model, *replicas))
    for target, *sources in zip(*parameters, strict=True):
        for source in sources:
            if source.grad is not None:
                target.grad += source.grad.to(target.device)


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
        record.notes.append("No two GPUs: both replicas ran on the CPU, with the moves by hand; nothing is won by it.")
    if any(device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count() for device in devices):
        raise UserError(f"--devices {settings.devices}: {torch.cuda.device_count()} GPU(s) found")
    model = problem.make_model(settings).to(devices[0])
    optimizer = problem.make_optimizer(model.parameters(), settings)
    use_torch = len(devices) > 1 and all(device.type == "cuda" for device in devices)
    parallel = nn.DataParallel(model, devices) if use_torch else None
    replicas = [] if use_torch else [deepcopy(model).to(device) for device in devices[1:]]
    record.begin(model, optimizer)

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)
        for share in sampler:
            tokens, labels = data.batch(share.indices, devices[0])
            if parallel is not None:
                logits = parallel(tokens)
            else:
                replicate(model, replicas)
                # autograd's hooks see only their own thread: no threads where memory is measured
                outputs = parallel_apply([model, *replicas], scatter(tokens, devices), not record.measure_memory)
                logits = gather(outputs, devices[0])
            loss = problem.loss_sum(logits, labels) / share.num_samples  # on device 0, over all samples
            loss.backward()
            reduce(model, replicas)  # nn.DataParallel's backward has done it already
            optimizer.step()
            record.end_step(share.indices, loss)
            optimizer.zero_grad()

    # result
    record.weights = model.state_dict()
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__, most_processes=1)
