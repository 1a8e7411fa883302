"""DeepSpeed's 0/1 Adam on CPUs: its code unchanged, plus the two things that its 1-bit back end lacks there.

DeepSpeed is not a dependency of this project; 0.19.6 is the last release with these optimizers. Its ``compressed`` back
end needs a bit packer that exists for one kind of accelerator only, and gathers a 0-dimensional scale, which gloo
rejects. Both are supplied here. The packer's time is reported, as it is not DeepSpeed's.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import time
import types
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def version() -> str:
    """DeepSpeed's version. Raises SystemExit if it is not installed."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("--deepspeed needs DeepSpeed; install it with `pip install deepspeed==0.19.6`") from None


class Packer:
    """Bit packer with the interface of DeepSpeed's: most significant bit first, set where >= 0."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def packbits(self, values: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        start = time.perf_counter()
        packed = torch.from_numpy(np.packbits(values.numpy() >= 0))
        self.seconds += time.perf_counter() - start
        return packed

    def unpackbits(self, packed: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        start = time.perf_counter()
        signs = torch.from_numpy(np.unpackbits(packed.numpy())).float().mul_(2.0).sub_(1.0)
        self.seconds += time.perf_counter() - start
        return signs


class _WithGatherOfScalars:
    """deepspeed.comm with an all_gather that accepts 0-dimensional tensors."""

    def __init__(self, communication: Any) -> None:
        self._communication = communication

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communication, name)

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor, **others: Any) -> Any:
        return self._communication.all_gather(tensors, tensor.reshape(-1) if tensor.dim() == 0 else tensor, **others)


def supply_what_cpus_lack(packer: Packer) -> None:
    """Patch DeepSpeed so that ``compressed`` back ends built from now on run on CPUs and pack with ``packer``."""
    import deepspeed.runtime.comm.compressed as compressed

    compressed.PackbitsBuilder = lambda: types.SimpleNamespace(load=lambda: packer)
    if not isinstance(compressed.dist, _WithGatherOfScalars):
        compressed.dist = _WithGatherOfScalars(compressed.dist)


class DeepSpeedZeroOneAdam:
    """DeepSpeed's 1-bit all-reduce alone, and a step of its optimizer (variance frozen) with one such all-reduce."""

    def __init__(self, elements: int) -> None:
        self._packer = Packer()
        with contextlib.redirect_stdout(io.StringIO()):
            self._optimizer = self._build(elements)
            # step 1 is empty, step 2 refreshes the variance, and each later step does one all-reduce
            for _ in range(3):
                self._optimizer.step()
        self._state = self._optimizer.state[self._parameter]
        assert self._optimizer.freeze_key and self._state["local_step_interval"] == 1

    def step(self) -> dict[str, dict[str, float]]:
        parts, replicas = {}, dist.get_world_size()
        for name, function in (("deepspeed_all_reduce", self._all_reduce), ("deepspeed_step", self._optimizer.step)):
            dist.barrier()
            self._packer.seconds = 0.0
            start = time.perf_counter()
            function()
            parts[name] = {
                "seconds": time.perf_counter() - start,
                "packing_seconds": self._packer.seconds,
                # signs to the servers and back, without the few scales
                "bytes_sent": 2 * (replicas - 1) / replicas * self._state["worker_error"].numel() / 8,
            }
        return parts

    def _build(self, elements: int) -> Any:
        warnings.simplefilter("ignore")  # it calls overloads that torch has deprecated
        import deepspeed
        from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        supply_what_cpus_lack(self._packer)
        self._parameter = torch.nn.Parameter(torch.zeros(elements))
        self._parameter.grad = torch.empty(elements).uniform_(-1.0, 1.0)
        engine = types.SimpleNamespace(mpu=None, local_rank=dist.get_rank(), enable_backward_allreduce=True)
        return ZeroOneAdam(
            [self._parameter], deepspeed=engine, lr=1e-4, var_freeze_step=1, comm_backend_name="compressed"
        )

    def _all_reduce(self) -> None:
        state = self._state
        buffer = state["momentum_accumulator"]
        self._optimizer.comm_backend_handle.compressed_allreduce(
            buffer, state["worker_error"], state["server_error"], dist.get_rank()
        )
        buffer.zero_()
