"""The settings of processes and networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron01.errors import require, require_positive


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Processes and how they talk."""

    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; auto takes nccl where every replica has a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where replicas compute; auto: on their GPUs with nccl, on CPUs with gloo. With cuda and gloo, replicas of a node
    may share a GPU, and what they exchange goes through host memory."""
    distributed_timeout_minutes: float = 10.0
    """A collective that takes longer ends the run."""
    threads_per_replica: int | None = None
    """CPU threads of one replica; the machine's cores shared among its replicas when not given."""
    comm_backend: Literal["torch", "mpi"] = "torch"
    """What carries the exchanges: torch with distributed_backend, or MPI (mpi4py; start with mpirun)."""
    cuda_aware: bool = False
    """mpi: the MPI library takes GPU memory; without, exchanges are copied through host memory."""
    check_payloads: bool = True
    """Compare a checksum of whatever replicas exchange on arrival: flipped bits end the run instead of spoiling it."""
    replica: Literal["process", "node"] = "process"
    """What moves on its own between synchronizations: each process, or the processes of a node together, which then
    average their gradients at every step."""
    shard_optimizer: bool = False
    """With replica node: each process of a node keeps the optimizer's state for its share of the model only."""
    hierarchical: Literal["auto", "on", "off"] = "auto"
    """Reduce inside each node first and exchange bits between nodes only; auto: with several nodes of several
    processes."""
    tensor_model_parallel_size: int = 1
    """Processes that hold one replica of the model together, each a shard of every layer; they share a node."""
    sequence_parallel: bool = False
    """With tensor_model_parallel_size: norms and dropout work on a shard of each sequence too, which saves memory."""

    def __post_init__(self) -> None:
        require_positive(self, "distributed_timeout_minutes", "threads_per_replica", "tensor_model_parallel_size")
        require(
            self.device != "cpu" or self.distributed_backend != "nccl",
            "device is cpu, but distributed_backend is nccl, which moves GPU memory alone; give --distributed-backend"
            " gloo, or --device cuda",
        )
        require(
            self.tensor_model_parallel_size == 1 or self.comm_backend == "torch",
            f"tensor_model_parallel_size is {self.tensor_model_parallel_size}, which comm_backend mpi does not carry;"
            " give --comm-backend torch",
        )
        require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "sequence_parallel is set, but tensor_model_parallel_size is 1; give --tensor-model-parallel-size as well",
        )
        require(
            not self.cuda_aware or self.comm_backend == "mpi",
            f"cuda_aware is set, but comm_backend is {self.comm_backend}; give --comm-backend mpi as well",
        )
        require(
            self.replica == "process" or self.hierarchical != "off",
            "replica is node, but hierarchical is off; give --hierarchical auto, or --replica process",
        )
        require(
            not self.shard_optimizer or self.replica == "node",
            "shard_optimizer is set, but each process is a replica of its own, whose state nobody else has; give"
            " --replica node as well",
        )
        require(
            not self.shard_optimizer or self.tensor_model_parallel_size == 1,
            f"shard_optimizer cannot be combined with tensor_model_parallel_size {self.tensor_model_parallel_size};"
            " leave one of the two out",
        )
