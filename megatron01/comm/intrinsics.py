"""What numba lacks for the kernels: raw addresses, prefetching, sums in a fixed order, and 16-bit floats.

Each function is a few lines of portable LLVM IR, most on vectors of 32 floats. Addresses are int64.

Compiled kernels are cached per source file, with what they call compiled in: after a change here, touch the files of
the kernels that use it or clear their ``__pycache__``.
"""

# An intrinsic's first parameter, the typing context, is numba's to fill in.
# mypy: disable-error-code="call-arg"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from megatron01.comm.lanes import BITS, FLOAT, INT32, INT64, keep_live, load, magnitudes, signed, store
from megatron01.comm.payload import WORD

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
def store_live_signs(typingctx: Any, live: Any, word: Any, scale: Any, address: Any) -> Any:
    """Write +-scale (fp32) for each bit of ``word`` to the values at ``address``, 0 where not live."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        live, word, scale, address = arguments
        store(builder, keep_live(builder, live, signed(builder, builder.bitcast(word, BITS), scale)), address)
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


@njit(nogil=True, cache=True, error_model="numpy", inline="never")
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


@njit(nogil=True, cache=True, error_model="numpy", inline="never")
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


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def float_array(address: int, length: int) -> np.ndarray:
    """The ``length`` fp32 values at ``address`` as an array."""
    return carray(_void_pointer(address), (length,), dtype=np.float32)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def word_array(address: int, length: int) -> np.ndarray:
    """The ``length`` uint32 words at ``address`` as an array."""
    return carray(_void_pointer(address), (length,), dtype=np.uint32)


@njit(nogil=True, cache=True, error_model="numpy")
def _tree_sum_at(address: int, num_words: int) -> float:
    half = num_words // 2
    while half > 0:
        for i in range(half):
            _add_lanes(address + 4 * WORD * i, address + 4 * WORD * (i + half))
        half //= 2
    return _fold_lanes(address)


@njit(nogil=True, cache=True, error_model="numpy")
def tree_sum(values: np.ndarray) -> float:
    """Sum of a power of two, at least 32, of fp32 values by halving; overwrites them.

    The order of additions is fixed (upper half onto lower half, again and again), so every backend gets the same bits.
    """
    return _tree_sum_at(values.ctypes.data, values.size // WORD)


@njit(nogil=True, cache=True, error_model="numpy")
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
