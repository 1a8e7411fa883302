"""The full-precision mean of gradients over the replicas, in place, bucket by bucket."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch

from megatron01.comm import DenseAllReduce, Status
from megatron01.optim.flat import FlatLayout, Gradients
from megatron01.optim.norm import all_finite
from megatron01.optim.overflow import OverflowGuard
from megatron01.optim.overlap import Opened
from megatron01.optim.update import UpdateBackend


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
