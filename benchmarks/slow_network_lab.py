"""Runs on slow hosts: what a replica does in one, and the replicas that serve all of them."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import convergence_run
import torch
import torch.distributed as dist
from hosts import CONGESTION_CONTROL, UNLIMITED, Sent, SlowHosts, bits_per_second, enter_host
from replica_pool import ReplicaFailed, ReplicaPool, launch_environment
from rivals.contestant import Setup
from rivals.entries import ALONE, BASELINE, entry
from workload import sum_of_losses

from megatron01.config import DistributedConfig
from megatron01.optim import TrainingDiverged
from megatron01.parallel import find_tensor_parallel_ranks, initialize
from megatron01.training import autotune
from megatron01.training.step import LossModule

NO_HOSTS = "none"
TRANSFER_SECONDS = 1.0
UNLIMITED_TRANSFER_BYTES = 256 << 20
TOLERANCE = 0.1
"""How far a link may be from its cap."""
_ATTEMPTS = 3
_WARM_UP_STEPS = 12
_PROFILE_STEPS = 12
_PROFILE_ATTEMPTS = 6
_PROFILE_TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Race:
    """Settings that determine the result of a run; also its key in the file of records."""

    task: str  # gpt2 or bert
    contestant: str  # a name of ``rivals.entries``
    learning_rate: float  # the peak
    seed: int  # of the initial weights and the order of the text
    steps: int  # micro-batches of each replica
    replicas: int  # number of hosts
    size: str  # name of the model size
    rate: str  # bandwidth cap of ``hosts.bits_per_second``; ``NO_HOSTS``: processes without hosts
    evaluations: int  # on held-out text, evenly spaced, the last one at the end; 0 to measure times only


class Clock:
    """Seconds and traffic of this host, summed over all intervals between ``start`` and ``stop``.

    Both begin with a barrier of all hosts.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sent = Sent()

    def start(self) -> None:
        dist.barrier()
        self._sent_before = Sent.so_far()
        self._since = time.perf_counter()

    def stop(self) -> None:
        dist.barrier()
        self.seconds += time.perf_counter() - self._since
        self.sent += Sent.so_far() - self._sent_before


