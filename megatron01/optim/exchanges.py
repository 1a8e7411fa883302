"""What replicas exchange in a step: the mean of gradients, and the mean of accumulated steps, by which x moves.

Both go bucket by bucket, in an order that is the same on all replicas, so that a bucket is on the wire while the next
is computed, even before the backward pass has ended.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron01.comm import DenseAllReduce, ErrorPlace, Exchange, OneBitAllReduce, Status
from megatron01.comm.payload import CompressionNorms, PackedBlocks
from megatron01.optim.flat_parameters import FlatParameters, mark_active
from megatron01.optim.local_update import SYNCHRONIZE, Coefficients, Kernels, LocalUpdate, Phase, Rule, square_sums
from megatron01.optim.loss_scaler import OverflowGuard, overflow_status
from megatron01.optim.overlap import Opened, Order
from megatron01.optim.report import CompressionReport
from megatron01.optim.settings import ModelShardRanks

logger = logging.getLogger(__name__)

_HISTORY = 8
_GROWTH = 4.0


class OwnGradient(NamedTuple):
    """What a replica sends to the others about its own gradient in a bucket.

    Attributes:
        status: OVERFLOW if it is not finite, where that is checked; fp32[] on the device.
        square_sum: sum of squares without the loss scale, over the counted blocks, where that is measured; fp32[] on
            the device.
    """

    status: Status | torch.Tensor
    square_sum: torch.Tensor | float


class GradientMean:
    """Averages flat gradients in place in full precision; buckets may be sent before ``finish`` sends the rest.

    Args:
        order: of a list of buckets, in which they are sent: the same on all replicas.
        counted: bool[blocks], those that enter norms; None for all.
        measures: whether each replica sends the others the norm of its own gradient.

    Attributes:
        buckets: (first, last + 1) block of each bucket.
        begun: True between ``begin`` and ``finish``.
        square_sum: after ``finish``, sum over the replicas of the squared norms of their own gradients (these blocks,
            no loss scale); the same bits on all. Not finite if an element is not.
        overflow_here: after ``finish``, True if a gradient of this replica was not finite before it was averaged. Only
            checked with a loss scaler (fp16), whose scale it changes.
        packed: after ``finish``, the mean by bucket where it is packed, else None.
    """

    packed: list[PackedBlocks] | None = None

    def __init__(
        self,
        mean: DenseAllReduce | OneBitAllReduce,
        flat: FlatParameters,
        kernels: Kernels,
        guard: OverflowGuard,
        *,
        order: Order,
        counted: torch.Tensor | None = None,
        measures: bool = False,
    ) -> None:
        self._mean: Any = mean
        self._flat, self._kernels, self._guard = flat, kernels, guard
        self._order, self._counted = order, counted
        self._checks, self._measures = guard.loss_scaler is not None, measures
        self._inverse_scale = 1.0
        self.buckets = mean.buckets
        self._own: dict[int, OwnGradient] = {}  # by bucket
        self._sent: set[int] = set()
        self.begun = False
        self.overflow_here, self.square_sum = False, 0.0

    def begin(self, loss_scale: float) -> None:
        """Start an all-reduce; ``loss_scale`` is that of this replica's gradients."""
        assert not self.begun
        self.begun = True
        self._inverse_scale = 1.0 / loss_scale
        self._mean.begin(self._flat.gradients, self._flat.gradients, inverse_scale=1.0 / loss_scale)

    def open(self, loss_scale: float) -> Opened:
        """Begin during the backward pass: buckets are sent one by one, as their gradients become ready."""
        self.begin(loss_scale)
        return Opened(self.buckets, self.send)

    def send(self, bucket: int) -> None:
        """Send a bucket, whose gradients are in the flat buffer. The order is the same on all replicas."""
        if bucket not in self._own:
            self._measure(bucket, bucket + 1)
        own = self._own[bucket]
        self._mean.send(bucket, self._guard.status(own.status), own.square_sum)
        self._sent.add(bucket)

    def _measure(self, first: int, last: int) -> None:
        """Compute ``OwnGradient`` of the buckets [first, last), all at once."""
        numbers = range(first, last)
        statuses: Sequence[Status | torch.Tensor] = [Status.OK for _ in numbers]
        squares: Sequence[torch.Tensor | float] = [0.0 for _ in numbers]
        if self._checks or self._measures:
            start, end = self.buckets[first][0], self.buckets[last - 1][1]
            sums = square_sums(self._flat, self._kernels, start, end)  # fp32[blocks]
            of_buckets = self._by_bucket(sums)
            if self._checks:
                statuses = overflow_status(of_buckets).unbind()
            if self._measures:
                if self._counted is not None:
                    of_buckets = self._by_bucket(sums.masked_fill(~self._counted[start:end], 0.0))
                squares = (of_buckets * self._inverse_scale**2).float().unbind()
        self._own.update(zip(numbers, map(OwnGradient, statuses, squares), strict=True))

    def _by_bucket(self, sums: torch.Tensor) -> torch.Tensor:
        """fp64[buckets]: sums of fp32[blocks]; the order of additions makes no difference once rounded to fp32."""
        length = self.buckets[0][1]  # of all but the last
        return F.pad(sums, (0, -sums.numel() % length)).view(-1, length).sum(1, dtype=torch.float64)

    def finish(self, loss_scale: float) -> tuple[Status, float]:
        """Send the remaining buckets, and wait for all.

        Returns the most severe status of all replicas, and the inverse of the scale that the mean then has.
        """
        if not self.begun:
            self.begin(loss_scale)
        if not self._sent:
            self._measure(0, len(self.buckets))
        for bucket in self._order(self.buckets):
            if bucket not in self._sent:
                self.send(bucket)
        worst, inverse_scale = self._complete()
        self.begun = False
        # no host sync unless some replica has overflowed
        self.overflow_here = worst >= Status.OVERFLOW and any(float(own.status) > 0.0 for own in self._own.values())
        self.square_sum = self._mean.square_sum
        self._own.clear()
        self._sent.clear()
        return worst, inverse_scale

    def _complete(self) -> tuple[Status, float]:
        """Wait for all buckets; returns what ``finish`` does."""
        result: tuple[Status, float] = self._mean.finish()
        return result


