"""How long a whole run takes: each kind of step of its schedule times what such a step takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from megatron01.config import OptimizerConfig, Precision
from megatron01.config.registry import find_optimizer, optimizers
from megatron01.cost.cluster import Cluster
from megatron01.cost.step_time import StepModel, StepTime, Work
from megatron01.cost.volume import FULL, ONE_BIT, STEP_KINDS, Wire, full_step_bytes, packed_bytes, traffic


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train: what distinguishes it from others.

    Attributes:
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
        kinds: for each kind of step that occurs: how many there are, and where the time of one goes.
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
    """Steps of a run that take as long as each other.

    Attributes:
        kind: index into ``STEP_KINDS``.
        every_step: the policy asks for an exchange at each step.
        packed_rounds: exchanges of bits; full steps may make one too.
        waits: how long all of them together wait for the slowest replica, in deviations of one step's compute time.
    """

    kind: int
    every_step: bool
    steps: int
    packed_rounds: int
    waits: float


def run_time(choice: Choice, *, cluster: Cluster, work: Work, train_iters: int, precision: Precision) -> RunTime:
    """The time of a run.

    Replicas wait for the slowest at each exchange. The compute times of k steps in a row add up, so that their sum
    varies by sqrt(k) times as much as one of them and not k times: rare exchanges wait less.

    Raises:
        UserError: if the settings contradict each other, or tell no schedule (``volume.traffic``).
    """
    settings = choice.optimizer
    work = replace(work, gradient_bytes=full_step_bytes(settings, precision))
    model = StepModel(cluster, work, settings, choice.replica_is_node, choice.sharded)
    groups = _alike_steps(replace(settings, bucket_elements=1), train_iters)
    replicas = cluster.nodes if choice.replica_is_node else cluster.processes
    deviation = cluster.jitter * work.compute_seconds * cluster.slowest(replicas)

    found: dict[str, list[tuple[int, StepTime]]] = defaultdict(list)
    for alike in groups:
        step = model.step(STEP_KINDS[alike.kind], every_step=alike.every_step)
        if alike.kind == FULL and alike.packed_rounds:  # full steps that also send the accumulated steps
            second = model.step(STEP_KINDS[ONE_BIT], every_step=False)
            share = alike.packed_rounds / alike.steps
            step = replace(step, exposed=step.exposed + share * second.exposed)
        step = replace(step, waiting=deviation * alike.waits / alike.steps)
        found[STEP_KINDS[alike.kind]].append((alike.steps, step))
    kinds = {kind: (sum(count for count, _ in steps), _mean(steps)) for kind, steps in found.items()}
    return RunTime(
        choice=choice,
        kinds=kinds,
        seconds=sum(count * step.seconds for count, step in kinds.values()),
        node_bytes=_node_bytes(groups, model),
    )


@lru_cache(maxsize=64)
def _alike_steps(settings: OptimizerConfig, train_iters: int) -> tuple[_Alike, ...]:
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
                packed = int(run.one_bit[chosen].sum())
                alike.append(_Alike(int(kind), every_step, steps, packed, float(waits[chosen].sum())))
    return tuple(alike)


def _mean(steps: Sequence[tuple[int, StepTime]]) -> StepTime:
    """Of steps with their numbers."""
    total = sum(count for count, _ in steps)
    parts = (field.name for field in fields(StepTime))
    return StepTime(*(sum(count * getattr(step, part) for count, step in steps) / total for part in parts))


def _node_bytes(groups: Sequence[_Alike], model: StepModel) -> float:
    """Bytes that one node sends to others: 2 (N-1)/N of what is exchanged (Adam: at least, a ring sends some more).

    Headers, and elements that fill the last block of a parameter, are left out.
    """
    nodes = model.cluster.nodes
    dense_rounds = sum(alike.steps for alike in groups if alike.kind == FULL)
    packed_rounds = sum(alike.packed_rounds for alike in groups)
    sent = dense_rounds * model.work.gradient_bytes + packed_rounds * packed_bytes(model.config)
    return 2 * (nodes - 1) / nodes * model.work.parameters * sent


WORTH_IT = 0.05
"""What compression, or skipping more rounds, has to gain in time before it is recommended: each costs some accuracy."""

_NOTICEABLE = 0.98
_BUCKET_FACTORS = (2, 8, 64)
_LARGEST_SHARE = 0.5  # of the model in one bucket, of which copies are made


@dataclass(frozen=True)
class Recommendation:
    """The run to choose, and why in a sentence."""

    best: RunTime
    reason: str


def choices(config: OptimizerConfig, cluster: Cluster, train_iters: int, *, sharded: bool) -> list[Choice]:
    """Adam, 1-bit Adam and 0/1 Adam with several longest intervals, and the optimizer of the settings if it is another.

    Where several nodes have several processes, 0/1 Adam also with nodes as replicas, which divide its state if it is
    ``sharded``.
    """
    found = []
    for name, spec in {**optimizers(), config.optimizer: find_optimizer(config.optimizer)}.items():
        if spec.variants is not None:
            variants = spec.variants(config, train_iters)
        elif name == config.optimizer:
            variants = {name: config}
        else:
            continue
        for variant, settings in variants.items():
            found.append(Choice(name=variant, optimizer=settings))
            skips_rounds = "sync_policy" in spec.planned_settings and settings.sync_policy != "every"
            if skips_rounds and cluster.processes_per_node > 1 and cluster.nodes > 1:
                variant += ", nodes as replicas" + (", state divided" if sharded else "")
                found.append(Choice(name=variant, optimizer=settings, replica_is_node=True, sharded=sharded))
    return found


def run_times(
    config: OptimizerConfig,
    *,
    cluster: Cluster,
    work: Work,
    train_iters: int,
    precision: Precision,
    sharded: bool = False,
) -> list[RunTime]:
    """The time of each of ``choices``, with the buckets that suit it best.

    Large buckets are fewer messages, which counts with many nodes; small ones overlap better.

    Raises:
        UserError: if the settings contradict each other.
    """
    found = []
    for choice in choices(config, cluster, train_iters, sharded=sharded):
        sizes: list[int | None] = [config.bucket_elements]
        if not find_optimizer(choice.optimizer.optimizer).ddp:
            given = config.bucket_size(work.parameters, on_gpu=cluster.on_gpu)
            larger = [given * factor for factor in _BUCKET_FACTORS]
            sizes += [size for size in larger if size <= _LARGEST_SHARE * work.parameters]
        runs = []
        for size in sizes:
            sized = replace(choice, optimizer=replace(choice.optimizer, bucket_elements=size))
            runs.append(run_time(sized, cluster=cluster, work=work, train_iters=train_iters, precision=precision))
        quickest = min(runs, key=lambda run: run.seconds)
        found.append(quickest if quickest.seconds < _NOTICEABLE * runs[0].seconds else runs[0])
    return found


def recommend(runs: Sequence[RunTime]) -> Recommendation:
    """The quickest run with Adam or 0/1 Adam, unless one that is more exact takes at most ``WORTH_IT`` longer.

    ``runs`` are in the order of ``choices``: from the most exact, Adam, to the longest intervals. 1-bit Adam is there
    to compare with, as the length of its warm-up is one more thing to tune. Where some divide the state of their
    optimizer, 0/1 Adam is recommended with a divided state only, as it may not fit otherwise.
    """
    must_divide = any(run.choice.sharded for run in runs)
    candidates = [
        run
        for run in runs
        if (spec := find_optimizer(run.choice.optimizer.optimizer)).automatic
        and (spec.ddp or run.choice.sharded == must_divide)
    ]
    fastest = min(candidates, key=lambda run: run.seconds)
    best = next(run for run in candidates if run.seconds <= fastest.seconds * (1 + WORTH_IT))
    adam = candidates[0]
    assert find_optimizer(adam.choice.optimizer.optimizer).ddp
    gain = best.seconds / fastest.seconds - 1
    if best is not adam:
        reason = f"{adam.seconds / best.seconds:.2g} times as fast as {adam.choice.name}"
        if best is not fastest:
            reason += f"; {fastest.choice.name} would gain {gain:.0%} more"
    elif gain < 0.01:
        reason = "all-reduce of gradients hides behind the backward pass here; compression gains nothing"
    else:
        reason = f"compression would gain {gain:.0%} at most, which its noise may cost again"
    return Recommendation(best, reason)
