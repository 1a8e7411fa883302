"""One optimizer step of a replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron01.optim import PretrainOptimizer
from megatron01.training.evaluation import Batch, ForwardStep
from megatron01.training.health import OwnWork


@dataclass(frozen=True)
class TrainingStep:
    """Adds up the gradients of some micro-batches and steps.

    Attributes:
        module: what the optimizer gave to be called in the forward pass.
        forward_step: from it and a batch to the loss and its parts by name.
        num_micro_batches: of one step.
        own_work: counts the time that no other replica can hold up.
    """

    optimizer: PretrainOptimizer
    module: nn.Module
    forward_step: ForwardStep
    num_micro_batches: int
    own_work: OwnWork

    def run(self, batches: Iterator[Batch]) -> dict[str, Tensor]:
        """Take a step on the next micro-batches. Returns their mean ``loss`` and its parts, fp64 scalars, detached."""
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        for remaining in reversed(range(self.num_micro_batches)):
            with self.optimizer.no_sync() if remaining else nullcontext():
                with self.own_work.counted():
                    loss, parts = self.forward_step(self.module, next(batches))
                self.optimizer.scale_loss(loss / self.num_micro_batches).backward()
            for name, value in {"loss": loss, **parts}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double() / self.num_micro_batches
        self.optimizer.step()
        return sums


# The module whose forward pass is a model's loss.


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
