"""The exchange of accumulated steps: u goes out bucket by bucket, and x moves by what comes back."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron01.comm import Exchange, Status
from megatron01.comm.kernels.specification import unpack_mask
from megatron01.comm.payload import WORD, CompressionNorms
from megatron01.optim.grad_scaling import OverflowGuard
from megatron01.optim.local_update import ACCUMULATE, Coefficients, LocalUpdate, Phase
from megatron01.optim.report import CompressionReport
from megatron01.optim.shard_ranks import ModelShardRanks

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

    def __init__(self, interval: int, limit: float, partial: ModelShardRanks | None = None) -> None:
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
        uses_gradient: False where this replica's gradient is known not to be finite.
        status: OVERFLOW if it is not; fp32[] on the device where that is not known yet.
        fresh: True if u holds nothing yet, so that the step can be called off without losing earlier ones.
        overflow_here: True if this replica's own gradient was not finite.
        moving: the phase that moves x by the result.
    """

    coefficients: Coefficients
    uses_gradient: bool
    status: Status | torch.Tensor
    fresh: bool
    overflow_here: bool
    moving: Phase


def received_means(exchange: Exchange, local: LocalUpdate) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """(first, last + 1) blocks, and the mean (fp32[elements]) that ``exchange`` brings for them; valid until the next.

    Raises:
        DamagedPayload: before the first, if any payload is damaged.
    """
    scratch: torch.Tensor | None = None
    for bucket, blocks in enumerate(exchange.buckets):
        exchange.receive(bucket)
        for first, last in local.ranges(*blocks):
            length = (last - first) * local.flat.blocks.block_size
            if scratch is None:  # the first range is one of the longest
                scratch = torch.empty(length, device=local.x.device)
            exchange.decompress(bucket, first, last, scratch[:length])
            yield (first, last), scratch[:length]


class CompressedAllReduce:
    """The all-reduce of accumulated steps: u goes out bucket by bucket, and x moves by the mean that comes back.

    Buckets may be sent one by one, as their gradients come, before ``send``. When a replica finds its error feedback
    too large, all flush theirs in the exchange that follows: that one goes in full precision, errors included.

    Args:
        exchange: of buffers like u.
        full_precision: makes an exchange of the same buffers that loses nothing; called when one is first needed.
        active: int32[elements / 32], one bit for each element that takes part.
        local: the state of this replica.
        guard: gives the status to send to the other replicas.
        watch: looks at the errors.
        delay: True if results are received one step later; the model goes on from its own step until then.

    Attributes:
        exchange: the one given; its errors are part of the state.
        awaited: this replica's part in an exchange that has been sent and whose result has not been received.
        flushes_next: True if the next exchange goes in full precision; the same on all replicas.
        begun: True if an exchange has begun and its last bucket has not been sent.
    """

    def __init__(
        self,
        exchange: Exchange,
        full_precision: Callable[[], Exchange],
        active: torch.Tensor,
        local: LocalUpdate,
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
        self._active = active
        self._full_precision: Exchange | None = None
        self._running = exchange
        self._local = local
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
        """True if the exchange that is running, or ran last, is one in full precision."""
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

    def send_bucket(self, bucket: int, contribution: Contribution) -> None:
        """Add this step to u in a bucket, and put that on its way; a flush takes u as it is."""
        for blocks in self._local.ranges(*self.buckets[bucket]):
            if not self.is_flush:
                self._accumulate(blocks, contribution)
            self._running.compress(bucket, *blocks, self._local.u)
        status = self._guard.status(contribution.status)
        if self._asks_for_flush:
            flush = Status.FLUSH
            status = status.clamp(min=flush) if isinstance(status, torch.Tensor) else max(status, flush)
        self._running.send(bucket, status)
        self._sent.add(bucket)

    def send(self, contribution: Contribution, order: Sequence[int]) -> None:
        """Send the buckets that have not been sent yet."""
        if self.is_flush:  # of which nothing is ever sent early
            self._accumulate((0, self._local.flat.blocks.num_blocks), contribution)
            self.exchange.add_errors(self._local.u)
            self._silence(self._local.u)
        for bucket in order:
            if bucket not in self._sent:
                self.send_bucket(bucket, contribution)
        self._sent.clear()
        self.begun, self.awaited = False, contribution

    def receive(self) -> Status:
        """Wait for the mean of u and move x by it; returns the most severe status of all replicas.

        A fresh step in which a replica overflowed is called off: then nothing has changed but the content of u.
        """
        contribution, self.awaited = self.awaited, None
        assert contribution is not None
        local = self._local
        worst = self._running.reduce(stop_on_overflow=contribution.fresh)
        if contribution.fresh and worst >= Status.OVERFLOW:
            return worst
        for blocks, mean in received_means(self._running, local):
            local.run(contribution.moving, contribution.coefficients, blocks, mean)
        local.u = self._running.swap(local.u)
        if self.is_flush:
            self.exchange.clear_errors()
        self._asks_for_flush = self._watched and self._watch.look(self._running.compression())
        self.flushes_next = worst is Status.FLUSH
        return worst

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

    def _accumulate(self, blocks: tuple[int, int], contribution: Contribution) -> None:
        has_gradient, fresh = contribution.uses_gradient, contribution.fresh
        if has_gradient or fresh or self._delay:
            phase = replace(ACCUMULATE, gradient=has_gradient, write_weights=self._delay, fresh=fresh)
            self._local.run(phase, contribution.coefficients, blocks)

    def _silence(self, u: torch.Tensor) -> None:
        """Set to 0 what takes no part: where an element has just been taken out, there is an error of before."""
        for words, values in zip(self._active.split(_WORDS), u.view(-1, WORD).split(_WORDS), strict=True):
            values.masked_fill_(~unpack_mask(words, WORD), 0.0)
