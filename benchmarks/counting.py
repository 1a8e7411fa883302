"""Counts of what a step launches on a GPU, on any device: torch operations, kernels, collectives, host syncs.

On a CPU there are no launches and no syncs, but the calls are the same: torch operations are counted in a dispatch
mode, reads of tensor values in a function mode, and calls of the back ends' kernels (each is one launch on a GPU) by
wrapping their methods.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron01.optim.gradients import DeferredNorm

_READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "nonzero"}
_CODEC = ("compress", "reduce", "decode")
_ROWS = ("finish_rows", "mean_rows", "read_rows")
_KERNELS = ("update", "sum_squares")


@dataclasses.dataclass
class Counts:
    """Numbers of calls."""

    operations: int = 0  # of torch that compute something, without views
    kernels: int = 0  # of the optimizer's own
    collectives: int = 0  # started
    host_reads: int = 0  # that wait for a GPU: of values, and of sizes that depend on values
    late_reads: int = 0  # of deferred norms, which a GPU has computed long before the host reads them

    @property
    def launches(self) -> int:
        """Lower bound of the launches on a GPU."""
        return self.operations + self.kernels + self.collectives


class _Reads(TorchFunctionMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        masked = name in ("__getitem__", "__setitem__") and _has_mask(args[1])
        self._counts.host_reads += name in _READS or masked
        # one read, even if it calls other functions that read
        with torch._C.DisableTorchFunction() if name in _READS else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(found.alias_info is not None and not found.alias_info.is_write for found in func._schema.returns)
        makes = func.overloadpacket.__name__.startswith(("empty", "detach"))
        self._counts.operations += not (views or makes or func.namespace == "profiler")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted(optimizer: Any) -> Iterator[Counts]:
    """Count what the body does with ``optimizer``, which is on flat buffers; collectives are those of its topology."""
    counts = Counts()
    topology = optimizer._topology
    exchange = getattr(optimizer._exchange, "exchange", None)
    places: list[tuple[Any, tuple[str, ...], str]] = [(optimizer._kernels, _KERNELS, "kernels")]
    places += [(place, names, "kernels") for place, names in _row_kernels(exchange, optimizer)]
    transports = [one for one in (topology.world, topology.local, topology.across) if one is not None]
    places += [(one, ("_start",), "collectives") for one in transports]

    def read_late(norm: DeferredNorm) -> float:
        before = dataclasses.replace(counts, late_reads=counts.late_reads + 1)
        value = float(norm._norm)
        vars(counts).update(vars(before))
        return value

    with contextlib.ExitStack() as wrapped, patch.object(DeferredNorm, "__float__", read_late):
        for target, names, field in places:
            for name in names:
                wrapped.enter_context(_calls_counted(target, name, counts, field))
        with torch.autograd.set_multithreading_enabled(False), _Reads(counts), _Operations(counts):
            yield counts


def _row_kernels(*roots: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Codecs and other objects with row kernels reachable from ``roots``, with the names of their kernels."""
    found: list[tuple[Any, tuple[str, ...]]] = []
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, torch.Tensor):
            continue
        seen.add(id(one))
        if all(hasattr(one, name) for name in _ROWS):
            found.append((one, _ROWS + _CODEC if hasattr(one, "format") else _ROWS))
        elif type(one).__module__.startswith("megatron01."):
            waiting += list(getattr(one, "__dict__", {}).values())
        elif isinstance(one, list | tuple):
            waiting += one
    return found


@contextlib.contextmanager
def _calls_counted(target: Any, name: str, counts: Counts, field: str) -> Iterator[None]:
    """Count calls of one method of one object, but nothing that runs inside it on this device."""
    function, own = getattr(target, name), vars(target).get(name)

    def called(*args: Any, **kwargs: Any) -> Any:
        before = dataclasses.replace(counts)
        result = function(*args, **kwargs)
        vars(counts).update(vars(before))  # its substitute on this device may be made of torch operations
        setattr(counts, field, getattr(counts, field) + 1)
        return result

    setattr(target, name, called)
    try:
        yield
    finally:
        if own is None:
            delattr(target, name)
        else:  # an attribute that was patched before
            setattr(target, name, own)
