"""Time of a training step of each kind, and of a whole run: the sum over the steps of its schedule.

A step is a set of tasks on a ``Timeline``: forward and backward passes, then for each bucket the optimizer's arithmetic
and collectives, which take precedence over remaining passes. Arithmetic is memory-bound, and counted in bytes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from graphlib import TopologicalSorter
from typing import NamedTuple

import numpy as np

from megatron01.config import OptimizerConfig, Precision
from megatron01.config.registry import STEPS_AT_ONCE, find_optimizer, optimizers
from megatron01.cost import volume
from megatron01.cost.cluster import Cluster, Resource, Stage, expected_maximum


class Task(NamedTuple):
    """A task of a ``Timeline``."""

    resource: Resource  # occupied exclusively from its start to its end
    seconds: float
    after: tuple[int, ...] = ()  # numbers of its dependencies
    priority: bool = False  # goes before tasks without it


class Timeline:
    """A discrete-event simulation of tasks with dependencies and shared resources.

    A free resource runs the ready task that was added first, those with ``priority`` before all others.
    """

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._tasks = list(tasks)

    def add(self, resource: Resource, seconds: float, *after: int, priority: bool = False) -> int:
        """Add a task; returns its number."""
        self._tasks.append(Task(resource, seconds, after, priority))
        return len(self._tasks) - 1

    def seconds_on(self, resource: Resource) -> float:
        """Total seconds for which a resource is occupied."""
        return sum(task.seconds for task in self._tasks if task.resource == resource)

    def ends(self) -> list[float]:
        """Seconds from the start to the end of each task."""
        ends = [0.0] * len(self._tasks)
        graph = TopologicalSorter({number: task.after for number, task in enumerate(self._tasks)})
        graph.prepare()
        ready: dict[Resource, list[tuple[bool, int]]] = defaultdict(list)  # heaps of (without priority, number)
        running: list[tuple[float, int]] = []  # heap of (end, number)
        busy: set[Resource] = set()
        now = 0.0
        while graph.is_active():
            for number in graph.get_ready():
                heapq.heappush(ready[self._tasks[number].resource], (not self._tasks[number].priority, number))
            for resource, queue in ready.items():
                if queue and resource not in busy:
                    _, number = heapq.heappop(queue)
                    heapq.heappush(running, (now + self._tasks[number].seconds, number))
                    busy.add(resource)
            now, ended = heapq.heappop(running)
            ends[ended] = now
            busy.remove(self._tasks[ended].resource)
            graph.done(ended)
        return ends


@dataclass(frozen=True)
class _Traffic:
    """Memory traffic of the optimizer's arithmetic, in bytes per element: what each kernel reads and writes, once each.

    x and all of Adam's state are fp32. Those of fp32 weights are in ``benchmarks/README.md``.
    """

    weight: int  # bytes of an element of the model's weights
    gradient: int  # of its gradient, in the flat buffer
    state: int  # of v, m, u and the errors
    second_moment: bool
    common_momentum: bool  # a local step does not write m

    def adam(self, *, multiplies: bool) -> float:
        """The norm; g, m, v and x read, m, v and x written. 16-bit gradients and weights have fp32 copies."""
        copies = 0 if self.weight == 4 else 2 * (4 + self.weight)
        return self.weight + copies + (8 if multiplies else 0) + 28

    @property
    def local(self) -> float:
        """The norm; g, m, u, v and x read, m, u and the weights written."""
        buffers = 3 + self.second_moment + (not self.common_momentum)
        return 2 * self.gradient + buffers * self.state + 4 + self.weight

    @property
    def one_bit(self) -> float:
        """The norm; g, m and u read, u written; after the exchange v and x read, x, m and the weights written."""
        if self.second_moment:
            return 2 * self.gradient + 5 * self.state + 8 + self.weight
        # soft sign: g, m and b read before it and again after it, when m, b, x and the weights are written
        return 3 * self.gradient + 7 * self.state + 8 + self.weight

    @property
    def full(self) -> float:
        """m, v and x read, m, v, x and the weights written; without the mean gradient. u is 0."""
        return (4 if self.second_moment else 2) * self.state + 8 + self.weight

    @property
    def own_norm(self) -> float:
        """Of a replica's gradient, which is sent with it."""
        return self.gradient

    def to_rows(self, wire: float) -> float:
        """Gradients read and written as rows for the wire, or back."""
        return self.gradient + wire

    def compress(self, value: int) -> float:
        """A value read, its error read and written."""
        return value + 2 * self.state

    @property
    def reduce(self) -> float:
        """Per element of the chunk that a process owns as server: its error read and written."""
        return 2 * self.state


