"""Payload format of the all-reduces: blocks of a flat buffer, packed rows, status, checksums, and block owners.

A payload lies in memory as rows of header, scales and codes, one row per server:

    row = header (16 bytes) | scales, bf16[row_blocks], padded to words | codes, row_blocks * block_size * bits / 8

A code has 1, 4 or 8 bits (see ``Quantizer``). The scales are missing where the quantizer needs none. Row j holds
row_blocks consecutive blocks of the flat buffer, and row j + 1 those that follow; the space after the buffer's last
block is unused. All rows are equally long, so one all-to-all and one all-gather of plain bytes carry an exchange.

The header is four words: status and inverse loss scale (fp32), the row's checksum (``seal``), and an fp32 sum of
squares (``square_sum`` of mean gradients; else 0). The checksum is the sum of the row's 32-bit words modulo 2^32, its
own place counted as 0: any single flipped bit changes it, and all but one in 2^32 of other damages.

*Active words* hold the participation mask and are never sent: int32, one bit for each element, least significant bit
first, set where the element takes part in the exchange. Elements that do not (padding, dead coordinates, masks) enter
no scale, keep no error, and are 0 in every result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from megatron01.config.optimizer import default_bucket_elements

HEADER_BYTES = 16
STATUS_WORD, INVERSE_SCALE_WORD, CHECKSUM_WORD, SQUARE_SUM_WORD = range(HEADER_BYTES // 4)
SCALE_BYTES = 2
"""Scales are bf16: their rounding error is part of the residual. fp16 would underflow for small gradients."""
WORD = 32
"""Elements whose bits share one word."""


class Status(IntEnum):
    """Status that a replica sends to the others in the header of its payload."""

    OK = 0
    OVERFLOW = 1
    """This replica's gradient was not finite. This or a more severe status can call an exchange off."""
    GIVING_UP = 2
    """This replica overflowed too often in a row: all replicas stop after this exchange."""


Agree = Callable[[Status], Status]
"""Takes the most severe status of a data-parallel group, returns that of all tensor-parallel ranks' groups.

Each tensor-parallel rank exchanges over a group of its own; only together do they know whether all gradients are
finite.
"""


