"""The findings of a part, written to a file one by one, so that a killed part keeps those so far."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron01.utils.files import write_atomically
from megatron01.utils.formatting import one_line

NEEDS_GPU = "needs a GPU"
"""In place of figures, on a machine without one."""

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements.

    Attributes:
        elements: of the buffers on which kernels are compared with the specification; none a multiple of a block.
        rate_elements: of the buffers on which kernels are timed.
        repetitions: of timed calls.
        model: size of the GPT-2 whose step is profiled and whose exchange is timed (``workload.RECIPES``).
        ranks: (nodes, processes per node) of the exchanges.
        steps: timed steps of a training loop.
    """

    elements: tuple[int, ...]
    rate_elements: int
    repetitions: int
    model: str
    ranks: tuple[tuple[int, int], ...]
    steps: int


REAL = Sizes((100_003, 354_871_297, 2**31 + 12_345), 354_871_296, 20, "345m", ((8, 1), (128, 1), (16, 8)), 10)
TINY = Sizes((3_001, 40_001), 20_480, 2, "tiny", ((8, 1), (2, 8)), 2)


_SETTLING_SECONDS = 0.3
"""In which a GPU completes what processes that are stopped have given it."""


@contextlib.contextmanager
def locked(running: Path) -> Iterator[None]:
    """Context that one process at a time can be in, of those that know the folder ``running``."""
    with (running / "measuring").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def send_to_parts(running: Path, number: signal.Signals) -> None:
    """Send a signal to the processes of all parts in the folder ``running``, but for this process's own."""
    for file in running.iterdir():
        if file.name.isdigit() and int(file.name) != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(file.name), number)


class Report:
    """The findings of one part.

    Args:
        running: folder with a file for each running part, named by its process; None if there is no other.

    Attributes:
        sizes: full ones, or tiny ones in tests.
        share: of the GPU, that the part may take.
        findings: so far, by name.
    """

    def __init__(self, path: Path, *, tiny: bool, share: float = 1.0, running: Path | None = None) -> None:
        self._path, self._running = path, running
        self.share = share
        self.tiny = tiny
        self.sizes = TINY if tiny else REAL
        self.findings: dict[str, Any] = {}

    def add(self, name: str, finding: Any) -> None:
        """Record a finding, a JSON value."""
        self.findings[name] = finding
        write_atomically(self._path, json.dumps(self.findings))

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Context in which the other parts are stopped, so that they take no time of the processor and the GPU."""
        if self._running is None:
            yield
            return
        with locked(self._running):
            send_to_parts(self._running, signal.SIGSTOP)
            try:
                time.sleep(_SETTLING_SECONDS)
                yield
            finally:
                send_to_parts(self._running, signal.SIGCONT)

    def attempt(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Record the result of ``function``, or its error; the part continues after an error."""
        try:
            finding = function(*arguments)
        except torch.OutOfMemoryError as error:
            finding = {"failed": f"out of memory: {one_line(error, 500)}"}
        except Exception as error:
            finding = {"failed": f"{type(error).__name__}: {one_line(error, 500)}"}
        self.add(name, finding)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