_MOST_BUCKETS = 48
"""Most buckets that are simulated; with more, buckets are merged, which changes little and keeps planning fast."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Compute work of one process in one step."""

    parameters: int  # elements of the model that this process holds
    forward_seconds: float  # of one micro-batch
    backward_seconds: float  # likewise
    micro_batches: int = 1  # per step
    gradient_bytes: float = 2.0  # per gradient element on the wire, at full steps
    weight_bytes: int = 2  # per element of the model's weights
    sums_in_fp32: bool = False  # the gradients of several micro-batches; not those of Adam
    step_seconds: float = 0.0  # fixed overhead of a step: kernel launches, data loading
    exchange_seconds: float = 0.0  # fixed processor overhead of exchanging a bucket; not for Adam's all-reduce
    sending: float = 0.0  # processor seconds per byte sent or received; 0 if network cards do the work
    ddp_bucket_bytes: float = 25e6  # size of DDP's gradient buckets, for Adam

    @property
    def compute_seconds(self) -> float:
        """Seconds of forward and backward passes in a step."""
        return self.micro_batches * (self.forward_seconds + self.backward_seconds)


@dataclass(frozen=True)
class StepTime:
    """Breakdown of the seconds of a step; ``seconds`` is their sum."""

    compute: float  # forward and backward passes, and fixed overhead
    arithmetic: float  # of the optimizer, compression included
    exposed: float  # communication that does not overlap with compute
    waiting: float = 0.0  # mean wait for the slowest replica

    @property
    def seconds(self) -> float:
        return self.compute + self.arithmetic + self.exposed + self.waiting


