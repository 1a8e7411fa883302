"""Compilation of kernels with numba, and its cache on disk.

numba recompiles a cached function when its own source file has changed, but not when the file of a function or constant
that it uses has. So the cache key contains a hash of all files with kernels.
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
"""All files with kernels (modules and packages named ``kernels``), and those whose constants they use."""

_REVISION = hashlib.sha256(b"\0".join(path.read_bytes() for path in FILES)).hexdigest()[:8]


def _may_keep() -> bool:
    """False if numba would create a folder named ``~``: HOME is not set, and the user has no passwd entry."""
    has_folder = "NUMBA_CACHE_DIR" in os.environ or os.access(_PACKAGE, os.W_OK)
    return has_folder or os.path.expanduser("~") != "~"


def compiled(**options: Any) -> Callable[[_Function], _Function]:
    """Decorator: ``numba.njit`` with ``options``, cached on disk if a cache folder is writable."""

    def decorate(function: _Function) -> _Function:
        function.__qualname__ += f"_{_REVISION}"
        try:
            return cast(_Function, numba.njit(cache=_may_keep(), **options)(function))
        except RuntimeError:  # numba found no folder to write to
            return cast(_Function, numba.njit(**options)(function))

    return decorate
