"""Seeds: the same initial weights and data everywhere, other dropout on every replica."""

from __future__ import annotations

import random

import numpy as np
import torch


def replica_seed(seed: int, rank: int) -> int:
    """Seed of one replica's dropout: a 63-bit hash of both numbers, so that no two runs or replicas share a stream."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_replica(seed: int, rank: int) -> None:
    """Seed the generators of Python, numpy and torch (all devices) for one replica."""
    own = replica_seed(seed, rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
