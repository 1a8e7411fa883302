"""DiLoCo and SparseLoCo: AdamW on each replica, and periodic outer steps.

DiLoCo (Douillard et al., arXiv:2311.08105) takes Nesterov steps; SparseLoCo (Sarfi et al., arXiv:2508.15706) sends
top-k sparsified, quantized outer gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from workload import new_optimizer, train_step

from rivals.contestant import Exchanged, Setup, ring_bytes

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""As published."""
CHUNK = 4096
KEPT = 128
"""Of a chunk: 3 %, the upper end of the published range."""
DECAY = 0.95
"""Of what error feedback holds, at each outer step, as published; it stands for an outer momentum."""


class OuterStep:
    """The outer optimizer: SGD with Nesterov momentum on the mean outer gradient (weight change since the last outer
    step).

    Args:
        weights: of this replica's model, fp32; the same on all replicas now.
        rate, momentum: of the outer step; 1 and 0 make it an average of the replicas' weights.
    """

    def __init__(
        self, weights: Iterable[torch.Tensor], *, rate: float = OUTER_RATE, momentum: float = OUTER_MOMENTUM
    ) -> None:
        self._weights = [weight.detach() for weight in weights]
        self.common = [weight.clone() for weight in self._weights]
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
        """Mean outer gradient of all replicas, and the bytes this replica sent for it; ``way``: its own, flat, fp32.

        It is sent in bf16.
        """
        flat = way.bfloat16()
        dist.all_reduce(flat)
        return flat.float() / dist.get_world_size(), ring_bytes(dist.get_world_size(), flat.nbytes)

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Context manager in which the model holds the weights of the last outer step."""
        own = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self.common)
        yield
        torch._foreach_copy_(self._weights, own)


class SparseOuterStep(OuterStep):
    """Outer step with the mean of sparse messages: of each chunk the ``KEPT`` largest entries, in 2 bits each.

    The rest stays in each replica's error feedback. An entry is sent as its index (12 bits), its sign, and one bit that
    selects one of two magnitudes, at a quarter and three quarters of the range between the smallest and the largest
    sent; these two bounds are sent in fp32, once per chunk. Chunks run through all weights in order; the last is
    padded. As published, the outer step has rate 1 and no momentum.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__(weights, rate=1.0, momentum=0.0)
        elements = sum(weight.numel() for weight in self._weights)
        self._error = torch.zeros(-(-elements // CHUNK), CHUNK)

    def _mean_way(self, way: torch.Tensor) -> tuple[torch.Tensor, float]:
        self._error.mul_(DECAY).add_(pad(way, (0, self._error.numel() - way.numel())).view_as(self._error))
        packet = pack(self._error)
        self._error -= unpack(packet)
        packets = [torch.empty_like(packet) for _ in range(dist.get_world_size())]
        dist.all_gather(packets, packet)
        mean = sum(map(unpack, packets), torch.zeros_like(self._error)).div_(len(packets))
        return mean.flatten()[: way.numel()], float((len(packets) - 1) * packet.nbytes)


class DiLoCo:
    """AdamW on each replica, with an outer step every ``interval`` steps and after the last."""

    def __init__(self, setup: Setup, interval: int, outer: OuterStep) -> None:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._inner = new_optimizer(setup.model, setup.config, alone)
        self._outer = outer
        self._module = setup.loss_module
        self._interval = interval
        self._steps = setup.steps

    def step(self, batch: tuple[Any, ...]) -> Exchanged:
        train_step(self._inner, self._module, batch)
        if self._inner.step_count % self._interval == 0 or self._inner.step_count == self._steps:
            return Exchanged("outer", self._outer.take())
        return Exchanged("local", 0.0)

    def replicated_weights(self) -> AbstractContextManager[None]:
        return self._outer.common_weights()


def pack(values: torch.Tensor) -> torch.Tensor:
    """The message, uint8, of the largest entries of each row of ``values`` (rows, ``CHUNK``), fp32."""
    rows = len(values)
    places = values.abs().topk(KEPT, dim=1, sorted=False).indices  # (rows, KEPT)
    kept = values.gather(1, places)
    magnitudes = kept.abs()
    least, most = magnitudes.amin(1, keepdim=True), magnitudes.amax(1, keepdim=True)
    codes = 2 * (kept < 0).long() + (magnitudes > (least + most) / 2).long()
    pairs = places.view(rows, KEPT // 2, 2)  # two 12-bit indices in three bytes
    place_bytes = torch.stack(
        [pairs[..., 0] >> 4, (pairs[..., 0] & 15) << 4 | pairs[..., 1] >> 8, pairs[..., 1] & 255], dim=-1
    )
    code_bytes = (codes.view(rows, KEPT // 4, 4) << torch.tensor([0, 2, 4, 6])).sum(-1)
    range_bytes = torch.cat([least, most], dim=1).view(torch.uint8)  # (rows, 8)
    return torch.cat([range_bytes, place_bytes.flatten(1).to(torch.uint8), code_bytes.to(torch.uint8)], dim=1)


def unpack(packet: torch.Tensor) -> torch.Tensor:
    """The rows decoded from a message of ``pack``: (rows, ``CHUNK``), fp32, mostly zero."""
    rows = len(packet)
    ends = [8, KEPT * 12 // 8, KEPT // 4]  # an index has 12 bits, a code 2
    range_bytes, place_bytes, code_bytes = packet.split(ends, dim=1)
    least, most = range_bytes.contiguous().view(torch.float32).split(1, dim=1)
    first, middle, last = place_bytes.long().view(rows, KEPT // 2, 3).unbind(-1)
    places = torch.stack([first << 4 | middle >> 4, (middle & 15) << 8 | last], dim=-1).view(rows, KEPT)
    codes = (code_bytes.long().unsqueeze(-1) >> torch.tensor([0, 2, 4, 6]) & 3).view(rows, KEPT)
    magnitudes = least + (most - least) * torch.where(codes % 2 == 1, 0.75, 0.25)
    return torch.zeros(rows, CHUNK).scatter_(1, places, torch.where(codes >= 2, -magnitudes, magnitudes))
