"""benchmarks/data.py measures every stage; what it measures is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_every_section(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = ["--megabytes", "0.2", "--rounds", "1", "--documents", "2e3", "--seconds", "0.05", "--workers", "1"]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "data.py"), *sizes, "--json", str(output)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads(output.read_text())
    for heading in ("## Preprocessing", "## Indices of 2000 documents", "## Samples"):
        assert heading in finished.stdout
    assert all(rate["megabytes"] > 0 for rate in result["preprocessing"])
    indices = {rate["index"]: rate for rate in result["indices"]}
    assert indices["GPT-2, three epochs"]["num_samples"] > 2.5 * indices["GPT-2, one epoch"]["num_samples"]
    assert all(rate["seconds"] > 0 and rate["megabytes"] > 0 for rate in indices.values())
    rates = {(rate["samples"], rate["workers"]): rate["per_second"] for rate in result["samples"]}
    assert len(rates) == 4 * 3 and all(rate > 0 for rate in rates.values())
