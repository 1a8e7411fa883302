"""The store at which the processes of a job meet, and where rank 0 serves it."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch.distributed as dist

from megatron01.distributed import mpi
from megatron01.distributed.environment import LaunchEnvironment
from megatron01.errors import FaultError, UserError


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
