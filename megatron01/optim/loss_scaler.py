"""Dynamic loss scaling for fp16, as Megatron-LM does it: with hysteresis and a minimum."""

from __future__ import annotations

from megatron01.errors import UserError


class LossScaler:
    """Doubles the scale after ``window`` good steps in a row and halves it after ``hysteresis`` overflows.

    The overflows before a halving are only granted anew when the scale grows, so once they are used up every further
    overflow halves. Each replica has its own scaler. ``constant`` fixes the scale.

    Attributes:
        scale: what the loss is to be multiplied by; a power of two when dynamic and started as one.
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
        if constant is None and minimum > initial:
            raise UserError(f"min_loss_scale {minimum} is above initial_loss_scale {initial}")
        self.scale = initial if constant is None else constant
        self._dynamic = constant is None
        self._minimum = minimum
        self._window = window
        self._hysteresis = hysteresis
        self._good_steps = 0
        self._overflows_left = hysteresis

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
        if self._good_steps == self._window:
            self._good_steps = 0
            self._overflows_left = self._hysteresis
            self.scale *= 2

    def state(self) -> list[float]:
        """Three numbers from which ``load_state`` continues."""
        return [self.scale, float(self._good_steps), float(self._overflows_left)]

    def load_state(self, state: list[float]) -> None:
        """Continue from ``state``; a scale of 0 is that of a run without loss scaling, and changes nothing."""
        if state[0] == 0.0:
            return
        self.scale, self._good_steps, self._overflows_left = state[0], int(state[1]), int(state[2])
