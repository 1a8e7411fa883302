"""One training step: forward and backward passes over micro-batches, then the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron01.config import PretrainConfig
from megatron01.config.registry import find_optimizer
from megatron01.optim import PretrainOptimizer
from megatron01.training.evaluation import Batch, ForwardStep
from megatron01.training.health import LocalComputeTime


@dataclass(frozen=True)
class TrainingStep:
    """Accumulates gradients over micro-batches and steps the optimizer.

    Attributes:
        module: the module to call in the forward pass, as returned by ``optimizer.attach``.
        forward_step: (module, batch) -> (loss, loss components by name).
        num_micro_batches: per step.
        local_compute_time: of this rank.
    """

    optimizer: PretrainOptimizer
    module: nn.Module
    forward_step: ForwardStep
    num_micro_batches: int
    local_compute_time: LocalComputeTime

    def run(self, batches: Iterator[Batch]) -> dict[str, Tensor]:
        """One step on the next micro-batches. Returns the mean ``loss`` and its components: fp64 scalars, detached."""
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        for remaining in reversed(range(self.num_micro_batches)):
            with self.optimizer.no_sync() if remaining else nullcontext():
                with self.local_compute_time.counted():
                    loss, components = self.forward_step(self.module, next(batches))
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
