"""0/1 Adam in float64 for all replicas at once, written from the algorithm's description and nothing else.

Slow and plain on purpose: one array per parameter and replica, no flat buffers, no packing, no collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Arrays = list[np.ndarray]


def interval_from_schedule(lr: Callable[[int], float], peak: float, warmup: int, step: int, longest: int) -> int:
    """1 in the warm-up, then the largest power of two not above peak / lr, at most ``longest``."""
    if step < warmup:
        return 1
    interval = 1
    while interval * 2 <= longest and lr(step) * interval * 2 <= peak:
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
    kappa: int = 16
    longest: int = 16
    bias_correction: bool = True
    elapsed: bool = True
    floor: float = 0.9
    block_size: int = 1024
    compress: bool = True
    threshold: float = 1e-3
    max_norm: float | None = None
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
        self.worker_error = [[z.copy() for z in zeros] for _ in range(self.n)]
        self.server_error = [z.copy() for z in zeros]  # every block has one server, whichever it is
        self.t = 0
        self.previous = -1
        self.local_seen = False
        self.G = 0.0
        self.P = [1.0 for _ in zeros]
        self.products = 1.0
        self.last_refresh = -1
        self.equal = True
        self.refreshes = variance_steps(s.kappa, s.total_steps)
        self.margin = np.inf  # least |value| / scale of all elements compressed: how far any sign was from flipping

    def interval(self) -> int:
        s = self.settings
        if s.policy is not None:
            return s.policy(self.t)
        return interval_from_schedule(s.lr, s.peak_lr, s.warmup, self.t, s.longest)

    def step(self, gradients: list[Arrays]) -> str:
        s, t, n = self.settings, self.t, self.n
        lr, interval = s.lr(t), self.interval()
        self.local_seen = self.local_seen or interval > 1
        refresh = t in self.refreshes and not self.local_seen
        synchronize = t - self.previous >= interval or t == s.total_steps - 1
        gradients = [[np.asarray(g, dtype=np.float64) for g in own] for own in gradients]
        if refresh:
            mean = [sum(own[p] for own in gradients) / n for p in range(len(self.x))]
            gradients = [[g.copy() for g in mean] for _ in range(n)]
        for own in gradients:
            norm = np.sqrt(sum(float((g * g).sum()) for g in own))
            if s.max_norm is not None and norm > s.max_norm:
                for p in range(len(own)):
                    own[p] = own[p] * (s.max_norm / (norm + 1e-6))
        if refresh:
            decay = s.beta2
            if s.elapsed:
                decay = max(s.beta2 ** (t - self.last_refresh), s.floor)
            self.v = [decay * v + (1 - decay) * g * g for v, g in zip(self.v, gradients[0], strict=True)]
            self.products *= decay
            self.last_refresh = t
        for i in range(n):
            for p, g in enumerate(gradients[i]):
                self.m[i][p] = s.beta1 * self.m[i][p] + (1 - s.beta1) * g
                self.u[i][p] = self.u[i][p] + lr * self.m[i][p]
        self.G += lr
        self.P = [P * (1 - lr * wd) for P, wd in zip(self.P, s.weight_decay or (0.0,) * len(self.P), strict=True)]
        self.equal = n == 1 or (self.equal and refresh)
        if synchronize:
            if self.G > 0:
                self._synchronize()
            self.previous = t
        self.t += 1
        self.kinds.append("full" if refresh else "one_bit" if synchronize else "local")
        return self.kinds[-1]

    def _synchronize(self) -> None:
        for p in range(len(self.x)):
            values = [self.u[i][p] for i in range(self.n)]
            whole = (
                values[0]
                if self.equal
                else self._one_bit(p, values)
                if self.settings.compress
                else sum(values) / self.n
            )
            self.x[p] = self.P[p] * self.x[p] - self._scaled(p, whole)
            for i in range(self.n):
                self.m[i][p] = whole / self.G
                self.u[i][p] = np.zeros_like(whole)
        self.G, self.P, self.equal = 0.0, [1.0] * len(self.P), True

    def _scaled(self, p: int, step: np.ndarray) -> np.ndarray:
        v = self.v[p] / (1 - self.products) if self.settings.bias_correction and self.products < 1 else self.v[p]
        return np.where(self.v[p] > 0, step / (np.sqrt(v) + self.settings.eps), 0.0)

    def _live(self, p: int) -> np.ndarray:
        """Elements whose sqrt(v) is above the threshold times its mean over their block."""
        roots = np.sqrt(self.v[p]).ravel()
        live = np.zeros(roots.shape, dtype=bool)
        for start in range(0, roots.size, self.settings.block_size):
            block = slice(start, start + self.settings.block_size)
            live[block] = roots[block] > self.settings.threshold * roots[block].mean()
        return live

    def _compress(self, values: np.ndarray, live: np.ndarray) -> np.ndarray:
        flat, out = values.ravel(), np.zeros(values.size)
        for start in range(0, flat.size, self.settings.block_size):
            block = slice(start, start + self.settings.block_size)
            if live[block].any():
                scale = np.abs(flat[block][live[block]]).mean()
                self.margin = min(self.margin, (np.abs(flat[block][live[block]]) / scale).min())
                out[block] = np.where(live[block], np.where(flat[block] >= 0, scale, -scale), 0.0)
        return out.reshape(values.shape)

    def _one_bit(self, p: int, values: Arrays) -> np.ndarray:
        live = self._live(p)
        keep = live.reshape(values[0].shape)
        sent = []
        for i, value in enumerate(values):
            corrected = np.where(keep, value + self.worker_error[i][p], 0.0)
            sent.append(self._compress(corrected, live))
            self.worker_error[i][p] = corrected - sent[-1]
        corrected = np.where(keep, sum(sent) / self.n + self.server_error[p], 0.0)
        result = self._compress(corrected, live)
        self.server_error[p] = corrected - result
        return result

    def weights(self, replica: int) -> Arrays:
        """The weights a replica's model has now."""
        return [
            P * x - self._scaled(p, self.u[replica][p]) for p, (P, x) in enumerate(zip(self.P, self.x, strict=True))
        ]
