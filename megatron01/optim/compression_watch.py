"""Whether the error feedback of 1-bit exchanges stays in bounds."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron01.comm.payload import CompressionNorms
from megatron01.optim.partial import PartialModel

logger = logging.getLogger(__name__)

_LOOKS = 8
_GROWTH = 4.0


@dataclass(frozen=True)
class CompressionReport:
    """How much one exchange lost on this replica.

    Attributes:
        relative_errors: for each bucket, norm of what the bits did not tell over the norm of what they were to tell.
        feedback_ratio: norm of the worker error over that of the exchanged step: how many steps it is behind.
    """

    relative_errors: tuple[float, ...]
    feedback_ratio: float


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
