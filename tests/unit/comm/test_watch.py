from __future__ import annotations

import pytest
import torch

from megatron01.comm import BlockLayout
from megatron01.comm.kernels import build_codec
from megatron01.comm.payload import Packed, packed_square

BLOCK = 32


@pytest.mark.parametrize("num_blocks", [0, 2, 3])
def test_the_quantized_square_is_what_decoding_gives_also_of_no_blocks_at_all(num_blocks):
    layout = BlockLayout(torch.tensor([32, 7, 32], dtype=torch.int32), BLOCK)
    codec = build_codec(BLOCK, "sign", torch.device("cpu"), backend="reference")
    rows = torch.zeros(1, codec.format.row_bytes(3), dtype=torch.uint8)
    packed = Packed(rows, 3, 0, codec.format, layout.real_elements())
    codec.compress(0, 3, torch.randn(96), torch.zeros(96), packed, 0)
    decoded = torch.empty(96)
    codec.decode(0, 3, packed, decoded)
    expected = float(decoded[: num_blocks * BLOCK].double().square().sum())
    assert float(packed_square(packed, num_blocks)) == pytest.approx(expected)
