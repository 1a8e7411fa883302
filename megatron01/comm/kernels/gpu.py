"""The codec on GPUs: one Triton kernel per phase over all blocks of a call, without temporaries in memory.

The kernels do what ``megatron01.comm.kernels.specification`` does with torch operations, in the same order of fp32
operations, so both give the same bits. That is tested in Triton's interpreter on CPUs, and was on an H200
(``benchmarks/results/gpu.md``); that they compile for compute capability 8.0, 9.0 and 10.0 is tested too.

A program takes ``BLOCKS`` consecutive blocks, as tensors of the shape [BLOCKS, WORDS, 32]: block, sign word, bit. That
is one block where blocks are large; of small ones it takes several, so that no warp idles. Reductions are over axes of
length 2, so that their order is that of the specification whatever the layout of a tensor over threads. bf16 is read
and written as 16-bit integers: rounding is then the same everywhere, in Triton's interpreter too. Codes of 4 and 8 bits
are read and written in words, as [BLOCKS, codes in a byte, words, bytes]. Kernels over whole rows take chunks of
elements; each program adds its part of a checksum by an atomic, and the last one writes it.

Memory traffic per element is that of the compiled CPU kernels: compressing reads value and error, writes value, and
adds a bit each for the mask and the sign; reducing n rows reads n bits and a mask bit, and reads and writes the error.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

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
    Status,
)
from megatron01.errors import UserError

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the types of rows' elements."""


@triton.jit
def to_bf16_bits(values):
    """uint16: fp32 rounded to nearest even; NaN is 0x7FC0, as rounding its payload could give infinity."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = tl.add(bits, 0x7FFF + ((bits >> 16) & 1), sanitize_overflow=False) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def from_bf16_bits(words):
    """fp32 of what ``to_bf16_bits`` gave."""
    return (words.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_flat(flat, place, mask):
    """fp32: elements of a flat buffer of fp32, bf16 or fp16."""
    values = tl.load(flat + place, mask=mask, other=0.0)
    if flat.dtype.element_ty == tl.bfloat16:
        return from_bf16_bits(values.to(tl.uint16, bitcast=True))
    else:
        return values.to(tl.float32)


@triton.jit
def store_flat(flat, place, mask, values):
    """Write fp32 values to a flat buffer of fp32, bf16 or fp16."""
    if flat.dtype.element_ty == tl.bfloat16:
        stored = to_bf16_bits(values).to(tl.bfloat16, bitcast=True)
    else:
        stored = values.to(flat.dtype.element_ty)
    tl.store(flat + place, stored, mask=mask)


INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 when this module is imported)."""

_MAX_WARPS = 32
_LARGEST_BLOCK = 32 * 32 * _MAX_WARPS
"""Elements: 32 in each thread of a program, as a few such tensors fit its registers."""

WORD_BITS = tl.constexpr(WORD)
FIRST_SCALE = tl.constexpr(HEADER_BYTES // SCALE_BYTES)
HEADER_WORDS = tl.constexpr(HEADER_BYTES // 4)
STATUS = tl.constexpr(STATUS_WORD)
INVERSE_SCALE = tl.constexpr(INVERSE_SCALE_WORD)
CHECKSUM = tl.constexpr(CHECKSUM_WORD)
SQUARE_SUM = tl.constexpr(SQUARE_SUM_WORD)


def check_device(device: torch.device) -> None:
    """Check that ``device`` is a GPU, or a CPU in Triton's interpreter, which cannot access GPU memory.

    Raises:
        UserError: it is not.
    """
    if INTERPRETED and device.type != "cpu":
        raise UserError(
            f"TRITON_INTERPRET is set, which is for tests on CPUs, but parameters are on {device}; unset it"
        )
    if not INTERPRETED and device.type != "cuda":
        raise UserError(
            f"backend triton cannot run on {device}; expected parameters on a GPU: set the backend to auto "
            "(kernels are tested on CPUs with TRITON_INTERPRET=1)"
        )


_KEEPS: bool = not INTERPRETED and torch.version.hip is None  # on AMD's GPUs the size of a tensor counts as well
_KEPT: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels and their constants in order, by all that Triton specializes on."""


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device's current stream; ``constants`` are all of its constants, and launch options.

    There is no FMA contraction, and denormals are kept: every operation rounds as on CPUs. To find a compiled kernel,
    Triton takes as long as to run it: so it is kept, and called directly. Triton's settings count as of its first run.
    """
    key: list[Any] = [kernel.fn, device, *constants, *constants.values(), *map(type, constants.values())]
    for argument in arguments:
        kind = type(argument)
        if kind is torch.Tensor:
            key += argument.dtype, argument.data_ptr() % 16
        else:
            key.append(argument >> 31 if kind is int else kind)  # from this follows its width
    keeps = _KEEPS and (device.type != "cuda" or device.index == torch.cuda.current_device())
    if keeps and (found := _KEPT.get(tuple(key))) is not None:
        compiled, values = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *values)
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        compiled = kernel[grid](*arguments, **constants, enable_fp_fusion=False, enable_reflect_ftz=False)
    if (
        keeps
        and hasattr(compiled, "__getitem__")
        and all(
            type(argument) in (torch.Tensor, float) or (type(argument) is int and name in kernel.do_not_specialize)
            for name, argument in zip(kernel.arg_names, arguments, strict=False)
        )
    ):
        _KEPT[tuple(key)] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def signed_word(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word: the type of a kernel's argument follows from its range."""
    return word - (1 << WORD) if word >> (WORD - 1) else word


@triton.jit
def block_numbers(first, BLOCKS: tl.constexpr):
    """int32[BLOCKS]: the blocks of this program, counted from ``first``."""
    return first + tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)


@triton.jit
def word_places(block, WORDS: tl.constexpr):
    """int64[BLOCKS, WORDS]: places of the words of blocks in a buffer of words."""
    return block.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]


