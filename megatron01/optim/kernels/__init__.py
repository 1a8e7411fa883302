"""Update kernels of the optimizers, and the choice of a back end for a device."""

from __future__ import annotations

import torch

from megatron01.comm.kernels import require_triton, triton_serves
from megatron01.optim.local_update import Kernels


def build_kernels(device: torch.device, *, num_threads: int | None = None, backend: str = "auto") -> Kernels:
    """The fastest kernels for a device, or those that ``backend`` names.

    Args:
        backend: "auto", "cpu", "triton" or "reference" (plain torch, the specification, on any device).

    Raises:
        ValueError: backend is none of those.
        UserError: backend is "triton", but Triton is not installed or the parameters are not on a GPU.
    """
    if backend == "auto":
        backend = "cpu" if device.type == "cpu" else "triton" if triton_serves(device) else "reference"
    if backend == "cpu":
        # compiled kernels are only loaded where they are used
        from megatron01.optim.kernels.cpu import CPUKernels

        return CPUKernels(num_threads or torch.get_num_threads())
    if backend == "triton":
        require_triton()
        from megatron01.optim.kernels.gpu import TritonKernels

        return TritonKernels(device)
    if backend == "reference":
        from megatron01.optim.kernels.specification import TorchKernels

        return TorchKernels(device)
    raise ValueError(f"backend is {backend!r}; expected auto, cpu, triton or reference")
