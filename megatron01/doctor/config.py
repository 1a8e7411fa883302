"""What ``megatron01 doctor`` can be asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron01.errors import require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Checks of the machines of a job."""

    shared_folder: Path = Path()
    """A folder that all nodes must share: the run's, or its parent."""
    required_gigabytes: float = 1.0
    """Free space that it must have; a checkpoint takes about 20 bytes a parameter and replica."""
    expected_gpus: int | None = None
    """GPUs that every process must see at least; by default as many as the first one, in sum over its node."""
    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries the measured exchanges; auto takes nccl where every process has a GPU."""
    comm_backend: Literal["torch", "mpi"] = "torch"
    """As in training: mpi measures the all-to-all over MPI."""
    megabytes: float = 64.0
    """Largest message that is measured, per process; slower networks get smaller ones."""
    timeout_seconds: float = 120.0
    """For the processes to meet, and for every exchange. After three times as long, whatever hangs is ended."""

    def __post_init__(self) -> None:
        require_positive(self, "megabytes", "timeout_seconds")
        require_not_negative(self, "required_gigabytes", "expected_gpus")
