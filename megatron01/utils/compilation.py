"""Compilation of kernels with numba, and their machine code on disk.

numba compiles a function anew when the file that it stands in has changed, but not when that of a function or constant
that it uses has. Therefore the name under which machine code is kept holds a hash of all files of kernels.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parents[1]

_CONSTANTS = ("comm/payload.py", "optim/local_update.py")

FILES = [
    *sorted([*_PACKAGE.glob("*/kernels.py"), *_PACKAGE.glob("*/kernels/*.py")]),
    *map(_PACKAGE.joinpath, _CONSTANTS),
]
"""All files with kernels (modules and packages named ``kernels``), and those from which kernels take constants."""

_REVISION = hashlib.sha256(b"\0".join(path.read_bytes() for path in FILES)).hexdigest()[:8]


def _may_keep() -> bool:
    """False where numba would make a folder called ``~``: no HOME, and a user without an entry in the system's list."""
    has_folder = "NUMBA_CACHE_DIR" in os.environ or os.access(_PACKAGE, os.W_OK)
    return has_folder or os.path.expanduser("~") != "~"


def compiled(**options: Any) -> Callable[[_Function], _Function]:
    """Decorator: ``numba.njit`` with ``options``; machine code is kept on disk where a folder for it is writable."""

    def decorate(function: _Function) -> _Function:
        function.__qualname__ += f"_{_REVISION}"
        try:
            return cast(_Function, numba.njit(cache=_may_keep(), **options)(function))
        except RuntimeError:  # numba found no folder to write to
            return cast(_Function, numba.njit(**options)(function))

    return decorate
