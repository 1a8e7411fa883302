"""benchmarks/compress.py measures every phase and both parts; what it measures is not judged here."""

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


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "compress.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_reports_every_phase_and_the_exchange(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    elements = 200_000
    finished = run("--elements", "65536", "--exchange-elements", str(elements), "--rounds", "2", "--json", str(output))
    assert finished.returncode == 0, finished.stderr
    result = json.loads(output.read_text())

    phases = result["codec"]["phases"]
    names = {(entry["quantizer"], entry["phase"]) for entry in phases}
    assert names == {
        (quantizer, phase)
        for quantizer in ("sign", "random", "4bit", "8bit")
        for phase in ("compress", "reduce", "decode")
    }
    assert {entry["threads"] for entry in phases} == {1, os.cpu_count()}
    assert all(math.isfinite(entry["ratio"]) and entry["ratio"] > 0 for entry in phases)

    (exchange,) = result["exchange"]
    ours, rivals = exchange["exchange"], exchange["rivals"]
    assert 0 < ours["seconds"] <= ours["seconds_decoded"]
    assert ours["bytes_sent"] == pytest.approx(elements * (1 / 8 + 2 / 1024), rel=0.02)
    assert set(rivals) == {"all_reduce", "adam"}
    assert rivals["adam"]["bytes_sent"] == 4 * elements
    assert 0 < rivals["all_reduce"]["seconds"] < rivals["adam"]["seconds"]
    for section in ("## Codec", "## Exchange"):
        assert section in finished.stdout
