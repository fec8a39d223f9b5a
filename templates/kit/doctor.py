"""Does a launch fit the machine? One list of rules, for the launcher, for the doctor and for a script started directly.

Imports neither torch nor Accelerate: `find_devices` does, where devices matter.
"""

import importlib.util
import os
import re
import shutil
import socket
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kit.errors import UserError

SHARDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
FP8_LIBRARIES = ("transformer_engine", "torchao", "msamp")
PLENTY_OF_SHARED_MEMORY, PLENTY_OF_DISK = 1 << 30, 2 << 30  # bytes


# -- what the machine has ----------------------------------------------------------------------------------------------


@dataclass
class Devices:
    """The accelerator devices that PyTorch sees. `kind` is cuda, mps, xpu, ..., and cpu where there are none."""

    kind: str = "cpu"
    count: int = 0
    has_bf16: bool = True  # on a CPU: whether it has instructions for it; without, bf16 is right but slow
    has_fp8: bool = False


@dataclass
class Machine:
    """What the rules look at, as data, so that they can be tried on machines that are not there."""

    devices: Devices | None = None  # None: not looked at, since that means importing torch
    cores: int = 1
    threads: int | None = None  # OMP_NUM_THREADS, where set
    shared_memory: int | None = None  # free bytes of /dev/shm; None where there is none
    disk: int | None = None  # free bytes where the run is started
    compiler: str | None = None
    untested: list[str] = field(default_factory=list)  # a line for each package outside of the tested versions
    resolve: Callable[[str], str | None] = lambda name: None
    is_port_free: Callable[[int], bool] = lambda port: True
    is_own_address: Callable[[str], bool] = lambda address: True
    has_package: Callable[[str], bool] = lambda name: True


def asks_for_cpu() -> bool:
    """Return whether the profile or the environment asks for the CPU."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def visible_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores that this process may use: its affinity, and in a container what its cgroup (v2) grants."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "400000 100000": microseconds in each period; "max 100000": no limit
        granted, period = map(int, quota.read_text("utf-8").split())
        cores = min(cores, max(1, -(-granted // period)))
    return cores


def find_devices() -> Devices:
    """Return the devices that PyTorch sees; imports it."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return Devices(has_bf16=torch.ops.mkldnn._is_mkldnn_bf16_supported())
    count = torch.accelerator.device_count()
    if device.type == "cuda":
        has_fp8 = torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 9)
        return Devices("cuda", count, torch.cuda.is_bf16_supported(including_emulation=False), has_fp8)
    return Devices(device.type, count)


def find_machine(devices: Devices | None = None) -> Machine:
    """Return a description of this machine. `devices` None leaves them out of all rules."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    shared = Path("/dev/shm")
    return Machine(
        devices=devices,
        cores=visible_cores(),
        threads=int(threads) if threads.isdecimal() else None,
        shared_memory=shutil.disk_usage(shared).free if shared.is_dir() else None,
        disk=shutil.disk_usage(Path.cwd()).free,
        compiler=find_compiler(),
        resolve=resolve_name,
        is_port_free=is_port_free,
        is_own_address=is_own_address,
        has_package=lambda name: importlib.util.find_spec(name) is not None,
    )


def find_compiler() -> str | None:
    """Return the C++ compiler that torch.compile would call, None if it is not installed."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return compiler if shutil.which(compiler.split()[0]) else None


def resolve_name(name: str) -> str | None:
    """Return the numeric address of a machine, None if its name is not known."""
    with suppress(OSError):
        return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    return None


def is_loopback(number: str | None) -> bool:
    """Return whether a numeric address is the machine's own, which no other machine reaches."""
    return bool(re.match(r"127\.|::1$|0\.0\.0\.0$", number or ""))


