"""The learning rate of each step, and what replicas do at it (T_v and T_u): pure functions of the step.

A step is the number of optimizer steps taken before it: the first is 0. No state needs a checkpoint: a resumed run,
another rank or a plotting tool gets the same answer for the same step. Names and formulas of the learning rate's styles
are Megatron-LM's; ``exponential`` is the BERT recipe of the 0/1 Adam paper: x ``decay_rate`` every ``decay_interval``
steps.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from megatron01.config import OptimizerConfig
from megatron01.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD", "exponential")
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Share of ``peak_lr - min_lr`` that is left, from 1 at the beginning of a decay with an end to 0 there."""
WSD_STYLES = tuple(_DECAYS)


@runtime_checkable
class Schedule(Protocol):
    """Interface of schedules for the optimizers and the synchronization policy.

    Attributes:
        peak_lr: the highest learning rate.
        warmup_steps: steps before the decay begins; replicas synchronize at each of them.
        total_steps: number of steps of the run, None when open.
    """

    @property
    def peak_lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def total_steps(self) -> int | None: ...

    def lr(self, step: int) -> float:
        """Learning rate of a step; a pure function of it."""


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """Linear warm-up to ``peak_lr``, then a decay of the given style to ``min_lr``.

    Args:
        style: constant, linear, cosine, inverse-square-root, WSD (constant, then a final decay) or exponential.
        peak_lr: learning rate at the end of the warm-up.
        min_lr: learning rate at the end of the decay.
        warmup_steps: steps of linear warm-up from ``warmup_init``.
        total_steps: number of steps of the run; None only for constant, inverse-square-root and exponential.
        decay_steps: step at which the decay reaches ``min_lr``; ``total_steps`` when None.
        decay_rate, decay_interval: exponential: factor, and steps between two applications.
        wsd_decay_steps, wsd_decay_style: WSD: length (a tenth of the decay when None) and shape of the final decay.

    Raises:
        UserError: if a value is out of its range or the values contradict each other.
    """

    style: str = "constant"
    peak_lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    total_steps: int | None = None
    warmup_init: float = 0.0
    decay_steps: int | None = None
    decay_rate: float = 0.99
    decay_interval: int = 520
    wsd_decay_steps: int | None = None
    wsd_decay_style: str = "linear"

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise UserError(
                f"style is {self.style!r}; expected one of {', '.join(STYLES)}{nearest(self.style, STYLES)}"
            )
        if self.wsd_decay_style not in WSD_STYLES:
            raise UserError(f"wsd_decay_style is {self.wsd_decay_style!r}; expected one of {', '.join(WSD_STYLES)}")
        if not 0 <= self.peak_lr < math.inf:
            raise UserError(f"peak_lr is {self.peak_lr}; expected a finite number of at least 0")
        if not 0 <= self.min_lr <= self.peak_lr:
            raise UserError(f"min_lr is {self.min_lr}; expected 0 to peak_lr ({self.peak_lr})")
        if not 0 <= self.warmup_init <= self.peak_lr:
            raise UserError(f"warmup_init is {self.warmup_init}; expected 0 to peak_lr ({self.peak_lr})")
        if self.warmup_steps < 0:
            raise UserError(f"warmup_steps is {self.warmup_steps}; expected 0 or more")
        if self.total_steps is not None and self.total_steps <= 0:
            raise UserError(f"total_steps is {self.total_steps}; expected a positive number, or None for an open end")
        if not 0 < self.decay_rate <= 1 or self.decay_interval <= 0:
            raise UserError(
                f"decay_rate is {self.decay_rate} and decay_interval {self.decay_interval}; "
                "expected a factor in (0, 1] and a positive number of steps"
            )
        end = self.decay_end
        if self.style in ("linear", "cosine", "WSD"):
            if end is None:
                raise UserError(f"style {self.style!r} needs total_steps or decay_steps")
            if end <= self.warmup_steps:
                raise UserError(
                    f"the decay ends at step {end}, within the warm-up of {self.warmup_steps} steps; make the warm-up"
                    " shorter (--lr-warmup-iters) or the run longer"
                )
        if self.style == "WSD" and not 0 < self._final_decay_steps <= self.decay_end - self.warmup_steps:  # type: ignore[operator]
            raise UserError(
                f"wsd_decay_steps is {self._final_decay_steps}; expected 1 to {end - self.warmup_steps}, "  # type: ignore[operator]
                "the steps between warm-up and end"
            )

    @cached_property
    def decay_end(self) -> int | None:
        """Step at which the decay is complete."""
        return self.total_steps if self.decay_steps is None else self.decay_steps

    @property
    def _final_decay_steps(self) -> int:
        if self.wsd_decay_steps is not None:
            return self.wsd_decay_steps
        assert self.decay_end is not None
        return max(1, min(self.decay_end // 10, self.decay_end - self.warmup_steps))

    def lr(self, step: int) -> float:
        """Learning rate of ``step`` (0-based)."""
        if step < 0:
            raise ValueError(f"step is {step}; expected 0 or more")
        if step < self.warmup_steps:
            return self.warmup_init + (self.peak_lr - self.warmup_init) * step / self.warmup_steps
        if self.style == "constant":
            return self.peak_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.peak_lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        if self.style == "exponential":
            times = (step - self.warmup_steps) // self.decay_interval
            return max(self.min_lr, self.peak_lr * self.decay_rate**times)
        assert self.decay_end is not None
        if step >= self.decay_end:
            return self.min_lr
        start, style = self.warmup_steps, self.style
        if style == "WSD":
            start, style = self.decay_end - self._final_decay_steps, self.wsd_decay_style
        progress = max(0.0, (step - start) / (self.decay_end - start))
        return self.min_lr + (self.peak_lr - self.min_lr) * _DECAYS[style](progress)


@dataclass(frozen=True)
class TabulatedSchedule:
    """A schedule given by the learning rate of each step; the last one holds after the table ends.

    The warm-up is taken to last until the first step with the highest rate.
    """

    learning_rates: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.learning_rates) == 0:
            raise UserError("the table of learning rates is empty; expected one for each step")
        for step, rate in enumerate(self.learning_rates):
            if not 0 <= rate < math.inf:
                raise UserError(f"the learning rate of step {step} is {rate}; expected a finite number of at least 0")

    @cached_property
    def peak_lr(self) -> float:
        return float(max(self.learning_rates))

    @cached_property
    def warmup_steps(self) -> int:
        return list(self.learning_rates).index(self.peak_lr)

    @property
    def total_steps(self) -> int:
        return len(self.learning_rates)

    def lr(self, step: int) -> float:
        return float(self.learning_rates[min(step, len(self.learning_rates) - 1)])

    @staticmethod
    def from_torch(
        make_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
        *,
        base_lr: float,
        total_steps: int,
    ) -> TabulatedSchedule:
        """Tabulate a torch scheduler, by running it once on a dummy optimizer.

        Args:
            make_scheduler: builds the scheduler on the optimizer it is given.
            base_lr: the ``lr`` of that optimizer.
            total_steps: number of steps of the run.

        Raises:
            UserError: if it is ReduceLROnPlateau, which depends on measurements.
        """
        import torch

        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=base_lr)
        scheduler = make_scheduler(optimizer)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UserError(
                "ReduceLROnPlateau follows measurements, so its learning rates are not known before the run; "
                "expected a scheduler that follows the step"
            )
        rates = []
        for _ in range(total_steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
        return TabulatedSchedule(tuple(rates))


def as_schedule(schedule: Schedule | float) -> Schedule:
    """``schedule`` itself, or a constant learning rate.

    Raises:
        UserError: if it is neither a schedule nor a real number.
    """
    if isinstance(schedule, numbers.Real):  # numpy's numbers too
        return LRSchedule(peak_lr=float(schedule))
    if isinstance(schedule, Schedule):
        return schedule
    raise UserError(
        f"the schedule is of type {type(schedule).__name__}; expected a number, which is constant, an LRSchedule, or a "
        "torch scheduler made into a table by TabulatedSchedule.from_torch"
    )


class TakesSchedule:
    """Base of optimizers: says where the learning rate goes if ``schedule``, the second argument, is missing."""

    def __new__(cls, *args: Any, **arguments: Any) -> Self:
        is_missing = len(args) < 2 and "schedule" not in arguments
        if is_missing and "schedule" in inspect.signature(cls.__init__).parameters:
            raise UserError(
                f"{cls.__name__} lacks the learning rate; expected it, or a schedule of it, as the second argument,"
                f" schedule: {cls.__name__}(params, 1e-3)"
            )
        return super().__new__(cls)


def sample(schedule: Schedule) -> tuple[float, int, int | None, list[float]]:
    """Fingerprint of a schedule without reading every step: its bounds and some learning rates."""
    last = 1 << 20 if schedule.total_steps is None else schedule.total_steps - 1
    steps = {1 << power for power in range(last.bit_length())} | {last * part // 8 for part in range(9)}
    rates = [float(schedule.lr(step)) for step in sorted(steps)]
    return float(schedule.peak_lr), schedule.warmup_steps, schedule.total_steps, rates


def build_schedule(config: OptimizerConfig, train_iters: int) -> LRSchedule:
    """The schedule that a run's settings describe.

    Raises:
        UserError: if they contradict each other.
    """
    decay_steps = config.lr_decay_iters or train_iters
    if config.lr_warmup_fraction is not None:
        warmup_steps = int(config.lr_warmup_fraction * decay_steps)
    else:
        warmup_steps = config.lr_warmup_iters or 0
    return LRSchedule(
        style=config.lr_decay_style,
        peak_lr=config.lr,
        min_lr=config.min_lr,
        warmup_steps=warmup_steps,
        total_steps=train_iters,
        warmup_init=config.lr_warmup_init,
        decay_steps=decay_steps,
        decay_rate=config.lr_decay_rate,
        decay_interval=config.lr_decay_interval,
        wsd_decay_steps=config.lr_wsd_decay_iters,
        wsd_decay_style=config.lr_wsd_decay_style,
    )


def integer(name: str, value: int, *, least: int) -> int:
    """``value`` as Python's own int.

    Raises:
        UserError: if it is none (8.0 is not), or below ``least``.
    """
    if not isinstance(value, numbers.Integral) or value < least:
        raise UserError(f"{name} is {value}; expected an int of at least {least}")
    return operator.index(value)


# T_v and T_u, when to refresh the second moment and when to synchronize.


@dataclass(frozen=True)
class StepPlan:
    """What the replicas do at a step; the same on all.

    Attributes:
        averages: t in T_v: gradients are averaged in full precision.
        synchronizes: t in T_u: x moves.
        interval: steps between two synchronizations around this step.
        key: seed of the exchange, for a quantizer that draws random numbers.
    """

    averages: bool
    synchronizes: bool = True
    interval: int = 1
    key: int = 0


IntervalFunction = Callable[[int], int]
"""Interval between two synchronizations that holds at a step."""


class SyncPolicy:
    """T_u: step t synchronizes when t - t' has reached ``interval(t)``, t' the last that did; so does the last step.

    The replicas start equal, as if step -1 had synchronized. A memo only saves recomputation.

    Attributes:
        interval: steps between two synchronizations around a step.
        shortest: the interval right after the warm-up.
    """

    def __init__(self, interval: IntervalFunction, total_steps: int | None, shortest: int = 1) -> None:
        self.interval = interval
        self.shortest = shortest
        self._last_step = None if total_steps is None else total_steps - 1
        self._synchronizes = bytearray()
        self._previous = -1
        self._first_longer: int | None = None

    def synchronizes(self, step: int) -> bool:
        """Whether ``step`` is in T_u."""
        for t in range(len(self._synchronizes), step + 1):
            interval = self.interval(t)
            if interval > self.shortest and self._first_longer is None:
                self._first_longer = t
            due = t - self._previous >= interval or t == self._last_step
            self._synchronizes.append(due)
            if due:
                self._previous = t
        return bool(self._synchronizes[step])

    def has_grown(self, step: int) -> bool:
        """Whether the interval at ``step`` or at any step before it was above the shortest."""
        self.synchronizes(step)  # looks at all of them
        return self._first_longer is not None and self._first_longer <= step


class VariancePolicy:
    """T_v: k_0 = 0, k_{j+1} = k_j + 2^floor(j / kappa), until the second moment is frozen for good.

    It freezes at ``freeze_step``, or, when that is None, at the first step whose synchronization interval is above the
    shortest one.
    """

    def __init__(self, kappa: int, freeze_step: int | None, sync_policy: SyncPolicy) -> None:
        self._kappa = integer("variance_kappa", kappa, least=1)
        self._freeze_step = None if freeze_step is None else integer("variance_freeze_step", freeze_step, least=1)
        self._sync_policy = sync_policy
        if not self.refreshes(0):
            raise UserError(
                "the synchronization policy takes local steps from step 0 on, which leaves none to estimate the second "
                "moment; give variance_freeze_step, or a warm-up"
            )

    def refreshes(self, step: int) -> bool:
        """Whether ``step`` is in T_v."""
        if self._freeze_step is None:
            if self._sync_policy.has_grown(step):
                return False
        elif step >= self._freeze_step:
            return False
        # refreshes a * kappa to (a + 1) * kappa - 1 start at step kappa * (2^a - 1) and lie 2^a apart
        doublings = (step // self._kappa + 1).bit_length() - 1
        return (step - self._kappa * ((1 << doublings) - 1)) % (1 << doublings) == 0


def schedule_interval(schedule: Schedule, max_interval: int, shortest: int = 1) -> IntervalFunction:
    """1 in the warm-up, then ``shortest`` times the largest power of two not above peak / lr(t), cut to a maximum."""
    peak = schedule.peak_lr

    def interval(step: int) -> int:
        if step < schedule.warmup_steps or peak == 0.0:
            return 1
        rate = schedule.lr(step)
        if rate * max_interval <= peak:
            return max_interval
        return min(max_interval, shortest << int(math.log2(peak / rate)))

    return interval


def constant_interval(steps: int) -> IntervalFunction:
    """A constant interval of ``steps``."""
    return lambda step: steps


def doubling_interval(start: int, period: int, max_interval: int) -> IntervalFunction:
    """1 until ``start``, then doubled after each further ``period`` steps (the published experiments: 12500, 32678)."""

    def interval(step: int) -> int:
        doublings = max(0, step - start) // period
        return min(max_interval, 1 << min(doublings, max_interval.bit_length()))

    return interval


def build_sync_policy(text: str, schedule: Schedule, max_interval: int) -> SyncPolicy:
    """The policy that ``text`` names: schedule, schedule:K, every, constant:K or doubling:START,PERIOD.

    Raises:
        UserError: if it names none, or ``max_interval`` is not an int of at least 1.
    """
    max_interval = integer("max_sync_interval", max_interval, least=1)
    name, _, rest = text.partition(":")
    try:
        numbers = [int(part) for part in rest.split(",")] if rest else []
    except ValueError:
        numbers = [-1]
    shortest = 1
    if name == "schedule" and (not rest or (len(numbers) == 1 and numbers[0] >= 1)):
        shortest = min(numbers[0] if rest else 1, max_interval)
        # as every interval of this policy, the shortest one times a power of two
        interval = schedule_interval(schedule, shortest << ((max_interval // shortest).bit_length() - 1), shortest)
    elif name == "every" and not rest:
        interval = constant_interval(1)
    elif name == "constant" and len(numbers) == 1 and numbers[0] >= 1:
        interval = constant_interval(numbers[0])
    elif name == "doubling" and len(numbers) == 2 and numbers[0] >= 0 and numbers[1] >= 1:
        interval = doubling_interval(numbers[0], numbers[1], max_interval)
    else:
        names = ("schedule", "every", "constant", "doubling")
        hint = "" if name in names else nearest(name, names)
        raise UserError(
            f"sync_policy is {text!r}; expected schedule, every, schedule:K or constant:K (K >= 1), or"
            f" doubling:START,PERIOD{hint}"
        )
    return SyncPolicy(interval, schedule.total_steps, shortest)
