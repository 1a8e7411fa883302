"""Parts for tests of ``python -m benchmarks.gpu``, with every possible outcome."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.gpu.report import Report


def good(report: Report, number: int) -> None:
    report.add("number", {"value": number})


def hanging(report: Report) -> None:
    report.add("number", {"value": 1})
    print("waiting", flush=True)
    time.sleep(1000)


def counting(report: Report, folder: str) -> None:
    """Append to a file until the other parts have ended."""
    total = 0
    with Path(folder, "counts").open("w") as file:
        while not all(Path(folder, name).exists() for name in ("measuring", "dying")):
            total += 1
            print(file=file, flush=True)
            time.sleep(0.01)
    time.sleep(1.0)
    report.add("total", {"value": total})


def measuring(report: Report, folder: str) -> None:
    counts = Path(folder, "counts")
    while not counts.exists() or counts.stat().st_size < 5:
        time.sleep(0.01)
    with report.measuring():
        before = counts.stat().st_size
        time.sleep(0.3)
        during = counts.stat().st_size - before
    report.add("counted", {"before": before, "during": during})
    Path(folder, "measuring").touch()


def dying(report: Report, folder: str) -> None:
    while not Path(folder, "measuring").exists():
        time.sleep(0.01)
    with report.measuring():
        Path(folder, "dying").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def crashing(report: Report) -> None:
    report.add("number", {"value": 1})
    os.kill(os.getpid(), signal.SIGSEGV)


def failing(report: Report) -> None:
    report.attempt("memory", _out_of_memory)
    report.attempt("bits", lambda: {"agrees": False})
    report.attempt("number", lambda: {"value": 1, "agrees": True})


def _out_of_memory() -> NoReturn:
    raise torch.OutOfMemoryError("tried to allocate\nmuch")
