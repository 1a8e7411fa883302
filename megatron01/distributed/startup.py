"""From a launch environment to a replica group: device, backend, time-outs, threads."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron01.config import DistributedConfig
from megatron01.distributed import mpi
from megatron01.distributed.environment import LaunchEnvironment
from megatron01.distributed.nodes import Place, nodes_of
from megatron01.distributed.patience import open_patient_group
from megatron01.distributed.replica_group import LostReplica, ReplicaGroup, lost_replica
from megatron01.distributed.roll_call import name_the_lost
from megatron01.errors import FaultError, UserError


@contextmanager
def initialize(environment: LaunchEnvironment, config: DistributedConfig) -> Iterator[ReplicaGroup]:
    """Joins the job's replicas; leaves and closes the groups at the end.

    A default process group that exists already is used and stays open.

    Raises:
        UserError: if the replicas do not meet, or the backends do not fit the machines or the launcher.
    """
    torch.set_flush_denormal(True)  # is inherited by threads, so before any exists; denormals slow products 100 times
    try:
        with _joined(environment, config) as group:
            _set_threads(group, config)
            yield group
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _joined(environment: LaunchEnvironment, config: DistributedConfig) -> Iterator[ReplicaGroup]:
    communicator = mpi.connect(environment) if config.comm_backend == "mpi" else None
    if environment.world_size == 1:
        device = _device(environment, _backend(config, all_have_gpus=torch.cuda.is_available()))
        yield _replica_group(environment, device, communicator, None)
    elif dist.is_initialized():
        timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
        yield _replica_group(environment, _device(environment, dist.get_backend()), communicator, timeout)
    else:
        timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
        device, store = _open_default_group(environment, config, communicator, timeout)
        try:
            try:
                group = _replica_group(environment, device, communicator, timeout)
            except RuntimeError as error:
                if (reason := lost_replica(error)) is None:
                    raise
                raise LostReplica(
                    f"lost another replica while joining the job ({reason}); its own output says why"
                ) from error
            try:
                yield group
            except LostReplica as error:
                raise name_the_lost(error, group, store) from error
        except BaseException:
            if device.type == "cpu":  # nccl would wait for a collective that never ends; leaving closes it too
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()
    if communicator is not None:
        mpi.finalize_at_exit()


def gpu_index(environment: LaunchEnvironment) -> int | None:
    """The GPU of this replica among those it sees: all of the machine (torchrun) or its own alone (srun's binding)."""
    return environment.local_rank % torch.cuda.device_count() if torch.cuda.is_available() else None


def _gpu_identity(environment: LaunchEnvironment) -> str:
    """A name that no other GPU of the job has; empty without one."""
    index = gpu_index(environment)
    return "" if index is None else f"{socket.gethostname()}/{torch.cuda.get_device_properties(index).uuid}"


def each_has_its_own(gpus: list[str]) -> bool:
    """Whether every replica's GPU is named and nobody else's."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def _backend(config: DistributedConfig, *, all_have_gpus: bool) -> str:
    if config.distributed_backend == "auto":
        return "nccl" if all_have_gpus else "gloo"
    if config.distributed_backend == "nccl" and not all_have_gpus:
        raise UserError(
            "distributed_backend is nccl, but a replica has no GPU of its own; start one replica per GPU, or give"
            " --distributed-backend gloo to train on CPUs",
            scope="job",
        )
    return config.distributed_backend


def _device(environment: LaunchEnvironment, backend: str) -> torch.device:
    index = gpu_index(environment)
    if backend != "nccl" or index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _open_default_group(
    environment: LaunchEnvironment, config: DistributedConfig, communicator: Any, timeout: datetime.timedelta
) -> tuple[torch.device, dist.Store]:
    rank, world_size = environment.rank, environment.world_size
    try:
        if communicator is not None and not environment.master_given:
            store = _rendezvous_through_mpi(environment, communicator, timeout)
        else:
            store = _rendezvous(environment, timeout)
        # The backend must be the same everywhere, although machines may differ: rank 0 decides for all.
        store.set(f"gpu/{rank}", _gpu_identity(environment))
        if rank == 0:
            gpus = [store.get(f"gpu/{peer}").decode() for peer in range(world_size)]
            store.set("all_have_gpus", "yes" if each_has_its_own(gpus) else "no")
        all_have_gpus = store.get("all_have_gpus") == b"yes"
        store.set(f"informed/{rank}", "")
        if rank == 0:  # it may serve the store: nobody is to be cut off from the answer when it leaves with an error
            store.wait([f"informed/{peer}" for peer in range(world_size)])
        backend = _backend(config, all_have_gpus=all_have_gpus)
        device = _device(environment, backend)
        if communicator is not None:  # gradients travel through MPI, the rest is small
            backend = "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    except UserError:
        raise
    except RuntimeError as error:  # time-outs, refused connections and unknown hosts alike
        reason = " ".join(str(error).split())
        if "EADDRINUSE" in reason:
            raise UserError(
                f"another program uses port {environment.master_port} on rank 0's machine; give another MASTER_PORT"
            ) from None
        # each for itself: the one that would speak for this machine may be the one that is missing
        raise FaultError(
            f"the {world_size} replicas did not meet at {environment.master_addr}:{environment.master_port} (rank 0's"
            f" machine) within {config.distributed_timeout_minutes:g} minutes; see that all were started and that"
            f" MASTER_ADDR and MASTER_PORT can be reached ({reason[:200]})",
        ) from error
    return device, store


def _rendezvous(environment: LaunchEnvironment, timeout: datetime.timedelta) -> dist.Store:
    if environment.launcher == "torchrun":  # its agent may serve the store already
        store = next(dist.rendezvous("env://", environment.rank, environment.world_size, timeout=timeout))[0]
        # after a restart it still holds what the processes before have written: where they could be reached, for one
        return dist.PrefixStore(f"restart_{environment.restart}", store) if environment.restart else store
    if not environment.master_addr:
        raise UserError(
            "MASTER_ADDR is not set, and this job runs on several machines; start with mpirun -x MASTER_ADDR=<host of"
            " rank 0> (Open MPI) or -genv MASTER_ADDR <host> (MPICH), or give --comm-backend mpi",
            scope="job",
        )
    _require_known_host(environment.master_addr, environment.master_port)
    return dist.TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.world_size,
        is_master=environment.rank == 0,
        timeout=timeout,
    )


def _rendezvous_through_mpi(
    environment: LaunchEnvironment, communicator: Any, timeout: datetime.timedelta
) -> dist.Store:
    """A store that rank 0 opens on a port that is free, and tells the others of."""
    one_machine = environment.local_world_size == environment.world_size
    host, port, store = "127.0.0.1" if one_machine else socket.gethostname(), 0, None
    if environment.rank == 0:
        store = dist.TCPStore(host, 0, environment.world_size, is_master=True, wait_for_workers=False, timeout=timeout)
        port = store.port
    host, port = mpi.agree_on_meeting_place(communicator, host, port)
    if store is None:
        _require_known_host(host, port)
        store = dist.TCPStore(host, port, environment.world_size, is_master=False, timeout=timeout)
    return store


def _require_known_host(host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:  # at once; the store would try until the time-out
        raise UserError(
            f"MASTER_ADDR is {host!r}, a host that this machine cannot find ({error.strerror}); give the name or"
            " address of rank 0's machine",
            scope="node",
        ) from None


def _replica_group(
    environment: LaunchEnvironment, device: torch.device, communicator: Any, timeout: datetime.timedelta | None
) -> ReplicaGroup:
    group = ReplicaGroup(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        device=device,
        process_group=None if timeout is None else dist.group.WORLD,
        control_group=None if timeout is None else dist.new_group(backend="gloo", timeout=timeout),
        patient_group=None if timeout is None else open_patient_group(timeout),
        hosts=[],
        nodes=[],
        mpi_communicator=communicator,
    )
    own = Place(socket.gethostname(), environment.local_rank, environment.local_world_size)
    places = [Place(*place) for place in group.gather(own)]
    return replace(group, hosts=[place.host for place in places], nodes=nodes_of(places))


@dataclass(frozen=True)
class _Cores:
    host: str
    cores: list[int]


def _set_threads(group: ReplicaGroup, config: DistributedConfig) -> None:
    own = _Cores(socket.gethostname(), sorted(os.sched_getaffinity(0)))
    everyone = [_Cores(host, cores) for host, cores in group.gather([own.host, own.cores])]
    neighbours = [other.cores for other in everyone if other.host == own.host]
    # all parts of a replica take as many, as that decides how sums are rounded, and what all of them hold must be equal
    size = config.tensor_model_parallel_size
    parts = everyone[group.rank - group.rank % size :][:size]
    share = min(share_of_cores(part.cores, neighbours) for part in parts)
    torch.set_num_threads(config.threads_per_replica or share)


def share_of_cores(own: list[int], neighbours: list[list[int]]) -> int:
    """Threads for this replica, so that the replicas of a machine together use each core once; at least 1.

    Launchers may bind replicas to cores of their own (srun) or let all use all (torchrun); both come out right.

    Args:
        own: cores that this replica may use.
        neighbours: the same for all replicas of the machine, this one among them.
    """
    shares = sum(1 / sum(core in cores for cores in neighbours) for core in own)
    return max(1, int(shares + 1e-9))
