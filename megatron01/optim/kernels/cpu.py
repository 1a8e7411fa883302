"""The optimizers' arithmetic on CPUs: compiled loops over tiles of fp32, each handled while it is in the cache.

Tiles of bf16 are widened and rounded inside the loops, and packed results of exchanges are decoded there, block by
block. Slices of fp16 are converted to and from fp32, range by range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from megatron01.comm.kernels.cpu import BlockWorkers, as_array, decode, halving_sum, opened, read, write
from megatron01.comm.payload import PackedBlocks
from megatron01.optim.local_update import Numbers, Phase, Rule, Slices
from megatron01.utils.compilation import compiled

_TILE = 512
"""Elements handled at a time: a tile of six buffers fits a first-level cache. Longer and shorter ones were slower, but
in fp32 without a refresh of v, which takes fewer buffers, twice as many are faster (local steps by a tenth)."""

_UNIT = 1 << 10
"""A slice is split over threads in multiples of this many elements."""

_NOTHING = np.zeros(0, np.float32)
"""In place of a buffer whose values are packed."""


def _values(buffer, packed, start, end, scratch):
    """fp32[end - start]: values of ``packed`` blocks, or of ``buffer`` where that is None.

    ``start`` and ``end`` come tile by tile; a block is decoded into ``scratch`` when its first tile is asked for.
    """


def _scratch_size(packed, tile):
    """Elements of ``scratch`` for ``_values``."""


@overload(_values, inline="always")
def _compile_values(buffer, packed, start, end, scratch):
    def decoded(buffer, packed, start, end, scratch):
        first, rows, active, row_blocks, codes_at, first_block, bits, scaled, size = packed
        if start % size == 0:
            block = first + start // size
            last = block + max(1, (end - start) // size)
            decode(block, last, block, scratch, rows, active, row_blocks, codes_at, first_block, bits, scaled, size)
        return scratch[start % size : start % size + end - start]

    def plain(buffer, packed, start, end, scratch):
        part = buffer[start:end]
        tile = opened(part, scratch)
        read(part, tile)
        return tile

    return plain if isinstance(packed, types.NoneType) else decoded


@overload(_scratch_size, inline="always")
def _compile_scratch_size(packed, tile):
    if isinstance(packed, types.NoneType):
        return lambda packed, tile: tile
    return lambda packed, tile: max(tile, packed[8])


@compiled(nogil=True, error_model="numpy")
def _update(
    first,
    last,
    unit,
    x,
    v,
    m,
    u,
    g,
    packed_g,
    weights,
    step,
    packed_step,
    has_gradient,
    keeps_momentum,
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
    kept,
    weight,
    total,
    step_size,
    bound,
    decay,
    of_momentum,
):
    """The adaptive and the plain rule on the units [first, last); v, m, u, g and weights are fp32 or bits of bf16."""
    # scalars are fp32 from the start: a double among them would make the loops run in double
    one = np.float32(1.0)
    zero = np.float32(0.0)
    tile = _TILE if refresh or weights.itemsize == 2 else 2 * _TILE
    scratch = np.empty((4, tile), np.float32)
    gradients = np.empty(_scratch_size(packed_g, tile), np.float32)
    steps = np.empty(_scratch_size(packed_step, tile), np.float32)
    stop = min(last * unit, x.size)
    for start in range(first * unit, stop, tile):
        end = min(start + tile, stop)
        xt, vp, mp, up, wp = x[start:end], v[start:end], m[start:end], u[start:end], weights[start:end]
        size = xt.size
        vt, mt, wt = opened(vp, scratch[0]), opened(mp, scratch[1]), opened(wp, scratch[2])
        # where x absorbs u at once, u need not be written
        keep_accumulated = not has_step and not (fresh and synchronize)
        if has_step:
            ut = _values(step, packed_step, start, end, steps)
        elif keep_accumulated:
            ut = opened(up, scratch[3])
        else:
            ut = scratch[3, :size]
        if fresh and not has_step:
            for i in range(size):
                ut[i] = zero
        elif not has_step:
            read(up, ut)
        if refresh or (adaptive and write_weights):
            read(vp, vt)
        if has_gradient or of_momentum is not None:
            read(mp, mt)
        if has_gradient:
            gt = _values(g, packed_g, start, end, gradients)
            if refresh:
                for i in range(size):
                    scaled = gt[i] * multiplier
                    vt[i] = variance_decay * vt[i] + (one - variance_decay) * (scaled * scaled)
                write(vt, vp)
            if keeps_momentum:
                for i in range(size):
                    momentum = beta1 * mt[i] + (one - beta1) * (gt[i] * multiplier)
                    mt[i] = momentum
                    ut[i] = ut[i] + weight * momentum
                write(mt, mp)
            else:
                for i in range(size):
                    ut[i] = kept * ut[i] + weight * (beta1 * mt[i] + (one - beta1) * (gt[i] * multiplier))
        if keep_accumulated:
            write(ut, up)
        if write_weights:
            if of_momentum is not None:  # under the adaptive rule alone
                for i in range(size):
                    moved = (step_size * ut[i] + of_momentum * mt[i]) / (np.sqrt(vt[i] * inverse_correction) + eps)
                    moved = min(max(moved, -bound), bound)
                    wt[i] = decay * xt[i] - (moved if vt[i] > zero else zero)
            elif adaptive:
                for i in range(size):
                    moved = step_size * ut[i] / (np.sqrt(vt[i] * inverse_correction) + eps)
                    moved = min(max(moved, -bound), bound)
                    wt[i] = decay * xt[i] - (moved if vt[i] > zero else zero)
            else:
                for i in range(size):
                    wt[i] = decay * xt[i] - step_size * ut[i]
            if synchronize:
                divisor = total if total > zero else one
                for i in range(size):
                    xt[i] = wt[i]
                    mt[i] = ut[i] / divisor
                write(mt, mp)
            write(wt, wp)


@compiled(nogil=True, error_model="numpy")
def _update_soft_sign(
    first,
    last,
    unit,
    x,
    b,
    m,
    u,
    g,
    packed_g,
    weights,
    step,
    packed_step,
    has_gradient,
    synchronize,
    write_weights,
    never_falls,
    multiplier,
    beta,
    step_size,
    decay,
):
    """The soft-sign rule: m and b are only stored where x moves; before an exchange only their ratio, in u."""
    one = np.float32(1.0)
    zero = np.float32(0.0)
    scratch = np.empty(_TILE, np.float32)
    gradients = np.empty(_scratch_size(packed_g, _TILE), np.float32)
    steps = np.empty(_scratch_size(packed_step, _TILE), np.float32)
    stop = min(last * unit, x.size)
    for start in range(first * unit, stop, _TILE):
        end = min(start + _TILE, stop)
        wp = weights[start:end]
        wt = opened(wp, scratch)
        gt = _values(g, packed_g, start, end, gradients)
        st = _values(step, packed_step, start, end, steps)
        for k in range(wp.size):
            i = start + k
            momentum, magnitude = m[i], b[i]
            if has_gradient:
                scaled = gt[k] * multiplier
                momentum = beta * momentum + (one - beta) * scaled
                magnitude = beta * magnitude + (one - beta) * abs(scaled)
                if never_falls and b[i] > magnitude:
                    magnitude = b[i]
            if synchronize:
                m[i] = momentum
                b[i] = magnitude
                x[i] = decay * x[i] - step_size * st[k]
            else:
                ratio = momentum / magnitude
                u[i] = ratio if magnitude > zero else zero
        if write_weights:
            for k in range(wp.size):
                wt[k] = x[start + k]
            write(wt, wp)


@compiled(nogil=True, error_model="numpy")
def _sum_squares(first, last, values, packed, block_size, sums):
    part = block_size // 8
    squares = np.empty(part, np.float32)
    scratch = np.empty(block_size, np.float32)
    for block in range(first, last):
        tile = _values(values, packed, block * block_size, (block + 1) * block_size, scratch)
        a, b, c, d = tile[:part], tile[part : 2 * part], tile[2 * part : 3 * part], tile[3 * part : 4 * part]
        e, f, g, h = tile[4 * part : 5 * part], tile[5 * part : 6 * part], tile[6 * part : 7 * part], tile[7 * part :]
        # the first three halvings at once, which read the tile only once
        for i in range(part):
            even = (a[i] * a[i] + e[i] * e[i]) + (c[i] * c[i] + g[i] * g[i])
            odd = (b[i] * b[i] + f[i] * f[i]) + (d[i] * d[i] + h[i] * h[i])
            squares[i] = even + odd
        sums[block] = halving_sum(squares)


class CPUKernels:
    """``Kernels`` by compiled loops, on several threads."""

    runs_behind = False

    def __init__(self, num_threads: int) -> None:
        self._workers = BlockWorkers(num_threads)
        # 1 MiB of each buffer and thread: longer ranges leave the caches, shorter ones cost more calls than they gain
        self.range_elements = (1 << 18) * self._workers.num_threads

    def sum_squares(self, values: Tensor | PackedBlocks, block_size: int) -> Tensor:
        if isinstance(values, Tensor) and values.dtype == torch.float16:
            parts = values.split(max(self.range_elements, block_size))
            return torch.cat([self.sum_squares(part.float(), block_size) for part in parts])
        sums = torch.empty(values.numel() // block_size, dtype=torch.float32)
        self._workers.run(_sum_squares, 0, sums.numel(), *_arguments(values), block_size, sums.numpy())
        return sums

    def update(self, phase: Phase, numbers: Numbers, slices: Slices) -> None:
        n, (x, v, m, u, weights, gradients, step) = numbers, slices
        unit = _UNIT
        for one in (gradients, step):
            if isinstance(one, PackedBlocks):
                unit = max(unit, one.packed.format.block_size)  # powers of two
        if torch.float16 in (weights.dtype, None if gradients is None else gradients.dtype):
            length = max(self.range_elements, unit)
            for first in range(0, x.numel(), length):
                part = slices.part(slice(first, first + length))
                g = part.gradients.float() if isinstance(part.gradients, Tensor) else part.gradients
                wide = part._replace(weights=part.weights.float(), gradients=g)
                self.update(phase, numbers, wide)
                part.weights.copy_(wide.weights)
            return
        if n.rule is Rule.SOFT_SIGN:
            kernel: Any = _update_soft_sign
            step = u if step is None else step
            flags = [phase.gradient, phase.synchronize, phase.write_weights, n.never_falls]
            scalars = [n.multiplier, n.beta1, n.step_size, n.decay]
            optional: list[Any] = []
        else:
            kernel = _update
            refreshes = phase.gradient and n.variance_decay is not None
            flags = [phase.gradient or n.takes_momentum, n.keeps_momentum, phase.synchronize, phase.write_weights]
            flags += [phase.fresh, step is not None, refreshes, n.rule is Rule.ADAPTIVE]
            # where u takes up the momentum without a gradient, the placeholder counts as 0
            multiplier = n.multiplier if phase.gradient else 0.0
            scalars = [multiplier, n.beta1, n.eps, n.variance_decay or 0.0, n.inverse_correction]
            scalars += [n.kept, n.weight, n.total, n.step_size, n.bound, n.decay]
            # None is a type of its own: with the loop for a common momentum compiled as well, others are slower
            optional = [np.float32(n.of_momentum) if n.of_momentum else None]
        self._workers.run(
            kernel,
            0,
            -(-x.numel() // unit),
            unit,
            *map(as_array, (x, v, m, u)),
            *_arguments(x if gradients is None else gradients),  # a placeholder
            as_array(weights),
            *_arguments(x if step is None else step),
            *flags,
            *map(np.float32, scalars),
            *optional,
        )


def _arguments(values: Tensor | PackedBlocks) -> tuple[Any, Any]:
    """What compiled loops take for ``values``: float32 or uint16 (bf16) array, and packed blocks or None."""
    if isinstance(values, PackedBlocks):
        return _NOTHING, (values.first, *values.packed.arguments, values.packed.format.block_size)
    return as_array(values), None
