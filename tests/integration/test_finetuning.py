"""``megatron01 glue`` and ``squad`` from the command line to the tables, with a BERT of one layer."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megatron01 import cli
from megatron01.config.commands import GlueConfig
from megatron01.errors import UserError
from megatron01.finetune.glue import TASKS, GlueBench, glue
from megatron01.finetune.results import Run
from megatron01.utils.signals import Stopped
from tests import programs
from tests.integration.tiny import bert_config
from tests.unit.convert.trained import save_trained
from tests.unit.finetune.models import write_model
from tests.unit.finetune.rows import write_tsv


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def checkpoint(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours after some steps of 0/1 Adam."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_trained(bert_config(corpus), folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), corpus)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tasks, of four rows each."""
    folder = tmp_path_factory.mktemp("glue")
    for task in TASKS:
        write_tsv(folder / task, task)
    return folder


def settings(load: Path, data: Path, output: Path, **others: object) -> dict[str, object]:
    small = {"batch_sizes": (2,), "learning_rates": (1e-3,), "seeds": 1, "epochs": 1.0, "max_length": 24}
    return {"load": str(load), "input": str(data), "output": output, "device": "cpu", **small, **others}


def results(output: Path) -> dict[str, dict[str, object]]:
    """The contents of the files of finished runs, without their times."""
    found = {}
    for path in sorted(output.glob("runs/*/*.json")):
        found[path.name + path.parent.name] = json.loads(path.read_text())
        del found[path.name + path.parent.name]["seconds"]
    return found


