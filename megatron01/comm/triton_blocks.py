"""What Triton kernels on blocks of a flat buffer share: places, sign words, sums in the fixed order, and launching.

A program takes ``BLOCKS`` consecutive blocks, as tensors of the shape [BLOCKS, WORDS, 32]: block, sign word, bit. That
is one block where blocks are large; of small ones it takes several, so that no warp idles. Reductions are over axes of
length 2, so that their order is that of the reference whatever the layout of a tensor over threads.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megatron01.comm.payload import HEADER_BYTES, WORD, Packed
from megatron01.errors import UserError

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 when this module is imported)."""

WARP_SIZE = 32

_ELEMENTS_PER_THREAD = 32
"""Most elements of a tensor in one thread: a few such tensors fit its registers."""

_MAX_WARPS = 32

LANES = tl.constexpr(WORD)
HEADER_WORDS = tl.constexpr(HEADER_BYTES // 4)


def check_device(device: torch.device) -> None:
    """Kernels need a GPU; in the interpreter, which cannot follow addresses into a GPU's memory, they need a CPU.

    Raises:
        UserError: ``device`` is the other one.
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


class Tiling(NamedTuple):
    """How a kernel's programs share the blocks.

    Attributes:
        blocks: of each program, a power of two.
        words: sign words of a block.
        num_warps: of each program.
    """

    blocks: int
    words: int
    num_warps: int


def tiling(block_size: int, *, elements_per_program: int, elements_per_warp: int) -> Tiling:
    """Programs of ``elements_per_program`` elements, a power of two, or of one block where that is larger.

    Raises:
        UserError: a block has more elements than a program can hold.
    """
    largest = _ELEMENTS_PER_THREAD * WARP_SIZE * _MAX_WARPS
    if block_size > largest:
        raise UserError(
            f"block_size is {block_size}; backend triton takes at most {largest}: set the backend to reference"
        )
    elements = max(block_size, elements_per_program)
    return Tiling(elements // block_size, block_size // WORD, min(_MAX_WARPS, max(1, elements // elements_per_warp)))


def launch(
    kernel: Any, tiling: Tiling, num_blocks: int, device: torch.device, *arguments: Any, **constants: Any
) -> None:
    """Run ``kernel(*arguments, BLOCKS, WORDS, **constants)`` over ``num_blocks`` blocks on the device's current stream.

    A product is never contracted with a sum, and denormals are kept: every operation rounds as on CPUs.
    """
    if num_blocks <= 0:
        return
    grid = (-(-num_blocks // tiling.blocks),)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](
            *arguments,
            BLOCKS=tiling.blocks,
            WORDS=tiling.words,
            **constants,
            num_warps=tiling.num_warps,
            enable_fp_fusion=False,
            enable_reflect_ftz=False,
        )


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """int32 view of bytes: rows have a length, and start at an address, that are multiples of 4."""
    return rows.view(torch.int32)


def signed_word(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word: the type of a kernel's argument follows from its range."""
    return word - (1 << WORD) if word >> (WORD - 1) else word


def packed_arguments(packed: Packed) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    """Arguments of kernels that ``load_packed`` takes; int32 words are what they count in."""
    rows = as_words(packed.rows)
    return rows, packed.live, packed.first_block, packed.row_blocks, rows.stride(0), packed.words_offset // 4


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
    within = tl.arange(0, WORDS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    return block.to(tl.int64)[:, None, None] * (WORDS * LANES) + within


@triton.jit
def pack_bits(bits):
    """int32[BLOCKS, WORDS]: bit k of a word is bits[.., .., k]."""
    return tl.sum(bits.to(tl.int32) << tl.arange(0, LANES)[None, None, :], axis=2)


@triton.jit
def unpack_bits(words):
    """bool[BLOCKS, WORDS, 32] of what ``pack_bits`` made."""
    return ((words[:, :, None] >> tl.arange(0, LANES)[None, None, :]) & 1) != 0


@triton.jit
def count_bits(bits):
    """int32[BLOCKS]: how many are set in each block."""
    return tl.sum(tl.sum(bits.to(tl.int32), axis=2), axis=1)


@triton.jit
def halving_sums(values, BLOCKS: tl.constexpr, LENGTH: tl.constexpr):
    """fp32[BLOCKS]: sums of ``LENGTH`` values of each block, the upper half added to the lower until one is left."""
    values = tl.reshape(values, [BLOCKS, LENGTH])
    # a loop over a constant is unrolled: 2^20 is more than any block has
    for level in tl.static_range(20):
        if LENGTH >> level > 1:
            values = tl.sum(tl.reshape(values, [BLOCKS, 2, LENGTH >> (level + 1)]), axis=1)
    return tl.reshape(values, [BLOCKS])


@triton.jit
def signed(bits, scale):
    """fp32[BLOCKS, WORDS, 32]: the block's scale (fp32[BLOCKS]) where the bit is set, and its negative elsewhere."""
    scale = scale[:, None, None]
    # Triton's minus is 0 - x, which would make -0 of no 0
    return tl.where(bits, scale, scale * -1.0)


@triton.jit
def load_signed(rows, row_start, index, inside, words_at, SCALED: tl.constexpr, WORDS: tl.constexpr):
    """fp32[BLOCKS, WORDS, 32]: what packed blocks say.

    Block ``index`` (int32[BLOCKS]) of the row that starts at the int32 word ``row_start`` (int64[BLOCKS]) of ``rows``,
    and whose sign words start ``words_at`` words later.
    """
    places = row_start[:, None] + words_at + word_places(index, WORDS)
    bits = unpack_bits(tl.load(rows + places, mask=inside[:, None], other=0))
    scale = tl.full(index.shape, 1.0, tl.float32)
    if SCALED:
        scale = tl.load(rows + row_start + HEADER_WORDS + index, mask=inside, other=0).to(tl.float32, bitcast=True)
    return signed(bits, scale)


@triton.jit
def load_packed(
    rows,
    live,
    block,
    inside,
    first_row_block,
    row_blocks,
    row_words,
    words_at,
    SCALED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """fp32[BLOCKS, WORDS, 32]: what a ``Packed`` says about blocks of its buffer, 0 where elements are not live."""
    row = (block - first_row_block) // row_blocks
    index = (block - first_row_block) % row_blocks
    says = load_signed(rows, row.to(tl.int64) * row_words, index, inside, words_at, SCALED, WORDS)
    return tl.where(load_live(live, block, inside, WORDS), says, 0.0)


@triton.jit
def load_live(live, block, inside, WORDS: tl.constexpr):
    """bool[BLOCKS, WORDS, 32]: elements of blocks that take part in an exchange."""
    return unpack_bits(tl.load(live + word_places(block, WORDS), mask=inside[:, None], other=0))
