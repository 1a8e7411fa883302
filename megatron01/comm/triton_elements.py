"""Triton's way to the elements of flat buffers, whatever their type: kernels compute in fp32.

bf16 is read and written as 16-bit integers: rounding is then the same everywhere, in Triton's interpreter too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of element types."""


def as_elements(flat: torch.Tensor) -> torch.Tensor:
    """A flat buffer as kernels take it: bf16 as int16."""
    return flat.view(torch.int16) if flat.dtype is torch.bfloat16 else flat


@triton.jit
def to_bf16_bits(values):
    """uint16: fp32 rounded to nearest even; NaN is 0x7FC0, lest its payload be rounded into infinity."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = tl.add(bits, 0x7FFF + ((bits >> 16) & 1), sanitize_overflow=False) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def from_bf16_bits(words):
    """fp32 of what ``to_bf16_bits`` gave."""
    return (words.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_flat(flat, place, mask, CODE: tl.constexpr):
    """fp32: elements of a flat buffer of the type of ``CODE``; bf16 comes as int16."""
    if CODE == BF16:
        return from_bf16_bits(tl.load(flat + place, mask=mask, other=0).to(tl.uint16, bitcast=True))
    else:
        return tl.load(flat + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_flat(flat, place, mask, values, CODE: tl.constexpr):
    """Write fp32 values to a flat buffer of the type of ``CODE``; bf16 comes as int16."""
    if CODE == BF16:
        tl.store(flat + place, to_bf16_bits(values).to(tl.int16, bitcast=True), mask=mask)
    elif CODE == FP16:
        tl.store(flat + place, values.to(tl.float16), mask=mask)
    else:
        tl.store(flat + place, values, mask=mask)


@triton.jit
def as_stored(values, CODE: tl.constexpr):
    """fp32: what ``load_flat`` gives of values that ``store_flat`` has written, as bf16 or fp32."""
    if CODE == BF16:
        return from_bf16_bits(to_bf16_bits(values))
    else:
        return values
