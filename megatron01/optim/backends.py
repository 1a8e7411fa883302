"""Which backend does the optimizer's arithmetic on a device."""

from __future__ import annotations

import torch

from megatron01.optim.flat import FlatLayout
from megatron01.optim.update import UpdateBackend


def build_backend(layout: FlatLayout, *, num_threads: int | None = None, backend: str = "auto") -> UpdateBackend:
    """The fastest backend for the parameters' device, or that which ``backend`` names: "auto", "cpu" or "reference"."""
    if backend == "auto":
        backend = "cpu" if layout.device.type == "cpu" else "reference"
    if backend == "cpu":
        # compiled kernels are only loaded where they are used
        from megatron01.optim.update_cpu import CPUBackend

        return CPUBackend(layout, num_threads or torch.get_num_threads())
    if backend == "reference":
        from megatron01.optim.update_reference import ReferenceBackend

        return ReferenceBackend(layout)
    raise ValueError(f"backend is {backend!r}; expected auto, cpu or reference")
