"""benchmarks/pretrain_and_finetune.py: from a specification to the table, and what it says of what is not there."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron01.config.yaml_files import dump_yaml
from megatron01.errors import UserError
from tests.integration.tiny import bert_config, gpt_config
from tests.unit.finetune.rows import write_tsv

HEAD = "replicas: 1\nseeds: [0]\noptimizers: {A: x}\n"
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module = importlib.import_module("pretrain_and_finetune")
    yield module
    sys.modules.pop("pretrain_and_finetune")


def write_record(folder: Path, score: float | None, **others: Any) -> None:
    made = {"revision": "one", "machine": "this", "date": "2026-01-01", "command": "", "score": score}
    folder.mkdir(parents=True)
    costs = {"bytes": 1000, "bits": 1.5, "rounds": 4, "seconds": 2.0}
    (folder / "record.json").write_text(json.dumps(made | costs | others))


def test_the_shipped_specification_is_read(benchmark: Any) -> None:
    spec = benchmark.Spec.read(benchmark.SPEC)
    assert next(iter(spec.optimizers)) == "Adam" and len(spec.bert["rates"]) == 3


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[1]", "no sections"), ("replicas: 2", "lacks optimizers, seeds"), ("seeds: 3", "seeds is '3'"),
        ("berd: {}", "berd is"), ("a: [", "cannot be read"), (HEAD + "bert: {flags: x}", "section bert lacks rates"),
        (HEAD + "glue: {input: x, tasks: [SST], flags: x}", "no task SST"),
        (HEAD + "digits: {flags: x, rates: [1], optimizers: {B: adam}}", "digits.optimizers lacks A"),
    ],
)  # fmt: skip
def test_a_wrong_specification_is_one_line(benchmark: Any, tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "spec.yaml").write_text(content)
    with pytest.raises(UserError, match=named):
        benchmark.Spec.read(tmp_path / "spec.yaml")


def test_the_table_is_made_of_what_is_there(benchmark: Any, tmp_path: Path) -> None:
    optimizers = {"Adam": "", "1-bit Adam": "", "0/1 Adam": ""}
    spec = benchmark.Spec(2, [0, 1, 2], optimizers, bert={"flags": "", "rates": [0.001, 0.002]})
    for seed, (adam, ours) in enumerate([(3.0, 3.1), (3.2, 3.3), (3.1, 3.2)]):
        glue = {"SST-2": {"batch 32": [80.0 + seed, 81.0 + seed, 99.0]}}
        write_record(tmp_path / "bert" / f"adam-0.001-{seed}", adam, glue=glue)
        lower = {"SST-2": {"batch 32": [70.0, 71.0 + 0.1 * seed, 99.0]}}
        write_record(tmp_path / "bert" / f"0_1_adam-0.002-{seed}", ours, glue=lower)
    write_record(tmp_path / "bert" / "adam-0.002-0", 3.5)
    write_record(tmp_path / "bert" / "0_1_adam-0.001-0", None, revision="other")
    (tmp_path / "counts.json").write_text(json.dumps({"SST-2": 79.0}))
    text = benchmark.table(benchmark.Evidence(spec, tmp_path))
    assert "| Adam | 0.001 (its best) | 3 | 3.1000 ± 0.1000 |  |" in text
    assert "| 0/1 Adam | 0.002 (its best) | 3 | 3.2000 ± 0.1000 | +0.1000 (se 0.0000) |" in text
    assert "| SST-2 | 79.0 | 82.00 ± 1.00 | 71.10 ± 0.10 |" in text
    assert "told apart by paired t-tests: 0/1 Adam from Adam on SST-2" in text
    assert "Missing: bert 1-bit Adam: nothing." in text
    assert "8, of which 1 diverged" in text and "of different commits" in text


def test_what_is_compared_is_of_the_same_seeds(benchmark: Any, tmp_path: Path) -> None:
    """Only seed 1 is there of both, so that nothing can be told apart."""
    spec = benchmark.Spec(2, [0, 1, 2], {"Adam": "", "0/1 Adam": ""}, bert={"flags": "", "rates": [0.001]})
    for name, seeds, value in (("adam", (0, 1), 80.0), ("0_1_adam", (1, 2), 70.0), ("0_1_adam", (0,), None)):
        for seed in seeds:
            glue = {} if value is None else {"glue": {"SST-2": {"batch 32": [value + 0.1 * seed]}}}
            write_record(tmp_path / "bert" / f"{name}-0.001-{seed}", 3.0, **glue)
    (tmp_path / "counts.json").write_text(json.dumps({"SST-2": 79.0}))
    text = benchmark.table(benchmark.Evidence(spec, tmp_path))
    assert "| SST-2 | 79.0 | 80.05 ± 0.07 | 70.15 ± 0.07 |" in text and "paired tests tell none apart" in text


def test_tasks_without_a_development_set_get_one(benchmark: Any, tmp_path: Path) -> None:
    source = tmp_path / "given" / "QNLI"
    source.mkdir(parents=True)
    rows = [f"{n}\tq{n}\ts{n}\tentailment" for n in range(40)]
    (source / "train.subset.tsv").write_text("\n".join(["index\tquestion\tsentence\tlabel", *rows]) + "\n")
    folder, tasks = benchmark.with_dev_sets(tmp_path / "given", ["SST-2", "QNLI"], tmp_path / "made")
    assert tasks == ["QNLI"]
    kept = [(folder / "QNLI" / f"{name}.tsv").read_text().splitlines() for name in ("train", "dev")]
    assert [len(lines) for lines in kept] == [31, 11] and kept[0][1:] + kept[1][1:] == rows
    few, _ = benchmark.with_dev_sets(tmp_path / "given", ["QNLI"], tmp_path / "few", 8)
    assert [len((few / "QNLI" / f"{name}.tsv").read_text().splitlines()) for name in ("train", "dev")] == [7, 3]
    write_tsv(tmp_path / "given" / "SST-2", "SST-2")
    both, _ = benchmark.with_dev_sets(tmp_path / "given", ["SST-2"], tmp_path / "both", 2)
    given = [(tmp_path / "given" / "SST-2" / f"{name}.tsv").read_text().splitlines() for name in ("train", "dev")]
    kept = [(both / "SST-2" / f"{name}.tsv").read_text().splitlines() for name in ("train", "dev")]
    assert kept == [given[0][:3], given[1]]
    with pytest.raises(UserError, match="holds none of the tasks"):
        benchmark.with_dev_sets(tmp_path / "given", ["RTE"], tmp_path / "made")


@pytest.mark.slow
def test_from_text_to_table(
    benchmark: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, build in (("bert", bert_config), ("gpt", gpt_config)):
        (tmp_path / f"{name}.yaml").write_text(dump_yaml(build(corpus, train_iters=8)))
    write_tsv(tmp_path / "GLUE" / "SST-2", "SST-2")
    (tmp_path / "text").write_text("the quick brown fox jumps over a lazy dog .\n" * 4)
    (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": "the quick brown fox"}) + "\n")
    spec = {
        "replicas": 1,
        "seeds": [0],
        "optimizers": {"0/1 Adam": "--optimizer zero_one_adam"},
        "bert": {"flags": f"--config {tmp_path}/bert.yaml", "rates": [1e-3], "begin_at_neighbours": True},
        "glue": {"input": str(tmp_path / "GLUE"), "tasks": ["SST-2", "RTE"],
                 "flags": "--batch-sizes 4 --learning-rates 1e-3 --epochs 1 --seeds 2 --max-length 24"},
        "gpt": {"flags": f"--config {tmp_path}/gpt.yaml", "rates": [1e-3], "texts": {"words": str(tmp_path / "text")},
                "lambada": str(tmp_path / "lambada.jsonl")},
        "digits": {"flags": "--steps 2 --width 2", "rates": [1e-2],
                   "optimizers": {"0/1 Adam": "zero_one_adam"}},
    }  # fmt: skip
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    arguments = ["benchmark", "--folder", str(tmp_path / "out"), "--spec", str(tmp_path / "spec.yaml")]
    monkeypatch.setattr(sys, "argv", arguments)
    benchmark.main()
    text = capsys.readouterr().out
    for part in ("| 0/1 Adam | 0.001 (its best) |", "| SST-2 |", "words, bits per byte", "LAMBADA", "ResNet-18"):
        assert part in text
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*/record.json")}
    assert len(made) == 3
    benchmark.main()  # nothing is done twice
    assert made == {path: path.stat().st_mtime_ns for path in made} and capsys.readouterr().out == text
