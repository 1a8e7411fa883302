"""The optimizers' arithmetic on CPUs: compiled loops over fp32 arrays, each tile handled while it is in the cache.

Slices of 16 bit go through fp32 scratch, range by range. No compiled function of another file is called: numba would
not notice when that changes.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron01.comm.kernels.cpu import BlockWorkers
from megatron01.optim.local_update import Numbers, Phase, Rule
from megatron01.utils.compilation import compiled

_TILE = 512
"""Elements handled at a time: a tile of six buffers fits a first-level cache. Longer and shorter ones were slower."""

_RANGE = 1 << 16
"""Elements that are converted from and to 16 bit at a time."""

_UNIT = 1 << 10
"""Threads share a slice in multiples of this."""

_WORD = 32


@compiled(nogil=True, error_model="numpy")
def _update(
    x,
    v,
    m,
    u,
    g,
    weights,
    step,
    has_gradient,
    keep_momentum,
    synchronize,
    write_weights,
    fresh,
    has_step,
    refresh,
    adaptive,
    multiplier,
    beta1,
    eps,
    variance_decay,
    inverse_correction,
    weight,
    total,
    step_size,
    bound,
    decay,
):
    """The adaptive and the plain rule."""
    # scalars are fp32 from the start: a double among them would make the loops run in double
    one = np.float32(1.0)
    zero = np.float32(0.0)
    scratch = np.empty(_TILE, np.float32)
    for start in range(0, x.size, _TILE):
        end = start + _TILE
        xt, vt, mt, gt, wt = x[start:end], v[start:end], m[start:end], g[start:end], weights[start:end]
        size = xt.size
        # where x takes u over, it need not be written
        ut = step[start:end] if has_step else scratch[:size] if fresh and synchronize else u[start:end]
        if fresh and not has_step:
            for i in range(size):
                ut[i] = zero
        if has_gradient:
            if refresh:
                for i in range(size):
                    scaled = gt[i] * multiplier
                    vt[i] = variance_decay * vt[i] + (one - variance_decay) * (scaled * scaled)
            if keep_momentum:
                for i in range(size):
                    mt[i] = beta1 * mt[i] + (one - beta1) * (gt[i] * multiplier)
                for i in range(size):
                    ut[i] = ut[i] + weight * mt[i]
            else:
                for i in range(size):
                    ut[i] = ut[i] + weight * (beta1 * mt[i] + (one - beta1) * (gt[i] * multiplier))
        if write_weights:
            if adaptive:
                for i in range(size):
                    moved = step_size * ut[i] / (np.sqrt(vt[i] * inverse_correction) + eps)
                    moved = min(max(moved, -bound), bound)
                    wt[i] = decay * xt[i] - (moved if vt[i] > zero else zero)
            else:
                for i in range(size):
                    wt[i] = decay * xt[i] - step_size * ut[i]
            if synchronize:
                for i in range(size):
                    xt[i] = wt[i]
                for i in range(size):
                    mt[i] = ut[i] / total


@compiled(nogil=True, error_model="numpy")
def _update_soft_sign(
    x,
    b,
    m,
    u,
    g,
    weights,
    step,
    has_gradient,
    synchronize,
    write_weights,
    never_falls,
    multiplier,
    beta,
    step_size,
    decay,
):
    """m and b are only kept where x moves; before an exchange only their ratio is written, to u."""
    one = np.float32(1.0)
    zero = np.float32(0.0)
    for i in range(x.size):
        momentum, magnitude = m[i], b[i]
        if has_gradient:
            scaled = g[i] * multiplier
            momentum = beta * momentum + (one - beta) * scaled
            magnitude = beta * magnitude + (one - beta) * abs(scaled)
            if never_falls and b[i] > magnitude:
                magnitude = b[i]
        if synchronize:
            m[i] = momentum
            b[i] = magnitude
            x[i] = decay * x[i] - step_size * step[i]
        else:
            ratio = momentum / magnitude
            u[i] = ratio if magnitude > zero else zero
    if write_weights:
        for i in range(x.size):
            weights[i] = x[i]


@compiled(nogil=True, error_model="numpy")
def _halving_sum(values):
    """Sum of a power of two of values, which it overwrites: the upper half onto the lower, again and again."""
    half = values.size // 2
    while half > 0:
        for i in range(half):
            values[i] += values[half + i]
        half //= 2
    return values[0]


@compiled(nogil=True, error_model="numpy")
def _sum_squares(values, block_size, sums):
    squares = np.empty(block_size, np.float32)
    for block in range(sums.size):
        part = values[block * block_size : (block + 1) * block_size]
        for i in range(block_size):
            squares[i] = part[i] * part[i]
        sums[block] = _halving_sum(squares)


@compiled(nogil=True, error_model="numpy")
def _mark_active(variance, block_size, lengths, threshold, candidates, active):
    roots = np.empty(block_size, np.float32)
    sums = np.empty(block_size, np.float32)
    words = block_size // _WORD
    for block in range(lengths.size):
        part = variance[block * block_size : (block + 1) * block_size]
        for i in range(block_size):
            roots[i] = np.sqrt(part[i])
            sums[i] = roots[i]
        cut = threshold * (_halving_sum(sums) / np.float32(lengths[block]))
        for w in range(words):
            word = np.uint32(0)
            for j in range(_WORD):
                word |= np.uint32(roots[_WORD * w + j] > cut) << np.uint32(j)
            active[block * words + w] = word & candidates[block * words + w]


class CPUKernels:
    """``Kernels`` by compiled loops, on several threads."""

    runs_behind = False

    def __init__(self, num_threads: int) -> None:
        self._workers = BlockWorkers(num_threads)
        self._scratch = threading.local()
        # 256 KiB of each buffer and thread: what a range touches stays in a core's second-level cache
        self.range_elements = (1 << 16) * self._workers.num_threads

    def sum_squares(self, values: Tensor, block_size: int) -> Tensor:
        sums = torch.empty(values.numel() // block_size, dtype=torch.float32)
        at_once = max(1, _RANGE // block_size)

        def run(first: int, last: int) -> None:
            for low in range(first, last, last - first if values.dtype == torch.float32 else at_once):
                high = last if values.dtype == torch.float32 else min(low + at_once, last)
                part = self._wide(0, values[low * block_size : high * block_size])
                _sum_squares(part.numpy(), block_size, sums[low:high].numpy())

        self._workers.run(run, 0, sums.numel())
        return sums

    def mark_active(
        self, variance: Tensor, threshold: float, candidates: Tensor, active: Tensor, lengths: Tensor
    ) -> None:
        size = variance.numel() // lengths.numel()
        at_once, words = max(1, _RANGE // size), size // _WORD

        def run(first: int, last: int) -> None:
            for low in range(first, last, at_once):
                high = min(low + at_once, last)
                place = slice(low * words, high * words)
                _mark_active(
                    self._wide(0, variance[low * size : high * size]).numpy(),
                    size,
                    lengths[low:high].numpy(),
                    np.float32(threshold),
                    candidates[place].numpy().view(np.uint32),
                    active[place].numpy().view(np.uint32),
                )

        self._workers.run(run, 0, lengths.numel())

    def update(
        self,
        phase: Phase,
        numbers: Numbers,
        *,
        x: Tensor,
        v: Tensor,
        m: Tensor,
        u: Tensor,
        weights: Tensor,
        gradients: Tensor | None,
        step: Tensor | None = None,
    ) -> None:
        buffers = (x, v, m, u, weights, gradients, step)
        is_wide = all(buffer is None or buffer.dtype == torch.float32 for buffer in buffers)
        n = numbers
        scalars = [n.multiplier, n.beta1, n.step_size, n.decay]
        if n.rule is not Rule.SOFT_SIGN:
            scalars = [n.multiplier, n.beta1, n.eps, n.variance_decay or 0.0, n.inverse_correction]
            scalars += [n.weight, n.total, n.step_size, n.bound, n.decay]
        narrowed = [np.float32(number) for number in scalars]

        def run(first: int, last: int) -> None:
            first, last = first * _UNIT, min(last * _UNIT, x.numel())
            at_once = last - first if is_wide else _RANGE
            for low in range(first, last, at_once):
                part = slice(low, min(low + at_once, last))
                self._update(phase, n, narrowed, *(None if buffer is None else buffer[part] for buffer in buffers))

        self._workers.run(run, 0, -(-x.numel() // _UNIT))

    def _update(
        self,
        phase: Phase,
        n: Numbers,
        scalars: list[np.float32],
        x: Any,
        v: Any,
        m: Any,
        u: Any,
        weights: Any,
        gradients: Any,
        step: Any,
    ) -> None:
        """A range: fp32 throughout, or short enough for scratch."""
        is_adaptive, refresh = n.rule is Rule.ADAPTIVE, phase.gradient and n.variance_decay is not None
        g = x if gradients is None else self._wide(0, gradients)
        w = self._wide(1, weights, read=False)
        if n.rule is Rule.SOFT_SIGN:
            step = u if step is None else step
            _update_soft_sign(
                *(buffer.numpy() for buffer in (x, v, m, u, g, w, step)),
                phase.gradient,
                phase.synchronize,
                phase.write_weights,
                n.never_falls,
                *scalars,
            )
        else:
            is_wide = m.dtype == torch.float32
            vw = v if is_wide else self._wide(2, v, read=refresh or (is_adaptive and phase.write_weights))
            mw = self._wide(3, m, read=phase.gradient)
            uw = self._wide(4, u, read=not phase.fresh and step is None)

            def run(gradient: bool, synchronize: bool, write: bool, fresh: bool, step: Tensor | None) -> None:
                _update(
                    *(buffer.numpy() for buffer in (x, vw, mw, uw, g, w, uw if step is None else step)),
                    gradient,
                    phase.keep_momentum,
                    synchronize,
                    write,
                    fresh,
                    step is not None,
                    refresh,
                    is_adaptive,
                    *scalars,
                )

            if is_wide:
                run(phase.gradient, phase.synchronize, phase.write_weights, phase.fresh, step)
            else:
                if step is None:
                    run(phase.gradient, False, False, phase.fresh, None)
                    if refresh:
                        vw.copy_(v.copy_(vw))
                    if phase.gradient and phase.keep_momentum:
                        m.copy_(mw)
                    # the model's weights follow from u as it has been written; where x takes it over, it is not
                    if not (phase.fresh and phase.synchronize):
                        uw.copy_(u.copy_(uw))
                    step = uw
                if phase.write_weights:
                    run(False, phase.synchronize, True, False, step)
                if phase.synchronize:
                    m.copy_(mw)
        if phase.write_weights and w is not weights:
            weights.copy_(w)

    def _wide(self, place: int, values: Tensor, *, read: bool = True) -> Tensor:
        """``values`` themselves if fp32, else this thread's scratch, with their content if they are to be ``read``."""
        if values.dtype == torch.float32:
            return values
        scratch = getattr(self._scratch, "buffers", None)
        if scratch is None or scratch.size(1) < values.numel():
            scratch = self._scratch.buffers = torch.empty(5, max(_RANGE, values.numel()))
        part = scratch[place, : values.numel()]
        return part.copy_(values) if read else part
