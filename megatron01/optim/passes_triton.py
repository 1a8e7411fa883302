"""Triton kernels beside the update: sums of squares, copies from and to the model's tensors, live elements."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron01.comm.kernels.gpu import (
    LANES,
    block_numbers,
    element_places,
    halving_sums,
    load_flat,
    pack_bits,
    store_flat,
    word_places,
)
from megatron01.optim.tables_triton import (
    blocks_of_parameters,
    load_blocks,
    places_within,
    store_blocks,
)


@triton.jit(do_not_specialize=["num_tensors", "first", "last"])
def square_sums_kernel(
    entries,
    num_tensors,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    sums,
    TILE_WORDS: tl.constexpr,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Sum of squares of each block: tile after tile is added, then the halves of what one tile has become."""
    block = block_numbers(first, BLOCKS)
    inside = block < last
    length: tl.constexpr = WORDS * LANES
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)
    squares = tl.full([BLOCKS, TILE_WORDS, LANES], 0.0, tl.float32)
    tiles: tl.constexpr = WORDS // TILE_WORDS
    at_once: tl.constexpr = tiles if tiles < 16 else 16  # so many loads are under way together
    for group in range(tiles // at_once):
        for tile in tl.static_range(at_once):
            within = places_within((group * at_once + tile) * TILE_WORDS, TILE_WORDS)
            values = load_blocks(entries, num_tensors, parameter, start, real, inside, within, TYPES, ALIGNED, length)
            squares += values * values
    tl.store(sums + block, halving_sums(squares, BLOCKS, TILE_WORDS * LANES), mask=inside)


@triton.jit(do_not_specialize=["num_tensors", "first", "last"])
def gather_kernel(
    entries,
    num_tensors,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    flat,
    CODE: tl.constexpr,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy the blocks [first, last) from tensors to a flat buffer, whose first block is ``first``; padding as zeros."""
    block = block_numbers(first, BLOCKS)
    inside = block < last
    length: tl.constexpr = WORDS * LANES
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)
    within = places_within(0, WORDS)
    values = load_blocks(entries, num_tensors, parameter, start, real, inside, within, TYPES, ALIGNED, length)
    store_flat(flat, element_places(block - first, WORDS), inside[:, None, None], values, CODE)


@triton.jit(do_not_specialize=["num_tensors", "first", "last"])
def scatter_kernel(
    entries,
    num_tensors,
    block_parameters,
    first_blocks,
    lengths,
    first,
    last,
    flat,
    CODE: tl.constexpr,
    TYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy the blocks [first, last) from a flat buffer, whose first block is ``first``, to tensors."""
    block = block_numbers(first, BLOCKS)
    inside = block < last
    length: tl.constexpr = WORDS * LANES
    parameter, start, real = blocks_of_parameters(block, inside, block_parameters, first_blocks, lengths, length)
    values = load_flat(flat, element_places(block - first, WORDS), inside[:, None, None], CODE)
    within = places_within(0, WORDS)
    store_blocks(entries, num_tensors, parameter, start, real, inside, within, values, TYPES, ALIGNED, length)


@triton.jit(do_not_specialize=["last"])
def mark_live_kernel(
    variance,
    lengths,
    threshold,
    candidates,
    live,
    last,
    CODE: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """live <- candidates whose root variance is above a share of the mean root of their block's real elements."""
    block = block_numbers(0, BLOCKS)
    inside = block < last
    roots = tl.sqrt_rn(load_flat(variance, element_places(block, WORDS), inside[:, None, None], CODE))
    count = tl.load(lengths + block, mask=inside, other=1).to(tl.float32)
    cut = threshold * tl.div_rn(halving_sums(roots, BLOCKS, WORDS * LANES), count)
    words = word_places(block, WORDS)
    allowed = tl.load(candidates + words, mask=inside[:, None], other=0)
    tl.store(live + words, pack_bits(roots > cut[:, None, None]) & allowed, mask=inside[:, None])
