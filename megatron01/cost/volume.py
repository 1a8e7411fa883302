"""Bytes that one replica sends at each step of a run, from its settings alone.

The rules are those of the optimizers (``docs/algorithm.md``), without their state: the variance and synchronization
schedules are functions of the step, and so is the traffic. Steps skipped by overflows are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron01.config import OptimizerConfig, Precision
from megatron01.config.registry import StepTable, find_optimizer, optimizers, without_others_settings
from megatron01.optim.schedule import Schedule, build_schedule

STEP_KINDS = ("full", "one_bit", "local")
"""Names of the numbers in ``Traffic.kind``, as in an optimizer's ``StepReport``."""
FULL, ONE_BIT, LOCAL = range(3)

SCALE_BYTES = 2
INSIDE_BYTES = 2  # bytes per element in reductions inside a node, which are in bf16
ELEMENT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Bytes that one replica sends in one exchange, without message headers (16 bytes each).

    Flat buffers consist of whole blocks: each parameter starts a new block, and replicas own equal rows of blocks.
    """

    parameter_sizes: tuple[int, ...]  # elements of each parameter tensor
    replicas: int  # n, at least 2
    block_size: int  # consecutive elements that share one scale

    @property
    def parameters(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.parameter_sizes)

    @property
    def _blocks_sent(self) -> int:
        """2 (n-1)/n of all blocks: a row to each other replica, from workers to servers and back."""
        blocks = sum(-(-size // self.block_size) for size in self.parameter_sizes)
        return 2 * (self.replicas - 1) * -(-blocks // self.replicas)

    def dense(self, element_bytes: int) -> int:
        """Bytes of the mean of a flat buffer: all-to-all, then all-gather."""
        return self._blocks_sent * self.block_size * element_bytes

    def quantized(self, bits: int, *, scaled: bool = True) -> int:
        """Bytes of the mean of a flat buffer quantized to 1, 4 or 8 bits, with or without scales."""
        return self._blocks_sent * (self.block_size * bits // 8 + (SCALE_BYTES if scaled else 0))

    def ring(self, element_bytes: int) -> int:
        """Bytes of a ring all-reduce of the parameters' gradients, without padding."""
        return 2 * (self.replicas - 1) * self.parameters * element_bytes // self.replicas


@dataclass(frozen=True, kw_only=True)
class Traffic(StepTable):
    """Schedule and traffic of every step of a run."""

    schedule: Schedule  # of learning rates
    full_bytes: int  # that one replica sends at a full step
    one_bit_bytes: int  # in an exchange of bits
    parameters: int  # elements of the model

    @property
    def learning_rate(self) -> NDArray[np.float64]:
        """fp64[steps]."""
        return np.array([self.schedule.lr(step) for step in range(self.steps)])

    @property
    def bytes_sent(self) -> NDArray[np.int64]:
        """int64[steps], by one replica."""
        return self.full * np.int64(self.full_bytes) + self.one_bit * np.int64(self.one_bit_bytes)

    @cached_property
    def kind(self) -> NDArray[np.uint8]:
        """uint8[steps], index into ``STEP_KINDS``."""
        kind = np.full(self.steps, LOCAL, np.uint8)
        kind[self.synchronizes] = ONE_BIT
        kind[self.full] = FULL
        return kind

    @cached_property
    def rounds(self) -> NDArray[np.uint8]:
        """uint8[steps], number of exchanges: 0, 1, or 2 (gradients, then accumulated steps)."""
        return self.full.astype(np.uint8) + self.one_bit.astype(np.uint8)

    @property
    def steps(self) -> int:
        return self.full.size

    @property
    def total_bytes(self) -> int:
        return self.bytes_between(0, self.steps)

    def bytes_between(self, first: int, end: int) -> int:
        """Bytes of the steps [first, end): exact, as those of a large model may not fit into int64."""
        full, one_bit = (int(np.count_nonzero(kind[first:end])) for kind in (self.full, self.one_bit))
        return full * self.full_bytes + one_bit * self.one_bit_bytes

    @property
    def total_rounds(self) -> int:
        return int(self.rounds.sum())

    @property
    def bits_per_parameter(self) -> NDArray[np.float64]:
        """fp64[steps], bits sent by one replica per parameter of the model."""
        return 8.0 * self.bytes_sent / self.parameters


def gradient_bytes(config: OptimizerConfig, precision: Precision) -> int:
    """Bytes per element of an unquantized gradient on the wire; with DDP always in the model's dtype."""
    if find_optimizer(config.optimizer).ddp:
        return ELEMENT_BYTES[precision]
    return ELEMENT_BYTES.get(config.gradient_wire_dtype, ELEMENT_BYTES[precision])


def gradient_code_bits(config: OptimizerConfig) -> int | None:
    """Bits per element of a quantized gradient between replicas; None if gradients are not quantized."""
    spec = find_optimizer(config.optimizer)
    wire = spec.auto_wire if config.gradient_wire_dtype == "auto" else config.gradient_wire_dtype
    if spec.ddp or spec.full_precision != "gradients" or wire not in ("8bit", "4bit"):
        return None
    return 8 if wire == "8bit" else 4


