"""What the hardware could do at most, and how much memory a process has taken."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from megatron01.config import Precision

if TYPE_CHECKING:
    import torch

# Dense matrix products of one GPU in TFLOP/s, from the makers' data sheets: (part of its name, 16 bit, fp32). The first
# that fits counts, so the longer names of a family come first.
_PEAKS = (
    ("B200", 2250.0, 75.0),
    ("H200", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("L40S", 362.0, 91.6),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("RTX 4090", 165.0, 82.6),
    ("RTX 3090", 71.0, 35.6),
)


def peak_flops(device: torch.device, precision: Precision, processes: int, peak_tflops: float | None) -> float | None:
    """Floating-point operations per second that a job's processors can do at most, for model FLOPs utilization.

    Args:
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

    peak = peak_of(torch.cuda.get_device_name(device), precision)
    return None if peak is None else processes * peak


def peak_of(name: str, precision: Precision) -> float | None:
    """Operations per second of the GPU that its driver calls ``name``; None if it is not known."""
    for part, half, single in _PEAKS:
        if part.lower() in name.lower():
            return 1e12 * (single if precision == "fp32" else half)
    return None


def peak_memory() -> int:
    """Bytes that this process has held at most: on its GPU, if it has used one, else in main memory."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
