"""The 1-bit codec on GPUs: one Triton kernel per phase over all blocks of a call, without temporaries in memory.

The kernels do what ``megatron01.comm.reference`` does with torch operations, in the same order of fp32 operations, so
both give the same bits. That is tested in Triton's interpreter on CPUs, and that they compile for compute capability
8.0 and 9.0 is tested too; **no GPU has run them yet**.

Memory traffic per element is that of the compiled CPU kernels: compressing reads value and error, writes value, and
adds a bit each for the mask and the sign; reducing n rows reads n bits and a mask bit, and reads and writes the error.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron01.comm.payload import Packed, packed_row_blocks, words_offset
from megatron01.comm.quantizer import Quantizer
from megatron01.comm.triton_blocks import (
    HEADER_WORDS,
    INTERPRETED,
    LANES,
    as_words,
    block_numbers,
    check_device,
    count_bits,
    element_places,
    halving_sums,
    launch,
    load_live,
    load_packed,
    load_signed,
    pack_bits,
    packed_arguments,
    signed,
    signed_word,
    tiling,
    word_places,
)
from megatron01.comm.triton_elements import CODES, as_elements, load_flat, store_flat

_ELEMENTS_PER_WARP = 1024
"""So many that a block of the usual size is one warp's: its sum then takes no shared memory and no barrier."""

_ELEMENTS_PER_PROGRAM = 1 << 14 if INTERPRETED else 1024


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
def _pack_blocks(
    total,
    takes_part,
    inside,
    rows,
    row_start,
    index,
    words_at,
    element,
    key_low,
    key_high,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Pack ``total`` (0 where not live) to blocks ``index`` of rows, and return what the packing loses.

    ``element`` are the numbers of the elements in their buffer, for random draws.
    """
    scale = tl.full([BLOCKS], 1.0, tl.float32)
    if SCALED:
        count = count_bits(takes_part)
        sums = halving_sums(tl.abs(total), BLOCKS, WORDS * LANES)
        scale = tl.div_rn(sums, tl.where(count > 0, count, 1).to(tl.float32))
        tl.store(rows + row_start + HEADER_WORDS + index, scale.to(tl.int32, bitcast=True), mask=inside)
        bits = total >= 0.0
    else:
        bits = total > uniform_draws(key_low, key_high, element)
    places = row_start[:, None] + words_at + word_places(index, WORDS)
    tl.store(rows + places, pack_bits(bits), mask=inside[:, None])
    return tl.where(takes_part, total - signed(bits, scale), 0.0)


@triton.jit(
    do_not_specialize=["first", "last", "first_row_block", "row_blocks", "row_words", "words_at", "key_low", "key_high"]
)
def compress_kernel(
    value,
    error,
    first,
    last,
    rows,
    live,
    first_row_block,
    row_blocks,
    row_words,
    words_at,
    key_low,
    key_high,
    CODE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Pack the blocks [first, last) of value + error; ``value`` becomes what that loses."""
    block = block_numbers(first, BLOCKS)
    inside = block < last
    element = element_places(block, WORDS)
    mask = inside[:, None, None]
    total = load_flat(value, element, mask, CODE) + load_flat(error, element, mask, CODE)
    takes_part = load_live(live, block, inside, WORDS)
    total = tl.where(takes_part, total, 0.0)
    row_start = ((block - first_row_block) // row_blocks).to(tl.int64) * row_words
    index = (block - first_row_block) % row_blocks
    lost = _pack_blocks(
        total,
        takes_part,
        inside,
        rows,
        row_start,
        index,
        words_at,
        element,
        key_low,
        key_high,
        SCALED,
        BLOCKS,
        WORDS,
    )
    store_flat(value, element, mask, lost, CODE)


@triton.jit(do_not_specialize=["num_blocks", "row_words", "words_at", "first_block", "key_low", "key_high"])
def reduce_kernel(
    num_blocks,
    rows,
    row_words,
    words_at,
    error,
    live,
    first_block,
    out,
    key_low,
    key_high,
    NUM_ROWS: tl.constexpr,
    CODE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Mean over rows, plus ``error``, packed into the row ``out``; ``error`` becomes what that loses.

    Rows, ``error`` and ``out`` count blocks from the start of the row, ``live`` from ``first_block`` blocks before it.
    """
    index = block_numbers(0, BLOCKS)
    inside = index < num_blocks
    mask = inside[:, None, None]
    place = element_places(index, WORDS)
    residual = load_flat(error, place, mask, CODE)
    takes_part = load_live(live, first_block + index, inside, WORDS)
    total = tl.full([BLOCKS, WORDS, LANES], 0.0, tl.float32)
    row_start = tl.full([BLOCKS], 0, tl.int64)
    for _ in range(NUM_ROWS):
        total += load_signed(rows, row_start, index, inside, words_at, SCALED, WORDS)
        row_start += row_words
    mean = tl.div_rn(total, tl.cast(NUM_ROWS, tl.float32))
    mean = tl.where(takes_part, mean + residual, 0.0)
    lost = _pack_blocks(
        mean,
        takes_part,
        inside,
        out,
        tl.full([BLOCKS], 0, tl.int64),
        index,
        words_at,
        element_places(first_block + index, WORDS),
        key_low,
        key_high,
        SCALED,
        BLOCKS,
        WORDS,
    )
    store_flat(error, place, mask, lost, CODE)


@triton.jit(do_not_specialize=["first", "last", "first_row_block", "row_blocks", "row_words", "words_at"])
def decode_kernel(
    out,
    first,
    last,
    rows,
    live,
    first_row_block,
    row_blocks,
    row_words,
    words_at,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write what the blocks [first, last) say to ``out``, whose first block is ``first``."""
    block = block_numbers(first, BLOCKS)
    inside = block < last
    says = load_packed(rows, live, block, inside, first_row_block, row_blocks, row_words, words_at, SCALED, WORDS)
    tl.store(out + element_places(block - first, WORDS), says, mask=inside[:, None, None])


class TritonCodec:
    """``megatron01.comm.codec.Codec`` by Triton kernels over tensors on a GPU.

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
        check_device(device)
        self.scaled = quantizer == "sign"
        self._block_size = block_size
        self._tiling = tiling(
            block_size, elements_per_program=elements_per_program, elements_per_warp=_ELEMENTS_PER_WARP
        )

    def compress(
        self, first: int, last: int, value: torch.Tensor, error: torch.Tensor, packed: Packed, key: int
    ) -> None:
        launch(
            compress_kernel,
            self._tiling,
            last - first,
            value.device,
            as_elements(value),
            as_elements(error),
            first,
            last,
            *packed_arguments(packed),
            *_key_words(key),
            CODE=CODES[value.dtype],
            SCALED=self.scaled,
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
        words = as_words(rows)
        launch(
            reduce_kernel,
            self._tiling,
            num_blocks,
            error.device,
            num_blocks,
            words,
            words.stride(0),
            words_offset(row_blocks, self.scaled) // 4,
            as_elements(error),
            live,
            first_block,
            as_words(out),
            *_key_words(key),
            NUM_ROWS=words.size(0),
            CODE=CODES[error.dtype],
            SCALED=self.scaled,
        )

    def decode(self, first: int, last: int, packed: Packed, out: torch.Tensor) -> None:
        launch(
            decode_kernel,
            self._tiling,
            last - first,
            out.device,
            out,
            first,
            last,
            *packed_arguments(packed),
            SCALED=self.scaled,
        )


def _key_words(key: int) -> tuple[int, int]:
    """Low and high word of a 64-bit key, as int32."""
    return signed_word(key & 0xFFFFFFFF), signed_word(key >> 32)
