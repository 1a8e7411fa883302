"""Memory of a process: whether a run fits before it allocates its model, and what becomes of freed CPU tensors."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from megatron01.comm.kernels import triton_serves
from megatron01.config import PretrainConfig
from megatron01.cost.memory import LARGE_BLOCK, PassBytes, accumulates_in_fp32, memory
from megatron01.errors import UserError
from megatron01.models.tensor_parallel import shard_shapes
from megatron01.parallel import ReplicaGroup, TensorParallelRanks
from megatron01.utils.files import text_or_empty
from megatron01.utils.formatting import format_bytes
from megatron01.utils.precision import DTYPES


class MemoryCheck:
    """Compares the bytes that training needs with those that are free when it is constructed.

    Passes if the system does not say how much memory is free.

    Args:
        group: all ranks. All must construct theirs before the first allocates.
        micro_batches: per step.
    """

    def __init__(self, group: ReplicaGroup, tp_ranks: TensorParallelRanks, micro_batches: int) -> None:
        self._group, self._tp_ranks, self._micro_batches = group, tp_ranks, micro_batches
        self._free = _free_bytes(group.device, len(group.node))

    def require_before_building(self, config: PretrainConfig, build: Callable[[], nn.Module]) -> None:
        """As ``require``, for the whole model, which ``build`` makes on the meta device.

        A user's model that cannot be built there, as it needs values of its tensors, passes unchecked. An optimizer
        that ``--auto`` has yet to choose is not counted.
        """
        if self._free is None:
            return
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("meta"):
                warnings.simplefilter("ignore")
                model = build()
        except Exception:
            return
        self.require(config, model, num_shards=self._tp_ranks.size, optimizer_is_known=not config.optimizer.auto)

    def require(
        self, config: PretrainConfig, model: nn.Module, *, num_shards: int = 1, optimizer_is_known: bool = True
    ) -> None:
        """Check that weights, gradients, the optimizer's state and the buffers of its exchange fit.

        Activations and temporaries of the passes are not counted.

        Args:
            model: of this rank, in the dtype that it is trained in, or a whole one on the meta device.
            num_shards: tensor-parallel size, of which this rank holds one shard of ``model``.
            optimizer_is_known: False counts weights and gradients alone.

        Raises:
            UserError: on this rank, with the bytes that are missing, if they do not.
        """
        if self._free is None:
            return
        on_gpu = self._group.device.type == "cuda"
        shapes = shard_shapes(model, num_shards)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        sizes = tuple(shape.numel() for name, shape in shapes.items() if name in trained)
        itemsize = DTYPES[config.training.precision].itemsize
        frozen = itemsize * sum(shape.numel() for name, shape in shapes.items() if name not in trained)
        gradients = itemsize * sum(sizes)
        if optimizer_is_known:
            what = f"weights, gradients, the state of {config.optimizer.optimizer} and its exchange"
            nodes = len(self._group.nodes)
            in_fp32 = accumulates_in_fp32(config, self._micro_batches)
            trained_bytes = memory(
                config,
                nodes=nodes,
                processes_per_node=max(1, self._tp_ranks.num_replicas // nodes),
                parameter_sizes=sizes,
                # 16-bit gradients that are summed in fp32 are freed one by one
                passes=PassBytes(saved=0, peak=0 if in_fp32 else gradients, without_gradients=0),
                on_gpu=on_gpu,
                micro_batches=self._micro_batches,
                plain_torch=on_gpu and not triton_serves(self._group.device),
            ).total
        else:
            what, trained_bytes = "weights and gradients", 2 * gradients
        needed = frozen + trained_bytes
        if needed > self._free:
            where = "its GPU" if on_gpu else "its share of its machine's or job's memory"
            raise UserError(
                f"training needs {format_bytes(needed)} for {what}, but {where} has {format_bytes(self._free)} left:"
                f" {format_bytes(needed - self._free)} too little; give --tensor-model-parallel-size, --shard-optimizer"
                " where several processes share a node, or a smaller model (megatron01 plan --memory tells what it"
                " needs)"
            )


def _free_bytes(device: torch.device, local_processes: int) -> int | None:
    """Bytes this process may allocate: all free memory of its GPU, or its share of its job's; None if unknown."""
    if device.type == "cuda":
        # what torch's caching allocator holds unused is free too
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text_or_empty("/proc/meminfo"), re.MULTILINE)
    free = [*([] if found is None else [1024 * int(found[1])]), *_free_bytes_of_cgroups()]
    return max(0, min(free)) // local_processes if free else None


def _free_bytes_of_cgroups() -> Iterator[int]:
    """Bytes below each memory limit of this process's cgroups (v2, v1), which SLURM and containers set."""
    for line in text_or_empty("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        root = f"/sys/fs/cgroup{'/memory' if controllers else ''}"
        # a container may see its own cgroup as the root, under the path that it has outside
        for folder in (Path(root + path), *Path(root + path).parents):
            limit, used = (text_or_empty(f"{folder}/{name}") for name in names)
            if limit.isdigit() and used.isdigit():
                total = "total_" if controllers else ""
                cache = re.findall(rf"^{total}(?:in)?active_file (\d+)", text_or_empty(f"{folder}/memory.stat"), re.M)
                yield int(limit) - int(used) + sum(map(int, cache))


# Memory of freed CPU tensors: glibc keeps it, or returns it to the system at once.
#
# glibc serves blocks of up to 32 MB from its heap, once a larger one has been freed (``mallopt(3)``,
# "M_MMAP_THRESHOLD"). A tensor that is freed there leaves a hole between those that stay, which often does not hold
# the next tensor of the same size, as tensors are aligned; the heap grows although there is room. The passes of a
# model with recomputed activations then take half as much again as its tensors, and more
# (benchmarks/results/memory_plan.md).

# of <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def give_back_freed_blocks() -> None:
    """From now on, return the memory of each large block to the system when it is freed, for the whole process.

    No effect with other C libraries than glibc, or where the environment sets the threshold
    (``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``).
    """
    chosen = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
    # twice the other, as in glibc's dynamic adjustment of both, which setting them turns off
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * LARGE_BLOCK)
