"""Runs of a template in their own processes, with the imports paid once.

A fork server imports the libraries; each process of a world is forked from it in a tenth of a second, with the
environment that torchrun would give it. Every wait has a time limit.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["warm_imports"])


def process(target, arguments: tuple) -> multiprocessing.Process:
    """Return a process that is forked from the server with the imports done; the caller starts it."""
    # Before Python 3.12.4 the server does not get our sys.path, and a preload that cannot be imported is passed over
    # in silence.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    forkserver.ensure_running()
    del os.environ["PYTHONPATH"]
    if before is not None:
        os.environ["PYTHONPATH"] = before
    return CONTEXT.Process(target=target, args=arguments)


LIMIT = 120  # seconds; a hang is a failure, never a stuck suite


def _child(template: str, settings: dict, environment: dict, log: str, patches: list[str], start_method: str) -> None:
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method(start_method, force=True)  # of data-loading workers, not the fork server's
    from kit.errors import exit_codes
    from kit.stopping import catch_signals

    catch_signals()
    module = importlib.import_module(template)
    for patch in patches:
        name, _, function = patch.partition(":")
        getattr(importlib.import_module(name), function)(module)
    # Forked, this process has the server's exit handlers: it must not delete the caches that the others still use.
    importlib.import_module("conftest").CACHES._finalizer.detach()
    with exit_codes():
        module.main(module.Settings(**settings))


class World:
    """Processes that run one template together."""

    def __init__(
        self,
        num_processes: int,
        settings: dict,
        template="text_classification",
        patches=(),
        environment=(),
        start_method="fork",
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.output_dir = Path(settings["output_dir"])
        self.output_dir.parent.mkdir(parents=True, exist_ok=True)
        self.logs, self.processes = [], []
        for rank in range(num_processes):
            log = self.output_dir.parent / f"{self.output_dir.name}.log{rank}"
            log.unlink(missing_ok=True)
            self.logs.append(log)
            variables = {"ACCELERATE_USE_CPU": "true", **dict(environment)}
            if num_processes > 1:
                variables |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(num_processes),
                    "LOCAL_WORLD_SIZE": str(num_processes),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            started = process(_child, (template, settings, variables, str(log), list(patches), start_method))
            started.start()
            self.processes.append(started)

    def wait(self, limit: float = LIMIT) -> list[int]:
        """Return the exit codes; after `limit` seconds end what still runs and fail."""
        end = time.monotonic() + limit
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        stuck = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        assert not stuck, f"processes {stuck} still ran after {limit} s:\n{self.output()}"
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()

    def signal(self, number: int, rank: int | None = None) -> None:
        for process in self.processes if rank is None else [self.processes[rank]]:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(process.pid, number)

    def wait_for(self, condition, limit: float = LIMIT) -> None:
        """Wait until `condition()` holds while the processes run."""
        end = time.monotonic() + limit
        while not condition():
            assert any(process.is_alive() for process in self.processes), f"ended too early:\n{self.output()}"
            assert time.monotonic() < end, f"waited {limit} s in vain:\n{self.output()}"
            time.sleep(0.005)

    def output(self, rank: int | None = None) -> str:
        logs = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(log.read_text("utf-8", "replace") for log in logs if log.exists())


def run(num_processes: int, settings: dict, expected: int = 0, **options) -> World:
    """Run a world to its end and assert every process's exit code."""
    world = World(num_processes, settings, **options)
    codes = world.wait()
    assert codes == [expected] * num_processes, f"exit codes {codes}:\n{world.output()}"
    return world


def lines(output_dir: Path, kind: str | None = None) -> list[dict]:
    """Return the lines of metrics.jsonl; kind: loss, eval_loss or test_loss."""
    rows = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row for row in rows if kind is None or kind in row]


def numbers(output_dir: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without the speed: what has to be the same in the same run."""
    return [{k: v for k, v in row.items() if k != "samples_per_second"} for row in lines(output_dir)]


def largest_difference(rows: list[dict], others: list[dict]) -> float:
    """Return the largest relative difference of two logs that must have the same lines with the same keys."""
    assert [(row["step"], sorted(row)) for row in rows] == [(row["step"], sorted(row)) for row in others]
    pairs = [(row[key], other[key]) for row, other in zip(rows, others, strict=True) for key in row]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs if a != b) if rows != others else 0.0


def weights(folder: Path) -> dict:
    """Return the tensors of an exported model."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def same_weights(folder: Path, other: Path) -> bool:
    """Return whether two exported models are equal bit for bit."""
    import torch

    first, second = weights(folder), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def samples_by_step(prefix: Path) -> dict[int, list[int]]:
    """Return the samples of each step, over all processes, that `faults:record_samples` wrote under `prefix`.

    Of a step that was done again after a crash, the last time counts.
    """
    found: dict[int, list[int]] = {}
    for path in sorted(prefix.parent.glob(f"{prefix.name}.*")):
        mine: dict[int, list[int]] = {}
        for row in map(json.loads, path.read_text("utf-8").splitlines()):
            if "step" in row:
                step = row["step"]
                mine[step] = []
            elif mine:  # passes before the first step only try out what fits into memory
                mine[step] += row["samples"]
        for step, samples in mine.items():
            found[step] = found.get(step, []) + samples
    return {step: sorted(samples) for step, samples in sorted(found.items())}
