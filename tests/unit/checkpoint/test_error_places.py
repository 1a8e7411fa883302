from __future__ import annotations

import pytest

from megatron01.checkpoint.reshard import ERRORS, read_error_places

PLACE = {"ranges": [[0, 2]], "share": 1}


def described(name="worker_error", block_size=8, **changes):
    return {ERRORS: {"block_size": block_size, "places": {name: PLACE | changes}}}


def test_what_was_described_is_read():
    places, block_size = read_error_places(described(), 16)
    assert block_size == 8 and places["worker_error"].ranges == [(0, 2)] and places["worker_error"].share == 1


@pytest.mark.parametrize(
    "values",
    [
        described(name="n" * 10_000),
        described(name="a\nb"),
        described(ranges=[[0, 10**15]]),
        described(ranges=[[0, 3]]),
        described(ranges=[[0, 2], [0, 2]]),
        described(ranges=[[-1, 1]]),
        described(ranges=[[2, 1]]),
        described(share=-1),
        described(share=10**400),
        described(block_size=0),
    ],
)
def test_places_outside_of_the_buffer_are_refused_before_memory_is_taken(values):
    with pytest.raises((ValueError, ArithmeticError)):
        read_error_places(values, 16)
