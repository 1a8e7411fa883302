"""Buffers, layouts and participation masks for tests of the exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron01.comm.kernels import Codec
from megatron01.comm.kernels.specification import pack_mask, unpack_mask
from megatron01.comm.payload import BlockLayout, Packed

KINDS = ("gaussian", "zeros", "denormals", "minus zeros", "sparse", "huge")


def layout_of(lengths: Sequence[int], block_size: int) -> BlockLayout:
    return BlockLayout(torch.tensor(lengths, dtype=torch.int32), block_size)


def short_last_block(num_blocks: int) -> BlockLayout:
    """Blocks of 64 elements, the last of which holds 17."""
    return layout_of([64] * (num_blocks - 1) + [17], 64)


def random_buffer(
    layout: BlockLayout, seed: int, spread: float = 0.0, kinds: Sequence[str] = KINDS[:1]
) -> torch.Tensor:
    """Gaussian values whose magnitude varies by 10^+-spread between blocks, which cycle through ``kinds``.

    Padding has random values, too: nothing may depend on them.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.num_blocks, layout.block_size, generator=generator)
    values *= 10 ** (spread * torch.randn(layout.num_blocks, 1, generator=generator))
    for block, row in enumerate(values):
        kind = kinds[block % len(kinds)]
        if kind == "zeros":
            row.zero_()
        elif kind == "minus zeros":
            row.fill_(-0.0)
        elif kind == "denormals":
            row.mul_(1e-40)
        elif kind == "sparse":
            row[torch.rand(row.shape, generator=generator) < 0.9] = 0.0
        elif kind == "huge":
            row.mul_(1e22)
    return values.flatten()


def random_active(layout: BlockLayout, seed: int, share: float) -> torch.Tensor:
    """Packed participation mask without the padding, a random part of the rest, and some whole blocks."""
    generator = torch.Generator().manual_seed(seed)
    active = unpack_mask(layout.real_elements(), layout.block_size)
    active &= torch.rand(active.shape, generator=generator) < share
    active[torch.rand(layout.num_blocks, generator=generator) < 0.1] = False
    return pack_mask(active.flatten())


def empty_payload(
    layout: BlockLayout, codec: Codec, num_rows: int, active: torch.Tensor | None = None, first: int = 0
) -> Packed:
    """Empty payload for the blocks from ``first`` to the end of the buffer."""
    row_blocks = -(-(layout.num_blocks - first) // num_rows)
    row_bytes = codec.format.row_bytes(row_blocks)
    rows = torch.zeros(num_rows, row_bytes, dtype=torch.uint8)
    return Packed(rows, row_blocks, first, codec.format, layout.real_elements() if active is None else active)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: distinguishes -0.0 from 0.0."""
    return tensor.contiguous().view(torch.uint8)
