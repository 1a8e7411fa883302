"""Replicas as threads of one process, with a transport that checks when buffers are accessed.

``run_replicas(worker, size, *args)`` calls ``worker(transport, *args)`` once per replica and returns the values in
order. An ``InProcessTransport`` delivers only in ``wait``, fills receive buffers with garbage until then, and fails
if a buffer is written to while it is being sent: code that passes here does not rely on a collective to finish early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron01.comm.transport import Transport, Work

TIMEOUT_SECONDS = 60.0
RUBBISH = 0xA5


class _Hub:
    """The tensors that replicas have sent, by the number of the collective and the rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: dict[int, dict[int, tuple[str, torch.Tensor]]] = {}
        self._changed = threading.Condition()

    def put(self, number: int, rank: int, kind: str, sent: torch.Tensor) -> None:
        with self._changed:
            self._sent.setdefault(number, {})[rank] = (kind, sent)
            self._changed.notify_all()

    def get(self, number: int, kind: str) -> list[torch.Tensor]:
        """What all ranks sent in one collective, which must be of the same kind and size everywhere."""
        with self._changed:
            ready = self._changed.wait_for(lambda: len(self._sent.get(number, {})) == self.size, TIMEOUT_SECONDS)
            assert ready, f"collective {number} ({kind}): only ranks {sorted(self._sent.get(number, {}))} take part"
            sent = [self._sent[number][rank] for rank in range(self.size)]
        assert {(k, tensor.shape) for k, tensor in sent} == {(kind, sent[0][1].shape)}, f"collective {number} differs"
        return [tensor for _, tensor in sent]


class _Delivery:
    def __init__(
        self, collect: Callable[[], torch.Tensor], received: torch.Tensor, sent: torch.Tensor, copy: torch.Tensor
    ) -> None:
        self._collect, self._received, self._sent, self._copy = collect, received, sent, copy
        received.fill_(RUBBISH)

    def wait(self) -> None:
        assert torch.equal(self._sent, self._copy), "a buffer was written to while it was being sent"
        assert bool((self._received == RUBBISH).all()), "a buffer was written to while it was being received"
        self._received.view(-1).copy_(self._collect())


class InProcessTransport(Transport):
    """``megatron01.comm.transport.Transport`` between threads."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        super().__init__(rank, hub.size)
        self._hub = hub
        self._number = 0

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        assert received.shape == sent.shape and sent.size(0) == self.size
        return super().all_to_all(received, sent)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        assert received.numel() == sent.numel() * self.size
        return super().all_gather(received, sent)

    def broadcast(self, tensor: torch.Tensor) -> None:
        number = self._next()
        self._hub.put(number, self.rank, "broadcast", tensor.clone())
        tensor.copy_(self._hub.get(number, "broadcast")[0])

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _start(self, received: torch.Tensor, sent: torch.Tensor) -> _Delivery:
        number, copy = self._next(), sent.clone()
        kind = "all_gather" if sent.numel() < received.numel() else "all_to_all"
        self._hub.put(number, self.rank, kind, copy)

        def collect() -> torch.Tensor:
            rows = self._hub.get(number, kind)
            return torch.cat([row.flatten() if kind == "all_gather" else row[self.rank] for row in rows])

        return _Delivery(collect, received, sent, copy)


def run_replicas(worker: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Each replica's ``worker(transport, *args)``, run at the same time in ``size`` threads.

    Raises the error of the lowest rank that failed.
    """
    hub = _Hub(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(worker, InProcessTransport(hub, rank), *args) for rank in range(size)]
        return [future.result() for future in futures]
