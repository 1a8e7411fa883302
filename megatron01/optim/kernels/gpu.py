"""The optimizers' arithmetic on GPUs: Triton kernels over slices of flat buffers, one launch for a slice.

Kernels are compiled for each phase, without what it does not need. They allocate no temporaries of the buffers' size,
and need no host sync; the packed result of an exchange is decoded in registers. Results are those of ``specification``
to a rounding unit: that is tested in Triton's interpreter on CPUs, and was on an H200 (``benchmarks/results/gpu.md``),
except for a common momentum, which no GPU has run yet.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron01.comm.kernels.gpu import (
    INTERPRETED,
    block_numbers,
    check_device,
    decode_blocks,
    halving_sums,
    launch,
)
from megatron01.comm.payload import PackedBlocks
from megatron01.optim.local_update import Numbers, Phase, Rule, Slices

_PROGRAM = 1 << 14 if INTERPRETED else 1024
"""Elements per program."""

_WARP = 256
"""Elements per warp: 8 for each thread, in several buffers, and many warps."""

_WORD = tl.constexpr(32)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _load(pointer, at, inside):
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, at, inside, values):
    """Store ``values`` (fp32), rounded to nearest even; returns what the buffer then holds."""
    if _INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:  # which the interpreter cannot round to
        bits = values.to(tl.uint32, bitcast=True)
        rounded = tl.add(bits, 0x7FFF + ((bits >> 16) & 1), sanitize_overflow=False) >> 16
        stored = tl.where(values == values, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        stored = values.to(pointer.dtype.element_ty)
    tl.store(pointer + at, stored, mask=inside)
    return stored.to(tl.float32)


@triton.jit
def _load_blocks(
    loaded, at, inside, count, BITS: tl.constexpr, SCALED: tl.constexpr, LENGTH: tl.constexpr, SIZE: tl.constexpr
):
    """fp32[SIZE]: elements of a buffer (as of ``_loaded``): plain if ``BITS`` is 0, else blocks of ``LENGTH`` codes."""
    buffer, first, packed = loaded
    if BITS == 0:
        values = _load(buffer, at, inside)
    else:
        block = block_numbers(first, SIZE // LENGTH)
        exists = block - first < count // LENGTH
        decoded = decode_blocks(buffer, packed, block, exists, BITS, SCALED, SIZE // LENGTH, LENGTH // _WORD)
        values = tl.reshape(decoded, [SIZE])
    return values


_PLACES = ["first", "first_row_block", "row_blocks", "row_bytes", "codes_at"]
_COUNTS = ["count", *_PLACES, *(f"g_{name}" for name in _PLACES)]


@triton.jit(do_not_specialize=_COUNTS)
def update_kernel(
    x,
    v,
    m,
    u,
    weights,
    g,
    g_active,
    g_first,
    g_first_row_block,
    g_row_blocks,
    g_row_bytes,
    g_codes_at,
    mean,
    active,
    first,
    first_row_block,
    row_blocks,
    row_bytes,
    codes_at,
    count,
    multiplier,
    beta1,
    eps,
    variance_decay,
    inverse_correction,
    kept,
    weight,
    total,
    step_size,
    of_momentum,
    bound,
    decay,
    GRADIENT: tl.constexpr,
    DEFERRED: tl.constexpr,
    KEEPS_MOMENTUM: tl.constexpr,
    TAKES_MOMENTUM: tl.constexpr,
    OF_MOMENTUM: tl.constexpr,
    SYNCHRONIZE: tl.constexpr,
    WRITE_WEIGHTS: tl.constexpr,
    FRESH: tl.constexpr,
    REFRESH: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    G_BITS: tl.constexpr,
    G_SCALED: tl.constexpr,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The adaptive and the plain rule on ``count`` elements.

    With ``DEFERRED``, ``multiplier`` points to fp32[], which is NaN if the gradient is to be ignored.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    # slices are whole blocks: the same for 32 neighbors, so that accesses are wide
    inside = at // _WORD < count // _WORD
    loaded_g = g, g_first, (g_active, g_first_row_block, g_row_blocks, g_row_bytes, g_codes_at)
    loaded_mean = mean, first, (active, first_row_block, row_blocks, row_bytes, codes_at)
    own = tl.full([SIZE], 0.0, tl.float32) if FRESH or HAS_MEAN else _load(u, at, inside)
    if REFRESH or (ADAPTIVE and WRITE_WEIGHTS):
        second = _load(v, at, inside)
    if GRADIENT or TAKES_MOMENTUM or OF_MOMENTUM:
        before = _load(m, at, inside)
    if GRADIENT:
        factor = tl.load(multiplier) if DEFERRED else multiplier
        gradient = _load_blocks(loaded_g, at, inside, count, G_BITS, G_SCALED, LENGTH, SIZE) * factor
        if REFRESH:
            second = variance_decay * second + (1.0 - variance_decay) * (gradient * gradient)
            second = _store(v, at, inside, second)
        momentum = beta1 * before + (1.0 - beta1) * gradient
        accumulated = kept * own + weight * momentum
        if DEFERRED:
            without = kept * own + weight * (beta1 * before) if TAKES_MOMENTUM else own
            momentum = tl.where(factor == factor, momentum, before)
            accumulated = tl.where(factor == factor, accumulated, without)
        own = accumulated
        if KEEPS_MOMENTUM:
            _store(m, at, inside, momentum)
    elif TAKES_MOMENTUM:
        own = kept * own + weight * (beta1 * before)
    if (GRADIENT or TAKES_MOMENTUM or FRESH) and not (HAS_MEAN or (FRESH and SYNCHRONIZE)):  # else x absorbs u
        own = _store(u, at, inside, own)
    if WRITE_WEIGHTS:
        step = own
        if HAS_MEAN:
            step = _load_blocks(loaded_mean, at, inside, count, BITS, SCALED, LENGTH, SIZE)
        moved = step_size * step
        if OF_MOMENTUM:
            moved += of_momentum * before
        if ADAPTIVE:
            moved = tl.div_rn(moved, tl.sqrt_rn(second * inverse_correction) + eps)
            moved = tl.where(moved > bound, bound, tl.where(moved < -bound, -bound, moved))
            moved = tl.where(second > 0.0, moved, 0.0)
        moved = decay * tl.load(x + at, mask=inside, other=0.0) - moved
        if SYNCHRONIZE:
            tl.store(x + at, moved, mask=inside)
            divisor = tl.full([SIZE], 0.0, tl.float32) + total
            _store(m, at, inside, tl.div_rn(step, tl.where(divisor > 0.0, divisor, 1.0)))
        _store(weights, at, inside, moved)


@triton.jit(do_not_specialize=_COUNTS)
def soft_sign_kernel(
    x,
    b,
    m,
    u,
    weights,
    g,
    g_active,
    g_first,
    g_first_row_block,
    g_row_blocks,
    g_row_bytes,
    g_codes_at,
    mean,
    active,
    first,
    first_row_block,
    row_blocks,
    row_bytes,
    codes_at,
    count,
    multiplier,
    beta,
    step_size,
    decay,
    GRADIENT: tl.constexpr,
    SYNCHRONIZE: tl.constexpr,
    WRITE_WEIGHTS: tl.constexpr,
    NEVER_FALLS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    G_BITS: tl.constexpr,
    G_SCALED: tl.constexpr,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The soft-sign rule: m and b are only stored where x moves; before an exchange only their ratio, in u."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    # slices are whole blocks: the same for 32 neighbors, so that accesses are wide
    inside = at // _WORD < count // _WORD
    loaded_g = g, g_first, (g_active, g_first_row_block, g_row_blocks, g_row_bytes, g_codes_at)
    loaded_mean = mean, first, (active, first_row_block, row_blocks, row_bytes, codes_at)
    if GRADIENT or not SYNCHRONIZE:
        momentum = _load(m, at, inside)
        magnitude = _load(b, at, inside)
    if GRADIENT:
        gradient = _load_blocks(loaded_g, at, inside, count, G_BITS, G_SCALED, LENGTH, SIZE) * multiplier
        momentum = beta * momentum + (1.0 - beta) * gradient
        grown = beta * magnitude + (1.0 - beta) * tl.abs(gradient)
        magnitude = tl.where(magnitude > grown, magnitude, grown) if NEVER_FALLS else grown
    if not SYNCHRONIZE:
        ratio = tl.div_rn(momentum, tl.where(magnitude > 0.0, magnitude, 1.0))
        _store(u, at, inside, tl.where(magnitude > 0.0, ratio, 0.0))
    elif GRADIENT:
        _store(m, at, inside, momentum)
        _store(b, at, inside, magnitude)
    if SYNCHRONIZE or WRITE_WEIGHTS:
        moved = tl.load(x + at, mask=inside, other=0.0)
    if SYNCHRONIZE:
        if HAS_MEAN:
            step = _load_blocks(loaded_mean, at, inside, count, BITS, SCALED, LENGTH, SIZE)
        else:
            step = _load(u, at, inside)
        moved = decay * moved - step_size * step
        tl.store(x + at, moved, mask=inside)
    if WRITE_WEIGHTS:
        _store(weights, at, inside, moved)


@triton.jit(do_not_specialize=["num_blocks", *_PLACES])
def square_sums_kernel(
    values,
    active,
    first,
    first_row_block,
    row_blocks,
    row_bytes,
    codes_at,
    sums,
    num_blocks,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Sum of squares of each block."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < num_blocks
    if BITS == 0:
        at = block[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
        loaded = _load(values, at, inside[:, None])
    else:
        packed = active, first_row_block, row_blocks, row_bytes, codes_at
        of_whole = first + block.to(tl.int32)
        decoded = decode_blocks(values, packed, of_whole, inside, BITS, SCALED, BLOCKS, LENGTH // _WORD)
        loaded = tl.reshape(decoded, [BLOCKS, LENGTH])
    tl.store(sums + block, halving_sums(loaded * loaded, BLOCKS, LENGTH), mask=inside)


class TritonKernels:
    """``Kernels`` by Triton, for tensors on a GPU.

    Raises:
        UserError: the parameters are not on a GPU.
    """

    runs_behind = True

    def __init__(self, device: torch.device, *, elements_per_program: int = _PROGRAM) -> None:
        check_device(device)
        self._device = device
        self._size = elements_per_program
        # a whole bucket in one launch
        self.range_elements = 1 << 27

    def sum_squares(self, values: Tensor | PackedBlocks, block_size: int) -> Tensor:
        count = values.numel() // block_size
        sums = torch.empty(count, dtype=torch.float32, device=self._device)
        arguments, bits, scaled, _ = _loaded(values)
        self._run_blocks(square_sums_kernel, count, block_size, *arguments, sums, count, BITS=bits, SCALED=scaled)
        return sums

    def update(self, phase: Phase, numbers: Numbers, slices: Slices) -> None:
        n, (x, v, m, u, weights, gradients, step) = numbers, slices
        # x stands in for missing buffers, which are not accessed
        buffers = (x, x if v.numel() == 0 else v, m, u, weights)
        g, g_bits, g_scaled, g_length = _loaded(x if gradients is None else gradients)
        mean, bits, scaled, mean_length = _loaded(x if step is None else step)
        length = max(g_length, mean_length)
        size = max(self._size, length)
        arguments = (*buffers, *g, *mean, x.numel(), n.multiplier, n.beta1)
        flags = {
            "GRADIENT": phase.gradient,
            "SYNCHRONIZE": phase.synchronize,
            "WRITE_WEIGHTS": phase.write_weights,
            "HAS_MEAN": step is not None,
            "G_BITS": g_bits,
            "G_SCALED": g_scaled,
            "BITS": bits,
            "SCALED": scaled,
            "LENGTH": length,
            "SIZE": size,
        }
        grid, warps = (-(-x.numel() // size),), max(1, size // _WARP)
        if n.rule is Rule.SOFT_SIGN:
            assert not isinstance(n.multiplier, Tensor)
            flags["NEVER_FALLS"] = n.never_falls
            self._launch(soft_sign_kernel, grid, warps, *arguments, n.step_size, n.decay, **flags)
            return
        self._launch(
            update_kernel,
            grid,
            warps,
            *arguments,
            *(n.eps, n.variance_decay or 0.0, n.inverse_correction, n.kept, n.weight, n.total),
            *(n.step_size, n.of_momentum, n.bound, n.decay),
            DEFERRED=phase.gradient and isinstance(n.multiplier, Tensor),
            KEEPS_MOMENTUM=n.keeps_momentum,
            TAKES_MOMENTUM=n.takes_momentum,
            OF_MOMENTUM=phase.write_weights and n.of_momentum != 0.0,
            FRESH=phase.fresh,
            REFRESH=phase.gradient and n.variance_decay is not None,
            ADAPTIVE=n.rule is Rule.ADAPTIVE,
            **flags,
        )

    def _run_blocks(self, kernel: Any, count: int, block_size: int, *arguments: Any, **constants: Any) -> None:
        # a warp takes two blocks of the usual size: with one it has too few loads on their way
        blocks = max(1, 2 * self._size // block_size)
        warps = min(32, max(1, blocks * block_size // 2048))
        self._launch(kernel, (-(-count // blocks),), warps, *arguments, **constants, BLOCKS=blocks, LENGTH=block_size)

    def _launch(self, kernel: Any, grid: tuple[int], warps: int, *arguments: Any, **constants: Any) -> None:
        if grid[0] > 0:
            launch(kernel, grid, self._device, *arguments, **constants, num_warps=min(32, warps))


def _loaded(values: Tensor | PackedBlocks) -> tuple[tuple[Any, ...], int, bool, int]:
    """Of a buffer what ``_load_blocks`` takes, its bits (0 if plain), whether it has scales, and its block size."""
    if isinstance(values, Tensor):
        return (values, values, 0, 0, 0, 0, 0), 0, False, 1
    rows, active, *places = values.packed.gpu_arguments
    form = values.packed.format
    return (rows, active, values.first, *places), form.bits, form.scaled, form.block_size