@dataclass(frozen=True)
class StepModel:
    """Step times of one model on one cluster."""

    cluster: Cluster
    work: Work
    config: OptimizerConfig
    replica_is_node: bool = False  # the processes of a node average their gradients at every step
    sharded: bool = False  # ZeRO inside nodes: each process updates its shard and sends it on; not for Adam

    def step(self, kind: str, *, every_step: bool) -> StepTime:
        """Time of a step of one of ``volume.STEP_KINDS``; ``every_step`` as in ``one_bit``."""
        if find_optimizer(self.config.optimizer).ddp:
            return self.adam()
        if kind == "full":
            return self.full()
        return self.one_bit(every_step=every_step) if kind == "one_bit" else self.local()

    def adam(self) -> StepTime:
        """Adam's step: an all-reduce of gradients per bucket during the backward pass (DistributedDataParallel)."""
        work = self.work
        size = work.parameters * work.gradient_bytes
        num_buckets = _whole_buckets(size / work.ddp_bucket_bytes)
        timeline, ends = self._passes(num_buckets)
        if self.cluster.processes > 1:
            stage = self.cluster.all_reduce(size / num_buckets)
            processing = 2 * size / num_buckets * work.sending
            ends = [self._send(timeline, [stage], processing, after) for after in ends]
        # on a GPU the norm is not waited for, so gradients are multiplied at every step
        update = self._memory(self._traffic.adam(multiplies=self.config.clip_grad > 0 or self.cluster.on_gpu))
        update = timeline.add("processor", update, *ends)
        return self._breakdown(timeline, update)

    def local(self) -> StepTime:
        """Local step: no exchange between replicas."""
        timeline, passes = self._passes(1)
        update = timeline.add("processor", self._update(self._traffic.local), *self._average_inside(timeline, passes))
        return self._breakdown(timeline, update)

    def full(self) -> StepTime:
        """Full step: the mean gradient, in 16 bits or quantized, by all-to-all, sum, all-gather."""
        work = self.work
        if self.cluster.processes == 1:
            return self.local()
        num_buckets = self._num_buckets()
        timeline, passes = self._passes(num_buckets)
        if not self.config.overlap_exchange:
            passes = [passes[-1]] * num_buckets
        size = work.parameters * work.gradient_bytes / num_buckets
        bits = volume.gradient_code_bits(self.config)
        # with ZeRO, the last collective carries new weights in place of mean gradients
        inner = size if bits is None else volume.INSIDE_BYTES * work.parameters / num_buckets
        # also where a node is a replica: at full steps its processes have their own gradients
        stages = self._stages(size, inner=inner, outer=size, reduces=True)
        processing = work.exchange_seconds + 2 * size * work.sending
        traffic = self._traffic
        if bits is None:
            after_it, mean_bytes = traffic.to_rows(work.gradient_bytes), float(traffic.gradient)
            before = traffic.own_norm + after_it
        else:  # the mean stays packed: its norm and the update decode it
            before, after_it, mean_bytes = traffic.own_norm, 0.0, bits / 8
            before += traffic.compress(traffic.gradient) * self._share_sent
            before += traffic.to_rows(volume.INSIDE_BYTES) if self.cluster.is_hierarchical else 0.0
            processing += self._memory(traffic.reduce) / self.cluster.processes / num_buckets
        ends = []
        for after in passes:
            read = timeline.add("processor", self._memory(before) / num_buckets, after, priority=True)
            sent = self._send(timeline, stages, processing, read)
            ends.append(timeline.add("processor", self._memory(after_it) / num_buckets, sent, priority=True))
        update = self._update(traffic.full + 2 * mean_bytes)
        return self._breakdown(timeline, timeline.add("processor", update, *ends))

    def one_bit(self, *, every_step: bool) -> StepTime:
        """1-bit step: compress, all-to-all, reduce, all-gather; decompression is fused with the weight update.

        In a phase with exchanges at ``every_step``, buckets may start during the backward pass, unless clipping has to
        wait for the norm.
        """
        work, cluster, config = self.work, self.cluster, self.config
        if cluster.processes == 1:
            return self.local()
        sends_bits = volume.sends_bits(config)
        num_buckets = self._num_buckets(of_steps=sends_bits)
        timeline, passes = self._passes(num_buckets)
        traffic = self._traffic
        update = self._update(traffic.one_bit)
        starts_early = config.overlap_exchange and every_step and config.clip_grad == 0 and not self.replica_is_node
        if not starts_early:
            passes = self._average_inside(timeline, [passes[-1]])
            passes = [timeline.add("processor", update, *passes)] * num_buckets
        elements = work.parameters / num_buckets
        packed = elements * volume.packed_bytes(config)
        stages = self._stages(
            packed,
            inner=volume.INSIDE_BYTES * elements if sends_bits else packed,
            outer=0.0 if self.sharded else packed,
            reduces=not self.replica_is_node,
        )
        compression = self._memory(traffic.compress(traffic.state)) * self._share_sent / num_buckets
        reduction = self._memory(traffic.reduce) / cluster.processes / num_buckets
        processing = reduction + work.exchange_seconds + 2 * packed * work.sending
        ends = []
        for after in passes:
            compressed = timeline.add("processor", compression, after, priority=True)
            ends.append(self._send(timeline, stages, processing, compressed))
        time = self._breakdown(timeline, timeline.add("processor", update if starts_early else 0.0, *ends))
        if config.delay_synchronization:
            time = replace(time, exposed=max(0.0, time.exposed - work.compute_seconds))
        return time

    @property
    def _share_sent(self) -> float:
        """Share of the elements that a process compresses and sends between nodes."""
        return 1 / self.cluster.processes_per_node if self.cluster.is_hierarchical else 1.0

    def _passes(self, num_buckets: int) -> tuple[Timeline, list[int]]:
        """A timeline with the passes of all micro-batches, and the tasks that complete each bucket's gradients."""
        work, timeline = self.work, Timeline()
        before = (work.micro_batches - 1) * (work.forward_seconds + work.backward_seconds)
        last = timeline.add("processor", before + work.forward_seconds + work.step_seconds)
        passes = []
        for _ in range(num_buckets):
            last = timeline.add("processor", work.backward_seconds / num_buckets, last)
            passes.append(last)
        return timeline, passes

    def _num_buckets(self, *, of_steps: bool = False) -> int:
        elements = self.work.parameters
        size = self.config.bucket_size(elements, on_gpu=self.cluster.on_gpu, of_steps=of_steps)
        return _whole_buckets(elements / size)

    def _average_inside(self, timeline: Timeline, passes: list[int]) -> list[int]:
        """Add the all-reduce of gradients inside a node, in 16 bits, at every step, if a node is one replica.

        With ZeRO, a reduce-scatter of gradients and an all-gather of weights take as long.
        """
        if not self.replica_is_node or self.cluster.processes_per_node == 1:
            return passes
        stage = self.cluster.inside(volume.INSIDE_BYTES * self.work.parameters)
        return [timeline.add("inside", 2 * stage.seconds, *passes)]

    def _stages(self, size: float, *, inner: float, outer: float, reduces: bool) -> list[Stage]:
        """The collectives of one bucket.

        Args:
            size: bytes of the bucket exchanged between nodes.
            inner, outer: bytes of the bucket in the reduction inside nodes, and in the last all-gather there; 0: none.
            reduces: reduce inside nodes first, unless that was done before.
        """
        stages = [self.cluster.across(size, hierarchical=self.cluster.is_hierarchical)] * 2
        if self.cluster.is_hierarchical and reduces:
            stages.insert(0, self.cluster.inside(inner))
        if self.cluster.is_hierarchical and outer > 0:
            stages.append(self.cluster.inside(outer))
        return stages

    def _send(self, timeline: Timeline, stages: list[Stage], processing: float, after: int) -> int:
        """Add a bucket's collectives, and seconds of ``processing`` before the last; returns the last task."""
        for stage in stages[:-1]:
            after = timeline.add(*stage, after)
        after = timeline.add("processor", processing, after, priority=True)
        return timeline.add(*stages[-1], after)

    def _update(self, bytes_per_element: float) -> float:
        share = 1 / self.cluster.processes_per_node if self.sharded else 1.0
        return share * self._memory(bytes_per_element)

    def _memory(self, bytes_per_element: float) -> float:
        return bytes_per_element * self.work.parameters / self.cluster.memory_rate

    @property
    def _traffic(self) -> _Traffic:
        work = self.work
        return _Traffic(
            weight=work.weight_bytes,
            gradient=4 if work.sums_in_fp32 and work.micro_batches > 1 else work.weight_bytes,
            state=volume.ELEMENT_BYTES[self.config.state_dtype],
            second_moment=find_optimizer(self.config.optimizer).second_moment,
            common_momentum=self.config.local_momentum == "common",
        )

    def _breakdown(self, timeline: Timeline, last: int) -> StepTime:
        compute = self.work.compute_seconds + self.work.step_seconds
        arithmetic = max(0.0, timeline.seconds_on("processor") - compute)
        return StepTime(compute, arithmetic, max(0.0, timeline.ends()[last] - compute - arithmetic))


