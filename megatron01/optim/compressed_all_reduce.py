"""The exchange of accumulated steps: u goes out bucket by bucket, and x moves by what comes back."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import torch

from megatron01.comm import BlockLayout, DenseAllReduce, Exchange, Quantizer, Status, Topology, build_exchange
from megatron01.comm.kernels.specification import unpack_mask
from megatron01.comm.payload import WORD, CompressionNorms
from megatron01.optim.flat_parameters import Gradients
from megatron01.optim.grad_scaling import OverflowGuard
from megatron01.optim.gradients import GradientMean
from megatron01.optim.local_update import ACCUMULATE, Coefficients, FlatState, Phase, UpdateBackend
from megatron01.optim.partial import PartialModel
from megatron01.optim.report import CompressionReport

logger = logging.getLogger(__name__)

_LOOKS = 8
_GROWTH = 4.0


class CompressionWatch:
    """Looks at every ``interval``-th exchange; warns when the error feedback grows without bound.

    Args:
        interval: exchanges from one look to the next; 0 never looks.
        limit: feedback ratio above which a synchronization in full precision is wanted; 0 for none.
        partial: the other parts of this replica, where this process sees the errors of one only; all look together.

    Attributes:
        exchanges: how many there have been.
        report: of the last look.
    """

    def __init__(self, interval: int, limit: float, partial: PartialModel | None = None) -> None:
        self._interval = interval
        self._limit = limit
        self._partial = partial
        self.exchanges = 0
        self._ratios: deque[float] = deque(maxlen=_LOOKS)
        self.report: CompressionReport | None = None

    def next_is_due(self) -> bool:
        """Count an exchange; whether it is to be looked at."""
        self.exchanges += 1
        return self._interval > 0 and (self.exchanges - 1) % self._interval == 0

    def look(self, buckets: Sequence[CompressionNorms]) -> bool:
        """Take note of an exchange; whether its errors are beyond the limit."""
        if not buckets:
            return False
        lost, result = sum(bucket.residual for bucket in buckets), sum(bucket.result for bucket in buckets)
        if self._partial is not None:
            # what all parts hold counts once for each of them
            lost, result = self._partial.sums(lost, result)
        if result == 0.0:
            return False
        self.report = CompressionReport(
            tuple(
                math.sqrt(b.residual / (b.quantized + b.residual)) if b.quantized + b.residual > 0 else 0.0
                for b in buckets
            ),
            math.sqrt(lost / result),
        )
        ratio = self.report.feedback_ratio
        self._ratios.append(ratio)
        history = list(self._ratios)
        if len(history) == _LOOKS and history == sorted(history) and ratio > _GROWTH * history[0] > 0.0:
            logger.warning(
                "the error feedback of the 1-bit exchange has grown from %.3g to %.3g times the exchanged step; "
                "raise dead_threshold, lower block_size or the learning rate, or set error_limit",
                history[0],
                ratio,
            )
            self._ratios.clear()
        return 0.0 < self._limit < ratio


_WORDS = 1 << 16
"""Words handled at a time, so that what is unpacked stays small."""


@dataclass(frozen=True)
class Contribution:
    """One step's part in an exchange.

    Attributes:
        gradients: None where this replica's are not finite.
        fresh: u holds nothing yet, so that the step can be called off without losing earlier ones.
        overflow_here: this replica's own gradient was not finite.
        moving: the phase that moves x by the result.
    """

    coefficients: Coefficients
    gradients: Gradients | None
    fresh: bool
    overflow_here: bool
    moving: Phase


class AccumulatedSteps:
    """Runs an ``Exchange`` of u. Buckets may be sent one by one, as their gradients come, before ``send``.

    When a replica finds its error feedback too large, all flush theirs in the exchange that follows: that one goes in
    full precision, errors included.

    Args:
        exchange: of buffers like u.
        full_precision: makes an exchange of the same buffers that loses nothing; called when one is first needed.
        live: int32[elements / 32], one bit for each element that takes part.
        backend: does the arithmetic.
        guard: knows what to tell the other replicas.
        watch: looks at the errors.
        delay: whether results are received one step later; the model goes on from its own step until then.

    Attributes:
        exchange: the one given; its errors are part of the state.
        awaited: this replica's part in an exchange that has been sent and whose result has not been received.
        flushes_next: whether the next exchange goes in full precision; the same on all replicas.
        begun: whether an exchange has begun and its last bucket has not been sent.
    """

    def __init__(
        self,
        exchange: Exchange,
        full_precision: Callable[[], Exchange],
        live: torch.Tensor,
        backend: UpdateBackend,
        guard: OverflowGuard,
        watch: CompressionWatch,
        *,
        delay: bool,
    ) -> None:
        self.exchange = exchange
        self.flushes_next = False
        self.begun = False
        self.awaited: Contribution | None = None
        self._make_full_precision = full_precision
        self._live = live
        self._full_precision: Exchange | None = None
        self._running = exchange
        self._backend = backend
        self._guard = guard
        self._watch = watch
        self._watched = False
        self._asks_for_flush = False
        self._delay = delay
        self._sent: set[int] = set()

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """(first, last + 1) block of each bucket of the exchange that is running, or ran last."""
        return self._running.buckets

    @property
    def unsent(self) -> list[tuple[int, int]]:
        """(first, last + 1) block of each bucket that is still to be sent."""
        return [blocks for bucket, blocks in enumerate(self.buckets) if bucket not in self._sent]

    @property
    def is_flush(self) -> bool:
        """Whether the exchange that is running, or ran last, is one in full precision."""
        return self._running is self._full_precision

    def begin(self, key: int) -> None:
        """Start an exchange; ``key`` seeds its random draws."""
        assert not self.begun
        self.begun = True
        self._running, self._watched = self.exchange, False
        if not self.flushes_next:
            self._watched = self._watch.next_is_due()
        else:
            if self._full_precision is None:
                self._full_precision = self._make_full_precision()
            self._running = self._full_precision
        self._running.begin(key, watch=self._watched)

    def send_bucket(self, bucket: int, state: FlatState, contribution: Contribution) -> None:
        """Add this step to u in a bucket, and put that on its way."""
        for first, last in self._ranges(*self.buckets[bucket]):
            self._accumulate(first, last, state, contribution)
            self._running.compress(bucket, first, last, state.u)
        self._hand_over(bucket, contribution)

    def send(self, state: FlatState, contribution: Contribution, order: Sequence[int]) -> None:
        """Send the buckets that have not been sent yet."""
        missing = [bucket for bucket in order if bucket not in self._sent]
        if self.is_flush:
            for bucket in missing:
                self._accumulate(*self.buckets[bucket], state, contribution)
            self.exchange.add_errors(state.u)
            self._silence(state.u)
            for bucket in missing:
                self._running.compress(bucket, *self.buckets[bucket], state.u)
                self._hand_over(bucket, contribution)
        else:
            for bucket in missing:
                self.send_bucket(bucket, state, contribution)
        self._sent.clear()
        self.begun, self.awaited = False, contribution

    def receive(self, state: FlatState) -> tuple[Status, FlatState]:
        """Wait for the mean of u and move x by it.

        Returns the gravest status of all replicas, and the buffers to go on with. A fresh step in which a replica
        overflowed is called off: then nothing has changed but the content of u.
        """
        contribution, self.awaited = self.awaited, None
        assert contribution is not None
        worst = self._running.reduce(stop_on_overflow=contribution.fresh)
        if contribution.fresh and worst >= Status.OVERFLOW:
            self._running.cancel()
            return worst, state
        results = [self._running.receive(bucket) for bucket in range(len(self.buckets))]
        state = replace(state, u=self._running.swap(state.u))
        coefficients, gradients = contribution.coefficients, contribution.gradients
        for blocks, result in zip(self.buckets, results, strict=True):
            for first, last in self._ranges(*blocks):
                self._backend.update(first, last, contribution.moving, state, coefficients, gradients, result)
        if self.is_flush:
            self.exchange.clear_errors()
        self._asks_for_flush = self._watched and self._watch.look(self._running.compression())
        self.flushes_next = worst is Status.FLUSH
        return worst, state

    def take_report(self) -> CompressionReport | None:
        """What the watch has seen since this was last asked."""
        report, self._watch.report = self._watch.report, None
        return report

    def scalars(self) -> list[float]:
        """Three numbers from which ``load_scalars`` continues."""
        return [float(self.flushes_next), float(self._asks_for_flush), float(self._watch.exchanges)]

    def load_scalars(self, scalars: Sequence[float]) -> None:
        self.flushes_next, self._asks_for_flush = bool(scalars[0]), bool(scalars[1])
        self._watch.exchanges = int(scalars[2])

    def _accumulate(self, first: int, last: int, state: FlatState, contribution: Contribution) -> None:
        has_gradient, fresh = contribution.gradients is not None, contribution.fresh
        if not (has_gradient or fresh or self._delay):
            return
        phase = replace(ACCUMULATE, gradient=has_gradient, write_weights=self._delay, fresh=fresh)
        self._backend.update(first, last, phase, state, contribution.coefficients, contribution.gradients)

    def _silence(self, u: torch.Tensor) -> None:
        """Set to 0 what takes no part: where an element has just been taken out, there is an error of before."""
        for words, values in zip(self._live.split(_WORDS), u.view(-1, WORD).split(_WORDS), strict=True):
            values.masked_fill_(~unpack_mask(words, WORD), 0.0)

    def _hand_over(self, bucket: int, contribution: Contribution) -> None:
        status = self._guard.status(overflow=contribution.gradients is None)
        if status is Status.OK and self._asks_for_flush:
            status = Status.FLUSH
        self._running.send(bucket, status)
        self._sent.add(bucket)

    def _ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The blocks [start, end) in ranges that stay in the cache from one pass to the next."""
        for first in range(start, end, self._backend.range_blocks):
            yield first, min(first + self._backend.range_blocks, end)


