"""How one exchange lies in memory: rows of header, scales and sign bits, one row per server.

    row = header (16 bytes) | scales, fp32[row_blocks] | sign words, uint32[row_blocks * block_size / 32]

The scales are missing where the quantizer needs none. Row j holds row_blocks consecutive blocks of the flat buffer, and
row j + 1 those that follow; what lies behind the buffer's last block is not used. All rows are equally long, so one
all-to-all and one all-gather of plain bytes carry a whole exchange.
The header is four words: status and inverse loss scale (fp32), the row's checksum (``megatron01.comm.checksum``,
written by the transport), and a zero that keeps what follows aligned to 16 bytes.

Beside the payload stand *live words*, which are never sent: int32, one bit for each element, least significant bit
first, set where the element takes part in the exchange. Elements that do not (padding, dead coordinates, masks) enter
no scale, keep no error, and are 0 in every result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

HEADER_BYTES = 16
SCALE_BYTES = 4
WORD = 32
"""Elements whose bits share one word."""


class Status(IntEnum):
    """What a replica tells the others in the header of its payload."""

    OK = 0
    FLUSH = 1
    """This replica asks for a synchronization in full precision. Calls nothing off."""
    OVERFLOW = 2
    """This replica's gradient was not finite. This and what is graver can call an exchange off."""
    GIVING_UP = 3
    """This replica overflowed too often in a row: everybody stops after this exchange."""


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

    @property
    def num_blocks(self) -> int:
        return self.lengths.numel()

    @property
    def num_elements(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.num_blocks * self.block_size

    def buckets(self, bucket_elements: int, num_rows: int) -> list[tuple[int, int]]:
        """(first, last + 1) block of buckets of ``bucket_elements``, rounded down to whole blocks for each of the rows.

        A bucket has at least one block for each row, only the last one may have less.
        """
        blocks = max(1, bucket_elements // (self.block_size * num_rows)) * num_rows
        return [(first, min(first + blocks, self.num_blocks)) for first in range(0, self.num_blocks, blocks)]

    def real_elements(self) -> torch.Tensor:
        """Live words, int32[num_elements / 32] on the buffer's device, that leave out nothing but the padding."""
        starts = torch.arange(0, self.block_size, WORD, device=self.lengths.device)
        counts = (self.lengths.long()[:, None] - starts).clamp(0, WORD).flatten()
        return ((1 << counts) - 1).to(torch.int32)  # the conversion keeps the low 32 bits


def row_range(first: int, last: int, row: int, num_rows: int) -> tuple[int, int]:
    """First and last + 1 block of one of the ``num_rows`` rows that the blocks [first, last) are cut into.

    All rows but the last have the same number of blocks; where there are too few blocks, rows are empty.
    """
    row_blocks = -(-(last - first) // num_rows)
    return min(first + row * row_blocks, last), min(first + (row + 1) * row_blocks, last)


@dataclass(frozen=True)
class Packed:
    """Packed blocks of a flat buffer, and what is needed to read them.

    Block b of the buffer is block (b - first_block) % row_blocks of row (b - first_block) // row_blocks.

    Attributes:
        rows: uint8[num_rows, row_bytes], consecutive rows as described above.
        row_blocks: blocks for which each row has room.
        first_block: block of the buffer at which row 0 starts.
        scaled: whether rows hold scales; without them a set bit stands for +1 and a clear one for -1.
        live: live words of the whole buffer.
    """

    rows: torch.Tensor
    row_blocks: int
    first_block: int
    scaled: bool
    live: torch.Tensor

    @property
    def words_offset(self) -> int:
        """Byte of a row at which the sign words start."""
        return words_offset(self.row_blocks, self.scaled)


def words_offset(row_blocks: int, scaled: bool) -> int:
    """Byte of a packed row at which the sign words start."""
    return HEADER_BYTES + (SCALE_BYTES * row_blocks if scaled else 0)


def packed_row_bytes(row_blocks: int, block_size: int, scaled: bool) -> int:
    """Bytes of a row of signs, and of scales if it is ``scaled``."""
    return HEADER_BYTES + row_blocks * packed_block_bytes(block_size, scaled)


def packed_row_blocks(row_bytes: int, block_size: int, scaled: bool) -> int:
    """Blocks for which a packed row of ``row_bytes`` has room."""
    return (row_bytes - HEADER_BYTES) // packed_block_bytes(block_size, scaled)


def packed_block_bytes(block_size: int, scaled: bool) -> int:
    """Bytes of the signs of a block, and of its scale if rows are ``scaled``."""
    return block_size // 8 + (SCALE_BYTES if scaled else 0)


def dense_row_bytes(row_blocks: int, block_size: int, element_size: int) -> int:
    """Bytes of a row of uncompressed elements, rounded up so that the next row's header stays aligned."""
    return HEADER_BYTES + -(-row_blocks * block_size * element_size // HEADER_BYTES) * HEADER_BYTES


def write_headers(rows: torch.Tensor, status: int, inverse_scale: float = 1.0) -> None:
    """Set the header of every row (uint8[num_rows, row_bytes])."""
    header = torch.tensor([float(status), inverse_scale, 0.0, 0.0], dtype=torch.float32)
    rows[:, :HEADER_BYTES] = header.view(torch.uint8).to(rows.device)


def read_headers(rows: torch.Tensor) -> torch.Tensor:
    """fp32[num_rows, 4] on the CPU: the headers of received rows."""
    return rows[:, :HEADER_BYTES].contiguous().cpu().view(torch.float32)


def gravest_status(headers: torch.Tensor) -> Status:
    """The gravest status in headers as ``read_headers`` gives them."""
    return Status(int(headers[:, 0].max()))
