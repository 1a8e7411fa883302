"""Launch environment of torchrun, srun or mpirun: rank, world size, master address; network interfaces; nodes.

Does not import torch.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import socket
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatron01.errors import UserError, require

Launcher = Literal["torchrun", "srun", "mpirun", "single process"]

DEFAULT_PORT = 29500  # torchrun's
_MOST = 10**6  # numbers of a range of hosts
_DERIVED_PORTS = range(15000, 30000)  # below the range from which Linux takes the ports of outgoing connections


class _Variables(NamedTuple):
    """Names of a launcher's environment variables; ``job``: those whose values tell jobs apart."""

    launcher: Launcher
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: tuple[str, ...] = ()


_TORCHRUN = _Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _Variables(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE",),
)
_PMI = _Variables("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("SLURM_JOB_ID",))
_SRUN = _Variables(
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",  # of every node
    # with the restart count: if another program holds the port, the next attempt takes another
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"),
)


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Rank and world size of this process, as its launcher set them; by default, a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes of this machine
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"  # host of rank 0; empty if no variable names it, as with mpirun over machines
    master_port: int = DEFAULT_PORT
    launcher: Launcher = "single process"
    master_given: bool = True  # whether MASTER_ADDR is set; if not, address and port are derived
    restart: str = ""  # restart count, if torchrun's agent keeps the store over restarts
    node: str = ""  # SLURM's name of this machine
    nodes: tuple[str, ...] = ()  # SLURM's names of all machines of the job
    ends_together: bool = True  # whether the launcher ends the other processes when one has failed

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> LaunchEnvironment:
        """Read the variables of torchrun, mpirun (Open MPI, MPICH, Intel MPI) or srun; without them, a single process.

        The innermost launcher wins: torchrun may run inside srun, and mpirun starts its own daemons with srun. A plain
        ``python`` inside an salloc or sbatch shell is a single process, although SLURM_PROCID and SLURM_NTASKS are set.
        Raises UserError if variables are missing, not numbers, or contradict each other.
        """
        if "RANK" in environ or "WORLD_SIZE" in environ:
            names = _TORCHRUN
        elif "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
            names = _OPEN_MPI
        elif _is_srun_task(environ):
            names = _SRUN
        elif "PMI_RANK" in environ or "PMI_SIZE" in environ:
            names = _PMI
        else:
            return cls()
        rank = environment_number(environ, names.rank, names.world_size)
        world_size = environment_number(environ, names.world_size, names.rank)
        local_rank, local_world_size = 0, 1
        if world_size > 1:  # some launchers leave out the local ones for a single process
            local_rank = environment_number(environ, names.local_rank, names.rank)
            if names is _SRUN:
                local_world_size = _tasks_on_own_node(environ, world_size)
            else:
                local_world_size = environment_number(environ, names.local_world_size, names.local_rank)
        address, port = _master(environ, names, one_machine=local_world_size >= world_size)
        slurm_nodes = expand_host_list(environ.get("SLURM_STEP_NODELIST") or "localhost") if names is _SRUN else ()
        kept_by_agent = names is _TORCHRUN and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master_addr=address,
            master_port=port,
            launcher=names.launcher,
            master_given=bool(environ.get("MASTER_ADDR")),
            restart=environ.get("TORCHELASTIC_RESTART_COUNT", "") if kept_by_agent else "",
            node=environ.get("SLURMD_NODENAME", "") if names is _SRUN else "",
            nodes=tuple(slurm_nodes),
            ends_together=names is not _TORCHRUN or "TORCHELASTIC_RUN_ID" in environ,  # else the variables are by hand
        )

    @property
    def node_name(self) -> str:
        """Name of this machine, for messages."""
        return self.node or socket.gethostname()

    @property
    def rendezvous_endpoint(self) -> str:
        """Address of the store, for messages."""
        return f"{self.master_addr}:{self.master_port}" if self.master_addr else "the endpoint agreed on over MPI"

    def __post_init__(self) -> None:
        require(
            0 <= self.rank < self.world_size,
            f"{self.launcher} says rank {self.rank} of {self.world_size} processes; expected a rank from 0 to the"
            " number of processes minus 1",
        )
        require(
            0 <= self.local_rank < self.local_world_size <= self.world_size,
            f"{self.launcher} says local rank {self.local_rank} of {self.local_world_size} processes on this machine"
            f" and {self.world_size} in all; expected a local rank from 0 to the number on this machine minus 1",
        )
        require(0 < self.master_port < 65536, f"MASTER_PORT is {self.master_port}; expected a port from 1 to 65535")


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    """True if srun started this process as a task; False in the shell of sbatch or salloc.

    srun sets variables of the step, the shells have those of the job. MPICH's mpirun inside a job starts its daemons
    as a step of their own: then PMI_SIZE counts the ranks, and differs from the step's number of tasks.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        return False
    return environ.get("PMI_SIZE", environ["SLURM_STEP_NUM_TASKS"]) == environ["SLURM_STEP_NUM_TASKS"]


def _tasks_on_own_node(environ: Mapping[str, str], world_size: int) -> int:
    tasks_per_node = expand_tasks_per_node(environ.get(_SRUN.local_world_size, str(world_size)))
    node = environment_number(environ, "SLURM_NODEID", _SRUN.rank) if len(tasks_per_node) > 1 else 0
    if node >= len(tasks_per_node):
        raise UserError(f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE names {len(tasks_per_node)} nodes")
    return tasks_per_node[node]


def expand_host_list(hosts: str) -> list[str]:
    """Expand a SLURM host list: ``a[01-03,7]-x,b`` is a01-x, a02-x, a03-x, a7-x, b. UserError for any other form."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts):
        parts = re.split(r"\[([^\[\]]*)\]", item)  # at odd indices: the contents of brackets
        choices = [_expand_ranges(part, item) if index % 2 else [part] for index, part in enumerate(parts)]
        names += map("".join, itertools.product(*choices))
    if not names or hosts.count("[") != hosts.count("]"):
        raise UserError(f"cannot read the list of hosts {hosts!r}; expected a form such as node[01-03,7],other")
    return names


