"""Consistency of ranks: equal settings and data at the start, equal weights later; seeds."""

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
    """Master weights or second moments differ between replicas, though they must be bit-identical."""


def settings_digest(config: PretrainConfig) -> str:
    """Hash of the settings, 12 hex digits."""
    return hashlib.sha256(dump_yaml(config).encode()).hexdigest()[:12]


def first_disagreement(
    fingerprints: Mapping[str, str], group: ReplicaGroup, num_shards: int = 1
) -> tuple[str, int, str, str] | None:
    """The first fingerprint in which a rank differs from rank 0. Collective.

    Args:
        fingerprints: under the same names on every rank.
        group: all ranks.
        num_shards: tensor-parallel size; a rank is compared with the first rank that holds the same shard.

    Returns:
        Name, rank, the first rank's value and that rank's value, the same on every rank; None if all agree.
    """
    gathered = group.gather(list(fingerprints.values()))
    for position, name in enumerate(fingerprints):
        for rank, values in enumerate(gathered):
            expected = gathered[rank % num_shards][position]
            if values[position] != expected:
                return name, rank, expected, values[position]
    return None


def require_agreement(fingerprints: Mapping[str, str], group: ReplicaGroup) -> None:
    """Check that all ranks start from the same settings, data and weights.

    Raises:
        UserError: on every rank, naming the first fingerprint that differs.
    """
    if found := first_disagreement(fingerprints, group):
        name, rank, first, other = found
        raise UserError(
            f"replicas disagree on {name}: replica 0 has {first}, replica {rank} has {other} (on {group.hosts[rank]}); "
            "start all of them with the same program, settings and files",
            scope="job",
        )


def require_equal_replicas(fingerprint: str, iteration: int, group: ReplicaGroup, num_shards: int = 1) -> None:
    """Compare the hash of the replicated state over the ranks that hold the same shard.

    Raises:
        ReplicasDiverged: on every rank, naming the first one that differs.
    """
    if found := first_disagreement({"fingerprint": fingerprint}, group, num_shards):
        _, rank, first, other = found
        kind = "replica" if num_shards == 1 else "rank"
        raise ReplicasDiverged(
            f"{kind} {rank} differs from {kind} {rank % num_shards} after iteration {iteration} (fingerprints {other} "
            f"and {first}); resume from the last checkpoint, and check the memory and the network of its machine"
        )


def require_equal_replicated_parameters(fingerprint: str, iteration: int, group: ReplicaGroup) -> None:
    """Compare the hash of the parameters that are replicated over tensor-parallel ranks.

    Raises:
        ReplicasDiverged: on every rank, naming the first one that differs.
    """
    if found := first_disagreement({"fingerprint": fingerprint}, group):
        _, rank, first, other = found
        raise ReplicasDiverged(
            f"rank {rank} differs from rank 0 in parameters that are replicated over tensor-parallel ranks, after"
            f" iteration {iteration} (fingerprints {other} and {first}); resume from the last checkpoint"
        )


def replica_seed(seed: int, rank: int) -> int:
    """Dropout seed of a replica: a 63-bit hash of both numbers, so that no two runs or replicas share a stream."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_replica(seed: int, rank: int) -> None:
    """Seed the generators of Python, numpy and torch (all devices) for one replica."""
    own = replica_seed(seed, rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
