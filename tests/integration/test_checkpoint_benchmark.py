"""benchmarks/checkpoint.py measures both kinds of saves; what it measures is not judged here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_reports_both_kinds_of_saves(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint.py"), "--size", "tiny", "--rounds", "2"]
    finished = subprocess.run(
        [*command, "--folder", str(tmp_path), "--json", str(output)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads(output.read_text())
    assert result["replicas"] == 2 and result["megabytes"] > 0 and result["parameters"] > 0
    for kind in ("waiting", "meanwhile"):
        assert all(math.isfinite(number) for number in result[kind].values())
        assert result[kind]["stall"] > 0 and result[kind]["step_seconds"] > 0
    assert result["waiting"]["slowdown"] == 1 and result["waiting"]["writing"] == result["waiting"]["stall"]
    assert list(tmp_path.iterdir()) == [output]  # what was written is gone
