"""The optimizers' arithmetic as Triton kernels: one pass over the blocks for each phase, as ``update`` describes it.

What a phase does not need is left out when its kernel is compiled. Every product and sum stands as in
``update_reference``; divisions and roots are rounded correctly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron01.comm.kernels.gpu import (
    LANES,
    as_stored,
    block_numbers,
    element_places,
    load_flat,
    load_packed,
    store_flat,
)
from megatron01.optim.tables_triton import blocks_of_parameters, load_blocks, places_within, store_blocks

WEIGHT = tl.constexpr(0)
TOTAL = tl.constexpr(1)
STEP_SIZE = tl.constexpr(2)
BOUND = tl.constexpr(3)
DECAY = tl.constexpr(4)
"""Rows of the table of coefficients, fp32[5, parameters]."""


@triton.jit
def _coefficient(coefficients, num_parameters, parameter, inside, ROW: tl.constexpr):
    """fp32[BLOCKS, 1, 1]: a coefficient of the parameters of blocks."""
    values = tl.load(coefficients + ROW * num_parameters + parameter, mask=inside, other=1.0)
    return values[:, None, None]


@triton.jit
def _rest(share):
    """1 - share, in fp32: in the interpreter, an argument is a double."""
    return tl.cast(1.0, tl.float32) - share


@triton.jit
def _clamp(values, bound):
    """Values in [-bound, bound]; NaN stays NaN."""
    below = bound * -1.0  # Triton's minus is 0 - x, which would make -0 of no 0
    return tl.where(values > bound, bound, tl.where(values < below, below, values))


@triton.jit(
    do_not_specialize=["num_parameters", "first", "last", "first_row_block", "row_blocks", "row_words", "words_at"]
)
def update_kernel(
    x,
    v,
    m,
    u,
    gradients,
    weights,
    num_parameters,
    coefficients,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    rows,
    live,
    first_row_block,
    row_blocks,
    row_words,
    words_at,
    multiplier,
    beta1,
    eps,
    variance_decay,
    inverse_correction,
    GRADIENT: tl.constexpr,
    LATE: tl.constexpr,
    KEEP_MOMENTUM: tl.constexpr,
    SYNCHRONIZE: tl.constexpr,
    WRITE_WEIGHTS: tl.constexpr,
    FRESH: tl.constexpr,
    REFRESH: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    CODE: tl.constexpr,
    PACKED: tl.constexpr,
    SCALED: tl.constexpr,
    GRADIENT_TYPES: tl.constexpr,
    GRADIENTS_ALIGNED: tl.constexpr,
    WEIGHT_TYPES: tl.constexpr,
    WEIGHTS_ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The adaptive and the plain rule on the blocks [first, last). ``CODE`` is that of v, m and u.

    With ``LATE``, ``multiplier`` is the address of one, which is NaN where the gradient is to have no effect.
    """
    length: tl.constexpr = WORDS * LANES
    block = block_numbers(first, BLOCKS)
    inside = block < last
    mask = inside[:, None, None]
    at = element_places(block, WORDS)
    within = places_within(0, WORDS)
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)

    # u has no future where x takes it over: it need not be written, and where it counts as 0 it is not read either
    zeros = tl.full([BLOCKS, WORDS, LANES], 0.0, tl.float32)
    own = zeros if FRESH or PACKED else load_flat(u, at, mask, CODE)
    if REFRESH or (ADAPTIVE and WRITE_WEIGHTS):
        second = load_flat(v, at, mask, CODE)
    if GRADIENT:
        momentum = load_flat(m, at, mask, CODE)
        g = load_blocks(
            gradients, num_parameters, parameter, start, real, inside, within, GRADIENT_TYPES, GRADIENTS_ALIGNED, length
        )
        factor = tl.load(multiplier) if LATE else multiplier
        g = g * factor
        if REFRESH:
            second = variance_decay * second + _rest(variance_decay) * (g * g)
            store_flat(v, at, mask, second, CODE)
            second = as_stored(second, CODE)
        before = momentum
        momentum = beta1 * momentum + _rest(beta1) * g
        accumulated = own + _coefficient(coefficients, num_parameters, parameter, inside, WEIGHT) * momentum
        if LATE:
            momentum = tl.where(factor == factor, momentum, before)
            accumulated = tl.where(factor == factor, accumulated, own)
        own = accumulated
        if KEEP_MOMENTUM:
            store_flat(m, at, mask, momentum, CODE)
    if (GRADIENT or FRESH) and not (PACKED or (FRESH and SYNCHRONIZE)):
        store_flat(u, at, mask, own, CODE)
        own = as_stored(own, CODE)

    if WRITE_WEIGHTS:
        step = own
        if PACKED:
            step = load_packed(
                rows, live, block, inside, first_row_block, row_blocks, row_words, words_at, SCALED, WORDS
            )
        moved = _coefficient(coefficients, num_parameters, parameter, inside, STEP_SIZE) * step
        if ADAPTIVE:
            root = tl.sqrt_rn(second * inverse_correction) + eps
            moved = _clamp(tl.div_rn(moved, root), _coefficient(coefficients, num_parameters, parameter, inside, BOUND))
            moved = tl.where(second > 0.0, moved, 0.0)
        decay = _coefficient(coefficients, num_parameters, parameter, inside, DECAY)
        moved_x = decay * tl.load(x + at, mask=mask, other=0.0) - moved
        if SYNCHRONIZE:
            tl.store(x + at, moved_x, mask=mask)
            total = _coefficient(coefficients, num_parameters, parameter, inside, TOTAL)
            store_flat(m, at, mask, tl.div_rn(step, total), CODE)
        store_blocks(
            weights,
            num_parameters,
            parameter,
            start,
            real,
            inside,
            within,
            moved_x,
            WEIGHT_TYPES,
            WEIGHTS_ALIGNED,
            length,
        )


