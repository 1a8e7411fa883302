"""What one replica holds: its flat buffers, what they have come through since the last synchronization, and passes.

The passes here are those over all blocks that need nobody else; ``AccumulatedSteps`` runs those of an exchange.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megatron01.comm import ErrorPlace
from megatron01.optim.accumulated import AccumulatedSteps
from megatron01.optim.flat import FlatLayout, Gradients
from megatron01.optim.masks import HeldElements
from megatron01.optim.progress import SinceSynchronization
from megatron01.optim.update import (
    LOCAL,
    SYNCHRONIZE,
    WRITE_WEIGHTS,
    Coefficients,
    FlatState,
    Phase,
    Rule,
    UpdateBackend,
    by_group,
)


class Replica:
    """The state of one replica, and how it changes where no exchange is needed.

    Args:
        layout: of the buffers.
        x: master weights.
        rule: how an accumulated step moves the weights; the plain one has no v.
        backend: does the arithmetic.
        held: elements that stay where they are.
        steps: the exchange of u, if there is ever one.
        state_dtype: fp32 or bf16: of v, m and u.
        num_groups: number of parameter groups.
        is_alone: whether there are no other replicas.

    Attributes:
        state: the flat buffers.
        since_sync: what has come together since the last synchronization.
        agrees: whether m and u are the same on all replicas.
    """

    def __init__(
        self,
        layout: FlatLayout,
        x: torch.Tensor,
        rule: Rule,
        backend: UpdateBackend,
        held: HeldElements,
        steps: AccumulatedSteps | None,
        *,
        state_dtype: torch.dtype,
        num_groups: int,
        is_alone: bool,
    ) -> None:
        v = torch.zeros(0, device=layout.device) if rule is Rule.PLAIN else layout.new_buffer(state_dtype)
        self.state = FlatState(x, v=v, m=layout.new_buffer(state_dtype), u=layout.new_buffer(state_dtype))
        self.since_sync = SinceSynchronization(num_groups)
        self.is_alone = is_alone
        self.agrees = True
        self._blocks = layout.blocks
        self._backend = backend
        self._held = held
        self._steps = steps

    @property
    def is_fresh(self) -> bool:
        """Whether the last step was a synchronization, so that u counts as 0."""
        return self.since_sync.steps == 0

    def run(self, phase: Phase, coefficients: Coefficients, gradients: Gradients | None) -> None:
        """``phase`` on all blocks."""
        phase = replace(phase, fresh=self.is_fresh)
        self._backend.update(0, self._blocks.num_blocks, phase, self.state, coefficients, gradients)
        if phase.write_weights:
            self.restore_held()

    def step_alone(self, coefficients: Coefficients, gradients: Gradients | None, *, averaged: bool) -> None:
        """Add a step to u and go on from there; ``averaged`` says that the gradients are the same everywhere."""
        self.run(LOCAL if gradients else WRITE_WEIGHTS, coefficients, gradients)
        self.agrees = self.is_alone or (self.agrees and averaged)

    def has_synchronized(self) -> None:
        """Take note that x has moved by the mean of u, on all replicas."""
        self.since_sync.clear()
        self.agrees = True

    def restore_held(self) -> None:
        """Put back the elements that stay where they are, after weights have been written."""
        self._held.restore(self.state.x)

    def write_weights(self, coefficients: Coefficients) -> None:
        """Derive the model's weights from the state; ``coefficients`` are those of a step at the rate 0."""
        self.run(WRITE_WEIGHTS, self._resting(coefficients), None)

    def synchronize_loaded(self, coefficients: Coefficients) -> None:
        """Move x by a u that has been loaded, the same on all replicas; ``coefficients`` as for ``write_weights``."""
        if not self.is_fresh:
            self.run(SYNCHRONIZE, self._resting(coefficients), None)
        self.has_synchronized()

    def adopt_errors(self, mean: torch.Tensor, coefficients: Coefficients) -> None:
        """Owe ``mean`` (flat fp32), on all replicas together; without others to owe it to, move x by it alone."""
        if self._steps is not None and self.error_places():
            self._steps.exchange.set_errors(mean)
            return
        if not mean.any():
            return
        momentum = self.state.m.clone()
        coefficients = replace(coefficients, decay=np.ones_like(coefficients.decay))
        self.state.u.copy_(mean)
        self._backend.update(0, self._blocks.num_blocks, SYNCHRONIZE, self.state, coefficients, None)
        self.state.m.copy_(momentum)

    def drop_accumulated(self) -> None:
        """Forget the local steps since the last synchronization, of which others may have had other ones."""
        self.since_sync.clear()
        self.agrees = self.agrees and self.is_alone

    def forget(self, first: int, last: int) -> None:
        """Set m and u of the blocks [first, last) to 0."""
        size = self._blocks.block_size
        for buffer in (self.state.m, self.state.u):
            buffer[first * size : last * size].zero_()

    # What is saved.

    def buffers(self, scalars: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is this replica's own, by name, with all the optimizer's ``scalars``."""
        own = {"m": self.state.m, "u": self.state.u, "scalars": scalars}
        return own if self._steps is None else own | self._steps.exchange.state()

    def error_places(self) -> dict[str, ErrorPlace]:
        """For each error buffer the blocks that it belongs to."""
        return {} if self._steps is None else self._steps.exchange.error_places()

    def scalars(self) -> list[float]:
        """Numbers from which ``load_scalars`` continues."""
        steps = [0.0, 0.0, 0.0] if self._steps is None else self._steps.scalars()
        return [float(self.agrees), *steps, *self.since_sync.scalars()]

    def load_scalars(self, scalars: list[float]) -> None:
        self.agrees = bool(scalars[0])
        if self._steps is not None:
            self._steps.load_scalars(scalars[1:4])
        self.since_sync.load_scalars(scalars[4:])

    def _resting(self, coefficients: Coefficients) -> Coefficients:
        """Coefficients with which the model's weights follow from the state, between two steps."""
        return replace(coefficients, decay=by_group(self.since_sync.decay, 1.0))
