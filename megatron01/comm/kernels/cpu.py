"""The codec on CPUs: numba over arrays, one pass per phase, each block handled while it is in the cache.

The kernels do what ``megatron01.comm.kernels.specification`` does with torch operations, in the same order of fp32
operations, so both give the same bits. Inner loops run over the 32 elements of a mask or sign word, or over a block,
which LLVM turns into vector instructions where input and output are different arrays.

Kernels release the interpreter lock and treat every block on its own, so that neither buckets nor threads change a bit
of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from megatron01.comm.kernels.specification import ReferenceRows
from megatron01.comm.payload import (
    CHECKSUM_WORD,
    HEADER_BYTES,
    INVERSE_SCALE_WORD,
    SCALE_BYTES,
    SQUARE_SUM_WORD,
    STATUS_WORD,
    WORD,
    Header,
    Packed,
    PackedFormat,
    Quantizer,
    common_header,
    headers_of,
    seal,
)
from megatron01.utils.compilation import compiled

_FIRST_SCALE = HEADER_BYTES // SCALE_BYTES
"""Place of a row's scales in the row as uint16."""
_MIN_BLOCKS_PER_THREAD = 16

# numba computes with 64 bits unless it is told otherwise in each step; 32-bit loops are twice as fast
_u32 = np.uint32
_f32 = np.float32
_INDEX = np.arange(WORD, dtype=np.uint32)
_BIT = np.uint32(1) << _INDEX
"""The place of each element in a word, and its bit."""


@compiled(nogil=True, error_model="numpy", inline="always")
def _from_bf16(bits):
    return _u32(_u32(bits) << _u32(16)).view(np.float32)


@compiled(nogil=True, error_model="numpy", inline="always")
def _to_bf16(value):
    """uint16: to nearest even; NaN is 0x7FC0, as rounding its payload could give infinity."""
    bits = _f32(value).view(np.uint32)
    rounded = _u32(bits + _u32(_u32(0x7FFF) + _u32(_u32(bits >> _u32(16)) & _u32(1))))
    # a mask in place of a branch, so that loops become vector instructions
    nan = _u32(_u32(0) - _u32(value != value))
    return np.uint16(_u32(_u32(_u32(rounded & _u32(~nan)) | _u32(_u32(0x7FC00000) & nan)) >> _u32(16)))


@compiled(nogil=True, error_model="numpy")
def _add(value, error, active, out):
    """out (fp32[elements]) <- value + error where active, 0 elsewhere."""
    for w in range(active.size):
        mask = active[w]
        for k in range(WORD):
            i = WORD * w + k
            out[i] = value[i] + error[i] if mask & _BIT[k] else _f32(0.0)


@compiled(nogil=True, error_model="numpy", inline="always")
def halving_sum(values):
    """Sum of a power of two of values, which it overwrites: the upper half onto the lower, again and again."""
    half = values.size // 2
    while half > 0:
        low, high = values[:half], values[half : 2 * half]
        for i in range(half):
            low[i] = low[i] + high[i]
        half //= 2
    return values[0]


@compiled(nogil=True, error_model="numpy")
def _mean_scale(values, active, scratch):
    """uint16: bf16 of the mean |value| over the active elements."""
    count = 0
    for w in range(active.size):
        word = active[w]
        if word == _u32(0xFFFFFFFF):
            count += WORD
        else:
            for k in range(WORD):
                count += 1 if word & _BIT[k] else 0
    half = values.size // 2
    for i in range(half):
        scratch[i] = abs(values[i]) + abs(values[i + half])
    return _to_bf16(halving_sum(scratch[:half]) / _f32(max(count, 1)))


@compiled(nogil=True, error_model="numpy")
def _largest_scale(values):
    """uint16: bf16 of the largest |value|, rounded up; 0 below 2^-126, not finite if a value is not."""
    largest, words = _u32(0), values.view(np.uint32)
    for i in range(words.size):
        largest = max(largest, _u32(words[i] & _u32(0x7FFFFFFF)))
    rounded = min(_u32(_u32(largest + _u32(0xFFFF)) >> _u32(16)), _u32(0x7FC0))
    return np.uint16(rounded) if rounded >= _u32(0x80) else np.uint16(0)


