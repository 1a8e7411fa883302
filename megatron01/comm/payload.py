"""How one exchange lies in memory: rows of header, scales and sign bits, one row per server.

    row = header (16 bytes) | scales, fp32[row_blocks] | sign words, uint32[row_blocks * block_size / 32]

Row j holds the blocks [j * row_blocks, (j + 1) * row_blocks) of the flat buffer; rows behind its end hold blocks of
scale 0. All rows are equally long, so one all-to-all and one all-gather of plain bytes carry a whole exchange.
The header is four fp32 values: status, inverse loss scale, and two zeros that keep what follows aligned to 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

HEADER_BYTES = 16
SCALE_BYTES = 4


class Status(IntEnum):
    """What a replica tells the others in the header of its payload."""

    OK = 0
    OVERFLOW = 1
    """This replica's gradient was not finite."""
    GIVING_UP = 2
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

    def row_blocks(self, num_rows: int) -> int:
        """Blocks in each of ``num_rows`` equal rows."""
        return -(-self.num_blocks // num_rows)

    def row_range(self, row: int, num_rows: int) -> tuple[int, int]:
        """First and last + 1 block of a row; empty rows start and end at ``num_blocks``."""
        blocks = self.row_blocks(num_rows)
        return min(row * blocks, self.num_blocks), min((row + 1) * blocks, self.num_blocks)


def packed_row_bytes(row_blocks: int, block_size: int) -> int:
    """Bytes of a row of signs and scales."""
    return HEADER_BYTES + row_blocks * (SCALE_BYTES + block_size // 8)


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
