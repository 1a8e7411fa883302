"""The steps of the 1-bit codec on 32 elements at a time, as functions that compiled kernels can call.

Addresses are int64 and point to 32 fp32 values; a *live* word masks those that take part. See ``intrinsics.py`` on
what to do about cached kernels after a change here.
"""

# An intrinsic's first parameter, the typing context, is numba's to fill in.
# mypy: disable-error-code="call-arg"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megatron01.comm.lanes import (
    BITS,
    FLOAT,
    INT32,
    INT64,
    INT_LANES,
    LANES,
    ZEROS,
    keep_live,
    load,
    signed,
    splat,
    store,
)
from megatron01.comm.payload import WORD


@intrinsic
def add_live(typingctx: Any, live: Any, value: Any, error: Any, out: Any) -> Any:
    """``out`` <- value + error where live, 0 elsewhere."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        live, value, error, out = arguments
        total = builder.fadd(load(builder, value), load(builder, error))
        store(builder, keep_live(builder, live, total), out)
        return context.get_dummy_value()

    return types.void(types.uint32, *[types.int64] * 3), codegen


def _split(builder: Any, live: Any, bits: Any, total: Any, scale: Any, address: Any) -> Any:
    """Write what ``bits`` lose of ``total``, and return them as a word."""
    lost = builder.fsub(total, signed(builder, bits, scale))
    store(builder, keep_live(builder, live, lost), address)
    return builder.bitcast(bits, INT32)


@intrinsic
def split_signs(typingctx: Any, live: Any, scale: Any, address: Any) -> Any:
    """The word of signs of the values at ``address``, which become value - (+-scale), 0 where not live."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        live, scale, address = arguments
        total = load(builder, address)
        return _split(builder, live, builder.fcmp_ordered(">=", total, ZEROS), total, scale, address)

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
def split_draws(typingctx: Any, live: Any, key_low: Any, key_high: Any, element: Any, address: Any) -> Any:
    """The word of value > r(key, element) for the values at ``address``, which become value - (+-1), 0 where not live.

    r is uniform on the multiples of 2^-23 in [-1, 1). ``element`` (int64, a multiple of 32) is
    the number of the first one.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        live, key_low, key_high, element, address = arguments
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
        return _split(builder, live, bits, total, ir.Constant(FLOAT, 1.0), address)

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
