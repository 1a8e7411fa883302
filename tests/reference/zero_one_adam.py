"""0/1 Adam in float64 for all replicas at once, written from the algorithm's description and nothing else.

Slow and plain on purpose: one array per parameter and replica, no flat buffers, no packing, no collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.reference.exchange import Arrays, Clipping, SignMean, mean_of


def interval_from_schedule(
    lr: Callable[[int], float], peak: float, warmup: int, step: int, longest: int, shortest: int = 1
) -> int:
    """1 in the warm-up, then ``shortest`` times the largest power of two not above peak / lr, at most ``longest``."""
    if step < warmup:
        return 1
    interval = shortest
    while interval * 2 <= longest and lr(step) * interval * 2 <= peak * shortest:
        interval *= 2
    return interval


def variance_steps(kappa: int, end: int) -> set[int]:
    """k_0 = 0, k_{j+1} = k_j + 2^floor(j / kappa), below ``end``."""
    steps, step, j = set(), 0, 0
    while step < end:
        steps.add(step)
        step += 2 ** (j // kappa)
        j += 1
    return steps


@dataclass
class Settings:
    lr: Callable[[int], float]
    peak_lr: float
    warmup: int
    total_steps: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: tuple[float, ...] = ()  # one for each parameter
    lr_scale: tuple[float, ...] = ()
    kappa: int = 16
    freeze_step: int | None = None  # of v; the first step with an interval above the shortest if None
    longest: int = 16
    shortest: int = 2
    bias_correction: bool = True
    momentum_correction: bool = True
    elapsed: bool = True
    floor: float = 0.9
    block_size: int = 1024
    compress: bool = True
    step_bound: float | None = 1.0
    common_momentum: bool = False  # m changes at synchronizations only, and u is a sum of gradients
    local_scale: float | None = None  # share of u that shows in a replica's weights before a synchronization
    max_norm: float | None = None
    clip_by: str = "mean"
    average: Callable[[Arrays], np.ndarray] = mean_of  # of gradients
    policy: Callable[[int], int] | None = None  # interval by step, in place of the schedule's


@dataclass
class Reference:
    """``n`` replicas; ``step(gradients)`` takes each replica's gradients and returns what kind of step it was."""

    n: int
    initial: Arrays
    settings: Settings
    kinds: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.settings
        zeros = [np.zeros_like(p, dtype=np.float64) for p in self.initial]
        self.x = [p.astype(np.float64) for p in self.initial]
        self.v = [z.copy() for z in zeros]
        self.m = [[z.copy() for z in zeros] for _ in range(self.n)]
        self.u = [[z.copy() for z in zeros] for _ in range(self.n)]
        self.clipping = Clipping(s.max_norm, s.clip_by)
        self.exchange = SignMean(self.n, [z.shape for z in zeros], s.block_size)
        self.t = 0
        self.previous = -1
        self.has_grown = False
        self.G = [0.0 for _ in zeros]
        self.P = [1.0 for _ in zeros]
        self.products = 1.0
        self.last_refresh = -1
        self.equal = True
        self.along = 0.0  # share of the momentum in the accumulated step, where u is a sum of gradients
        self.bounded = 0  # how often a weight would have moved beyond the bound
        self.views: list[Arrays] | None = None  # each replica's own weights before the last step's exchange
        self.refreshes = variance_steps(s.kappa, s.total_steps)

    @property
    def margin(self) -> float:
        return min(self.exchange.margin, getattr(self.settings.average, "margin", np.inf))

    def interval(self) -> int:
        s = self.settings
        if s.policy is not None:
            return s.policy(self.t)
        return interval_from_schedule(s.lr, s.peak_lr, s.warmup, self.t, s.longest, s.shortest)

    def step(self, gradients: list[Arrays]) -> str:
        s, t, n = self.settings, self.t, self.n
        lr, interval = s.lr(t), self.interval()
        self.has_grown = self.has_grown or interval > s.shortest
        frozen = self.has_grown if s.freeze_step is None else t >= s.freeze_step
        refresh = t in self.refreshes and not frozen
        synchronize = t - self.previous >= interval or t == s.total_steps - 1
        clipping = self.clipping
        gradients = [clipping.mean(gradients, s.average)] * n if refresh else [clipping.own(own) for own in gradients]
        if refresh:
            decay = s.beta2
            if s.elapsed:
                decay = max(s.beta2 ** (t - self.last_refresh), s.floor)
            self.v = [decay * v + (1 - decay) * g * g for v, g in zip(self.v, gradients[0], strict=True)]
            self.products *= decay
            self.last_refresh = t
        rates = [lr * scale for scale in s.lr_scale or (1.0,) * len(self.x)]
        sizes = [rate / (1 - s.beta1 ** (t + 1)) if s.momentum_correction else rate for rate in rates]
        decays = s.weight_decay or (0.0,) * len(self.x)
        self.G = [G + size for G, size in zip(self.G, sizes, strict=True)]
        is_common = s.common_momentum and self.G[0] > 0
        for i in range(n):
            for p, g in enumerate(gradients[i]):
                if not is_common:
                    self.m[i][p] = s.beta1 * self.m[i][p] + (1 - s.beta1) * g
                self.u[i][p] = self.u[i][p] + sizes[p] * (g if is_common else self.m[i][p])
        steps = t - self.previous
        share = 1.0 if n == 1 else max(0.0, 1.0 - math.log(0.5, s.beta1) / steps)
        self.along = sum(s.beta1**j for j in range(1, steps + 1)) / steps if is_common else 0.0
        decay = share * self.along + (1 - share) * s.beta1**steps
        for i in range(n if synchronize else 0):
            for p, (u, G, m) in enumerate(zip(self.u[i], self.G, self.m[i], strict=True)):
                if is_common:  # a step of Adam with the mean gradient
                    self.u[i][p] = decay * G * m + (1 - decay) * u
                else:  # G m for the momentum's last half-life, the sum u for the steps before
                    self.u[i][p] = share * u + (1 - share) * G * m
        self.P = [P * (1 - rate * wd) for P, rate, wd in zip(self.P, rates, decays, strict=True)]
        self.equal = n == 1 or (self.equal and refresh)
        self.views = None
        if synchronize:
            if self.G[0] > 0:
                self._synchronize()
            self.previous = t
        self.t += 1
        self.kinds.append("full" if refresh else "one_bit" if synchronize else "local")
        return self.kinds[-1]

    def _synchronize(self) -> None:
        self.views = None if self.equal else [self.weights(i, whole=True) for i in range(self.n)]
        for p in range(len(self.x)):
            values = [self.u[i][p] for i in range(self.n)]
            whole = (
                values[0]
                if self.equal
                else self.exchange.mean(p, values, self.v[p] > 0)
                if self.settings.compress
                else mean_of(values)
            )
            self.x[p] = self.P[p] * self.x[p] - self._scaled(p, whole)
            for i in range(self.n):
                self.m[i][p] = whole / self.G[p]
                self.u[i][p] = np.zeros_like(whole)
        self.G, self.P, self.equal = [0.0] * len(self.G), [1.0] * len(self.P), True

    def _scaled(self, p: int, step: np.ndarray) -> np.ndarray:
        v = self.v[p] / (1 - self.products) if self.settings.bias_correction and self.products < 1 else self.v[p]
        moved = step / (np.sqrt(v) + self.settings.eps)
        if self.settings.step_bound is not None:
            bound = self.settings.step_bound * self.G[p]
            self.bounded += int((np.abs(moved) > bound).sum())
            moved = np.clip(moved, -bound, bound)
        return np.where(self.v[p] > 0, moved, 0.0)

    def weights(self, replica: int, whole: bool = False) -> Arrays:
        """The weights a replica's model has now; ``whole``: at a synchronization that waits for its result."""
        share = self.settings.local_scale
        if share is None:
            share = min(0.5, 1.5 * (self.clipping.ratio or 1.0))
        if whole or self.n == 1:
            share = 1.0
        own = [share * u for u in self.u[replica]]
        if self.along and not whole:
            own = [
                self.along * G * m + (1 - self.along) * step
                for G, m, step in zip(self.G, self.m[replica], own, strict=True)
            ]
        return [P * x - self._scaled(p, own[p]) for p, (P, x) in enumerate(zip(self.P, self.x, strict=True))]

    def delayed_weights(self, replica: int) -> Arrays:
        """The same, before the result of the last step's exchange is applied."""
        return self.weights(replica) if self.views is None else self.views[replica]
