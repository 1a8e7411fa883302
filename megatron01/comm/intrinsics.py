"""What numba lacks for kernels on packed signs and 16-bit floats: raw addresses, sign masks, and half conversion.

Each function is a few lines of portable LLVM IR on vectors of 32 floats. LLVM turns a comparison of 32 floats that is
reinterpreted as one 32-bit word into two mask instructions with AVX-512, a few with AVX2 or NEON. Bit k of a word
belongs to element k (least significant bit first); a set bit means that the element is >= 0, so both zeros are +1.

Compiled kernels are cached per source file, with what they call compiled in: after a change here, touch the files of
the kernels that use it (``cpu.py``, ``update_cpu.py``) or clear their ``__pycache__``.
"""

# An intrinsic's first parameter, the typing context, is numba's to fill in.
# mypy: disable-error-code="call-arg"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

WORD = 32
"""Elements whose signs share one word."""

_FLOAT = ir.FloatType()
_LANES = ir.VectorType(_FLOAT, WORD)
_BITS = ir.VectorType(ir.IntType(1), WORD)
_WORD = ir.IntType(WORD)


def _lanes_pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _LANES.as_pointer())


def _signed_scales(builder: Any, word: Any, scale: Any) -> Any:
    """The vector +scale where the word's bit is set and -scale elsewhere."""
    bits = builder.bitcast(word, _BITS)
    first = builder.insert_element(ir.Constant(_LANES, ir.Undefined), scale, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), WORD), [0] * WORD)
    positive = builder.shuffle_vector(first, ir.Constant(_LANES, ir.Undefined), mask)
    negative = builder.fneg(positive)
    return builder.select(bits, positive, negative)


@intrinsic
def _void_pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def sign_word(typingctx: Any, address: Any) -> Any:
    """uint32 of the signs of the 32 fp32 values at ``address`` (int64)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = builder.load(_lanes_pointer(builder, arguments[0]), align=4)
        return builder.bitcast(builder.fcmp_ordered(">=", values, ir.Constant(_LANES, [0.0] * WORD)), _WORD)

    return types.uint32(types.int64), codegen


@intrinsic
def store_signs(typingctx: Any, word: Any, scale: Any, address: Any) -> Any:
    """Write +-scale (fp32) for each bit of ``word`` to the 32 fp32 values at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, scale, address = arguments
        builder.store(_signed_scales(builder, word, scale), _lanes_pointer(builder, address), align=4)
        return context.get_dummy_value()

    return types.void(types.uint32, types.float32, types.int64), codegen


@intrinsic
def add_signs(typingctx: Any, word: Any, scale: Any, address: Any) -> Any:
    """Add +-scale (fp32) for each bit of ``word`` to the 32 fp32 values at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, scale, address = arguments
        pointer = _lanes_pointer(builder, address)
        total = builder.fadd(builder.load(pointer, align=4), _signed_scales(builder, word, scale))
        builder.store(total, pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.uint32, types.float32, types.int64), codegen


@intrinsic
def _half_to_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), _FLOAT)

    return types.float32(types.uint16), codegen


@intrinsic
def _float_to_half(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _float_bits(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _WORD)

    return types.uint32(types.float32), codegen


@intrinsic
def _bits_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.uint32), codegen


FP32, BF16, FP16 = 0, 1, 2
"""Codes of the element types that ``load_elements`` and ``store_elements`` read and write."""

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
def tree_sum(values: np.ndarray) -> float:
    """Sum of a power of two of fp32 values by halving; overwrites them.

    The order of additions is fixed (upper half onto lower half, again and again), so every backend gets the same bits.
    """
    half = values.size // 2
    while half > 0:
        for i in range(half):
            values[i] += values[i + half]
        half //= 2
    return values[0]
