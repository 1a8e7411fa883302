"""benchmarks/study.py: pages and charts from the records alone, and how they report missing ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron01.compare.runs import read_run
from megatron01.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS = {"Adam": "--optimizer adam", "1-bit Adam": "--optimizer one_bit_adam", "0/1 Adam": ""}
FINAL = {"Adam": 3.0, "1-bit Adam": 3.2, "0/1 Adam": 3.1}
BITS = {"Adam": 32.0, "1-bit Adam": 6.0, "0/1 Adam": 1.5}


@pytest.fixture
def study(benchmarks: Any) -> Any:
    return benchmarks("study")


def record(score: float | None, **others: Any) -> dict[str, Any]:
    made = {"revision": "one", "machine": "this", "date": "2026-01-01", "command": ""}
    return {**made, "score": score, "bytes": 1000, "bits": 1.5, "rounds": 4, "steps": 30, "seconds": 2.0, **others}


def trained(study: Any, optimizer: str, seed: int) -> dict[str, Any]:
    """A run with a curve that ends at the optimizer's loss, and a little higher for each seed."""
    score, lines = FINAL[optimizer] + 0.01 * seed * (1 + (optimizer == "Adam")), []
    for step in (10, 20, 30):
        sent = {"comm_bytes_total": round(BITS[optimizer] * step * 1000), "bits_per_parameter": BITS[optimizer]}
        times = {"training_seconds": step / 10, "step_seconds": 0.1, "tokens_per_second": 100.0}
        loss = {"loss": score + 30 / step - 1, "eval_loss": score + 30 / step - 1, "comm_rounds_total": step}
        lines.append({"iteration": step, "consumed_samples": 8 * step, "lr": 1e-3, **sent, **times, **loss})
    name = next((word for word in OPTIMIZERS[optimizer].split() if "adam" in word), "zero_one_adam")
    settings = {"optimizer.optimizer": name, "optimizer.lr": "0.001", "training.seed": str(seed)}
    return record(score, metrics=lines, settings=settings, environment={"world_size": 2})


def test_the_table_is_made_of_what_is_there(study: Any) -> None:
    sections = {"bert": {"flags": "", "rates": [0.001, 0.002]}, "glue": {"tasks": ["SST-2", "RTE"]}}
    evidence = study.Evidence(study_spec(study, **sections), counts={"SST-2": 79.0})
    run = importlib.import_module("study_records").Run
    for seed, (adam, ours) in enumerate([(3.0, 3.1), (3.2, 3.3), (3.1, 3.2)]):
        glue = {"SST-2": {"batch 32": [80.0 + seed, 81.0 + seed, 99.0]}}
        evidence.records[run("bert", "Adam", 0.001, seed)] = record(adam, glue=glue)
        lower = {"SST-2": {"batch 32": [70.0, 71.0 + 0.1 * seed, 99.0]}}
        evidence.records[run("bert", "0/1 Adam", 0.002, seed)] = record(ours, glue=lower)
    evidence.records[run("bert", "Adam", 0.002, 0)] = record(3.5)
    evidence.records[run("bert", "0/1 Adam", 0.001, 0)] = record(None, revision="other")
    text = study.table(evidence)
    assert "| Adam | 0.001 (its best, the lowest tried) | 3 | 3.1000 ± 0.1000 |  |" in text
    assert "| 0/1 Adam | 0.002 (its best, the highest tried) | 3 | 3.2000 ± 0.1000 | +0.1000 (se 0.0000) |" in text
    assert "| SST-2 | 79.0 | 82.00 ± 1.00 | 71.10 ± 0.10 |" in text
    assert "told apart by paired t-tests: 0/1 Adam from Adam on SST-2" in text
    absent = [f"1-bit Adam, learning rate {rate}, seed 0" for rate in (0.001, 0.002)]
    absent += [f"{name} Adam, learning rate 0.001, seed {seed}" for seed in (1, 2) for name in ("1-bit", "0/1")]
    assert f"\nMissing: {'; '.join(f'BERT, {name}' for name in absent)}; GLUE, RTE.\n" in text
    assert (
        "8, of which 1 diverged (BERT, 0/1 Adam, learning rate 0.001, seed 0)." in text
        and "of different commits" in text
    )


