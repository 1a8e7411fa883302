"""The gradient that a step starts from: this replica's own or a mean, its norm, and whether it is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron01.comm import Status
from megatron01.optim.flat import FlatLayout, Gradients
from megatron01.optim.gradient_mean import GradientMean
from megatron01.optim.partial import PartialModel
from megatron01.optim.shard import GradientScatter
from megatron01.optim.update import UpdateBackend


@dataclass(frozen=True)
class StepGradient:
    """What a step found.

    Attributes:
        gradients: as they lie in the model, still with the loss scale.
        inverse_scale: what makes them those of the loss.
        norm: of the gradient of the loss; not finite if an element is not.
        status: the gravest of those that took part in a mean, and of the parts of this replica.
        overflow_here: whether it was this replica's own gradient that was not finite.
    """

    gradients: Gradients
    inverse_scale: float
    norm: float
    status: Status
    overflow_here: bool

    @property
    def finite(self) -> Gradients | None:
        """The gradients if all of them are finite."""
        return self.gradients if math.isfinite(self.norm) else None


class GradientSource:
    """Averages the gradients of a step where that is asked for, and takes their norm.

    Args:
        layout: of the flat buffers.
        backend: does the arithmetic.
        of_all: the mean over all processes, if there is ever one.
        of_node: the mean inside a node that is one replica, for steps without a mean over all.
        scatter: the mean of gradients inside the node, of which this process keeps its share, taken before all else.
        partial: the other parts of this replica.

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
    ) -> None:
        self._layout = layout
        self._backend = backend
        self.of_all = of_all
        self._of_node = of_node
        self._scatter = scatter
        self._partial = partial
        self.counted: np.ndarray | None = None if partial is None else partial.counted_blocks(layout)

    def mean(self, averages: bool) -> GradientMean | None:
        """The mean that a step takes, which ``averages`` over all or not; None for none."""
        return self.of_all if averages else self._of_node

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
            self._backend.gradient_square_sums(gradients, *blocks)
        square_sum = self._backend.gradient_square_sum(self.counted)
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
        return StepGradient(gradients, inverse_scale, norm, status, overflow_here)
