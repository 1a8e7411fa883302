"""Keys of random draws are reproducible and differ by every part."""

from __future__ import annotations

from itertools import product

from megatron01.comm.payload import random_key


def test_one_part_gives_the_published_first_output_of_splitmix64() -> None:
    """For the seeds 0 and 1234567."""
    assert random_key(0) == 0xE220A8397B1DCDAF
    assert random_key(1234567) == 6457827717110365317


def test_keys_differ_by_every_part_and_their_order() -> None:
    keys = {random_key(seed, step, rank) for seed, step, rank in product(range(10), repeat=3)}
    assert len(keys) == 1000
    assert all(0 <= key < 2**64 for key in keys)
    assert len({key >> 32 for key in keys} | {key & 0xFFFFFFFF for key in keys}) > 1990


def test_negative_and_large_parts_count_by_their_low_64_bits() -> None:
    assert random_key(-1) == random_key(2**64 - 1)
    assert random_key(5 + 2**64) == random_key(5)
