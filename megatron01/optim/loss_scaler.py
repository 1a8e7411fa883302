"""Dynamic loss scaling for fp16, as Megatron-LM does it: with hysteresis and a minimum."""

from __future__ import annotations

from megatron01.errors import UserError
from megatron01.optim.checks import integer, require_positive


class LossScaler:
    """Doubles the scale after ``window`` good steps in a row and halves it after ``hysteresis`` overflows.

    The overflows before a halving are only granted anew when the scale grows, so once they are used up every further
    overflow halves. Each replica has its own scaler. ``constant`` fixes the scale.

    Attributes:
        scale: what the loss is to be multiplied by; a power of two when dynamic and started as one.

    Raises:
        UserError: if an argument is out of its range, or the first scale below the smallest.
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
        self.scale = initial if constant is None else constant
        self._dynamic = constant is None
        self._minimum = minimum
        self._window = integer("LossScaler: window", window, least=1)
        self._hysteresis = integer("LossScaler: hysteresis", hysteresis, least=1)
        self._good_steps = 0
        self._overflows_left = self._hysteresis

    def update(self, overflow: bool) -> None:
        """Take note of one step."""
        if not self._dynamic:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2, self._minimum)
            return
        self._good_steps += 1
        if self._good_steps >= self._window:  # above it where a loaded state comes from a run with a longer window
            self._good_steps = 0
            self._overflows_left = self._hysteresis
            self.scale *= 2

    def state(self) -> list[float]:
        """Three numbers from which ``load_state`` continues."""
        return [self.scale, float(self._good_steps), float(self._overflows_left)]

    def load_state(self, state: list[float]) -> None:
        """Continue from ``state``, within this scaler's own settings, which may be others than those it comes from.

        A constant scale stays what it is. A saved scale of 0 is that of a run without loss scaling: nothing changes.
        """
        if state[0] == 0.0 or not self._dynamic:
            return
        self.scale = max(state[0], self._minimum)
        self._good_steps = int(state[1])
        self._overflows_left = min(int(state[2]), self._hysteresis)
