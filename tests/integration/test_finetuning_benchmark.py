"""benchmarks/finetuning.py: our training loop and that of transformers end in the same weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron01.finetune.results import Run
from tests.unit.finetune.models import write_model
from tests.unit.finetune.rows import write_tsv


@pytest.fixture
def benchmark(benchmarks: Any) -> Any:
    module = benchmarks("finetuning")
    yield module
    sys.modules.pop("finetuning")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """SST-2 with eleven rows for training, so that each epoch ends with a smaller batch."""
    write_tsv(tmp_path / "SST-2", "SST-2")
    train = tmp_path / "SST-2" / "train.tsv"
    head, *rows = train.read_text().splitlines()
    train.write_text("\n".join([head, *(rows * 3)[:11]]) + "\n")
    return tmp_path


def arguments(load: Path, data: Path, **changes: Any) -> SimpleNamespace:
    settings = {"load": str(load), "data": data, "epochs": 3, "max_length": 24, "lr": 1e-2, "batch_size": 4}
    return SimpleNamespace(**settings | {"dropout": 0.1, "seeds": [0, 1]} | changes)


def test_the_same_order_ends_in_the_same_weights(benchmark: Any, corpus: Path, data: Path, tmp_path: Path) -> None:
    given = arguments(write_model(tmp_path, corpus), data)
    bench, run = benchmark.open_bench(given, 0.0), Run("SST-2", 4, 1e-2, 3)
    ours, training = bench.train(run)
    theirs = benchmark.train_by_trainer(bench, given, run, in_our_order=True)
    assert training.num_steps == 9
    moved = benchmark.distance(ours, bench.new_model(run))
    assert moved > 0.5
    assert benchmark.distance(ours, theirs) < 0.01 * moved  # Adam makes steps of rounding where a gradient should be 0
    other = benchmark.train_by_trainer(bench, given, run, in_our_order=False)
    assert benchmark.distance(ours, other) > 0.1


@pytest.mark.slow
def test_both_comparisons(
    benchmark: Any, corpus: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(write_model(tmp_path, corpus), data)
    benchmark.compare_with_trainer(given)
    shown = capsys.readouterr().out
    assert "same order, no dropout: weights are" in shown
    assert "| loop | seed 0 | seed 1 | mean | standard deviation |" in shown
    benchmark.compare_with_baselines(given)
    shown = capsys.readouterr().out
    assert "| majority class | 50.0 |" in shown
    assert "| logistic regression on counts of words and pairs of words | 100.0 |" in shown
    assert "| fine-tuned: median of seeds (" in shown


def test_fewer_rows(benchmark: Any, data: Path, tmp_path: Path) -> None:
    fewer, _ = benchmark.with_dev_sets(data, ["SST-2"], tmp_path / "fewer", 5)
    assert len((fewer / "SST-2" / "train.tsv").read_text().splitlines()) == 6
    assert (fewer / "SST-2" / "dev.tsv").read_text() == (data / "SST-2" / "dev.tsv").read_text()


def test_data_without_the_task_are_refused_in_a_line(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["finetuning.py", "baselines", "--load", "model", "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^error: .* holds none of the tasks SST-2; expected a folder for each$"):
        benchmark.run_program(benchmark.main)
