from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.contrib.deepspeed import resolve_batch
from megatron01.errors import UserError


@pytest.mark.parametrize(
    ("given_sizes", "replicas", "resolved"),
    [
        ((4096, 16, None), 8, (4096, 16, 32)),
        ((4096, None, 32), 8, (4096, 16, 32)),
        ((None, 16, 32), 8, (4096, 16, 32)),
        ((4096, 16, 32), 8, (4096, 16, 32)),
        ((64, None, None), 8, (64, 8, 1)),
        ((None, 16, None), 8, (128, 16, 1)),
    ],
)
def test_what_is_missing_follows(given_sizes: tuple[int | None, ...], replicas: int, resolved: tuple[int, ...]) -> None:
    total, micro, accumulation = given_sizes
    assert resolve_batch(total, micro, accumulation, replicas) == resolved


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_any_two_of_three_say_it_all(micro: int, accumulation: int, replicas: int) -> None:
    whole = (micro * accumulation * replicas, micro, accumulation)
    for left_out in range(3):
        sizes = [None if index == left_out else size for index, size in enumerate(whole)]
        assert resolve_batch(sizes[0], sizes[1], sizes[2], replicas) == whole


@pytest.mark.parametrize(
    ("given_sizes", "message"),
    [
        (
            (4096, 16, 3),
            "train_batch_size 4096 is not train_micro_batch_size_per_gpu 16 x gradient_accumulation_steps 3 x 8 "
            "replicas; DeepSpeed refuses this too: change one of them",
        ),
        (
            (100, 16, None),
            "train_batch_size 100 is not a multiple of train_micro_batch_size_per_gpu 16 x 8 replicas; "
            "DeepSpeed refuses this too: change one of them",
        ),
        (
            (4, None, None),
            "train_batch_size 4 is not a multiple of 8 replicas; DeepSpeed refuses this too: change one of them",
        ),
        (
            (None, None, 4),
            "gradient_accumulation_steps is given alone; DeepSpeed needs train_batch_size or "
            "train_micro_batch_size_per_gpu beside it",
        ),
        ((0, 1, None), "train_batch_size is 0; expected a positive number"),
        ((None, -1, 2), "train_micro_batch_size_per_gpu is -1; expected a positive number"),
    ],
)
def test_contradictions(given_sizes: tuple[int | None, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_batch(given_sizes[0], given_sizes[1], given_sizes[2], 8)
    assert str(caught.value) == message
