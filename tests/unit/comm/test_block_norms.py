"""The sum of squares of a node's mean that it sends: over the counted blocks, without padding."""

from __future__ import annotations

import math

import pytest
import torch

from megatron01.comm.payload import BlockNorms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_buckets", [1, 3])
def test_it_is_that_of_the_blocks_that_count(dtype: torch.dtype, num_buckets: int) -> None:
    generator = torch.Generator().manual_seed(num_buckets)
    counted = [torch.rand(12, generator=generator) < 0.7 for _ in range(num_buckets)]
    norms = BlockNorms(counted)
    for _ in range(2):  # of two exchanges
        total = 0.0
        for bucket in reversed(range(num_buckets)):
            wide = torch.randn(3, 4 * 16 + 5, generator=generator).to(dtype)  # rows with extra columns
            values = wide[:, : 4 * 16].unflatten(-1, (4, 16))
            total += float(values.double().reshape(12, 16)[counted[bucket]].square().sum())
            values[~counted[bucket].view(3, 4)] = math.nan  # padding may hold any values
            found = norms.add(bucket, values, torch.tensor(0.5))
            assert bucket == 0 or found == 0.0
        assert isinstance(found, torch.Tensor) and found.dtype == torch.float32
        assert float(found) == pytest.approx(0.25 * total, rel=1e-5)


def test_what_is_not_finite_shows() -> None:
    values = torch.ones(4, 8)
    values[2, 3] = math.inf
    found = BlockNorms([torch.tensor([True] * 4)]).add(0, values)
    assert isinstance(found, torch.Tensor) and not found.isfinite()
    assert float(BlockNorms([torch.tensor([True, True, False, False])]).add(0, values)) == pytest.approx(16.0)