@triton.jit
def element_places(block, WORDS: tl.constexpr):
    """int64[BLOCKS, WORDS, 32]: places of the elements of blocks in a buffer of elements."""
    within = tl.arange(0, WORDS)[None, :, None] * WORD_BITS + tl.arange(0, WORD_BITS)[None, None, :]
    return block.to(tl.int64)[:, None, None] * (WORDS * WORD_BITS) + within


@triton.jit
def pack_bits(bits):
    """int32[BLOCKS, WORDS]: bit k of a word is bits[.., .., k]."""
    return tl.sum(bits.to(tl.int32) << tl.arange(0, WORD_BITS)[None, None, :], axis=2)


@triton.jit
def unpack_bits(words):
    """bool[BLOCKS, WORDS, 32] of what ``pack_bits`` made."""
    return ((words[:, :, None] >> tl.arange(0, WORD_BITS)[None, None, :]) & 1) != 0


@triton.jit
def count_bits(bits):
    """int32[BLOCKS]: number of bits set in each block."""
    return tl.sum(tl.sum(bits.to(tl.int32), axis=2), axis=1)


@triton.jit
def halving_sums(values, BLOCKS: tl.constexpr, LENGTH: tl.constexpr):
    """[BLOCKS]: sums of ``LENGTH`` values of each block, the upper half added to the lower until one is left.

    Triton 3.6 adds up the wrong threads in one sum over an axis that reshapes have spread over threads unevenly; over
    pairs it is right.
    """
    values = tl.reshape(values, [BLOCKS, LENGTH])
    # a loop over a constant is unrolled: 2^20 is more than any block has
    for level in tl.static_range(20):
        if LENGTH >> level > 1:
            values = tl.sum(tl.reshape(values, [BLOCKS, 2, LENGTH >> (level + 1)]), axis=1)
    return tl.reshape(values, [BLOCKS])


@triton.jit
def mean_of(total, COUNT: tl.constexpr):
    """total / COUNT, rounded to nearest; a product with a power of two has the same bits, and takes one instruction."""
    return total * (1.0 / COUNT) if COUNT & (COUNT - 1) == 0 else tl.div_rn(total, tl.cast(COUNT, tl.float32))


@triton.jit
def signed(bits, scale):
    """fp32[BLOCKS, WORDS, 32]: the block's scale (fp32[BLOCKS]) where the bit is set, and its negative elsewhere."""
    scale = scale[:, None, None]
    # Triton's minus is 0 - x, which would make -0 of no 0
    return tl.where(bits, scale, scale * -1.0)


@triton.jit
def signed_by(words, scale):
    """``signed`` of the bits in ``words`` (int32[BLOCKS, WORDS]): a bit that is not set flips the sign of the scale."""
    to_sign = (tl.arange(0, WORD_BITS) ^ 31)[None, None, :]  # bit k moves up by 31 - k
    flips = ((words ^ -1)[:, :, None] << to_sign) & -0x80000000
    return (scale.to(tl.int32, bitcast=True)[:, None, None] ^ flips).to(tl.float32, bitcast=True)


@triton.jit
def level_squares(mantissas, BITS: tl.constexpr):
    """fp32: squares of the middles of levels, of which ``mantissas`` (int32) have the bits at the top of a mantissa.

    Numbers in [1, 2) with these bits take fewer instructions than levels converted to fp32.
    """
    root = (mantissas | (0x3F800000 | (1 << (23 - BITS)))).to(tl.float32, bitcast=True) - 1.0
    return root * root


@triton.jit
def level_values(codes, scale, BITS: tl.constexpr):
    """fp32: codes (int32[BLOCKS, .., ..]) decoded with the scale fp32[BLOCKS]; bits above ``BITS`` may be anything."""
    top = codes << (32 - BITS)
    flips = top & -0x80000000
    signed_scale = (scale.to(tl.int32, bitcast=True)[:, None, None] ^ flips).to(tl.float32, bitcast=True)
    return signed_scale * level_squares((top & 0x7FFFFFFF) >> 8, BITS)