@compiled(nogil=True, error_model="numpy")
def _split_signs(total, scale, active, words, residual):
    """``words`` <- the signs of ``total``; ``residual`` <- the quantization error, 0 where not active."""
    for w in range(words.size):
        word, mask = _u32(0), active[w]
        for k in range(WORD):
            i = WORD * w + k
            x = total[i]
            word = _u32(word | (_BIT[k] if x >= _f32(0.0) else _u32(0)))
            residual[i] = (x - scale if x >= _f32(0.0) else x + scale) if mask & _BIT[k] else _f32(0.0)
        words[w] = word


@compiled(nogil=True, error_model="numpy", inline="always")
def _mix(x):
    """The permutation of 32-bit integers known as lowbias32 (C. Wellons, "Prospecting for Hash Functions")."""
    x = _u32(x ^ _u32(x >> _u32(16)))
    x = _u32(x * _u32(0x7FEB352D))
    x = _u32(x ^ _u32(x >> _u32(15)))
    x = _u32(x * _u32(0x846CA68B))
    return _u32(x ^ _u32(x >> _u32(16)))


@compiled(nogil=True, error_model="numpy")
def _split_draws(total, key_low, key_high, element, active, words, residual):
    """Like ``_split_signs``, but +-1 by comparison with random draws; ``element`` is the first one's number."""
    high, one = _u32(key_high + _u32(element >> 32)), _f32(1.0)
    for w in range(words.size):
        word, mask, low = _u32(0), active[w], _u32(element + WORD * w)
        for k in range(WORD):
            i = WORD * w + k
            bits = _mix(_u32(_mix(_u32(_u32(low + _INDEX[k]) ^ key_low)) ^ high))
            drawn = _f32(np.int32(bits >> _u32(8))) * _f32(2.0**-23) - one  # 24 bits: exact
            x = total[i]
            word = _u32(word | (_BIT[k] if x > drawn else _u32(0)))
            residual[i] = (x - one if x > drawn else x + one) if mask & _BIT[k] else _f32(0.0)
        words[w] = word


@compiled(nogil=True, error_model="numpy", inline="always")
def _level(x, inverse, half):
    """uint32: the number of the interval in which |x| lies."""
    place = np.sqrt(abs(x) * inverse) * half
    return _u32(np.int32(place if place < half - _f32(1.0) else half - _f32(1.0)))


@compiled(nogil=True, error_model="numpy", inline="always")
def _level_value(level, scale, half):
    root = (_f32(np.int32(level)) + _f32(0.5)) * (_f32(1.0) / half)  # half is a power of two: as exact as a division
    return scale * (root * root)


@compiled(nogil=True, error_model="numpy")
def _split_levels(total, scale, bits, active, codes, residual, scratch):
    """``codes`` (uint8) <- those of ``total``; ``residual`` <- the quantization error, 0 where not active."""
    zero, half, sign = _f32(0.0), _f32(1 << (bits - 1)), _u32(1 << (bits - 1))
    inverse = _f32(1.0) / scale if scale > zero else zero
    wide = scratch.view(np.uint32)
    for i in range(total.size):
        x = total[i]
        level = _level(x, inverse, half)
        value = _level_value(level, scale, half)
        residual[i] = x - value if x >= zero else x + value
        wide[i] = _u32(level | (_u32(0) if x >= zero else sign))
    if bits == 8:
        for i in range(total.size):
            codes[i] = np.uint8(wide[i])
    else:
        middle = total.size // 2
        low, high = wide[:middle], wide[middle:]
        for i in range(middle):
            codes[i] = np.uint8(_u32(low[i] | _u32(high[i] << _u32(4))))
    _zero_inactive(active, residual)


@compiled(nogil=True, error_model="numpy")
def _zero_inactive(active, values):
    """``values`` <- 0 where not active."""
    for w in range(active.size):
        mask = active[w]
        if mask != _u32(0xFFFFFFFF):
            for k in range(WORD):
                values[WORD * w + k] = values[WORD * w + k] if mask & _BIT[k] else _f32(0.0)


