"""A run's traffic in a few numbers: its phases, its totals, and what other optimizers would have sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron01.config import OptimizerConfig, Precision
from megatron01.plan.volume import FULL, LOCAL, ONE_BIT, Traffic, Wire, gradient_bytes


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive steps with one interval, all before or all after the second moment is frozen.

    Attributes:
        first, last: steps, both included.
        interval: steps between two synchronizations.
        first_lr, last_lr: learning rates of these two steps.
        full, one_bit, local: number of steps of each kind.
        rounds: exchanges.
        bytes_sent: by one replica.
        bits: sent per parameter and step, on average.
    """

    first: int
    last: int
    interval: int
    first_lr: float
    last_lr: float
    full: int
    one_bit: int
    local: int
    rounds: int
    bytes_sent: int
    bits: float

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """This run against the same run with another optimizer.

    Attributes:
        name: of the other optimizer, with what distinguishes it.
        bytes_sent, rounds: of one replica with it.
        volume_saved, rounds_saved: share of them that this run does without; negative if it sends more.
        times_less: the other's bytes over this run's.
    """

    name: str
    bytes_sent: int
    rounds: int
    volume_saved: float
    rounds_saved: float
    times_less: float


def phases(run: Traffic) -> list[Phase]:
    """The run cut where the interval changes and where the second moment is frozen."""
    changes = (np.flatnonzero(np.diff(run.interval)) + 1).tolist()
    bounds = sorted({0, run.steps, min(run.frozen_from, run.steps), *changes})
    return [span(run, first, end) for first, end in pairwise(bounds)]


def span(run: Traffic, first: int, end: int) -> Phase:
    """The steps [first, end) as one phase; its interval is that of the first."""
    part = slice(first, end)
    kinds = np.bincount(run.kind[part], minlength=3)
    sent = int(run.bytes_sent[part].sum())
    return Phase(
        first=first,
        last=end - 1,
        interval=int(run.interval[first]),
        first_lr=float(run.learning_rate[first]),
        last_lr=float(run.learning_rate[end - 1]),
        full=int(kinds[FULL]),
        one_bit=int(kinds[ONE_BIT]),
        local=int(kinds[LOCAL]),
        rounds=int(run.rounds[part].sum()),
        bytes_sent=sent,
        bits=8.0 * sent / (run.parameters * (end - first)),
    )


def others(run: Traffic, config: OptimizerConfig, *, precision: Precision, wire: Wire) -> dict[str, NDArray[np.int64]]:
    """What the same steps would send with other optimizers: name -> int64[steps], bytes of one replica.

    Adam with gradients of 32 and of 16 bit, and, if ``freeze_step`` is given, 1-bit Adam, whose gradients before that
    step travel in the type that this run has at full steps. All three exchange once a step.
    """
    sent = {
        "Adam, fp32 gradients": np.full(run.steps, wire.ring(4)),
        "Adam, 16-bit gradients": np.full(run.steps, wire.ring(2)),
    }
    if config.freeze_step is not None and config.optimizer != "one_bit_adam":
        full = min(config.freeze_step, run.steps)
        gradient = wire.dense(gradient_bytes(replace(config, optimizer="one_bit_adam"), precision))
        name = f"1-bit Adam, {full:,} full steps"
        sent[name] = np.where(np.arange(run.steps) < full, gradient, wire.one_bit())
    return sent


def compare(run: Traffic, sent_by_others: Mapping[str, NDArray[np.int64]]) -> list[Comparison]:
    """The run against what ``others`` gave."""
    totals = {name: int(sent.sum()) for name, sent in sent_by_others.items()}
    return [
        Comparison(
            name=name,
            bytes_sent=sent,
            rounds=run.steps,
            volume_saved=1.0 - run.total_bytes / sent,
            rounds_saved=1.0 - run.total_rounds / run.steps,
            times_less=sent / run.total_bytes,
        )
        for name, sent in totals.items()
    ]
