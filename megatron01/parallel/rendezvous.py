"""How the processes of a job meet: each announces itself in the store, and rank 0 tells all whether they fit together.

It takes a store alone, so that what would break the connections between the processes is found before they are made.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron01
from megatron01.errors import FaultError, UserError
from megatron01.parallel import mpi
from megatron01.parallel.launch import LaunchEnvironment
from megatron01.parallel.process_groups import ReplicaGroup, failing_together

_GRACE = datetime.timedelta(seconds=15)
"""After the time-out, until rank 0 has said who is missing, and everybody has heard it."""


@dataclass(frozen=True)
class Announcement:
    """What a process tells of itself.

    Attributes:
        node: the name of its machine.
        gpu: a name that no other GPU of the job has; empty without one.
        versions: by name; they must be equal everywhere, as replicas compute the same bits.
        facts: other things that must be equal, by name: short texts.
    """

    node: str
    gpu: str
    versions: dict[str, str]
    facts: dict[str, str]


def own_versions() -> dict[str, str]:
    """Of what decides about the bits that a replica computes."""
    try:
        own = metadata.version("megatron01")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "megatron01": f"{own} ({_digest_of_sources()})",
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def _digest_of_sources() -> str:
    """Tells two states of this package apart, of which both may call themselves by the same version."""
    package = Path(megatron01.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def meet(
    store: dist.Store,
    environment: LaunchEnvironment,
    own: Announcement,
    timeout: datetime.timedelta,
    *,
    needs_gpus: bool = True,
) -> bool:
    """Waits until all processes have announced themselves.

    Args:
        store: that all of them reach.
        own: what this one tells.
        timeout: for the others to come.
        needs_gpus: a node without GPU is a mistake where others have some.

    Returns:
        Whether each has a GPU of its own, the same on all processes.

    Raises:
        FaultError: on every process that came, if some did not.
        UserError: on every process, if they do not fit together. The first one that differs is named.
    """
    ranks = range(environment.world_size)
    store.set(f"announced/{environment.rank}", json.dumps(asdict(own)))
    if environment.rank == 0:
        keys = [f"announced/{rank}" for rank in ranks]
        with suppress(dist.DistStoreError):
            store.wait(keys, timeout)
        present = [rank for rank in ranks if store.check([keys[rank]])]
        announced = {rank: Announcement(**json.loads(store.get(keys[rank]))) for rank in present}
        error = _missing(announced, environment, timeout) or _misfit(announced, needs_gpus)
        all_have_gpus = each_has_its_own([one.gpu for one in announced.values()])
        verdict = json.dumps([error, len(present) < len(ranks), all_have_gpus])
        store.set("verdict", verdict)
        # it may serve the store: nobody is to be cut off from the answer when it leaves with an error
        with suppress(dist.DistStoreError):
            store.wait([f"informed/{rank}" for rank in present if rank != 0], _GRACE)
    else:
        store.wait(["verdict"], timeout + _GRACE)
        verdict = store.get("verdict").decode()
        store.set(f"informed/{environment.rank}", "")
    error, is_fault, all_have_gpus = json.loads(verdict)
    if error is not None:
        raise (FaultError if is_fault else UserError)(error, scope="job")
    return bool(all_have_gpus)


def each_has_its_own(gpus: Sequence[str]) -> bool:
    """Whether every replica's GPU is named and nobody else's."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 8-15, 20``: the first few stretches of them."""
    stretches: list[list[int]] = []
    for rank in sorted(ranks):
        if stretches and rank == stretches[-1][-1] + 1:
            stretches[-1][-1:] = [rank] if len(stretches[-1]) == 2 else [stretches[-1][-1], rank]
        else:
            stretches.append([rank])
    shown = ", ".join("-".join(map(str, stretch)) for stretch in stretches[:8])
    more = " and more" if len(stretches) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _missing(
    announced: Mapping[int, Announcement], environment: LaunchEnvironment, timeout: datetime.timedelta
) -> str | None:
    missing = [rank for rank in range(environment.world_size) if rank not in announced]
    if not missing:
        return None
    came = list(dict.fromkeys(one.node for one in announced.values()))
    absent = [node for node in environment.nodes if node not in came]
    named = f" (nobody came from {', '.join(absent[:8])})" if absent else f" ({', '.join(came[:8])} came)"
    return (
        f"the {environment.world_size} replicas did not meet at {environment.meeting_place} (rank 0's machine) within"
        f" {timeout.total_seconds() / 60:g} minutes: no sign of {in_words(missing)}{named}; see that all were started"
        " and that MASTER_ADDR and MASTER_PORT can be reached from there"
    )


def _misfit(announced: Mapping[int, Announcement], needs_gpus: bool) -> str | None:
    """What keeps these processes from working together; None if nothing does."""
    first = announced[0]
    for rank, other in announced.items():
        place, here = f"{other.node} (rank {rank})", f"{first.node} (rank 0)"
        for name, version in first.versions.items():
            if other.versions.get(name) != version:
                return (
                    f"{place} has {name} {other.versions.get(name)}, but {here} has {version}; install the same"
                    " version on every node"
                )
        for name, value in first.facts.items():
            if other.facts.get(name) != value:
                return (
                    f"{place} differs from {here} in {name} ({other.facts.get(name)} and {value}); start all replicas"
                    " with the same program, settings and files"
                )
    without = [rank for rank, one in announced.items() if not one.gpu]
    if needs_gpus and without and len(without) < len(announced):
        nodes = list(dict.fromkeys(announced[rank].node for rank in without))
        return (
            f"no GPU on {', '.join(nodes[:8])} ({in_words(without)}), but others have one; see what nvidia-smi says"
            " there, leave the machine out, or give --distributed-backend gloo to train on CPUs"
        )
    return None


