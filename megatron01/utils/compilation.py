"""Compiling loops with numba, and keeping the machine code on disk.

numba compiles a function anew when the file that it stands in has changed, not when that of a function that it calls
has. So the name under which machine code is kept holds a hash of all files with such loops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parents[1]

FILES = ("data/datasets.py", "data/kernels.py")
"""All that import ``compiled``."""

_REVISION = hashlib.sha256(b"".join((_PACKAGE / name).read_bytes() for name in FILES)).hexdigest()[:8]


def compiled(function: _Function) -> _Function:
    """Compile on the first call; keep the machine code on disk where a folder for it is writable."""
    function.__qualname__ += f"_{_REVISION}"
    try:
        return cast(_Function, numba.njit(cache=True)(function))
    except RuntimeError:  # numba found no folder to write to
        return cast(_Function, numba.njit(function))