def race(run: Race, data: str) -> dict[str, Any]:
    """Train as one of the replicas of torch.distributed's default group; the clock is stopped during evaluations.

    Returns:
        curve: [step, seconds, held-out loss, steps so far by kind] at each evaluation. The loss is None where it is not
            finite; the curve ends early if training stopped because of gradients that were not.
        seconds, formula_bytes, frame_bytes, payload_bytes, resent: of the whole run and this replica.
        kinds: number of steps of each kind, and their mean seconds on this replica, without the run's first step.
        parameters: of the model.
    """
    workload = workload_of(run)
    config = convergence_run.build_config(workload, Path(data))
    rank, size = dist.get_rank(), dist.get_world_size()
    held_out = convergence_run.held_out_batches(config, size, rank) if run.evaluations else []
    batches = convergence_run.training_batches(workload, config, rank, size)
    model = convergence_run.build_model(config)
    loss_module = LossModule(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    setup = Setup(model=model, loss_module=loss_module, config=config, steps=run.steps)
    contestant = entry(run.contestant).build(setup)
    marks = {round(run.steps * i / run.evaluations) for i in range(1, run.evaluations + 1)}

    clock = Clock()
    kinds: Counter[str] = Counter()
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    formula_bytes = 0.0
    curve: list[tuple[int, float, float | None, dict[str, int]]] = []
    clock.start()
    try:
        for step, batch in enumerate(batches, start=1):
            start = time.perf_counter()
            exchanged = contestant.step(batch)
            if step > 1:
                seconds[exchanged.kind].append(time.perf_counter() - start)
            kinds[exchanged.kind] += 1
            formula_bytes += exchanged.bytes
            if step in marks:
                clock.stop()
                with contestant.replicated_weights():
                    loss = convergence_run.mean_loss(loss_module, held_out, of_all=True)
                curve.append((step, clock.seconds, loss, dict(kinds)))
                clock.start()
    except TrainingDiverged:
        pass
    clock.stop()
    del contestant, loss_module, model, setup
    gc.collect()  # as in convergence_run
    return {
        "curve": curve,
        "seconds": clock.seconds,
        "formula_bytes": formula_bytes,
        "frame_bytes": clock.sent.bytes,
        "payload_bytes": clock.sent.payload,
        "resent": clock.sent.resent,
        "kinds": {name: [kinds[name], mean(values)] for name, values in seconds.items()},
        "parameters": parameters,
    }


def advise(run: Race, data: str) -> dict[str, Any]:
    """What ``--auto`` has ``chosen`` (settings by name) for the model and length of ``run``, and its ``reason``.

    Called on each replica of torch.distributed's default group. Gradients are sent in bf16 whatever is chosen.
    """
    workload = workload_of(run)
    config = convergence_run.build_config(workload, Path(data))
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, precision="bf16"),
        optimizer=dataclasses.replace(config.optimizer, gradient_wire_dtype="bf16"),
        distributed=DistributedConfig(threads_per_replica=1),
    )
    batch, *_ = convergence_run.training_batches(
        dataclasses.replace(workload, steps=1), config, dist.get_rank(), dist.get_world_size()
    )
    model = convergence_run.build_model(config)
    loss_module = LossModule(model)
    with initialize(launch_environment(1), config.distributed) as group:  # each replica is on its own host
        settings, reason = autotune.choose(
            config,
            model,
            lambda: sum_of_losses(loss_module(*batch)),
            group=group,
            tp_ranks=find_tensor_parallel_ranks(group, config.distributed),
            data_parallel_group=group.process_group,
            micro_batches=1,
        )
    return {"chosen": {name: getattr(settings, name) for name in autotune.CHOSEN}, "reason": reason}


def transfer(rate: str) -> float:
    """Bits of frames per second that this host sends to the next while it receives from the previous one."""
    bits = bits_per_second(rate)
    payload = UNLIMITED_TRANSFER_BYTES if bits is None else math.ceil(bits / 8 * TRANSFER_SECONDS)
    _pass_on(1 << 14)  # connections are opened on first use
    clock = Clock()
    clock.start()
    _pass_on(payload)
    clock.stop()
    return 8 * clock.sent.bytes / clock.seconds


def _pass_on(payload: int) -> None:
    """Send ``payload`` bytes to the next replica and receive as many from the previous one."""
    rank, replicas = dist.get_rank(), dist.get_world_size()
    receiving = dist.irecv(torch.empty(payload, dtype=torch.uint8), (rank - 1) % replicas)
    dist.send(torch.zeros(payload, dtype=torch.uint8), (rank + 1) % replicas)
    assert receiving is not None
    receiving.wait()


def workload_of(run: Race) -> convergence_run.Run:
    """The corresponding run of ``convergence.py``."""
    chosen = entry(run.contestant)
    return convergence_run.Run(
        task=run.task,
        optimizer=chosen.optimizer,
        overrides=chosen.overrides(run.steps),
        learning_rate=run.learning_rate,
        seed=run.seed,
        steps=run.steps,
        replicas=run.replicas,
        size=run.size,
    )


