"""This library's own optimizers as contestants."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from workload import sum_of_losses

from megatron01.optim import build_optimizer, build_schedule
from rivals.contestant import Exchanged, Setup


class Library:
    """Contestant that trains with the optimizer named in the settings."""

    def __init__(self, setup: Setup) -> None:
        schedule = build_schedule(setup.config.optimizer, setup.steps)
        self._optimizer = build_optimizer(setup.model, setup.config, schedule, dist.group.WORLD)
        self._module = self._optimizer.attach(setup.loss_module)

    def step(self, batch: tuple[Any, ...]) -> Exchanged:
        self._optimizer.zero_grad()
        sum_of_losses(self._module(*batch)).backward()
        self._optimizer.step()
        report = self._optimizer.last_step
        assert report is not None
        kind = "full+one_bit" if report.kind == "full" and report.rounds > 1 else report.kind
        return Exchanged(kind, report.bytes_sent)

    def replicated_weights(self) -> AbstractContextManager[None]:
        return self._optimizer.replicated_weights()
