"""Start a script where a profile says: `accelerate launch` with the mistakes found first and the exit code kept.

    python launch.py --config_file configs/multi_cpu.yaml SCRIPT --config RECIPE.yaml

Takes the options of `accelerate launch`. Profile, machine, settings and, for several processes, the data are checked
before anything is started. Signals are passed on. A run that stopped because its memory ran out is started again.
Exit code: 0 done, 2 a mistake, 75 stopped after saving, else a failure.
"""

from kit.stopping import EXIT_STOPPED, SIGNALS, catch_signals

if __name__ == "__main__":
    catch_signals()  # before the slow imports below

import argparse
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import yaml

from kit.doctor import (
    Launch,
    asks_for_cpu,
    choose_interface,
    examine,
    find_devices,
    find_machine,
    is_own_address,
    refuse,
    resolve_name,
    started_copies,
    visible_cores,
)
from kit.errors import MachineError, UserError, exit_codes, one_line
from kit.profile import PRECISIONS, SECTIONS, read_profile

MEETING_TIMEOUT = 300  # seconds that the machines of a run wait for each other
NAME_TIMEOUT = 60  # seconds until the name of machine 0 has to be known
MAX_RESTARTS = 5  # of a run whose memory ran out
PLAIN = {  # options that are read without Accelerate, which would import torch: with one process, only the script does
    "config_file": str,
    "num_processes": int,
    "num_machines": int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
    "mixed_precision": str,
    "gpu_ids": str,
}


# -- what is asked for -------------------------------------------------------------------------------------------------


def read_plain(arguments: list[str]) -> argparse.Namespace | None:
    """Return the options if there are only those of `PLAIN`, well-formed; else None: Accelerate's parser is asked."""
    options = argparse.Namespace(cpu=False, **dict.fromkeys(PLAIN))
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).removeprefix("--").replace("-", "_").partition("=")
        if name == "cpu" and not equals:
            options.cpu = True
            continue
        if name not in PLAIN or not (equals or rest):
            return None
        try:
            setattr(options, name, PLAIN[name](value if equals else rest.pop(0)))
        except ValueError:
            return None
    if not rest or options.mixed_precision not in (None, *PRECISIONS):
        return None
    options.training_script, options.training_script_args = rest[0], rest[1:]
    return options


def read_all(arguments: list[str]) -> argparse.Namespace:
    """Return the options as Accelerate reads them; a mistake is one line."""
    from accelerate.commands import launch

    def refuse_usage(message: str) -> None:
        raise UserError(f"{message} (see accelerate launch --help)")  # its usage of a hundred lines hides the message

    parser = launch.launch_command_parser()
    parser.error = refuse_usage
    return parser.parse_args(arguments)


def what_is_asked(profile: dict, options: argparse.Namespace) -> Launch:
    """Return what is to be started: the profile, and what the command line says instead."""

    def either(name: str):
        given = getattr(options, name, None)  # 0 is an answer: only what is not given comes from the profile
        return profile.get(name) if given is None else given

    kind = profile["distributed_type"]
    for option, other in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED"), ("use_megatron_lm", "MEGATRON_LM")):
        kind = other if getattr(options, option, False) else kind
    num_processes = either("num_processes")
    return Launch(
        name=options.config_file,
        kind=kind,
        num_processes=1 if num_processes is None and kind in ("NO", "XLA") else num_processes,
        num_machines=1 if (machines := either("num_machines")) is None else machines,
        machine_rank=either("machine_rank") or 0,
        is_rank_given=options.machine_rank is not None,
        address=either("main_process_ip"),
        is_address_given=options.main_process_ip is not None,
        port=either("main_process_port"),
        mixed_precision=options.mixed_precision or profile["mixed_precision"],
        on_cpu=options.cpu or kind == "MULTI_CPU" or profile.get("use_cpu", False) or asks_for_cpu(),
        gpu_ids=either("gpu_ids"),
        dynamo_backend=_dynamo_backend(profile, options),
        parallelism=profile.get("parallelism_config", {}),
        is_remote=profile.get("compute_environment") == "AMAZON_SAGEMAKER",
        has_hostfile=bool(_hostfile(profile, options)),
    )


def _dynamo_backend(profile: dict, options: argparse.Namespace) -> str:
    section = profile.get("dynamo_config", {})
    backend = (
        getattr(options, "dynamo_backend", None) or section.get("dynamo_backend") or section.get("backend") or "no"
    )
    return backend.upper()


