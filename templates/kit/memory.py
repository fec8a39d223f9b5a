"""Out of memory: how to recognise it, and the largest micro-batch that fits."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import torch

ADVICE = (
    "even a micro-batch of 1 does not fit into memory. Try, in this order: gradient checkpointing; shorter sequences"
    " (max_length) or smaller images (image_size); a smaller model"
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = (
        "CUDA out of memory",
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


class Trial:
    """A context around one forward and backward pass that notes whether memory ran out, and undoes the pass."""

    def __init__(self, accelerator, model: torch.nn.Module):
        self.accelerator, self.model = accelerator, model
        self.ran_out = False

    def __enter__(self):
        self._exit = ExitStack()
        self._exit.enter_context(self.accelerator.no_sync(self.model))  # others may have run out of memory
        return self

    def __exit__(self, kind, error, trace) -> bool:
        self._exit.close()
        self.ran_out = is_out_of_memory(error)
        self.model.zero_grad()
        return self.ran_out


def free_memory() -> None:
    """Give back what a failed pass held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def micro_batch_trials(accelerator, model: torch.nn.Module, sampler, stop) -> Iterator[Trial]:
    """Yield trials until the largest micro-batch that fits on every process is known; then set it in the sampler.

    While a trial is tried, the sampler deals one micro-batch of the heaviest samples. Halves the size until one fits,
    then closes in. `stop` is the `Stopper` through which the processes agree. Raises `MemoryError` if none fits.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a forward pass moves batch statistics
    optimizer_state = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]  # AdamW allocates it later
    fits, fails = 0, sampler.largest_share + 1
    size = sampler.largest_share
    while fails - fits > 1:
        sampler.rehearsed_size = size
        trial = Trial(accelerator, model)
        yield trial
        free_memory()
        if not stop.on_any_process(trial.ran_out):
            fits = size
        elif size == 1:
            raise MemoryError(ADVICE)
        else:
            fails = size
        size = (fits + fails) // 2
    del optimizer_state
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    sampler.rehearsed_size, sampler.micro_batch_size = None, fits
