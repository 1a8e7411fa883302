"""The parts of ``python -m benchmarks.gpu``. As a program, it runs one part: MODULE FUNCTION ARGUMENTS FILE."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

MODELS = (("gpt2", "345m"), ("bert", "large-512"), ("bert", "large-128"), ("gpt2", "117m"), ("gpt2", "1.5b"))
"""Model and size (``workload.RECIPES``), the most wanted first."""

_SHARES = {"1.5b": 0.6, "large-128": 0.4, "117m": 0.4}  # others: 0.5


@dataclasses.dataclass(frozen=True)
class Part:
    """A call that runs in its own process: ``module.function(report, **arguments)``.

    Attributes:
        seconds: time limit, after which it is killed.
        share: of the GPU: parts run side by side while their shares add up to no more than 1. A part that has less than
            all of it times nothing, or only where the report is ``measuring``.
    """

    name: str
    seconds: float
    module: str
    function: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    share: float = 1.0


def _of_models(compiled: bool) -> list[Part]:
    return [
        Part(
            f"{model} {size}, compiled" if compiled else f"{model} {size}",
            240.0 if compiled else 100.0,
            "benchmarks.gpu.training",
            "models",
            {"model": model, "size": size, "compiled": compiled},
            # most of the time goes into compiling, by a thread
            share=_SHARES.get(size, 0.5),
        )
        for model, size in MODELS
    ]


PARTS = (
    Part("specification", 120.0, "benchmarks.gpu.kernels", "specification", share=0.5),
    Part("collectives", 90.0, "benchmarks.gpu.processes", "collectives", share=0.25),
    Part("runs", 120.0, "benchmarks.gpu.processes", "runs", share=0.25),
    Part("environment", 60.0, "benchmarks.gpu.kernels", "environment"),
    Part("rates", 60.0, "benchmarks.gpu.kernels", "rates"),
    Part("step", 60.0, "benchmarks.gpu.training", "step"),
    Part("exchange", 90.0, "benchmarks.gpu.training", "exchange"),
    *_of_models(compiled=True)[:2],
    *_of_models(compiled=False)[:2],
    *_of_models(compiled=True)[2:],
    *_of_models(compiled=False)[2:],
)
"""In the order in which they run: what is most wanted first, as all of them share the time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("function")
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("record", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--running", type=Path, help="folder with a file for each running part, named by its process")
    given = parser.parse_args()
    # after parsing the command line, as these import torch
    from .report import Report

    function = getattr(importlib.import_module(given.module), given.function)
    report = Report(given.record, tiny=given.tiny, share=given.share, running=given.running)
    function(report, **given.arguments)


if __name__ == "__main__":
    main()
