"""The 1-bit codec on CPUs: one compiled pass per phase, each block handled while it is in the cache.

The kernels do what ``megatron01.comm.reference`` does with torch operations, in the same order of fp32 operations,
so both give the same bits. Buffers are passed as addresses. Those in bf16 are widened block by block, in the cache.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from megatron01.comm.codec_intrinsics import add_live, count_bits, split_draws, split_signs, store_mean_signs
from megatron01.comm.intrinsics import (
    CODES,
    ELEMENT_SIZE,
    FP32,
    float_array,
    load_elements,
    magnitude_tree_sum,
    prefetch,
    store_elements,
    store_live_signs,
    word_array,
)
from megatron01.comm.payload import HEADER_BYTES, SCALE_BYTES, WORD, Packed, packed_row_blocks, words_offset
from megatron01.comm.quantizer import Quantizer
from megatron01.comm.workers import BlockWorkers

_PREFETCH_ELEMENTS = 2048
"""How far ahead of a pass its buffers are asked for; processors' own prefetchers stop at each page of 4 KiB."""


@njit(nogil=True, cache=True, error_model="numpy")
def _pack_block(value, error, out, live, words, num_words, scratch, random, key_low, key_high, element):
    """Pack value + error of one block, put what the packing loses to ``out``, and return the scale.

    ``value``, ``error`` and ``out`` are addresses of fp32[32 * num_words] and may be the same; ``live`` and ``words``
    those of num_words words. ``scratch`` is fp32[32 * num_words]. The block's first element has number ``element``.
    """
    live_words = word_array(live, num_words)
    sign_words = word_array(words, num_words)
    count = np.int32(0)
    for w in range(num_words):
        at = 4 * WORD * w
        add_live(live_words[w], value + at, error + at, out + at)
        count += count_bits(live_words[w])
    scale = np.float32(1.0)
    if not random:
        scale = magnitude_tree_sum(out, num_words, scratch) / np.float32(max(count, np.int32(1)))
    ahead = 4 * max(WORD * num_words, _PREFETCH_ELEMENTS)
    for w in range(num_words):
        at = 4 * WORD * w
        prefetch(error + at + ahead)
        prefetch(out + at + ahead)
        if random:
            sign_words[w] = split_draws(live_words[w], key_low, key_high, element + WORD * w, out + at)
        else:
            sign_words[w] = split_signs(live_words[w], scale, out + at)
    return scale


@njit(nogil=True, cache=True, error_model="numpy")
def _compress(
    first,
    last,
    value,
    error,
    code,
    size,
    live,
    rows,
    row_bytes,
    row_blocks,
    words_at,
    first_block,
    scaled,
    block_size,
    key_low,
    key_high,
):
    """Pack the blocks [first, last) of value + error; ``value`` becomes what that loses.

    ``code`` and ``size`` are those of the elements of both.
    """
    scratch = np.empty(block_size, np.float32)
    total = np.empty(block_size, np.float32)
    owed = np.empty(block_size, np.float32)
    num_words = block_size // WORD
    for block in range(first, last):
        row, index = divmod(block - first_block, row_blocks)
        row = rows + row * row_bytes
        at = size * block * block_size
        block_value, block_error = value + at, error + at
        if code != FP32:
            load_elements(block_value, code, block_size, total)
            load_elements(block_error, code, block_size, owed)
            block_value, block_error = np.int64(total.ctypes.data), np.int64(owed.ctypes.data)
        scale = _pack_block(
            block_value,
            block_error,
            block_value,
            live + 4 * block * num_words,
            row + words_at + 4 * index * num_words,
            num_words,
            scratch,
            not scaled,
            key_low,
            key_high,
            block * block_size,
        )
        if code != FP32:
            store_elements(value + at, code, block_size, total)
        if scaled:
            float_array(row + HEADER_BYTES, row_blocks)[index] = scale


