from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron01.checkpoint import random_state, set_random_state


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


@pytest.mark.parametrize("draws_before", [0, 1, 2])
def test_all_generators_go_on_where_they_were(draws_before):
    # After an odd number of normal draws, Python and numpy hold a cached second value: part of the state.
    device = torch.device("cpu")
    for _ in range(draws_before):
        draw()
    state = {name: tensor.clone() for name, tensor in random_state(device).items()}
    expected = [draw() for _ in range(3)]
    set_random_state(state, device)
    assert [draw() for _ in range(3)] == expected


def test_shapes_do_not_depend_on_the_state():
    device = torch.device("cpu")
    before = {name: (tensor.shape, tensor.dtype) for name, tensor in random_state(device).items()}
    draw()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in random_state(device).items()} == before
