"""DiLoCo (Douillard et al., arXiv:2311.08105): AdamW on each replica, and periodic outer Nesterov steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from workload import sum_of_losses

from megatron01.optim import build_optimizer, build_schedule
from rivals.contestant import Exchanged, Setup, ring_bytes

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""As published."""


class OuterStep:
    """The outer optimizer: SGD with Nesterov momentum on the mean outer gradient (weight change since the last outer
    step).

    Args:
        weights: of this replica's model, fp32; the same on all replicas now.
        rate, momentum: of the outer step; 1 and 0 make it an average of the replicas' weights.
        wire_dtype: type in which outer gradients are sent.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        *,
        rate: float = OUTER_RATE,
        momentum: float = OUTER_MOMENTUM,
        wire_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._weights = [weight.detach() for weight in weights]
        self.common = [weight.clone() for weight in self._weights]
        self._wire_dtype = wire_dtype
        self._sgd = torch.optim.SGD(self.common, lr=rate, momentum=momentum, nesterov=momentum > 0.0)

    @torch.no_grad()
    def take(self) -> float:
        """Take the outer step, after which all replicas have the same weights; returns the bytes this replica sent."""
        ways = [old - new for old, new in zip(self.common, self._weights, strict=True)]
        mean, sent = self._mean_way(torch.cat([way.flatten() for way in ways]))
        for weight, gradient in zip(self.common, mean.split([way.numel() for way in ways]), strict=True):
            weight.grad = gradient.view_as(weight)
        self._sgd.step()
        torch._foreach_copy_(self._weights, self.common)
        return sent

    def _mean_way(self, way: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Mean outer gradient of all replicas, and the bytes this replica sent for it; ``way``: its own, flat, fp32."""
        flat = way.to(self._wire_dtype)
        dist.all_reduce(flat)
        return flat.float() / dist.get_world_size(), ring_bytes(dist.get_world_size(), flat.nbytes)

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Context manager in which the model holds the weights of the last outer step."""
        own = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self.common)
        yield
        torch._foreach_copy_(self._weights, own)


class DiLoCo:
    """AdamW on each replica, with an outer step every ``interval`` steps and after the last."""

    def __init__(self, setup: Setup, interval: int, outer: OuterStep) -> None:
        schedule = build_schedule(setup.config.optimizer, setup.steps)
        self._inner = build_optimizer(setup.model, setup.config, schedule, dist.group.WORLD)
        self._outer = outer
        self._module = setup.loss_module
        self._interval = interval
        self._steps = setup.steps

    def step(self, batch: tuple[Any, ...]) -> Exchanged:
        self._inner.zero_grad()
        sum_of_losses(self._module(*batch)).backward()
        self._inner.step()
        if self._inner.step_count % self._interval == 0 or self._inner.step_count == self._steps:
            return Exchanged("outer", self._outer.take())
        return Exchanged("local", 0.0)

    @contextmanager
    def replicated_weights(self) -> Iterator[None]:
        with self._outer.common_weights():
            yield
