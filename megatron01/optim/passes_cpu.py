"""Compiled passes over flat buffers beside the update: norms, copies from and to the model's tensors, live elements."""

from __future__ import annotations

import numpy as np
from numba import njit

from megatron01.comm.kernels.cpu import FP32, float_array, load_elements, tree_sum, word_array
from megatron01.comm.payload import WORD
from megatron01.optim.tiles import load_tile, place_of_block, store_tile
from megatron01.optim.update import TILE


@njit(nogil=True, cache=True, error_model="numpy")
def square_sums(first, last, first_block, block_parameter, lengths, block_size, addresses, codes, sums):
    tile = min(TILE, block_size)
    staging = np.empty(tile, np.float32)
    squares = np.empty(tile, np.float32)
    for block in range(first, last):
        address, code, size = place_of_block(block, first_block, block_parameter, addresses, codes, block_size)
        squares[:] = np.float32(0.0)
        for offset in range(0, block_size, tile):
            values = load_tile(address, code, size, lengths[block], offset, staging)
            for i in range(tile):
                squares[i] += values[i] * values[i]
        sums[block] = tree_sum(squares)


@njit(nogil=True, cache=True, error_model="numpy")
def gather(
    first,
    last,
    first_block,
    block_parameter,
    lengths,
    block_size,
    addresses,
    codes,
    start,
    flat_address,
    flat_code,
    flat_size,
):
    """Copy blocks from the tensors to a flat buffer whose first block is ``start``, padding as zeros."""
    staging = np.empty(min(TILE, block_size), np.float32)
    for block in range(first, last):
        address, code, size = place_of_block(block, first_block, block_parameter, addresses, codes, block_size)
        flat = flat_address + (block - start) * block_size * flat_size
        for offset in range(0, block_size, staging.size):
            values = load_tile(address, code, size, lengths[block], offset, staging)
            store_tile(flat, flat_code, flat_size, block_size, offset, values)


@njit(nogil=True, cache=True, error_model="numpy")
def scatter(
    first,
    last,
    first_block,
    block_parameter,
    lengths,
    block_size,
    addresses,
    codes,
    start,
    flat_address,
    flat_code,
    flat_size,
):
    """Copy blocks from a flat buffer whose first block is ``start`` to the tensors."""
    staging = np.empty(min(TILE, block_size), np.float32)
    for block in range(first, last):
        address, code, size = place_of_block(block, first_block, block_parameter, addresses, codes, block_size)
        flat = flat_address + (block - start) * block_size * flat_size
        for offset in range(0, block_size, staging.size):
            values = load_tile(flat, flat_code, flat_size, block_size, offset, staging)
            store_tile(address, code, size, lengths[block], offset, values)


@njit(nogil=True, cache=True, error_model="numpy")
def mark_live(first, last, block_size, lengths, variance, code, threshold, candidates, live):
    staging = np.empty(block_size, np.float32)
    roots = np.empty(block_size, np.float32)
    scratch = np.empty(block_size, np.float32)
    words_per_block = block_size // WORD
    for block in range(first, last):
        if code != FP32:
            load_elements(variance + 2 * block * block_size, code, block_size, staging)
        in_place = variance + 4 * block * block_size
        values = float_array(in_place if code == FP32 else staging.ctypes.data, block_size)
        for i in range(block_size):
            root = np.sqrt(values[i])
            roots[i] = root
            scratch[i] = root
        cut = threshold * (tree_sum(scratch) / np.float32(lengths[block]))
        allowed = word_array(candidates + 4 * block * words_per_block, words_per_block)
        out = word_array(live + 4 * block * words_per_block, words_per_block)
        for w in range(words_per_block):
            word = np.uint32(0)
            for j in range(WORD):
                word |= np.uint32(roots[WORD * w + j] > cut) << np.uint32(j)
            out[w] = word & allowed[w]
