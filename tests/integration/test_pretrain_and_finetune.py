"""benchmarks/pretrain_and_finetune.py: from a specification to the table, and how it reports missing results."""

from __future__ import annotations

import importlib
import json
import shlex
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


@pytest.fixture
def benchmark(benchmarks: Any) -> Any:
    return benchmarks("pretrain_and_finetune")


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
    (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": "the quick brown fox"}) + "\n")
    words = shlex.quote(str(tmp_path / "text"))
    spec = {
        "prepare": f"megatron01 --help > /dev/null\necho 'the quick brown fox jumps over a lazy dog .' >> {words}\n",
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
    text, said = capsys.readouterr()
    assert "BERT, 0/1 Adam, learning rate 0.001, seed 0: fine-tuning" in said and "texts and vocabularies" in said
    study = importlib.import_module("study")
    evidence = study.Evidence.read(tmp_path / "out" / "records.jsonl")
    assert evidence == benchmark.Workshop(evidence.spec, tmp_path / "out").evidence and study.table(evidence) in text
    written = study.write_study(evidence, tmp_path / "docs")
    assert {path.name for path in written} >= {
        "study.md",
        "index.html",
        "loss_dark.svg",
        "gpt_sample_wise_convergence.svg",
    }
    of_bert = evidence.records[benchmark.Run("bert", "0/1 Adam", 1e-3, 0)]
    assert of_bert["metrics"][-1]["iteration"] == 8 and of_bert["environment"]["world_size"] == 1
    assert (
        f"pretrained_checkpoint: {tmp_path}/out/bert-start/0"
        in (tmp_path / "out/bert/0_1_adam-0.001-0/run/config.yaml").read_text()
    )
    for part in ("| 0/1 Adam | 0.001 |", "| SST-2 |", "words, bits per byte", "LAMBADA", "ResNet-18"):
        assert part in text
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*/record.json")}
    assert len(made) == 3
    benchmark.main()  # nothing is done twice
    assert made == {path: path.stat().st_mtime_ns for path in made} and capsys.readouterr() == (text, "")
    assert len((tmp_path / "text").read_text().splitlines()) == 1


def test_texts_are_made_once_and_by_the_same_commands(benchmark: Any, tmp_path: Path) -> None:
    def make(prepare: str) -> bool:
        spec = benchmark.Spec(1, [0], {"Adam": ""}, prepare=prepare)
        return bool(benchmark.Workshop(spec, tmp_path / "out").make())

    with pytest.raises(UserError, match=r"failed with status 3 .*prepare\.txt"):
        make("echo the branches have diverged >&2; exit 3")  # which of a training run would be a result
    with pytest.raises(UserError, match="failed with status 1"):
        make("false | true\necho reached > " + shlex.quote(str(tmp_path / "reached")))
    assert not (tmp_path / "reached").exists()
    add = f"echo once >> {shlex.quote(str(tmp_path / 'text'))}"
    assert make(add) and make(add) and (tmp_path / "text").read_text() == "once\n"
    with pytest.raises(UserError, match="made by other commands"):
        make("true")
