"""python -m benchmarks.gpu runs at tiny sizes on any machine, and every part finds what it is to find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts import MODELS

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU = torch.cuda.is_available()


def run_parts(folder: Path, *names: str) -> dict[str, Any]:
    """The findings of these parts, each of which must be done."""
    chosen = [word for name in names for word in ("--part", name)]
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--minutes", "30", "--output", str(folder), *chosen]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    records = json.loads((folder / "gpu.json").read_text())["parts"]
    assert {name: record["status"] for name, record in records.items()} == dict.fromkeys(names, "done"), records
    assert ended.returncode == 0, ended.stderr
    page = (folder / "gpu.md").read_text()
    assert all(f"| {name} | done |" in page for name in names)
    return {name: record["findings"] for name, record in records.items()}


def test_kernels_agree_with_their_specification_and_have_rates(tmp_path: Path) -> None:
    found = run_parts(tmp_path, "environment", "specification", "rates")
    assert found["environment"]["versions"]["torch"] == torch.__version__
    assert (found["environment"]["hardware"]["gpu"] == "needs a GPU") != HAS_GPU
    cases = found["specification"]
    assert len(cases) == 2 * (4 + 5 + 1) and all(case["agrees"] for case in cases.values())
    assert len(found["rates"]) == 1 + 4 * 4 + 3 + 5 + 1
    assert all(rate["bytes_per_second"] > 0 for rate in found["rates"].values())


def test_a_step_and_an_exchange_are_taken_apart_and_counted(tmp_path: Path) -> None:
    found = run_parts(tmp_path, "step", "exchange")
    for kind in ("full", "one_bit", "local"):
        step = found["step"][f"step, {kind}"]
        assert step["seconds"]["forward_backward"] > 0 and step["planned"]["arithmetic"] > 0
        assert found["step"][f"counts, {kind}"]["kind"] == kind
        for ranks in ("8 x 1 ranks", "2 x 8 ranks"):
            counts = found["exchange"][ranks][kind]["counts"]
            assert counts["operations"] > 0 and (counts["collectives"] > 0) == (kind != "local")


@pytest.mark.parametrize("name", ["gpt2 345m", "bert large-512", "gpt2 345m, compiled"])
def test_whole_models_run_beside_those_of_hugging_face(tmp_path: Path, name: str) -> None:
    (findings,) = run_parts(tmp_path, name).values()
    for who in ("ours", "hugging face"):
        assert findings[who]["tokens_per_second"] > 0
        assert (findings[who]["peak_memory"] == "needs a GPU") != HAS_GPU
    assert findings["ours"]["planned_memory"] > 0


def test_ranks_agree_runs_resume_and_a_killed_rank_is_noticed(tmp_path: Path) -> None:
    found = run_parts(tmp_path, "collectives", "runs")
    assert found["collectives"]["gloo, 2 x 2 ranks"]["hierarchical"]
    if not HAS_GPU:
        assert found["collectives"]["nccl, one rank"] == "needs a GPU"
    assert all(case["agrees"] for case in found["runs"].values())
    assert "has no GPU of its own" in found["runs"]["two processes over nccl"]["said"][0]


def test_every_model_is_known_to_the_workload(benchmarks: Any) -> None:
    workload = benchmarks("workload")
    shapes = {
        size: workload.Workload(model=model, size=size, precision="bf16", steps=1).shape for model, size in MODELS
    }
    expected = {"345m": (8, 1024), "large-512": (16, 512), "large-128": (64, 128), "117m": (16, 1024)}
    assert shapes == expected | {"1.5b": (4, 1024)}
