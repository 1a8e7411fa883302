"""Loss scaling of fp16, and steps that are skipped because a gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import SupportsFloat

import torch

from megatron01.comm import Status
from megatron01.errors import UserError, require_integer, require_positive
from megatron01.optim.report import TrainingDiverged


def overflow_status(number: torch.Tensor) -> torch.Tensor:
    """fp32, shaped like ``number``, on its device: ``Status.OVERFLOW`` where it is not finite, else ``Status.OK``."""
    return (number - number).ne(0.0).float()  # inf - inf and NaN - NaN are NaN; True becomes 1.0, OVERFLOW


class LossScaler:
    """Doubles the scale after ``window`` good steps in a row and halves it after ``hysteresis`` overflows.

    The hysteresis is only restored when the scale grows: once it is used up, every further overflow halves the scale.
    Each replica has its own scaler. ``constant`` fixes the scale.

    Attributes:
        scale: factor on the loss; a power of two when dynamic and started as one.
        was_read: True if a dynamic scale has been read; always True for a constant one.

    Raises:
        UserError: if an argument is out of its range, or ``initial`` below ``minimum``.
    """

    def __init__(
        self,
        *,
        initial: float = 2.0**16,
        minimum: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
        constant: float | None = None,
    ) -> None:
        require_positive("LossScaler: initial", initial)
        require_positive("LossScaler: minimum", minimum)
        require_positive("LossScaler: constant", constant, none_is="a dynamic scale")
        if constant is None and minimum > initial:
            raise UserError(f"min_loss_scale {minimum} is above initial_loss_scale {initial}")
        self._scale = initial if constant is None else constant
        self._is_dynamic = constant is None
        self.was_read = not self._is_dynamic
        self._minimum = minimum
        self._window = require_integer("LossScaler: window", window, least=1)
        self._hysteresis = require_integer("LossScaler: hysteresis", hysteresis, least=1)
        self._good_steps = 0
        self._overflows_left = self._hysteresis

    @property
    def scale(self) -> float:
        self.was_read = True
        return self._scale

    def update(self, overflow: bool) -> None:
        """Update the scale after one step."""
        if not self._is_dynamic:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self._scale = max(self._scale / 2, self._minimum)
            return
        self._good_steps += 1
        if self._good_steps >= self._window:  # above it where a loaded state comes from a run with a longer window
            self._good_steps = 0
            self._overflows_left = self._hysteresis
            self._scale *= 2

    def state(self) -> list[float]:
        """State for ``load_state``: scale, good steps, and overflows left."""
        return [self._scale, float(self._good_steps), float(self._overflows_left)]

    def load_state(self, state: list[float]) -> None:
        """Load ``state``, limited by this scaler's settings, which may differ from those it was saved with.

        No-op for a constant scale, and for a saved scale of 0, which is that of a run without loss scaling.
        """
        if state[0] == 0.0 or not self._is_dynamic:
            return
        self._scale = max(state[0], self._minimum)
        self._good_steps = int(state[1])
        self._overflows_left = min(int(state[2]), self._hysteresis)


class OverflowGuard:
    """The loss scale of a replica and its number of consecutive skipped steps.

    Args:
        loss_scaler: for fp16; None for no loss scaling.
        max_skipped_steps: consecutive skipped steps after which training has diverged.
        on_norm: called with each deferred norm, once it is known.

    Raises:
        UserError: if an argument is out of its range.
    """

    def __init__(
        self,
        loss_scaler: LossScaler | None,
        max_skipped_steps: int,
        on_norm: Callable[[float], object] = lambda norm: None,
    ) -> None:
        if not isinstance(loss_scaler, LossScaler | None):
            raise UserError(
                f"loss_scaler is of type {type(loss_scaler).__name__}; expected megatron01.LossScaler, or None"
                " (and scaler.step(optimizer) with torch's GradScaler)"
            )
        self.loss_scaler = loss_scaler
        self._max_skipped_steps = require_integer("max_skipped_steps", max_skipped_steps, least=1)
        self._skipped_in_a_row = 0
        self._deferred: tuple[SupportsFloat, bool] | None = None
        self._on_norm = on_norm

    @property
    def loss_scale(self) -> float:
        """Factor on the loss; 1 without a loss scaler."""
        if self.loss_scaler is None:
            return 1.0
        self._catch_up()
        return self.loss_scaler.scale

    def status(self, own: Status | torch.Tensor = Status.OK) -> Status | torch.Tensor:
        """Status to send to the other replicas: GIVING_UP if too many steps in a row were skipped, else ``own``.

        ``own`` is that of this replica's gradient (fp32[] if a tensor).
        """
        self._catch_up()
        return Status.GIVING_UP if self._skipped_in_a_row >= self._max_skipped_steps else own

    def record(self, *, overflow_here: bool, skipped: bool) -> None:
        """Record a step: whether this replica's gradient overflowed, and whether the step was skipped."""
        self._catch_up()
        if self.loss_scaler is not None and (overflow_here or not skipped):
            self.loss_scaler.update(overflow_here)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0

    def record_deferred(self, norm: SupportsFloat, *, called_off: bool = False) -> None:
        """Record a step with a deferred norm; it is read when the guard's state is next needed.

        That is at the next step's end at the latest. By then that step's passes are queued, so the host sync does not
        leave the device idle. ``called_off``: the step was called off, whatever this replica's gradient.
        """
        self._catch_up()
        self._deferred = norm, called_off

    def _catch_up(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            norm, called_off = float(deferred[0]), deferred[1]
            self._on_norm(norm)
            overflow = not math.isfinite(norm)
            self.record(overflow_here=overflow, skipped=overflow or called_off)

    def diverged(self, step: int) -> TrainingDiverged:
        """The error to raise at ``step``."""
        return TrainingDiverged(
            f"gradients were not finite for {self._max_skipped_steps} steps in a row on at least one replica "
            f"(step {step}, loss scale {self.loss_scale:g}); lower the learning rate or look at the data",
            is_here=self.status() is Status.GIVING_UP,
            skipped_steps=self._skipped_in_a_row,
        )

    def scalars(self) -> list[float]:
        """Numbers from which ``load_scalars`` continues."""
        self._catch_up()
        scaler = [0.0, 0.0, 0.0] if self.loss_scaler is None else self.loss_scaler.state()
        return [float(self._skipped_in_a_row), *scaler]

    def load_scalars(self, scalars: Iterator[float]) -> None:
        self._deferred = None
        self._skipped_in_a_row = int(next(scalars))
        state = list(islice(scalars, 3))
        if self.loss_scaler is not None:
            self.loss_scaler.load_state(state)
