"""Update kernels of the optimizers, and the choice of a back end for a device."""

from __future__ import annotations

import torch

from megatron01.comm.kernels import chosen_backend
from megatron01.optim.local_update import Kernels


def build_kernels(device: torch.device, *, backend: str = "auto") -> Kernels:
    """The fastest kernels for a device, or those that ``backend`` names.

    Args:
        backend: "auto", "cpu", "triton" or "reference" (plain torch, the specification, on any device).

    Raises:
        ValueError: backend is none of those.
        UserError: backend is "triton", but Triton is not installed or the parameters are not on a GPU.
    """
    match chosen_backend(backend, device):
        case "cpu":
            from megatron01.optim.kernels.cpu import CPUKernels  # compiled kernels are only loaded where they are used

            return CPUKernels(torch.get_num_threads())
        case "triton":
            from megatron01.optim.kernels.gpu import TritonKernels

            return TritonKernels(device)
        case _:
            from megatron01.optim.kernels.specification import TorchKernels

            return TorchKernels(device)