@compiled(nogil=True, error_model="numpy")
def _decode_levels(codes, scale, bits, out):
    """out (fp32[elements]) <- the decoded ``codes`` (uint8)."""
    half, sign, mask = _f32(1 << (bits - 1)), _u32(1 << (bits - 1)), _u32((1 << (bits - 1)) - 1)
    if bits == 8:
        for i in range(out.size):
            code = _u32(codes[i])
            value = _level_value(_u32(code & mask), scale, half)
            out[i] = value if code < sign else -value
    else:
        middle = out.size // 2
        low, high = out[:middle], out[middle:]
        for i in range(middle):
            code = _u32(_u32(codes[i]) & _u32(15))
            value = _level_value(_u32(code & mask), scale, half)
            low[i] = value if code < sign else -value
        for i in range(middle):
            code = _u32(_u32(codes[i]) >> _u32(4))
            value = _level_value(_u32(code & mask), scale, half)
            high[i] = value if code < sign else -value


@compiled(nogil=True, error_model="numpy")
def _quantize(total, bits, scaled, key_low, key_high, element, active, codes, residual, scratch):
    """Pack the block ``total`` (fp32, 0 where not active) to ``codes`` (uint32 words), and return the scale's bf16."""
    if bits > 1:
        scale = _largest_scale(total)
        _split_levels(total, _from_bf16(scale), bits, active, codes.view(np.uint8), residual, scratch)
        return scale
    if scaled:
        scale = _mean_scale(total, active, scratch)
        _split_signs(total, _from_bf16(scale), active, codes, residual)
        return scale
    _split_draws(total, key_low, key_high, element, active, codes, residual)
    return np.uint16(0)


def opened(part, scratch):
    """fp32[n]: ``part`` itself if it is fp32, else ``scratch``, for the n values of ``part`` (uint16: bits of bf16)."""


def read(part, tile):
    """tile (an opened ``part``) <- the values of ``part``, where they are not the same memory."""


def write(tile, part):
    """part <- tile, rounded to the nearest even bf16; tile <- part, so that what follows uses the values as stored."""


@overload(opened, inline="always")
def _typed_opened(part, scratch):
    if part.dtype == types.float32:
        return lambda part, scratch: part
    return lambda part, scratch: scratch[: part.size]


@overload(read, inline="always")
def _typed_read(part, tile):
    if part.dtype == types.float32:
        return lambda part, tile: None

    def widen(part, tile):
        bits = tile.view(np.uint32)
        for i in range(part.size):
            bits[i] = np.uint32(part[i]) << np.uint32(16)

    return widen


@overload(write, inline="always")
def _typed_write(tile, part):
    if part.dtype == types.float32:
        return lambda tile, part: None

    def narrow(tile, part):
        for i in range(part.size):
            part[i] = _to_bf16(tile[i])
        read(part, tile)

    return narrow


@compiled(nogil=True, error_model="numpy")
def _compress(
    first, last, value, error, new_error, rows, active, row_blocks, codes_at, first_block, bits, scaled, size, key
):
    """Pack the blocks [first, last) of value + error; ``new_error``, which may be ``value``, gets the new error.

    ``rows`` is uint32[num_rows, row words]; codes start at word ``codes_at`` of a row.
    """
    key_low, key_high = _u32(key), _u32(key >> np.uint64(32))
    scales, masks, words = rows.view(np.uint16), size // WORD, bits * size // WORD
    total, residual, other = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    for block in range(first, last):
        row, index = divmod(block - first_block, row_blocks)
        start, stop = block * size, (block + 1) * size
        mask = active[block * masks : (block + 1) * masks]
        given, before = opened(value[start:stop], residual), opened(error[start:stop], other)
        read(value[start:stop], given)
        read(error[start:stop], before)
        _add(given, before, mask, total)
        codes = rows[row, codes_at + index * words : codes_at + (index + 1) * words]
        own = opened(new_error[start:stop], residual)
        scale = _quantize(total, bits, scaled, key_low, key_high, start, mask, codes, own, other)
        write(own, new_error[start:stop])
        if scaled:
            scales[row, _FIRST_SCALE + index] = scale


