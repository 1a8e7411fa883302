"""Making sure that all replicas mean the same run."""

from __future__ import annotations

from collections.abc import Mapping

from megatron01.distributed import ReplicaGroup
from megatron01.errors import UserError


class ReplicasDiverged(RuntimeError):
    """The replicas' master weights or second moments differ, though they must be equal bit for bit."""


def first_disagreement(facts: Mapping[str, str], group: ReplicaGroup) -> tuple[str, int, str, str] | None:
    """The first fact in which a replica differs from replica 0. Called by all ranks together.

    Args:
        facts: under the same names on every rank.
        group: the replicas.

    Returns:
        Name, rank, replica 0's value and that rank's value, the same on every rank; None if all agree.
    """
    everyones = group.gather(list(facts.values()))
    for position, name in enumerate(facts):
        for rank, values in enumerate(everyones):
            if values[position] != everyones[0][position]:
                return name, rank, everyones[0][position], values[position]
    return None


def require_agreement(facts: Mapping[str, str], group: ReplicaGroup) -> None:
    """Make sure that all replicas start from the same settings, text and weights.

    Raises:
        UserError: on every rank, naming the first fact that differs.
    """
    if found := first_disagreement(facts, group):
        name, rank, first, other = found
        raise UserError(
            f"replicas disagree on {name}: replica 0 has {first}, replica {rank} has {other}; "
            "start all of them with the same program, settings and files",
            scope="job",
        )


def require_equal_replicas(fingerprint: str, iteration: int, group: ReplicaGroup) -> None:
    """Compare the hash of what must be equal on all replicas.

    Raises:
        ReplicasDiverged: on every rank, naming the first replica that differs.
    """
    if found := first_disagreement({"fingerprint": fingerprint}, group):
        _, rank, first, other = found
        raise ReplicasDiverged(
            f"replica {rank} differs from replica 0 after iteration {iteration} (fingerprints {other} and {first}); "
            "resume from the last checkpoint, and check the memory and the network of its machine"
        )
