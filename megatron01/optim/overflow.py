"""Gradients that are not finite: the loss scale that follows them, and when to give up."""

from __future__ import annotations

import math

import torch

from megatron01.comm import Status
from megatron01.optim.loss_scaler import LossScaler
from megatron01.optim.norm import LateNorm
from megatron01.optim.report import TrainingDiverged


class OverflowGuard:
    """The loss scale of a replica and the number of steps in a row that it has skipped.

    Args:
        loss_scaler: for fp16; None leaves losses alone.
        max_skipped_steps: skipped steps in a row after which training cannot go on.
    """

    NUM_SCALARS = 4

    def __init__(self, loss_scaler: LossScaler | None, max_skipped_steps: int) -> None:
        self.loss_scaler = loss_scaler
        self._max_skipped_steps = max_skipped_steps
        self._skipped_in_a_row = 0
        self._late: LateNorm | None = None

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by; 1 without a loss scaler."""
        if self.loss_scaler is None:
            return 1.0
        self._catch_up()
        return self.loss_scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale."""
        return loss if self.loss_scaler is None else loss * self.loss_scale

    @property
    def given_up(self) -> bool:
        """Whether too many steps in a row were skipped."""
        self._catch_up()
        return self._skipped_in_a_row >= self._max_skipped_steps

    def status(self, overflow: bool = False) -> Status:
        """What to tell the others at a step at which this replica's gradient is not finite, or is."""
        if self.given_up:
            return Status.GIVING_UP
        return Status.OVERFLOW if overflow else Status.OK

    def note(self, *, overflow_here: bool, skipped: bool) -> None:
        """Take note of a step: whether this replica's gradient overflowed, and whether the step was skipped."""
        self._catch_up()
        if self.loss_scaler is not None and (overflow_here or not skipped):
            self.loss_scaler.update(overflow_here)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0

    def note_late(self, norm: LateNorm) -> None:
        """Take note of a step that this replica's gradient alone decides, once somebody asks what came of it.

        By the next step's end at the latest; by then the device has long had that step's passes to work on.
        """
        self._catch_up()
        self._late = norm

    def _catch_up(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            overflow = not math.isfinite(float(late))
            self.note(overflow_here=overflow, skipped=overflow)

    def diverged(self, step: int) -> TrainingDiverged:
        """The error to stop with at ``step``."""
        return TrainingDiverged(
            f"gradients were not finite for {self._max_skipped_steps} steps in a row on at least one replica "
            f"(step {step}, loss scale {self.loss_scale:g}); lower the learning rate or look at the data",
            is_here=self.given_up,
        )

    def scalars(self) -> list[float]:
        """``NUM_SCALARS`` numbers from which ``load_scalars`` continues."""
        self._catch_up()
        scaler = [0.0, 0.0, 0.0] if self.loss_scaler is None else self.loss_scaler.state()
        return [float(self._skipped_in_a_row), *scaler]

    def load_scalars(self, scalars: list[float]) -> None:
        self._late = None
        self._skipped_in_a_row = int(scalars[0])
        if self.loss_scaler is not None:
            self.loss_scaler.load_state(scalars[1:4])
