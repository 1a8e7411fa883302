"""Parts for tests of ``python -m benchmarks.gpu``, with every possible outcome."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

import torch

from benchmarks.gpu.report import Report


def good(report: Report, number: int) -> None:
    report.add("number", {"value": number})


def hanging(report: Report) -> None:
    report.add("number", {"value": 1})
    print("waiting", flush=True)
    time.sleep(1000)


def crashing(report: Report) -> None:
    report.add("number", {"value": 1})
    os.kill(os.getpid(), signal.SIGSEGV)


def failing(report: Report) -> None:
    report.attempt("memory", _out_of_memory)
    report.attempt("bits", lambda: {"agrees": False})
    report.attempt("number", lambda: {"value": 1, "agrees": True})


def _out_of_memory() -> NoReturn:
    raise torch.OutOfMemoryError("tried to allocate\nmuch")
