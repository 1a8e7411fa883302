"""Clipping, loss scale and overflow: a gradient's multiplier from its norm, and when training has diverged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from megatron01.comm import Status
from megatron01.errors import UserError
from megatron01.optim.report import TrainingDiverged
from megatron01.optim.settings import integer, require_positive

_SMALL = 1e-6


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Factor that clips a gradient of this norm to ``max_norm``; 1 if it is shorter or no bound is given."""
    if max_norm is None or norm <= max_norm:
        return 1.0
    return max_norm / (norm + _SMALL)


def clip_coefficients(norms: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """``clip_coefficient`` of fp64 norms (any shape) on their device, bit-identical."""
    if max_norm is None:
        return torch.ones_like(norms)
    return torch.where(norms <= max_norm, 1.0, max_norm / (norms + _SMALL))


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


def overflow_status(number: torch.Tensor) -> torch.Tensor:
    """fp32, shaped like ``number``, on its device: ``Status.OVERFLOW`` where it is not finite, else ``Status.OK``."""
    return (number - number).ne(0.0).float()  # inf - inf and NaN - NaN are NaN; True becomes 1.0, OVERFLOW


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
        multiplier = inverse_scale * clip_coefficients(norm, max_norm)
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
        self._window = integer("LossScaler: window", window, least=1)
        self._hysteresis = integer("LossScaler: hysteresis", hysteresis, least=1)
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
    """

    def __init__(
        self,
        loss_scaler: LossScaler | None,
        max_skipped_steps: int,
        on_norm: Callable[[float], object] = lambda norm: None,
    ) -> None:
        self.loss_scaler = loss_scaler
        self._max_skipped_steps = max_skipped_steps
        self._skipped_in_a_row = 0
        self._deferred: tuple[DeferredNorm, bool] | None = None
        self._on_norm = on_norm

    @property
    def loss_scale(self) -> float:
        """Factor on the loss; 1 without a loss scaler."""
        if self.loss_scaler is None:
            return 1.0
        self._catch_up()
        return self.loss_scaler.scale

    @property
    def given_up(self) -> bool:
        """Whether too many steps in a row were skipped."""
        self._catch_up()
        return self._skipped_in_a_row >= self._max_skipped_steps

    def status(self, own: Status | torch.Tensor = Status.OK) -> Status | torch.Tensor:
        """Status to send to the other replicas; ``own`` is that of this replica's gradient (fp32[] if a tensor)."""
        return Status.GIVING_UP if self.given_up else own

    def record(self, *, overflow_here: bool, skipped: bool) -> None:
        """Record a step: whether this replica's gradient overflowed, and whether the step was skipped."""
        self._catch_up()
        if self.loss_scaler is not None and (overflow_here or not skipped):
            self.loss_scaler.update(overflow_here)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0

    def record_deferred(self, norm: DeferredNorm, *, called_off: bool = False) -> None:
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
            is_here=self.given_up,
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
