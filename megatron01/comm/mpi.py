"""The collectives of an exchange over MPI (mpi4py), for machines whose MPI library is tuned to the network."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from megatron01.comm.transport import Transport, Work
from megatron01.parallel.mpi import FINALIZING, UNDER_WAY

_SECONDS_BETWEEN_CALLS = 1e-4
_LARGEST_BROADCAST = 1 << 30
"""Bytes of one call: MPI libraries count in 32 bits."""


class MPITransport(Transport):
    """``Transport`` over an MPI communicator.

    Host memory is passed to MPI as it is. GPU memory is, too, if the library is ``cuda_aware``; else it is copied
    through pinned host memory.

    Args:
        communicator: of the processes to connect; it must be used for nothing else.
        checks: see ``Transport``.
        cuda_aware: whether the MPI library takes addresses of GPU memory.
    """

    def __init__(self, communicator: MPI.Intracomm, *, checks: bool = False, cuda_aware: bool = False) -> None:
        super().__init__(communicator.rank, communicator.size, checks=checks)
        self._communicator = communicator
        self._cuda_aware = cuda_aware
        self._progress = _Progress()
        self._pinned: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # free buffers by their size in bytes

    def _start(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        gathers = sent.nbytes < received.nbytes
        collective = self._communicator.Iallgather if gathers else self._communicator.Ialltoall
        if self._is_direct(sent):
            return _Request(collective(self._message(sent), self._message(received)), self._progress)
        host_sent, host_received = self._take(sent.nbytes), self._take(received.nbytes)
        host_sent.copy_(sent.view(-1))  # blocks until the copy is made

        def arrive() -> None:
            received.view(-1).copy_(host_received)
            self._pinned[host_sent.nbytes].append(host_sent)
            self._pinned[host_received.nbytes].append(host_received)

        return _Request(collective(self._message(host_sent), self._message(host_received)), self._progress, arrive)

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.size == 1:
            return
        buffer = tensor if self._is_direct(tensor) else tensor.cpu()
        for part in buffer.view(-1).view(torch.uint8).split(_LARGEST_BROADCAST):
            self._communicator.Bcast(self._message(part), root=0)
        if buffer is not tensor:
            tensor.copy_(buffer)

    def _take(self, size: int) -> torch.Tensor:
        """uint8[size] of pinned memory that no collective uses."""
        free = self._pinned[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _is_direct(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" or self._cuda_aware

    def _message(self, tensor: torch.Tensor) -> list[Any]:
        """A tensor's memory as bytes, in the form that mpi4py takes."""
        flat = tensor.detach().view(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            return [flat.numpy(), MPI.BYTE]
        torch.cuda.current_stream(flat.device).synchronize()  # MPI does not wait for CUDA streams
        return [flat, MPI.BYTE]


class _Request:
    """``Work`` of an MPI request, with a callback for its completion."""

    def __init__(self, request: MPI.Request, progress: _Progress, then: Callable[[], None] | None = None) -> None:
        self._request = request
        self._progress = progress
        self._then = then
        self._done = False
        UNDER_WAY[id(request)] = request
        progress.add(1)

    def wait(self) -> None:
        if self._done:
            return
        while not self._request.Test():  # Wait would keep a core busy, which another process of the machine may need
            time.sleep(_SECONDS_BETWEEN_CALLS)
        del UNDER_WAY[id(self._request)]
        self._progress.add(-1)
        if self._then is not None:
            self._then()
        self._done = True


class _Progress:
    """Progress thread: calls MPI periodically while collectives are pending.

    Most MPI libraries move data only inside their own calls; without this, all of it would move in ``wait``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._running = False
        self._allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def add(self, number: int) -> None:
        """Count collectives that have started, or (negative) ended."""
        with self._lock:
            self._under_way += number
            if self._under_way == 0 or self._running or not self._allowed:
                return
            self._running = True
        threading.Thread(target=self._call, name="megatron01-mpi", daemon=True).start()

    def _call(self) -> None:
        while True:
            time.sleep(_SECONDS_BETWEEN_CALLS)
            with self._lock:
                if self._under_way == 0:
                    self._running = False
                    return
            with FINALIZING:
                if MPI.Is_finalized():
                    return
                MPI.COMM_SELF.Iprobe()  # nothing is sent there; every call advances pending collectives
