"""Starting the exchange of a bucket as soon as the backward pass has finished its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from megatron01.errors import UserError
from megatron01.optim.flat_parameters import VERSION, FlatParameters

Order = Callable[[list[tuple[int, int]]], Sequence[int]]
"""The order in which buckets, given by their (first, last + 1) blocks, are sent."""


@dataclass(frozen=True)
class Opened:
    """Buckets of this step ((first, last + 1) blocks), and the function that sends one by its number.

    Its gradients are in the flat buffer by then.
    """

    buckets: list[tuple[int, int]]
    send: Callable[[int], None]


@dataclass(frozen=True)
class _Plan:
    """For a list of buckets: the parameters of each, the buckets of each parameter, and the order to send them in."""

    members: list[np.ndarray]
    buckets_of: list[list[int]]
    order: list[int]


class EarlyStart:
    """Gradient hooks that send buckets during the backward pass, in an order that is the same on all replicas.

    Buckets go in the order in which a backward pass is expected to finish them: the one whose first parameter in the
    model's order comes last goes first. A bucket that is ready waits for those before it. What is not ready when the
    backward pass ends (a parameter may have no gradient) is left to the optimizer's step.

    Nothing is sent early, and buckets keep their order, until ``attach`` is called. On a GPU they are compressed and
    sent on a stream of their own: the backward pass does not wait for collectives of the buckets before.

    Nor is it while another optimizer of this process takes steps: where replicas have gradients of different
    parameters, one would send a bucket of this optimizer where another sends one of the other, which may be as long,
    or, in groups of their own, each would wait for the other.

    Args:
        layout: of the flat buffer.

    Attributes:
        opened: what the backward pass of this step has started to send, if anything.
    """

    _all_steps: ClassVar[int] = 0  # of all optimizers of this process; building one counts as a step
    _unused: ClassVar[weakref.WeakSet[EarlyStart]] = weakref.WeakSet()  # of optimizers that have taken no step yet

    def __init__(self, layout: FlatParameters) -> None:
        self._layout = layout
        self._own_steps = 0
        self._others_steps = -1 if self._unused else self._all_steps
        self._open: Callable[[], Opened | None] | None = None
        self._position = np.zeros(0)
        self._paused = False
        self._plans: dict[tuple[tuple[int, int], ...], _Plan] = {}
        self._hook_ids: list[int] = []
        self._stream = torch.cuda.Stream(layout.device) if layout.device.type == "cuda" else None
        self.end_step()
        self._unused.add(self)

    def attach(self, model: torch.nn.Module, open: Callable[[], Opened | None]) -> None:
        """Register the hooks; ``model.parameters()`` is taken as the order of the forward pass.

        ``open`` is called at the first gradient of a step; None means that nothing can be started early at this step.
        """
        if self._open is not None:
            return
        self._open = open
        place = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        self._position = np.array([place.get(id(p.tensor), len(place)) for p in self._layout.parameters])
        for index, parameter in enumerate(self._layout.parameters):
            hook = partial(self._on_gradient, weakref.ref(self), index)
            handle = parameter.tensor.register_post_accumulate_grad_hook(hook)
            self._hook_ids.append(handle.id)

    @property
    def is_attached(self) -> bool:
        """True if buckets may have been sent before a step begins."""
        return self._open is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which gradients are only accumulated, and nothing is sent. It may be nested."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def join(self) -> None:
        """Make the current stream wait for the stream that sends; called after the backward pass.

        Raises:
            UserError: if gradients have been written to since: those that were sent before would be others.
        """
        if self._stream is not None:
            torch.cuda.current_stream(self._layout.device).wait_stream(self._stream)
        if self._next > 0 and self._last is not None and VERSION(self._last) != self._last_version:
            raise UserError(
                "gradients were written to between a backward pass, which has started their exchange, and step(), by"
                " clip_grad_norm_(), a pass inside no_sync(), or a DistributedDataParallel around the model, say; give"
                " max_grad_norm to clip them, and overlap=False where something else changes them"
            )

    def end_step(self) -> None:
        """Reset after an optimizer step: the next gradient belongs to the next step."""
        self._unused.discard(self)
        EarlyStart._all_steps += 1
        self._own_steps += 1
        self._asked = False
        self.opened: Opened | None = None
        self._opened_plan = _Plan([], [], [])
        self._next = 0
        # views of one buffer share a version: a later write to any of them shows in the gradient that came last
        self._last: torch.Tensor | None = None
        self._last_version = 0
        self._missing: list[int] = []
        self._seen = np.zeros(len(self._layout.parameters), bool)

    def order(self, buckets: list[tuple[int, int]]) -> Sequence[int]:
        """The order in which buckets are to be sent, also those that this class has not sent."""
        return range(len(buckets)) if self._open is None else self._plan(buckets).order

    @staticmethod
    @torch._disable_dynamo
    def _on_gradient(reference: weakref.ref[EarlyStart], index: int, parameter: torch.Tensor) -> None:
        self = reference()  # weak, as tensors keep their hooks alive
        if self is None or self._paused or not self._layout.has_weights(index):
            return
        if not self._asked:
            assert self._open is not None
            self._asked = True
            before, self._others_steps = self._others_steps, self._all_steps - self._own_steps
            if self._others_steps == before:
                with torch.no_grad():
                    self.opened = self._open()
            if self.opened is not None:
                self._opened_plan = self._plan(self.opened.buckets)
                expected = np.array([p.tensor.requires_grad for p in self._layout.parameters])
                self._missing = [int(expected[part].sum()) for part in self._opened_plan.members]
        if self.opened is None:
            return
        self._require_last_hook(index)
        if self._seen[index]:
            name = self._layout.parameters[index].name
            raise UserError(
                f"a second backward pass reached parameter {name} before step(), but the exchange of its gradient has "
                "been started: run every backward pass but the last before a step inside optimizer.no_sync()"
            )
        self._seen[index] = True
        for bucket in self._opened_plan.buckets_of[index]:
            self._missing[bucket] -= 1
        order = self._opened_plan.order
        while self._next < len(order) and self._missing[order[self._next]] == 0:
            bucket = order[self._next]
            with torch.no_grad():
                # on the stream that has made them: it takes their memory anew as soon as they are copied
                self._layout.gather_gradients(self.opened.buckets[bucket])
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.current_stream(self._layout.device))
                with torch.cuda.stream(self._stream):
                    self.opened.send(bucket)
            self._next += 1
        main = getattr(parameter, "main_grad", None)
        self._last = parameter.grad if main is None else main
        self._last_version = 0 if self._last is None else VERSION(self._last)

    def _require_last_hook(self, index: int) -> None:
        """Check that this hook runs last, so that ``main_grad``, if there is one, includes this gradient."""
        parameter = self._layout.parameters[index]
        if self._layout.sums_in_fp32 or getattr(parameter.tensor, "main_grad", None) is None:
            return
        hooks = parameter.tensor._post_accumulate_grad_hooks
        if next(reversed(hooks)) != self._hook_ids[index]:
            raise UserError(
                f"parameter {parameter.name} has a main_grad, and a hook that was registered after optimizer.attach(): "
                "register hooks that add to main_grad before it, or what they add is not sent"
            )

    def _plan(self, buckets: list[tuple[int, int]]) -> _Plan:
        key = tuple(buckets)
        if key not in self._plans:
            starts, ends = self._layout.first_block[:-1], self._layout.first_block[1:]
            members = [np.flatnonzero((starts < stop) & (ends > start)) for start, stop in buckets]
            earliest = [int(self._position[part].min()) for part in members]
            buckets_of: list[list[int]] = [[] for _ in self._layout.parameters]
            for bucket, part in enumerate(members):
                for index in part:
                    buckets_of[index].append(bucket)
            order = sorted(range(len(buckets)), key=lambda bucket: -earliest[bucket])
            self._plans[key] = _Plan(members, buckets_of, order)
        return self._plans[key]
