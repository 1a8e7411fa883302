"""The 1-bit codec on CPUs: one compiled pass per phase, each block handled while it is in the cache.

The kernels do what ``megatron01.comm.kernels.specification`` does with torch operations, in the same order of fp32
operations, so both give the same bits. Buffers are passed as addresses (int64). Those in bf16 are widened block by
block, in the cache. What numba lacks (raw addresses, prefetching, sums in a fixed order, 16-bit floats) is written in
portable LLVM IR, on vectors of 32 fp32 values: LLVM turns a comparison of 32 floats that is reinterpreted as one 32-bit
word into two mask instructions with AVX-512, a few with AVX2 or NEON. Bit k of a word belongs to element k.

Kernels release the interpreter lock and treat every block on its own, so the split over threads has no influence on the
result. Plain threads, unlike numba's parallel loops, survive the fork of data-loading processes and do not contend with
torch's OpenMP pool between two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from megatron01.comm.payload import HEADER_BYTES, SCALE_BYTES, WORD, Packed, Quantizer, packed_row_blocks, words_offset
from megatron01.utils.compilation import compiled

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
LANES = ir.VectorType(FLOAT, WORD)
INT_LANES = ir.VectorType(INT32, WORD)
BITS = ir.VectorType(ir.IntType(1), WORD)
ZEROS = ir.Constant(LANES, [0.0] * WORD)


def load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, LANES.as_pointer()), align=4)


def store(builder: Any, lanes: Any, address: Any) -> None:
    builder.store(lanes, builder.inttoptr(address, LANES.as_pointer()), align=4)


def splat(builder: Any, scalar: Any) -> Any:
    """The vector with ``scalar`` in all lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, WORD), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INT_LANES, [0] * WORD))


def signed(builder: Any, bits: Any, scale: Any) -> Any:
    """The vector +scale where the bit is set and -scale elsewhere."""
    positive = splat(builder, scale)
    return builder.select(bits, positive, builder.fneg(positive))


def keep_live(builder: Any, word: Any, lanes: Any) -> Any:
    """``lanes`` where the word's bit is set and 0 elsewhere."""
    return builder.select(builder.bitcast(word, BITS), lanes, ZEROS)


def magnitudes(builder: Any, lanes: Any) -> Any:
    """|lanes|"""
    without_sign = ir.Constant(INT_LANES, [0x7FFFFFFF] * WORD)
    return builder.bitcast(builder.and_(builder.bitcast(lanes, INT_LANES), without_sign), LANES)


CACHE_LINE = 64  # bytes


@intrinsic
def _void_pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


