"""How much an exchange of bits loses: norms of what was told and of what was not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron01.comm.payload import HEADER_BYTES, SCALE_BYTES, WORD, Packed


@dataclass(frozen=True)
class Compression:
    """Squared norms over one bucket of an exchange, on this replica.

    Attributes:
        told: of what its bits stood for.
        lost: of its new worker error, which its bits did not tell.
        result: of the result, the same on all replicas.
    """

    told: float
    lost: float
    result: float


def told_square(packed: Packed, first: int, last: int, block_size: int) -> float:
    """Sum of squares of what the packed blocks [first, last) stand for."""
    words = block_size // WORD
    live = packed.live[first * words : last * words].view(torch.uint8)
    counts = _bits_of_bytes(live.device)[live.long()].view(last - first, block_size // 8).sum(1, dtype=torch.float64)
    if not packed.scaled:
        return float(counts.sum())
    scales = packed.rows[:, HEADER_BYTES : HEADER_BYTES + SCALE_BYTES * packed.row_blocks].contiguous()
    start = first - packed.first_block
    scales = scales.view(torch.float32).flatten()[start : start + last - first].double()
    return float((counts * scales * scales).sum())


def square(values: torch.Tensor) -> float:
    """Sum of squares, added up in fp32."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float32)) ** 2


def _bits_of_bytes(device: torch.device) -> torch.Tensor:
    """uint8[256]: how many bits are set in each byte."""
    return torch.tensor([value.bit_count() for value in range(256)], dtype=torch.uint8, device=device)
