"""The exchanges of one bit per element in float64: one array per parameter and replica, no packing, no collectives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch

from megatron01.comm.kernels.specification import uniform_draws
from megatron01.comm.payload import random_key

Arrays = list[np.ndarray]


def mean_of(values: Arrays) -> np.ndarray:
    """The mean of the replicas' arrays."""
    return sum(values[1:], start=values[0]) / len(values)


def bf16(values: np.ndarray) -> np.ndarray:
    """float64, rounded to bf16."""
    return torch.from_numpy(np.asarray(values)).to(torch.bfloat16).double().numpy()


def mean_in_bf16(values: Arrays) -> np.ndarray:
    """The mean of bf16 gradients, rounded as it is sent and stored."""
    return bf16(mean_of(values))


def norm_of(gradients: Arrays) -> float:
    """Their common norm."""
    return float(np.sqrt(sum(float((g * g).sum()) for g in gradients)))


def clipped(gradients: Arrays, max_norm: float | None, ratio: float = 1.0) -> Arrays:
    """Gradients whose common norm times ``ratio`` is at most ``max_norm``."""
    norm = ratio * norm_of(gradients)
    if max_norm is None or norm <= max_norm:
        return gradients
    return [g * (max_norm / (norm + 1e-6)) for g in gradients]


class Clipping:
    """Clips by the norm of the mean gradient, or by an estimate from the steps at which the mean was taken.

    Attributes:
        ratio: |mean of g_i| / root mean square of |g_i|, a fifth of each new one and four fifths of before.
    """

    def __init__(self, max_norm: float | None, by: str = "mean") -> None:
        self.max_norm, self.by = max_norm, by
        self.ratio: float | None = None

    def mean(self, gradients: list[Arrays], average: Callable[[Arrays], np.ndarray]) -> Arrays:
        """The mean of the replicas' gradients, clipped."""
        mean = [average(list(own)) for own in zip(*gradients, strict=True)]
        if len(gradients) > 1:
            size = np.sqrt(mean_of([np.array(norm_of(own) ** 2) for own in gradients]))
            ratio = min(1.0, norm_of(mean) / float(size)) if size > 0 else 1.0
            self.ratio = ratio if self.ratio is None else 0.8 * self.ratio + 0.2 * ratio
        return clipped(mean, self.max_norm)

    def own(self, gradients: Arrays) -> Arrays:
        """A replica's own gradients, where no mean is taken, clipped."""
        return clipped(gradients, self.max_norm, self.ratio if self.by == "mean" and self.ratio else 1.0)


class OneBitMean:
    """Algorithm 2 of 0/1 Adam: every replica, and then the server, sends a quantized sum of value and error.

    Every block has one server, whichever it is, so one server error per parameter is enough.

    Attributes:
        margin: the least distance of any element from a flipped bit, in units of the quantized element's size.
    """

    def __init__(self, n: int, shapes: list[tuple[int, ...]], block_size: int) -> None:
        self.block_size = block_size
        self.worker_error = [[np.zeros(shape) for shape in shapes] for _ in range(n)]
        self.server_error = [np.zeros(shape) for shape in shapes]
        self.margin = np.inf

    def mean(self, p: int, values: Arrays, active: np.ndarray, step: int = 0) -> np.ndarray:
        """The result of the exchange of parameter ``p`` on all replicas; elements that are not active are 0."""
        sent = []
        for i, value in enumerate(values):
            corrected = np.where(active, value + self.worker_error[i][p], 0.0)
            sent.append(self.quantized(p, corrected, active, ("worker", step, i)))
            self.worker_error[i][p] = corrected - sent[-1]
        corrected = np.where(active, mean_of(sent) + self.server_error[p], 0.0)
        result = self.quantized(p, corrected, active, ("server", step, 0))
        self.server_error[p] = corrected - result
        return result

    @abstractmethod
    def quantized(self, p: int, values: np.ndarray, active: np.ndarray, where: tuple[str, int, int]) -> np.ndarray:
        """One bit for each active element, 0 elsewhere; ``where`` is the stage, the step and the replica."""


