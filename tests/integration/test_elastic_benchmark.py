"""benchmarks/elastic_resume.py: which runs it makes and what it makes of their losses. The runs are formulas here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_each_change_is_compared_with_the_run_of_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark: Any = importlib.import_module("elastic_resume")
    starts: list[tuple[int, int, tuple[str, ...]]] = []

    def train(arguments: Any, seed: int, replicas: int, folder: Path, *more: str) -> float:
        starts.append((seed, replicas, more))
        return 7.0 + seed + (0.01 * (seed + 1) if more else 0.0)

    monkeypatch.setattr(benchmark, "train", train)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["elastic_resume.py", "--seeds", "0", "1", "--steps", "40", "--resumed", "8"])
    benchmark.main()
    assert [(seed, replicas) for seed, replicas, _ in starts] == [(0, 4), (0, 8), (1, 4), (1, 8)]
    assert starts[1][2][0] == "--load" and starts[1][2][1].endswith("whole/iter_0000020")
    printed = capsys.readouterr().out
    assert "over the seeds: 0.7071" in printed
    assert "| 4, then 8 | 7.5150 | +0.0150 | +0.0200 |" in printed
