"""benchmarks/step.py measures every kind of step; what it measures is not judged here."""

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


def numbers(value):
    """All numbers in a structure of lists and dicts."""
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers(inner)]
    if isinstance(value, list):
        return [n for inner in value for n in numbers(inner)]
    return [value] if isinstance(value, (int, float)) else []


def measured(tmp_path, *arguments):
    """The output of benchmarks/step.py, and its numbers."""
    output = tmp_path / "result.json"
    program = str(ROOT / "benchmarks" / "step.py")
    finished = subprocess.run(
        [sys.executable, program, "--size", "tiny", "--steps", "2", "--json", str(output), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads(output.read_text())
    assert all(math.isfinite(number) for number in numbers(result))
    return finished.stdout, result


def test_measures_bert(tmp_path):
    _, result = measured(tmp_path, "--model", "bert", "--section", "phases")
    assert set(result["phases"]["kinds"]) == {"adam", "full", "one_bit", "local"}


def test_reports_every_kind_of_step_and_every_buffer(tmp_path):
    stdout, result = measured(tmp_path, "--model", "gpt2")
    kinds = result["phases"]["kinds"]
    parameters = result["phases"]["parameters"]
    assert set(kinds) == {"adam", "full", "one_bit", "local"}
    assert [kinds[kind]["steps"] for kind in ("full", "one_bit", "local")] == [4, 4, 4]  # two on each of two replicas
    assert kinds["local"]["bytes_sent"] == 0 == kinds["local"]["seconds"]["communication"]
    assert kinds["adam"]["bytes_sent"] == pytest.approx(4 * parameters, rel=0.02)
    assert 0 < kinds["one_bit"]["bytes_sent"] < kinds["full"]["bytes_sent"] / 20
    for entry in kinds.values():
        assert sum(entry["seconds"].values()) > 0 and entry["step_seconds"] > 0

    assert [(entry["precision"], entry["threads"]) for entry in result["arithmetic"]] == [
        ("fp32", 1),
        ("fp32", 2),
        ("bf16", 1),
        ("bf16", 2),
    ]
    assert {name: set(kinds) for name, kinds in result["family"].items()} == {
        "zero_one_adam": {"full", "local", "one_bit"},
        "zero_one_adam, gradients not quantized": {"full", "local", "one_bit"},
        "one_bit_adam": {"full", "one_bit"},
        "quantized_adam": {"full"},
        "bin_sgdm": {"one_bit"},
        "soft_sign_sgd": {"full"},
        "sgdm": {"full"},
    }
    sent = {title: kinds["full"]["bytes_sent"] for title, kinds in result["family"].items() if "full" in kinds}
    assert sent["zero_one_adam"] < sent["zero_one_adam, gradients not quantized"] / 6
    assert set(result["arithmetic"][0]["adamw_seconds"]) == {"alone", "clip"}
    assert set(result["arithmetic"][2]["adamw_seconds"]) == {"alone", "clip", "cast"}

    memory = result["memory"]
    buffers = memory["buffers"]
    assert memory["parameters"] == parameters
    assert all(buffers[name] == 4 * memory["padded_parameters"] for name in ("x", "v", "m", "u", "worker_error"))
    assert buffers["server_error"] == pytest.approx(2 * memory["padded_parameters"], abs=4 * 1024)
    for section in ("Phases of a step", "Optimizer arithmetic", "Steps of every optimizer", "Memory"):
        assert section in stdout