def _magnitude_sum(count: int) -> Any:
    """An intrinsic that writes to ``out`` the tree sum of ``count`` vectors of |value|, ``stride`` bytes apart."""

    @intrinsic
    def store_magnitude_sum(typingctx: Any, address: Any, stride: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, stride, out = arguments

            def tree(first: int, step: int) -> Any:
                """Sum of the vectors first, first + step, ...: upper half onto lower half, as ``tree_sum`` does."""
                if step < count:
                    return builder.fadd(tree(first, 2 * step), tree(first + step, 2 * step))
                at = builder.add(address, builder.mul(stride, ir.Constant(INT64, first)))
                return magnitudes(builder, load(builder, at))

            store(builder, tree(0, 1), out)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return store_magnitude_sum


_store_magnitudes = _magnitude_sum(1)
_store_sum_of_8_magnitudes = _magnitude_sum(8)


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the values at ``address``, which may lie outside any buffer, to be brought into the cache."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
        for line in range(0, 4 * WORD, CACHE_LINE):
            at = builder.inttoptr(builder.add(arguments[0], ir.Constant(INT64, line)), pointer)
            # for reading, into all levels, data
            builder.call(function, [at, *(ir.Constant(INT32, flag) for flag in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def store_live_signs(typingctx: Any, active: Any, word: Any, scale: Any, address: Any) -> Any:
    """Write +-scale (fp32) for each bit of ``word`` to the values at ``address``, 0 where not active."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        active, word, scale, address = arguments
        store(builder, keep_live(builder, active, signed(builder, builder.bitcast(word, BITS), scale)), address)
        return context.get_dummy_value()

    return types.void(types.uint32, types.uint32, types.float32, types.int64), codegen


@intrinsic
def _add_lanes(typingctx: Any, address: Any, other: Any) -> Any:
    """Add the values at ``other`` to those at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, other = arguments
        store(builder, builder.fadd(load(builder, address), load(builder, other)), address)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _fold_lanes(typingctx: Any, address: Any) -> Any:
    """Sum of the values at ``address``: upper half onto lower half, again and again."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, width = load(builder, arguments[0]), WORD
        while width > 1:
            width //= 2

            def part(start: int, lanes: Any = lanes, width: int = width) -> Any:
                places = ir.Constant(ir.VectorType(INT32, width), list(range(start, start + width)))
                return builder.shuffle_vector(lanes, ir.Constant(lanes.type, ir.Undefined), places)

            lanes = builder.fadd(part(0), part(width))
        return builder.extract_element(lanes, ir.Constant(INT32, 0))

    return types.float32(types.int64), codegen


@intrinsic
def _half_to_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), FLOAT)

    return types.float32(types.uint16), codegen


@intrinsic
def _float_to_half(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _float_bits(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], INT32)

    return types.uint32(types.float32), codegen


@intrinsic
def _bits_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.uint32), codegen


FP32, BF16, FP16 = 0, 1, 2
"""Codes of the element types that ``load_elements`` and ``store_elements`` read and write."""

CODES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}

ELEMENT_SIZE = (4, 2, 2)
"""Bytes of one element, by code."""


@compiled(nogil=True, error_model="numpy", inline="never")
def load_elements(address: int, code: int, length: int, out: np.ndarray) -> None:
    """Convert ``length`` elements of type ``code`` at ``address`` to fp32 in ``out`` and fill the rest of it with 0.

    Address 0 stands for a missing tensor and reads as zeros.
    """
    if address == 0:
        length = 0
    elif code == FP32:
        floats = carray(_void_pointer(address), (length,), dtype=np.float32)
        for i in range(length):
            out[i] = floats[i]
    elif code == BF16:
        words = carray(_void_pointer(address), (length,), dtype=np.uint16)
        for i in range(length):
            out[i] = _bits_float(np.uint32(words[i]) << np.uint32(16))
    else:
        words = carray(_void_pointer(address), (length,), dtype=np.uint16)
        for i in range(length):
            out[i] = _half_to_float(words[i])
    for i in range(length, out.size):
        out[i] = np.float32(0.0)


@compiled(nogil=True, error_model="numpy", inline="never")
def store_elements(address: int, code: int, length: int, values: np.ndarray) -> None:
    """Write ``length`` fp32 ``values`` at ``address`` as elements of type ``code``, rounding to nearest even."""
    if address == 0:
        return
    if code == FP32:
        floats = carray(_void_pointer(address), (length,), dtype=np.float32)
        for i in range(length):
            floats[i] = values[i]
    elif code == BF16:
        words = carray(_void_pointer(address), (length,), dtype=np.uint16)
        for i in range(length):
            bits = _float_bits(values[i])
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            # rounding could carry a NaN's payload into the sign or into infinity
            words[i] = np.uint16(np.uint32(0x7FC0) if nan else rounded)
    else:
        words = carray(_void_pointer(address), (length,), dtype=np.uint16)
        for i in range(length):
            words[i] = _float_to_half(values[i])


@compiled(nogil=True, error_model="numpy", inline="always")
def float_array(address: int, length: int) -> np.ndarray:
    """The ``length`` fp32 values at ``address`` as an array."""
    return carray(_void_pointer(address), (length,), dtype=np.float32)


@compiled(nogil=True, error_model="numpy", inline="always")
def word_array(address: int, length: int) -> np.ndarray:
    """The ``length`` uint32 words at ``address`` as an array."""
    return carray(_void_pointer(address), (length,), dtype=np.uint32)


@compiled(nogil=True, error_model="numpy")
def _tree_sum_at(address: int, num_words: int) -> float:
    half = num_words // 2
    while half > 0:
        for i in range(half):
            _add_lanes(address + 4 * WORD * i, address + 4 * WORD * (i + half))
        half //= 2
    return _fold_lanes(address)


@compiled(nogil=True, error_model="numpy")
def tree_sum(values: np.ndarray) -> float:
    """Sum of a power of two, at least 32, of fp32 values by halving; overwrites them.

    The order of additions is fixed (upper half onto lower half, again and again), so every backend gets the same bits.
    """
    return _tree_sum_at(values.ctypes.data, values.size // WORD)


@compiled(nogil=True, error_model="numpy")
def magnitude_tree_sum(address: int, num_words: int, scratch: np.ndarray) -> float:
    """``tree_sum`` of |value| of the 32 * num_words values at ``address``; ``scratch`` is fp32[32 * num_words]."""
    sums = scratch.ctypes.data
    if num_words < 8:
        for w in range(num_words):
            _store_magnitudes(address + 4 * WORD * w, 0, sums + 4 * WORD * w)
        return _tree_sum_at(sums, num_words)
    # three halvings at once, in registers
    eighth = num_words // 8
    for w in range(eighth):
        _store_sum_of_8_magnitudes(address + 4 * WORD * w, 4 * WORD * eighth, sums + 4 * WORD * w)
    return _tree_sum_at(sums, eighth)


@intrinsic
def add_live(typingctx: Any, active: Any, value: Any, error: Any, out: Any) -> Any:
    """``out`` <- value + error where active, 0 elsewhere."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        active, value, error, out = arguments
        total = builder.fadd(load(builder, value), load(builder, error))
        store(builder, keep_live(builder, active, total), out)
        return context.get_dummy_value()

    return types.void(types.uint32, *[types.int64] * 3), codegen


def _split(builder: Any, active: Any, bits: Any, total: Any, scale: Any, address: Any) -> Any:
    """Write what ``bits`` lose of ``total``, and return them as a word."""
    lost = builder.fsub(total, signed(builder, bits, scale))
    store(builder, keep_live(builder, active, lost), address)
    return builder.bitcast(bits, INT32)


@intrinsic
def split_signs(typingctx: Any, active: Any, scale: Any, address: Any) -> Any:
    """The word of signs of the values at ``address``, which become value - (+-scale), 0 where not active."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        active, scale, address = arguments
        total = load(builder, address)
        return _split(builder, active, builder.fcmp_ordered(">=", total, ZEROS), total, scale, address)

    return types.uint32(types.uint32, types.float32, types.int64), codegen


def _mix(builder: Any, x: Any) -> Any:
    """The permutation of 32-bit integers that is known as lowbias32 (C. Wellons, "Prospecting for Hash Functions")."""

    def constant(number: int) -> Any:
        return ir.Constant(INT_LANES, [number] * WORD)

    x = builder.xor(x, builder.lshr(x, constant(16)))
    x = builder.mul(x, constant(0x7FEB352D))
    x = builder.xor(x, builder.lshr(x, constant(15)))
    x = builder.mul(x, constant(0x846CA68B))
    return builder.xor(x, builder.lshr(x, constant(16)))


@intrinsic
def split_draws(typingctx: Any, active: Any, key_low: Any, key_high: Any, element: Any, address: Any) -> Any:
    """The word of value > r(key, element) for the values at ``address``, which become value - (+-1), or 0.

    r is uniform on the multiples of 2^-23 in [-1, 1). ``element`` (int64, a multiple of 32) is
    the number of the first one.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        active, key_low, key_high, element, address = arguments
        low = builder.add(splat(builder, builder.trunc(element, INT32)), ir.Constant(INT_LANES, list(range(WORD))))
        high = builder.trunc(builder.lshr(element, ir.Constant(INT64, 32)), INT32)
        mixed = _mix(builder, builder.xor(low, splat(builder, key_low)))
        mixed = _mix(builder, builder.xor(mixed, splat(builder, builder.add(key_high, high))))
        # 24 bits: exact in fp32, and so is the rest
        drawn = builder.uitofp(builder.lshr(mixed, ir.Constant(INT_LANES, [8] * WORD)), LANES)
        drawn = builder.fmul(drawn, ir.Constant(LANES, [2.0**-23] * WORD))
        drawn = builder.fsub(drawn, ir.Constant(LANES, [1.0] * WORD))
        total = load(builder, address)
        bits = builder.fcmp_ordered(">", total, drawn)
        return _split(builder, active, bits, total, ir.Constant(FLOAT, 1.0), address)

    return types.uint32(types.uint32, types.uint32, types.uint32, types.int64, types.int64), codegen


@intrinsic
def store_mean_signs(
    typingctx: Any, words: Any, words_stride: Any, scales: Any, scales_stride: Any, count: Any, address: Any
) -> Any:
    """Write the mean of ``count`` rows of +-scale to the values at ``address``, adding the rows in their order.

    The rows' words and scales lie ``words_stride`` and ``scales_stride`` bytes apart.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, words_stride, scales, scales_stride, count, address = arguments
        total = cgutils.alloca_once_value(builder, ZEROS)
        with cgutils.for_range(builder, count) as loop:
            word_at = builder.add(words, builder.mul(loop.index, words_stride))
            scale_at = builder.add(scales, builder.mul(loop.index, scales_stride))
            word = builder.load(builder.inttoptr(word_at, INT32.as_pointer()), align=4)
            scale = builder.load(builder.inttoptr(scale_at, FLOAT.as_pointer()), align=4)
            row = signed(builder, builder.bitcast(word, BITS), scale)
            builder.store(builder.fadd(builder.load(total), row), total)
        number = splat(builder, builder.sitofp(count, FLOAT))
        store(builder, builder.fdiv(builder.load(total), number), address)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@intrinsic
def count_bits(typingctx: Any, word: Any) -> Any:
    """int32 number of bits that are set in a word."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int32(types.uint32), codegen


_MIN_BLOCKS_PER_THREAD = 16


class BlockWorkers:
    """A fixed number of threads that share the blocks of a call."""

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


_PREFETCH_ELEMENTS = 2048
"""How far ahead of a pass its buffers are asked for; processors' own prefetchers stop at each page of 4 KiB."""


@compiled(nogil=True, error_model="numpy")
def _pack_block(value, error, out, active, words, num_words, scratch, random, key_low, key_high, element):
    """Pack value + error of one block, put what the packing loses to ``out``, and return the scale.

    ``value``, ``error`` and ``out`` are addresses of fp32[32 * num_words] and may be the same; ``active`` and ``words``
    those of num_words words. ``scratch`` is fp32[32 * num_words]. The block's first element has number ``element``.
    """
    live_words = word_array(active, num_words)
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


@compiled(nogil=True, error_model="numpy")
def _compress(
    first,
    last,
    value,
    error,
    code,
    size,
    active,
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
            active + 4 * block * num_words,
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


@compiled(nogil=True, error_model="numpy")
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
    active,
    out,
    block_size,
    key_low,
    key_high,
):
    """For the blocks [first, last) of a row: mean over the received rows, plus error, packed again.

    Rows, ``error`` and ``out`` count blocks from the start of the row, ``active`` from ``first_block`` before it.
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
            active + 4 * (first_block + block) * num_words,
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


@compiled(nogil=True, error_model="numpy")
def _decode(first, last, rows, row_bytes, row_blocks, words_at, first_block, scaled, active, start, out, block_size):
    """Write what the blocks [first, last) say to ``out``, whose first block is ``start``."""
    num_words = block_size // WORD
    for block in range(first, last):
        row, index = divmod(block - first_block, row_blocks)
        row = rows + row * row_bytes
        scale = float_array(row + HEADER_BYTES, row_blocks)[index] if scaled else np.float32(1.0)
        words = word_array(row + words_at + 4 * index * num_words, num_words)
        live_words = word_array(active + 4 * block * num_words, num_words)
        at = out + 4 * (block - start) * block_size
        for w in range(num_words):
            store_live_signs(live_words[w], words[w], scale, at + 4 * WORD * w)


class CPUCodec:
    """``megatron01.comm.kernels.Codec`` by compiled kernels over CPU tensors."""

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
            packed.active.data_ptr(),
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
        active: torch.Tensor,
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
            active.data_ptr(),
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
            packed.active.data_ptr(),
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
