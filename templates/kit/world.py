"""Where a run happens: the Accelerator, its processes, threads and precision, and one line about each."""

import hashlib
import os
import platform
from datetime import timedelta
from pathlib import Path

import torch

from kit.doctor import (
    Launch,
    asks_for_cpu,
    compiler_findings,
    find_devices,
    find_machine,
    precision_findings,
    refuse,
    visible_cores,
)
from kit.errors import MachineError, UserError, one_line
from kit.settings import TrainingSettings
from kit.share import check_sharing
from kit.stopping import is_launcher, parent_command


def requested_precision(mixed_precision: str | None) -> str:
    """Return the precision in force: the setting, else the launcher's profile, else 'no'."""
    return mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def is_on_cpu() -> bool:
    """Return whether this run computes on the CPU: it is asked for, or no accelerator device is visible."""
    return asks_for_cpu() or not torch.accelerator.is_available()


def pins_memory() -> bool:
    """Return whether batches should lie in pinned memory: not for a CPU (it would open a context on a GPU that the run
    leaves alone), and not for Apple's devices, which have none."""
    device = None if asks_for_cpu() else torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"


def check_machine(settings: TrainingSettings) -> None:
    """Refuse a precision or a compiler that this machine does not have."""
    backend = settings.torch_compile_backend
    if settings.torch_compile and backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise UserError(f"torch_compile_backend: no such backend: {backend}. There are {', '.join(known)}")
    asked = Launch(
        name="torch_compile",
        mixed_precision=requested_precision(settings.mixed_precision),
        on_cpu=asks_for_cpu(),
        dynamo_backend=backend.upper() if settings.torch_compile else "NO",
    )
    machine = find_machine(find_devices())
    refuse([*precision_findings(asked, machine), *compiler_findings(asked, machine)])


def build_accelerator(settings: TrainingSettings):
    """Return the Accelerator of this process, on the CPU (gloo) where no accelerator device is visible.

    Raises `UserError` for what this machine cannot do (`check_machine`), `RuntimeError` if fewer processes found each
    other than were launched.
    """
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, InitProcessGroupKwargs

    check_machine(settings)
    ddp = DistributedDataParallelKwargs()
    # No exchange of buffers in each forward pass: they are statistics, which matter when a model is judged, and
    # `share_buffers` is called there. By torch's name for it, which Accelerate 1.15 does not know.
    ddp.to_kwargs = lambda: {
        "forward_sync_buffers": False,
        "find_unused_parameters": settings.find_unused_parameters,
    }
    accelerator = Accelerator(
        cpu=is_on_cpu(),
        mixed_precision=settings.mixed_precision,
        # The batch samplers deal the samples; a batch that Accelerate adds or repeats would count twice.
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=settings.ddp_timeout)), ddp],
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise RuntimeError(
            f"{launched} processes were launched, but {accelerator.num_processes} work together: each would train"
            " alone and write the same files. Launch on the CPU with ACCELERATE_USE_CPU=true, or see configs/"
        )
    if settings.push_to_hub and (note := on_main(accelerator, check_sharing, settings)):
        accelerator.print(f"note       {note}")
    return accelerator


@torch.no_grad()
def share_buffers(accelerator, model: torch.nn.Module) -> None:
    """Give every process the buffers of process 0, such as the running statistics of BatchNorm."""
    if accelerator.num_processes > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def profile_in_force() -> str | None:
    """Return the path of the profile that this run was launched with; None if it was started without a launcher."""
    if name := os.environ.get("TEMPLATES_PROFILE"):  # set by launch.py
        return name
    words = parent_command()
    if not is_launcher(words):
        return None
    words = [word.decode("utf-8", "replace") for word in words]
    given = [value for option, value in zip(words, words[1:], strict=False) if option == "--config_file"]
    return (given or [word.split("=", 1)[1] for word in words if word.startswith("--config_file=")] or [None])[0]


def spare_cores() -> int:
    """Return how many cores this node has for the workers of one training process: its share but one, at most 16."""
    cores = visible_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(cores - 1, 1), 16)


def describe_world(accelerator) -> dict:
    """Return processes, nodes, device, precision and threads of this run, for the banner and run.json. Collective."""
    from accelerate.utils import gather_object

    processes = accelerator.num_processes
    # Every node has a first process, whichever launcher started it.
    nodes = max(1, gather_object([accelerator.local_process_index]).count(0))
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    device = accelerator.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    elif device == "cpu" and not asks_for_cpu():
        device = "cpu (no accelerator is visible)"
    threads, precision = torch.get_num_threads(), accelerator.mixed_precision
    summary = f"{processes} process{'es' if processes > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    summary += f" ({processes // nodes} per node)" if nodes > 1 else ""
    summary += f", {backend}" if backend else ""
    return {
        "num_processes": processes,
        "num_nodes": nodes,
        "backend": backend,
        "device": device,
        "mixed_precision": precision,
        "summary": f"{summary}, {device}, precision {precision}, {threads} thread{'s' if threads > 1 else ''} each",
    }


class FirstOnNode:
    """Lets process 0 of a node do some work alone, inside this context, while the others of the node wait.

    Make it before the processes meet (`build_accelerator`), so that process 0 has the lock when they do. The others
    then find the work cached. A file lock and not a barrier: long work never runs into the process-group timeout.
    """

    def __init__(self, *key: str | None):
        from filelock import FileLock
        from huggingface_hub.constants import HF_HOME

        folder = Path(HF_HOME) / "locks"
        # Of this node alone: the first of another node has to come to the meeting, though it may share HF_HOME.
        key = (os.environ.get("GROUP_RANK"), platform.node(), *key)
        self.lock = FileLock(folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.lock")
        self.is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.is_first:
                self.lock.acquire()
        except (OSError, NotImplementedError) as error:  # filelock turns ENOSYS into the latter
            cause = getattr(error, "strerror", None) or error
            raise MachineError(
                f"{folder}: cannot be written or locked ({cause}): set HF_HOME to a folder on a disk where that works"
            ) from None

    def __enter__(self):
        if not self.is_first:
            with self.lock:
                pass

    def __exit__(self, kind, error, trace) -> None:
        if self.is_first:
            self.lock.release()


def on_main(accelerator, function, *arguments):
    """Call `function` on process 0 and return its result on all; an error there is raised on all, in one line."""
    from accelerate.utils import broadcast_object_list

    answer, error = [None, None, None], None
    if accelerator.is_main_process:
        try:
            answer[0] = function(*arguments)
        except Exception as raised:
            error, answer[1:] = raised, (isinstance(raised, UserError), one_line(raised))
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    if error is not None:
        raise error
    if answer[1] is not None:
        raise UserError(answer[2]) if answer[1] else ConnectionAbortedError(f"process 0 failed: {answer[2]}")
    return answer[0]
