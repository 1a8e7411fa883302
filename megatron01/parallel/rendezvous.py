"""Rendezvous: the store of a job, the version check of all ranks before they connect, and shared folders.

Each rank publishes a ``RankInfo`` in the store; rank 0 compares them and publishes the outcome. Only the store is
needed, so that differing versions or settings and missing GPUs are found before process groups are opened.
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
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron01
from megatron01.errors import FaultError, UserError
from megatron01.parallel.launch import LaunchEnvironment
from megatron01.parallel.process_groups import ReplicaGroup, call_in_thread, failing_together, format_ranks
from megatron01.utils.formatting import format_duration, one_line

_GRACE = datetime.timedelta(seconds=15)
"""Time after the time-out for rank 0 to publish its decision, and for the others to read it."""


@dataclass(frozen=True)
class RankInfo:
    """What a rank publishes about itself before process groups are opened."""

    node: str  # host name
    gpu: str  # unique name of its GPU within the job; empty without one
    versions: dict[str, str]  # version by package name; must be equal on all ranks, as replicas compute the same bits
    fingerprints: dict[str, str]  # short texts by name that must be equal on all ranks too


def own_versions() -> dict[str, str]:
    """Version by name of everything that affects the bits a replica computes."""
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
    """Hash of this package's source files: tells apart two checkouts with the same version number."""
    package = Path(megatron01.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def check_ranks(
    store: dist.Store,
    environment: LaunchEnvironment,
    own: RankInfo,
    timeout: datetime.timedelta,
    *,
    needs_gpus: bool = True,
) -> bool:
    """Wait for all ranks and check that they run the same versions, program and settings.

    True if each rank has a GPU of its own; the same on all ranks. ``needs_gpus``: a node without GPU is an error where
    other nodes have some.

    Raises:
        FaultError: on every rank that arrived, if some did not arrive in time.
        UserError: on every rank, if versions or fingerprints differ; names the first rank that differs.
    """

    def compare(found: dict[int, Any]) -> tuple[str | None, bool, bool]:
        infos = {rank: RankInfo(**info) for rank, info in found.items()}
        mismatch = _mismatch(infos, needs_gpus)  # may be why some are missing
        missing = None if mismatch else _missing(infos, environment, timeout)
        all_have_gpus = each_has_own_gpu([one.gpu for one in infos.values()])
        return mismatch or missing, missing is not None, all_have_gpus

    # a rank that counts on more would wait for them when groups are opened
    own = replace(own, fingerprints={"the number of processes": str(environment.world_size)} | own.fingerprints)
    error, is_fault, all_have_gpus = decided_by_rank_0(store, environment, "rank_info", asdict(own), compare, timeout)
    if error is not None:
        raise (FaultError if is_fault else UserError)(error, scope="job")
    return bool(all_have_gpus)


def decided_by_rank_0(
    store: dist.Store,
    environment: LaunchEnvironment,
    name: str,
    own: Any,
    decide: Callable[[dict[int, Any]], Any],
    timeout: datetime.timedelta,
) -> Any:
    """Publish a value of each rank in the store, and get what rank 0 decides from them. Called by every rank.

    Raises DistStoreError if rank 0 does not decide in time, or is gone.

    Values and decisions are JSON values; ``decide`` is called on rank 0 with those that arrive in time, by rank.
    """
    rank, ranks = environment.rank, range(environment.world_size)
    store.set(f"{name}/{rank}", json.dumps(own))
    if rank != 0:
        _wait(store, [f"{name}/decision"], timeout + _GRACE)
        decision = store.get(f"{name}/decision")
        store.set(f"{name}/read_by/{rank}", "")
        return json.loads(decision)
    with suppress(dist.DistStoreError):
        _wait(store, [f"{name}/{rank}" for rank in ranks], timeout)
    present = [rank for rank in ranks if store.check([f"{name}/{rank}"])]
    text = json.dumps(decide({rank: json.loads(store.get(f"{name}/{rank}")) for rank in present}))
    store.set(f"{name}/decision", text)
    # rank 0 may serve the store: all must have read the decision before it exits with an error
    with suppress(dist.DistStoreError):
        _wait(store, [f"{name}/read_by/{rank}" for rank in present[1:]], _GRACE)
    return json.loads(text)


def _wait(store: dist.Store, keys: list[str], timeout: datetime.timedelta) -> None:
    """Wait for keys in a thread: in the main one, Ctrl-C would have no effect before the time-out."""
    call_in_thread(lambda: store.wait(keys, timeout)).result()


def each_has_own_gpu(gpus: Sequence[str]) -> bool:
    """True if every rank has a GPU and no two ranks share one."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def _missing(infos: Mapping[int, RankInfo], environment: LaunchEnvironment, timeout: datetime.timedelta) -> str | None:
    missing = [rank for rank in range(environment.world_size) if rank not in infos]
    if not missing:
        return None
    connected = list(dict.fromkeys(one.node for one in infos.values()))
    absent = [node for node in environment.nodes if node not in connected]
    named = f"no process of {', '.join(absent[:8])} connected" if absent else f"connected: {', '.join(connected[:8])}"
    return (
        f"the {environment.world_size} replicas did not all connect to {environment.rendezvous_endpoint} (rank 0's"
        f" machine) within {format_duration(timeout.total_seconds())}; missing: {format_ranks(missing)} ({named});"
        " check that all were started and that MASTER_ADDR and MASTER_PORT can be reached from there"
    )


def _mismatch(infos: Mapping[int, RankInfo], needs_gpus: bool) -> str | None:
    """The first difference between ranks, as an error message; None if there is none."""
    first = infos[0]
    for rank, other in infos.items():
        place, here = f"{other.node} (rank {rank})", f"{first.node} (rank 0)"
        for name, version in first.versions.items():
            if other.versions.get(name) != version:
                return (
                    f"{place} has {name} {other.versions.get(name)}, but {here} has {version}; install the same"
                    " version on every node"
                )
        for name, value in first.fingerprints.items():
            if other.fingerprints.get(name) != value:
                return (
                    f"{place} differs from {here} in {name} ({other.fingerprints.get(name)} and {value}); start all"
                    " replicas with the same program, settings and files"
                )
    without = [rank for rank, one in infos.items() if not one.gpu]
    if needs_gpus and without and len(without) < len(infos):
        nodes = list(dict.fromkeys(infos[rank].node for rank in without))
        return (
            f"no GPU on {', '.join(nodes[:8])} ({format_ranks(without)}), but others have one; see what nvidia-smi says"
            " there, leave the machine out, or give --device cpu"
        )
    return None


def open_store(environment: LaunchEnvironment, communicator: Any, timeout: datetime.timedelta) -> dist.Store:
    """Open the job's key-value store. Rank 0 does not wait for the others here.

    Args:
        communicator: MPI's, or None; used to agree on an endpoint where the environment names none.
        timeout: for connecting to rank 0, and of the store's own waits.

    Raises:
        UserError: if the endpoint is not known, cannot be resolved, or its port is in use by another program.
        FaultError: if rank 0 does not answer there in time.
    """
    try:
        if environment.restart:  # torchrun's agent serves the store
            store = next(dist.rendezvous("env://", environment.rank, environment.world_size, timeout=timeout))[0]
            # it still holds keys written before the restart, such as the addresses of the former processes
            return dist.PrefixStore(f"restart_{environment.restart}", store)
        return _tcp_store(environment, communicator, timeout)
    except RuntimeError as error:  # time-outs and refused connections alike
        reason = one_line(error)
        if "EADDRINUSE" in reason:
            raise UserError(
                f"another program uses port {environment.master_port} on rank 0's machine ({socket.gethostname()});"
                " give another MASTER_PORT"
            ) from None
        if environment.rank == 0:
            raise FaultError(
                f"rank 0, on {socket.gethostname()}, does not reach itself at {environment.rendezvous_endpoint} within"
                f" {format_duration(timeout.total_seconds())}: set MASTER_ADDR to the name or address of"
                f" {socket.gethostname()} ({reason[:200]})"
            ) from error
        # printed by every rank: local rank 0 of this machine may be the one that is missing
        raise FaultError(
            f"the {environment.world_size} replicas did not all connect to {environment.rendezvous_endpoint} (rank 0's"
            f" machine) within {format_duration(timeout.total_seconds())}: {socket.gethostname()} gets no answer from"
            f" there; check that rank 0 was started and that MASTER_ADDR and MASTER_PORT can be reached"
            f" ({reason[:200]})"
        ) from error


def _tcp_store(environment: LaunchEnvironment, communicator: Any, timeout: datetime.timedelta) -> dist.TCPStore:
    """Store at MASTER_ADDR; over MPI without one, on a free port that rank 0 opens and broadcasts."""
    host, port, is_first = environment.master_addr, environment.master_port, environment.rank == 0
    over_mpi = communicator is not None and not environment.master_given
    if over_mpi:
        one_machine = environment.local_world_size == environment.world_size
        host, port = "127.0.0.1" if one_machine else socket.gethostname(), 0
        if not is_first:
            host, port = communicator.bcast(None, root=0)
    if not host:
        raise UserError(
            "MASTER_ADDR is not set, and this job runs on several machines; start with mpirun -x MASTER_ADDR=<host of"
            " rank 0> (Open MPI) or -genv MASTER_ADDR <host> (MPICH), or give --comm-backend mpi",
            scope="job",
        )
    if port > 0:
        try:
            socket.getaddrinfo(host, port)
        except OSError as error:  # fails at once; the store would retry until the time-out
            raise UserError(
                f"MASTER_ADDR is {host!r}, a host that {socket.gethostname()} cannot find ({error.strerror}); give the"
                " name or address of rank 0's machine",
                scope="node",
            ) from None
    opened = call_in_thread(  # as ``_wait``
        lambda: dist.TCPStore(
            host, port, environment.world_size, is_master=is_first, wait_for_workers=False, timeout=timeout
        )
    )
    try:
        store = opened.result(timeout.total_seconds() + 1.0)
    except TimeoutError:  # torch tries a second time, for as long again
        raise RuntimeError("not connected in time") from None
    if over_mpi and is_first:
        communicator.bcast((host, store.port), root=0)
    return store


FILE_SYSTEM_DELAY_SECONDS = 60.0  # how long a network file system may cache that a file does not exist


def require_shared(folder: str | Path, group: ReplicaGroup, *, timeout: float = FILE_SYSTEM_DELAY_SECONDS) -> None:
    """Check that a folder is one shared folder for all ranks: rank 0 writes a file that all must see. Collective.

    Raises UserError on every process, naming the machines that do not see the file, or why rank 0 cannot write it.
    """
    folder = Path(folder)
    (token, *_) = group.gather(secrets.token_hex(8))
    probe = folder / f".shared_{token}"
    with failing_together(group, f"writing into {folder}"):
        if group.is_first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe.touch()
            except OSError as error:
                raise UserError(f"cannot write into {folder} on {group.hosts[0]}: {error.strerror}") from None
    try:
        found = group.gather(_finds(probe, timeout))
    finally:
        if group.is_first:
            probe.unlink(missing_ok=True)
    without = list(dict.fromkeys(host for host, finds in zip(group.hosts, found, strict=True) if not finds))
    if without:
        raise UserError(
            f"{folder} on {', '.join(without[:8])} is not the folder of that name on {group.hosts[0]}; expected a file"
            " system that all nodes share: mount it there, or give another folder",
            scope="job",
        )


def _finds(probe: Path, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while True:
        with suppress(OSError):
            if probe.name in os.listdir(probe.parent):  # unlike stat, it makes network file systems refresh their cache
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
