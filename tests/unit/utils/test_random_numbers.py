from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron01.utils.random_numbers import random_state, replica_seed, seed_replica, set_random_state


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


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("random.python", lambda state: state.fill_(-1)),
        ("random.python", lambda state: state.index_fill_(0, torch.tensor([624]), 10**6)),
        ("random.numpy", lambda state: state.fill_(-1)),
        ("random.numpy", lambda state: state.index_fill_(0, torch.tensor([624]), 10**6)),  # the position in the state
        ("random.numpy", lambda state: state.index_fill_(0, torch.tensor([624]), -1)),
        ("random.torch", lambda state: state.fill_(255)),
    ],
)
def test_what_is_no_state_is_refused(name, change):
    device = torch.device("cpu")
    before = random_state(device)
    state = {name: tensor.clone() for name, tensor in before.items()}
    change(state[name])
    with pytest.raises((ValueError, OverflowError, RuntimeError)):
        set_random_state(state, device)
    set_random_state(before, device)


def test_every_replica_has_a_seed_of_its_own():
    seeds = {replica_seed(seed, rank) for seed in range(50) for rank in range(50)}
    assert len(seeds) == 2500 and all(0 <= seed < 2**63 for seed in seeds)


def test_seeding_repeats():
    seed_replica(1, 0)
    first = torch.rand(4)
    seed_replica(1, 1)
    assert not torch.equal(torch.rand(4), first)
    seed_replica(1, 0)
    assert torch.equal(torch.rand(4), first)
