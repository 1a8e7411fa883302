"""The gradient of a step: its mean over replicas, its norm, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron01.comm import Status
from megatron01.comm.payload import PackedBlocks
from megatron01.optim.exchanges import GradientMean
from megatron01.optim.flat_parameters import FlatParameters
from megatron01.optim.local_update import Kernels, Multiplier, square_sums
from megatron01.optim.loss_scaler import overflow_status
from megatron01.optim.safety import SameDataWatch
from megatron01.optim.settings import ModelShardRanks
from megatron01.optim.zero import ShardedReplica

_SMALL = 1e-6


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Factor that clips a gradient of this norm to ``max_norm``; 1 if it is shorter or no bound is given."""
    if max_norm is None or norm <= max_norm:
        return 1.0
    return max_norm / (norm + _SMALL)


def add_up(square_sums: torch.Tensor) -> torch.Tensor:
    """fp64[]: the sum, on the device of ``square_sums`` (fp32 or fp64 [blocks]).

    Halves are added until one number is left: a fixed order, with the same bits on every device.
    """
    total = square_sums.to(torch.float64, copy=True)
    remaining = total.numel()
    if not remaining:
        return total.new_zeros(())
    while remaining > 1:
        half = (remaining + 1) // 2
        total[: remaining - half].add_(total[half:remaining])
        remaining = half
    return total[0]


class DeferredNorm:
    """A gradient norm that stays on the device, so that the host need not wait for it.

    Args:
        scaled: fp64[] on the device: norm of the gradient, still multiplied by the loss scale.
        inverse_scale: inverse of the loss scale.
        max_norm: clip to this norm; None for no clipping.
        ratio: of the mean gradient's norm to this one (see ``NormRatio``).

    Attributes:
        multiplier: fp32[] on the device: factor on the gradient; NaN if it is not finite.
    """

    def __init__(self, scaled: torch.Tensor, inverse_scale: float, max_norm: float | None, ratio: float = 1.0) -> None:
        norm = scaled * inverse_scale * ratio
        if max_norm is None:
            multiplier = torch.full_like(norm, inverse_scale)
        else:  # the same bits as ``clip_coefficient``
            multiplier = inverse_scale * torch.where(norm <= max_norm, 1.0, max_norm / (norm + _SMALL))
        self.multiplier = (multiplier + norm * 0.0).float()  # 0 * inf and 0 * NaN are NaN
        self._norm = norm
        self._event: torch.cuda.Event | None = None
        if norm.device.type == "cuda":
            self._norm = torch.empty((), dtype=torch.float64, device="cpu", pin_memory=True)
            self._norm.copy_(norm, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(norm.device))

    @property
    def status(self) -> torch.Tensor:
        """fp32[] on the device: ``Status.OVERFLOW`` if the gradient is not finite, else ``Status.OK``."""
        return overflow_status(self.multiplier)

    def __float__(self) -> float:
        """Norm of the gradient of the loss, times ``ratio``, not finite if an element is not; a host sync."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._norm)


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
        applies: False if norms are rank-local (r is 1); it is measured all the same, for a resume that applies it.
        same_data: detects replicas whose gradients are all the same.

    Attributes:
        moving_average: r, whether or not it applies; 0 before the first full step.
        value: r; 1 where it does not apply, or before the first full step.
        is_known: True after a full step, if r applies.
        applies: True if norms are estimated, with more than one replica.
    """

    _OLD_SHARE = 0.8

    def __init__(self, num_replicas: int, *, applies: bool, same_data: SameDataWatch | None = None) -> None:
        self._num_replicas = num_replicas
        self.applies = applies and num_replicas > 1
        self._same_data = same_data
        self._set(0.0)

    def _set(self, measured: float) -> None:
        """Set r as measured; 0 before the first full step."""
        self.moving_average = measured
        self.is_known = self.applies and measured > 0.0
        self.value = measured if self.is_known else 1.0

    def measured(self, norm_of_mean: float, square_sum: float) -> None:
        """Record a full step; ``square_sum`` is the sum of the replicas' squared norms, the same on all."""
        if self._same_data is not None:
            self._same_data.record(norm_of_mean, square_sum / self._num_replicas)
        if self._num_replicas == 1 or not (math.isfinite(norm_of_mean) and 0.0 < square_sum < math.inf):
            return
        # the mean is rounded to its wire type, so it may come out longer
        ratio = min(1.0, norm_of_mean / math.sqrt(square_sum / self._num_replicas))
        before = self.moving_average
        self._set(self._OLD_SHARE * before + (1.0 - self._OLD_SHARE) * ratio if before else ratio)

    def scalars(self) -> list[float]:
        """Numbers from which ``load_scalars`` continues: r, or 0 where it is not known, and n."""
        return [self.moving_average, float(self._num_replicas)]

    def load_scalars(self, scalars: Iterator[float]) -> None:
        """Load them; those of another number of replicas are converted."""
        value, saved, n = next(scalars), next(scalars), self._num_replicas
        if n > 1 and value and saved != n:
            signal = max(0.0, (value * value * saved - 1.0) / (saved - 1.0))
            value = math.sqrt(signal + (1.0 - signal) / n)
        self._set(value if n > 1 else 0.0)


class GradientSource:
    """Averages the gradients of a step if asked to, and computes their norm.

    Args:
        sharded: the reduce-scatter inside the node, done before all else (ZeRO).
        max_norm: clip gradients to this norm; None for no clipping.
        ratio: estimates the norm of the mean at steps that do not take it.

    Attributes:
        of_all: the mean over all processes, if any step takes one.
        of_node: the mean inside a node that is one replica, for steps without a mean over all.
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
        status, overflow_here, packed = Status.OK, False, None
        if self._sharded is not None:
            status, inverse_scale = self._sharded.reduce_scatter(loss_scale)
            overflow_here = self._sharded.gradient_mean.overflow_here
        overflows_together = status is Status.OK
        if mean is not None:
            status, inverse_scale = mean.finish(1.0 / inverse_scale)
            overflow_here, packed = mean.overflow_here if overflows_together else overflow_here, mean.packed
        if packed is not None:
            size = self._flat.blocks.block_size
            self.square_sums = torch.cat([self._kernels.sum_squares(bucket, size) for bucket in packed])
        elif unsummed is None:
            self.square_sums = square_sums(self._flat, self._kernels, 0, self._flat.blocks.num_blocks)
        else:
            for first, last in unsummed:
                self.square_sums[first:last] = square_sums(self._flat, self._kernels, first, last)
        sums = self.square_sums
        if self._not_counted is not None:
            sums = sums.masked_fill(self._not_counted, 0.0)
        total = add_up(sums)
        if may_defer and self.may_be_deferred and not averages:
            deferred = DeferredNorm(total.sqrt(), inverse_scale, self._max_norm, self._ratio.value)
            return StepGradient(True, deferred.multiplier, deferred)
        square_sum = float(total)
        of_replicas = mean.square_sum if averages and mean is not None else 0.0
        if self._partial is not None:
            found = self._partial.ranks.gather([square_sum, status, overflow_here, of_replicas])
            all_sums, statuses, overflows, squares = zip(*found, strict=True)
            square_sum, status, of_replicas = sum(all_sums), Status(int(max(statuses))), sum(squares)
            # tensor-parallel ranks see the same batch; with ZeRO each has a part of the node's mean, whose 16-bit type
            # may not hold what was finite in every process
            if overflows_together:
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
