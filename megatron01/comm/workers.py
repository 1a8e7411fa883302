"""Run a compiled kernel over a range of blocks on several threads.

Kernels release the interpreter lock and treat every block on its own, so the split has no influence on the result.
Plain threads, unlike numba's parallel loops, survive the fork of data-loading processes and do not contend with
torch's OpenMP pool between two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

_MIN_BLOCKS_PER_THREAD = 16


class BlockWorkers:
    """A fixed number of threads that share the blocks of a call."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._pool = ThreadPoolExecutor(self.num_threads - 1, "megatron01-kernel") if self.num_threads > 1 else None

    def run(self, kernel: Callable[..., Any], first: int, last: int, *arguments: Any) -> None:
        """Call ``kernel(a, b, *arguments)`` on consecutive ranges [a, b) that cover [first, last)."""
        parts = min(self.num_threads, max(1, (last - first) // _MIN_BLOCKS_PER_THREAD))
        if self._pool is None or parts == 1:
            if last > first:
                kernel(first, last, *arguments)
            return
        bounds = [first + (last - first) * part // parts for part in range(parts + 1)]
        others = [self._pool.submit(kernel, a, b, *arguments) for a, b in pairwise(bounds[1:])]
        kernel(bounds[0], bounds[1], *arguments)
        for other in others:
            other.result()