def full_step_bytes(config: OptimizerConfig, precision: Precision) -> float:
    """Bytes per element on the wire of what an optimizer averages at full steps, its share of a scale included."""
    bits = gradient_code_bits(config)
    if bits is not None:
        return bits / 8 + SCALE_BYTES / config.block_size
    return 4 if find_optimizer(config.optimizer).full_precision == "fp32" else gradient_bytes(config, precision)


def sends_bits(config: OptimizerConfig) -> bool:
    """True if an optimizer exchanges bits; ``compressor: none`` sends fp32 in place of bits that have scales."""
    bits = find_optimizer(config.optimizer).bits
    return bits == "unscaled" or (bits == "scaled" and config.compressor == "one_bit")


def packed_bytes(config: OptimizerConfig) -> float:
    """Bytes per element of an exchange of accumulated steps, its share of a scale included."""
    if not sends_bits(config):
        return 4.0
    scaled = find_optimizer(config.optimizer).bits == "scaled"
    return 1 / 8 + (SCALE_BYTES / config.block_size if scaled else 0.0)


def _full_exchange(config: OptimizerConfig, precision: Precision, wire: Wire) -> int:
    """Bytes that one replica sends at a full step."""
    bits = gradient_code_bits(config)
    if bits is not None:
        return wire.quantized(bits)
    element_bytes = int(full_step_bytes(config, precision))
    return wire.ring(element_bytes) if find_optimizer(config.optimizer).ddp else wire.dense(element_bytes)


def traffic(config: OptimizerConfig, *, train_iters: int, precision: Precision, wire: Wire) -> Traffic:
    """Traffic of each step of a run with these settings; ``OptimizerSpec.steps`` gives the schedule.

    Raises UserError if the settings contradict each other, or for one_bit_adam without ``freeze_step``.
    """
    schedule = build_schedule(config, train_iters)
    spec = find_optimizer(config.optimizer)
    return Traffic(
        **vars(spec.steps(config, schedule, train_iters)),
        schedule=schedule,
        full_bytes=_full_exchange(config, precision, wire),
        one_bit_bytes=wire.quantized(1, scaled=spec.bits == "scaled") if sends_bits(config) else wire.dense(4),
        parameters=wire.parameters,
    )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive steps with one interval, all before or all after the second moment is frozen."""

    first: int  # step
    last: int  # step, included
    interval: int  # steps between two synchronizations
    first_lr: float
    last_lr: float
    full: int  # number of steps of this kind, as the next two
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
    """Comparison of a run with the same steps of another optimizer."""

    name: str
    bytes_sent: int  # of one replica with the other optimizer, as the rounds
    rounds: int
    volume_saved: float  # fraction of the bytes that this run saves; negative if it sends more
    rounds_saved: float  # the same of the rounds
    times_less: float  # the other's bytes over this run's


def phases(run: Traffic) -> list[Phase]:
    """The phases of a run, split where the interval changes and where the second moment is frozen."""
    changes = (np.flatnonzero(np.diff(run.interval)) + 1).tolist()
    bounds = sorted({0, run.steps, min(run.frozen_from, run.steps), *changes})
    return [phase_of(run, first, end) for first, end in pairwise(bounds)]


def phase_of(run: Traffic, first: int, end: int) -> Phase:
    """The steps [first, end) as one phase; its interval is that of the first."""
    steps = slice(first, end)
    full, one_bit, local = np.bincount(run.kind[steps], minlength=3).tolist()
    sent = run.bytes_between(first, end)
    return Phase(
        first=first,
        last=end - 1,
        interval=int(run.interval[first]),
        first_lr=run.schedule.lr(first),
        last_lr=run.schedule.lr(end - 1),
        full=full,
        one_bit=one_bit,
        local=local,
        rounds=int(run.rounds[steps].sum()),
        bytes_sent=sent,
        bits=8.0 * sent / (run.parameters * (end - first)),
    )


def compare(run: Traffic, config: OptimizerConfig, *, precision: Precision, wire: Wire) -> list[Comparison]:
    """Comparisons of a run of ``config`` with the same steps of other optimizers, which all exchange once per step.

    Adam with 32-bit and 16-bit gradients, and, if ``freeze_step`` is given, 1-bit Adam, whose gradients before that
    step are sent in this run's dtype at full steps.
    """
    sent: dict[str, int] = {}
    for name, spec in optimizers().items():
        if spec.reference and spec.ddp:
            sent[f"{spec.label}, fp32 gradients"] = run.steps * wire.ring(4)
            sent[f"{spec.label}, 16-bit gradients"] = run.steps * wire.ring(2)
        elif spec.reference and config.freeze_step is not None and config.optimizer != name:
            other = without_others_settings(config, name)
            full = int(spec.steps(other, run.schedule, run.steps).full.sum())
            dense, packed = full * _full_exchange(other, precision, wire), (run.steps - full) * wire.quantized(1)
            sent[f"{spec.label}, {full:,} full steps"] = dense + packed
    return [
        Comparison(
            name=name,
            bytes_sent=total,
            rounds=run.steps,
            volume_saved=1.0 - run.total_bytes / total,
            rounds_saved=1.0 - run.total_rounds / run.steps,
            times_less=total / run.total_bytes,
        )
        for name, total in sent.items()
    ]