def _expand_ranges(ranges: str, item: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        if bounds is None or int(bounds[2] or bounds[1]) - int(bounds[1]) >= _MOST:
            raise UserError(f"cannot read the list of hosts {item!r}; expected numbers and ranges in the brackets")
        first, last = bounds[1], bounds[2] or bounds[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks_per_node(counts: str) -> list[int]:
    """Expand SLURM's numbers of tasks per node: ``2(x3),1`` is 2, 2, 2, 1. Raises UserError for any other form."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE is {counts!r}; expected a form such as 2(x3),1")
        expanded += [int(match.group(1))] * int(match.group(2) or 1)
    return expanded


def _master(environ: Mapping[str, str], names: _Variables, *, one_machine: bool) -> tuple[str, int]:
    """Address and port of rank 0: MASTER_ADDR, else the loopback on one machine, else the first host in SLURM's list.

    Without any of them UserError is raised; with mpirun the address is empty, as ranks may agree on one over MPI.
    Without MASTER_PORT the port is derived from the job's variables.
    """
    job = "/".join(environ[name] for name in names.job if name in environ)
    port = _DERIVED_PORTS[zlib.crc32(job.encode()) % len(_DERIVED_PORTS)] if job else DEFAULT_PORT
    if "MASTER_PORT" in environ:
        port = environment_number(environ, "MASTER_PORT", "MASTER_ADDR")
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], port
    if one_machine:
        return "127.0.0.1", port
    if hosts := environ.get("SLURM_STEP_NODELIST" if names is _SRUN else "SLURM_JOB_NODELIST"):
        return expand_host_list(hosts)[0], port
    if names.launcher == "mpirun":
        return "", port
    raise UserError("MASTER_ADDR is not set, and this job runs on several machines; set it to the host of rank 0")


def environment_number(environ: Mapping[str, str], name: str, because_of: str) -> int:
    """The value of a variable. Raises UserError if it is no number, or missing although ``because_of`` is set."""
    text = environ.get(name)
    if text is None:
        raise UserError(f"{because_of} is set but {name} is not; start the program with one launcher, or set both")
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} is {text!r}; expected a whole number") from None


_SIOCGIFADDR = 0xC0206921 if sys.platform == "darwin" else 0x8915  # the IPv4 address of an interface


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address; ``megabits``: speed in Mbit/s, None if its driver reports none."""

    name: str
    address: str
    megabits: int | None


def interfaces() -> list[Interface]:
    """Network interfaces of this machine that have an IPv4 address, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            found.append(Interface(name, socket.inet_ntoa(answer[20:24]), _megabits(name)))
    return found


def gloo_interface(environ: Mapping[str, str] = os.environ) -> Interface | None:
    """The interface that torch's gloo listens on; None if it is not among ``interfaces``.

    Chosen as torch does: the first of GLOO_SOCKET_IFNAME, else that of the first address of this machine that its name
    resolves to, else the loopback, which no other machine reaches.
    """
    available = interfaces()
    if chosen := environ.get("GLOO_SOCKET_IFNAME"):
        return next((each for each in available if each.name == chosen.split(",")[0]), None)
    address = next(filter(_is_own, own_addresses()), "127.0.0.1")
    if is_loopback(address):
        return next((each for each in available if is_loopback(each.address)), None)
    return next((each for each in available if each.address == address), None)


def own_addresses() -> list[str]:
    """IPv4 and IPv6 addresses that this machine's name resolves to; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    except OSError:
        return []


def _is_own(address: str) -> bool:
    """True if an address is one of this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _megabits(name: str) -> int | None:
    try:
        speed = int(Path("/sys/class/net", name, "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


class Place(NamedTuple):
    """Host name and local rank of a process."""

    host: str
    local_rank: int
    local_world_size: int


def nodes_of(places: Sequence[Place]) -> list[list[int]]:
    """Ranks of each node, ordered by local rank; nodes ordered by their lowest rank.

    Several nodes may share a host name (containers, simulated nodes), and ranks may be placed block-wise or cyclically:
    of the processes of a host with the same local rank, the k-th is on the host's k-th node.
    """
    nodes: dict[tuple[str, int, int], list[int]] = {}
    met: dict[Place, int] = {}
    for rank, place in enumerate(places):
        number = met[place] = met.get(place, 0) + 1
        nodes.setdefault((place.host, place.local_world_size, number), []).append(rank)
    return [sorted(ranks, key=lambda rank: places[rank].local_rank) for ranks in nodes.values()]