class QuantizedGradientMean(GradientMean):
    """``GradientMean`` by a compressed exchange, whose result stays packed; each replica's gradient is left as it is.

    The residual is added at the next full step, however far away that is: it is a small share of its gradient, and the
    next residual replaces it, so that residuals neither add up nor grow with the interval. Gradients are exchanged
    without their loss scale, so that residuals stay valid when that changes.

    If any replica's gradient is not finite, errors stay unchanged.

    Right after a synchronization u takes the new worker error; at other steps memory for it is allocated.
    """

    def __init__(
        self,
        exchange: OneBitAllReduce,
        local: LocalUpdate,
        guard: OverflowGuard,
        *,
        order: Order,
        counted: torch.Tensor | None,
    ) -> None:
        super().__init__(exchange, local.flat, local.kernels, guard, order=order, counted=counted, measures=True)
        self._checks = True
        self.exchange, self._local = exchange, local
        self._uses_u = False
        self._value = torch.empty(0)

    def begin(self, loss_scale: float) -> None:
        """Start an all-reduce; ``loss_scale`` is that of this replica's gradients."""
        assert not self.begun
        self.begun = True
        self._inverse_scale = 1.0 / loss_scale
        self._uses_u = self._local.is_fresh
        self._value = self._local.u if self._uses_u else torch.empty_like(self._local.u)
        self.exchange.begin()

    def send(self, bucket: int) -> None:
        """Send a bucket, whose gradients are in the flat buffer. The order is the same on all replicas."""
        size, gradients = self._flat.blocks.block_size, self._flat.whole_gradients
        if gradients is not None and self._inverse_scale == 1.0:
            self.exchange.compress(bucket, *self.buckets[bucket], gradients, new_error=self._value)
        else:
            for first, last in self._local.ranges(*self.buckets[bucket]):
                self._flat.read_gradients(first, last, self._value)
                if self._inverse_scale != 1.0:
                    self._value[first * size : last * size].mul_(self._inverse_scale)
                self.exchange.compress(bucket, first, last, self._value)
        super().send(bucket)

    def _complete(self) -> tuple[Status, float]:
        worst = self.exchange.reduce(stop_on_overflow=True)
        self.packed = None
        if worst < Status.OVERFLOW:
            results, replaced = self.exchange.receive(self._value)
            self.packed = [PackedBlocks(one, *blocks) for one, blocks in zip(results, self.buckets, strict=True)]
            if self._uses_u:
                self._local.u = replaced
        self._value = torch.empty(0)
        return worst, 1.0

    def state(self) -> dict[str, torch.Tensor]:
        """The error buffers by name."""
        return {f"gradient_{name}": buffer for name, buffer in self.exchange.state().items()}

    def error_places(self) -> dict[str, ErrorPlace]:
        """For each of them the blocks that it belongs to."""
        return {f"gradient_{name}": place for name, place in self.exchange.error_places().items()}


