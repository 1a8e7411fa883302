"""The exchange of accumulated steps: u is all-reduced bucket by bucket, and x moves by the mean."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron01.comm import Exchange, Status
from megatron01.comm.payload import CompressionNorms, PackedBlocks
from megatron01.optim.flat_parameters import mark_active
from megatron01.optim.grad_scaling import OverflowGuard
from megatron01.optim.local_update import ACCUMULATE, SYNCHRONIZE, Coefficients, LocalUpdate, Rule
from megatron01.optim.overlap import Order
from megatron01.optim.report import CompressionReport
from megatron01.optim.shard_ranks import ModelShardRanks

logger = logging.getLogger(__name__)

_HISTORY = 8
_GROWTH = 4.0


class CompressionWatch:
    """Measures the quantization error of every ``interval``-th exchange; warns when error feedback keeps growing.

    Args:
        interval: exchanges between two measurements; 0 for none.
        partial: the ranks of this replica, if it is sharded; they measure together.

    Attributes:
        interval: the one given.
    """

    def __init__(self, interval: int, partial: ModelShardRanks | None = None) -> None:
        self.interval = interval
        self._partial = partial
        self._ratios: deque[float] = deque(maxlen=_HISTORY)

    def record(self, buckets: Sequence[CompressionNorms]) -> CompressionReport | None:
        """Record the norms of a measured exchange, and report them; None if nothing was quantized."""
        if not buckets:
            return None
        lost, result = sum(bucket.residual for bucket in buckets), sum(bucket.result for bucket in buckets)
        if self._partial is not None:
            # replicated parameters count once for each rank
            lost, result = self._partial.sums(lost, result)
        if result == 0.0:
            return None
        errors = (
            math.sqrt(b.residual / (b.quantized + b.residual)) if b.quantized + b.residual > 0 else 0.0 for b in buckets
        )
        ratio = math.sqrt(lost / result)
        self._ratios.append(ratio)
        history = list(self._ratios)
        if len(history) == _HISTORY and history == sorted(history) and ratio > _GROWTH * history[0] > 0.0:
            logger.warning(
                "the error feedback of the 1-bit exchange has grown from %.3g to %.3g times the exchanged step; "
                "lower block_size or the learning rate",
                history[0],
                ratio,
            )
            self._ratios.clear()
        return CompressionReport(tuple(errors), ratio)


@dataclass(frozen=True)
class Contribution:
    """This replica's contribution of one step to an exchange.

    Attributes:
        uses_gradient: False where this replica's gradient is known not to be finite.
        status: OVERFLOW if it is not; fp32[] on the device where that is not known yet.
        fresh: True if u holds no earlier step, so that this one can be called off.
        overflow_here: True if this replica's own gradient was not finite.
    """

    coefficients: Coefficients
    uses_gradient: bool
    status: Status | torch.Tensor
    fresh: bool
    overflow_here: bool


class CompressedAllReduce:
    """The all-reduce of accumulated steps: sends u bucket by bucket, and moves x by the mean.

    Buckets may be sent one by one (``send_bucket``), as their gradients become ready, before ``send``.

    Args:
        exchange: all-reduce of buffers like u.
        local: the state of this replica.
        guard: gives the status to send to the other replicas.
        watch: measures the quantization error.
        candidates: int32[elements / 32], a bit for each element that may take part.
        active: the same, of those that do take part; given to ``exchange``, and set here.
        has_second_moment: True if elements whose second moment is 0 take no part.
        order: in which buckets are sent.
        delay: True if results are received one step later; until then the model uses this replica's own step.

    Attributes:
        exchange: the one given; its errors are part of the state.
        buckets: (first, last + 1) block of each of its buckets.
        awaited: this replica's contribution to an exchange that has been sent and not received.
        begun: True if an exchange has begun and its last bucket has not been sent.
        num_exchanges: exchanges begun so far.
        active_is_stale: True if ``active`` is to be computed again, from the candidates and v.
        report: of a measurement; the optimizer takes it away when it reports a step.
    """

    def __init__(
        self,
        exchange: Exchange,
        local: LocalUpdate,
        guard: OverflowGuard,
        watch: CompressionWatch,
        *,
        candidates: torch.Tensor,
        active: torch.Tensor,
        has_second_moment: bool,
        order: Order,
        delay: bool,
    ) -> None:
        self.exchange = exchange
        self.buckets = exchange.buckets
        self._candidates, self._active, self._has_second_moment = candidates, active, has_second_moment
        self.active_is_stale = True
        self._order = order
        self.begun = False
        self.num_exchanges = 0
        self.awaited: Contribution | None = None
        self._local = local
        self._guard = guard
        self._watch = watch
        self.report: CompressionReport | None = None
        self._watched = False
        self._delay = delay
        self._sent: set[int] = set()

    @property
    def unsent(self) -> list[tuple[int, int]]:
        """(first, last + 1) block of each bucket that is still to be sent."""
        return [blocks for bucket, blocks in enumerate(self.buckets) if bucket not in self._sent]

    def begin(self, key: int) -> None:
        """Start an exchange; ``key`` seeds its random draws."""
        assert not self.begun
        if self.active_is_stale:
            if self._has_second_moment:
                mark_active(self._active, self._candidates, self._local.v, self._local.kernels.range_elements)
            else:
                self._active.copy_(self._candidates)
            self.active_is_stale = False
        self.begun = True
        self._watched = self._watch.interval > 0 and self.num_exchanges % self._watch.interval == 0
        self.num_exchanges += 1
        self.exchange.begin(key, watch=self._watched)

    def send_bucket(self, bucket: int, contribution: Contribution) -> None:
        """Accumulate this step into u in one bucket, then compress and send that."""
        has_gradient, fresh = contribution.uses_gradient, contribution.fresh
        phase = replace(ACCUMULATE, gradient=has_gradient, write_weights=self._delay, fresh=fresh)
        for blocks in self._local.ranges(*self.buckets[bucket]):
            if has_gradient or fresh or self._delay:
                self._local.run(phase, contribution.coefficients, blocks)
            self.exchange.compress(bucket, *blocks, self._local.u)
        self.exchange.send(bucket, self._guard.status(contribution.status))
        self._sent.add(bucket)

    def send(self, contribution: Contribution) -> None:
        """Send the buckets that have not been sent yet."""
        for bucket in self._order(self.buckets):
            if bucket not in self._sent:
                self.send_bucket(bucket, contribution)
        self._sent.clear()
        self.begun, self.awaited = False, contribution

    def receive(self) -> Status:
        """Wait for the mean of u and move x by it; returns the most severe status of all replicas.

        A fresh step in which a replica overflowed is called off: only the content of u has changed then.
        """
        contribution, self.awaited = self.awaited, None
        assert contribution is not None
        local = self._local
        worst = self.exchange.reduce(stop_on_overflow=contribution.fresh)
        if contribution.fresh and worst >= Status.OVERFLOW:
            return worst
        # under soft sign, m and b are only stored here, so that a step that is called off leaves them unchanged
        stores_gradient = contribution.uses_gradient and contribution.coefficients.rule is Rule.SOFT_SIGN
        phase = replace(SYNCHRONIZE, gradient=stores_gradient)
        for bucket, blocks in enumerate(self.buckets):
            result = self.exchange.receive(bucket)
            for first, last in local.ranges(*blocks):
                mean = None if result is None else PackedBlocks(result, first, last)
                local.run(phase, contribution.coefficients, (first, last), mean)
        local.u = self.exchange.swap(local.u)
        if self._watched:
            self.report = self._watch.record(self.exchange.compression())
        return worst
