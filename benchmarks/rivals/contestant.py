"""The interface of a contestant, a training method in the benchmark."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from megatron01.config import PretrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Arguments of a contestant's constructor, on each replica.

    Attributes:
        model: with the initial weights, the same on all replicas.
        loss_module: its forward pass returns the loss.
        config: model, data and optimizer settings; the learning-rate schedule is for ``steps``.
        steps: micro-batches of this replica in the run, the same for all contestants.
    """

    model: nn.Module
    loss_module: nn.Module
    config: PretrainConfig
    steps: int

    def with_updates(self, updates: int) -> Setup:
        """The setup with a schedule of ``updates`` updates and the same share of warm-up."""
        settings = self.config.optimizer
        warmup = round((settings.lr_warmup_iters or 0) * updates / self.steps)
        optimizer = dataclasses.replace(settings, lr_warmup_iters=warmup)
        training = dataclasses.replace(self.config.training, train_iters=updates)
        config = dataclasses.replace(self.config, optimizer=optimizer, training=training)
        return dataclasses.replace(self, config=config)


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """The traffic of a step.

    Attributes:
        kind: full (gradients), one_bit, low_rank, outer (of DiLoCo), local (nothing), or several joined by +.
        bytes: sent by this replica by the contestant's formula, without the headers of messages and frames.
    """

    kind: str
    bytes: float


class Contestant(Protocol):
    """A training method."""

    def step(self, batch: tuple[Any, ...]) -> Exchanged:
        """Train on one micro-batch of this replica."""

    def replicated_weights(self) -> AbstractContextManager[None]:
        """Context manager in which the model holds the weights to evaluate."""


def ring_bytes(replicas: int, payload: float) -> float:
    """Bytes that a replica sends in a ring all-reduce of ``payload`` bytes."""
    return 2 * (replicas - 1) / replicas * payload