@compiled(nogil=True, error_model="numpy")
def _reduce(first, last, rows, codes_at, first_block, bits, scaled, error, active, out, size, key):
    """For the blocks [first, last) of a row: the mean over the received rows, plus ``error``, packed to ``out``.

    ``rows`` (uint32[num_rows, row words]), ``error`` and ``out`` count blocks from the start of the row, ``active``
    from ``first_block`` before it.
    """
    key_low, key_high = _u32(key), _u32(key >> np.uint64(32))
    scales, out_scales = rows.view(np.uint16), out.view(np.uint16)
    masks, words, count = size // WORD, bits * size // WORD, _f32(rows.shape[0])
    total, mean, residual = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    for block in range(first, last):
        at = codes_at + block * words
        total[:] = _f32(0.0)
        for row in range(rows.shape[0]):
            scale = _from_bf16(scales[row, _FIRST_SCALE + block]) if scaled else _f32(1.0)
            if bits > 1:
                _decode_levels(rows[row, at : at + words].view(np.uint8), scale, bits, mean)
                for i in range(size):
                    total[i] = total[i] + mean[i]
            else:
                for w in range(words):
                    word = rows[row, at + w]
                    for k in range(WORD):
                        i = WORD * w + k
                        total[i] = total[i] + scale if word & _BIT[k] else total[i] - scale
        for i in range(size):
            total[i] = total[i] / count
        mask = active[(first_block + block) * masks : (first_block + block + 1) * masks]
        part = error[block * size : (block + 1) * size]
        own = opened(part, residual)
        read(part, own)
        _add(total, own, mask, mean)
        element = (first_block + block) * size
        scale = _quantize(mean, bits, scaled, key_low, key_high, element, mask, out[at : at + words], own, total)
        write(own, part)
        if scaled:
            out_scales[_FIRST_SCALE + block] = scale


@compiled(nogil=True, error_model="numpy")
def decode(first, last, start, out, rows, active, row_blocks, codes_at, first_block, bits, scaled, size):
    """Write the values of the blocks [first, last) to ``out``, whose first block is ``start``."""
    scales, masks, words = rows.view(np.uint16), size // WORD, bits * size // WORD
    for block in range(first, last):
        row, index = divmod(block - first_block, row_blocks)
        scale = _from_bf16(scales[row, _FIRST_SCALE + index]) if scaled else _f32(1.0)
        values = out[(block - start) * size : (block - start + 1) * size]
        codes = rows[row, codes_at + index * words : codes_at + (index + 1) * words]
        if bits > 1:
            _decode_levels(codes.view(np.uint8), scale, bits, values)
            _zero_inactive(active[block * masks : (block + 1) * masks], values)
        else:
            for w in range(words):
                word, mask = codes[w], active[block * masks + w]
                for k in range(WORD):
                    signed = scale if word & _BIT[k] else -scale
                    values[WORD * w + k] = signed if mask & _BIT[k] else _f32(0.0)


