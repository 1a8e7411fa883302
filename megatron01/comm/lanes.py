"""Pieces of LLVM IR on vectors of 32 fp32 values, from which the intrinsics of the kernels are put together.

LLVM turns a comparison of 32 floats that is reinterpreted as one 32-bit word into two mask instructions with AVX-512, a
few with AVX2 or NEON. Bit k of a word belongs to element k, the least significant bit first. Addresses are int64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from megatron01.comm.payload import WORD

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
