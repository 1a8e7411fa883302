"""The gradient of a step: rank-local or averaged over the replicas, with its norm and overflow status."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from megatron01.comm import DenseAllReduce, ErrorPlace, OneBitAllReduce, Status
from megatron01.comm.payload import PackedBlocks
from megatron01.optim.flat_parameters import FlatParameters
from megatron01.optim.grad_scaling import (
    DeferredNorm,
    OverflowGuard,
    add_up,
    clip_coefficient,
    overflow_status,
)
from megatron01.optim.local_update import Kernels, LocalUpdate, Multiplier
from megatron01.optim.overlap import Opened, Order
from megatron01.optim.safety import SameDataWatch
from megatron01.optim.shard_ranks import ModelShardRanks

if TYPE_CHECKING:
    from megatron01.optim.zero import ShardedReplica


def square_sums(flat: FlatParameters, kernels: Kernels, first: int, last: int) -> torch.Tensor:
    """fp32[last - first]: sum of squares of the gradients in each of the blocks [first, last)."""
    size = flat.blocks.block_size
    sums = [kernels.sum_squares(s.gradients, size) for s in flat.segments(first, last) if s.gradients is not None]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


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
        self._looks, self._measures = guard.loss_scaler is not None, measures
        self._inverse_scale = 1.0
        self.buckets = mean.buckets
        self._own: dict[int, OwnGradient] = {}  # by bucket
        self._sent: set[int] = set()
        self.begun = False
        self.overflow_here = False

    def begin(self, loss_scale: float) -> None:
        """Start an all-reduce; ``loss_scale`` is that of this replica's gradients."""
        assert not self.begun
        self.begun = True
        self._inverse_scale = 1.0 / loss_scale
        self._mean.begin(self._flat.gradients, self._flat.gradients, inverse_scale=1.0 / loss_scale)

    def open(self, loss_scale: float) -> Opened:
        """Begin during the backward pass: buckets are sent one by one, as their gradients become ready."""
        self.begin(loss_scale)

        def send(bucket: int) -> None:
            self._flat.gather_gradients(self.buckets[bucket])
            self.send(bucket)

        return Opened(self.buckets, send)

    def send(self, bucket: int) -> None:
        """Send a bucket, whose gradients are in the flat buffer. The order is the same on all replicas."""
        own = self._of_own(bucket)
        self._mean.send(bucket, self._guard.status(own.status), own.square_sum)

    def _of_own(self, bucket: int) -> OwnGradient:
        """``OwnGradient`` of a bucket that is about to be sent."""
        if bucket not in self._own:
            self._look(bucket, bucket + 1)
        self._sent.add(bucket)
        return self._own[bucket]

    def _look(self, first: int, last: int) -> None:
        """Compute ``OwnGradient`` of the buckets [first, last), all at once."""
        numbers = range(first, last)
        statuses: Sequence[Status | torch.Tensor] = [Status.OK for _ in numbers]
        squares: Sequence[torch.Tensor | float] = [0.0 for _ in numbers]
        if self._looks or self._measures:
            start, end = self.buckets[first][0], self.buckets[last - 1][1]
            sums = square_sums(self._flat, self._kernels, start, end)  # fp32[blocks]
            of_buckets = self._by_bucket(sums)
            if self._looks:
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

    def _note_own(self, worst: Status) -> None:
        """Set ``overflow_here`` when all has been sent: ``worst`` is the most severe status of all replicas."""
        # no host sync unless some replica has overflowed
        self.overflow_here = worst >= Status.OVERFLOW and any(float(own.status) > 0.0 for own in self._own.values())
        self._own.clear()
        self._sent.clear()

    @property
    def square_sum(self) -> float:
        return self._mean.square_sum  # type: ignore[no-any-return]

    def _send_rest(self, loss_scale: float) -> None:
        """Send the remaining buckets."""
        if not self.begun:
            self.begin(loss_scale)
        if not self._sent:
            self._look(0, len(self.buckets))
        for bucket in self._order(self.buckets):
            if bucket not in self._sent:
                self.send(bucket)

    def finish(self, loss_scale: float) -> tuple[Status, float]:
        """Send the remaining buckets, and wait for all.

        Returns the most severe status of all replicas, and the inverse of the scale that the gradients then have.
        """
        self._send_rest(loss_scale)
        worst, inverse_scale = self._mean.finish()
        self.begun = False
        self._note_own(worst)
        return worst, inverse_scale