def _whole_buckets(buckets: float) -> int:
    return min(_MOST_BUCKETS, max(1, round(buckets + 0.5)))


# Whole runs.


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train: an optimizer with its settings and layout."""

    name: str
    optimizer: OptimizerConfig
    replica_is_node: bool = False  # the processes of a node average their gradients at every step
    sharded: bool = False  # and shard the optimizer state among them (ZeRO)


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Time and traffic of a run with one choice."""

    choice: Choice
    kinds: Mapping[str, tuple[int, StepTime]]  # number and mean time of the steps of each kind that occurs
    seconds: float
    node_bytes: float  # bytes sent by one node to others, in all steps

    @property
    def steps(self) -> int:
        return sum(count for count, _ in self.kinds.values())

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps


class _StepGroup(NamedTuple):
    """Steps of a run that take the same time."""

    kind: str  # one of ``STEP_KINDS``
    every_step: bool  # the synchronization interval is 1
    steps: int  # their number
    packed_rounds: int  # number of 1-bit exchanges; full steps may make one too
    waiting: float  # total wait for the slowest replica, in standard deviations of one step's compute time


def run_time(choice: Choice, *, cluster: Cluster, work: Work, train_iters: int, precision: Precision) -> RunTime:
    """The time of a run.

    Replicas wait for the slowest at each exchange. The standard deviation of the compute time of k steps is sqrt(k),
    not k, times that of one, so that rare exchanges wait less in total. Raises UserError if the settings contradict
    each other, or determine no schedule (``volume.traffic``).
    """
    settings = choice.optimizer
    work = replace(
        work,
        gradient_bytes=volume.full_step_bytes(settings, precision),
        weight_bytes=volume.ELEMENT_BYTES[precision],
    )
    model = StepModel(cluster, work, settings, choice.replica_is_node, choice.sharded)
    groups = _group_steps(replace(settings, bucket_elements=1), train_iters)
    replicas = cluster.nodes if choice.replica_is_node else cluster.processes
    deviation = cluster.jitter * work.compute_seconds * expected_maximum(replicas)

    times: dict[str, list[tuple[int, StepTime]]] = defaultdict(list)
    for group in groups:
        step = model.step(group.kind, every_step=group.every_step)
        if group.kind == "full" and group.packed_rounds:  # full steps that also send the accumulated steps
            share = group.packed_rounds / group.steps
            step = replace(step, exposed=step.exposed + share * model.step("one_bit", every_step=False).exposed)
        step = replace(step, waiting=deviation * group.waiting / group.steps)
        times[group.kind].append((group.steps, step))
    kinds = {}
    for kind, steps in times.items():
        counts = [count for count, _ in steps]
        mean = np.average([astuple(step) for _, step in steps], axis=0, weights=counts)
        kinds[kind] = (sum(counts), StepTime(*mean.tolist()))
    return RunTime(
        choice=choice,
        kinds=kinds,
        seconds=sum(count * step.seconds for count, step in kinds.values()),
        node_bytes=_node_bytes(groups, model),
    )


