"""One training step: forward and backward passes over micro-batches, then the optimizer; and the loss without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron01.checkpoint.load import random_state, set_random_state
from megatron01.config import PretrainConfig
from megatron01.config.registry import find_optimizer
from megatron01.optim import PretrainOptimizer
from megatron01.parallel import ReplicaGroup
from megatron01.parallel.process_groups import Progress

Batch = dict[str, Tensor]
ForwardStep = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, Tensor]]]
"""(module whose forward is the model's loss, batch) -> (loss to minimize, its components by name)."""


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Each batch with its tensors on ``device``."""
    for batch in batches:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


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


@dataclass(frozen=True)
class TrainingStep:
    """Accumulates gradients over micro-batches and steps the optimizer.

    Attributes:
        module: the module to call in the forward pass, as returned by ``optimizer.attach``.
        forward_step: (module, batch) -> (loss, loss components by name).
        num_micro_batches: per step.
        local_compute_time: of this rank.
        progress: notified of each micro-batch when it is loaded.
    """

    optimizer: PretrainOptimizer
    module: nn.Module
    forward_step: ForwardStep
    num_micro_batches: int
    local_compute_time: LocalComputeTime
    progress: Progress = field(default_factory=Progress)

    def run(self, batches: Iterator[Batch]) -> dict[str, Tensor]:
        """One step on the next micro-batches. Returns the mean ``loss`` and its components: fp64 scalars, detached."""
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        for remaining in reversed(range(self.num_micro_batches)):
            with self.optimizer.no_sync() if remaining else nullcontext():
                with self.local_compute_time.counted():
                    batch = next(batches)
                    self.progress.note(in_step=True)
                    loss, components = self.forward_step(self.module, batch)
                self.optimizer.scale_loss(loss / self.num_micro_batches).backward()
            for name, value in {"loss": loss, **components}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double() / self.num_micro_batches
        self.optimizer.step()
        return sums


def accumulates_in_fp32(config: PretrainConfig, num_micro_batches: int) -> bool:
    """True if a run's gradients are to be added up in fp32 (``FlatOptimizer.sum_gradients_in_fp32``)."""
    return (
        config.training.accumulate_grads_in_fp32
        and config.training.precision != "fp32"
        and num_micro_batches > 1
        and not find_optimizer(config.optimizer.optimizer).ddp  # whose gradients DistributedDataParallel adds up
    )


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
    stop_reason: Callable[[], str | None] | None = None,
) -> float | None:
    """Loss without dropout, averaged over batches and replicas. Collective.

    Restores the random-number generators: even a data loader draws a seed.

    Args:
        loss_module: the module whose forward is the model's loss; in training mode again afterwards.
        forward_step: as in training.
        batches: this replica's, as many as every other replica has, and at least one.
        group: the replicas.
        stop_reason: preemption check, called every few batches by all ranks; a reason ends the evaluation with None.
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
                if stop_reason is not None and count % BATCHES_BETWEEN_STOP_CHECKS == 0 and stop_reason() is not None:
                    return None
    finally:
        loss_module.train()
    return group.sum(total.item() / count) / group.world_size