def test_all_tasks_from_a_checkpoint(checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    glue(GlueConfig(**settings(checkpoint, data, tmp_path, submission=True, name="tiny")))
    shown = capsys.readouterr().out
    assert "9 runs, 0 finished, 9 to do here" in shown
    assert "[9/9] WNLI batch 2 lr 0.001 seed 0: WNLI" in shown
    row = (tmp_path / "results.csv").read_text().splitlines()[-1].split(",")
    assert row[0] == "tiny"
    assert "-" not in row
    assert len(row) == 1 + sum(len(task.columns) for task in TASKS.values())
    expected = {split.submission for task in TASKS.values() for split in task.test if not split.is_optional}
    assert {path.name for path in (tmp_path / "submission").iterdir()} == expected
    for task in TASKS.values():
        for split in task.test[:2]:
            head, *lines = (tmp_path / "submission" / split.submission).read_text().splitlines()
            assert head == "index\tprediction"
            assert [line.split("\t")[0] for line in lines] == ["0", "1", "2", "3"]
            predicted = [line.split("\t")[1] for line in lines]
            if task.labels:
                assert set(predicted) <= set(task.labels)
            else:
                assert all(0 <= float(value) <= 5 and len(value) == 5 for value in predicted)


def test_a_test_set_that_is_missing_is_named_before_any_training(model_folder: Path, tmp_path: Path):
    write_tsv(tmp_path / "data" / "RTE", "RTE")
    (tmp_path / "data" / "RTE" / "test.tsv").unlink()
    with pytest.raises(UserError, match="RTE has no test set"):
        glue(GlueConfig(**settings(model_folder, tmp_path / "data", tmp_path / "out", tasks=("RTE",), submission=True)))
    assert not (tmp_path / "out").exists()


def test_a_quick_look_reads_little_and_stands_beside_nothing(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron01.finetune.glue.QUICK_EXAMPLES", 3)
    monkeypatch.setattr("megatron01.finetune.glue.QUICK_DEV_EXAMPLES", 2)
    wanted = {"tasks": ("MNLI", "RTE"), "quick": True, "batch_sizes": (1,), "epochs": 2.0}
    glue(GlueConfig(**settings(checkpoint, data, tmp_path, **wanted)))
    shown = capsys.readouterr().out
    assert "MNLI: 3 examples to train on, 2 + 2 to evaluate on" in shown
    assert "One run of each task" in shown and "A quick look" in shown
    assert "BERT-Base" not in shown + (tmp_path / "results.md").read_text()
    assert {result["num_steps"] for result in results(tmp_path).values()} == {6}


def test_the_estimate_counts_epochs_and_what_is_evaluated(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that advances by one second at each reading, which is after each step."""
    seconds = itertools.count()
    monkeypatch.setattr("megatron01.finetune.bench.time.monotonic", lambda: float(next(seconds)))
    start = settings(checkpoint, data, tmp_path, tasks=("MNLI",), epochs=3.0, batch_sizes=(1,))
    bench = GlueBench(GlueConfig(**start), torch.device("cpu"))
    trained, evaluated = bench.amounts("MNLI")
    assert evaluated == 2 * trained, "two development sets, of the same rows here"
    run = Run("MNLI", 1, 1e-3, 0)
    assert bench.estimate([run]) == pytest.approx(4 * 3.0 * (1 + 0.25 * 2 / 3))
    assert bench.estimate([run, run]) == pytest.approx(2 * bench.estimate([run]))
    assert bench.estimate([Run("MNLI", 4, 1e-3, 0)]) is None, "a single step cannot be timed"


def test_it_learns_and_a_saved_model_predicts_the_same(model_folder: Path, data: Path, tmp_path: Path):
    """Four sentences by heart, with a model that transformers loads from the folder it was saved to."""
    config = settings(model_folder, data, tmp_path, tasks=("SST-2",), epochs=30.0, save_models=True, submission=True)
    glue(GlueConfig(**config))
    (result,) = results(tmp_path).values()
    assert result["metrics"] == {"accuracy": 1.0}
    assert result["num_steps"] == 60
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "models" / "SST-2").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "SST-2")
    assert model.config.id2label == {0: "0", 1: "1"} and model.config.label2id == {"0": 0, "1": 1}
    predicted = []
    for line in (data / "SST-2" / "test.tsv").read_text().splitlines()[1:]:
        with torch.no_grad():
            logits = model(**tokenizer(line.split("\t")[1], return_tensors="pt")).logits
        predicted.append(str(int(logits.argmax())))
    written = (tmp_path / "submission" / "SST-2.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[1] for line in written] == predicted
    # and other tasks can start from it
    start = settings(
        model_folder, data, tmp_path / "b", tasks=("RTE", "CoLA"), mnli_model=str(tmp_path / "models/SST-2")
    )
    glue(GlueConfig(**start))
    assert f"STS-B started from {tmp_path}/models/SST-2" in (tmp_path / "b" / "results.md").read_text()
    bench = GlueBench(GlueConfig(**start), torch.device("cpu"))
    tuned, own = (bench.new_model(Run(task, 2, 1e-3, 0)) for task in ("RTE", "CoLA"))
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(tuned.state_dict()[name], model.state_dict()[name])
    assert not torch.equal(own.state_dict()[name], model.state_dict()[name])
    assert not torch.equal(tuned.classifier.weight, model.classifier.weight)


def test_a_sweep_that_was_stopped_goes_on(
    model_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    grid = {"tasks": ("RTE", "STS-B"), "seeds": 2, "learning_rates": (1e-3, 1e-2)}
    glue(GlueConfig(**settings(model_folder, data, tmp_path / "whole", **grid)))
    config = GlueConfig(**settings(model_folder, data, tmp_path / "stopped", **grid))
    original, calls = GlueBench.measure, []

    def stopping(bench: GlueBench, run: Run, progress: object = None) -> object:
        calls.append(run)
        if len(calls) == 4:
            raise Stopped(signal.SIGTERM)
        return original(bench, run, progress)

    monkeypatch.setattr(GlueBench, "measure", stopping)
    with pytest.raises(Stopped):
        glue(config)
    assert "stopped after 3 of 8 runs; resume with the same command" in capsys.readouterr().err
    assert len(results(tmp_path / "stopped")) == 3
    torn = next((tmp_path / "stopped").glob("runs/*/*.json"))
    torn.write_bytes(torn.read_bytes()[:50])
    glue(config)
    assert len(calls) == 4 + 6
    shown = capsys.readouterr()
    assert "8 runs, 2 finished, 6 to do here" in shown.out
    assert f"WARNING: {torn} is not JSON" in shown.err
    assert results(tmp_path / "stopped") == results(tmp_path / "whole")
    glue(GlueConfig(**settings(model_folder, data, tmp_path / "stopped", **grid, report_only=True)))
    assert len(calls) == 10
    other = settings(model_folder, data, tmp_path / "stopped", **grid) | {"epochs": 2.0}
    with pytest.raises(UserError, match=r"sweep.json has epochs 1.0, but now it is 2.0"):
        glue(GlueConfig(**other))


def test_an_array_does_the_sweep_in_parts(
    model_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = GlueConfig(**settings(model_folder, data, tmp_path, tasks=("WNLI",), seeds=3, submission=True))
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    for number, (finished, to_do) in enumerate(((0, 2), (2, 1))):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
        glue(config)
        shown = capsys.readouterr()
        assert f"3 runs, {finished} finished, {to_do} to do here, part {number + 1} of 2 of the array" in shown.out
        assert "outside of array jobs" in shown.err
    assert len(results(tmp_path)) == 3
    assert not (tmp_path / "submission").exists()


def test_a_report_needs_a_sweep(model_folder: Path, data: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"holds no sweep \(no sweep.json\); give the folder of one"):
        glue(GlueConfig(**settings(model_folder, data, tmp_path / "none", tasks=("WNLI",), report_only=True)))
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_jobs_in_processes(model_folder: Path, data: Path, tmp_path: Path):
    """Two jobs in parallel give the same results as sequential ones."""
    command = ["glue", "--load", str(model_folder), "--data", str(data)]
    command += ["--tasks", "CoLA", "--batch-sizes", "2", "--learning-rates", "1e-3", "--seeds", "3", "--epochs", "1"]
    command += ["--max-length", "24", "--device", "cpu", "--output", str(tmp_path / "jobs"), "--jobs", "2"]
    assert programs.run(sys.executable, "-m", "megatron01", *command).stderr == ""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    glue(GlueConfig(**settings(model_folder, data, tmp_path / "alone", tasks=("CoLA",), seeds=3)))
    torch.set_num_threads(threads)
    found, alone = results(tmp_path / "jobs"), results(tmp_path / "alone")
    assert found.keys() == alone.keys()
    for name, result in found.items():
        assert result["loss"] == pytest.approx(alone[name]["loss"], rel=1e-5)
        assert result["metrics"] == alone[name]["metrics"]


SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "animals",
            "paragraphs": [
                {
                    "context": "the quick brown fox jumps over a lazy dog while seven boats sail home .",
                    "qas": [
                        {"id": "q1", "question": "fox ?", "answers": [{"text": "brown fox", "answer_start": 10}]},
                        {"id": "q2", "question": "boats ?", "answers": [{"text": "seven boats", "answer_start": 48}]},
                    ],
                }
            ],
        }
    ],
}


@pytest.fixture
def squad_file(tmp_path: Path) -> Path:
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(SQUAD))
    return path


def squad_command(load: Path, squad_file: Path, output: Path) -> list[str]:
    files = ["--train-file", str(squad_file), "--dev-file", str(squad_file), "--output", str(output)]
    sizes = ["--max-length", "20", "--doc-stride", "6", "--max-query-length", "4", "--device", "cpu"]
    steps = ["--batch-sizes", "2", "--learning-rates", "3e-3", "--seeds", "1", "--epochs", "200"]
    return ["squad", "--load", str(load), *files, *sizes, *steps]


def run(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert not ended.value.code, ended.value.code


def test_squad(model_folder: Path, squad_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two questions by heart, whose answers lie in different windows."""
    command = squad_command(model_folder, squad_file, tmp_path / "sweep")
    run([*command, "--save-models"])
    (result,) = results(tmp_path / "sweep").values()
    assert result["metrics"] == {"exact_match": 1.0, "f1": 1.0}
    (answers,) = (tmp_path / "sweep" / "answers").iterdir()
    assert json.loads((answers / "predictions.json").read_text()) == {"q1": "brown fox", "q2": "seven boats"}
    candidates = json.loads((answers / "nbest_predictions.json").read_text())["q2"]
    assert candidates[0]["text"] == "seven boats"
    assert sum(candidate["probability"] for candidate in candidates) == pytest.approx(1)
    assert len(candidates) > 5
    assert (tmp_path / "sweep" / "models" / "SQuAD" / "config.json").is_file()
    capsys.readouterr()
    run([*command, "--save-models"])
    shown = capsys.readouterr().out
    assert "1 runs, 1 finished, 0 to do here" in shown and f"answers of the best run: {answers}\n" in shown
    assert f"written before; to do it again, remove {tmp_path}/sweep/finished/SQuAD-save_models.json" in shown


def test_squad_where_all_runs_diverge(
    model_folder: Path, squad_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run([*squad_command(model_folder, squad_file, tmp_path / "sweep"), "--learning-rates", "1e30"])
    assert "answers" not in capsys.readouterr().out
    assert not (tmp_path / "sweep" / "answers").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:80], "squad.json is not JSON"),
        (lambda text: text.replace('"data"', '"date"'), r"squad.json: there is no list 'data'"),
        (lambda text: text.replace('"context"', '"text"'), r"data\[0\] paragraphs\[0\]: 'context' is None"),
        (lambda text: text.replace("48", "47"), r"qas\[1\] \(q2\) answers\[0\]: the answer 'seven boats' is not at"),
        (lambda text: text.replace("48", "4800"), r"is not at character 4800 of its context; there is ''"),
        (lambda text: text.replace("48", "null"), r"answer_start is None; expected the place"),
        (lambda text: text.replace("q2", "q1"), r"has two questions with the id q1"),
        (lambda text: text.replace('[{"text": "brown fox", "answer_start": 10}]', "[]"), r"\(q1\) has no answer"),
        (lambda text: '{"data": []}', "squad.json holds no questions"),
    ],
)
def test_squad_files_that_cannot_be_used(
    change: object, message: str, model_folder: Path, squad_file: Path, tmp_path: Path
):
    from megatron01.finetune.squad import read_squad

    squad_file.write_text(change(squad_file.read_text()))  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        read_squad(squad_file)


def test_a_run_that_diverges_counts_as_zero(
    model_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = settings(model_folder, data, tmp_path, tasks=("MRPC",), clip_grad=0.0) | {"learning_rates": (1e30,)}
    glue(GlueConfig(**config | {"epochs": 5.0, "save_models": True, "submission": True}))
    (result,) = results(tmp_path).values()
    assert result["diverged"]
    assert result["loss"] is None
    assert result["metrics"] == {"accuracy": 0.0, "f1": 0.0}
    assert (tmp_path / "settings.csv").read_text().splitlines()[1].endswith(",1,1")
    assert "WARNING: MRPC batch 2 lr 1e+30 seed 0 diverged, so nothing is written of it" in capsys.readouterr().err
    assert not any((tmp_path / name).exists() for name in ("models", "submission", "finished"))
