"""Adam with torch's DistributedDataParallel, its own communication hooks, and gradient accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from workload import new_optimizer, sum_of_losses

from rivals.contestant import Exchanged, Setup, ring_bytes

BUCKET_MB = 0.25
"""A seventh of the benchmark's model, so that there is something to overlap; 25, torch's own, would hold all of it."""
POWER_SGD_RANK = 4


class BucketHook:
    """A communication hook of torch, and the bytes that a replica sends by formula."""

    kind = "full"
    bucket_mb = BUCKET_MB

    def __init__(self, hook: Callable[..., Any], element_bytes: int, state: Any = None) -> None:
        self._hook = hook
        self._state = state
        self._element_bytes = element_bytes
        self.bytes_sent = 0.0

    def elements(self, bucket: dist.GradBucket) -> int:
        """Number of elements sent for a bucket."""
        return bucket.buffer().numel()

    def run(self, bucket: dist.GradBucket) -> Any:
        elements = self.elements(bucket)
        self.bytes_sent += ring_bytes(dist.get_world_size(), self._element_bytes * elements)
        return self._hook(self._state, bucket)


class PowerSGDHook(BucketHook):
    """Low-rank gradients with error feedback (Vogels et al., NeurIPS 2019) after ``start`` steps in fp32."""

    # Use with one bucket: in the thread that completes a bucket's first all-reduce, torch's hook starts a second and
    # waits for it. With several buckets, replicas start them in different orders, and two of them block both gloo
    # threads.
    bucket_mb = 25.0

    def __init__(self, start: int) -> None:
        state = PowerSGDState(None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=start)
        super().__init__(powerSGD_hook, 4, state)

    def elements(self, bucket: dist.GradBucket) -> int:
        """Matrices are sent as two factors if these have less than half of the elements; all else uncompressed."""
        if self._state.iter < self._state.start_powerSGD_iter:
            return super().elements(bucket)
        self.kind = "low_rank"
        total = 0
        for gradient in bucket.gradients():
            rows, columns = gradient.shape[0], gradient[0].numel()
            factors = (rows + columns) * min(rows, columns, POWER_SGD_RANK)
            total += factors if 2 * factors < gradient.numel() else gradient.numel()
        return total


# without annotations: DistributedDataParallel compares them with types, and these would be strings
def _run_hook(hook, bucket):  # type: ignore[no-untyped-def]
    return hook.run(bucket)


class DataParallel:
    """Adam on the mean gradient of all replicas.

    Args:
        hook: averages the gradients; None for no exchange (replicas diverge), to measure a step alone.
        accumulate: micro-batches whose gradients are accumulated before each exchange and update.
    """

    def __init__(self, setup: Setup, hook: BucketHook | None, accumulate: int = 1) -> None:
        config = setup.with_updates(math.ceil(setup.steps / accumulate)).config
        self._optimizer = new_optimizer(setup.model, config, dist.group.WORLD)
        bucket_mb = BUCKET_MB if hook is None else hook.bucket_mb
        self._module = DistributedDataParallel(setup.loss_module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
        if hook is not None:
            self._module.register_comm_hook(hook, _run_hook)
        self._hook = hook
        self._accumulate = accumulate
        self._steps = setup.steps
        self._taken = 0

    def step(self, batch: tuple[Any, ...]) -> Exchanged:
        if self._taken % self._accumulate == 0:
            self._optimizer.zero_grad()
        self._taken += 1
        updates = self._taken % self._accumulate == 0 or self._taken == self._steps
        with nullcontext() if updates and self._hook is not None else self._module.no_sync():
            (sum_of_losses(self._module(*batch)) / self._accumulate).backward()
        if updates:
            self._optimizer.step()
        if not updates or self._hook is None:
            return Exchanged("local", 0.0)
        sent, self._hook.bytes_sent = self._hook.bytes_sent, 0.0
        return Exchanged(self._hook.kind, sent)

    def replicated_weights(self) -> AbstractContextManager[None]:
        return nullcontext()
