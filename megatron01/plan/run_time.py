"""How long a whole run takes: each kind of step of its schedule times what such a step takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from megatron01.config import OptimizerConfig, Precision
from megatron01.plan.cluster import Cluster
from megatron01.plan.collectives import Collectives
from megatron01.plan.step_time import Exchange, StepModel, StepTime, Work, step_time
from megatron01.plan.volume import FULL, ONE_BIT, STEP_KINDS, Wire, gradient_bytes, traffic


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train: what distinguishes it from others.

    Attributes:
        name: for tables.
        optimizer: its settings.
        replica_is_node: the processes of a node average their gradients at every step.
        sharded: and divide the optimizer's state among them.
    """

    name: str
    optimizer: OptimizerConfig
    replica_is_node: bool = False
    sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """What a run with one choice takes.

    Attributes:
        choice: the one.
        kinds: for each kind of step that occurs: how many there are, and where the time of one goes.
        seconds: of all steps.
        node_bytes: sent by one node to others, in all steps.
    """

    choice: Choice
    kinds: Mapping[str, tuple[int, StepTime]]
    seconds: float
    node_bytes: float

    @property
    def steps(self) -> int:
        return sum(count for count, _ in self.kinds.values())

    @property
    def step_seconds(self) -> float:
        """Of the mean step."""
        return self.seconds / self.steps


@dataclass(frozen=True)
class _Alike:
    """Steps that take as long as each other.

    Attributes:
        kind: index into ``STEP_KINDS``.
        every_step: the policy asks for an exchange at each step.
        steps: how many.
        second_rounds: of them, those that make two exchanges.
        waits: how long all of them together wait for the slowest replica, in deviations of one step's compute time.
    """

    kind: int
    every_step: bool
    steps: int
    second_rounds: int
    waits: float


@dataclass(frozen=True)
class _Pattern:
    """What of a run's schedule decides its time: groups of steps, and how many exchanges of either kind there are."""

    alike: tuple[_Alike, ...]
    dense_rounds: int
    packed_rounds: int


def run_time(choice: Choice, *, cluster: Cluster, work: Work, train_iters: int, precision: Precision) -> RunTime:
    """The time of a run.

    Replicas wait for the slowest at each exchange. The compute times of k steps in a row add up, so that their sum
    varies by sqrt(k) times as much as one of them and not k times: rare exchanges wait less.

    Raises:
        UserError: if the settings contradict each other, or tell no schedule (``volume.traffic``).
    """
    settings = choice.optimizer
    hierarchical = Collectives(cluster).is_hierarchical() and settings.optimizer != "adam"
    exchange = Exchange.of(
        settings, replica_is_node=choice.replica_is_node, sharded=choice.sharded, hierarchical=hierarchical
    )
    model = StepModel(cluster, replace(work, gradient_bytes=gradient_bytes(settings, precision)), exchange)
    pattern = _pattern(replace(settings, bucket_elements=1), train_iters)
    replicas = cluster.nodes if choice.replica_is_node else cluster.processes
    deviation = cluster.jitter * model.work.compute_seconds * cluster.slowest(replicas)

    found: dict[str, list[tuple[int, StepTime]]] = defaultdict(list)
    for alike in pattern.alike:
        step = step_time(model, settings.optimizer, STEP_KINDS[alike.kind], alike.every_step)
        if alike.second_rounds:  # full steps that also send the accumulated steps
            second = step_time(model, settings.optimizer, STEP_KINDS[ONE_BIT], False)
            share = alike.second_rounds / alike.steps
            step = replace(step, exposed=step.exposed + share * second.exposed)
        step = replace(step, waiting=deviation * alike.waits / alike.steps)
        found[STEP_KINDS[alike.kind]].append((alike.steps, step))
    kinds = {kind: (sum(count for count, _ in steps), _mean(steps)) for kind, steps in found.items()}
    return RunTime(
        choice=choice,
        kinds=kinds,
        seconds=sum(count * step.seconds for count, step in kinds.values()),
        node_bytes=_node_bytes(pattern, choice, cluster, exchange, model.work),
    )


@lru_cache(maxsize=64)
def _pattern(settings: OptimizerConfig, train_iters: int) -> _Pattern:
    """The same for any model and cluster, so that it is found once for all of them."""
    anyone = Wire(parameter_sizes=(1,), replicas=2, block_size=settings.block_size)
    run = traffic(settings, train_iters=train_iters, precision="fp32", wire=anyone)
    # an exchange after k steps without one waits sqrt(k) deviations
    exchanged = np.flatnonzero(run.rounds)
    waits = np.zeros(run.steps)
    waits[exchanged] = np.sqrt(np.diff(exchanged, prepend=-1))
    alike = []
    for kind in np.unique(run.kind):
        for every_step in (True, False):
            chosen = (run.kind == kind) & ((run.interval == 1) == every_step)
            if steps := int(chosen.sum()):
                second = int((run.rounds[chosen] > 1).sum())
                alike.append(_Alike(int(kind), every_step, steps, second, float(waits[chosen].sum())))
    dense = int((run.kind == FULL).sum())
    return _Pattern(tuple(alike), dense, run.total_rounds - dense)


def _mean(steps: Sequence[tuple[int, StepTime]]) -> StepTime:
    """Of steps with their numbers."""
    total = sum(count for count, _ in steps)
    parts = (field.name for field in fields(StepTime))
    return StepTime(*(sum(count * getattr(step, part) for count, step in steps) / total for part in parts))


def _node_bytes(pattern: _Pattern, choice: Choice, cluster: Cluster, exchange: Exchange, work: Work) -> float:
    """Bytes that one node sends to others: 2 (N-1)/N of what is exchanged (Adam: at least, a ring sends some more).

    Headers, and elements that fill the last block of a parameter, are left out.
    """
    dense_bytes = 4 if choice.optimizer.optimizer == "soft_sign_sgd" else work.gradient_bytes
    sent = pattern.dense_rounds * dense_bytes + pattern.packed_rounds * exchange.packed_bytes
    return 2 * (cluster.nodes - 1) / cluster.nodes * work.parameters * sent
