"""Helpers that do not depend on training.

files           atomic writes, file locks, files shipped with the package
ownership       exclusive ownership of an output folder by one job
signals         stop requests: signals and time limit
process_pool    worker processes
formatting      numbers, tables and sparklines as text
compilation     numba kernels and their cache on disk
precision       dtypes of weights, and devices that support them
random_numbers  seeds and states of random-number generators
system          cores and memory of this process, on Linux and macOS
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose names are imported on first use; ``modules``: names by their module."""

    def find(name: str) -> Any:
        for module, names in modules.items():
            if name in names:
                return getattr(import_module(f"megatron01.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
