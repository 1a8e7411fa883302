"""1-bit Adam in float64 for all replicas at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.reference.exchange import Arrays, Clipping, SignMean, mean_of


@dataclass
class Settings:
    lr: Callable[[int], float]
    warmup: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: tuple[float, ...] = ()  # one for each parameter
    lr_scale: tuple[float, ...] = ()
    freeze_step: int | None = None
    freeze_ratio: float = 0.96
    bias_correction: bool = True
    momentum_correction: bool = True
    block_size: int = 1024
    compress: bool = True
    step_bound: float | None = 3.0
    max_norm: float | None = None
    clip_by: str = "mean"
    average: Callable[[Arrays], np.ndarray] = mean_of  # of gradients


class OneBitAdamReference:
    """Adam without the correction of the momentum's bias, then momenta exchanged over a frozen second moment."""

    def __init__(self, n: int, initial: Arrays, settings: Settings) -> None:
        self.n, self.settings = n, settings
        self.x = [p.astype(np.float64) for p in initial]
        self.m = [np.zeros_like(x) for x in self.x]
        self.v = [np.zeros_like(x) for x in self.x]
        self.clipping = Clipping(settings.max_norm, settings.clip_by)
        self.exchange = SignMean(n, [x.shape for x in self.x], settings.block_size)
        self.t = 0
        self.refreshes = 0
        self.frozen = False
        self.frozen_since: int | None = None
        self.norms: dict[int, float] = {}  # of the second moment, by the step after which they were taken
        self.ratio_margin = np.inf  # how far any ratio of norms was from the one at which v freezes
        self.kinds: list[str] = []
        self.views: list[Arrays] | None = None  # each replica's own weights before the last step's exchange

    @property
    def margin(self) -> float:
        of_gradients = getattr(self.settings.average, "margin", np.inf)
        return min(self.exchange.margin, of_gradients, 10 * self.ratio_margin)

    def weights(self, replica: int) -> Arrays:
        return [x.copy() for x in self.x]

    def delayed_weights(self, replica: int) -> Arrays:
        """The same, before the result of the last step's exchange is applied."""
        return self.weights(replica) if self.views is None else self.views[replica]

    def step(self, gradients: list[Arrays]) -> None:
        s, t = self.settings, self.t
        if t == s.freeze_step:
            self.frozen, self.frozen_since = True, t
        frozen = self.frozen
        self.views = None
        if frozen:
            momenta = [self._momenta(self.clipping.own(own)) for own in gradients]
            if self.n > 1:
                self.views = [self._moved(own) for own in momenta]
            self.m = [self._mean(p, [own[p] for own in momenta]) for p in range(len(self.x))]
        else:
            means = self.clipping.mean(gradients, s.average)
            self.v = [s.beta2 * v + (1 - s.beta2) * g * g for v, g in zip(self.v, means, strict=True)]
            self.refreshes += 1
            self.m = self._momenta(means)
        self.x = self._moved(self.m)
        if s.freeze_step is None and not frozen:
            self._look()
        self.t += 1
        self.kinds.append("one_bit" if frozen else "full")

    def _correction(self) -> float:
        return 1 - self.settings.beta2**self.refreshes if self.settings.bias_correction else 1.0

    def _moved(self, momenta: Arrays) -> Arrays:
        s, moved = self.settings, []
        for p, m in enumerate(momenta):
            lr = s.lr(self.t) * (s.lr_scale[p] if s.lr_scale else 1.0)
            decay = s.weight_decay[p] if s.weight_decay else 0.0
            step = np.where(self.v[p] > 0, m / (np.sqrt(self.v[p] / self._correction()) + s.eps), 0.0)
            if s.step_bound is not None:
                step = np.clip(step, -s.step_bound, s.step_bound)
            size = lr / (1 - s.beta1 ** (self.t + 1)) if s.momentum_correction else lr
            moved.append((1 - lr * decay) * self.x[p] - size * step)
        return moved

    def _momenta(self, gradients: Arrays) -> Arrays:
        beta = self.settings.beta1
        return [beta * m + (1 - beta) * g for m, g in zip(self.m, gradients, strict=True)]

    def _mean(self, p: int, values: Arrays) -> np.ndarray:
        if self.n == 1:
            return values[0]
        if not self.settings.compress:
            return mean_of(values)
        return self.exchange.mean(p, values, self.v[p] > 0)

    def _look(self) -> None:
        """Freeze v once its norm hardly grew in its time constant, 1 / (1 - beta2) steps; checked ten times in that."""
        s, memory = self.settings, round(1 / (1 - self.settings.beta2))
        every = max(1, round(memory / 10))
        if (self.t + 1) % every:
            return
        self.norms[self.t] = sum(np.abs(v).sum() for v in self.v) / self._correction()
        before = self.norms.get(self.t - 10 * every)
        if before is None or self.t < s.warmup:
            return
        ratio = before / self.norms[self.t]
        self.ratio_margin = min(self.ratio_margin, abs(ratio - s.freeze_ratio))
        if ratio >= s.freeze_ratio:
            self.frozen, self.frozen_since = True, self.t + 1
