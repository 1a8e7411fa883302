"""Random-number generators of a process: their seeds, and their state as tensors."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor


def replica_seed(seed: int, rank: int) -> int:
    """Dropout seed of a replica: a 63-bit hash of both numbers, so that no two runs or replicas share a stream."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_replica(seed: int, rank: int) -> None:
    """Seed the generators of Python, numpy and torch (all devices) for one replica."""
    own = replica_seed(seed, rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of the generators of Python, numpy, torch on the CPU, and torch on ``device`` if that is a GPU.

    All are copies, on the CPU. The names and shapes are the same in every process on the same kind of device.
    """
    version, internal, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    assert version == 3 and algorithm == "MT19937", (version, algorithm)
    state = {
        "random.python": torch.tensor(internal, dtype=torch.int64),  # (625,)
        "random.python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "random.numpy": torch.tensor([*np.asarray(keys).tolist(), position, has_gauss], dtype=torch.int64),  # (626,)
        "random.numpy_gauss": torch.tensor(cached_gaussian, dtype=torch.float64),
        "random.torch": torch.get_rng_state(),  # uint8
    }
    if device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Put all generators into a state that ``random_state`` returned.

    Raises ValueError, OverflowError or RuntimeError if it is not one of their states.
    """
    has_gauss, gauss = state["random.python_gauss"].tolist()
    random.setstate((3, tuple(state["random.python"].tolist()), gauss if has_gauss else None))
    *keys, position, has_gauss = state["random.numpy"].tolist()
    if not 0 <= position <= len(keys):  # numpy does not check it, and would read out of bounds
        raise ValueError(f"position {position} of numpy's generator")
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["random.numpy_gauss"].item())
    )
    torch.set_rng_state(state["random.torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["random.cuda"], device)
