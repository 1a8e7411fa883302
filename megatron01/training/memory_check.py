"""Memory check: refuses a run that does not fit before it allocates its model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from megatron01.comm.kernels import triton_serves
from megatron01.config import PretrainConfig
from megatron01.cost.memory import PassBytes, memory
from megatron01.errors import UserError
from megatron01.models.tensor_parallel import shard_shapes
from megatron01.parallel import ReplicaGroup, TensorParallelRanks
from megatron01.training.step import accumulates_in_fp32
from megatron01.utils.formatting import format_bytes
from megatron01.utils.precision import DTYPES

_SAFE_SHARE = 0.25
"""Share of free memory that weights may take before the rest (gradients, optimizer state: usually three times as much
or more) is estimated too. ``MemoryCheck.require`` covers smaller models."""

Build = Callable[[], nn.Module]


class MemoryCheck:
    """Compares the memory that training needs with what is free before the model is built.

    Passes if the system does not say how much memory is free.

    Args:
        group: all ranks. All must measure before the first allocates.
        tp_ranks: tensor-parallel layout.
        micro_batches: per step.
    """

    def __init__(self, group: ReplicaGroup, tp_ranks: TensorParallelRanks, micro_batches: int) -> None:
        self._group, self._tp_ranks, self._micro_batches = group, tp_ranks, micro_batches
        self._free = _free_bytes(group.device, group.local_world_size)

    @contextmanager
    def guard(self, config: PretrainConfig, build: Build) -> Iterator[None]:
        """End the body, in which ``build`` makes the model, when it is clear that training will not fit.

        A tensor-parallel model is built on the meta device first. Any other model is watched while it is built, and
        built on the meta device only if its weights take more than ``_SAFE_SHARE``, which need not work for a user's
        own model; such a model is stopped when its weights alone do not fit.

        Raises:
            UserError: on this rank, with the bytes that are missing.
        """
        is_known = not config.optimizer.auto
        if self._free is None:
            yield
        elif self._tp_ranks.size > 1:
            with torch.device("meta"):
                model = build()
            self._require(config, model, self._tp_ranks.size, optimizer_is_known=is_known)
            yield
        else:
            watch = _Watch(
                build,
                self._free,
                lambda model: self._require(config, model, optimizer_is_known=is_known),
                lambda num_bytes: self._refusal(
                    f"the model has at least {format_bytes(num_bytes)} of weights", num_bytes
                ),
            )
            handle = register_module_parameter_registration_hook(watch.registered)
            try:
                yield
            finally:
                handle.remove()

    def require(self, config: PretrainConfig, model: nn.Module) -> None:
        """Check that weights, gradients, the optimizer's state and the buffers of its exchange fit.

        What else the passes hold comes on top.

        Args:
            model: what this process holds, in the type that it is trained in.

        Raises:
            UserError: on this rank, with the bytes that are missing, if they do not.
        """
        self._require(config, model, optimizer_is_known=True)

    def _require(
        self, config: PretrainConfig, model: nn.Module, num_shards: int = 1, *, optimizer_is_known: bool
    ) -> None:
        """Check one of ``num_shards`` tensor-parallel shards of ``model``."""
        if self._free is None:
            return
        shapes = shard_shapes(model, num_shards)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        sizes = tuple(shape.numel() for name, shape in shapes.items() if name in trained)
        itemsize = DTYPES[config.training.precision].itemsize
        frozen = itemsize * sum(shape.numel() for name, shape in shapes.items() if name not in trained)
        gradients = itemsize * sum(sizes)
        if optimizer_is_known:
            optimizer = config.optimizer.optimizer
            what = f"weights, gradients, the state of {optimizer} and its exchange"
            needed = frozen + self._with_optimizer(config, sizes, gradients)
        else:
            what, needed = "weights and gradients", frozen + 2 * gradients
        if needed > self._free:
            raise self._refusal(f"training needs {format_bytes(needed)} for {what}", needed)

    def _with_optimizer(self, config: PretrainConfig, sizes: tuple[int, ...], gradients: int) -> int:
        nodes = len(self._group.nodes)
        in_fp32 = accumulates_in_fp32(config, self._micro_batches)
        return memory(
            config.optimizer,
            nodes=nodes,
            processes_per_node=max(1, self._tp_ranks.num_replicas // nodes),
            parameter_sizes=sizes,
            precision=config.training.precision,
            # those that are added up in fp32 are freed one by one
            passes=PassBytes(saved=0, peak=0 if in_fp32 else gradients, beside_gradients=0),
            replica_is_node=config.distributed.replica == "node",
            sharded=config.distributed.shard_optimizer,
            sums_in_fp32=in_fp32,
            plain_torch=self._group.device.type == "cuda" and not triton_serves(self._group.device),
        ).total

    def _refusal(self, needs: str, needed: int) -> UserError:
        assert self._free is not None
        where = "its GPU" if self._group.device.type == "cuda" else "its share of the machine's memory"
        return UserError(
            f"{needs}, but {where} has {format_bytes(self._free)} left: {format_bytes(needed - self._free)} too little;"
            " give --tensor-model-parallel-size, --shard-optimizer where several processes share a node, or a smaller"
            " model (megatron01 plan --memory tells what it needs)"
        )


class _Watch:
    """Looks at every parameter that a module is given while a model is built.

    Args:
        build: what is under way.
        free: bytes.
        require: raises if the model, on the meta device, does not fit.
        refusal: what to raise for so many bytes of weights.
    """

    def __init__(
        self, build: Build, free: int, require: Callable[[nn.Module], None], refusal: Callable[[int], UserError]
    ) -> None:
        self._build, self._free, self._require, self._refusal = build, free, require, refusal
        self._weights = WeakIdKeyDictionary()  # a parameter may be given twice, or be replaced
        self._given = 0  # bytes, twice for what was given twice: at least those of the weights
        self._is_laying_out = self._was_laid_out = False

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """A hook of torch: ``module`` is given ``parameter``.

        Its memory is often not written to yet; that of GPT-2 and BERT is not even there, as they lay themselves out
        before they take it. It counts all the same.
        """
        if parameter is None or is_lazy(parameter):
            return
        if self._is_laying_out:
            if not parameter.is_meta:
                raise _TakesMemory
            return
        self._weights[parameter] = parameter.nbytes
        self._given += parameter.nbytes
        if self._given <= _SAFE_SHARE * self._free:
            return
        num_bytes = sum(self._weights.values())
        if num_bytes <= _SAFE_SHARE * self._free:
            return
        if not self._was_laid_out:
            self._was_laid_out = True
            model = self._laid_out()
            if model is not None:
                self._require(model)
        if num_bytes > self._free:
            raise self._refusal(num_bytes)

    def _laid_out(self) -> nn.Module | None:
        """The model without memory; None if it cannot be built so. Leaves the generator of random numbers as it is."""
        self._is_laying_out = True
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("meta"):
                warnings.simplefilter("ignore")
                return self._build()
        except Exception:  # whatever a model of the user's own needs the values of its tensors for
            return None
        finally:
            self._is_laying_out = False


class _TakesMemory(Exception):
    """A model does not heed the default device."""


def _free_bytes(device: torch.device, local_processes: int) -> int | None:
    """What this process may take: all that is free of a GPU, or its share of the machine's; None if that is unknown."""
    if device.type == "cuda":
        # what torch keeps for its next tensors is free too
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return None if found is None else 1024 * int(found[1]) // local_processes
