"""Starting the exchange of a bucket as soon as the backward pass has finished its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from megatron01.errors import UserError
from megatron01.optim.flat import FlatLayout


@dataclass(frozen=True)
class Opened:
    """What this step exchanges: ranges of blocks, and the function that sends the bucket of a given number."""

    buckets: list[tuple[int, int]]
    send: Callable[[int], None]


class EarlyStart:
    """Watches the gradients of a backward pass, and sends buckets in an order that is the same on all replicas.

    Buckets go in the order in which a backward pass is expected to finish them: the one whose first parameter in the
    model's order comes last goes first. A bucket that is ready waits for those before it. What is not ready when the
    backward pass ends (a parameter may have no gradient) is left to the optimizer's step.

    Args:
        layout: of the flat buffer.
        position: place of each parameter, by id, in the order of the forward pass.
        open: called at the first gradient of a step; None means that nothing can be started early at this step.
    """

    def __init__(self, layout: FlatLayout, position: Mapping[int, int], open: Callable[[], Opened | None]) -> None:
        self._layout = layout
        self._open = open
        last = len(position)
        self._position = np.array([position.get(id(p.tensor), last) for p in layout.parameters])
        self._paused = False
        self._plans: dict[tuple[tuple[int, int], ...], tuple[list[np.ndarray], list[int]]] = {}
        self._clear()
        for index, parameter in enumerate(layout.parameters):
            parameter.tensor.register_post_accumulate_grad_hook(self._hook(index))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, gradients are only accumulated."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def end_step(self) -> None:
        """The optimizer has taken its step: the next gradient belongs to the next one."""
        self._clear()

    def order(self, buckets: list[tuple[int, int]]) -> list[int]:
        """The order in which buckets are to be sent, also those that this class has not sent."""
        return self._plan(buckets)[1]

    def _clear(self) -> None:
        self._asked = False
        self._opened: Opened | None = None
        self._order: list[int] = []
        self._next = 0
        self._missing: list[int] = []
        self._seen = np.zeros(len(self._layout.parameters), bool)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda _: self._on_gradient(index)

    @torch.no_grad()
    def _on_gradient(self, index: int) -> None:
        if self._paused:
            return
        if not self._asked:
            self._asked = True
            self._opened = self._open()
            if self._opened is not None:
                members, self._order = self._plan(self._opened.buckets)
                expected = np.array([p.tensor.requires_grad for p in self._layout.parameters])
                self._missing = [int(expected[part].sum()) for part in members]
        if self._opened is None:
            return
        if self._seen[index]:
            name = self._layout.parameters[index].name
            raise UserError(
                f"a second backward pass reached parameter {name} before step(), but the exchange of its gradient has "
                "been started: run every backward pass but the last before a step inside optimizer.no_sync()"
            )
        self._seen[index] = True
        first, end = self._layout.first_block[index : index + 2]
        for bucket, (start, stop) in enumerate(self._opened.buckets):
            if start < end and first < stop:
                self._missing[bucket] -= 1
        while self._next < len(self._order) and self._missing[self._order[self._next]] == 0:
            self._opened.send(self._order[self._next])
            self._next += 1

    def _plan(self, buckets: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[int]]:
        """The parameters of each bucket, and the order in which the buckets are sent."""
        key = tuple(buckets)
        if key not in self._plans:
            starts, ends = self._layout.first_block[:-1], self._layout.first_block[1:]
            members = [np.flatnonzero((starts < stop) & (ends > start)) for start, stop in buckets]
            earliest = [int(self._position[part].min()) for part in members]
            self._plans[key] = members, sorted(range(len(buckets)), key=lambda bucket: -earliest[bucket])
        return self._plans[key]