# The store at which the processes of a job meet, and where rank 0 serves it.


def open_store(environment: LaunchEnvironment, communicator: Any, timeout: datetime.timedelta) -> dist.Store:
    """The job's store. Rank 0 waits for nobody here.

    Args:
        environment: of this process.
        communicator: MPI's, or None; it tells the place of meeting where the environment does not.
        timeout: for reaching rank 0, and of the store's own waits.

    Raises:
        UserError: if the place of meeting is not known, not to be found, or taken by another program.
        FaultError: if rank 0 does not answer there in time.
    """
    try:
        if communicator is not None and not environment.master_given:
            return _agreed_through_mpi(environment, communicator, timeout)
        if environment.restart:  # torchrun's agent serves the store
            store = next(dist.rendezvous("env://", environment.rank, environment.world_size, timeout=timeout))[0]
            # it still holds what the processes before a restart have written: where they could be reached, for one
            return dist.PrefixStore(f"restart_{environment.restart}", store)
        return _at_master(environment, timeout)
    except UserError:
        raise
    except RuntimeError as error:  # time-outs and refused connections alike
        reason = " ".join(str(error).split())
        if "EADDRINUSE" in reason:
            raise UserError(
                f"another program uses port {environment.master_port} on rank 0's machine ({socket.gethostname()});"
                " give another MASTER_PORT"
            ) from None
        # each for itself: the one that would speak for this machine may be the one that is missing
        raise FaultError(
            f"the {environment.world_size} replicas did not meet at {environment.meeting_place} (rank 0's machine)"
            f" within {timeout.total_seconds() / 60:g} minutes: {socket.gethostname()} gets no answer from there; see"
            f" that rank 0 was started and that MASTER_ADDR and MASTER_PORT can be reached ({reason[:200]})"
        ) from error


def _at_master(environment: LaunchEnvironment, timeout: datetime.timedelta) -> dist.Store:
    if not environment.master_addr:
        raise UserError(
            "MASTER_ADDR is not set, and this job runs on several machines; start with mpirun -x MASTER_ADDR=<host of"
            " rank 0> (Open MPI) or -genv MASTER_ADDR <host> (MPICH), or give --comm-backend mpi",
            scope="job",
        )
    _require_known_host(environment.master_addr, environment.master_port)
    return _tcp_store(environment, environment.master_addr, environment.master_port, timeout)


def _agreed_through_mpi(environment: LaunchEnvironment, communicator: Any, timeout: datetime.timedelta) -> dist.Store:
    """A store that rank 0 opens on a port that is free, and tells the others of."""
    one_machine = environment.local_world_size == environment.world_size
    host, port, store = "127.0.0.1" if one_machine else socket.gethostname(), 0, None
    if environment.rank == 0:
        store = _tcp_store(environment, host, 0, timeout)
        port = store.port
    host, port = mpi.agree_on_meeting_place(communicator, host, port)
    if store is None:
        _require_known_host(host, port)
        store = _tcp_store(environment, host, port, timeout)
    return store


def _tcp_store(environment: LaunchEnvironment, host: str, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    return dist.TCPStore(
        host,
        port,
        environment.world_size,
        is_master=environment.rank == 0,
        wait_for_workers=False,
        timeout=timeout,
    )


def _require_known_host(host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:  # at once; the store would try until the time-out
        raise UserError(
            f"MASTER_ADDR is {host!r}, a host that {socket.gethostname()} cannot find ({error.strerror}); give the name"
            " or address of rank 0's machine",
            scope="node",
        ) from None


# Whether a folder is one and the same for all processes of a job.


PATIENCE_SECONDS = 60.0
"""A network file system may remember for so long that there was no such file."""


def require_shared(
    folder: str | Path, group: ReplicaGroup, *, patience: float = PATIENCE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Rank 0 makes the folder and a file in it, which every other process must find. All call it together.

    Raises:
        UserError: on every process, naming the machines that do not find it, or what keeps rank 0 from writing.
    """
    folder = Path(folder)
    (word, *_) = group.gather(secrets.token_hex(8))
    sign = folder / f".shared_{word}"
    with failing_together(group, f"writing into {folder}"):
        if group.is_first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                sign.write_text(word)
            except OSError as error:
                raise UserError(f"cannot write into {folder} on {group.hosts[0]}: {error.strerror}") from None
    try:
        found = group.gather(_finds(sign, word, clock() + patience, clock))
    finally:
        if group.is_first:
            sign.unlink(missing_ok=True)
    without = list(dict.fromkeys(host for host, finds in zip(group.hosts, found, strict=True) if not finds))
    if without:
        raise UserError(
            f"{folder} on {', '.join(without[:8])} is not the folder of that name on {group.hosts[0]}; expected a file"
            " system that all nodes share: mount it there, or give another folder",
            scope="job",
        )


def _finds(sign: Path, word: str, deadline: float, clock: Callable[[], float]) -> bool:
    while True:
        try:
            os.listdir(sign.parent)  # makes network file systems look again
            if sign.read_text() == word:
                return True
        except OSError:
            pass
        if clock() >= deadline:
            return False
        time.sleep(0.2)
