"""The gradient that a step starts from: this replica's own or the mean of all, its norm, and whether it is finite."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron01.comm import DenseAllReduce, Status
from megatron01.optim.flat_parameters import FlatLayout, Gradients
from megatron01.optim.grad_scaling import LateNorm, OverflowGuard, add_up, all_finite, clip_coefficient
from megatron01.optim.local_update import Multiplier, UpdateBackend
from megatron01.optim.overlap import Opened
from megatron01.optim.partial import PartialModel

if TYPE_CHECKING:
    from megatron01.optim.zero import GradientScatter


class GradientMean:
    """Replaces gradients by their mean; single buckets may be started before ``finish`` sends the rest.

    Attributes:
        buckets: (first, last + 1) block of each bucket.
        overflow_here: whether a gradient of this replica was not finite before it was averaged. Only looked at in fp16,
            where a replica's own overflow moves its loss scale.
    """

    def __init__(self, mean: DenseAllReduce, backend: UpdateBackend, guard: OverflowGuard) -> None:
        self._mean = mean
        self._backend = backend
        self._guard = guard
        self.buckets = mean.buckets
        self._starts = [first for first, _ in self.buckets]
        self._gradients: dict[int, Gradients] = {}
        self._begun = False
        self.overflow_here = False

    def begin(self, loss_scale: float) -> None:
        """Start; ``loss_scale`` is that of the gradients of this replica."""
        assert not self._begun
        self._begun = True
        self.overflow_here = False
        self._gradients.clear()
        self._mean.begin(self._read, self._write, inverse_scale=1.0 / loss_scale)

    def open(self, layout: FlatLayout, loss_scale: float) -> Opened:
        """Start while the backward pass still runs: buckets are sent one by one, as their gradients are complete."""
        self.begin(loss_scale)
        return Opened(
            self.buckets,
            lambda bucket: self.send(bucket, Gradients(layout, complete=True, blocks=self.buckets[bucket])),
        )

    def send(self, bucket: int, gradients: Gradients) -> None:
        """Put a bucket on its way, whose part of ``gradients`` is complete. All replicas take the same order."""
        overflow = False
        if self._guard.loss_scaler is not None:
            first, last = self.buckets[bucket]
            self._backend.sum_squares(gradients, first, last)
            overflow = not all_finite(self._backend.square_sums[first:last])
            self.overflow_here |= overflow
        self._gradients[bucket] = gradients
        self._mean.send(bucket, self._guard.status(overflow))

    def finish(self, gradients: Gradients, order: Iterable[int], loss_scale: float) -> tuple[Status, float]:
        """Send what has not been sent, in ``order``, and wait for all.

        Returns the gravest status of all replicas, and the inverse of the scale that the gradients then have.
        """
        if not self._begun:
            self.begin(loss_scale)
        for bucket in order:
            if bucket not in self._gradients:
                self.send(bucket, gradients)
        result = self._mean.finish()
        self._begun = False
        self._gradients.clear()
        return result

    def _read(self, first: int, last: int, out: torch.Tensor) -> None:
        self._backend.read_gradients(self._of(first), first, last, out)

    def _write(self, first: int, last: int, values: torch.Tensor) -> None:
        self._backend.write_gradients(self._of(first), first, last, values)

    def _of(self, block: int) -> Gradients:
        return self._gradients[bisect_right(self._starts, block) - 1]


@dataclass(frozen=True)
class StepGradient:
    """What a step found.

    Attributes:
        used: the gradients as they lie in the model, still with the loss scale; None if one is known not to be finite.
        multiplier: what makes them those of the loss, clipped.
        norm: of the gradient of the loss before clipping; not finite if an element is not. One that is late is this
            replica's own.
        status: the gravest of those that took part in a mean, and of the parts of this replica.
        overflow_here: whether it was this replica's own gradient that is known not to be finite.
    """

    used: Gradients | None
    multiplier: Multiplier
    norm: float | LateNorm
    status: Status = Status.OK
    overflow_here: bool = False


class GradientSource:
    """Averages the gradients of a step where that is asked for, and takes their norm.

    Args:
        layout: of the flat buffers.
        backend: does the arithmetic.
        of_all: the mean over all processes, if there is ever one.
        of_node: the mean inside a node that is one replica, for steps without a mean over all.
        scatter: the mean of gradients inside the node, of which this process keeps its share, taken before all else.
        partial: the other parts of this replica.
        max_norm: what gradients are clipped to; None for no clipping.

    Attributes:
        of_all: the one given.
        counted: bool[blocks], those that enter the norm and other sums over the whole model; None for all.
    """

    def __init__(
        self,
        layout: FlatLayout,
        backend: UpdateBackend,
        *,
        of_all: GradientMean | None,
        of_node: GradientMean | None,
        scatter: GradientScatter | None,
        partial: PartialModel | None,
        max_norm: float | None,
    ) -> None:
        self._layout = layout
        self._backend = backend
        self.of_all = of_all
        self._of_node = of_node
        self._scatter = scatter
        self._partial = partial
        self._max_norm = max_norm
        self.counted: np.ndarray | None = None if partial is None else partial.counted_blocks(layout)
        self._not_counted = None if self.counted is None else torch.from_numpy(~self.counted).to(layout.device)

    def mean(self, averages: bool) -> GradientMean | None:
        """The mean that a step takes, which ``averages`` over all or not; None for none."""
        return self.of_all if averages else self._of_node

    @property
    def may_be_late(self) -> bool:
        """Whether the norm of a gradient that is not averaged is nobody else's business, and would be waited for."""
        elsewhere = self._of_node is not None or self._scatter is not None or self._partial is not None
        return self._backend.runs_behind and not elsewhere

    def late(self, loss_scale: float) -> StepGradient:
        """This replica's own gradient, without waiting for its norm."""
        gradients = Gradients(self._layout, complete=False)
        self._backend.sum_squares(gradients, 0, self._layout.blocks.num_blocks)
        norm = LateNorm(add_up(self._backend.square_sums).sqrt(), 1.0 / loss_scale, self._max_norm)
        return StepGradient(gradients, norm.multiplier, norm)

    def finish(
        self,
        averages: bool,
        loss_scale: float,
        order: Callable[[list[tuple[int, int]]], Iterable[int]],
        unsummed: Sequence[tuple[int, int]] | None,
    ) -> StepGradient:
        """Average what has not been averaged yet, and take the norm.

        Args:
            averages: whether the step takes the mean over all.
            loss_scale: that of this replica's gradients.
            order: in which buckets are sent.
            unsummed: ranges of blocks whose gradients' squares have not been summed on the way of their bucket; None
                for all blocks.
        """
        mean, inverse_scale = self.mean(averages), 1.0 / loss_scale
        status, overflow_here = Status.OK, False
        if self._scatter is not None:
            status, inverse_scale = self._scatter.finish(loss_scale)
            overflow_here = self._scatter.overflow_here
        gradients = Gradients(self._layout, complete=mean is not None)
        if mean is not None:
            status, inverse_scale = mean.finish(gradients, order(mean.buckets), 1.0 / inverse_scale)
            overflow_here |= mean.overflow_here
        for blocks in [(0, self._layout.blocks.num_blocks)] if unsummed is None else unsummed:
            self._backend.sum_squares(gradients, *blocks)
        square_sums = self._backend.square_sums
        if self._not_counted is not None:
            square_sums = square_sums.masked_fill(self._not_counted, 0.0)
        square_sum = float(add_up(square_sums))
        if self._partial is not None:
            found = self._partial.parts.gather([square_sum, status, overflow_here])
            sums, statuses, overflows = zip(*found, strict=True)
            square_sum, status = sum(sums), Status(int(max(statuses)))
            if self._scatter is None:  # parts of a model see the same batch, and overflow together
                overflow_here = any(overflows)
        norm = math.sqrt(square_sum) * inverse_scale
        if not math.isfinite(norm) and status is Status.OK:
            # this replica's own gradient; or a mean of finite ones, for which fp16 on the wire is too narrow
            overflow_here = True
        multiplier = inverse_scale * clip_coefficient(norm, self._max_norm)
        return StepGradient(gradients if math.isfinite(norm) else None, multiplier, norm, status, overflow_here)