class SignMean(OneBitMean):
    """Signs times the mean magnitude of the active elements of a block; the sign of 0 is +1."""

    def quantized(self, p: int, values: np.ndarray, active: np.ndarray, where: tuple[str, int, int]) -> np.ndarray:
        flat, kept, out = values.ravel(), active.ravel(), np.zeros(values.size)
        for start in range(0, flat.size, self.block_size):
            block = slice(start, start + self.block_size)
            if kept[block].any():
                sizes = np.abs(flat[block][kept[block]])
                scale = bf16(sizes.mean())
                if scale > 0:  # sums of scales in bf16 are 0 in fp32 as well, where they are
                    self.margin = min(self.margin, sizes[sizes > 0].min() / scale, 10 * rounding_margin(sizes.mean()))
                out[block] = np.where(kept[block], np.where(flat[block] >= 0, scale, -scale), 0.0)
        return out.reshape(values.shape)


def rounding_margin(value: float) -> float:
    """How far a number, in units of itself, is from where bf16 rounds it to another one.

    Exact ties, as of the mean of two bf16 numbers, are exact in fp32 too.
    """
    cell = 2.0 ** (np.floor(np.log2(value)) - 7)
    distance = abs(value / cell % 1.0 - 0.5) * cell / value
    return distance if distance > 0 else np.inf


class LevelMean(OneBitMean):
    """The sign, and which of 8 (128) intervals between (k / 8)^2 of the largest magnitude of the block, in bf16.

    Called with the replicas' values of one parameter after the other, as an average of gradients.
    """

    def __init__(self, n: int, shapes: list[tuple[int, ...]], block_size: int, bits: int) -> None:
        super().__init__(n, shapes, block_size)
        self.half = 2.0 ** (bits - 1)
        self._calls = 0

    def __call__(self, values: Arrays) -> np.ndarray:
        p = self._calls % len(self.server_error)
        self._calls += 1
        return self.mean(p, values, np.ones(values[0].shape, bool))

    def quantized(self, p: int, values: np.ndarray, active: np.ndarray, where: tuple[str, int, int]) -> np.ndarray:
        flat, out, half = np.where(active, values, 0.0).ravel(), np.zeros(values.size), self.half
        for start in range(0, flat.size, self.block_size):
            block = slice(start, start + self.block_size)
            sizes = np.abs(flat[block])
            largest = sizes.max()
            if largest < 2.0**-126:
                continue
            cell = 2.0 ** (np.floor(np.log2(largest)) - 7)
            scale = np.ceil(largest / cell) * cell
            place = np.sqrt(sizes / scale) * half
            level = np.minimum(np.floor(place), half - 1)
            out[block] = np.where(flat[block] >= 0, 1.0, -1.0) * scale * ((level + 0.5) / half) ** 2
            kept, rest = active.ravel()[block], largest / cell % 1.0
            inner = np.round(place)[kept]  # the nearest bound between two intervals
            apart = np.abs(place[kept] - inner)[(inner > 0) & (inner < half)]
            signs = sizes[kept & (sizes > 0)] / scale
            of_scale = min(rest, 1.0 - rest) * cell / largest
            self.margin = min(self.margin, *apart, *signs, 10 * of_scale if of_scale > 0 else np.inf)
        return np.where(active, out.reshape(values.shape), 0.0)


class RandomSignMean(OneBitMean):
    """+1 where the element is above a draw from [-1, 1), else -1.

    The draw is a hash of seed, step, stage, replica (the servers have none) and the element's place in the flat buffer,
    in which every parameter starts at a block of its own.
    """

    def __init__(self, n: int, shapes: list[tuple[int, ...]], block_size: int, seed: int) -> None:
        super().__init__(n, shapes, block_size)
        sizes = [int(np.prod(shape)) for shape in shapes]
        blocks = [-(-size // block_size) for size in sizes]
        self._places = [torch.arange(size) + sum(blocks[:p]) * block_size for p, size in enumerate(sizes)]
        self._seed = seed

    def quantized(self, p: int, values: np.ndarray, active: np.ndarray, where: tuple[str, int, int]) -> np.ndarray:
        stage, step, replica = where
        key = random_key(self._seed, step)
        key = random_key(key, 0, replica) if stage == "worker" else random_key(key, 1)
        draws = uniform_draws(key, self._places[p]).numpy().astype(np.float64).reshape(values.shape)
        if active.any():
            self.margin = min(self.margin, np.abs(values - draws)[active].min())
        return np.where(active, np.where(values > draws, 1.0, -1.0), 0.0)
