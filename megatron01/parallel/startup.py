"""Initialization of a job's process groups: device, backend, time-outs, threads."""

from __future__ import annotations

import datetime
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron01.config import DistributedConfig
from megatron01.errors import FaultError, UserError
from megatron01.parallel import mpi, peer_watch
from megatron01.parallel.launch import LaunchEnvironment, Place, gloo_interface, nodes_of
from megatron01.parallel.process_groups import (
    LostReplica,
    ReplicaGroup,
    close_default_group,
    lost_replica,
    open_gloo_group,
    open_in_time,
    timeout_for,
)
from megatron01.parallel.program import ending_with_launcher
from megatron01.parallel.rendezvous import RankInfo, check_ranks, open_store, own_versions
from megatron01.utils.formatting import one_line
from megatron01.utils.system import usable_cores


@contextmanager
def initialize(
    environment: LaunchEnvironment,
    config: DistributedConfig,
    fingerprints: Mapping[str, str] | None = None,
    store: dist.Store | None = None,
) -> Iterator[ReplicaGroup]:
    """Open the job's process groups, which are closed on exit; a default group that is already open stays open.

    Raises UserError if the rendezvous fails, ranks do not match, or the backend does not fit the machines or launcher.

    Args:
        fingerprints: short texts by name that must be equal on all ranks, beside their versions.
        store: the job's key-value store, if it is already open (``rendezvous.open_store``).
    """
    # inherited by threads, so set before any starts; denormals make matrix products 100 times slower
    torch.set_flush_denormal(True)
    try:
        with ending_with_launcher(environment), _joined(environment, config, fingerprints or {}, store) as group:
            _set_threads(group, config)
            yield group
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _joined(
    environment: LaunchEnvironment, config: DistributedConfig, fingerprints: Mapping[str, str], store: dist.Store | None
) -> Iterator[ReplicaGroup]:
    if _wants_gpus(config):
        require_working_driver()
    communicator = mpi.connect(environment) if config.comm_backend == "mpi" else None
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    if environment.world_size == 1:
        device = _device(environment, config, _backend(config, all_have_gpus=torch.cuda.is_available()))
        yield _replica_group(environment, device, communicator, timeout)
    elif dist.is_initialized():
        yield _replica_group(environment, _device(environment, config, dist.get_backend()), communicator, timeout)
    else:
        store = store or open_store(environment, communicator, timeout)
        device = _open_default_group(environment, config, store, fingerprints, has_mpi=communicator is not None)
        try:
            try:
                group = _replica_group(environment, device, communicator, timeout)
            except RuntimeError as error:
                if (reason := lost_replica(error)) is None:
                    raise
                raise LostReplica(
                    f"lost another replica while joining the job ({reason}); its own output says why"
                ) from error
            with peer_watch.watching_peers(group, store):
                yield group
        except BaseException:
            # destroying an NCCL group would wait for a collective that never ends; exiting closes it too
            if not peer_watch.waits_without_end(dist.get_backend()):
                close_default_group()
            raise
        close_default_group()
    if communicator is not None:
        mpi.finalize_at_exit()


def _wants_gpus(config: DistributedConfig) -> bool:
    """True if the settings ask for GPUs where there are any."""
    return config.device == "cuda" or (config.device == "auto" and config.distributed_backend != "gloo")


def require_working_driver() -> None:
    """Raises UserError if NVIDIA's driver is too old for torch, which would silently use the CPU."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "driver" in str(error) and "too old" in str(error):
            found = re.search(r"found version (\d+)", str(error))
            version = "" if found is None else f" (it is for CUDA {int(found[1]) // 1000}.{int(found[1]) % 1000 // 10})"
            raise UserError(
                f"the NVIDIA driver of {socket.gethostname()} is too old{version} for torch {torch.__version__}, which"
                f" needs CUDA {torch.version.cuda}; update it, install a torch for an older CUDA, or give --device cpu",
                scope="node",
            ) from None


def gpu_index(environment: LaunchEnvironment) -> int | None:
    """CUDA device index of this rank, which may see all GPUs of the machine (torchrun) or only its own (srun)."""
    return environment.local_rank % torch.cuda.device_count() if torch.cuda.is_available() else None


def _gpu_identity(environment: LaunchEnvironment) -> str:
    """Value of ``RankInfo.gpu``: host name and UUID of this rank's GPU."""
    index = gpu_index(environment)
    return "" if index is None else f"{socket.gethostname()}/{torch.cuda.get_device_properties(index).uuid}"