@njit(nogil=True, cache=True, error_model="numpy")
def _reduce(
    first,
    last,
    rows,
    row_bytes,
    row_blocks,
    words_at,
    num_rows,
    first_block,
    scaled,
    error,
    code,
    size,
    live,
    out,
    block_size,
    key_low,
    key_high,
):
    """For the blocks [first, last) of a row: mean over the received rows, plus error, packed again.

    Rows, ``error`` and ``out`` count blocks from the start of the row, ``live`` from ``first_block`` blocks before it.
    ``code`` and ``size`` are those of the elements of ``error``.
    """
    scratch = np.empty(block_size, np.float32)
    owed = np.empty(block_size, np.float32)
    mean = np.empty(block_size, np.float32)
    one = np.ones(1, np.float32)
    num_words = block_size // WORD
    for block in range(first, last):
        words = rows + words_at + 4 * block * num_words
        scales = rows + HEADER_BYTES + SCALE_BYTES * block if scaled else one.ctypes.data
        scales_stride = row_bytes if scaled else 0
        for w in range(num_words):
            store_mean_signs(words + 4 * w, row_bytes, scales, scales_stride, num_rows, mean.ctypes.data + 4 * WORD * w)
        stored_error = error + size * block * block_size
        block_error = stored_error
        if code != FP32:
            load_elements(stored_error, code, block_size, owed)
            block_error = np.int64(owed.ctypes.data)
        scale = _pack_block(
            mean.ctypes.data,
            block_error,
            block_error,
            live + 4 * (first_block + block) * num_words,
            out + words_at + 4 * block * num_words,
            num_words,
            scratch,
            not scaled,
            key_low,
            key_high,
            (first_block + block) * block_size,
        )
        if code != FP32:
            store_elements(stored_error, code, block_size, owed)
        if scaled:
            float_array(out + HEADER_BYTES, row_blocks)[block] = scale


@njit(nogil=True, cache=True, error_model="numpy")
def _decode(first, last, rows, row_bytes, row_blocks, words_at, first_block, scaled, live, start, out, block_size):
    """Write what the blocks [first, last) say to ``out``, whose first block is ``start``."""
    num_words = block_size // WORD
    for block in range(first, last):
        row, index = divmod(block - first_block, row_blocks)
        row = rows + row * row_bytes
        scale = float_array(row + HEADER_BYTES, row_blocks)[index] if scaled else np.float32(1.0)
        words = word_array(row + words_at + 4 * index * num_words, num_words)
        live_words = word_array(live + 4 * block * num_words, num_words)
        at = out + 4 * (block - start) * block_size
        for w in range(num_words):
            store_live_signs(live_words[w], words[w], scale, at + 4 * WORD * w)


class CPUCodec:
    """``megatron01.comm.codec.Codec`` by compiled kernels over CPU tensors."""

    def __init__(self, block_size: int, quantizer: Quantizer, num_threads: int) -> None:
        self.scaled = quantizer == "sign"
        self._block_size = block_size
        self._workers = BlockWorkers(num_threads)

    def compress(
        self, first: int, last: int, value: torch.Tensor, error: torch.Tensor, packed: Packed, key: int
    ) -> None:
        self._workers.run(
            _compress,
            first,
            last,
            value.data_ptr(),
            error.data_ptr(),
            *_element(value),
            packed.live.data_ptr(),
            packed.rows.data_ptr(),
            packed.rows.stride(0),
            packed.row_blocks,
            packed.words_offset,
            packed.first_block,
            self.scaled,
            self._block_size,
            *_halves(key),
        )

    def reduce(
        self,
        first_block: int,
        num_blocks: int,
        rows: torch.Tensor,
        error: torch.Tensor,
        live: torch.Tensor,
        out: torch.Tensor,
        key: int,
    ) -> None:
        row_blocks = packed_row_blocks(rows.size(1), self._block_size, self.scaled)
        self._workers.run(
            _reduce,
            0,
            num_blocks,
            rows.data_ptr(),
            rows.stride(0),
            row_blocks,
            words_offset(row_blocks, self.scaled),
            rows.size(0),
            first_block,
            self.scaled,
            error.data_ptr(),
            *_element(error),
            live.data_ptr(),
            out.data_ptr(),
            self._block_size,
            *_halves(key),
        )

    def decode(self, first: int, last: int, packed: Packed, out: torch.Tensor) -> None:
        self._workers.run(
            _decode,
            first,
            last,
            packed.rows.data_ptr(),
            packed.rows.stride(0),
            packed.row_blocks,
            packed.words_offset,
            packed.first_block,
            self.scaled,
            packed.live.data_ptr(),
            first,
            out.data_ptr(),
            self._block_size,
        )


def _element(buffer: torch.Tensor) -> tuple[int, int]:
    """Code and size of the elements of a buffer."""
    code = CODES[buffer.dtype]
    return code, ELEMENT_SIZE[code]


def _halves(key: int) -> tuple[np.uint32, np.uint32]:
    """Low and high word of a 64-bit key."""
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