@triton.jit
def level_codes(total, scale, BITS: tl.constexpr):
    """[BLOCKS, WORDS, 32]: the codes of ``total``, int32, and what they are decoded to, fp32."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    whole = tl.where(scale > 0.0, 1.0, 0.0)
    inverse = tl.div_rn(whole, tl.where(scale > 0.0, scale, 1.0))
    place = tl.sqrt_rn(tl.abs(total) * inverse[:, None, None]) * (HALF * 1.0)
    level = tl.where(place < HALF - 1.0, place, HALF - 1.0).to(tl.int32)
    size = scale[:, None, None] * level_squares(level << (24 - BITS), BITS)
    positive = total >= 0.0
    return tl.where(positive, level, level + HALF), tl.where(positive, size, size * -1.0)


@triton.jit
def scales_of(rows):
    """Pointer to uint16: the first row's scales."""
    return rows.to(tl.pointer_type(tl.uint16)) + FIRST_SCALE


@triton.jit
def code_places(row_start, codes_at, index, BITS: tl.constexpr, WORDS: tl.constexpr):
    """int64[BLOCKS, WORDS * BITS]: places of the words of codes."""
    return ((row_start + codes_at) // 4)[:, None] + word_places(index, WORDS * BITS)


@triton.jit
def code_shifts(BITS: tl.constexpr):
    """int32[1, codes in a byte, 1, 4]: how far up the codes are in each byte of a word."""
    return (tl.arange(0, 8 // BITS) * BITS)[None, :, None, None] + (tl.arange(0, 4) * 8)[None, None, None, :]


@triton.jit
def load_codes(rows, row_start, index, inside, codes_at, BITS: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr):
    """int32[BLOCKS, WORDS * BITS], the words of packed blocks, and fp32[BLOCKS], their scales.

    Block ``index`` (int32[BLOCKS]) of the row that starts at byte ``row_start`` (int64[BLOCKS]), and whose codes start
    ``codes_at`` bytes later. ``rows`` are int32, as in all kernels.
    """
    words = tl.load(rows + code_places(row_start, codes_at, index, BITS, WORDS), mask=inside[:, None], other=0)
    scale = tl.full(index.shape, 1.0, tl.float32)
    if SCALED:
        scale = from_bf16_bits(tl.load(scales_of(rows) + row_start // 2 + index, mask=inside, other=0))
    return words, scale


@triton.jit
def code_values(words, scale, BITS: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    """fp32[BLOCKS, WORDS, 32]: what ``load_codes`` gave, decoded."""
    if BITS == 1:
        return signed_by(words, scale)
    else:
        codes = words[:, None, :, None] >> code_shifts(BITS)
        return level_values(tl.reshape(codes, [BLOCKS, WORDS, WORD_BITS]), scale, BITS)


@triton.jit
def load_active(active, block, inside, WORDS: tl.constexpr):
    """bool[BLOCKS, WORDS, 32]: elements of blocks that take part in an exchange."""
    return unpack_bits(tl.load(active + word_places(block, WORDS), mask=inside[:, None], other=0))


_ELEMENTS_PER_WARP = 1024
"""A block of the usual size fits one warp: its sum then takes no shared memory and no barrier."""

_ELEMENTS_PER_PROGRAM = 1 << 14 if INTERPRETED else 1024
_BYTES_PER_PROGRAM = 1 << 15 if INTERPRETED else 1 << 13
"""Bytes per program of kernels over whole rows."""
_MAX_ROWS = 1 << 12
"""Upper limit of the processes in an exchange."""


@triton.jit
def _mix(x):
    """The permutation of uint32 known as lowbias32 (C. Wellons, "Prospecting for Hash Functions")."""
    x = x ^ (x >> 16)
    x = tl.mul(x, 0x7FEB352D, sanitize_overflow=False)
    x = x ^ (x >> 15)
    x = tl.mul(x, 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def uniform_draws(key_low, key_high, element):
    """fp32, uniform on the multiples of 2^-23 in [-1, 1): a hash of a key (two int32) and int64 element numbers."""
    low = _mix((element & 0xFFFFFFFF).to(tl.uint32) ^ key_low.to(tl.uint32, bitcast=True))
    high = tl.add((element >> 32).to(tl.uint32), key_high.to(tl.uint32, bitcast=True), sanitize_overflow=False)
    # 24 bits: exact in fp32, and so is the rest
    return (_mix(low ^ high) >> 8).to(tl.float32) * (2.0**-23) - 1.0


@triton.jit
def add_words(a, b):
    """int32: a + b modulo 2^32."""
    return tl.add(a, b, sanitize_overflow=False)


@triton.jit
def add_part(sums, part, parts, mask=None):
    """Add an int32 ``part`` to a sum modulo 2^32 of ``parts`` parts; returns whether it is the last, and the new sum.

    ``sums`` points to int64 of zeros, and is left so: the upper half is the sum, the lower one counts its parts. One
    atomic does both, so no fence is needed, which would wait for all that the program has written.
    """
    before = tl.atomic_add(sums, (part.to(tl.int64) << 32) + 1, mask=mask, sem="relaxed")
    is_last = (before & 0xFFFFFFFF) == parts - 1
    if mask is not None:
        is_last = is_last & mask
    tl.store(sums, tl.zeros_like(before), mask=is_last)
    return is_last, add_words((before >> 32).to(tl.int32), part)


@triton.jit
def header_sum(row, mask=None):
    """int32: the sum of the words of a row's header, but for the checksum."""
    scales = add_words(tl.load(row + STATUS, mask=mask), tl.load(row + INVERSE_SCALE, mask=mask))
    return add_words(scales, tl.load(row + SQUARE_SUM, mask=mask))


@triton.jit
def write_header(row, status, inverse_scale, square_sum, content, mask=None):
    """Write header and checksum of a row, or of several, whose words behind the header have the sum ``content``."""
    first, second = status.to(tl.int32, bitcast=True), inverse_scale.to(tl.int32, bitcast=True)
    fourth = square_sum.to(tl.int32, bitcast=True)
    tl.store(row + STATUS, first, mask=mask)
    tl.store(row + INVERSE_SCALE, second, mask=mask)
    tl.store(row + SQUARE_SUM, fourth, mask=mask)
    tl.store(row + CHECKSUM, add_words(add_words(content, first), add_words(second, fourth)), mask=mask)


@triton.jit
def to_bits(values, CODE: tl.constexpr):
    """int32: fp32 values as the type of ``CODE`` has them; the upper half of 16 bits is 0."""
    if CODE == FP32:
        return values.to(tl.int32, bitcast=True)
    elif CODE == BF16:
        return to_bf16_bits(values).to(tl.int32)
    else:
        return values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def from_bits(bits, CODE: tl.constexpr):
    """fp32 of what ``to_bits`` gave."""
    if CODE == FP32:
        return bits.to(tl.float32, bitcast=True)
    elif CODE == BF16:
        return from_bf16_bits(bits)
    else:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def contents_of(row, CODE: tl.constexpr):
    """Pointer to int32 or int16 according to ``CODE``: the elements behind a row's header."""
    content = row + HEADER_WORDS
    return content if CODE == FP32 else content.to(tl.pointer_type(tl.int16))


@triton.jit
def load_bits(elements, place, mask, CODE: tl.constexpr):
    """int32: elements of rows, which are int32 or int16 according to ``CODE``, as ``to_bits`` gives them."""
    bits = tl.load(elements + place, mask=mask, other=0).to(tl.int32)
    return bits if CODE == FP32 else bits & 0xFFFF


@triton.jit
def store_bits(elements, place, mask, bits, CODE: tl.constexpr):
    """Write what ``to_bits`` gave to rows."""
    tl.store(elements + place, bits if CODE == FP32 else bits.to(tl.int16), mask=mask)


@triton.jit
def words_sum(bits, place, CODE: tl.constexpr):
    """int32: the sum of the words that hold these bits, at these places of a row's content."""
    return tl.sum(bits if CODE == FP32 else bits << (place % 2 * 16), axis=0)


@triton.jit(
    do_not_specialize=["row_units", "num_words"],
    do_not_specialize_on_alignment=["status", "inverse_scale", "square_sum"],
)
def finish_kernel(
    words,
    row_units,
    values,
    num_words,
    status,
    inverse_scale,
    square_sum,
    sums,
    WIRE: tl.constexpr,
    FILLS: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write header and checksum of each row; with ``FILLS``, ``values`` before that, row by row.

    Programs: chunks of a row, rows. Rows have ``row_units * UNIT`` words, and elements of the type of ``WIRE``; there
    are ``num_words * 32`` values; ``sums`` is int64[rows] of zeros.
    """
    PER_WORD: tl.constexpr = 1 if WIRE == FP32 else 2
    number, chunk = tl.program_id(1), tl.program_id(0)
    row_words = row_units * UNIT
    content = (row_words - HEADER_WORDS) * PER_WORD
    row = words + number.to(tl.int64) * row_words
    own = contents_of(row, WIRE)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < content
    if FILLS:
        before, num_values = number.to(tl.int64) * content, num_words.to(tl.int64) * WORD_BITS
        filled = inside & (before + place < num_values)
        bits = to_bits(load_flat(values, before + place, filled), WIRE)
        store_bits(own, place, filled, bits, WIRE)
        kept = load_bits(own, place, inside & (before + place >= num_values), WIRE)
        bits = tl.where(filled, bits, kept)
    else:
        bits = load_bits(own, place, inside, WIRE)
    is_last, content_sum = add_part(sums + number, words_sum(bits, place, WIRE), tl.num_programs(0))
    if is_last:
        write_header(row, tl.load(status), tl.load(inverse_scale), tl.load(square_sum), content_sum)


@triton.jit(do_not_specialize=["row_units", "num_words"])
def read_kernel(
    words,
    row_units,
    values,
    num_words,
    damages,
    sums,
    WIRE: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """``values`` <- the elements of rows; ``damages`` <- 0 for each intact row. The rest: see ``finish_kernel``."""
    PER_WORD: tl.constexpr = 1 if WIRE == FP32 else 2
    number, chunk = tl.program_id(1), tl.program_id(0)
    row_words = row_units * UNIT
    content = (row_words - HEADER_WORDS) * PER_WORD
    row = words + number.to(tl.int64) * row_words
    own = contents_of(words, WIRE) + number.to(tl.int64) * (row_words * PER_WORD)  # so ptxas spills no register
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < content
    bits = load_bits(own, place, inside, WIRE)
    before, num_values = number.to(tl.int64) * content, num_words.to(tl.int64) * WORD_BITS
    store_flat(values, before + place, inside & (before + place < num_values), from_bits(bits, WIRE))
    is_last, content_sum = add_part(sums + number, words_sum(bits, place, WIRE), tl.num_programs(0))
    if is_last:
        tl.store(damages + number, damage(row, content_sum))


@triton.jit
def damage(row, content, mask=None):
    """int32: 0 if the checksum in a row's header fits it; ``content`` is the sum of the words behind the header."""
    return tl.sub(
        add_words(content, header_sum(row, mask)), tl.load(row + CHECKSUM, mask=mask), sanitize_overflow=False
    )


@triton.jit(do_not_specialize=["row_units", "num_words"])
def mean_kernel(
    words,
    row_units,
    out,
    num_words,
    header,
    damages,
    sums,
    NUM_ROWS: tl.constexpr,
    LANES: tl.constexpr,
    INTO_ROWS: tl.constexpr,
    WIRE: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """out <- the mean of rows; ``header`` <- their common header; ``damages`` <- 0 for each intact row.

    Programs: with ``INTO_ROWS`` chunks of a row of ``out`` (whose elements are like those of rows), and these rows,
    which get headers and checksums; else chunks of a row, and ``out`` has ``num_words * 32`` elements. ``LANES`` is
    ``NUM_ROWS`` or the next power of two. Rows are those of ``finish_kernel``; ``sums`` is int64[NUM_ROWS + rows of
    out] of zeros.
    """
    PER_WORD: tl.constexpr = 1 if WIRE == FP32 else 2
    row_words = row_units * UNIT
    out_content = tl.multiple_of((row_words - HEADER_WORDS) // tl.num_programs(1), UNIT)
    out_row_words, length = HEADER_WORDS + out_content, out_content * PER_WORD
    result = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = place < length
    if INTO_ROWS:
        largest, row = 0.0, words
        for _ in range(NUM_ROWS):
            largest = tl.maximum(largest, tl.load(row + INVERSE_SCALE).to(tl.float32, bitcast=True))
            row += row_words
    total = tl.full([CHUNK], 0.0, tl.float32)
    lane = tl.arange(0, LANES)
    parts = tl.full([LANES], 0, tl.int32)  # of the rows' sums, so that one atomic adds them all
    row, own = words, contents_of(words, WIRE) + result * length
    for number in range(NUM_ROWS):
        bits = load_bits(own, place, inside, WIRE)
        term = from_bits(bits, WIRE)
        if INTO_ROWS:
            term *= tl.div_rn(tl.load(row + INVERSE_SCALE).to(tl.float32, bitcast=True), largest)
        total += term
        parts = tl.where(lane == number, words_sum(bits, place, WIRE), parts)
        row += row_words
        own += row_words * PER_WORD
    mean = mean_of(total, NUM_ROWS)
    exists = lane < NUM_ROWS
    are_last, row_sums = add_part(sums + lane, parts, tl.num_programs(0) * tl.num_programs(1), exists)
    tl.store(damages + lane, damage(words + lane.to(tl.int64) * row_words, row_sums, are_last), mask=are_last)
    result_sum, writes_header = 0, tl.program_id(0) == 0
    if INTO_ROWS:
        bits = tl.where(inside, to_bits(mean, WIRE), 0)
        store_bits(contents_of(out + result * out_row_words, WIRE), place, inside, bits, WIRE)
        of_chunk = words_sum(bits, place, WIRE)
        writes_header, result_sum = add_part(sums + NUM_ROWS + result, of_chunk, tl.num_programs(0))
    else:
        store_flat(out, place, place < num_words * WORD_BITS, mean)
    if writes_header:
        status, inverse_scale, square_sum = 0.0, 0.0, 0.0
        row = words
        for _ in range(NUM_ROWS):
            status = tl.maximum(status, tl.load(row + STATUS).to(tl.float32, bitcast=True))
            inverse_scale = tl.maximum(inverse_scale, tl.load(row + INVERSE_SCALE).to(tl.float32, bitcast=True))
            square_sum += tl.load(row + SQUARE_SUM).to(tl.float32, bitcast=True)
            row += row_words
        tl.store(header + STATUS, status)
        tl.store(header + INVERSE_SCALE, inverse_scale)
        tl.store(header + SQUARE_SUM, square_sum)
        if INTO_ROWS:
            write_header(out + result * out_row_words, status, inverse_scale, square_sum, result_sum)


@triton.jit
def _pack_blocks(
    total,
    takes_part,
    inside,
    place,
    element,
    key,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Pack ``total`` (0 where not active) to ``place``: rows, and ``load_codes``'s row start, index and codes' byte.

    ``element`` are the numbers of the elements in their buffer, for random draws with ``key`` (two int32). Returns the
    quantization error, and int32[BLOCKS], the sums of the 32-bit words that are written.
    """
    rows, row_start, index, codes_at = place
    scale = tl.full([BLOCKS], 1.0, tl.float32)
    words_sum = tl.full([BLOCKS], 0, tl.int32)
    if SCALED:
        if BITS == 1:
            count = count_bits(takes_part)
            sums = halving_sums(tl.abs(total), BLOCKS, WORDS * WORD_BITS)
            stored = to_bf16_bits(tl.div_rn(sums, tl.where(count > 0, count, 1).to(tl.float32)))
        else:
            words = total.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
            largest = tl.max(tl.max(words, axis=2), axis=1)
            rounded = tl.add(largest, 0xFFFF, sanitize_overflow=False) >> 16
            rounded = tl.where(rounded > 0x7FC0, 0x7FC0, rounded)
            stored = tl.where(rounded >= 0x80, rounded, 0).to(tl.uint16)
        scale = from_bf16_bits(stored)
        tl.store(scales_of(rows) + row_start // 2 + index, stored, mask=inside)
        words_sum = stored.to(tl.int32) << (index % 2 * 16)  # two scales share a word
    if BITS == 1:
        bits = total >= 0.0 if SCALED else total > uniform_draws(key[0], key[1], element)
        packed = pack_bits(bits)
        words_sum = add_words(words_sum, tl.sum(packed, axis=1))
        says = signed(bits, scale)
    else:
        codes, says = level_codes(total, scale, BITS)
        parts = tl.reshape(codes, [BLOCKS, 8 // BITS, WORDS * BITS, 4]) << code_shifts(BITS)
        packed = halving_sums(tl.sum(parts, axis=1), BLOCKS * WORDS * BITS, 4)
        packed = tl.reshape(packed, [BLOCKS, WORDS * BITS])
        words_sum = add_words(words_sum, halving_sums(packed, BLOCKS, WORDS * BITS))
    tl.store(rows + code_places(row_start, codes_at, index, BITS, WORDS), packed, mask=inside[:, None])
    return tl.where(takes_part, total - says, 0.0), tl.where(inside, words_sum, 0)


@triton.jit(
    do_not_specialize=[
        *("first", "last", "first_row_block", "row_blocks", "row_bytes", "codes_at", "key_low", "key_high", "num_rows")
    ],
    do_not_specialize_on_alignment=["status", "inverse_scale", "square_sum"],
)
def compress_kernel(
    value,
    error,
    new_error,
    first,
    last,
    rows,
    active,
    first_row_block,
    row_blocks,
    row_bytes,
    codes_at,
    key_low,
    key_high,
    status,
    inverse_scale,
    square_sum,
    num_rows,
    sums,
    SEALS: tl.constexpr,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Pack the blocks [first, last) of value + error; ``new_error``, which may be ``value``, gets the new error.

    With ``SEALS`` these are all blocks of the ``num_rows`` rows, which get header and checksum; ``sums`` is
    int64[num_rows] of zeros.
    """
    block = block_numbers(first, BLOCKS)
    inside = block < last
    element = element_places(block, WORDS)
    mask = inside[:, None, None]
    total = load_flat(value, element, mask) + load_flat(error, element, mask)
    takes_part = load_active(active, block, inside, WORDS)
    total = tl.where(takes_part, total, 0.0)
    row = (block - first_row_block) // row_blocks
    row_start = row.to(tl.int64) * row_bytes
    index = (block - first_row_block) % row_blocks
    place, key = (rows, row_start, index, codes_at), (key_low, key_high)
    lost, words_sums = _pack_blocks(total, takes_part, inside, place, element, key, BITS, SCALED, BLOCKS, WORDS)
    store_flat(new_error, element, mask, lost)
    if SEALS:
        words = row_bytes // 4
        in_row = tl.minimum(row_blocks, last - first_row_block - row * row_blocks)  # blocks
        are_last, row_sums = add_part(sums + row, words_sums, in_row, inside)
        first_word, second_word, fourth_word = tl.load(status), tl.load(inverse_scale), tl.load(square_sum)
        own_rows = rows + row.to(tl.int64) * words
        write_header(own_rows, first_word, second_word, fourth_word, row_sums, are_last)
        if tl.program_id(0) == 0:
            for empty in range(tl.cdiv(last - first_row_block, row_blocks), num_rows):
                own_row = rows + tl.cast(empty, tl.int64) * words
                write_header(own_row, first_word, second_word, fourth_word, 0)


@triton.jit(do_not_specialize=["num_blocks", "row_bytes", "codes_at", "first_block", "key_low", "key_high"])
def reduce_kernel(
    num_blocks,
    rows,
    row_bytes,
    codes_at,
    error,
    active,
    first_block,
    out,
    key_low,
    key_high,
    sums,
    NUM_ROWS: tl.constexpr,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Mean over rows, plus ``error``, packed into the row ``out``; ``error`` becomes the new error.

    Rows, ``error`` and ``out`` count blocks from the start of the row, ``active`` from ``first_block`` before it.
    ``out`` gets its checksum, to which what lies behind its last block adds nothing. ``sums`` is int64[1] of zeros.
    """
    index = block_numbers(0, BLOCKS)
    inside = index < num_blocks
    mask = inside[:, None, None]
    place = element_places(index, WORDS)
    residual = load_flat(error, place, mask)
    takes_part = load_active(active, first_block + index, inside, WORDS)
    total = tl.full([BLOCKS, WORDS, WORD_BITS], 0.0, tl.float32)
    row_start = tl.full([BLOCKS], 0, tl.int64)
    words, scale = load_codes(rows, row_start, index, inside, codes_at, BITS, SCALED, WORDS)
    # bits are decoded in the threads that have the error if no loop is left; codes take fewer registers in a loop
    UNROLL: tl.constexpr = 1 if BITS > 1 else NUM_ROWS if NUM_ROWS < 8 else 8
    for row in tl.range(1, NUM_ROWS + 1, loop_unroll_factor=UNROLL):
        # the next row is on its way while this one is decoded
        row_start += row_bytes
        more = inside & (row < NUM_ROWS)
        next_words, next_scale = load_codes(rows, row_start, index, more, codes_at, BITS, SCALED, WORDS)
        total += code_values(words, scale, BITS, BLOCKS, WORDS)
        words, scale = next_words, next_scale
    mean = mean_of(total, NUM_ROWS)
    mean = tl.where(takes_part, mean + residual, 0.0)
    packed_place = out, tl.full([BLOCKS], 0, tl.int64), index, codes_at
    element, key = element_places(first_block + index, WORDS), (key_low, key_high)
    lost, words_sums = _pack_blocks(mean, takes_part, inside, packed_place, element, key, BITS, SCALED, BLOCKS, WORDS)
    store_flat(error, place, mask, lost)
    is_last, content_sum = add_part(sums, tl.sum(words_sums, axis=0), tl.num_programs(0))
    if is_last:
        tl.store(out + CHECKSUM, add_words(content_sum, header_sum(out)))


@triton.jit
def decode_blocks(
    rows, packed, block, inside, BITS: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr
):
    """fp32[BLOCKS, WORDS, 32]: decoded blocks of a packed buffer, 0 where not active.

    ``packed``: active words, block at which row 0 starts, blocks and bytes of a row, and its byte at which codes start.
    """
    active, first_row_block, row_blocks, row_bytes, codes_at = packed
    row_start = ((block - first_row_block) // row_blocks).to(tl.int64) * row_bytes
    index = (block - first_row_block) % row_blocks
    words, scale = load_codes(rows, row_start, index, inside, codes_at, BITS, SCALED, WORDS)
    says = code_values(words, scale, BITS, BLOCKS, WORDS)
    return tl.where(load_active(active, block, inside, WORDS), says, 0.0)


@triton.jit(do_not_specialize=["first", "last", "first_row_block", "row_blocks", "row_bytes", "codes_at"])
def decode_kernel(
    out,
    first,
    last,
    rows,
    active,
    first_row_block,
    row_blocks,
    row_bytes,
    codes_at,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Decode the blocks [first, last) to ``out``, whose first block is ``first``."""
    block = block_numbers(first, BLOCKS)
    inside = block < last
    packed = active, first_row_block, row_blocks, row_bytes, codes_at
    says = decode_blocks(rows, packed, block, inside, BITS, SCALED, BLOCKS, WORDS)
    tl.store(out + element_places(block - first, WORDS), says, mask=inside[:, None, None])


class TritonRows:
    """``megatron01.comm.kernels.RowKernels`` by Triton kernels over tensors on a GPU.

    Raises:
        UserError: ``device`` is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        check_device(device)
        self._sums = torch.zeros(2 * _MAX_ROWS, dtype=torch.int64, device=device)  # every kernel leaves zeros

    def finish_rows(
        self,
        rows: torch.Tensor,
        header: Header,
        values: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        numbers = on_device(header, rows.device)
        given, wire = (numbers[0], torch.float32) if values is None else (values, dtype)  # content is read as words
        self._launch(finish_kernel, rows, rows, wire, given, *numbers, self._sums, FILLS=values is not None)

    def mean_rows(
        self, rows: torch.Tensor, out: torch.Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = rows.size(0)
        header = torch.empty(HEADER_BYTES // 4, dtype=torch.float32, device=rows.device)
        damages = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
        into_rows = out.dtype == torch.uint8
        lanes = 1 << (num_rows - 1).bit_length()
        constants = {"NUM_ROWS": num_rows, "LANES": lanes, "INTO_ROWS": into_rows}
        results = out if into_rows else rows[:1]
        self._launch(mean_kernel, rows, results, dtype, out, header, damages, self._sums, **constants)
        return header, damages

    def read_rows(self, rows: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        damages = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
        self._launch(read_kernel, rows, rows, dtype, out, damages, self._sums)
        return damages

    def _launch(
        self,
        kernel: Any,
        rows: torch.Tensor,
        results: torch.Tensor,
        dtype: torch.dtype,
        values: torch.Tensor,
        *others: Any,
        **constants: Any,
    ) -> None:
        """Run a kernel over chunks of each of ``results``, which are rows of elements of ``dtype`` as ``rows`` are."""
        (num_rows, row_bytes), (num_results, result_bytes) = rows.size(), results.size()
        assert num_rows < _MAX_ROWS
        # with 4 as a known factor, words are accessed in fours
        unit = 1 if row_bytes % 16 or result_bytes % 16 else 4
        launch(
            kernel,
            (-(-result_bytes // _BYTES_PER_PROGRAM), num_results),
            rows.device,
            rows.view(torch.int32),
            row_bytes // (4 * unit),
            values.view(torch.int32) if values.dim() == 2 else values,  # rows, or a flat buffer
            values.numel() // WORD,
            *others,
            WIRE=CODES[dtype],
            UNIT=unit,
            CHUNK=_BYTES_PER_PROGRAM // dtype.itemsize,
            **constants,
        )


class TritonCodec(TritonRows):
    """``megatron01.comm.kernels.Codec`` by Triton kernels over tensors on a GPU.

    Raises:
        UserError: ``device`` is no GPU, or blocks are too long.
    """

    def __init__(
        self,
        block_size: int,
        quantizer: Quantizer,
        device: torch.device,
        *,
        elements_per_program: int = _ELEMENTS_PER_PROGRAM,
    ) -> None:
        super().__init__(device)
        self.format = PackedFormat.of(quantizer, block_size)
        if block_size > _LARGEST_BLOCK:
            raise UserError(
                f"block_size is {block_size}; backend triton takes at most {_LARGEST_BLOCK}: "
                "set the backend to reference"
            )
        elements = max(block_size, elements_per_program)
        self._blocks = elements // block_size  # of a program, a power of two
        self._num_warps = min(_MAX_WARPS, max(1, elements // _ELEMENTS_PER_WARP))
        # codes of several bits would take more, which leaves too few warps to hide the latency of memory
        self._max_registers = min(136, 2048 // self._num_warps) if self.format.bits > 1 else None

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
        self._run(
            compress_kernel,
            last - first if header is None else max(1, last - first),  # rows without blocks get headers as well
            value.device,
            value,
            error,
            value if new_error is None else new_error,
            first,
            last,
            *packed.gpu_arguments,
            *_key_words(key),
            *on_device(header or Header(Status.OK), value.device),
            len(packed.rows),
            self._sums,
            SEALS=header is not None,
        )

    def reduce(self, received: Packed, error: torch.Tensor, out: Packed, row: int, key: int) -> None:
        num_blocks = error.numel() // self.format.block_size
        self._run(
            reduce_kernel,
            max(1, num_blocks),  # a row without blocks gets its checksum as well
            error.device,
            num_blocks,
            received.rows.view(torch.int32),
            received.rows.size(1),
            out.codes_offset,
            error,
            out.active,
            out.first_block + row * out.row_blocks,
            out.rows[row].view(torch.int32),
            *_key_words(key),
            self._sums,
            NUM_ROWS=len(received.rows),
        )

    def decode(self, first: int, last: int, packed: Packed, out: torch.Tensor) -> None:
        self._run(decode_kernel, last - first, out.device, out, first, last, *packed.gpu_arguments)

    def _run(self, kernel: Any, num_blocks: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
        """Run a kernel over ``num_blocks`` blocks."""
        if num_blocks > 0:
            form = self.format
            launch(
                kernel,
                (-(-num_blocks // self._blocks),),
                device,
                *arguments,
                **constants,
                BITS=form.bits,
                SCALED=form.scaled,
                BLOCKS=self._blocks,
                WORDS=form.block_size // WORD,
                num_warps=self._num_warps,
                maxnreg=self._max_registers,
            )


def on_device(header: Header, device: torch.device) -> list[torch.Tensor]:
    """fp32[] each; those of numbers are cached, so read-only."""
    return [number if isinstance(number, torch.Tensor) else _scalar(float(number), device) for number in header]


@lru_cache(maxsize=16)
def _scalar(number: float, device: torch.device) -> torch.Tensor:
    """fp32[]; cached, as a copy from the host to a GPU is a host sync."""
    return torch.tensor(number, dtype=torch.float32, device=device)


def _key_words(key: int) -> tuple[int, int]:
    """Low and high word of a 64-bit key, as int32."""
    return signed_word(key & 0xFFFFFFFF), signed_word(key >> 32)
