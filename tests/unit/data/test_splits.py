"""The bounds of the training, validation and test split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config import DataConfig
from megatron01.data.datasets import split_bounds


@pytest.mark.parametrize(
    ("split", "num_items", "bounds"),
    [
        ("969,30,1", 837, [(0, 811), (811, 836), (836, 837)]),
        ("969,30,1", 10, [(0, 10), (10, 10), (10, 10)]),
        ("1", 5, [(0, 5), (5, 5), (5, 5)]),
        ("0,1,1", 3, [(0, 0), (0, 2), (2, 3)]),  # 1.5 is rounded to the even 2
    ],
)
def test_bounds(split: str, num_items: int, bounds: list[tuple[int, int]]) -> None:
    assert split_bounds(DataConfig(split=split).split_weights(), num_items) == bounds


@given(weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(any), num_items=st.integers(0, 10**9))
def test_splits_cover_everything_once(weights: list[float], num_items: int) -> None:
    bounds = split_bounds(DataConfig(split=",".join(map(repr, weights))).split_weights(), num_items)
    assert bounds[0][0] == 0 and bounds[-1][1] == num_items
    assert all(low <= high for low, high in bounds)
    assert bounds[0][1] == bounds[1][0] and bounds[1][1] == bounds[2][0]
