"""The numbers that 0/1 Adam carries from step to step beside its buffers; the same on all replicas."""

from __future__ import annotations

from typing import Literal

import numpy as np

from megatron01.errors import UserError


class SinceSynchronization:
    """What has come together since the last synchronization, by parameter group.

    Attributes:
        total: G, fp64[groups], sum of the learning rates.
        decay: P, fp64[groups], product of (1 - learning rate * weight decay).
        steps: number of steps.
    """

    def __init__(self, num_groups: int) -> None:
        self.total = np.zeros(num_groups)
        self.decay = np.ones(num_groups)
        self.steps = 0

    def with_step(self, rates: np.ndarray, weight_decay: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """G and P once a step with these learning rates and weight decays (fp64[groups]) is added."""
        return self.total + rates, self.decay * (1.0 - rates * weight_decay)

    def add(self, rates: np.ndarray, weight_decay: np.ndarray) -> None:
        """Add a step."""
        self.total, self.decay = self.with_step(rates, weight_decay)
        self.steps += 1

    def clear(self) -> None:
        """Begin anew."""
        self.total[:] = 0.0
        self.decay[:] = 1.0
        self.steps = 0

    def scalars(self) -> list[float]:
        """Numbers from which ``load_scalars`` continues."""
        return [float(self.steps), *self.total.tolist(), *self.decay.tolist()]

    def load_scalars(self, scalars: list[float]) -> None:
        num_groups = self.total.size
        self.steps = int(scalars[0])
        self.total[:] = scalars[1 : 1 + num_groups]
        self.decay[:] = scalars[1 + num_groups :]


class SecondMomentDecay:
    """How much the second moment decays when it is refreshed, and how its bias towards 0 is corrected.

    Args:
        beta2: decay per step.
        mode: "elapsed" decays by beta2^(steps since the last refresh), "per_refresh" by beta2.
        floor: elapsed: the smallest decay.
        bias_correction: whether to correct the bias.
    """

    def __init__(
        self, beta2: float, mode: Literal["elapsed", "per_refresh"], floor: float, *, bias_correction: bool
    ) -> None:
        if mode not in ("elapsed", "per_refresh"):
            raise UserError(f"variance_decay is {mode!r}; expected 'elapsed' or 'per_refresh'")
        self._beta2 = beta2
        self._elapsed = mode == "elapsed"
        self._floor = floor
        self._bias_correction = bias_correction
        self._last_refresh = -1
        self._product = 1.0  # of all decays so far
        self.settings = (beta2, mode, floor, bias_correction)

    def at(self, step: int) -> float:
        """Decay of a refresh at ``step``."""
        if not self._elapsed:
            return self._beta2
        return max(self._beta2 ** (step - self._last_refresh), self._floor)

    def inverse_correction(self, next_decay: float | None = None) -> float:
        """1 / (1 - product of the decays, ``next_decay`` included), or 1 without correction."""
        product = self._product if next_decay is None else self._product * next_decay
        return 1.0 / (1.0 - product) if self._bias_correction and product < 1.0 else 1.0

    def refreshed(self, step: int, decay: float) -> None:
        """Take note of a refresh."""
        self._product *= decay
        self._last_refresh = step

    def scalars(self) -> list[float]:
        """Two numbers from which ``load_scalars`` continues."""
        return [float(self._last_refresh), self._product]

    def load_scalars(self, scalars: list[float]) -> None:
        self._last_refresh, self._product = int(scalars[0]), scalars[1]
