"""What one replica sends at each step of a run, from its settings alone.

The rules are those of the optimizers (``docs/algorithm.md``), restated without their state: both policies are pure
functions of the step, and so is what follows from them. Overflows, which skip steps, are not foreseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron01.config import OptimizerConfig, Precision
from megatron01.errors import UserError
from megatron01.optim.policies import SyncPolicy, VariancePolicy, build_sync_policy
from megatron01.optim.schedule import LRSchedule, build_schedule
from megatron01.utils.precision import DTYPES

STEP_KINDS = ("full", "one_bit", "local")
"""Names of the numbers in ``Traffic.kind``, as in an optimizer's ``StepReport``."""
FULL, ONE_BIT, LOCAL = range(3)

SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Bytes that one replica sends in one exchange; the headers of messages (16 bytes each) are left out.

    Flat buffers consist of whole blocks, each parameter starts a block of its own, and the blocks are dealt out to the
    replicas in equal rows.

    Args:
        parameter_sizes: elements of each parameter tensor.
        replicas: n, at least 2.
        block_size: consecutive elements that share one scale.
    """

    parameter_sizes: tuple[int, ...]
    replicas: int
    block_size: int

    def __post_init__(self) -> None:
        if self.replicas < 2:
            raise UserError(f"replicas is {self.replicas}; expected 2 or more: one alone sends nothing")

    @property
    def parameters(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.parameter_sizes)

    @property
    def _blocks_sent(self) -> int:
        """2 (n-1)/n of all blocks: a row to each of the others, on the way to the servers and on the way back."""
        blocks = sum(-(-size // self.block_size) for size in self.parameter_sizes)
        return 2 * (self.replicas - 1) * -(-blocks // self.replicas)

    def dense(self, element_bytes: int) -> int:
        """The mean of a flat buffer: all-to-all, then all-gather."""
        return self._blocks_sent * self.block_size * element_bytes

    def one_bit(self, *, scaled: bool = True) -> int:
        """The 1-bit mean of a flat buffer, with or without the scales."""
        return self._blocks_sent * (self.block_size // 8 + (SCALE_BYTES if scaled else 0))

    def ring(self, element_bytes: int) -> int:
        """A ring all-reduce of the parameters' gradients as they are, without padding."""
        return 2 * (self.replicas - 1) * self.parameters * element_bytes // self.replicas


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Every step of a run, as arrays over the steps.

    Attributes:
        learning_rate: fp64[steps].
        interval: int64[steps], steps between two synchronizations that the policy asks for.
        refreshes: bool[steps], T_v: the second moment is refreshed with the averaged gradient.
        synchronizes: bool[steps], T_u: the master weights move.
        kind: uint8[steps], index into ``STEP_KINDS``.
        rounds: uint8[steps], exchanges; a step may make two (gradients, then accumulated steps) or none.
        bytes_sent: int64[steps], by one replica.
        frozen_from: step from which the second moment is frozen; 0 without one, the number of steps if it never is.
        parameters: elements of the model.
    """

    learning_rate: NDArray[np.float64]
    interval: NDArray[np.int64]
    refreshes: NDArray[np.bool_]
    synchronizes: NDArray[np.bool_]
    kind: NDArray[np.uint8]
    rounds: NDArray[np.uint8]
    bytes_sent: NDArray[np.int64]
    frozen_from: int
    parameters: int

    @property
    def steps(self) -> int:
        return self.learning_rate.size

    @property
    def total_bytes(self) -> int:
        return int(self.bytes_sent.sum())

    @property
    def total_rounds(self) -> int:
        return int(self.rounds.sum())

    @property
    def bits_per_parameter(self) -> NDArray[np.float64]:
        """fp64[steps], bits that one replica sends per parameter of the model."""
        return 8.0 * self.bytes_sent / self.parameters


def gradient_bytes(config: OptimizerConfig, precision: Precision) -> int:
    """Bytes of one element of a gradient at a full step; Adam's are always of the model's type."""
    if config.gradient_wire_dtype == "auto" or config.optimizer == "adam":
        return DTYPES[precision].itemsize
    return DTYPES[config.gradient_wire_dtype].itemsize


def traffic(config: OptimizerConfig, *, train_iters: int, precision: Precision, wire: Wire) -> Traffic:
    """What each step of a run with these settings sends.

    =============  ==================================================================================================
    zero_one_adam  T_v: the mean gradient. T_u: 1 bit, unless the accumulated step is the same on all replicas anyway,
                   or the learning rate has been 0 since the last synchronization. Else nothing.
    one_bit_adam   the mean gradient before ``freeze_step``, then 1 bit at every step
    adam, sgdm     the mean gradient at every step (adam: by a ring all-reduce)
    soft_sign_sgd  fp32 ratios at every step
    bin_sgdm       1 bit at every step, without scales
    =============  ==================================================================================================

    With ``compressor: none``, fp32 takes the place of each 1-bit exchange of the first two.

    Raises:
        UserError: if the settings contradict each other, or for one_bit_adam without ``freeze_step``.
    """
    schedule = build_schedule(config, train_iters)
    rates = np.array([schedule.lr(step) for step in range(train_iters)])
    gradient = wire.dense(gradient_bytes(config, precision))
    compressed = wire.one_bit() if config.compressor == "one_bit" else wire.dense(4)
    if config.optimizer == "zero_one_adam":
        return _zero_one_adam(config, schedule, rates, wire.parameters, gradient=gradient, compressed=compressed)
    if config.optimizer == "one_bit_adam":
        if config.freeze_step is None:
            raise UserError(
                "one_bit_adam freezes the second moment once it is stable, which only training can tell; "
                "give --freeze-step"
            )
        full = np.arange(train_iters) < config.freeze_step
        sent = np.where(full, gradient, compressed)
    elif config.optimizer == "bin_sgdm":
        full = np.zeros(train_iters, bool)
        sent = np.full(train_iters, wire.one_bit(scaled=False))
    else:
        every_step = {
            "adam": wire.ring(gradient_bytes(config, precision)),
            "sgdm": gradient,
            "soft_sign_sgd": wire.dense(4),
        }
        full = np.ones(train_iters, bool)
        sent = np.full(train_iters, every_step[config.optimizer])
    refreshes = full if config.optimizer in ("adam", "one_bit_adam") else np.zeros(train_iters, bool)
    return Traffic(
        learning_rate=rates,
        interval=np.ones(train_iters, np.int64),
        refreshes=refreshes,
        synchronizes=np.ones(train_iters, bool),
        kind=np.where(full, FULL, ONE_BIT).astype(np.uint8),
        rounds=np.ones(train_iters, np.uint8),
        bytes_sent=sent.astype(np.int64),
        frozen_from=int(refreshes.sum()),
        parameters=wire.parameters,
    )


def _zero_one_adam(
    config: OptimizerConfig,
    schedule: LRSchedule,
    rates: NDArray[np.float64],
    parameters: int,
    *,
    gradient: int,
    compressed: int,
) -> Traffic:
    named_policy = build_sync_policy(config.sync_policy, _Table(schedule, rates.tolist()), config.max_sync_interval)
    interval = _by_step(named_policy.interval, rates.size)
    # the same policy, with its intervals looked up: it is asked for each several times
    sync_policy = SyncPolicy(interval.tolist().__getitem__, schedule.total_steps)
    variance_policy = VariancePolicy(config.variance_kappa, config.variance_freeze_step, sync_policy)
    refreshes = _by_step(variance_policy.refreshes, rates.size).astype(bool)
    synchronizes = _by_step(sync_policy.synchronizes, rates.size).astype(bool)
    exchanges = _exchanges(rates.tolist(), refreshes.tolist(), synchronizes.tolist())
    local = np.flatnonzero(interval > 1)
    first_local = int(local[0]) if local.size else rates.size
    return Traffic(
        learning_rate=rates,
        interval=interval,
        refreshes=refreshes,
        synchronizes=synchronizes,
        kind=np.where(refreshes, FULL, np.where(synchronizes, ONE_BIT, LOCAL)).astype(np.uint8),
        rounds=refreshes.astype(np.uint8) + exchanges.astype(np.uint8),
        bytes_sent=refreshes * np.int64(gradient) + exchanges * np.int64(compressed),
        frozen_from=first_local if config.variance_freeze_step is None else config.variance_freeze_step,
        parameters=parameters,
    )


def _exchanges(rates: Sequence[float], refreshes: Sequence[bool], synchronizes: Sequence[bool]) -> NDArray[np.bool_]:
    """bool[steps]: where accumulated steps are exchanged.

    Not where they are the same everywhere: when every step since the last synchronization averaged its gradient. Nor
    where there are none, because the learning rate has been 0.
    """
    exchanges = np.zeros(len(rates), bool)
    equal, accumulated = True, 0.0
    for step, (rate, refreshed, due) in enumerate(zip(rates, refreshes, synchronizes, strict=True)):
        equal = equal and refreshed
        accumulated += rate
        if due:
            exchanges[step] = accumulated > 0.0 and not equal
            equal = equal or accumulated > 0.0
            accumulated = 0.0
    return exchanges


@dataclass(frozen=True)
class _Table:
    """A schedule whose rates are looked up: the policies ask for each of them several times."""

    schedule: LRSchedule
    rates: Sequence[float]

    @property
    def peak_lr(self) -> float:
        return self.schedule.peak_lr

    @property
    def warmup_steps(self) -> int:
        return self.schedule.warmup_steps

    @property
    def total_steps(self) -> int | None:
        return self.schedule.total_steps

    def lr(self, step: int) -> float:
        return self.rates[step]


def _by_step(function: Callable[[int], int], steps: int) -> NDArray[np.int64]:
    return np.fromiter(map(function, range(steps)), np.int64, steps)


# A run's traffic in a few numbers: its phases, its totals, and what other optimizers would have sent.


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
