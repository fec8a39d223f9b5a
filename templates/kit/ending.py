"""Why a run ended before its time: what an error means, and what can be done about it."""

import re
from dataclasses import dataclass

import torch

from kit.errors import MachineError, UserError, one_line
from kit.memory import ADVICE, is_out_of_memory
from kit.stopping import Blocked, Stopper


@dataclass
class Ending:
    """What a process knows of its end."""

    status: str  # failed, or stopped: the same command goes on
    cause: str
    clear_error: Exception | None = None  # says the same in the user's terms, to be raised in place of the error
    smaller_micro_batch_size: int | None = None  # what the next start should try
    is_lost_connection: bool = False  # another process ended first


def explain(error: BaseException, stop: Stopper, micro_batch_size: int | None, state: dict) -> Ending:
    """Return what an error means for the run. `micro_batch_size` is None where no step was being made."""
    cause = f"{type(error).__name__}: {one_line(error)}"
    if isinstance(error, Blocked):
        return Ending("stopped", f"{stop.describe_reason()}, and the next batch does not come")
    if is_out_of_memory(error):
        return _explain_memory(error, micro_batch_size)
    if str(error).startswith("DataLoader worker"):
        cure = (
            "It may have run out of memory or of shared memory (/dev/shm): give fewer --num_workers; with 0 the"
            " training process loads the data itself and shows any other error"
        )
        return Ending("failed", cause, MachineError(f"a data-loading worker died ({one_line(error)}). {cure}"))
    if str(error).startswith("DataLoader timed out"):
        cure = "look at the disk or network that the data come from, or give a longer --dataloader_timeout"
        return Ending("failed", cause, MachineError(f"no batch came in time ({one_line(error)}): {cure}"))
    if "find_unused_parameters=True" in str(error):
        places = re.search(r"did not receive grad for rank \d+:((?: \d+)+)", str(error))
        trained = [name for name, parameter in state["model"].named_parameters() if parameter.requires_grad]
        unused = [trained[int(place)] for place in places[1].split()] if places else []
        some = f" ({', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''})" if unused else ""
        return Ending(
            "failed",
            cause,
            UserError(f"a forward pass did not use all parameters{some}: give --find_unused_parameters true"),
        )
    words = ("Connection closed", "Connection reset", "Broken pipe", "Timed out waiting", "Socket")
    is_lost = isinstance(error, torch.distributed.DistError | ConnectionAbortedError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
    return Ending("failed", cause, is_lost_connection=is_lost)


def _explain_memory(error: BaseException, micro_batch_size: int | None) -> Ending:
    what = f"out of memory ({one_line(error)[:300]})"
    if micro_batch_size is None:
        cure = "in an evaluation give a smaller --eval_batch_size; before the first step the model itself is too large"
        return Ending("failed", what, MachineError(f"{what}: {cure}"))
    if micro_batch_size == 1:
        return Ending("failed", what, MachineError(f"{what}: {ADVICE}"))
    half = micro_batch_size // 2
    cause = f"{what} with micro-batches of {micro_batch_size}; the next start takes {half}: the results stay the same"
    return Ending("stopped", cause, smaller_micro_batch_size=half)
