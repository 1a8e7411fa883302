"""benchmarks/study.py: what is still to be run, going on after an interruption, and a page made of records alone."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron01.data import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parents[2]
BEST = {"adam": 2e-3, "one_bit_adam": 1e-3, "zero_one_adam": 4e-3, "bin_sgdm": 8e-3}
BITS = {"adam": 50.0, "one_bit_adam": 8.0, "zero_one_adam": 4.0, "bin_sgdm": 2.0}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("study")


def result_of(run: Any) -> dict[str, Any]:
    """What replicas would return: a loss that is lowest at the optimizer's best rate."""
    if run.learning_rate > 1e-2:
        lost = {"iteration": run.steps, "consumed_samples": 8, "loss": None}
        return {**costs(run), "held_out_loss": None, "bits_per_parameter": 1.0, "metrics": [lost]}
    best, bits = BEST[run.optimizer], BITS[run.optimizer] + 2 * ("sync_policy" in run.overrides)
    final = 3 + 0.1 * abs(math.log2(run.learning_rate / best)) + 0.01 * run.seed + 0.4 / bits
    lines = []
    for step in range(10, run.steps + 1, 10):
        loss = final + math.exp(-step / 10)
        totals = {"comm_bytes_total": round(bits * step), "comm_rounds_total": step, "training_seconds": step / 100}
        rates = {"bits_per_parameter": bits, "tokens_per_second": 100.0, "step_seconds": 0.01, "lr": run.learning_rate}
        lines.append(
            {"iteration": step, "consumed_samples": 8 * step, "loss": loss, "eval_loss": loss, **totals, **rates}
        )
    return {**costs(run), "held_out_loss": lines[-1]["loss"], "bits_per_parameter": bits, "metrics": lines}


def costs(run: Any) -> dict[str, Any]:
    return {"parameters": 8, "tokens": 64, "seconds": 1.0, "cpu_seconds": 0.5, "bytes_sent": 1000}


class Pool:
    """In place of replicas, of which there are two; fails after some runs."""

    left = 10**9

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, work: Any, run: Any, data: str) -> list[dict[str, Any]]:
        if run.steps > 20:  # else it only warms up
            Pool.left -= 1
        if Pool.left < 0:
            raise KeyboardInterrupt
        return [result_of(run)] * self.replicas


@pytest.fixture
def run_study(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(study, "ReplicaPool", Pool)
    monkeypatch.setattr(study.subprocess, "run", lambda command, **options: None)
    monkeypatch.setattr(study, "revision", lambda: "abc")

    def run(*arguments: str, left: int = 10**9) -> list[dict[str, Any]]:
        Pool.left = left
        common = ["--output", str(tmp_path / "study.jsonl"), "--docs", str(tmp_path / "docs"), "--steps", "40"]
        sweep = ["--sweep", str(tmp_path / "earlier.jsonl"), "--replicas", "2", "--seeds", "0", "1"]
        monkeypatch.setattr(sys, "argv", ["study.py", *common, *sweep, *arguments])
        study.main()
        return [json.loads(line) for line in (tmp_path / "study.jsonl").read_text().splitlines()]

    return run


def tried(records: list[dict[str, Any]], task: str, name: str) -> list[tuple[float, int]]:
    chosen = [record["run"] for record in records if record["run"]["task"] == task and record["name"] == name]
    return [(run["learning_rate"], run["seed"]) for run in chosen]


def test_all_are_tuned_alike_and_the_best_is_repeated(
    study: ModuleType, run_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "write_report", lambda *arguments: [])
    earlier = {
        "task": "gpt2",
        "optimizer": "adam",
        "overrides": {},
        "seed": 0,
        "steps": 40,
        "replicas": 2,
        "size": "small",
    }
    lines = [
        {"name": "x", "run": {**earlier, "learning_rate": rate}, "held_out_loss": 3.0 + rate, "revision": "old"}
        | {"bits_per_parameter": 48.0}
        for rate in (5e-4, 1e-3, 2e-3, 4e-3)
    ]
    (tmp_path / "earlier.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(KeyboardInterrupt):
        run_study(left=7)
    records = run_study()
    names = {record["name"] for record in records}
    assert names == {
        *("adam", "one_bit_adam, frozen at step 6", "zero_one_adam", "zero_one_adam, no local steps", "bin_sgdm"),
    }
    assert tried(records, "bert", "adam") == [(1e-3, 0), (2e-3, 0), (4e-3, 0), (2e-3, 1)]
    # what was tried before is not tried again, but the best is run for its curve; 2.5e-4 is the end of what is allowed
    assert tried(records, "gpt2", "adam") == [(2.5e-4, 0), (5e-4, 0), (5e-4, 1)]
    assert tried(records, "bert", "zero_one_adam") == [(1e-3, 0), (2e-3, 0), (4e-3, 0), (8e-3, 0), (4e-3, 1)]
    assert tried(records, "bert", "bin_sgdm") == [(1e-3, 0), (2e-3, 0), (4e-3, 0), (8e-3, 0), (1.6e-2, 0), (8e-3, 1)]
    assert len(records) == len({json.dumps(record["run"], sort_keys=True) for record in records})
    assert run_study() == records  # nothing is left to be run


def test_the_page_tells_what_the_records_say(run_study: Any, tmp_path: Path) -> None:
    records = run_study("--task", "gpt2")
    text = (tmp_path / "docs" / "study.md").read_text()
    assert f"| all | {len(records)} |" in text and "| GPT-2, adam | 4 |" in text and "diverged" in text
    assert "**BinSGDM** ends 0.1920 above Adam, which is beyond the spread of the seeds" in text
    assert "It sent 25.0 times less than Adam" in text and "GPT-2, BinSGDM: the loss is 0.1920 higher" in text
    figures = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(figures) == 6 and all((tmp_path / "docs" / figure).read_text().startswith("<?xml") for figure in figures)
    assert (tmp_path / "docs" / "study" / "index.html").exists()


def test_without_time_nothing_is_run(run_study: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no runs yet"):
        run_study("--minutes", "0")
    assert not (tmp_path / "docs").exists()


@pytest.fixture
def one_replica(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("one_replica")
def test_a_real_run(study: ModuleType, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "gpt_text_document", np.dtype(np.uint16)) as builder:
        for document in range(40):
            builder.add_sentence([(7 * document + place) % 50 for place in range(60)])
            builder.end_document()
    run = study.Run(
        task="gpt2",
        optimizer="zero_one_adam",
        overrides={},
        learning_rate=1e-2,
        seed=0,
        steps=40,
        replicas=1,
        size="tiny",
    )
    result = study.train(run, str(tmp_path))
    lines = result["metrics"]
    assert [line["iteration"] for line in lines if "eval_loss" in line] == list(range(5, 41, 5))
    assert [line["iteration"] for line in lines] == sorted({*range(2, 41, 2), *range(5, 41, 5)})
    assert lines[0]["loss"] > lines[-1]["loss"] and result["held_out_loss"] == lines[-1]["eval_loss"]
    assert lines[-1]["consumed_samples"] == 80 and result["tokens"] == 80 * 32
    assert 0 < lines[-1]["training_seconds"] < result["seconds"] and result["cpu_seconds"] > 0
