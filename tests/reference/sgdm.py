"""SGD with momentum, and the soft-sign methods, in float64 for all replicas at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.reference.exchange import Arrays, OneBitMean, RandomSignMean, clipped, mean_of


@dataclass
class Settings:
    lr: Callable[[int], float]
    beta: float = 0.9
    weight_decay: tuple[float, ...] = ()  # one for each parameter
    lr_scale: tuple[float, ...] = ()
    block_size: int = 1024
    max_norm: float | None = None
    average: Callable[[Arrays], np.ndarray] = mean_of  # of gradients
    never_falls: bool = False
    seed: int | None = None  # of random bits; None: the exchange is in full precision


class Synchronous:
    """Replicas with the same weights x after every step."""

    def __init__(self, n: int, initial: Arrays, settings: Settings) -> None:
        self.n, self.settings = n, settings
        self.x = [p.astype(np.float64) for p in initial]
        self.t = 0
        self.kinds: list[str] = []
        self.margin = np.inf

    def weights(self, replica: int) -> Arrays:
        return [x.copy() for x in self.x]

    def move(self, steps: Arrays, kind: str) -> None:
        """x <- (1 - lr wd) x - lr step."""
        s = self.settings
        for p, step in enumerate(steps):
            lr = s.lr(self.t) * (s.lr_scale[p] if s.lr_scale else 1.0)
            decay = s.weight_decay[p] if s.weight_decay else 0.0
            self.x[p] = (1 - lr * decay) * self.x[p] - lr * step
        self.t += 1
        self.kinds.append(kind)


class SGDMReference(Synchronous):
    def __init__(self, n: int, initial: Arrays, settings: Settings) -> None:
        super().__init__(n, initial, settings)
        self.m = [np.zeros_like(x) for x in self.x]

    def step(self, gradients: list[Arrays]) -> None:
        s = self.settings
        means = clipped([s.average(list(own)) for own in zip(*gradients, strict=True)], s.max_norm)
        self.m = [s.beta * m + (1 - s.beta) * g for m, g in zip(self.m, means, strict=True)]
        self.move(self.m, "full")


class SoftSignReference(Synchronous):
    """SoftSignSGD, and with a seed BinSGDM: one replica alone has nothing to quantize."""

    def __init__(self, n: int, initial: Arrays, settings: Settings) -> None:
        super().__init__(n, initial, settings)
        self.m = [[np.zeros_like(x) for x in self.x] for _ in range(n)]
        self.b = [[np.zeros_like(x) for x in self.x] for _ in range(n)]
        self.exchange: OneBitMean | None = None
        if settings.seed is not None and n > 1:
            shapes = [x.shape for x in self.x]
            self.exchange = RandomSignMean(n, shapes, settings.block_size, settings.seed)

    def step(self, gradients: list[Arrays]) -> None:
        s = self.settings
        ratios: list[Arrays] = []
        for i, own in enumerate(gradients):
            ratios.append([])
            for p, g in enumerate(clipped(own, s.max_norm)):
                self.m[i][p] = s.beta * self.m[i][p] + (1 - s.beta) * g
                b = s.beta * self.b[i][p] + (1 - s.beta) * np.abs(g)
                self.b[i][p] = np.maximum(b, self.b[i][p]) if s.never_falls else b
                moved = self.b[i][p] > 0
                ratios[i].append(np.where(moved, self.m[i][p] / np.where(moved, self.b[i][p], 1.0), 0.0))
        steps = []
        for p, x in enumerate(self.x):
            values = [own[p] for own in ratios]
            if self.exchange is None:
                steps.append(mean_of(values))
            else:
                steps.append(self.exchange.mean(p, values, np.ones(x.shape, bool), self.t))
                self.margin = self.exchange.margin
        self.move(steps, "full" if s.seed is None else "one_bit")
