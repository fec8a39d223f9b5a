"""Out of memory: the largest micro-batch that fits, and what to try when none does."""

import gc
from collections.abc import Callable

import torch

ADVICE = (
    "even a micro-batch of 1 does not fit into memory. Try, in this order: --gradient_checkpointing true; shorter"
    " sequences (max_length) or smaller images (image_size); an FSDP or DeepSpeed profile; a pipeline over devices"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the host had no memory left."""
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


class MemoryGuard:
    """A context around one forward and backward pass that takes an out-of-memory error for a fact.

    `ran_out` says whether it happened since `reset`. Where the guard is not on, the error goes on with a line that says
    what to try.
    """

    def __init__(self, is_on: bool):
        self.is_on, self.ran_out = is_on, False

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        if not self.is_on:
            raise MemoryError(
                "out of memory: give a smaller --micro_batch_size (the result stays the same), or auto"
            ) from error
        self.ran_out = True
        return True

    def reset(self) -> None:
        """Forget, and give back what the failed attempt held."""
        self.ran_out = False
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def half_of(size: int) -> int:
    """Return the next smaller micro-batch to try. Raises `MemoryError` with `ADVICE` when there is none."""
    if size == 1:
        raise MemoryError(ADVICE)
    return size // 2


def largest_that_fits(stop, fits: Callable[[int], bool], most: int) -> int:
    """Return the largest size from 1 to `most` for which `fits(size)` holds on every process, the same on all.

    `stop` is the `Stopper` through which they agree. Halves until one fits, then closes in. Raises `MemoryError` with
    `ADVICE` when none does.
    """

    def fits_everywhere(size: int) -> bool:
        return not stop.on_any_process(not fits(size))

    largest, smallest_failed = most, most + 1
    while not fits_everywhere(largest):
        largest, smallest_failed = half_of(largest), largest
    while smallest_failed - largest > 1:
        middle = (largest + smallest_failed) // 2
        if fits_everywhere(middle):
            largest = middle
        else:
            smallest_failed = middle
    return largest
