"""The 1-bit codec on CPUs: one compiled pass per phase, each block handled while it is in the cache.

The kernels do what ``megatron01.comm.reference`` does with torch operations, in the same order of fp32 operations,
so both give the same bits. Arrays: ``value``, ``error`` and ``variance`` are flat fp32 buffers of whole blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from megatron01.comm.intrinsics import WORD, add_signs, float_array, sign_word, store_signs, tree_sum, word_array
from megatron01.comm.payload import HEADER_BYTES, SCALE_BYTES, BlockLayout
from megatron01.comm.workers import BlockWorkers


@njit(nogil=True, cache=True, error_model="numpy")
def _mark_live(variance, start, block_size, length, threshold, live, scratch):
    """live[i] = 1 where sqrt(variance) is above ``threshold`` of its mean over the block, else 0; returns their number.

    An empty ``variance`` marks every real element. Padding has variance 0 and is never marked.
    """
    if variance.size == 0:
        for i in range(block_size):
            live[i] = np.float32(1.0) if i < length else np.float32(0.0)
        return length
    for i in range(block_size):
        root = np.sqrt(variance[start + i])
        scratch[i] = root
        live[i] = root
    cut = threshold * (tree_sum(scratch) / np.float32(length))
    count = np.int32(0)
    for i in range(block_size):
        alive = live[i] > cut
        live[i] = np.float32(1.0) if alive else np.float32(0.0)
        count += np.int32(alive)
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _pack_block(values, live_count, scratch, words):
    """Write the signs of ``values`` (fp32[block_size]) to ``words`` and return their scale, mean |value| over the live.

    Elements that are not live are 0 in ``values`` and therefore add nothing to the scale.
    """
    for i in range(values.size):
        scratch[i] = abs(values[i])
    scale = tree_sum(scratch) / np.float32(live_count) if live_count > 0 else np.float32(0.0)
    address = values.ctypes.data
    for w in range(words.size):
        words[w] = sign_word(address + 4 * WORD * w)
    return scale


@njit(nogil=True, cache=True, error_model="numpy")
def _compress(first, last, value, error, variance, lengths, threshold, block_size, rows_address, row_bytes, row_blocks):
    """For the blocks [first, last): value += error where live, 0 elsewhere; its scale and signs go into the payload."""
    live = np.empty(block_size, np.float32)
    scratch = np.empty(block_size, np.float32)
    words_per_block = block_size // WORD
    for block in range(first, last):
        start = block * block_size
        count = _mark_live(variance, start, block_size, lengths[block], threshold, live, scratch)
        total = value[start : start + block_size]
        residual = error[start : start + block_size]
        for i in range(block_size):
            corrected = total[i] + residual[i]
            total[i] = corrected if live[i] > np.float32(0.0) else np.float32(0.0)
        index = block % row_blocks
        row = rows_address + (block // row_blocks) * row_bytes + HEADER_BYTES
        scales = float_array(row, row_blocks)
        words = word_array(row + SCALE_BYTES * row_blocks + index * words_per_block * 4, words_per_block)
        scales[index] = _pack_block(total, count, scratch, words)


@njit(nogil=True, cache=True, error_model="numpy")
def _reduce(
    first,
    last,
    rows_address,
    row_bytes,
    row_blocks,
    num_rows,
    first_block,
    error,
    variance,
    lengths,
    threshold,
    block_size,
    out_address,
):
    """For the blocks [first, last) of this server's chunk: mean over the received rows, plus error, packed again.

    ``error`` (chunk-local, updated in place) and the payload count blocks from 0; ``variance`` and ``lengths`` are
    those of the whole buffer, in which the chunk starts at ``first_block``.
    """
    live = np.empty(block_size, np.float32)
    scratch = np.empty(block_size, np.float32)
    mean = np.empty(block_size, np.float32)
    words_per_block = block_size // WORD
    scales_bytes = SCALE_BYTES * row_blocks
    out = out_address + HEADER_BYTES
    out_scales = float_array(out, row_blocks)
    for block in range(first, last):
        mean[:] = np.float32(0.0)
        for row in range(num_rows):
            base = rows_address + row * row_bytes + HEADER_BYTES
            scale = float_array(base, row_blocks)[block]
            words = word_array(base + scales_bytes + block * words_per_block * 4, words_per_block)
            for w in range(words_per_block):
                add_signs(words[w], scale, mean.ctypes.data + 4 * WORD * w)
        start = (first_block + block) * block_size
        count = _mark_live(variance, start, block_size, lengths[first_block + block], threshold, live, scratch)
        residual = error[block * block_size : (block + 1) * block_size]
        for i in range(block_size):
            corrected = mean[i] / np.float32(num_rows) + residual[i]
            mean[i] = corrected if live[i] > np.float32(0.0) else np.float32(0.0)
        words = word_array(out + scales_bytes + block * words_per_block * 4, words_per_block)
        scale = _pack_block(mean, count, scratch, words)
        out_scales[block] = scale
        for i in range(block_size):
            sent = scale if mean[i] >= np.float32(0.0) else -scale
            residual[i] = mean[i] - sent if live[i] > np.float32(0.0) else np.float32(0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _finish(
    first,
    last,
    value,
    error,
    variance,
    lengths,
    threshold,
    block_size,
    sent_address,
    result_address,
    row_bytes,
    row_blocks,
):
    """For the blocks [first, last): error = value - what was sent of it, then value = the exchange's result."""
    live = np.empty(block_size, np.float32)
    scratch = np.empty(block_size, np.float32)
    words_per_block = block_size // WORD
    for block in range(first, last):
        start = block * block_size
        _mark_live(variance, start, block_size, lengths[block], threshold, live, scratch)
        index = block % row_blocks
        row = (block // row_blocks) * row_bytes + HEADER_BYTES
        sent_scale = float_array(sent_address + row, row_blocks)[index]
        scale = float_array(result_address + row, row_blocks)[index]
        words_at = row + SCALE_BYTES * row_blocks + index * words_per_block * 4
        words = word_array(result_address + words_at, words_per_block)
        for w in range(words_per_block):
            store_signs(words[w], scale, scratch.ctypes.data + 4 * WORD * w)
        total = value[start : start + block_size]
        residual = error[start : start + block_size]
        for i in range(block_size):
            sent = sent_scale if total[i] >= np.float32(0.0) else -sent_scale
            residual[i] = total[i] - sent if live[i] > np.float32(0.0) else np.float32(0.0)
        for i in range(block_size):
            total[i] = scratch[i] if live[i] > np.float32(0.0) else np.float32(0.0)


class CPUCodec:
    """``megatron01.comm.codec.Codec`` by compiled kernels over CPU tensors."""

    def __init__(self, layout: BlockLayout, num_rows: int, threshold: float, num_threads: int) -> None:
        self._layout = layout
        self._row_blocks = layout.row_blocks(num_rows)
        self._lengths = layout.lengths.numpy()
        self._threshold = np.float32(threshold)
        self._workers = BlockWorkers(num_threads)

    def compress(
        self,
        first: int,
        last: int,
        value: torch.Tensor,
        error: torch.Tensor,
        variance: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> None:
        self._workers.run(
            _compress,
            first,
            last,
            value.numpy(),
            error.numpy(),
            _numpy_or_empty(variance),
            self._lengths,
            self._threshold,
            self._layout.block_size,
            rows.data_ptr(),
            rows.stride(0),
            self._row_blocks,
        )

    def reduce(
        self,
        first_block: int,
        num_blocks: int,
        rows: torch.Tensor,
        error: torch.Tensor,
        variance: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        self._workers.run(
            _reduce,
            0,
            num_blocks,
            rows.data_ptr(),
            rows.stride(0),
            self._row_blocks,
            rows.size(0),
            first_block,
            error.numpy(),
            _numpy_or_empty(variance),
            self._lengths,
            self._threshold,
            self._layout.block_size,
            out.data_ptr(),
        )

    def finish(
        self,
        first: int,
        last: int,
        value: torch.Tensor,
        error: torch.Tensor,
        variance: torch.Tensor | None,
        sent: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        self._workers.run(
            _finish,
            first,
            last,
            value.numpy(),
            error.numpy(),
            _numpy_or_empty(variance),
            self._lengths,
            self._threshold,
            self._layout.block_size,
            sent.data_ptr(),
            result.data_ptr(),
            result.stride(0),
            self._row_blocks,
        )


def _numpy_or_empty(tensor: torch.Tensor | None) -> np.ndarray:
    return np.empty(0, np.float32) if tensor is None else tensor.numpy()
