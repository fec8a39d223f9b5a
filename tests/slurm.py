"""A Slurm cluster of two nodes on this machine, from Debian's packages: slurmctld, two slurmd, their own munged."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
CONFIGURATION = """
ClusterName=templates
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/finished
KillWait=15
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return in one line why no cluster can be made here, None if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)}): apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "slurmd has to be started by root"


@contextmanager
def cluster(folder: Path):
    """Run the cluster; yields the environment in which sbatch, srun and scontrol reach it."""
    with ExitStack() as started:
        sockets = [started.enter_context(socket.socket()) for _ in range(3)]
        for free in sockets:
            free.bind(("", 0))
        ports = [free.getsockname()[1] for free in sockets]
        for free in sockets:
            free.close()
        for name in ("state", "spool.n1", "spool.n2"):
            (folder / name).mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, ports=ports))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

        def start(*command: str) -> None:
            log = started.enter_context(open(folder / f"{command[0]}.out", "a"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            started.callback(process.wait)
            started.callback(process.terminate)

        files = [
            f"--{name}={folder}/munge.{name.split('-')[0]}"
            for name in ("key-file", "pid-file", "log-file", "seed-file")
        ]
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_for(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node)
        wait_for(lambda: ask(environment, "sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"], folder)
        yield environment
        ask(environment, "scancel", "--full", "--state=RUNNING")


def ask(environment: dict, *command: str) -> str:
    """Return what a command of Slurm prints."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30).stdout


def wait_for(condition, folder: Path, limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)
