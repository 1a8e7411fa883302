"""DeepSpeed 0.19.6's 1-bit Adam and 0/1 Adam on CPUs: its code unchanged, plus the two things that it lacks there.

DeepSpeed is not a dependency of this project; 0.19.6 is the last release with these optimizers. Its ``compressed`` back
end needs a bit packer that exists for one kind of accelerator only, and gathers a 0-dimensional scale, which gloo
rejects. Both are supplied here. The packer's time is reported, as it is not DeepSpeed's. Gradients of full steps are
sent in bf16, like those of the other contestants.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from workload import sum_of_losses

from megatron01.optim import build_schedule, weight_decay_groups
from rivals.contestant import Exchanged, Setup, ring_bytes

SCALE_BYTES = 4
MESSAGE_BYTES = 252
"""What gloo adds to a message of an exchange, as counted: 144 in the all-to-all, 288 in each of the three gathers."""


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


class DeepSpeed:
    """Contestant that trains with one of DeepSpeed's optimizers.

    Args:
        name: OneBitAdam or ZeroOneAdam.
        settings: the optimizer's own.
        flat: make each parameter group one tensor, as DeepSpeed itself does for a 16-bit model: fewer messages, and one
            scale for the group. For an fp32 model it exchanges every parameter separately, in four collectives.
    """

    def __init__(self, setup: Setup, name: str, settings: dict[str, Any], *, flat: bool) -> None:
        warnings.simplefilter("ignore")  # it calls overloads that torch has deprecated
        self._schedule = build_schedule(setup.config.optimizer, setup.steps)
        self._parameters = sum(parameter.numel() for parameter in setup.model.parameters())
        self._taken = 0
        self._one_bit_bytes = 0.0
        options = setup.config.optimizer
        adam = {"lr": options.lr, "betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}
        config = {
            "train_micro_batch_size_per_gpu": setup.config.training.micro_batch_size,
            "gradient_clipping": options.clip_grad,
            "communication_data_type": "bf16",
            "optimizer": {"type": name, "params": {**adam, **settings, "comm_backend_name": "compressed"}},
        }
        with _quiet():
            os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
            import deepspeed

            deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
            supply_what_cpus_lack(Packer())
            groups = weight_decay_groups(setup.model, options.weight_decay)
            self._flat = FlatModel(setup.loss_module, groups) if flat else None
            self._engine = deepspeed.initialize(
                model=self._flat or setup.loss_module,
                model_parameters=self._flat.groups if self._flat else without_names(groups),
                config=config,
                dist_init_required=False,
            )[0]
        self._optimizer = self._engine.optimizer
        self._count_one_bit(self._optimizer.comm_backend_handle)

    def step(self, batch: tuple[Any, ...]) -> Exchanged:
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.lr(self._taken)
        self._taken += 1
        if self._flat is not None:
            self._flat.clear_gradients()
        full = self._engine.enable_backward_allreduce
        with _quiet():
            self._engine.backward(sum_of_losses(self._engine(*batch)))
            self._engine.step()
        one_bit, self._one_bit_bytes = self._one_bit_bytes, 0.0
        kinds = [kind for kind, happened in (("full", full), ("one_bit", one_bit > 0)) if happened]
        sent = ring_bytes(dist.get_world_size(), 2 * self._parameters) if full else 0.0
        return Exchanged("+".join(kinds) or "local", sent + one_bit)

    def replicated_weights(self) -> AbstractContextManager[None]:
        """Each replica's own weights: DeepSpeed has no replicated weights between two synchronizations."""
        return nullcontext()

    def _count_one_bit(self, backend: Any) -> None:
        """Count the bytes of signs and scales, to the servers and back."""
        all_reduce, replicas = backend.compressed_allreduce, dist.get_world_size()

        def counted(_: Any, buffer: Any, worker_error: Any, *others: Any) -> Any:
            messages = 2 * (replicas - 1) * (SCALE_BYTES + 2 * MESSAGE_BYTES)
            self._one_bit_bytes += ring_bytes(replicas, worker_error.numel() / 8) + messages
            return all_reduce(buffer, worker_error, *others)

        backend.compressed_allreduce = types.MethodType(counted, backend)


def without_names(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of tensors, from groups of (name, tensor) pairs."""
    return [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups]


class FlatModel(nn.Module):
    """A module with one flat parameter for each of ``groups``; the wrapped module's parameters are views of them.

    Attributes:
        groups: the parameter groups, of one flat tensor each.
    """

    def __init__(self, module: nn.Module, groups: list[dict[str, Any]]) -> None:
        super().__init__()
        self._inside = [module]  # in a list, so that its parameters are not this module's
        self.flat = nn.ParameterList()
        self.groups = []
        self._gradients = []
        for group in without_names(groups):
            parameters = group["params"]
            sizes = [parameter.numel() for parameter in parameters]
            flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
            gradient = torch.zeros_like(flat)
            views = zip(parameters, flat.detach().split(sizes), gradient.split(sizes), strict=True)
            for parameter, weights, part in views:
                parameter.data = weights.view_as(parameter)
                parameter.grad = part.view_as(parameter)
            self.flat.append(flat)
            self.groups.append({**group, "params": [flat]})
            self._gradients.append(gradient)

    def forward(self, *inputs: Any) -> Any:
        return self._inside[0](*inputs)

    def clear_gradients(self) -> None:
        """Call before each backward pass, which accumulates into the gradients of the wrapped module."""
        for parameter, gradient in zip(self.flat, self._gradients, strict=True):
            parameter.grad = gradient.zero_()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that suppresses DeepSpeed's output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


class DeepSpeedZeroOneAdam:
    """DeepSpeed's 1-bit all-reduce alone, and a step of its optimizer (variance frozen) with one such all-reduce."""

    def __init__(self, elements: int) -> None:
        self._packer = Packer()
        with _quiet():
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
                "bytes_sent": ring_bytes(replicas, self._state["worker_error"].numel() / 8),
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
