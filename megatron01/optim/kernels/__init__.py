"""Which backend does the optimizer's arithmetic on a device."""

from __future__ import annotations

import torch

from megatron01.comm.kernels import require_triton, triton_serves
from megatron01.optim.flat_parameters import FlatLayout
from megatron01.optim.local_update import UpdateBackend


def build_backend(layout: FlatLayout, *, num_threads: int | None = None, backend: str = "auto") -> UpdateBackend:
    """The fastest backend for the parameters' device, or the one that ``backend`` names.

    Args:
        backend: "auto", "cpu", "triton" or "reference".

    Raises:
        ValueError: backend is none of those.
        UserError: backend is "triton", but Triton is not installed or the parameters are not on a GPU.
    """
    if backend == "auto":
        device = layout.device
        backend = "cpu" if device.type == "cpu" else "triton" if triton_serves(device) else "reference"
    if backend == "cpu":
        # compiled kernels are only loaded where they are used
        from megatron01.optim.kernels.cpu import CPUBackend

        return CPUBackend(layout, num_threads or torch.get_num_threads())
    if backend == "triton":
        require_triton()
        from megatron01.optim.kernels.gpu import TritonBackend

        return TritonBackend(layout)
    if backend == "reference":
        from megatron01.optim.kernels.specification import ReferenceBackend

        return ReferenceBackend(layout)
    raise ValueError(f"backend is {backend!r}; expected auto, cpu, triton or reference")