def _hostfile(profile: dict, options: argparse.Namespace) -> str | None:
    return getattr(options, "mpirun_hostfile", None) or profile.get("mpirun_config", {}).get("mpirun_hostfile")


def take_rank(asked: Launch) -> None:
    """Take the rank of this machine from srun or mpirun, where each started one launcher on each machine."""
    if (copies := started_copies()) is None:
        return
    starter, count = copies
    if count != asked.num_machines:
        raise UserError(
            f"{starter} started {count} copies of launch.py, {asked.name} has num_machines {asked.num_machines}: start"
            f" one copy on each machine (--num_machines {count}), or the script itself {count} times, without launch.py"
        )
    if not asked.is_rank_given:
        name = "SLURM_PROCID" if starter == "srun" else "OMPI_COMM_WORLD_RANK"
        asked.machine_rank = int(os.environ.get(name) or os.environ["PMI_RANK"])


def wait_for_name(address: str, timeout: float = NAME_TIMEOUT, resolve=resolve_name) -> None:
    """Wait until the name of machine 0 is known: where a scheduler has just started it, that takes a while."""
    end, is_said = time.monotonic() + timeout, False
    while resolve(address) is None and time.monotonic() < end:
        if not is_said:
            print(f"waiting up to {timeout:g} s until the name {address} is known", flush=True)
            is_said = True
        time.sleep(min(1.0, timeout / 10))


# -- one process -------------------------------------------------------------------------------------------------------


def plain_environment(asked: Launch) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets for one process whose profile has no section."""
    affinity = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"} if asked.on_cpu else {}
    return affinity | {
        "ACCELERATE_USE_CPU": str(asked.on_cpu),
        "ACCELERATE_MIXED_PRECISION": asked.mixed_precision,
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
    }


def is_plain(asked: Launch, profile: dict, options: argparse.Namespace | None) -> bool:
    """Return whether nothing of the launch needs Accelerate's own launcher, which would import torch a second time."""
    unusual = {*SECTIONS, "tpu_env", "command_file", "commands"} & {key for key, value in profile.items() if value}
    switches = profile.get("debug") or profile.get("enable_cpu_affinity") or asked.kind == "XLA"
    some_devices = asked.gpu_ids not in (None, "all") and not asked.on_cpu
    return options is not None and not (unusual or switches or some_devices or asked.mixed_precision == "fp8")


