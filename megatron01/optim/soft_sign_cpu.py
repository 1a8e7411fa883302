"""The soft-sign rule on CPUs: the step is m / b, momentum over mean magnitude of the gradients, in [-1, 1]."""

from __future__ import annotations

import numpy as np
from numba import njit

from megatron01.comm.kernels.cpu import float_array
from megatron01.comm.payload import WORD
from megatron01.optim.tiles import decode_tile, is_direct, load_tile, place_of_block, store_tile
from megatron01.optim.update import TILE


@njit(nogil=True, cache=True, error_model="numpy")
def update_soft_sign(
    first,
    last,
    first_block,
    block_parameter,
    block_group,
    lengths,
    block_size,
    gradient_addresses,
    gradient_codes,
    weight_addresses,
    weight_codes,
    x,
    b,
    m,
    u,
    has_gradient,
    synchronize,
    write_weights,
    never_falls,
    multiplier,
    beta,
    step_size,
    decay,
    rows,
    row_bytes,
    row_blocks,
    words_at,
    first_row_block,
    scaled,
    live,
):
    """m and b are only kept where x moves; before an exchange only their ratio is written, to u."""
    one = np.float32(1.0)
    zero = np.float32(0.0)
    tile = min(TILE, block_size)
    staging = np.empty(tile, np.float32)
    staged_weights = np.empty(tile, np.float32)
    staged_u = np.empty(tile, np.float32)
    packed = rows != 0
    for block in range(first, last):
        size, keep = step_size[block_group[block]], decay[block_group[block]]
        gradient, gradient_code, gradient_size = place_of_block(
            block, first_block, block_parameter, gradient_addresses, gradient_codes, block_size
        )
        target, target_code, target_size = place_of_block(
            block, first_block, block_parameter, weight_addresses, weight_codes, block_size
        )
        for offset in range(0, block_size, tile):
            start = block * block_size + offset
            xt = float_array(x + 4 * start, tile)
            bt = float_array(b + 4 * start, tile)
            mt = float_array(m + 4 * start, tile)
            ut = float_array(staged_u.ctypes.data if packed else u + 4 * start, tile)
            if has_gradient:
                g = load_tile(gradient, gradient_code, gradient_size, lengths[block], offset, staging)
                if synchronize:
                    for i in range(tile):
                        scaled_gradient = g[i] * multiplier
                        mt[i] = beta * mt[i] + (one - beta) * scaled_gradient
                        magnitude = beta * bt[i] + (one - beta) * abs(scaled_gradient)
                        bt[i] = bt[i] if never_falls and bt[i] > magnitude else magnitude
                else:
                    for i in range(tile):
                        scaled_gradient = g[i] * multiplier
                        momentum = beta * mt[i] + (one - beta) * scaled_gradient
                        magnitude = beta * bt[i] + (one - beta) * abs(scaled_gradient)
                        magnitude = bt[i] if never_falls and bt[i] > magnitude else magnitude
                        ratio = momentum / magnitude
                        ut[i] = ratio if magnitude > zero else zero
            elif not synchronize:
                for i in range(tile):
                    ratio = mt[i] / bt[i]
                    ut[i] = ratio if bt[i] > zero else zero
            if write_weights:
                direct = is_direct(target, target_code, lengths[block], offset, tile)
                w = float_array(target + offset * target_size if direct else staged_weights.ctypes.data, tile)
                if synchronize:
                    if packed:
                        decode_tile(
                            block,
                            offset,
                            block_size,
                            rows,
                            row_bytes,
                            row_blocks,
                            words_at,
                            first_row_block,
                            scaled,
                            live,
                            staged_u.ctypes.data,
                            tile // WORD,
                        )
                    for i in range(tile):
                        xt[i] = keep * xt[i] - size * ut[i]
                for i in range(tile):
                    w[i] = xt[i]
                if not direct:
                    store_tile(target, target_code, target_size, lengths[block], offset, w)
