"""The processes of a run: who I am, which device is mine, and how a script starts and ends."""

import atexit
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import jsonargparse
import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)  # for a cut link or a stuck peer; torch's default is 30 minutes


class UserError(ValueError):
    """A mistake of the person who runs the script: one line that names the value, the place and the cure."""


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device


@contextmanager
def join_world() -> Iterator[World]:
    """Joins the processes that torchrun or accelerate launched (or is alone); leaves them at the end.

    nccl where each process of this machine has a GPU to itself, else gloo on the CPU.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = (
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", str(size))),
    )
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
        if "OMP_NUM_THREADS" not in os.environ:  # more threads than cores wait for each other
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}  # no port needed
    dist.init_process_group(backend, timeout=TIMEOUT, **alone)
    try:
        yield World(rank, size, device)
    finally:
        dist.destroy_process_group()


def launch(function: Callable[..., None], num_processes: int, *arguments) -> None:
    """Runs function(world, *arguments) in new processes of this machine; one that fails ends them all.

    torchrun for a function, for compare_methods.py and the tests. Forked where possible: no imports to pay.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    method = "fork" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"
    torch.multiprocessing.start_processes(
        _launched, (num_processes, port, function, arguments), num_processes, start_method=method
    )


def _launched(rank: int, num_processes: int, port: int, function: Callable[..., None], arguments: tuple) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_processes)))
    try:
        with join_world() as world:
            function(world, *arguments)
    except Exception:
        traceback.print_exc()  # start_processes shows one only, often that of a peer that lost this one
        raise


def read_settings(settings_class: type, description: str, arguments: list[str] | None = None):
    """Reads the command line into the dataclass; --help explains each option. Raises UserError."""
    parser = jsonargparse.ArgumentParser(
        description=description.splitlines()[0], exit_on_error=False, allow_abbrev=False
    )
    parser.add_class_arguments(settings_class)
    try:
        return settings_class(**vars(parser.parse_args(arguments)))
    except jsonargparse.ArgumentError as error:
        reason = error.__cause__ if isinstance(error.__cause__, UserError) else error
        raise UserError(" ".join(str(reason).split())) from None


def run(
    train: Callable,
    settings_class: type,
    description: str,
    at_least: int = 1,
    most_processes: int | None = None,
) -> None:
    """What each script does when it is started: settings, processes, training, what it leaves behind.

    Exit status: 0 trained, 2 a mistake of the user's (one line on stderr), 1 with the traceback otherwise.
    """
    from record import Record

    script = Path(sys.argv[0]).name
    size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        settings = read_settings(settings_class, description)
        if size < at_least:
            raise UserError(
                f"needs {at_least} processes, not {size}: torchrun --nproc_per_node {at_least} {sys.argv[0]}"
            )
        if most_processes is not None and size > most_processes:
            raise UserError(f"runs in one process, found {size}: start it as python {sys.argv[0]}")
        with join_world() as world:
            if world.rank == 0:
                print(
                    f"{script}: {size} process(es), {world.device.type} ({dist.get_backend()}), "
                    f"{torch.get_num_threads()} thread(s) each"
                )
                if size == 1 and most_processes is None:
                    print(
                        "One process has nobody to talk to: this is the plain loop. "
                        f"For two: torchrun --nproc_per_node 2 {sys.argv[0]}"
                    )
            with Record() as record:
                train(settings, world, record)
            record.finish(world)
            if world.rank == 0:
                record.report()
                record.save(Path(settings.output_dir or Path("outputs") / Path(script).stem), settings)
            dist.barrier()  # nobody leaves while process 0 still writes
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{script}: {error}", file=sys.stderr)
        sys.exit(2)
    if size > 1:
        # Where processes worked together, torch 2.14 sometimes aborts while the interpreter is taken down, after
        # everything is done ("terminate called without an active exception"): leave before that.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
