"""The sum of squares of a node's mean that it sends: over the counted blocks, without padding."""

from __future__ import annotations

import math

import pytest
import torch

from megatron01.comm.payload import square_of_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_blocks", [0, 1, 7, 12])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_that_of_the_blocks_that_count(dtype: torch.dtype, num_blocks: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(num_blocks)
    wide = torch.randn(3, 4 * 16 + 5, generator=generator).to(dtype)  # rows with extra columns
    values = wide[:, : 4 * 16].unflatten(-1, (4, 16))
    rows = values.double().reshape(12, 16)
    counted = torch.arange(num_blocks) % 3 != 1 if masked else None
    kept = rows[:num_blocks] if counted is None else rows[:num_blocks][counted]
    values[num_blocks // 4 + 1 :] = math.nan  # padding may hold any values
    if num_blocks % 4:
        values[num_blocks // 4, num_blocks % 4 :] = math.nan
    elif num_blocks < 12:
        values[num_blocks // 4] = math.nan
    if counted is not None:
        values.view(3, 4, 16)[torch.arange(12).view(3, 4) % 3 == 1] = math.inf
    mask = None if counted is None else torch.cat([torch.ones(5, dtype=torch.bool), counted])  # of a buffer from 5 on
    found = square_of_blocks(values, (5, 5 + num_blocks), mask, torch.tensor(0.5))
    assert found.dtype == torch.float32 and float(found) == pytest.approx(0.25 * float(kept.square().sum()), rel=1e-5)


def test_what_is_not_finite_shows() -> None:
    values = torch.ones(4, 8)
    values[2, 3] = math.inf
    assert not square_of_blocks(values, (0, 4), None).isfinite()
    assert float(square_of_blocks(values, (0, 2), None)) == pytest.approx(16.0)
