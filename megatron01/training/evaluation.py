"""Evaluation: the mean loss on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megatron01.checkpoint.load import random_state, set_random_state
from megatron01.parallel import ReplicaGroup
from megatron01.training.step import Batch, ForwardStep, on_device

BATCHES_BETWEEN_STOP_CHECKS = 8


@contextmanager
def undisturbed_random_state(device: torch.device) -> Iterator[None]:
    """Restore the states of all random-number generators on exit."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


@torch.no_grad()
def mean_loss(
    loss_module: nn.Module,
    forward_step: ForwardStep,
    batches: Iterable[Batch],
    group: ReplicaGroup,
    *,
    is_stopped: Callable[[], bool] | None = None,
) -> float | None:
    """Loss without dropout, averaged over batches and replicas. Collective.

    Restores the random-number generators: even a data loader draws a seed.

    Args:
        loss_module: the module whose forward is the model's loss; in training mode again afterwards.
        forward_step: as in training.
        batches: this replica's, as many as every other replica has, and at least one.
        group: the replicas.
        is_stopped: preemption check, called every few batches by all ranks; True ends the evaluation with None.
    """
    total = torch.zeros((), dtype=torch.float64, device=group.device)
    count = 0
    loss_module.eval()
    try:
        with undisturbed_random_state(group.device):
            for batch in on_device(batches, group.device):
                group.progress.note(in_step=True)
                loss, _ = forward_step(loss_module, batch)
                total += loss
                count += 1
                if is_stopped is not None and count % BATCHES_BETWEEN_STOP_CHECKS == 0 and is_stopped():
                    return None
    finally:
        loss_module.train()
    return group.sum(total.item() / count) / group.world_size