@triton.jit(
    do_not_specialize=["num_parameters", "first", "last", "first_row_block", "row_blocks", "row_words", "words_at"]
)
def soft_sign_kernel(
    x,
    b,
    m,
    u,
    gradients,
    weights,
    num_parameters,
    coefficients,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    rows,
    live,
    first_row_block,
    row_blocks,
    row_words,
    words_at,
    multiplier,
    beta,
    GRADIENT: tl.constexpr,
    SYNCHRONIZE: tl.constexpr,
    WRITE_WEIGHTS: tl.constexpr,
    NEVER_FALLS: tl.constexpr,
    PACKED: tl.constexpr,
    SCALED: tl.constexpr,
    GRADIENT_TYPES: tl.constexpr,
    GRADIENTS_ALIGNED: tl.constexpr,
    WEIGHT_TYPES: tl.constexpr,
    WEIGHTS_ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The soft-sign rule on the blocks [first, last).

    m and b are only kept where x moves; before an exchange only their ratio is written, to u.
    """
    length: tl.constexpr = WORDS * LANES
    block = block_numbers(first, BLOCKS)
    inside = block < last
    mask = inside[:, None, None]
    at = element_places(block, WORDS)
    within = places_within(0, WORDS)
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)

    if GRADIENT or not SYNCHRONIZE:
        momentum = tl.load(m + at, mask=mask, other=0.0)
        magnitude = tl.load(b + at, mask=mask, other=0.0)
    if GRADIENT:
        g = load_blocks(
            gradients, num_parameters, parameter, start, real, inside, within, GRADIENT_TYPES, GRADIENTS_ALIGNED, length
        )
        g = g * multiplier
        momentum = beta * momentum + _rest(beta) * g
        grown = beta * magnitude + _rest(beta) * tl.abs(g)
        magnitude = tl.where(magnitude > grown, magnitude, grown) if NEVER_FALLS else grown
    if not SYNCHRONIZE:
        ratio = tl.div_rn(momentum, tl.where(magnitude > 0.0, magnitude, 1.0))
        tl.store(u + at, tl.where(magnitude > 0.0, ratio, 0.0), mask=mask)
    elif GRADIENT:
        tl.store(m + at, momentum, mask=mask)
        tl.store(b + at, magnitude, mask=mask)

    if SYNCHRONIZE or WRITE_WEIGHTS:
        moved_x = tl.load(x + at, mask=mask, other=0.0)
    if SYNCHRONIZE:
        if PACKED:
            step = load_packed(
                rows, live, block, inside, first_row_block, row_blocks, row_words, words_at, SCALED, WORDS
            )
        else:
            step = tl.load(u + at, mask=mask, other=0.0)
        size = _coefficient(coefficients, num_parameters, parameter, inside, STEP_SIZE)
        moved_x = _coefficient(coefficients, num_parameters, parameter, inside, DECAY) * moved_x - size * step
        tl.store(x + at, moved_x, mask=mask)
    if WRITE_WEIGHTS:
        store_blocks(
            weights,
            num_parameters,
            parameter,
            start,
            real,
            inside,
            within,
            moved_x,
            WEIGHT_TYPES,
            WEIGHTS_ALIGNED,
            length,
        )
