"""Runs a function on several ranks, each in a process of its own, for tests of collectives.

``run_ranks(worker, world_size, *args)`` calls ``worker(rank, world_size, *args)`` in ``world_size`` processes whose
default process group is gloo over a file store, one thread each, and returns the ranks' return values in order.
The worker must be a module-level function; arguments and return values are pickled.

Processes are forked from a server that has imported torch and loaded the kernels once (``warm_up.py``), so that a rank
starts in milliseconds. They see the environment as it was at the first call, plus the variables that torchrun sets.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 300.0  # a hang; a busy machine takes several times as long as an idle one
GRACE_SECONDS = 3.0  # for the other ranks to exit by themselves after the first failure


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time; the message holds its traceback."""


def run_ranks(
    worker: Callable[..., Any],
    world_size: int,
    *args: Any,
    local_world_size: int | None = None,
    default_group: bool = True,
    may_die: Collection[int] = (),
    timeout: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Each rank's ``worker(rank, world_size, *args)``, run at the same time.

    Args:
        local_world_size: ranks per simulated node (sets LOCAL_RANK and LOCAL_WORLD_SIZE); all on one node by default.
        default_group: initialize torch.distributed with gloo before the worker is called.
        may_die: ranks that may raise or die without failing the test; their value is None then.
        timeout: seconds after which every rank is killed.

    Raises:
        RankFailed: with the traceback of the rank that failed first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.warm_up"])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        variables = torchrun_variables(world_size, local_world_size or world_size)
        processes = [
            context.Process(
                target=_run_rank,
                args=(worker, rank, world_size, args, variables[rank], folder, default_group, timeout),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            failed = _wait(processes, may_die, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        if failed is not None:
            rank, reason = failed
            trace = Path(folder, f"{rank}.traceback")
            raise RankFailed(f"rank {rank} {reason}\n" + (trace.read_text() if trace.exists() else ""))
        results = []
        for rank in range(world_size):
            path = Path(folder, f"{rank}.result")
            results.append(pickle.loads(path.read_bytes()) if path.exists() else None)
        return results


def _wait(processes: list[Any], may_die: Collection[int], timeout: float) -> tuple[int, str] | None:
    """Waits until all ranks ended; returns the first one that failed and how, or None."""
    deadline = time.monotonic() + timeout
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    failed: tuple[int, str] | None = None
    while running:
        ended = multiprocessing.connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ended:
            late = set(running.values()) - set(may_die)
            return failed or ((min(late), f"was still running after {timeout:g} s") if late else None)
        for sentinel in ended:
            rank = running.pop(sentinel)  # type: ignore[call-overload]
            processes[rank].join()
            code = processes[rank].exitcode
            if code != 0 and rank not in may_die and failed is None:
                failed = rank, f"ended with exit code {code}"
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if set(running.values()) <= set(may_die):  # a rank that may die may also hang
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return failed


def _run_rank(
    worker: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    variables: dict[str, str],
    folder: str,
    default_group: bool,
    timeout: float,
) -> None:
    os.environ.update(variables)
    import torch
    import torch.distributed as dist
    from torch.torch_version import TorchVersion

    from megatron01.parallel.process_groups import close_default_group

    torch.set_num_threads(1)
    try:
        if default_group:
            store = dist.FileStore(os.path.join(folder, "store"), world_size)
            limit = datetime.timedelta(seconds=timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        result = worker(rank, world_size, *args)
        Path(folder, f"{rank}.result").write_bytes(pickle.dumps(result))
        if default_group and dist.is_initialized():
            dist.barrier()  # no rank closes its connections while another still communicates
            # older versions wait for gloo's threads with the GIL held
            (close_default_group if TorchVersion(torch.__version__) < "2.8" else dist.destroy_process_group)()
    except BaseException:
        Path(folder, f"{rank}.traceback").write_text(traceback.format_exc())
        os._exit(1)  # at once, so that the ranks waiting for this one fail too


def torchrun_variables(world_size: int, local_world_size: int) -> list[dict[str, str]]:
    """The environment variables that torchrun would give each of ``world_size`` ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % local_world_size),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(world_size)
    ]