class QuantizedGradientMean(GradientMean):
    """``GradientMean`` by a compressed exchange, whose result stays packed; each replica's gradient is left as it is.

    The residual is added at the next full step, however far away that is: it is a small share of its gradient, and the
    next residual replaces it, so that residuals neither add up nor grow with the interval. Gradients are exchanged
    without their loss scale, so that residuals stay valid when that changes.

    If any replica's gradient is not finite, errors stay unchanged.

    Args:
        exchange: all-reduce of buffers like u.
        local: the state of this replica. Right after a synchronization u takes the new worker error; at other steps
            memory for it is allocated.
        guard: gives the status to send to the other replicas.
        order: as of ``GradientMean``.
        counted: bool[blocks], those that enter norms; None for all.
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
        self._looks = True
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
                value = self._value[first * size : last * size]
                self._flat.read_gradients(first, last, value)
                if self._inverse_scale != 1.0:
                    value.mul_(self._inverse_scale)
                self.exchange.compress(bucket, first, last, self._value)
        own = self._of_own(bucket)
        self.exchange.send(bucket, self._guard.status(own.status), own.square_sum)

    def finish(self, loss_scale: float) -> tuple[Status, float]:
        """Send the remaining buckets, and wait for all.

        Returns the most severe status of all replicas, and the inverse of the scale of ``packed``, which is 1.
        """
        self._send_rest(loss_scale)
        worst = self.exchange.reduce(stop_on_overflow=True)
        self._note_own(worst)
        self.packed = None
        if worst < Status.OVERFLOW:
            buckets = enumerate(self.buckets)
            self.packed = [PackedBlocks(self.exchange.receive(bucket), *blocks) for bucket, blocks in buckets]
            replaced = self.exchange.swap(self._value)
            if self._uses_u:
                self._local.u = replaced
        self._value, self.begun = torch.empty(0), False
        return worst, 1.0

    def state(self) -> dict[str, torch.Tensor]:
        """The error buffers by name."""
        return {f"gradient_{name}": buffer for name, buffer in self.exchange.state().items()}

    def error_places(self) -> dict[str, ErrorPlace]:
        """For each of them the blocks that it belongs to."""
        return {f"gradient_{name}": place for name, place in self.exchange.error_places().items()}


@dataclass(frozen=True)
class StepGradient:
    """The gradient of a step: ``mean``, or what is in the flat buffer, still with the loss scale.

    Attributes:
        is_used: False if it is known not to be finite.
        multiplier: factor that removes the loss scale and clips.
        norm: of the mean gradient of the loss before clipping, or an estimate of it (see ``NormRatio``); not finite if
            an element is not.
        status: the most severe one of the ranks that took part in a mean, and of this replica's ranks.
        overflow_here: True if this replica's own gradient is known not to be finite.
        mean: packed mean by bucket, where there is one.
    """

    is_used: bool
    multiplier: Multiplier
    norm: float | DeferredNorm
    status: Status = Status.OK
    overflow_here: bool = False
    mean: list[PackedBlocks] | None = None


class NormRatio:
    """r = |mean of g_i| / root mean square of |g_i| over replicas i: estimates the norm of the mean.

    Full steps measure it, as a moving average (0.8 old, 0.2 new). Between two of them the norm of the mean is estimated
    as r |g_i| on replica i. Where the noise of n replicas' gradients is independent, r^2 = signal + (1 - signal) / n,
    with the share ``signal`` of |g_i|^2 that they have in common.

    Args:
        num_replicas: n; with one, r is 1.
        measures: False to leave r at 1, so that norms are rank-local.
        same_data: detects replicas whose gradients are all the same.

    Attributes:
        value: r; 1 before the first full step.
        is_known: True after a full step.
        measures: True if norms are estimated, with more than one replica.
    """

    _OLD_SHARE = 0.8

    def __init__(self, num_replicas: int, *, measures: bool, same_data: SameDataWatch | None = None) -> None:
        self._num_replicas = num_replicas
        self.measures = measures and num_replicas > 1
        self._same_data = same_data
        self.value, self.is_known = 1.0, False

    def measured(self, norm_of_mean: float, square_sum: float) -> None:
        """Record a full step; ``square_sum`` is the sum of the replicas' squared norms, the same on all."""
        if self._same_data is not None:
            self._same_data.record(norm_of_mean, square_sum / self._num_replicas)
        if not self.measures or not (math.isfinite(norm_of_mean) and 0.0 < square_sum < math.inf):
            return
        # the mean is rounded to its wire type, so it may come out longer
        ratio = min(1.0, norm_of_mean / math.sqrt(square_sum / self._num_replicas))
        self.value = self._OLD_SHARE * self.value + (1.0 - self._OLD_SHARE) * ratio if self.is_known else ratio
        self.is_known = True

    def scalars(self) -> list[float]:
        """Numbers from which ``load_scalars`` continues: r, or 0 where it is not known, and n."""
        return [self.value if self.is_known else 0.0, float(self._num_replicas)]

    def load_scalars(self, scalars: Iterator[float]) -> None:
        """Load them; those of another number of replicas are converted."""
        value, saved, n = next(scalars), next(scalars), self._num_replicas
        self.value, self.is_known = 1.0, False
        if self.measures and value > 0.0:
            signal = max(0.0, (value * value * saved - 1.0) / (saved - 1.0))
            self.value = value if saved == n else math.sqrt(signal + (1.0 - signal) / n)
            self.is_known = True


