"""Making sure that all replicas mean the same run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import numpy as np
import torch

from megatron01.config import PretrainConfig
from megatron01.config.yaml_files import dump_yaml
from megatron01.errors import UserError
from megatron01.parallel import ReplicaGroup


class ReplicasDiverged(RuntimeError):
    """The replicas' master weights or second moments differ, though they must be equal bit for bit."""


def settings_digest(config: PretrainConfig) -> str:
    """Tells settings apart, in 12 characters."""
    return hashlib.sha256(dump_yaml(config).encode()).hexdigest()[:12]


def first_disagreement(
    facts: Mapping[str, str], group: ReplicaGroup, num_parts: int = 1
) -> tuple[str, int, str, str] | None:
    """The first fact in which a rank differs from rank 0. Called by all ranks together.

    Args:
        facts: under the same names on every rank.
        group: all processes.
        num_parts: parts of a replica, each of which has facts of its own: a rank is compared with the first one that
            holds the same part.

    Returns:
        Name, rank, the first rank's value and that rank's value, the same on every rank; None if all agree.
    """
    everyones = group.gather(list(facts.values()))
    for position, name in enumerate(facts):
        for rank, values in enumerate(everyones):
            expected = everyones[rank % num_parts][position]
            if values[position] != expected:
                return name, rank, expected, values[position]
    return None


def require_agreement(facts: Mapping[str, str], group: ReplicaGroup) -> None:
    """Make sure that all replicas start from the same settings, text and weights.

    Raises:
        UserError: on every rank, naming the first fact that differs.
    """
    if found := first_disagreement(facts, group):
        name, rank, first, other = found
        raise UserError(
            f"replicas disagree on {name}: replica 0 has {first}, replica {rank} has {other} (on {group.hosts[rank]}); "
            "start all of them with the same program, settings and files",
            scope="job",
        )


def require_equal_replicas(fingerprint: str, iteration: int, group: ReplicaGroup, num_parts: int = 1) -> None:
    """Compare the hash of what must be equal on all replicas, or on the same part of them, where they have several.

    Raises:
        ReplicasDiverged: on every rank, naming the first one that differs.
    """
    if found := first_disagreement({"fingerprint": fingerprint}, group, num_parts):
        _, rank, first, other = found
        kind = "replica" if num_parts == 1 else "rank"
        raise ReplicasDiverged(
            f"{kind} {rank} differs from {kind} {rank % num_parts} after iteration {iteration} (fingerprints {other} "
            f"and {first}); resume from the last checkpoint, and check the memory and the network of its machine"
        )


def require_equal_parts(fingerprint: str, iteration: int, group: ReplicaGroup) -> None:
    """Compare the hash of what all parts of all replicas hold whole.

    Raises:
        ReplicasDiverged: on every rank, naming the first one that differs.
    """
    if found := first_disagreement({"fingerprint": fingerprint}, group):
        _, rank, first, other = found
        raise ReplicasDiverged(
            f"rank {rank} differs from rank 0 in parameters that every part of a replica holds whole, after iteration "
            f"{iteration} (fingerprints {other} and {first}); resume from the last checkpoint"
        )


# Seeds: the same initial weights and data everywhere, other dropout on every replica.


def replica_seed(seed: int, rank: int) -> int:
    """Seed of one replica's dropout: a 63-bit hash of both numbers, so that no two runs or replicas share a stream."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_replica(seed: int, rank: int) -> None:
    """Seed the generators of Python, numpy and torch (all devices) for one replica."""
    own = replica_seed(seed, rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
