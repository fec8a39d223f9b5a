"""Start a template as a make target does: `accelerate launch` with the mistakes found first and the exit code kept.

    python launch.py --config_file configs/multi_cpu.yaml SCRIPT --config RECIPE.yaml

Takes the options of `accelerate launch`. The profile, the settings and, for several processes, the data are checked
before anything is started. One process replaces this one, so that signals reach it; several are started by
Accelerate's own launcher. Exit code: 0 done, 2 a mistake, 75 stopped after saving, else a failure.
"""

from kit.stopping import EXIT_STOPPED, catch_signals

if __name__ == "__main__":
    catch_signals()  # before the slow imports below

import importlib.util
import json
import os
import sys
from pathlib import Path

from kit.command_line import parse_settings
from kit.errors import MachineError, UserError, exit_codes, one_line
from kit.world import asks_for_cpu, check_machine, visible_cores

MEETING_TIMEOUT = 300  # seconds that the machines of a run wait for each other
STARTS_SEVERAL = ("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "FSDP", "DEEPSPEED")


def refuse(message: str) -> None:
    """Take the place of argparse's own way out, whose usage of a hundred lines hides the message."""
    raise UserError(f"{message} (see accelerate launch --help)")


def read_profile(path: Path) -> dict:
    """Return a profile's keys and values. Raises `UserError` for a missing or unreadable file and unknown keys."""
    import yaml
    from accelerate.commands.config.config_args import ClusterConfig

    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
        raise UserError(f"there is no profile {path}; profiles in {path.parent}/: {there}")
    try:
        profile = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"profile {path} is not YAML: {one_line(error)}") from None
    if not isinstance(profile, dict) or "distributed_type" not in profile:
        raise UserError(f"profile {path} has no distributed_type: write one with `accelerate config`")
    known = set(ClusterConfig.__dataclass_fields__)
    unknown = [str(key) for key in profile if key not in known]
    if unknown:
        raise UserError(f"profile {path} has keys that Accelerate does not know: {', '.join(unknown)}")
    if profile.get("mixed_precision", "no") not in ("no", "fp16", "bf16", "fp8"):
        raise UserError(f"profile {path}: mixed_precision {profile['mixed_precision']} (quote it: 'no', fp16, bf16)")
    return profile


def check_devices(profile: dict, num_processes: int, num_machines: int, name: str, num_devices: int) -> None:
    """Refuse a number of processes that this machine or the profile cannot give. `num_devices` 0 means a CPU."""
    starts_several = profile["distributed_type"] in STARTS_SEVERAL
    if num_processes < 1 or num_machines < 1:
        raise UserError(f"{num_processes} processes on {num_machines} machines ({name}): give 1 at least")
    if num_processes % num_machines:
        raise UserError(
            f"{num_processes} processes on {num_machines} machines ({name}): give a multiple of the machines"
        )
    if num_processes > 1 and not starts_several:
        raise UserError(
            f"{name} starts one process (distributed_type {profile['distributed_type']}), {num_processes} are asked"
            " for: use PROFILE=multi_cpu or PROFILE=multi_gpu"
        )
    local = num_processes // num_machines
    if num_devices and not profile.get("use_cpu") and local > num_devices:
        raise UserError(
            f"{name}: {local} processes asked for on this machine, {num_devices} devices found:"
            f" use NUM_PROCESSES={num_devices * num_machines} (--num_processes {num_devices * num_machines})"
        )


def check_script(script: Path, arguments: list[str], reads_data: bool) -> str | None:
    """Check settings (and data) as the script itself would; return its run directory, None if it has no settings."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(script.parent.resolve()))  # where Python looks first when it runs the script
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "Settings"):
        return None
    settings = parse_settings(module.Settings, module.__doc__, arguments)
    module.check(settings)
    check_machine(settings)
    if reads_data:
        module.load_data(settings)
    return settings.output_dir


def set_environment(profile: dict, local_processes: int) -> None:
    """Set what several CPU processes need to run well, unless the user has."""
    import torch

    if profile.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"  # the launcher does not hand use_cpu on to several processes
    if asks_for_cpu() or not torch.accelerator.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, visible_cores() // local_processes)))
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")


def exit_code_of(output_dir: str | None, codes: list[int]) -> int:
    """Return the exit code of a launch from those of its processes and from run.json."""
    try:
        status = json.loads((Path(output_dir) / "run.json").read_text("utf-8"))["status"] if output_dir else None
    except (OSError, ValueError, KeyError):
        status = None
    if EXIT_STOPPED in codes or status == "stopped":
        return EXIT_STOPPED
    return 2 if 2 in codes else 1


def main(arguments: list[str]) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin are slow where cores are shared
    from accelerate.commands import launch

    parser = launch.launch_command_parser()
    parser.error = refuse
    options = parser.parse_args(arguments)
    if options.config_file is None:
        raise UserError("give a profile: --config_file configs/cpu.yaml")
    path, script = Path(options.config_file), Path(options.training_script)
    profile = read_profile(path)
    if not script.is_file():
        raise UserError(f"there is no script {script}")
    # 0 is an answer, and refused below: only what is not given comes from the profile.
    num_processes, num_machines = (
        int(profile.get(name) or 1) if (given := getattr(options, name)) is None else given
        for name in ("num_processes", "num_machines")
    )

    import torch

    num_devices = 0 if asks_for_cpu() or not torch.accelerator.is_available() else torch.accelerator.device_count()
    check_devices(profile, num_processes, num_machines, str(path), num_devices)
    set_environment(profile, num_processes // num_machines)
    if num_processes == 1 and profile["distributed_type"] not in ("FSDP", "DEEPSPEED"):
        options, _, _ = launch._validate_launch_command(options)
        command, environment = launch.prepare_simple_launcher_cmd_env(options)
        sys.stdout.flush()
        os.execvpe(command[0], command, environment)

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from kit.run_directory import has_progress

    os.environ["ACCELERATE_MIXED_PRECISION"] = options.mixed_precision or profile.get("mixed_precision", "no")
    output_dir = check_script(script, options.training_script_args, reads_data=True)
    where = ""
    if num_machines > 1:
        rank = options.machine_rank if options.machine_rank is not None else profile.get("machine_rank", 0)
        address = options.main_process_ip or profile.get("main_process_ip")
        port = options.main_process_port or profile.get("main_process_port")
        where = f"machine {rank} of {num_machines}, {num_processes} processes, meeting at {address}:{port}"
        options.rdzv_conf = options.rdzv_conf or f"timeout={MEETING_TIMEOUT}"
        print(where, flush=True)
    try:
        launch.launch_command(options)
    except ChildFailedError as error:
        return exit_code_of(output_dir, [failure.exitcode for failure in error.failures.values()])
    except SignalException:
        code = exit_code_of(output_dir, [])
        if code != EXIT_STOPPED and output_dir and not has_progress(Path(output_dir)):
            print("stopped    before the first step: there is nothing to save", flush=True)
            return EXIT_STOPPED
        return code
    except (torch.distributed.DistError, RendezvousError) as error:
        raise MachineError(
            f"{where or 'the processes of this machine'}: they did not find each other ({one_line(error)[:200]}). Is"
            " machine 0 started, its address one that this machine reaches, the port open and free, and --machine_rank"
            " another on each machine?"
        ) from error
    return 0


if __name__ == "__main__":
    with exit_codes():
        sys.exit(main(sys.argv[1:]))