class GradientSource:
    """Averages the gradients of a step if asked to, and computes their norm.

    Args:
        flat: weights and gradients.
        kernels: do the arithmetic.
        of_all: the mean over all processes, if any step takes one.
        of_node: the mean inside a node that is one replica, for steps without a mean over all.
        sharded: the reduce-scatter inside the node, done before all else (ZeRO).
        partial: the other ranks of this replica.
        max_norm: clip gradients to this norm; None for no clipping.
        ratio: estimates the norm of the mean at steps that do not take it.

    Attributes:
        of_all, of_node: those given.
        counted: bool[blocks], those that enter the norm and other sums over the whole model; None for all.
        square_sums: fp32[blocks], sums of squares of gradients.
        may_be_deferred: True if a rank-local norm may stay on the device (no host sync).
    """

    def __init__(
        self,
        flat: FlatParameters,
        kernels: Kernels,
        *,
        of_all: GradientMean | None,
        of_node: GradientMean | None,
        sharded: ShardedReplica | None,
        partial: ModelShardRanks | None,
        max_norm: float | None,
        ratio: NormRatio,
        counted: np.ndarray | None,
    ) -> None:
        self._flat, self._kernels = flat, kernels
        self.of_all, self.of_node, self._sharded, self._partial = of_all, of_node, sharded, partial
        self._max_norm, self._ratio = max_norm, ratio
        self.counted = counted
        self._not_counted = None if self.counted is None else torch.from_numpy(~self.counted).to(flat.device)
        self.square_sums = torch.zeros(flat.blocks.num_blocks, dtype=torch.float32, device=flat.device)
        is_own = of_node is None and sharded is None and partial is None
        self.may_be_deferred = kernels.runs_behind and is_own

    def sum_squares(self, first: int, last: int) -> torch.Tensor:
        """Update ``square_sums`` of the blocks [first, last); returns fp32[]: OVERFLOW if any is not finite."""
        self.square_sums[first:last] = square_sums(self._flat, self._kernels, first, last)
        return overflow_status(self.square_sums[first:last].sum(dtype=torch.float64))

    def _sum_up(
        self, unsummed: Sequence[tuple[int, int]] | None, packed: list[PackedBlocks] | None = None
    ) -> torch.Tensor:
        """fp32[blocks]: sums of squares of all blocks, of ``packed`` if it is given; ``unsummed`` as for ``find``."""
        if packed is not None:
            size = self._flat.blocks.block_size
            self.square_sums = torch.cat([self._kernels.sum_squares(bucket, size) for bucket in packed])
            return self.square_sums
        if unsummed is None:
            self.square_sums = square_sums(self._flat, self._kernels, 0, self._flat.blocks.num_blocks)
        for first, last in unsummed or ():
            self.square_sums[first:last] = square_sums(self._flat, self._kernels, first, last)
        return self.square_sums

    def find(
        self, averages: bool, loss_scale: float, unsummed: Sequence[tuple[int, int]] | None, *, may_defer: bool
    ) -> StepGradient:
        """Average what has not been averaged yet, and compute the norm: a host sync, unless it can be deferred.

        Args:
            averages: whether the step averages over all processes.
            loss_scale: that of this replica's gradients.
            unsummed: ranges of blocks whose squares were not summed when their bucket was sent; None for all blocks.
            may_defer: whether a rank-local norm may be deferred.
        """
        mean, inverse_scale = self.of_all if averages else self.of_node, 1.0 / loss_scale
        if may_defer and self.may_be_deferred and not averages:
            deferred = DeferredNorm(
                add_up(self._sum_up(unsummed)).sqrt(), inverse_scale, self._max_norm, self._ratio.value
            )
            return StepGradient(True, deferred.multiplier, deferred)
        status, overflow_here, packed = Status.OK, False, None
        if self._sharded is not None:
            status, inverse_scale = self._sharded.reduce_scatter(loss_scale)
            overflow_here = self._sharded.gradient_mean.overflow_here
        if mean is not None:
            status, inverse_scale = mean.finish(1.0 / inverse_scale)
            overflow_here, packed = overflow_here or mean.overflow_here, mean.packed
        sums = self._sum_up(unsummed, packed)
        if self._not_counted is not None:
            sums = sums.masked_fill(self._not_counted, 0.0)
        square_sum, of_replicas = float(add_up(sums)), 0.0
        if averages and mean is not None:
            of_replicas = mean.square_sum
        if self._partial is not None:
            found = self._partial.ranks.gather([square_sum, status, overflow_here, of_replicas])
            all_sums, statuses, overflows, squares = zip(*found, strict=True)
            square_sum, status, of_replicas = sum(all_sums), Status(int(max(statuses))), sum(squares)
            if self._sharded is None:  # tensor-parallel ranks see the same batch, and overflow together
                overflow_here = any(overflows)
        if status >= Status.OVERFLOW:  # where the mean has been called off, gradients are unchanged
            square_sum = math.inf
        norm = math.sqrt(square_sum) * inverse_scale
        if averages:
            self._ratio.measured(norm, of_replicas)
        else:
            norm *= self._ratio.value
        if not math.isfinite(norm) and status is Status.OK:
            # this replica's own gradient; or the mean of finite ones overflowed in fp16 on the wire
            overflow_here = True
        multiplier = inverse_scale * clip_coefficient(norm, self._max_norm)
        return StepGradient(math.isfinite(norm), multiplier, norm, status, overflow_here, packed)