class BlockWorkers:
    """A fixed number of threads that share the blocks of a call.

    Plain threads, unlike numba's parallel loops, survive the fork of data-loading processes and do not contend with
    torch's OpenMP pool between two calls.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._pool = ThreadPoolExecutor(self.num_threads - 1, "megatron01-kernel") if self.num_threads > 1 else None

    def run(self, kernel: Callable[..., Any], first: int, last: int, *arguments: Any) -> None:
        """Call ``kernel(a, b, *arguments)`` on consecutive ranges [a, b) that cover [first, last)."""
        parts = min(self.num_threads, max(1, (last - first) // _MIN_BLOCKS_PER_THREAD))
        if self._pool is None or parts == 1:
            if last > first:
                kernel(first, last, *arguments)
            return
        bounds = [first + (last - first) * part // parts for part in range(parts + 1)]
        others = [self._pool.submit(kernel, a, b, *arguments) for a, b in pairwise(bounds[1:])]
        kernel(bounds[0], bounds[1], *arguments)
        for other in others:
            other.result()


_CHUNK = 1 << 11
"""Elements of a row handled at a time, so that they are in the cache when their words are summed."""


def _move(source, start, target, place, count):
    """target[place:][:count] <- source[start:][:count], of fp32 or bf16 (as uint16)."""


@overload(_move)
def _typed_move(source, start, target, place, count):
    widens, narrows = source.dtype == types.uint16, target.dtype == types.uint16

    def copy(source, start, target, place, count):
        given, out = source[start : start + count], target[place : place + count]
        for i in range(count):
            out[i] = given[i]

    def widen(source, start, target, place, count):
        given, out = source[start : start + count], target[place : place + count]
        for i in range(count):
            out[i] = _from_bf16(given[i])

    def narrow(source, start, target, place, count):
        given, out = source[start : start + count], target[place : place + count]
        for i in range(count):
            out[i] = _to_bf16(given[i])

    return copy if widens == narrows else widen if widens else narrow


def _widened(element):
    """fp32 of an element of fp32 or bf16 (as uint16)."""


@overload(_widened)
def _typed_widened(element):
    return (lambda element: element) if element == types.float32 else (lambda element: _from_bf16(element))


@compiled(nogil=True, error_model="numpy")
def _words_sum(elements, start, count):
    """uint32: the sum of the words that hold ``count`` elements, an even number of those of 16 bits."""
    words, total = elements[start : start + count].view(np.uint32), _u32(0)
    for i in range(words.size):
        total = _u32(total + words[i])
    return total


@compiled(nogil=True, error_model="numpy")
def _copy_rows(first, last, rows, header, length, values, fills, sums):
    """Chunks [first, last) of rows <- ``values``, or with ``fills`` False the other way round.

    ``rows`` are ``header`` and ``length`` elements each, all in one array; ``sums`` (uint32[num_rows, chunks of a row])
    <- the sums of their words, but for the headers.
    """
    for chunk in range(first, last):
        row, index = divmod(chunk, sums.shape[1])
        begin = index * _CHUNK
        end = min(begin + _CHUNK, length)
        start, place = row * length + begin, row * (header + length) + header + begin
        count = min(end - begin, values.size - start)
        if count > 0:
            if fills:
                _move(values, start, rows, place, count)
            else:
                _move(rows, place, values, start, count)
        sums[row, index] = _words_sum(rows, place, end - begin)


@compiled(nogil=True, error_model="numpy")
def _average_rows(first, last, rows, header, length, factors, out, out_header, out_length, limit, sums, out_sums):
    """Chunks [first, last) of ``out`` <- the mean of ``rows``, each times its factor (fp32[num_rows]).

    Rows are as above, those of ``out`` as well; what lies behind ``limit`` elements of them is not written. ``sums``
    (uint32[num_rows, chunks of out]) and ``out_sums`` (uint32[rows of out, chunks of one]) <- the sums of words.
    """
    total, num_rows = np.empty(_CHUNK, np.float32), factors.size
    for chunk in range(first, last):
        result, index = divmod(chunk, out_sums.shape[1])
        begin = index * _CHUNK
        end = min(begin + _CHUNK, out_length)
        start, count = result * out_length + begin, end - begin
        total[:] = _f32(0.0)
        for row in range(num_rows):
            place = row * (header + length) + header + start
            given, factor = rows[place : place + count], factors[row]
            for i in range(count):
                total[i] = total[i] + _widened(given[i]) * factor
            sums[row, chunk] = _words_sum(rows, place, count)
        for i in range(count):
            total[i] = total[i] / _f32(num_rows)
        place, written = result * (out_header + out_length) + out_header + begin, min(count, limit - start)
        if written > 0:
            _move(total, 0, out, place, written)
        out_sums[result, index] = _words_sum(out, place, written) if out_header > 0 else _u32(0)


class CPURows(ReferenceRows):
    """``megatron01.comm.kernels.RowKernels`` by compiled kernels over CPU tensors; fp16 uses torch operations."""

    def __init__(self, num_threads: int) -> None:
        self._workers = BlockWorkers(num_threads)

    def finish_rows(
        self,
        rows: torch.Tensor,
        header: Header,
        values: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if values is not None and torch.float16 in (values.dtype, dtype):
            super().finish_rows(rows, header, values, dtype)
            return
        sums = None if values is None else self._copy(rows, values, dtype, fills=True)
        headers = headers_of(rows).numpy()
        headers[:, STATUS_WORD], headers[:, INVERSE_SCALE_WORD], headers[:, SQUARE_SUM_WORD] = header
        if sums is None:
            seal(rows)
        else:
            _set_checksums(rows, sums)

    def mean_rows(
        self, rows: torch.Tensor, out: torch.Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if dtype == torch.float16:
            return super().mean_rows(rows, out, dtype)
        header = common_header(headers_of(rows))
        elements, header_length, length = _elements(rows, dtype)
        factors, results, into_rows = np.ones(len(rows), np.float32), 1, out.dtype == torch.uint8
        if into_rows:
            factors = (headers_of(rows)[:, INVERSE_SCALE_WORD] / header[INVERSE_SCALE_WORD]).numpy()
            results = len(out)
        to, to_header, to_length = _elements(out, dtype) if into_rows else (as_array(out), 0, length)
        limit = length if into_rows else out.numel()
        chunks = -(-to_length // _CHUNK)
        sums, out_sums = np.empty((len(rows), results * chunks), np.uint32), np.empty((results, chunks), np.uint32)
        self._workers.run(
            _average_rows,
            0,
            results * chunks,
            elements,
            header_length,
            length,
            factors,
            to,
            to_header,
            to_length,
            limit,
            sums,
            out_sums,
        )
        if into_rows:
            headers_of(out).copy_(header)
            _set_checksums(out, out_sums)
        return header, _damages(rows, sums)

    def read_rows(self, rows: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if torch.float16 in (out.dtype, dtype):
            return super().read_rows(rows, out, dtype)
        return _damages(rows, self._copy(rows, out, dtype, fills=False))

    def _copy(self, rows: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, *, fills: bool) -> np.ndarray:
        """Between rows and ``values``; returns sums of words as ``_copy_rows``."""
        elements, header, length = _elements(rows, dtype)
        sums = np.empty((len(rows), -(-length // _CHUNK)), np.uint32)
        self._workers.run(_copy_rows, 0, sums.size, elements, header, length, as_array(values), fills, sums)
        return sums


def _elements(rows: torch.Tensor, dtype: torch.dtype) -> tuple[np.ndarray, int, int]:
    """Rows as one array of elements, the elements of a header, and those of a row behind it."""
    header = HEADER_BYTES // dtype.itemsize
    return as_array(rows.view(-1).view(dtype)), header, rows.size(1) // dtype.itemsize - header


def _set_checksums(rows: torch.Tensor, sums: np.ndarray) -> None:
    """Write checksums, of rows whose content has the sums ``sums`` (uint32[num_rows, parts])."""
    headers = headers_of(rows).numpy().view(np.uint32)
    headers[:, CHECKSUM_WORD] = 0
    headers[:, CHECKSUM_WORD] = headers.sum(1, dtype=np.uint32) + sums.sum(1, dtype=np.uint32)


def _damages(rows: torch.Tensor, sums: np.ndarray) -> torch.Tensor:
    """int32[num_rows] as ``payload.damages``."""
    headers = headers_of(rows).numpy().view(np.uint32)
    expected = headers[:, CHECKSUM_WORD] * _u32(2) - headers.sum(1, dtype=np.uint32)
    return torch.from_numpy((sums.sum(1, dtype=np.uint32) - expected).view(np.int32))


class CPUCodec(CPURows):
    """``megatron01.comm.kernels.Codec`` by compiled kernels over CPU tensors."""

    def __init__(self, block_size: int, quantizer: Quantizer, num_threads: int) -> None:
        super().__init__(num_threads)
        self.format = PackedFormat.of(quantizer, block_size)

    def compress(
        self,
        first: int,
        last: int,
        value: torch.Tensor,
        error: torch.Tensor,
        packed: Packed,
        key: int,
        *,
        new_error: torch.Tensor | None = None,
        header: Header | None = None,
    ) -> None:
        self._workers.run(
            _compress,
            first,
            last,
            as_array(value),
            as_array(error),
            as_array(value if new_error is None else new_error),
            *packed.arguments,
            packed.format.block_size,
            np.uint64(key),
        )
        if header is not None:
            self.finish_rows(packed.rows, header)

    def reduce(self, received: Packed, error: torch.Tensor, out: Packed, row: int, key: int) -> None:
        form = out.format
        rows, active = out.arrays
        self._workers.run(
            _reduce,
            0,
            error.numel() // form.block_size,
            received.arrays[0],
            out.codes_offset // 4,
            out.first_block + row * out.row_blocks,
            form.bits,
            form.scaled,
            as_array(error),
            active,
            rows[row],
            form.block_size,
            np.uint64(key),
        )
        seal(out.rows[row : row + 1])

    def decode(self, first: int, last: int, packed: Packed, out: torch.Tensor) -> None:
        self._workers.run(
            decode,
            first,
            last,
            first,
            out.numpy(),
            *packed.arguments,
            packed.format.block_size,
        )


def as_array(buffer: torch.Tensor) -> np.ndarray:
    """A view of the buffer for numba: float32[n], or uint16[n] for bf16."""
    return buffer.numpy() if buffer.dtype is torch.float32 else buffer.view(torch.int16).numpy().view(np.uint16)