@dataclass(frozen=True)
class Exchanges:
    """Builds the exchanges of one optimizer; None stands for one that has nobody to exchange with.

    Attributes:
        blocks: layout of the flat buffers.
        topology: the replicas.
        backend: does the optimizer's arithmetic.
        guard: knows what to tell the other replicas.
        wire_dtype: type of averaged gradients on the wire.
        bucket_elements: elements that travel together.
        state_dtype: fp32 or bf16: of accumulated steps and of what exchanges have not told of them.
        partial: the other parts of this replica, where this process holds one only.
    """

    blocks: BlockLayout
    topology: Topology
    backend: UpdateBackend
    guard: OverflowGuard
    _: KW_ONLY
    wire_dtype: torch.dtype
    bucket_elements: int
    state_dtype: torch.dtype = torch.float32
    partial: PartialModel | None = None

    def mean_of_all(self) -> GradientMean | None:
        """The mean of gradients over all processes."""
        return self._mean(self.topology) if self.topology.world.size > 1 else None

    def mean_of_node(self) -> GradientMean | None:
        """The mean of gradients inside a node, where a node is the replica."""
        if self.topology.replica != "node" or self.topology.local_size == 1:
            return None
        assert self.topology.local is not None
        return self._mean(Topology.flat(self.topology.local))

    def accumulated_steps(
        self,
        quantizer: Quantizer | Literal["none"] | None,
        live: torch.Tensor,
        watch: CompressionWatch,
        *,
        delay: bool,
        backend_name: str,
    ) -> AccumulatedSteps | None:
        """The exchange of accumulated steps; arguments as those of ``AccumulatedSteps`` and ``build_exchange``.

        Without a quantizer, nothing but gradients is ever exchanged.
        """
        if quantizer is None or self.topology.num_replicas == 1:
            return None

        def exchange(quantizer: Quantizer | Literal["none"]) -> Exchange:
            return build_exchange(
                self.blocks,
                self.topology,
                quantizer=quantizer,
                active=live,
                bucket_elements=self.bucket_elements,
                backend=backend_name,
                agree=None if self.partial is None else self.partial.gravest,
                dtype=self.state_dtype,
            )

        return AccumulatedSteps(
            exchange(quantizer),
            lambda: exchange("none"),
            live,
            self.backend,
            self.guard,
            watch,
            delay=delay,
        )

    def _mean(self, over: Topology) -> GradientMean:
        mean = DenseAllReduce(self.blocks, over, self.wire_dtype, bucket_elements=self.bucket_elements)
        return GradientMean(mean, self.backend, self.guard)