def test_what_is_compared_is_of_the_same_seeds(study: Any) -> None:
    """Only seed 1 is there of both, so that nothing can be told apart."""
    evidence = study.Evidence(study_spec(study, bert={"flags": "", "rates": [0.001]}), counts={"SST-2": 79.0})
    run = importlib.import_module("study_records").Run
    for name, seeds, value in (("Adam", (0, 1), 80.0), ("0/1 Adam", (1, 2), 70.0), ("0/1 Adam", (0,), None)):
        for seed in seeds:
            glue = {} if value is None else {"glue": {"SST-2": {"batch 32": [value + 0.1 * seed]}}}
            evidence.records[run("bert", name, 0.001, seed)] = record(3.0, **glue)
    text = study.table(evidence)
    assert "| SST-2 | 79.0 | 80.05 ± 0.07 | 70.15 ± 0.07 |" in text and "one seed tells nothing apart" in text


@pytest.mark.slow
def test_the_page_tells_what_the_records_say(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = importlib.import_module("study_records").Run
    evidence = study.Evidence(
        study_spec(study, gpt={"flags": "", "rates": [0.001]}, digits={"flags": "--steps 30", "rates": [0.004]})
    )
    for seed in (0, 1, 2):
        for optimizer in OPTIMIZERS:
            evidence.records[run("gpt", optimizer, 0.001, seed)] = trained(study, optimizer, seed)
            of_digits = record(0.01 + 0.001 * seed)  # whose example tells neither steps nor rounds nor seconds
            evidence.records[run("digits", optimizer, 0.004, seed)] = {
                key: value for key, value in of_digits.items() if key not in ("steps", "rounds", "seconds")
            }
    evidence.write(tmp_path / "records.jsonl")
    assert study.Evidence.read(tmp_path / "records.jsonl") == evidence
    monkeypatch.setattr(
        sys, "argv", ["study.py", "--records", str(tmp_path / "records.jsonl"), "--docs", str(tmp_path / "docs")]
    )
    study.main()
    text = (tmp_path / "docs" / "study.md").read_text()
    assert "* Adam ended lowest" in text and "1-bit Adam sent 4.0 times as much and Adam 21." in text
    assert "| GPT-2 | 9 |" in text and "| 0/1 Adam | 3.1000 |" in text and "ResNet-18" in text
    figures = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(figures) == 4 and all((tmp_path / "docs" / figure).read_text().startswith("<?xml") for figure in figures)
    assert (tmp_path / "docs" / "study" / "index.html").exists()
    pictures = [tmp_path / "docs" / "pictures" / f"loss_{theme}.svg" for theme in ("light", "dark")]
    before = [path.read_bytes() for path in pictures]
    study.main()
    assert before == [path.read_bytes() for path in pictures] and before[0] != before[1]


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"spec": {"seeds": 1}, "counts": {}}'])
def test_what_holds_no_records_is_one_line(study: Any, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"records\.jsonl holds no records"):
        study.Evidence.read(tmp_path / "records.jsonl")


def test_the_committed_study_is_that_of_the_records(study: Any) -> None:
    evidence = study.Evidence.read(ROOT / "benchmarks" / "results" / "pretrain_and_finetune.jsonl")
    assert (ROOT / "docs" / "study.md").read_text() == study.page(evidence, study.parts(evidence))


def study_spec(study: Any, **sections: Any) -> Any:
    return importlib.import_module("study_records").Spec(2, [0, 1, 2], OPTIMIZERS, **sections)


def test_runs_are_made_of_their_records(study: Any, tmp_path: Path) -> None:
    """The committed records give run folders that ``megatron01 compare`` reads as those of the study."""
    evidence = study.Evidence.read(ROOT / "benchmarks" / "results" / "pretrain_and_finetune.jsonl")
    with_metrics = [record for record in evidence.records.values() if record.get("metrics")]
    folders = study.write_runs(evidence, tmp_path)
    records = {folder.name: record for folder, record in zip(folders, with_metrics, strict=True)}
    assert len(records) == len(folders) > 20
    for folder in folders:
        run, record = read_run(folder), records[folder.name]
        assert dict(run.settings) == record["settings"] and run.environment == record["environment"]
        assert run.bytes_sent[-1] == record["bytes"] and not run.notes