def _backend(config: DistributedConfig, *, all_have_gpus: bool) -> str:
    if config.distributed_backend == "auto":
        return "nccl" if all_have_gpus and config.device != "cpu" else "gloo"
    if config.distributed_backend == "nccl" and not all_have_gpus:
        raise UserError(
            "distributed_backend is nccl, but a replica has no GPU of its own; start one replica per GPU, or give"
            " --distributed-backend gloo to train on CPUs, with --device cuda on GPUs that replicas share",
            scope="job",
        )
    return config.distributed_backend


def _device(environment: LaunchEnvironment, config: DistributedConfig, backend: str) -> torch.device:
    index = gpu_index(environment)
    if config.device == "cuda" and index is None:
        raise UserError(
            f"device is cuda, but torch sees no GPU on {socket.gethostname()}; give --device cpu", scope="node"
        )
    if index is None or config.device == "cpu" or (config.device == "auto" and backend != "nccl"):
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _open_default_group(
    environment: LaunchEnvironment,
    config: DistributedConfig,
    store: dist.Store,
    fingerprints: Mapping[str, str],
    *,
    has_mpi: bool,
) -> torch.device:
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    own = RankInfo(environment.node_name, _gpu_identity(environment), own_versions(), dict(fingerprints))
    try:
        # The backend must be the same everywhere, although machines may differ: rank 0 decides for all.
        all_have_gpus = check_ranks(store, environment, own, timeout, needs_gpus=_wants_gpus(config))
    except dist.DistError as error:
        raise FaultError(
            f"{environment.node_name} lost rank 0, at {environment.rendezvous_endpoint}, during the rendezvous; its own"
            f" output says why ({one_line(error, 200)})"
        ) from error
    backend = _backend(config, all_have_gpus=all_have_gpus)
    device = _device(environment, config, backend)
    if has_mpi:  # gradients travel through MPI, the rest is small
        backend = "gloo"
    if backend == "nccl":  # else torch aborts the process, with a trace, before the peer watch has named the lost rank
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    try:
        open_in_time(
            lambda: dist.init_process_group(
                backend,
                store=dist.PrefixStore("default_group", store),
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timeout_for(backend, timeout),
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
        f"the rendezvous at {environment.rendezvous_endpoint} succeeded, but {backend} cannot connect"
        f" {environment.node_name} with the others; {variable} is {used}: give the interface that"
        f" leads to the other nodes, and check that no firewall blocks them"
        f" ({one_line(error, 200)})"
    )


def _replica_group(
    environment: LaunchEnvironment, device: torch.device, communicator: Any, timeout: datetime.timedelta
) -> ReplicaGroup:
    has_peers = environment.world_size > 1
    group = ReplicaGroup(
        rank=environment.rank,
        world_size=environment.world_size,
        device=device,
        timeout=timeout,
        hosts=[],
        nodes=[],
        process_group=dist.group.WORLD if has_peers else None,
        control_group=open_gloo_group(timeout) if has_peers else None,
        long_timeout_group=open_gloo_group(timeout, long_timeout=True) if has_peers else None,
        mpi_communicator=communicator,
    )
    own = Place(socket.gethostname(), environment.local_rank, environment.local_world_size)
    places = [Place(*place) for place in group.gather(own)]
    return replace(group, hosts=[place.host for place in places], nodes=nodes_of(places))


def _set_threads(group: ReplicaGroup, config: DistributedConfig) -> None:
    cores = group.gather(usable_cores())
    own_host = group.hosts[group.rank]
    neighbours = [own for own, host in zip(cores, group.hosts, strict=True) if host == own_host]
    # equal on all tensor-parallel ranks of a replica: the number of threads affects how sums are rounded
    size = config.tensor_model_parallel_size
    replica = cores[group.rank - group.rank % size :][:size]
    share = min(share_of_cores(own, neighbours) for own in replica)
    torch.set_num_threads(config.threads_per_replica or share)


def share_of_cores(own: list[int], neighbours: list[list[int]]) -> int:
    """Number of threads for a rank, so that the ranks of a machine together use each core once; at least 1.

    Handles ranks bound to cores of their own (srun) and ranks that share all cores (torchrun). ``own`` are the cores
    that the rank may use, ``neighbours`` those of all ranks of the machine, this one among them.
    """
    shares = sum(1 / sum(core in cores for cores in neighbours) for core in own)
    return max(1, int(shares + 1e-9))
