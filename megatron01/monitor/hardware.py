"""What the hardware can do at most, from data sheets, and how much memory a process has taken."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron01.config import Precision

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, from its maker's data sheet."""

    name: str  # part of what its driver calls it
    half_tflops: float  # 10^12 operations a second of dense matrix products in 16 bits
    single_tflops: float  # the same in fp32
    memory_gbytes: float  # 10^9 bytes
    memory_rate: float  # of that memory, 10^9 bytes a second
    inside_rate: float  # to the other GPUs of its node, 10^9 bytes a second in each direction (NVLink, else PCIe)

    def tflops(self, precision: Precision, *, tf32: bool) -> float:
        """Of matrix products: of fp32 in TF32 half those in 16 bits, where the GPU can (NVIDIA's Ampere and later)."""
        if precision != "fp32":
            return self.half_tflops
        return max(self.single_tflops, self.half_tflops / 2 if tf32 and self.is_ampere_or_later else 0.0)

    @property
    def is_ampere_or_later(self) -> bool:
        """True for a compute capability of 8.0 or more: it has TF32 and bf16, and Triton's kernels serve it."""
        return self.name not in ("T4", "V100")


GPUS = {
    gpu.name.lower().replace(" ", "-"): gpu
    for gpu in (
        Gpu("T4", 65.0, 8.1, 16, 300, 12),
        Gpu("V100", 125.0, 15.7, 32, 900, 130),
        Gpu("A10", 125.0, 31.2, 24, 600, 25),
        Gpu("A10G", 70.0, 35.0, 24, 600, 25),
        Gpu("A100", 312.0, 19.5, 80, 2039, 250),
        Gpu("L4", 121.0, 30.3, 24, 300, 25),
        Gpu("L40S", 362.0, 91.6, 48, 864, 25),
        Gpu("H100", 989.0, 67.0, 80, 3350, 400),
        Gpu("H100 PCIe", 756.0, 51.0, 80, 2000, 50),
        Gpu("H200", 989.0, 67.0, 141, 4800, 400),
        Gpu("B200", 2250.0, 75.0, 180, 8000, 800),
        Gpu("RTX 3090", 71.0, 35.6, 24, 936, 12),
        Gpu("RTX 4090", 165.0, 82.6, 24, 1008, 12),
    )
}
"""By the name under which a cluster's settings ask for them."""


def peak_flops(
    device: torch.device, precision: Precision, processes: int, peak_tflops: float | None, *, tf32: bool = False
) -> float | None:
    """Floating-point operations per second that a job's processors can do at most, for model FLOPs utilization.

    Args:
        tf32: matrix products in fp32 are computed in TF32.
        processes: of the job, each with one GPU.
        peak_tflops: of one process, in 10^12 per second, where the user gives it.

    Returns:
        None for a CPU, or a GPU that is not in the table, if ``peak_tflops`` is not given.
    """
    if peak_tflops is not None:
        return processes * peak_tflops * 1e12
    if device.type != "cuda":
        return None
    import torch

    peak = peak_of(torch.cuda.get_device_name(device), precision, tf32=tf32)
    return None if peak is None else processes * peak


def peak_of(name: str, precision: Precision, *, tf32: bool = False) -> float | None:
    """Operations per second of the GPU that its driver calls ``name``; None if it is not known."""
    fitting = [gpu for gpu in GPUS.values() if gpu.name.lower() in name.lower()]
    if not fitting:
        return None
    gpu = max(fitting, key=lambda gpu: len(gpu.name))  # an A100 is no A10
    return 1e12 * gpu.tflops(precision, tf32=tf32)


def peak_memory() -> int:
    """Bytes that this process has held at most: on its GPU, if it has used one, else in main memory."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
