"""The contestants by name: how each is built, and which runs of ``convergence.py`` share its learning rate."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from workload import new_optimizer, train_step

from megatron01.config.registry import optimizers
from rivals.contestant import Contestant, Exchanged, Setup
from rivals.data_parallel import BucketHook, DataParallel, PowerSGDHook
from rivals.diloco import DiLoCo, OuterStep, SparseOuterStep

BASELINE = "ddp_bf16"
ALONE = "alone"
"""No contestant: what a step takes without any exchange."""
ACCUMULATED = 4
FROZEN_SHARE = 0.15
"""1-bit Adam's full-precision steps in its authors' BERT pretraining (23,000 of 152,000), as a share of the run."""
_BERT_STEPS = 118_000
"""Of phase 1 in 0/1 Adam's authors' BERT pretraining."""


class Library:
    """Contestant that trains with the optimizer of this library that the settings name."""

    def __init__(self, setup: Setup) -> None:
        self._optimizer = new_optimizer(setup.model, setup.config, dist.group.WORLD)
        self._module = self._optimizer.attach(setup.loss_module)

    def step(self, batch: tuple[Any, ...]) -> Exchanged:
        train_step(self._optimizer, self._module, batch)
        report = self._optimizer.last_step
        assert report is not None
        kind = "full+one_bit" if report.kind == "full" and report.rounds > 1 else report.kind
        return Exchanged(kind, report.bytes_sent)

    def replicated_weights(self) -> AbstractContextManager[None]:
        return self._optimizer.replicated_weights()


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        title: in words.
        optimizer, overrides: of the recipe's settings; overrides depend on the number of steps.
        build: builds the contestant from the setup on a replica.
        tuned_here: its learning rate cannot be taken from ``convergence.py``, which has no such optimizer.
        needs: optional package that it requires.
        limits_of_run: how a run of this many steps deviates from the title, in words; empty if it does not.
    """

    title: str
    build: Callable[[Setup], Contestant]
    optimizer: str = "adam"
    overrides: Callable[[int], dict[str, Any]] = field(default=lambda steps: {})
    tuned_here: bool = False
    needs: str | None = None
    limits_of_run: Callable[[int], str] = field(default=lambda steps: "")

    def is_available(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


def _library(title: str, optimizer: str, overrides: Callable[[int], dict[str, Any]] = lambda steps: {}) -> Entry:
    """bf16 gradients in full steps, like the baseline's, unless the optimizer has its own type for them."""
    wire = {} if optimizers()[optimizer].auto_wire else {"gradient_wire_dtype": "bf16"}
    return Entry(title, Library, optimizer, lambda steps: {**wire, **overrides(steps)})


def _one_bit_adam(title: str, **changes: Any) -> Entry:
    """With the variance frozen after the published share of the steps."""

    def overrides(steps: int) -> dict[str, Any]:
        return {"freeze_step": max(1, round(FROZEN_SHARE * steps)), **changes}

    return _library(title, "one_bit_adam", overrides)


def _diloco(title: str, interval: int, outer: type[OuterStep], **settings: Any) -> Entry:
    """``settings``: rate and momentum of the outer step; by default the published ones."""

    def build(setup: Setup) -> Contestant:
        return DiLoCo(setup, min(interval, setup.steps), outer(setup.model.parameters(), **settings))

    def limits(steps: int) -> str:
        return f" (here {steps}, the whole run)" if steps < interval else ""

    return Entry(f"{title}, H = {interval}", build, tuned_here=True, limits_of_run=limits)


def _deepspeed(title: str, name: str, settings: Callable[[int], dict[str, Any]], *, flat: bool = False) -> Entry:
    def build(setup: Setup) -> Contestant:
        from rivals.deepspeed import DeepSpeed

        return DeepSpeed(setup, name, settings(setup.steps), flat=flat)

    return Entry(title, build, tuned_here=True, needs="deepspeed")


def _intervals(title: str, **settings: Any) -> Entry:
    """0/1 Adam with local steps."""
    return _library(f"0/1 Adam, intervals {title}", "zero_one_adam", lambda steps: settings)


def _published(steps: int) -> dict[str, Any]:
    """Settings of 0/1 Adam in its authors' BERT pretraining (DeepSpeed's example), scaled to ``steps``."""
    freeze, double = (max(1, round(steps * number / _BERT_STEPS)) for number in (12_500, 32_678))
    doubling = {"local_step_scaler": double, "local_step_clipper": 16}
    return {"var_freeze_step": freeze, "var_update_scaler": 16, **doubling}


ENTRIES = {
    BASELINE: Entry("DDP, bf16 gradients", lambda setup: DataParallel(setup, BucketHook(bf16_compress_hook, 2))),
    "ddp_fp32": Entry("DDP, fp32 gradients", lambda setup: DataParallel(setup, BucketHook(allreduce_hook, 4))),
    "power_sgd": Entry(
        "DDP, PowerSGD of rank 4",
        lambda setup: DataParallel(setup, PowerSGDHook(max(2, setup.steps // 10))),
        tuned_here=True,
    ),
    "accumulation": Entry(
        f"DDP, bf16, {ACCUMULATED} steps accumulated",
        lambda setup: DataParallel(setup, BucketHook(bf16_compress_hook, 2), ACCUMULATED),
        tuned_here=True,
    ),
    "one_bit_adam": _one_bit_adam("1-bit Adam"),
    "one_bit_adam_delayed": _one_bit_adam("1-bit Adam, delayed by a step", delay_synchronization=True),
    "one_bit_adam_4bit": _one_bit_adam("1-bit Adam, warm-up in 4 bits", gradient_wire_dtype="4bit"),
    "zero_one_adam_every": _library(
        "0/1 Adam without local steps", "zero_one_adam", lambda steps: {"sync_policy": "every"}
    ),
    "zero_one_adam": _intervals("from 1 on", sync_policy="schedule"),
    "zero_one_adam_delayed": _intervals(
        "from 1 on, delayed by a step", sync_policy="schedule", delay_synchronization=True
    ),
    "zero_one_adam_from_2": _intervals("from 2 on (the default)", sync_policy="schedule:2"),
    "zero_one_adam_from_4": _intervals("from 4 on", sync_policy="schedule:4"),
    "zero_one_adam_from_4_delayed": _intervals(
        "from 4 on, delayed by a step", sync_policy="schedule:4", delay_synchronization=True
    ),
    "zero_one_adam_kappa_4": _intervals("from 1 on, kappa 4", sync_policy="schedule", variance_kappa=4),
    "quantized_adam": _library("Adam, 4-bit gradients", "quantized_adam"),
    "bin_sgdm": _library("BinSGDM", "bin_sgdm"),
    **{f"averaging_{h}": _diloco("averaging of weights", h, OuterStep, rate=1.0, momentum=0.0) for h in (8, 16, 50)},
    **{f"diloco_{h}": _diloco("DiLoCo", h, OuterStep) for h in (8, 16, 50, 500)},
    **{f"sparse_loco_{h}": _diloco("SparseLoCo", h, SparseOuterStep) for h in (8, 16, 50)},
    "deepspeed_one_bit_adam": _deepspeed(
        "DeepSpeed's 1-bit Adam", "OneBitAdam", lambda steps: {"freeze_step": max(2, round(FROZEN_SHARE * steps))}
    ),
    "deepspeed_zero_one_adam": _deepspeed("DeepSpeed's 0/1 Adam", "ZeroOneAdam", _published),
    "deepspeed_zero_one_adam_flat": _deepspeed(
        "DeepSpeed's 0/1 Adam, flat as in 16 bit", "ZeroOneAdam", _published, flat=True
    ),
}
_ALONE = Entry("no exchange", lambda setup: DataParallel(setup, None))


def entry(name: str) -> Entry:
    return _ALONE if name == ALONE else ENTRIES[name]
