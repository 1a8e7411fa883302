"""The learning rate of each step: a pure function of the step.

A step is the number of optimizer steps taken before it: the first is 0. No state needs a checkpoint: a resumed run,
another rank or a plotting tool gets the same answer for the same step. Names and formulas of the learning rate's styles
are Megatron-LM's; ``exponential`` is the BERT recipe of the 0/1 Adam paper: x ``decay_rate`` every ``decay_interval``
steps.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from megatron01.config import OptimizerConfig
from megatron01.errors import UserError, nearest, require_integer, require_share

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
        for field, styles in (("style", STYLES), ("wsd_decay_style", WSD_STYLES)):
            if (style := getattr(self, field)) not in styles:
                raise UserError(
                    f"{field} is {style!r}; expected one of {', '.join(styles)}{nearest(str(style), styles)}"
                )
        for name, least in (("warmup_steps", 0), ("decay_interval", 1)):
            self._set_integer(name, least)
        for name in ("total_steps", "decay_steps", "wsd_decay_steps"):
            if getattr(self, name) is not None:
                self._set_integer(name, 1)
        require_share("decay_rate", self.decay_rate, "(0, 1]")
        if not isinstance(self.peak_lr, numbers.Real) or not 0 <= self.peak_lr < math.inf:
            raise UserError(f"peak_lr is {self.peak_lr!r}; expected a finite number of at least 0")
        for name in ("min_lr", "warmup_init"):
            rate = getattr(self, name)
            if not isinstance(rate, numbers.Real) or not 0 <= rate <= self.peak_lr:
                raise UserError(f"{name} is {rate!r}; expected a number from 0 to peak_lr ({self.peak_lr})")
        end = self.decay_end
        if self.style in ("linear", "cosine", "WSD"):
            if end is None:
                raise UserError(f"style {self.style!r} needs total_steps or decay_steps")
            if end <= self.warmup_steps:
                raise UserError(
                    f"the decay ends at step {end}, within the warm-up of {self.warmup_steps} steps; make the warm-up"
                    " shorter (--lr-warmup-iters) or the run longer"
                )
            if self.style == "WSD" and self._final_decay_steps > end - self.warmup_steps:
                raise UserError(
                    f"wsd_decay_steps is {self._final_decay_steps}; expected 1 to {end - self.warmup_steps}, "
                    "the steps between warm-up and end"
                )

    def _set_integer(self, name: str, least: int) -> None:
        object.__setattr__(self, name, require_integer(name, getattr(self, name), least=least))

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
        try:
            rates = tuple(map(float, self.learning_rates))  # a copy: what is given may change later
        except (TypeError, ValueError):
            raise UserError(f"the table of learning rates is {self.learning_rates!r}; expected numbers") from None
        if not rates:
            raise UserError("the table of learning rates is empty; expected one for each step")
        for step, rate in enumerate(rates):
            if not 0 <= rate < math.inf:
                raise UserError(f"the learning rate of step {step} is {rate}; expected a finite number of at least 0")
        object.__setattr__(self, "learning_rates", rates)

    @cached_property
    def peak_lr(self) -> float:
        return max(self.learning_rates)

    @cached_property
    def warmup_steps(self) -> int:
        return self.learning_rates.index(self.peak_lr)

    @property
    def total_steps(self) -> int:
        return len(self.learning_rates)

    def lr(self, step: int) -> float:
        return self.learning_rates[min(step, len(self.learning_rates) - 1)]

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
            UserError: if it depends on measurements, as ReduceLROnPlateau does, or ``total_steps`` is no positive int.
        """
        import torch

        total_steps = require_integer("total_steps", total_steps, least=1)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=base_lr)
        scheduler = make_scheduler(optimizer)
        if "metrics" in inspect.signature(scheduler.step).parameters:
            raise UserError(
                f"{type(scheduler).__name__} follows measurements, so its learning rates are not known before the run;"
                " expected a scheduler that follows the step"
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
