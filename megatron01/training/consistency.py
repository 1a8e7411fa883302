"""Agreement between ranks: settings and data at the start, replicated state, preemption consensus."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping

from megatron01.config import PretrainConfig
from megatron01.config.yaml_files import dump_yaml
from megatron01.errors import FaultError, UserError
from megatron01.parallel import ReplicaGroup
from megatron01.utils.signals import StopRequest

SECONDS_BETWEEN_CHECKS = 2.0
MOST_STEPS_BETWEEN_CHECKS = 64


class ReplicasDiverged(FaultError):
    """Master weights or second moments differ between replicas, though they must be bit-identical."""


def settings_digest(config: PretrainConfig) -> str:
    """Hash of the settings, 12 hex digits."""
    return hashlib.sha256(dump_yaml(config).encode()).hexdigest()[:12]


def first_disagreement(
    fingerprints: Mapping[str, str], group: ReplicaGroup, num_shards: int = 1
) -> tuple[str, int, str, str] | None:
    """The first fingerprint, of the same names on every rank, in which a rank differs from rank 0. Collective.

    With tensor parallelism a rank is compared with the first one that holds the same shard. Returns name, rank, the
    first rank's value and that rank's value, the same on every rank; None if all agree.
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

    Raises UserError on every rank, naming the first fingerprint that differs.
    """
    if found := first_disagreement(fingerprints, group):
        name, rank, first, other = found
        raise UserError(
            f"replicas disagree on {name}: replica 0 has {first}, replica {rank} has {other} (on {group.hosts[rank]}); "
            "start all of them with the same program, settings and files",
            scope="job",
        )


def require_equal_replicas(
    fingerprint: str, iteration: int, group: ReplicaGroup, num_shards: int = 1, *, what: str | None = None
) -> None:
    """Compare the hash of the replicated state, or of ``what``, over the ranks that hold the same shard.

    Raises ReplicasDiverged on every rank, naming the first one that differs.
    """
    if found := first_disagreement({"fingerprint": fingerprint}, group, num_shards):
        _, rank, first, other = found
        kind = "replica" if num_shards == 1 and what is None else "rank"
        raise ReplicasDiverged(
            f"{kind} {rank} differs from {kind} {rank % num_shards}{f' in {what},' if what else ''} after iteration"
            f" {iteration} (fingerprints {other} and {first}); resume from the last checkpoint, and check the memory"
            " and the network of its machine",
            scope="job",
        )


class PreemptionConsensus:
    """Checks every ``SECONDS_BETWEEN_CHECKS``, or at every step that takes longer, whether any rank is to stop.

    A check is a small collective that makes fast ranks wait for slow ones, so it is not done at every short step. All
    ranks make the same number of steps between two checks: as many as the slowest makes in that time.
    """

    def __init__(self, stop: StopRequest, group: ReplicaGroup, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop, self._group, self._clock = stop, group, clock
        self._steps = 0
        self._steps_between = 1
        self._began = clock()

    def after_step(self) -> str | None:
        """To be called after every step: the reason to stop now (the same text on all ranks), or None."""
        self._steps += 1
        if self._steps < self._steps_between:
            return None
        step_seconds = (self._clock() - self._began) / self._steps
        slowest, is_asked = self._group.maxima([step_seconds, float(self._stop.reason is not None)])
        self._steps_between = int(min(max(SECONDS_BETWEEN_CHECKS / max(slowest, 1e-9), 1), MOST_STEPS_BETWEEN_CHECKS))
        self._steps = 0
        self._began = self._clock()
        return self.now() if is_asked else None

    def now(self) -> str | None:
        """The reason to stop, checked now; collective."""
        reasons: list[str | None] = self._group.gather(self._stop.reason)
        for rank, reason in enumerate(reasons):
            if reason is not None:
                return f"{reason} (rank {rank})" if self._group.world_size > 1 else reason
        return None