class CompressionWatch:
    """Measures the quantization error of every ``interval``-th exchange; warns when error feedback keeps growing.

    Args:
        interval: exchanges between two measurements; 0 for none.
        partial: the ranks of this replica, if it is sharded; they measure together.
        logs: False on ranks that only measure.

    Attributes:
        interval: the one given.
    """

    def __init__(self, interval: int, partial: ModelShardRanks | None = None, *, logs: bool = True) -> None:
        self.interval, self._logs = interval, logs
        self._partial = partial
        self._history: deque[tuple[float, float]] = deque(maxlen=_HISTORY)  # ratio to what is sent, and norm

    def record(self, buckets: Sequence[CompressionNorms]) -> CompressionReport | None:
        """Record the norms of a measured exchange, and report them; None if nothing was quantized."""
        if not buckets:
            return None
        lost, sent = sum(bucket.residual for bucket in buckets), sum(bucket.quantized for bucket in buckets)
        if self._partial is not None:
            # replicated parameters count once for each rank
            lost, sent = self._partial.sums(lost, sent)
        if sent == 0.0:
            return None
        errors = (
            math.sqrt(b.residual / (b.quantized + b.residual)) if b.quantized + b.residual > 0 else 0.0 for b in buckets
        )
        norm, ratio = math.sqrt(lost), math.sqrt(lost / sent)
        self._history.append((ratio, norm))
        first, first_norm = self._history[0]
        is_steady = len(self._history) == _HISTORY and [*self._history] == sorted(self._history)
        # the ratio alone grows, too, where the learning rate falls to 0
        grows = ratio > _GROWTH * max(1.0, first) and norm > _GROWTH * first_norm
        if is_steady and grows and self._logs:
            logger.warning(
                "the error feedback of the 1-bit exchange has grown from %.3g to %.3g times what is sent; "
                "lower block_size or the learning rate",
                first,
                ratio,
            )
            self._history.clear()
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
        candidates: int32[elements / 32], a bit for each element that may take part.
        active: the same, of those that do take part; given to ``exchange``, and set here.
        has_second_moment: True if elements whose second moment is 0 take no part.
        order: in which buckets are sent.
        delay: True if results are received one step later; until then the model uses this replica's own step.

    Attributes:
        exchange: its errors are part of the state.
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
        phase = Phase(gradient=has_gradient, exchange=True, write_weights=self._delay, fresh=fresh)
        for blocks in self._local.ranges(*self.buckets[bucket]):
            if has_gradient or fresh or self._delay or self._local.common_momentum:
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
        results, local.u = self.exchange.receive(local.u)
        for bucket, blocks in enumerate(self.buckets):
            mean = None if results is None else results[bucket]
            for part in local.ranges(*blocks):
                local.run(phase, contribution.coefficients, part, mean)
        if self._watched:
            self.report = self._watch.record(self.exchange.compression())
        return worst