@lru_cache(maxsize=64)
def _group_steps(settings: OptimizerConfig, train_iters: int) -> tuple[_StepGroup, ...]:
    """Steps of a run grouped by equal time; cached, as they do not depend on model and cluster."""
    any_wire = volume.Wire(parameter_sizes=(1,), replicas=2, block_size=settings.block_size)
    run = volume.traffic(settings, train_iters=train_iters, precision="fp32", wire=any_wire)
    # by kind, and interval of 1 or longer: steps, 1-bit exchanges, and waiting
    sums = np.zeros((3, 2 * len(volume.STEP_KINDS)))
    count = partial(np.bincount, minlength=sums.shape[1])
    last = -1  # step with an exchange
    for start in range(0, run.steps, STEPS_AT_ONCE):
        part = slice(start, start + STEPS_AT_ONCE)
        group = 2 * run.kind[part] + (run.interval[part] > 1)
        exchanged = np.flatnonzero(run.rounds[part])
        # an exchange after k steps without one waits sqrt(k) deviations
        waiting = np.sqrt(np.diff(start + exchanged, prepend=last))
        last = start + int(exchanged[-1]) if exchanged.size else last
        sums += (count(group), count(group, run.one_bit[part]), count(group[exchanged], waiting))
    return tuple(
        _StepGroup(volume.STEP_KINDS[number // 2], number % 2 == 0, int(steps), int(packed), waits)
        for number, (steps, packed, waits) in enumerate(sums.T.tolist())
        if steps
    )


def _node_bytes(groups: Sequence[_StepGroup], model: StepModel) -> float:
    """Bytes that one node sends to others: 2 (N-1)/N of what is exchanged (for Adam a lower bound: a ring sends more).

    Without stages inside nodes each of its processes sends as much. Message headers, and the padding of each
    parameter's last block, are left out.
    """
    cluster, is_ddp = model.cluster, find_optimizer(model.config.optimizer).ddp
    share = cluster.sent_between_nodes(hierarchical=is_ddp or cluster.goes_inside_first)
    dense_rounds = sum(group.steps for group in groups if group.kind == "full")
    packed_rounds = sum(group.packed_rounds for group in groups)
    sent = dense_rounds * model.work.gradient_bytes + packed_rounds * volume.packed_bytes(model.config)
    return 2 * share * model.work.parameters * sent


WORTH_IT = 0.05
"""Relative gain in time from which on compression, or skipping more rounds, is recommended: each costs accuracy."""

_NOTICEABLE = 0.98
_BUCKET_FACTORS = (2, 8, 64)
_LARGEST_SHARE = 0.5  # of the model in one bucket, as buckets are copied


@dataclass(frozen=True)
class Recommendation:
    """The recommended run, and the reason in a sentence."""

    best: RunTime
    reason: str


def choices(config: OptimizerConfig, cluster: Cluster, train_iters: int, *, sharded: bool) -> list[Choice]:
    """Adam, 1-bit Adam, 0/1 Adam with several maximum intervals, and the optimizer of the settings if it is another.

    With several nodes of several processes, also 0/1 Adam with nodes as replicas, with its state sharded if
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
            if skips_rounds and cluster.is_hierarchical:
                variant += ", nodes as replicas" + (", sharded state" if sharded else "")
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
    """The time of each of ``choices``, with its best bucket size.

    Large buckets mean fewer messages, which matters with many nodes; small ones overlap better. Raises UserError if the
    settings contradict each other.
    """
    found = []
    for choice in choices(config, cluster, train_iters, sharded=sharded):
        sizes: list[int | None] = [config.bucket_elements]
        if not find_optimizer(choice.optimizer.optimizer).ddp:
            default = config.bucket_size(work.parameters, on_gpu=cluster.on_gpu)
            larger = [default * factor for factor in _BUCKET_FACTORS]
            sizes += [size for size in larger if size <= _LARGEST_SHARE * work.parameters]
        runs = []
        for size in sizes:
            sized = replace(choice, optimizer=replace(choice.optimizer, bucket_elements=size))
            runs.append(run_time(sized, cluster=cluster, work=work, train_iters=train_iters, precision=precision))
        fastest = min(runs, key=lambda run: run.seconds)
        found.append(fastest if fastest.seconds < _NOTICEABLE * runs[0].seconds else runs[0])
    return found


def recommend(runs: Sequence[RunTime]) -> Recommendation:
    """The fastest run with Adam or 0/1 Adam, unless a more exact one takes at most ``WORTH_IT`` longer.

    ``runs`` are in the order of ``choices``: from the most exact, Adam, to the longest intervals. 1-bit Adam is for
    comparison only, as the length of its warm-up has to be tuned. If some runs shard the optimizer state, 0/1 Adam is
    recommended with sharded state only, as it may not fit otherwise.
    """
    needs_sharding = any(run.choice.sharded for run in runs)
    candidates = [
        run
        for run in runs
        if (spec := find_optimizer(run.choice.optimizer.optimizer)).automatic
        and (spec.ddp or run.choice.sharded == needs_sharding)
    ]
    fastest = min(candidates, key=lambda run: run.seconds)
    best = next(run for run in candidates if run.seconds <= fastest.seconds * (1 + WORTH_IT))
    adam = candidates[0]
    gain = best.seconds / fastest.seconds - 1
    if best is not adam:
        reason = f"{adam.seconds / best.seconds:.2g} times as fast as {adam.choice.name}"
        if gain >= 0.005:  # 0 % is not worth a word
            reason += f"; {fastest.choice.name} would gain {gain:.0%} more"
    elif gain < 0.01:
        exposed = sum(count * step.exposed for count, step in adam.kinds.values()) / adam.seconds
        why = "all-reduce of gradients hides behind the backward pass" if exposed < 0.05 else "no exchange is faster"
        reason = f"{why} here; compression gains nothing"
    else:
        reason = f"compression would gain {gain:.0%} at most, which its noise may cost in convergence"
    return Recommendation(best, reason)