def choose_interface(address: str) -> None:
    """Let gloo use the network interface that leads to `address` where it would take the loopback.

    Gloo announces the address that the machine's own name has. Many systems give that name a loopback address, and
    then the other machines look for this one on themselves.
    """
    own = resolve_name(socket.gethostname())
    number = resolve_name(address)
    if (
        "GLOO_SOCKET_IFNAME" in os.environ
        or number is None
        or is_loopback(number)
        or not (own is None or is_loopback(own))
    ):
        return
    import psutil

    with socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((number, 9))  # sends nothing: the system chooses the interface
        local = way.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if local in [entry.address.split("%")[0] for entry in addresses]:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def is_own_address(address: str) -> bool:
    """Return whether a numeric address is one of this machine's."""
    import psutil  # binding to the address is no proof: systems may allow that for any address (ip_nonlocal_bind)

    own = {entry.address.split("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return is_loopback(address) or address in own


def is_port_free(port: int) -> bool:
    """Return whether this machine can listen on a port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left may be taken
        try:
            server.bind(("", port))
            server.listen(1)
        except OSError:
            return False
    return True


# -- what is asked for -------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """What is to be started here: a profile, and what the command line says instead."""

    name: str  # of the profile, as given
    kind: str = "NO"  # distributed_type
    num_processes: int | None = 1  # over all machines
    num_machines: int = 1
    machine_rank: int = 0
    is_rank_given: bool = True  # on the command line
    address: str | None = None
    is_address_given: bool = True  # on the command line
    port: int | None = None
    mixed_precision: str = "no"
    on_cpu: bool = False
    gpu_ids: str | None = None
    dynamo_backend: str = "NO"
    parallelism: dict = field(default_factory=dict)
    has_hostfile: bool = False  # mpirun starts the processes
    is_remote: bool = False  # a job that is sent to Amazon SageMaker

    @property
    def local_processes(self) -> int:
        return self.num_processes // self.num_machines

    @property
    def starts_several(self) -> bool:
        """Whether the launcher starts several processes; mpirun starts those of a hostfile."""
        return self.num_processes > 1 and not self.has_hostfile


@dataclass
class Finding:
    """What a rule found: one line with the value, the place and the cure."""

    text: str
    is_error: bool = True


def examine(launch: Launch, machine: Machine) -> list[Finding]:
    """Return what does not fit: errors, which make the launch fail or do something else, and notes."""
    findings = [*_kind(launch, machine), *_numbers(launch)]
    if findings or launch.is_remote:
        return findings  # the rules below divide by these numbers, and look at this machine
    return [
        *_meeting(launch, machine),
        *_devices(launch, machine),
        *precision_findings(launch, machine),
        *compiler_findings(launch, machine),
        *_resources(launch, machine),
        *(Finding(line, is_error=False) for line in machine.untested),
    ]


def refuse(findings: list[Finding]) -> None:
    """Raise the first error among the findings as a `UserError`."""
    for finding in findings:
        if finding.is_error:
            raise UserError(finding.text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def _kind(launch: Launch, machine: Machine):
    package = "sagemaker" if launch.is_remote else "torch_xla" if launch.kind == "XLA" else None
    if package and not machine.has_package(package):
        yield Finding(f"{launch.name} needs the package {package}, which is not installed: pip install {package}")
    sharded = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}.get(launch.kind)
    if sharded or any(int(size) > 1 for name, size in launch.parallelism.items() if name.endswith("_size")):
        yield Finding(_not_supported(sharded or "a parallelism_config", launch.name))


def _not_supported(what: str, place: str) -> str:
    return (
        f"{place}: {what} is not supported by these scripts yet: use a profile with distributed_type MULTI_GPU or 'NO'"
    )


def _numbers(launch: Launch):
    processes, machines, name = launch.num_processes, launch.num_machines, launch.name
    if processes is None:
        yield Finding(f"{name} has no num_processes: add it, or give --num_processes")
    elif processes < 1 or machines < 1:
        yield Finding(
            f"{_count(processes, 'process')} on {_count(machines, 'machine')} ({name}): both must be 1 or more"
        )
    elif processes % machines:
        yield Finding(f"{_count(processes, 'process')} on {machines} machines ({name}): give a multiple of {machines}")
    elif processes > 1 and launch.kind == "XLA":
        yield Finding(f"{name}: {processes} TPU processes are not supported yet: use --num_processes 1")
    elif processes > 1 and launch.kind == "NO":
        yield Finding(
            f"{name} starts one process (distributed_type NO), but num_processes is {processes}: use PROFILE=multi_cpu"
            " or PROFILE=multi_gpu"
        )


def _meeting(launch: Launch, machine: Machine):
    name, machines = launch.name, launch.num_machines
    if machines == 1:
        if launch.port and launch.num_processes > 1 and not machine.is_port_free(launch.port):
            yield Finding(f"port {launch.port} is in use, so a free one is used instead", is_error=False)
        return
    address, cure = (
        launch.address,
        "give an address of machine 0 that the others can reach: --main_process_ip (MAIN_IP=)",
    )
    if not 0 <= launch.machine_rank < machines:
        yield Finding(
            f"machine rank {launch.machine_rank} of {machines} machines: give --machine_rank 0 to {machines - 1},"
            " a different one on each machine (NODE_RANK=)"
        )
    if not address:
        yield Finding(f"{name} has no main_process_ip: {cure}")
    elif (number := machine.resolve(address)) is None:
        yield Finding(f"main_process_ip {address} cannot be resolved on this machine: {cure}")
    elif is_loopback(number):
        # Said on the command line it is meant: several launchers on one machine, as the tests start them.
        known = f"main_process_ip {address} is this machine itself, which no other machine reaches"
        yield Finding(f"{known}: {cure}", is_error=not launch.is_address_given)
    elif launch.machine_rank == 0 and not machine.is_own_address(number):
        yield Finding(f"main_process_ip {address} is not an address of this machine (rank 0): {cure}", is_error=False)
    if not launch.port or not 0 < launch.port < 65536:
        yield Finding(
            f"main_process_port {launch.port}: all machines must use the same port, between 1 and 65535:"
            " give --main_process_port, such as 29500"
        )
    elif launch.machine_rank == 0 and not machine.is_port_free(launch.port):
        yield Finding(
            f"main_process_port {launch.port} is in use on this machine: stop the program that listens there, or"
            " give another --main_process_port on all machines"
        )


def _devices(launch: Launch, machine: Machine):
    if launch.on_cpu or machine.devices is None or launch.kind == "XLA":
        return
    name, local, found = launch.name, launch.local_processes, machine.devices.count
    ids = [] if launch.gpu_ids in (None, "all") else launch.gpu_ids.split(",")
    if not found:
        yield Finding(f"{name}: PyTorch sees no accelerator, so the run uses the CPU", is_error=False)
    elif beyond := [number for number in ids if not number.isdecimal() or int(number) >= found]:
        yield Finding(f"gpu_ids {launch.gpu_ids}: no device {beyond[0]}, devices found: 0 to {found - 1}")
    elif local > (usable := len(ids) or found):
        what = f"gpu_ids {launch.gpu_ids} name {usable}" if ids else f"{_count(found, 'device')} found"
        yield Finding(
            f"{name}: {_count(local, 'process')} asked for on this machine, {what}:"
            f" use NUM_PROCESSES={usable * launch.num_machines} (--num_processes {usable * launch.num_machines})"
        )


def precision_findings(launch: Launch, machine: Machine):
    """Yield what this hardware does not compute; without devices looked at, only what is missing anyway."""
    precision, devices = launch.mixed_precision, machine.devices
    ways = "in the profile, with --mixed_precision, or make ... PRECISION="
    if precision == "fp8" and not any(map(machine.has_package, FP8_LIBRARIES)):
        yield Finding(
            f"mixed_precision fp8 needs one of {', '.join(FP8_LIBRARIES)}, none is installed: bf16, {ways}bf16"
        )
    if launch.kind == "XLA" or (devices is None and not launch.on_cpu):
        return
    is_cpu = launch.on_cpu or devices.kind == "cpu"
    if precision == "fp8" and (is_cpu or not devices.has_fp8):
        yield Finding(f"mixed_precision fp8 needs a GPU with fp8 (Ada, Hopper or newer): bf16, {ways}bf16")
    elif precision == "fp16" and is_cpu:
        yield Finding(f"mixed_precision fp16 needs a GPU, and this run uses the CPU: use bf16 or no, {ways}no")
    elif precision == "bf16" and not is_cpu and not devices.has_bf16:
        yield Finding(f"mixed_precision bf16 needs a GPU with bf16 (Ampere or newer): fp16 or no, {ways}fp16")
    elif precision == "bf16" and devices and devices.kind == "cpu" and not devices.has_bf16:
        yield Finding(
            "mixed_precision bf16: this CPU has no instructions for it (avx512_bf16, amx), it is slower than"
            f" full precision: no, {ways}no",
            is_error=False,
        )


def compiler_findings(launch: Launch, machine: Machine):
    """Yield that the backend of torch.compile has no compiler."""
    if launch.dynamo_backend == "INDUCTOR" and machine.compiler is None:
        yield Finding(
            f"{launch.name}: the inductor backend needs a C++ compiler and none was found: install g++ (or set CXX), or"
            " do not compile: --torch_compile false, no dynamo_config in the profile"
        )


def _resources(launch: Launch, machine: Machine):
    local = launch.local_processes
    if (launch.on_cpu or (machine.devices and machine.devices.kind == "cpu")) and local > machine.cores:
        yield Finding(
            f"{local} processes share {_count(machine.cores, 'core')}: this works but is slow", is_error=False
        )
    elif machine.threads and local > 1 and local * machine.threads > machine.cores:
        yield Finding(
            f"OMP_NUM_THREADS={machine.threads} in each of {local} processes: they wait for each other on"
            f" {_count(machine.cores, 'core')}; unset it, or OMP_NUM_THREADS={max(1, machine.cores // local)}",
            is_error=False,
        )
    if machine.shared_memory is not None and machine.shared_memory < PLENTY_OF_SHARED_MEMORY:
        yield Finding(
            f"/dev/shm has {machine.shared_memory >> 20} MiB free: data-loading workers may be killed; in a container"
            " --shm-size=8g or --ipc=host, else --num_workers 0",
            is_error=False,
        )
    if machine.disk is not None and machine.disk < PLENTY_OF_DISK:
        yield Finding(
            f"the disk of {Path.cwd()} has {machine.disk >> 20} MiB free: checkpoints may not fit; point --output_dir"
            " to another disk",
            is_error=False,
        )


# -- a script that is started ------------------------------------------------------------------------------------------


def check_environment() -> None:
    """Refuse what a launcher asks of this script and the script cannot do; join the processes of srun and mpirun.

    To be called before anything heavy is imported. Raises `UserError`.
    """
    for variable, what in SHARDED.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "yes"):
            raise UserError(_not_supported(what, os.environ.get("TEMPLATES_PROFILE", variable)))
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    refuse(list(precision_findings(Launch("", mixed_precision=precision), find_machine())))
    os.environ.update(world_of_scheduler())
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE") and "MASTER_ADDR" in os.environ:
        choose_interface(os.environ["MASTER_ADDR"])  # several machines, started by torchrun or a scheduler


def world_of_scheduler(environment: dict | None = None) -> dict[str, str]:
    """Return the variables of torch.distributed for a process that srun or mpirun started beside others, else nothing.

    Raises `UserError` where theirs do not say where the processes meet.
    """
    given = os.environ if environment is None else environment
    if "WORLD_SIZE" in given:  # torchrun, accelerate launch, or the user
        return {}
    for size, rank, local_rank, local_size in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if int(given.get(size, "1")) > 1:
            needed = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
            return _join("mpirun", given, needed, port_key=given.get("PMIX_NAMESPACE") or given.get("PMI_JOBID"))
    if int(given.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        needed = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
        given = dict(given)
        # Such as "2(x3),1": two tasks on each of three nodes, one on the fourth.
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", given.get("SLURM_STEP_TASKS_PER_NODE", ""))
        tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
        node = int(given.get("SLURM_NODEID", "0"))
        if node < len(tasks):
            given["LOCAL_TASKS"] = str(tasks[node])
            needed["LOCAL_WORLD_SIZE"] = "LOCAL_TASKS"
        nodes = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST", "")
        if nodes:
            given.setdefault("MASTER_ADDR", first_node(nodes))
        return _join("srun", given, needed, port_key=f"{given.get('SLURM_JOB_ID')}.{given.get('SLURM_STEP_ID')}")
    return {}


def _join(starter: str, given: dict, needed: dict[str, str], port_key: str | None) -> dict[str, str]:
    world = {name: given[source] for name, source in needed.items() if source in given}
    is_one_node = world.get("LOCAL_WORLD_SIZE") == world["WORLD_SIZE"]
    address = given.get("MASTER_ADDR") or ("127.0.0.1" if is_one_node else None)
    if len(world) < 4 or address is None:
        raise UserError(
            f"{starter} started {world['WORLD_SIZE']} processes without saying where they meet, each would train alone:"
            " export MASTER_ADDR, the address of the first machine (mpirun -x MASTER_ADDR=...), or start launch.py once"
            " on each machine, with --machine_rank"
        )
    # A port of the job's own, outside of the range from which the system gives ports away.
    port = given.get("MASTER_PORT") or (str(20000 + zlib.crc32(port_key.encode()) % 10000) if port_key else "29500")
    return world | {"MASTER_ADDR": address, "MASTER_PORT": port}


def first_node(nodes: str) -> str:
    """Return the first name of a list of nodes as Slurm writes it, such as gpu[03-05,9],login."""
    match = re.match(r"([^,\[]+)(?:\[([^\]\-,]+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups())


def started_copies() -> tuple[str, int] | None:
    """Return by what, and how often, this very command was started side by side: by srun or mpirun; None if once."""
    for starter, size in (("mpirun", "OMPI_COMM_WORLD_SIZE"), ("mpirun", "PMI_SIZE"), ("srun", "SLURM_STEP_NUM_TASKS")):
        if int(os.environ.get(size, "1")) > 1:
            return starter, int(os.environ[size])
    return None
