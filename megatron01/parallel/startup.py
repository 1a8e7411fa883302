"""From a launch environment to a replica group: device, backend, time-outs, threads."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron01.config import DistributedConfig
from megatron01.errors import FaultError, UserError
from megatron01.parallel import mpi
from megatron01.parallel.launch import LaunchEnvironment, Place, gloo_interface, nodes_of
from megatron01.parallel.process_groups import (
    LostReplica,
    ReplicaGroup,
    lost_replica,
    name_the_lost,
    open_gloo_group,
    open_in_time,
    open_patient_group,
)
from megatron01.parallel.rendezvous import Announcement, meet, open_store, own_versions


@contextmanager
def initialize(
    environment: LaunchEnvironment,
    config: DistributedConfig,
    facts: Mapping[str, str] | None = None,
    store: dist.Store | None = None,
) -> Iterator[ReplicaGroup]:
    """Joins the job's replicas; leaves and closes the groups at the end.

    A default process group that exists already is used and stays open.

    Args:
        environment: the place of this process in its job.
        config: backends and time-outs.
        facts: short texts by name that must be equal on all processes, beside the versions of what they run.
        store: of the job, where it is open already (``rendezvous.open_store``).

    Raises:
        UserError: if the replicas do not meet or do not fit together, or the backends do not fit the machines or the
            launcher.
    """
    torch.set_flush_denormal(True)  # is inherited by threads, so before any exists; denormals slow products 100 times
    try:
        with _joined(environment, config, facts or {}, store) as group:
            _set_threads(group, config)
            yield group
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _joined(
    environment: LaunchEnvironment, config: DistributedConfig, facts: Mapping[str, str], store: dist.Store | None
) -> Iterator[ReplicaGroup]:
    communicator = mpi.connect(environment) if config.comm_backend == "mpi" else None
    if environment.world_size == 1:
        device = _device(environment, _backend(config, all_have_gpus=torch.cuda.is_available()))
        yield _replica_group(environment, device, communicator, None)
    elif dist.is_initialized():
        timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
        yield _replica_group(environment, _device(environment, dist.get_backend()), communicator, timeout)
    else:
        timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
        store = store or open_store(environment, communicator, timeout)
        device = _open_default_group(environment, config, store, facts, has_mpi=communicator is not None)
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
    environment: LaunchEnvironment,
    config: DistributedConfig,
    store: dist.Store,
    facts: Mapping[str, str],
    *,
    has_mpi: bool,
) -> torch.device:
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    own = Announcement(environment.node_name, _gpu_identity(environment), own_versions(), dict(facts))
    try:
        # The backend must be the same everywhere, although machines may differ: rank 0 decides for all.
        all_have_gpus = meet(store, environment, own, timeout, needs_gpus=config.distributed_backend != "gloo")
    except dist.DistError as error:
        raise FaultError(
            f"{environment.node_name} lost rank 0, at {environment.meeting_place}, while the replicas met; its own"
            f" output says why ({' '.join(str(error).split())[:200]})"
        ) from error
    backend = _backend(config, all_have_gpus=all_have_gpus)
    device = _device(environment, backend)
    if has_mpi:  # gradients travel through MPI, the rest is small
        backend = "gloo"
    try:
        open_in_time(
            lambda: dist.init_process_group(
                backend,
                store=dist.PrefixStore("default_group", store),
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timeout,
                device_id=device if backend == "nccl" else None,
            ),
            timeout,
            backend=backend,
        )
    except RuntimeError as error:
        raise FaultError(_not_connected(environment, backend, error)) from error
    return device


def _not_connected(environment: LaunchEnvironment, backend: str, error: RuntimeError) -> str:
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    used = os.environ.get(variable) or "unset"
    if backend == "gloo" and (interface := gloo_interface()) is not None:
        used += f", so that it uses {interface.name} ({interface.address})"
    return (
        f"the replicas met at {environment.meeting_place}, but {backend} cannot connect {environment.node_name} with"
        f" the others; {variable} is {used}: give the interface that leads to the other nodes, and see that no"
        f" firewall stands between them ({' '.join(str(error).split())[:200]})"
    )


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
        control_group=None if timeout is None else open_gloo_group(timeout),
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