class Lab:
    """``replicas`` processes, each on its own host (not ``hosts``: on this machine's own network); a context manager.

    ``warm_up``: one run per contestant, of which some steps are taken first, so that compiling, loading and connecting
    are not measured. ``data``: folder of the prepared text.
    """

    def __init__(self, replicas: int, data: Path, warm_up: list[Race], *, hosts: bool) -> None:
        self._replicas = replicas
        self._data = str(data)
        self._warm_up = [dataclasses.replace(run, steps=_WARM_UP_STEPS, evaluations=0) for run in warm_up]
        self._stack = ExitStack()
        self._hosts = self._stack.enter_context(SlowHosts(replicas)) if hosts else None
        self._pool = ReplicaPool(0)

    def __enter__(self) -> Lab:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.__exit__(None, None, None)
        self._stack.close()

    def measure(self, run: Race) -> dict[str, Any]:
        """Do a run (``race``): bytes are means over replicas, the other results replica 0's.

        Adds ``link_bits``: bits of frames per second that a host could send just before. Raises ReplicaFailed if it
        failed; the replicas have been restarted.
        """
        link, results = self._run(race, run)
        counted = [name for name in results[0] if name.endswith("_bytes")]
        means = {name: mean(result[name] for result in results) for name in counted}
        return {**link, **results[0], **means, "resent": sum(result["resent"] for result in results)}

    def advise(self, run: Race) -> dict[str, Any]:
        """What ``--auto`` chooses for this model, length and rate (``advise``); raises as above."""
        link, results = self._run(advise, run)
        assert all(result["chosen"] == results[0]["chosen"] for result in results)
        return {**link, **results[0]}

    def _run(self, work: Callable[[Race, str], Any], run: Race) -> tuple[dict[str, Any], list[Any]]:
        """The measured link rate and congestion control, and the results of ``work`` on each replica."""
        try:
            link: dict[str, Any] = {}
            if self._hosts is not None:
                link = {"link_bits": self._set_rate(run.rate), "congestion_control": CONGESTION_CONTROL}
            return link, self._pool.run(work, run, self._data)
        except ReplicaFailed:
            self._pool.__exit__(None, None, None)
            self._start()
            raise

    def _start(self) -> None:
        prepare = None if self._hosts is None else partial(enter_host, self._hosts.namespaces)
        self._pool = ReplicaPool(self._replicas, prepare)
        if self._hosts is not None:
            self._hosts.cap(UNLIMITED)
        for run in self._warm_up:
            self._pool.run(race, run, self._data)

    def _set_rate(self, rate: str) -> float:
        """Cap the links, and test them until data arrives at this rate, which a busy machine may not reach."""
        assert self._hosts is not None
        self._hosts.cap(rate)
        wanted = bits_per_second(rate)
        if wanted is None:
            return mean(self._pool.run(transfer, rate))
        measured = []
        for _ in range(_ATTEMPTS):
            measured.append(mean(self._pool.run(transfer, rate)))
            if abs(measured[-1] / wanted - 1) <= TOLERANCE:
                return measured[-1]
        return min(measured, key=lambda bits: abs(bits - wanted))


def find_profile(lab: Lab, run: Race, share: float) -> tuple[str, float]:
    """The cap at which the exchange takes this share of the baseline's step time, and the share measured there.

    The time of the exchange is the difference to a step without one; ``run`` names the model.
    """
    short = dataclasses.replace(run, steps=_PROFILE_STEPS, evaluations=0)

    def seconds(contestant: str, rate: str) -> tuple[float, float]:
        result = lab.measure(dataclasses.replace(short, contestant=contestant, rate=rate))
        (_, a_step), *_ = result["kinds"].values()
        return a_step, 8 * result["frame_bytes"] / _PROFILE_STEPS

    rate = UNLIMITED
    alone, _ = seconds(ALONE, rate)
    _, bits = seconds(BASELINE, rate)
    cap = bits / (alone * share / (1 - share))
    best, best_share = rate, 0.0
    for _ in range(_PROFILE_ATTEMPTS):
        rate = f"{cap / 1e6:.3g}mbit"
        alone, _ = seconds(ALONE, rate)
        step, _ = seconds(BASELINE, rate)
        measured = 1 - alone / step
        if abs(measured - share) < abs(best_share - share):
            best, best_share = rate, measured
        if abs(measured - share) <= _PROFILE_TOLERANCE:
            break
        # the time of the exchange is proportional to 1 / cap
        cap *= max(step - alone, 0.1 * alone) / (alone * share / (1 - share))
    return best, best_share
