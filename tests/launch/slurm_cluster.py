"""A throw-away SLURM cluster on this machine: a controller and two nodes in a temporary folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
# Small numbers: jobs of seconds, and a requeued job that starts when the credentials of its first start have expired.
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=10
JobRequeue=1
SlurmdParameters=config_overrides
SwitchType=switch/none
NodeName=DEFAULT CPUs=4 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1024 State=UNKNOWN
NodeName=first NodeHostname={host} NodeAddr=127.0.0.1 Port={first}
NodeName=second NodeHostname={host} NodeAddr=127.0.0.1 Port={second}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here; None if it can."""
    absent = [name for name in PROGRAMS if _which(name) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine (Debian: slurmctld, slurmd, slurm-client, munge)"
    return None if os.geteuid() == 0 else "SLURM's daemons need root"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment variables with which sbatch and its kin find a cluster of two nodes, up until the end."""
    ports = _free_ports(3)
    host = socket.gethostname().split(".")[0]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, host=host, port=ports[0], first=ports[1], second=ports[2]))
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o755)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    environment = os.environ | {"SLURM_CONF": str(config)}
    if not _ask(["scontrol", "--version"], environment).startswith("slurm-wlm 22."):
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")  # else they have to be mounted; 22 refuses it
    with ExitStack() as stack:
        files = [f"--{kind}-file={folder}/munged.{kind}" for kind in ("pid", "log", "seed")]
        socket_file = f"--socket={folder}/munge/socket"
        _start(stack, ["munged", "--foreground", "--force", f"--key-file={key}", socket_file, *files], environment)
        _wait_until((folder / "munge" / "socket").exists)
        _start(stack, ["slurmctld", "-D", "-f", str(config), "-c"], environment)
        for name in ("first", "second"):
            (folder / "spool" / name).mkdir()
            _start(stack, ["slurmd", "-D", "-N", name, "-f", str(config)], environment)
        _wait_until(lambda: _ask(["sinfo", "-h", "-o", "%T"], environment).strip() == "idle")
        try:
            yield environment
        finally:
            _ask(["scancel", "--quiet", "--user", "root"], environment)
            _wait_until(lambda: not _ask(["squeue", "-h"], environment).strip())


def _ask(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


def _start(stack: ExitStack, command: list[str], environment: dict[str, str]) -> None:
    program = _which(command[0])
    assert program is not None
    process = subprocess.Popen([program, *command[1:]], env=environment, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)


def _wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s in vain")
        time.sleep(0.1)


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
