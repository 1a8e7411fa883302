"""Ownership of blocks, against sets of single blocks."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron01.comm.payload import ErrorPlace, OwnedBlocks


@st.composite
def divided(draw: st.DrawFn, total: int) -> list[OwnedBlocks]:
    """A partition of the blocks over some processes; each owns scattered runs."""
    of = draw(st.integers(1, 4))
    edges = sorted(draw(st.sets(st.integers(1, total - 1), max_size=8)) | {0, total}) if total > 1 else [0, total]
    shares: list[list[tuple[int, int]]] = [[] for _ in range(of)]
    for blocks in pairwise(edges):
        shares[draw(st.integers(0, of - 1))].append(blocks)
    return [OwnedBlocks(number, of, tuple(ranges)) for number, ranges in enumerate(shares)]


def blocks_of(owned: OwnedBlocks) -> list[int]:
    return [block for first, last in owned.ranges for block in range(first, last)]


@given(st.data(), st.integers(1, 30))
def test_a_place_in_a_share_is_found_in_the_whole(data: st.DataObject, total: int) -> None:
    for owned in data.draw(divided(total)):
        own = len(blocks_of(owned))
        cut = data.draw(st.integers(0, own))
        place = ErrorPlace([(0, cut), (cut, own)], 3)
        whole = owned.in_whole(place)
        assert whole.share == 3 * owned.of
        values, error = torch.zeros(total), torch.arange(own, dtype=torch.float32)
        whole.add(error, values, 1, factor=1.0 / whole.share)
        assert values[blocks_of(owned)].tolist() == error.tolist()
