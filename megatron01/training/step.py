"""One training step: forward and backward passes over micro-batches, then the optimizer; and the loss without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron01.optim import PretrainOptimizer
from megatron01.parallel import ReplicaGroup
from megatron01.parallel.process_groups import Progress
from megatron01.utils.random_numbers import random_state, set_random_state

Batch = dict[str, Tensor]
ForwardStep = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, Tensor]]]
"""(module whose forward is the model's loss, batch) -> (loss to minimize, its components by name)."""


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Each batch, with its tensors moved to ``device``."""
    for batch in batches:
        for name, tensor in batch.items():
            batch[name] = tensor.to(device, non_blocking=True)
        yield batch


class LocalComputeTime:
    """Local compute time in seconds: data loading and forward pass, which never wait for another rank.

    On a GPU the time between two events, read when a line of metrics is made: no host sync in a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add the time of the body."""
        if self._is_cuda:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Seconds since the last call. On a GPU, a host sync."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds


def training_step(
    optimizer: PretrainOptimizer,
    module: nn.Module,
    forward_step: ForwardStep,
    batches: Iterator[Batch],
    num_micro_batches: int,
    *,
    local_compute_time: LocalComputeTime,
    progress: Progress,
) -> dict[str, Tensor]:
    """Accumulate gradients over the next micro-batches and step the optimizer.

    Returns the mean ``loss`` and its components: fp64 scalars, detached. ``module`` is what ``optimizer.attach`` has
    returned; ``progress`` is notified of each micro-batch when it is loaded, and of the end of the backward passes.
    """
    optimizer.zero_grad()
    sums: dict[str, Tensor] = {}
    for remaining in reversed(range(num_micro_batches)):
        with optimizer.no_sync() if remaining else nullcontext():
            with local_compute_time.counted():
                batch = next(batches)
                progress.note(in_step=True)
                loss, components = forward_step(module, batch)
            optimizer.scale_loss(loss / num_micro_batches).backward()
        for name, value in {**components, "loss": loss}.items():
            sums[name] = sums.get(name, 0.0) + value.detach().double() / num_micro_batches
    progress.note(in_step=True)
    optimizer.step()
    return sums


class LossModule(nn.Module):
    """Calls ``model.loss(...)`` as its forward.

    DistributedDataParallel and torch.compile both work on a module's forward; this puts the whole computation, up to
    the loss, inside. The optimizer and checkpoints keep the bare model, whose parameter names have no prefix.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return self.model.loss(*inputs)  # type: ignore[operator]


BATCHES_BETWEEN_STOP_CHECKS = 8


@torch.no_grad()
def mean_loss(
    loss_module: nn.Module,
    forward_step: ForwardStep,
    batches: Iterable[Batch],
    group: ReplicaGroup,
    *,
    stop_reason: Callable[[], str | None] | None = None,
) -> float | None:
    """Loss without dropout, averaged over batches and replicas. Collective.

    Restores the random-number generators: even a data loader draws a seed. Modules that were in training mode are so
    again afterwards.

    Args:
        loss_module: the module whose forward is the model's loss.
        batches: this replica's, as many as every other replica has, and at least one.
        stop_reason: preemption check, called every few batches by all ranks; a reason ends the evaluation with None.
    """
    total = torch.zeros((), dtype=torch.float64, device=group.device)
    count = 0
    trained = [module for module in loss_module.modules() if module.training]  # not what a user's model has frozen
    loss_module.eval()
    state = random_state(group.device)
    try:
        for batch in on_device(batches, group.device):
            group.progress.note(in_step=True)
            loss, _ = forward_step(loss_module, batch)
            total += loss
            count += 1
            if stop_reason is not None and count % BATCHES_BETWEEN_STOP_CHECKS == 0 and stop_reason() is not None:
                return None
    finally:
        set_random_state(state, group.device)
        for module in trained:
            module.training = True
    return group.sum(total.item() / count) / group.world_size
