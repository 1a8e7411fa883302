"""The mean of gradients in 4 or 8 bits, with error feedback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megatron01.comm import ErrorPlace, Exchange, Status
from megatron01.optim.grad_scaling import OverflowGuard, add_up, all_finite
from megatron01.optim.gradients import GradientMean, square_sums
from megatron01.optim.local_update import LocalUpdate


class QuantizedGradientMean(GradientMean):
    """``GradientMean`` by a compressed exchange.

    What the codes lose of the gradients is added to them at the next full step, however far away that is: a residual
    is a small share of the gradient that it comes from, and the next one replaces it, so that residuals neither add up
    nor grow with the interval. Gradients enter without their loss scale, so that residuals outlive its changes.

    When a replica's gradient is not finite, nothing changes: neither gradients nor errors.

    Args:
        exchange: of buffers like u.
        local: the state of this replica. Right after a synchronization u is scratch; at other steps, memory is
            allocated in its place.
        guard: gives the status to send to the other replicas.
        counted: bool[blocks], those that enter norms; None for all.

    Attributes:
        begun: True if a mean has begun and has not been received.
    """

    def __init__(
        self, exchange: Exchange, local: LocalUpdate, guard: OverflowGuard, *, counted: torch.Tensor | None = None
    ) -> None:
        self.exchange = exchange
        self.buckets = exchange.buckets
        self.overflow_here = False
        self._local = local
        self._flat = local.flat
        self._kernels = local.kernels
        self._guard = guard
        self._counted = counted
        self._sent: set[int] = set()
        self.begun = False
        self._inverse_scale = 1.0
        self._uses_u = False
        self._value = torch.empty(0)
        self._range_blocks = max(1, local.kernels.range_elements // local.flat.blocks.block_size)

    def begin(self, loss_scale: float) -> None:
        """Start; ``loss_scale`` is that of the gradients of this replica."""
        assert not self.begun
        self.begun, self.overflow_here = True, False
        self._inverse_scale = 1.0 / loss_scale
        self._uses_u = self._local.is_fresh
        self._value = self._local.u if self._uses_u else torch.empty_like(self._local.u)
        self.exchange.begin()

    def send(self, bucket: int) -> None:
        """Put a bucket on its way, whose gradients are in their buffer. All replicas take the same order."""
        start, end = self.buckets[bucket]
        sums = square_sums(self._flat, self._kernels, start, end)
        overflow = not all_finite(sums)
        self.overflow_here |= overflow
        counted = sums if self._counted is None else sums.masked_fill(~self._counted[start:end], 0.0)
        squares = (add_up(counted) * self._inverse_scale**2).float()
        for first, last in self._ranges(bucket):
            value = self._part(self._value, first, last)
            self._flat.read_gradients(first, last, value)
            if self._inverse_scale != 1.0:
                value.mul_(self._inverse_scale)
            self.exchange.compress(bucket, first, last, self._value)
        self._sent.add(bucket)
        self.exchange.send(bucket, self._guard.status(overflow), self._inverse_scale, squares)

    @property
    def square_sum(self) -> float:
        return self.exchange.square_sum

    def finish(self, order: Iterable[int], loss_scale: float) -> tuple[Status, float]:
        """Send what has not been sent, in ``order``, and wait for all.

        Returns the most severe status of all replicas, and the inverse of the scale that the gradients then have. From
        OVERFLOW on, gradients are what they were.
        """
        if not self.begun:
            self.begin(loss_scale)
        for bucket in order:
            if bucket not in self._sent:
                self.send(bucket)
        self._sent.clear()
        worst = self.exchange.reduce(stop_on_overflow=True)
        # in 16 bit, gradients without a loss scale could be too small
        inverse_scale = self.exchange.inverse_scale
        if worst >= Status.OVERFLOW:
            self.exchange.cancel()
        else:
            self._receive(1.0 / inverse_scale)
        self._value, self.begun = torch.empty(0), False
        return worst, inverse_scale

    def state(self) -> dict[str, torch.Tensor]:
        """The error buffers by name."""
        return {f"gradient_{name}": buffer for name, buffer in self.exchange.state().items()}

    def error_places(self) -> dict[str, ErrorPlace]:
        """For each of them the blocks that it belongs to."""
        return {f"gradient_{name}": place for name, place in self.exchange.error_places().items()}

    def _receive(self, scale: float) -> None:
        """Gradients <- the mean times ``scale``."""
        scratch: torch.Tensor | None = None
        for bucket in range(len(self.buckets)):
            self.exchange.receive(bucket)
            for first, last in self._ranges(bucket):
                if scratch is None:  # the first range is one of the longest
                    scratch = torch.empty((last - first) * self._flat.blocks.block_size, device=self._flat.device)
                mean = self._part(scratch, 0, last - first)
                self.exchange.decompress(bucket, first, last, mean)
                if scale != 1.0:
                    mean.mul_(scale)
                self._flat.write_gradients(first, last, mean)
        replaced = self.exchange.swap(self._value)
        if self._uses_u:
            self._local.u = replaced

    def _ranges(self, bucket: int) -> Iterator[tuple[int, int]]:
        """A bucket's blocks in ranges that stay in the cache from one pass to the next."""
        start, end = self.buckets[bucket]
        for first in range(start, end, self._range_blocks):
            yield first, min(first + self._range_blocks, end)

    def _part(self, buffer: torch.Tensor, first: int, last: int) -> torch.Tensor:
        size = self._flat.blocks.block_size
        return buffer[first * size : last * size]