@dataclass(frozen=True)
class BlockLayout:
    """A flat fp32 buffer cut into blocks of ``block_size`` elements.

    ``lengths`` (int32[num_blocks], on the buffer's device) are the real elements of each block; the rest is padding
    and always zero.
    """

    lengths: torch.Tensor
    block_size: int

    def __post_init__(self) -> None:
        size = self.block_size
        if size < 32 or size & (size - 1):
            raise ValueError(f"block_size is {size}; expected a power of two of at least 32")

    @cached_property
    def num_blocks(self) -> int:
        return self.lengths.numel()

    @cached_property
    def num_elements(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.num_blocks * self.block_size

    def buckets(self, bucket_elements: int | None, num_rows: int) -> list[tuple[int, int]]:
        """(first, last + 1) block of buckets of ``bucket_elements``, rounded down to whole blocks for each of the rows.

        A bucket has at least one block for each row, only the last one may have less. None is
        ``default_bucket_elements``.
        """
        if bucket_elements is None:
            bucket_elements = default_bucket_elements(self.num_elements, on_gpu=self.lengths.device.type == "cuda")
        blocks = max(1, bucket_elements // (self.block_size * num_rows)) * num_rows
        return [(first, min(first + blocks, self.num_blocks)) for first in range(0, self.num_blocks, blocks)]

    def real_elements(self) -> torch.Tensor:
        """Active words, int32[num_elements / 32] on the buffer's device, of all elements but the padding."""
        starts = torch.arange(0, self.block_size, WORD, device=self.lengths.device)
        counts = (self.lengths.long()[:, None] - starts).clamp(0, WORD).flatten()
        return ((1 << counts) - 1).to(torch.int32)  # the conversion keeps the low 32 bits


def row_range(first: int, last: int, row: int, num_rows: int) -> tuple[int, int]:
    """First and last + 1 block of one of the ``num_rows`` rows that the blocks [first, last) are cut into.

    All rows but the last have the same number of blocks; where there are too few blocks, rows are empty.
    """
    row_blocks = -(-(last - first) // num_rows)
    return min(first + row * row_blocks, last), min(first + (row + 1) * row_blocks, last)


Quantizer = Literal["sign", "random", "4bit", "8bit"]
"""How an element a = value + error is quantized.

    sign        a >= 0, one bit. Stands for +-s with one scale s for each block, the mean |a| over its active elements,
                rounded to bf16. A contraction: |a - C(a)| < |a| for every block that is not zero.
    random      a > r, one bit, with r uniform in [-1, 1) and drawn from (key, number of the element). Stands for +-1,
                which is unbiased for a in [-1, 1] and the nearer end beyond. (BinSGDM)
    4bit, 8bit  a's sign, and the one of 8 (128) intervals in which its magnitude lies. Their bounds are s (k / 8)^2,
                with s the largest |a| of the block, rounded up to bf16; stands for +-s ((k + 0.5) / 8)^2. Small
                elements are resolved more finely than large ones. A block whose s is below 2^-126 is sent as 0. A
                contraction as well.
"""

CODE_BITS: dict[Quantizer, int] = {"sign": 1, "random": 1, "4bit": 4, "8bit": 8}
"""Bits of an element's code."""


@dataclass(frozen=True)
class PackedFormat:
    """Layout of blocks in a row.

    Codes of one bit fill words, least significant bit first. Those of 4 bits share bytes: byte j of a block holds
    element j in its lower half, and element j + block_size / 2 in its upper one.

    Attributes:
        block_size: elements of a block.
        bits: of each element's code, the sign uppermost.
        scaled: True if each block has a scale; without one, codes of one bit stand for +1 and -1.
    """

    block_size: int
    bits: int
    scaled: bool

    @classmethod
    def of(cls, quantizer: Quantizer, block_size: int) -> PackedFormat:
        return cls(block_size, CODE_BITS[quantizer], quantizer != "random")

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block_size * self.bits // 8

    def codes_offset(self, row_blocks: int) -> int:
        """Byte of a row at which the codes start."""
        return HEADER_BYTES + (-(-SCALE_BYTES * row_blocks // 4) * 4 if self.scaled else 0)

    def row_bytes(self, row_blocks: int) -> int:
        """Bytes of a row with room for ``row_blocks`` blocks."""
        return self.codes_offset(row_blocks) + row_blocks * self.code_bytes


@dataclass(frozen=True)
class Packed:
    """Packed blocks of a flat buffer, and what is needed to read them.

    Block b of the buffer is block (b - first_block) % row_blocks of row (b - first_block) // row_blocks.

    Attributes:
        rows: uint8[num_rows, row_bytes], consecutive rows as described above.
        row_blocks: blocks for which each row has room.
        first_block: block of the buffer at which row 0 starts.
        format: of the rows.
        active: active words of the whole buffer.
    """

    rows: torch.Tensor
    row_blocks: int
    first_block: int
    format: PackedFormat
    active: torch.Tensor

    @cached_property
    def codes_offset(self) -> int:
        """Byte of a row at which the codes start."""
        return self.format.codes_offset(self.row_blocks)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and active words on a CPU, as uint32[num_rows, words] and uint32[words]."""
        return self.rows.view(torch.int32).numpy().view(np.uint32), self.active.numpy().view(np.uint32)

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """What compiled kernels take: ``arrays``, blocks of a row, word of the codes, first block, bits, has scales."""
        form = self.format
        return *self.arrays, self.row_blocks, self.codes_offset // 4, self.first_block, form.bits, form.scaled

    @cached_property
    def gpu_arguments(self) -> tuple[Any, ...]:
        """What GPU kernels take: rows as int32, active words, first block, blocks and bytes of a row, codes' byte."""
        words, row_bytes = self.rows.view(torch.int32), self.rows.size(1)
        return words, self.active, self.first_block, self.row_blocks, row_bytes, self.codes_offset


@dataclass(frozen=True)
class PackedBlocks:
    """The blocks [first, last) of a packed buffer; sliced by elements, at whole blocks, like a decoded tensor."""

    packed: Packed
    first: int
    last: int
    dtype: ClassVar[None] = None  # where a tensor has its type

    def numel(self) -> int:
        """Number of decoded elements."""
        return (self.last - self.first) * self.packed.format.block_size

    def __getitem__(self, place: slice) -> PackedBlocks:
        size = self.packed.format.block_size
        last = min(self.last, self.first + place.stop // size)
        return PackedBlocks(self.packed, self.first + place.start // size, last)


def dense_row_bytes(row_blocks: int, block_size: int, element_size: int) -> int:
    """Bytes of a row of uncompressed elements: whole headers, as blocks have at least 32 elements."""
    return HEADER_BYTES + row_blocks * block_size * element_size


def headers_of(rows: torch.Tensor) -> torch.Tensor:
    """fp32[num_rows, 4]: a view of the headers of rows (uint8[num_rows, row_bytes])."""
    return rows[:, :HEADER_BYTES].view(torch.float32)


class Header(NamedTuple):
    """Content of a header, without the checksum; tensors are fp32[] on the rows' device.

    Attributes:
        status: of the sender.
        inverse_scale: of its loss scale.
        square_sum: sum of squares of mean gradients; else 0. Where nodes are replicas, the bucket that is sent last has
            that of all, and the others 0.
    """

    status: torch.Tensor | int
    inverse_scale: torch.Tensor | float = 1.0
    square_sum: torch.Tensor | float = 0.0


def common_header(headers: torch.Tensor) -> torch.Tensor:
    """fp32[4] of fp32[n, 4]: most severe status, largest inverse scale, an undefined word, sum of square sums."""
    return torch.cat([headers.amax(0)[:SQUARE_SUM_WORD], headers[:, SQUARE_SUM_WORD].sum(0, True)])


_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def random_key(*parts: int) -> int:
    """A 64-bit hash, in [0, 2^64), of integers such as seed, step, rank and stage; their order matters.

    Each part is added to the state of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), whose next output becomes the
    state. Of negative and large parts the low 64 bits count.
    """
    state = 0
    for part in parts:
        state = (state + part + _STEP) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True)
class ErrorPlace:
    """The part of the flat buffer that an error buffer belongs to.

    Attributes:
        ranges: (first, last + 1) blocks, in the order in which they lie in the error buffer; may be empty.
        share: factor on the mean over the replicas of their errors, which gives the residual still to be sent.
    """

    ranges: list[tuple[int, int]]
    share: int

    def add(self, error: torch.Tensor, value: torch.Tensor, block_size: int, *, factor: float = 1.0) -> None:
        """value += factor * share * error, at the error's place; ``value`` ([elements]) is the whole flat buffer."""
        for part, whole in self._parts(error, value, block_size):
            whole.add_(part, alpha=self.share * factor)

    def take(self, value: torch.Tensor, error: torch.Tensor, block_size: int) -> None:
        """error <- ``value`` (the whole flat buffer) at the error's place."""
        for part, whole in self._parts(error, value, block_size):
            part.copy_(whole)

    def _parts(
        self, error: torch.Tensor, value: torch.Tensor, block_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same blocks of both, range by range."""
        parts = error.split([(last - first) * block_size for first, last in self.ranges])
        for (first, last), part in zip(self.ranges, parts, strict=True):
            yield part, value[first * block_size : last * block_size]


def runs_in_whole(ranges: Sequence[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """The blocks [first, last) of a buffer that consists of ``ranges`` of blocks of a whole one, as consecutive runs.

    Yields of each run its first block in the buffer, and its first and last + 1 block in the whole one.
    """
    place = 0
    for start, end in ranges:
        low, high = max(first, place), min(last, place + end - start)
        if low < high:
            yield low, start + low - place, start + high - place
        place += end - start


@dataclass(frozen=True)
class OwnedBlocks:
    """The blocks that one of ``of`` processes owns; every block has one owner.

    Attributes:
        number: rank of this process among them.
        of: number of processes.
        ranges: (first, last + 1) blocks of the whole buffer, ascending and not empty, in the order in which they lie in
            the process's own buffers.
    """

    number: int
    of: int
    ranges: tuple[tuple[int, int], ...]

    def in_whole(self, place: ErrorPlace) -> ErrorPlace:
        """Translate a place in the process's own buffers to one in the whole buffer.

        The mean is then over all processes, of which one in ``of`` owns a block.
        """
        found = [run[1:] for blocks in place.ranges for run in runs_in_whole(self.ranges, *blocks)]
        return ErrorPlace(found, place.share * self.of)


_CHUNK_BYTES = 1 << 20


def seal(rows: torch.Tensor) -> None:
    """Write the checksum of each row (uint8[n, row_bytes], whole words, each row contiguous) into its header."""
    words = rows.view(torch.int32)
    place = words[:, CHECKSUM_WORD]
    torch.sub(words.sum(1, dtype=torch.int32), place, out=place)  # the old value in its place does not count


def damages(rows: torch.Tensor) -> torch.Tensor:
    """int32[n] on the rows' device: 0 for each row that is as ``seal`` left it, else another number."""
    words = rows.view(torch.int32)
    # the sum over everything is twice the stored value, modulo 2^32, where nothing has changed
    return words.sum(1, dtype=torch.int32).sub_(words[:, CHECKSUM_WORD], alpha=2)


def digest(buffers: Mapping[str, torch.Tensor]) -> str:
    """A short text that differs, but for one case in 2^32, if the buffers (contiguous, by name) differ in any bit.

    It hashes the sum of words of each megabyte, computed on the buffers' device at memory speed. It detects accidents,
    not tampering.
    """
    sums = hashlib.sha256()
    for name, buffer in sorted(buffers.items()):
        content = buffer.detach().reshape(-1).view(torch.uint8)
        whole = content.numel() // _CHUNK_BYTES * _CHUNK_BYTES
        rest = content[whole:]
        sums.update(f"{name} {content.numel()} ".encode())
        for rows in (content[:whole].view(-1, _CHUNK_BYTES), F.pad(rest, (0, 4 - rest.numel() % 4)).view(1, -1)):
            sums.update(rows.view(torch.int32).sum(1, dtype=torch.int32).cpu().numpy().data)
    return sums.hexdigest()


@dataclass(frozen=True)
class CompressionNorms:
    """Squared norms over one bucket of an exchange, on this replica.

    Attributes:
        quantized: of the decoded values that it sent.
        residual: of its new worker error.
    """

    quantized: float
    residual: float


def packed_square(packed: Packed, num_blocks: int) -> torch.Tensor:
    """fp64[] on the device: sum of squares of the decoded values of the first blocks, of one bit an element."""
    assert packed.format.bits == 1
    block_size, first = packed.format.block_size, packed.first_block
    words, last = block_size // WORD, first + num_blocks
    bits = packed.active[first * words : last * words].view(torch.uint8)
    bits = bits - (bits >> 1 & 0x55)  # number of bits set in each 2 of a byte, then each 4, then all 8
    bits = (bits & 0x33) + (bits >> 2 & 0x33)
    bits = bits + (bits >> 4) & 0x0F
    counts = bits.view(num_blocks, block_size // 8).sum(1, dtype=torch.float64)
    if not packed.format.scaled:
        return counts.sum()
    scales = packed.rows[:, HEADER_BYTES : HEADER_BYTES + SCALE_BYTES * packed.row_blocks].contiguous()
    scales = scales.view(torch.bfloat16).flatten()[:num_blocks].double()
    return (counts * scales * scales).sum()


class BlockNorms:
    """Sum of squares of a mean that comes bucket by bucket: a launch for each, and the rest once.

    Args:
        counted: for each bucket bool[blocks], those that are summed.
    """

    def __init__(self, counted: Sequence[torch.Tensor]) -> None:
        self._left_out = ~torch.cat([*counted])
        self._norms = torch.zeros(self._left_out.shape, dtype=torch.float32, device=self._left_out.device)
        self._of_buckets = self._norms.split([one.numel() for one in counted])
        self._number = 0  # of buckets so far

    def add(self, bucket: int, mean: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor | float:
        """Take a bucket's mean (any type, [..., block_size]).

        Returns 0, and for the last bucket the sum of squares of ``scale`` times the means of all: fp32[] on the device.
        """
        norms = self._of_buckets[bucket].view(mean.shape[:-1])
        torch.linalg.vector_norm(mean, dim=-1, dtype=torch.float32, out=norms)
        self._number = (self._number + 1) % len(self._of_buckets)
        if self._number > 0:
            return 0.0
        counted = self._norms.masked_fill(self._left_out, 0.0)  # indexing with a mask would be a host sync
        if scale is not None:
            counted *= scale
        total: torch.Tensor = counted.dot(counted)
        return total
