"""Does a profile fit this machine? One line a finding with its cure; with --launch, also the world that it starts.

    python doctor.py --config_file configs/multi_gpu.yaml [--launch]

Takes the options of `launch.py`, which refuses by the same rules. Exit code: 0 it fits, 2 it does not. `--launch`
starts the processes (on several machines: start it on each), shows who met, and measures the all-reduce.
"""

import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import launch
from kit.doctor import Launch, Machine, check_environment, examine, find_devices, find_machine
from kit.errors import UserError, exit_codes
from kit.profile import read_profile
from kit.versions import untested, versions

PROBE = "--probe"  # this script as what is launched
TIMEOUT = 60.0  # seconds that the probe's processes wait for each other
FEW, MUCH = 4, 32 << 20  # bytes of the measured all-reduces


def describe(asked: Launch, machine: Machine) -> list[str]:
    """Return what is asked for and what is there, one line each."""
    devices = machine.devices
    found = f"{devices.count} x {devices.kind}" if devices.count else "no accelerator device"
    shared = "no /dev/shm" if machine.shared_memory is None else f"/dev/shm {machine.shared_memory >> 20} MiB free"
    on = "CPU" if asked.on_cpu else "any device"
    return [
        f"profile    {asked.name}: num_processes {asked.num_processes}, num_machines {asked.num_machines}, {on},"
        f" precision {asked.mixed_precision}",
        f"machine    {machine.cores} cores, {found}, {shared}, disk {machine.disk >> 30} GiB free",
    ]


def diagnose(arguments: list[str]) -> int:
    """Print the findings about a launch with these options of `launch.py`; return the exit code."""
    arguments = [*arguments, __file__]
    options = launch.read_plain(arguments) or launch.read_all(arguments)
    if options.config_file is None:
        raise UserError("give a profile: --config_file configs/cpu.yaml, or make doctor PROFILE=cpu")
    asked = launch.what_is_asked(read_profile(Path(options.config_file)), options)
    launch.take_rank(asked)
    machine = find_machine(find_devices())
    machine.untested = untested(versions())
    findings = examine(asked, machine)
    print(*describe(asked, machine), sep="\n")
    for finding in findings:
        print(f"{'mismatch' if finding.is_error else 'note':10} {finding.text}")
    is_fit = not any(finding.is_error for finding in findings)
    print(f"{'fits' if is_fit else 'does not fit'}", flush=True)
    return 0 if is_fit else 2


def probe() -> None:
    """Print which processes met, on what, and how fast they exchange numbers. Runs in each of them."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs, gather_object

    from kit.world import describe_world, is_on_cpu

    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=TIMEOUT))
    accelerator = Accelerator(cpu=is_on_cpu(), kwargs_handlers=[timeout])
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise UserError(f"{launched} processes were launched, but {accelerator.num_processes} work together")
    place = f"node {os.environ.get('GROUP_RANK', '0')} ({platform.node()})"
    row = f"process {accelerator.process_index}  {place}, {accelerator.device}, {torch.get_num_threads()} threads"
    rows, world = gather_object([row]), describe_world(accelerator)
    accelerator.print(f"world      {world['summary']}", *rows, sep="\n")
    if accelerator.num_processes == 1:
        accelerator.print("one process: nothing to exchange")
        return
    latency = measure_all_reduce(accelerator, FEW)
    seconds = measure_all_reduce(accelerator, MUCH)
    # Each process sends and receives this much of a ring all-reduce, whatever the algorithm in force.
    traffic = 2 * (accelerator.num_processes - 1) / accelerator.num_processes * MUCH
    accelerator.print(f"all-reduce {FEW} bytes: {latency * 1e3:.3g} ms; {MUCH >> 20} MiB: {seconds * 1e3:.3g} ms")
    accelerator.print(f"           that is {traffic / seconds / 1e9:.3g} GB/s for each process (bus bandwidth)")
    accelerator.end_training()


def measure_all_reduce(accelerator, num_bytes: int) -> float:
    """Return the median time in seconds of an all-reduce of fp32 numbers over all processes."""
    import torch

    values = torch.zeros(num_bytes // 4, device=accelerator.device)
    times = []
    for _ in range(11):
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        torch.distributed.all_reduce(values)
        if values.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one sets connections up


def main(arguments: list[str]) -> int:
    if arguments == [PROBE]:
        check_environment()
        probe()
        return 0
    starts = "--launch" in arguments
    arguments = [argument for argument in arguments if argument != "--launch"]
    if (code := diagnose(arguments)) or not starts:
        return code
    launcher = Path(launch.__file__)
    return subprocess.run([sys.executable, str(launcher), *arguments, __file__, PROBE]).returncode


if __name__ == "__main__":
    with exit_codes():
        sys.exit(main(sys.argv[1:]))
