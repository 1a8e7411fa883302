"""benchmarks/convergence.py: the protocol of the sweep, its file of results, the tables, and real runs of no length."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def convergence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("convergence")


class PoolOfFormulas:
    """In place of replicas: a loss that is lowest at a learning rate of 0.006, and infinite above 0.1."""

    def __init__(self) -> None:
        self.runs: list[tuple[float, int]] = []

    def run(self, work: Any, run: Any, data: str) -> list[dict[str, Any]]:
        self.runs.append((run.learning_rate, run.seed))
        loss = 3 + abs(math.log2(run.learning_rate / 0.006)) + 0.01 * run.seed
        result = {"held_out_loss": loss if run.learning_rate < 0.1 else None, "seconds": 1.0, "tokens": 1}
        return [result | {"bits_per_parameter": 0.5, "parameters": 10}]


def arguments(folder: Path, **changes: Any) -> argparse.Namespace:
    settings = {"learning_rates": [0.001, 0.002], "extensions": 4, "seeds": [0, 1, 2], "steps": 20, "replicas": 4}
    settings |= {"size": "tiny", "data": folder, "output": folder / "results.jsonl"}
    return argparse.Namespace(**settings | changes)


def test_the_sweep_moves_to_the_best_rate_and_repeats_it_and_its_better_neighbour(
    convergence: ModuleType, tmp_path: Path
) -> None:
    pool = PoolOfFormulas()
    variant = convergence.Variant("zero_one_adam", "zero_one_adam", {})
    convergence.Sweep(pool, arguments(tmp_path)).tune("gpt2", variant)
    swept = [(0.001, 0), (0.002, 0), (0.004, 0), (0.008, 0), (0.016, 0)]
    repeated = [(0.008, 1), (0.004, 1), (0.008, 2), (0.004, 2)]
    assert pool.runs == swept + repeated

    path = tmp_path / "results.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-30])  # killed while it wrote the last line
    later = PoolOfFormulas()
    # the same recipe under another name: what it overrides is the default
    same = convergence.Variant("blocks of 1024", "zero_one_adam", {"block_size": 1024})
    convergence.Sweep(later, arguments(tmp_path)).tune("gpt2", same)
    assert later.runs == [(0.004, 2)]
    assert path.read_text() == whole
    convergence.Sweep(later, arguments(tmp_path, steps=21, extensions=0)).tune("gpt2", same)
    assert len(later.runs) == 1 + 2 + 4


def test_rates_that_diverge_are_left_behind(convergence: ModuleType, tmp_path: Path) -> None:
    pool = PoolOfFormulas()
    settings = arguments(tmp_path, learning_rates=[0.05, 0.1, 0.2], seeds=[3])
    convergence.Sweep(pool, settings).tune("bert", convergence.Variant("adam", "adam", {}))
    assert [rate for rate, _ in pool.runs] == [0.05, 0.1, 0.2, 0.025, 0.0125, 0.00625, 0.003125]
    table = convergence.tables(convergence.read_records(settings.output))
    assert "| adam | 0.00625 | 7 | 3.0889 |  | 1 |" in table and table.count("diverged") == 2


def test_tables_compare_means_with_adams(convergence: ModuleType) -> None:
    def records(name: str, overrides: dict[str, Any], losses: dict[tuple[float, int], float | None]) -> list[Any]:
        fixed = {"task": "gpt2", "optimizer": "adam" if name == "adam" else "zero_one_adam", "overrides": overrides}
        fixed |= {"steps": 10, "replicas": 4, "size": "small"}
        outcome = {"bits_per_parameter": 2.0, "tokens": 5000, "parameters": 2_000_000, "revision": "abc"}
        return [
            {"name": name, "run": {**fixed, "learning_rate": rate, "seed": seed}, "held_out_loss": loss, **outcome}
            for (rate, seed), loss in losses.items()
        ]

    ours = {(0.1, 0): 5.2, (0.1, 1): 5.4, (0.1, 2): 5.3, (0.2, 0): 5.1, (0.2, 1): 5.5, (0.2, 2): 5.6, (0.4, 0): 5.0}
    adams = {(0.1, 0): 5.0, (0.1, 1): 5.1, (0.1, 2): 5.2}
    partial = {(0.1, 0): None, (0.05, 0): 5.15}
    table = convergence.tables(
        records("zero_one_adam", {}, ours)
        + records("adam", {}, adams)
        + records("other", {"variance_kappa": 4}, partial)
    )
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert lines[2] == "| adam | 0.1 | 3 | 5.1000 | 0.1000 | 3 |  |  | 2 |"
    # Welch: t = 0.2 / sqrt(0.01 / 3 + 0.01 / 3) with 4 degrees of freedom
    assert lines[3] == "| zero_one_adam | 0.1 | 7 | 5.3000 | 0.1000 | 3 | +0.2000 | 0.07 | 2 |"
    assert lines[4] == "| other | 0.05 | 2 | 5.1500 |  | 1 | +0.0500 |  | 2 |"
    assert lines[-1] == "| other | 5.1500 | diverged |  |  |"
    assert "2.00 M parameters, 4 replicas, 10 steps, 5 k tokens" in table


def test_every_ablation_is_a_valid_recipe(convergence: ModuleType) -> None:
    for variants in convergence.ablations(400).values():
        for variant in variants:
            run = convergence.Run(
                task="gpt2", optimizer=variant.optimizer, overrides=variant.overrides, learning_rate=1e-3, seed=0
            )
            settings = convergence.build_config(run, Path()).optimizer
            assert all(getattr(settings, name) == value for name, value in variant.overrides.items())


def test_real_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "convergence.py"), "--task", "gpt2", "bert", "--size", "tiny"]
    command += ["--optimizers", "adam", "zero_one_adam", "--learning-rates", "1e-2", "--extensions", "0"]
    command += ["--seeds", "0", "--steps", "30", "--replicas", "2"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "results.jsonl"), "--data", str(tmp_path / "data")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    optimizers = [(record["run"]["task"], record["run"]["optimizer"]) for record in records]
    assert optimizers == [(task, name) for task in ("gpt2", "bert") for name in ("adam", "zero_one_adam")]
    for record in records:
        losses = [loss for _, loss in record["curve"]]
        assert record["held_out_loss"] == losses[-1] < losses[0]
        assert record["tokens"] == 30 * 2 * 2 * 32
        if record["run"]["optimizer"] == "adam":
            assert record["bits_per_parameter"] == pytest.approx(32, rel=0.01) and record["rounds"] == 30
        else:
            assert 0 < record["bits_per_parameter"] < 32 and record["rounds"] < 30
    assert (tmp_path / "results.md").read_text() in done.stdout
