"""Which way to train is quickest on a cluster, and whether compression pays there at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron01.config import OptimizerConfig, Precision
from megatron01.plan.cluster import Cluster
from megatron01.plan.run_time import Choice, RunTime, run_time
from megatron01.plan.step_time import Work

WORTH_IT = 0.05
"""What compression, or skipping more rounds, has to gain in time before it is recommended: each costs some accuracy."""

INTERVALS = (1, 4, 16)
"""Longest intervals that are recommended; longer ones cost loss (benchmarks/results/convergence.md)."""

_NOTICEABLE = 0.98
_BUCKET_FACTORS = (8, 64)
_LARGEST_SHARE = 0.5  # of the model in one bucket, of which copies are made

_WARM_UP_OF_ONE_BIT_ADAM = 0.15  # of all steps, where no freeze_step is given; published recipes have 14 to 27 %


@dataclass(frozen=True)
class Recommendation:
    """The run to choose, and why in a sentence."""

    best: RunTime
    reason: str


def choices(config: OptimizerConfig, cluster: Cluster, train_iters: int, *, sharded: bool) -> list[Choice]:
    """Adam, 1-bit Adam and 0/1 Adam with several longest intervals, with the other settings as they are.

    Where a node has several processes and there are several nodes, 0/1 Adam also with nodes as replicas, which divide
    its state if it is ``sharded``.
    """
    freeze = config.freeze_step or max(1, round(_WARM_UP_OF_ONE_BIT_ADAM * train_iters))
    adam = replace(config.with_optimizer("adam"), gradient_wire_dtype="auto")
    one_bit = replace(config.with_optimizer("one_bit_adam"), freeze_step=freeze)
    found = [
        Choice(name="adam", optimizer=adam),
        Choice(name="one_bit_adam", optimizer=one_bit),
    ]
    zero_one = config.with_optimizer("zero_one_adam")
    for interval in sorted({*INTERVALS, config.max_sync_interval}):
        policy = "every" if interval == 1 else config.sync_policy if config.sync_policy != "every" else "schedule"
        settings = replace(zero_one, sync_policy=policy, max_sync_interval=interval)
        name = f"zero_one_adam, interval up to {interval}" if interval > 1 else "zero_one_adam, every step"
        found.append(Choice(name=name, optimizer=settings))
        if interval > 1 and cluster.processes_per_node > 1 and cluster.nodes > 1:
            name += ", nodes as replicas" + (", state divided" if sharded else "")
            found.append(Choice(name=name, optimizer=settings, replica_is_node=True, sharded=sharded))
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

    Large buckets are fewer messages, which counts with many nodes; small ones overlap better. ``sharded`` says that
    nodes which are replicas divide the optimizer's state among their processes.

    Raises:
        UserError: if the settings contradict each other.
    """
    found = []
    for choice in choices(config, cluster, train_iters, sharded=sharded):
        larger = [config.bucket_elements * factor for factor in _BUCKET_FACTORS]
        sizes = [size for size in larger if size <= _LARGEST_SHARE * work.parameters]
        given, *others = (
            run_time(
                replace(choice, optimizer=replace(choice.optimizer, bucket_elements=size)),
                cluster=cluster,
                work=work,
                train_iters=train_iters,
                precision=precision,
            )
            for size in (config.bucket_elements, *(sizes if choice.optimizer.optimizer != "adam" else ()))
        )
        quickest = min([given, *others], key=lambda run: run.seconds)
        found.append(quickest if quickest.seconds < _NOTICEABLE * given.seconds else given)
    return found


def recommend(runs: Sequence[RunTime]) -> Recommendation:
    """The quickest run with Adam or 0/1 Adam, unless one that is more exact takes at most ``WORTH_IT`` longer.

    ``runs`` are ordered as ``choices`` orders them: from the most exact, Adam, to the longest intervals. 1-bit Adam is
    there to compare with; the length of its warm-up is one more thing to tune. Where some of them divide the state of
    their optimizer, 0/1 Adam is recommended with a divided state only, as it may not fit otherwise.
    """
    must_divide = any(run.choice.sharded for run in runs)
    candidates = [
        run
        for run in runs
        if run.choice.optimizer.optimizer == "adam"
        or (run.choice.optimizer.optimizer == "zero_one_adam" and run.choice.sharded == must_divide)
    ]
    fastest = min(candidates, key=lambda run: run.seconds)
    best = next(run for run in candidates if run.seconds <= fastest.seconds * (1 + WORTH_IT))
    adam = candidates[0]
    assert adam.choice.optimizer.optimizer == "adam"
    if best is adam:
        gain = adam.seconds / fastest.seconds
        reason = (
            "all-reduce of gradients hides behind the backward pass here; compression gains nothing"
            if gain < 1.01
            else f"compression would gain {gain - 1:.0%} at most, which its noise may cost again"
        )
    else:
        reason = f"{adam.seconds / best.seconds:.2g} times as fast as adam"
        if best is not fastest:
            reason += f"; {fastest.choice.name} would gain {best.seconds / fastest.seconds - 1:.0%} more"
    return Recommendation(best, reason)