def validate(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options completed by Accelerate; what it refuses is one line."""
    from accelerate.commands import launch

    try:
        return launch._validate_launch_command(options)[0]
    except ValueError as error:
        raise UserError(f"accelerate launch: {one_line(error)}") from None


def command_of(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment that Accelerate starts one process with (or mpirun, with a hostfile)."""
    from accelerate.commands import launch

    return launch.prepare_simple_launcher_cmd_env(validate(options))


def run_one(command: list[str]) -> tuple[int, bool]:
    """Run a command, passing signals on to it; return its exit code and whether there was a signal."""
    child, received = None, []

    def pass_on(number: int, frame) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    for number in SIGNALS if os.name == "posix" else []:  # on Windows a Ctrl-C reaches the child by itself
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup
            signal.signal(number, pass_on)
    sys.stdout.flush()
    child = subprocess.Popen(command)
    for number in list(received):  # that came before there was a child
        child.send_signal(number)
    code = child.wait()
    if -code in received:
        return EXIT_STOPPED, True  # before the script could catch it: there was nothing to save
    return (128 - code if code < 0 else code), bool(received)


# -- several processes -------------------------------------------------------------------------------------------------


def run_several(options: argparse.Namespace, asked: Launch) -> tuple[int, bool]:
    """Start the processes of this machine and wait; return their exit code and whether there was a signal."""
    from accelerate.commands import launch
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if options.max_restarts:
        # torch 2.14 keeps the addresses of processes that are gone in a store that outlives them, and those that are
        # started again call there: give each start its own.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        options.rdzv_backend, options.same_network = "c10d", False
        options.standalone = asked.num_machines == 1
    where = "the processes of this machine"
    if asked.num_machines > 1:
        where = f"machine {asked.machine_rank} of {asked.num_machines}, {asked.num_processes} processes, meeting at"
        where += f" {asked.address}:{asked.port}"
        options.rdzv_conf = options.rdzv_conf or f"timeout={MEETING_TIMEOUT},join_timeout={MEETING_TIMEOUT}"
        print(where, flush=True)
    try:
        launch.launch_command(options)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return (EXIT_STOPPED if EXIT_STOPPED in codes else 2 if 2 in codes else 1), False
    except SignalException:
        return 1, True
    except (DistError, RendezvousError) as error:
        raise MachineError(
            f"{where}: they did not find each other ({one_line(error)[:200]}). Is machine 0 started, can this machine"
            " reach its address, is the port open and free, and does each machine have its own --machine_rank?"
        ) from error
    return 0, False


def set_environment(asked: Launch, device_kind: str) -> None:
    """Set what several processes need to run well, unless the user has."""
    if asked.on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # the launcher does not hand use_cpu on to several processes
    if asked.on_cpu or device_kind == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, visible_cores() // asked.local_processes)))
    if asked.num_machines > 1:
        choose_interface(asked.address)
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")


# -- the script and its run --------------------------------------------------------------------------------------------


def load_script(script: Path):
    """Return a script as a module, imported as Python would find its neighbours when it runs it."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(script.parent.resolve()))
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


def check_script(script: Path, arguments: list[str], reads_data: bool) -> str | None:
    """Check settings (and data) as the script itself would; return its run directory, None if it has no settings."""
    from kit.command_line import parse_settings
    from kit.world import check_machine

    module = load_script(script)
    if not hasattr(module, "Settings"):
        return None
    settings = parse_settings(module.Settings, module.__doc__, arguments)
    if reads_data:
        module.check(settings)
        check_machine(settings)
        module.load_data(settings)
    return settings.output_dir


def read_run(output_dir: str | None) -> dict:
    """Return run.json of a run directory; empty where there is none to read."""
    try:
        return json.loads((Path(output_dir) / "run.json").read_text("utf-8")) if output_dir else {}
    except (OSError, ValueError):
        return {}


def end_of_run(output_dir: str | None, before: dict, began: float) -> dict:
    """Return status and cause of the run that has just ended, as far as its processes wrote them; may be empty.

    `before` is run.json before the start, `began` the time of the start. run.json is written by machine 0; where that
    machine is lost, the other processes' notes remain.
    """
    run = read_run(output_dir)
    if run == before:  # it tells of an earlier start
        run = {}
    if output_dir and run.get("status", "running") == "running":
        from kit.runlog import NOTES

        for path in Path(output_dir).glob(NOTES):
            with suppress(OSError, ValueError):
                note = json.loads(path.read_text("utf-8"))
                if note["time"] >= began and note["status"] == "failed":
                    return note
    return run


def lost_peer(cause: str, asked: Launch, is_own_address=is_own_address) -> str:
    """Return the machine that an error of gloo or NCCL is about, with its address where the error gives one."""
    found = re.search(r"\[([0-9.]+|[0-9a-f]*:[0-9a-f:]+)\]:\d+", cause)
    address = found[1] if found else None
    if address and is_own_address(address):
        return f"another process of this machine, {address}"
    if asked.num_machines == 2:
        name = f"machine {1 - asked.machine_rank}"
    elif address and address == resolve_name(asked.address or ""):
        name = "machine 0"
    else:
        name = "another machine"
    return f"{name}, {address}" if address else name


def code_of_all(run: dict, output_dir: str | None, asked: Launch, code: int, is_signalled: bool) -> int:
    """Return the exit code of several processes: their launcher forgets it when a signal ends them.

    `run` is what they wrote about their end. Raises `MachineError` where they lost the connection to another machine.
    """
    if code in (0, 1) and run.get("status") == "stopped":
        return EXIT_STOPPED
    if code == 1 and not is_signalled and asked.num_machines > 1:
        cause = str(run.get("cause"))
        if lost := re.search(r"Connection (closed|reset) by peer|Timed out waiting|Broken pipe", cause):
            raise MachineError(
                f"lost the connection to {lost_peer(cause, asked)} ({lost[0]}): its processes ended or hang, or the"
                " network is down. Start the same command on all machines to go on from the last complete checkpoint"
                f" in {output_dir}"
            )
    if is_signalled and output_dir:
        from kit.run_directory import has_progress

        if not has_progress(Path(output_dir)):
            print("stopped    before the first step: there is nothing to save", flush=True)
            return EXIT_STOPPED
    return code


def restarts(run_once, output_dir_of) -> int:
    """Call `run_once`, again while its run stopped because the memory ran out; return the last exit code."""
    for count in range(1, MAX_RESTARTS + 2):
        code, is_signalled = run_once()
        if code != EXIT_STOPPED or is_signalled or count > MAX_RESTARTS:
            break
        if not str(read_run(output_dir_of()).get("cause")).startswith("out of memory"):
            break
        os.environ["TEMPLATES_RESTART_COUNT"] = str(count)  # overwrite_output_dir must not delete a run that goes on
        print(f"memory     ran out: starting the same command again ({count} of at most {MAX_RESTARTS})", flush=True)
    return code


# -- main --------------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin are slow where cores are shared
    plain_options = read_plain(arguments)
    options = plain_options or read_all(arguments)
    if options.config_file is None:
        raise UserError("give a profile: --config_file configs/cpu.yaml")
    profile, script = read_profile(Path(options.config_file)), Path(options.training_script)
    if not script.is_file():
        raise UserError(f"no such script: {script}")
    asked = what_is_asked(profile, options)
    take_rank(asked)
    if asked.num_machines > 1 and asked.address:
        wait_for_name(asked.address)
    refuse(examine(asked, find_machine()))
    os.environ["TEMPLATES_PROFILE"] = options.config_file  # for the banner and run.json
    if asked.num_processes == 1 and asked.kind.startswith("MULTI"):
        profile |= {"distributed_type": "NO", "use_cpu": asked.on_cpu}  # Accelerate asks for two devices at least

    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        normal = Path(folder) / "profile.yaml"  # Accelerate takes fewer ways of writing the same
        normal.write_text(yaml.safe_dump(profile), "utf-8")

        def accelerate_options() -> argparse.Namespace:
            options = read_all(arguments)
            options.config_file, options.num_processes = str(normal), asked.num_processes
            options.machine_rank = asked.machine_rank
            if asked.starts_several:
                options.cpu = False  # to Accelerate it means one process
                options.multi_gpu = asked.kind == "MULTI_CPU"  # not about GPUs: it starts several processes
            return options

        if asked.is_remote:
            return send_job(profile, accelerate_options())
        if asked.starts_several:
            return start_several(accelerate_options, asked, script)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, visible_cores() // asked.local_processes)))
        if is_plain(asked, profile, plain_options):
            command = [sys.executable, str(script), *options.training_script_args]
            os.environ.update(plain_environment(asked))
        else:
            refuse(examine(asked, find_machine(find_devices())))
            command, environment = command_of(accelerate_options())
            os.environ.update(environment)
        read_output_dir = partial(check_script, script, options.training_script_args, reads_data=False)
        return restarts(partial(run_one, command), read_output_dir)


def send_job(profile: dict, options: argparse.Namespace) -> int:
    """Send a training job to Amazon SageMaker and wait for it."""
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import SageMakerConfig

    # Not read by Accelerate 1.15 itself: it adds num_processes to one of distributed_type NO, and then refuses that.
    config = SageMakerConfig(**{"use_cpu": False, "debug": False} | profile)
    options.mixed_precision = options.mixed_precision or config.mixed_precision
    options.dynamo_backend = options.dynamo_backend or "no"
    launch.sagemaker_launcher(config, options)
    return 0


def start_several(accelerate_options, asked: Launch, script: Path) -> int:
    # The machine that ends last finds the first one's store closed. Nothing waits for it any more, but torch prints a
    # page. The variable is read when torch is imported here; the processes of the run keep their warnings.
    is_quiet = asked.num_machines > 1 and "TORCH_CPP_LOG_LEVEL" not in os.environ
    if is_quiet:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        agent = logging.getLogger("torch.distributed.elastic.agent.server.api")
        agent.addFilter(lambda record: "exit barrier" not in record.getMessage())
    devices = find_devices()
    if is_quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    refuse(examine(asked, find_machine(devices)))
    set_environment(asked, devices.kind)
    os.environ["ACCELERATE_MIXED_PRECISION"] = asked.mixed_precision
    options = validate(accelerate_options())
    output_dir = check_script(script, options.training_script_args, reads_data=True)

    def run_once() -> tuple[int, bool]:
        before, began = read_run(output_dir), time.time()
        code, is_signalled = run_several(accelerate_options(), asked)
        run = end_of_run(output_dir, before, began)
        return code_of_all(run, output_dir, asked, code, is_signalled), is_signalled

    return restarts(run_once, lambda: output_dir)


if __name__ == "__main__":
    with exit_codes():
        sys.exit(main(sys.argv[1:]))
