from __future__ import annotations

import csv
import io

import numpy as np
import pytest

from megatron01.errors import UserError
from megatron01.finetune.glue import TASKS, Example, predictions, write_submission
from megatron01.finetune.results import (
    PUBLISHED,
    Result,
    Run,
    TableRow,
    all_settings,
    best_lines,
    best_settings,
    comparison,
    latex,
    own_row,
    read_published,
    settings_of,
    to_csv,
)
from megatron01.utils.formatting import markdown

COLUMNS = {"MRPC": TASKS["MRPC"].columns, "RTE": TASKS["RTE"].columns}
TITLES = tuple(column.title for task in TASKS.values() for column in task.columns)


def result(task, learning_rate, seed, accuracy, f1=0.5, diverged=False):
    metrics = {"accuracy": accuracy} | ({"f1": f1} if task == "MRPC" else {})
    return Result(Run(task, 16, learning_rate, seed), "d", metrics, 10, None, diverged, 1.0)


RESULTS = [
    *(result("RTE", 1e-5, seed, value) for seed, value in enumerate((0.5, 0.9, 0.6))),
    *(result("RTE", 3e-5, seed, value) for seed, value in enumerate((0.7, 0.0, 0.7))),
    *(result("MRPC", 1e-5, seed, value, value / 2) for seed, value in enumerate((0.8, 0.7))),
    result("MRPC", 3e-5, 0, 0.95),
]


def best():
    return best_settings(settings_of(RESULTS), COLUMNS)


def test_the_best_setting_by_the_median_over_its_seeds():
    assert {task: setting.learning_rate for task, setting in best().items()} == {"RTE": 3e-5, "MRPC": 1e-5}
    assert best()["RTE"].best_run("accuracy") == Run("RTE", 16, 3e-5, 0)  # ties go to the first
    equal = settings_of([result("RTE", 3e-5, 0, 0.7), result("RTE", 1e-5, 0, 0.7)])
    assert best_settings(equal, COLUMNS)["RTE"] == equal[0]
    row = own_row("ours", best(), COLUMNS)
    assert row.values == {"RTE": pytest.approx(70), "MRPC": pytest.approx(75), "MRPC F1": pytest.approx(37.5)}


def test_a_run_with_a_negative_correlation_is_better_than_a_diverged_one():
    (setting,) = settings_of([result("RTE", 1e-5, 0, 0.0, diverged=True), result("RTE", 1e-5, 1, -0.1)])
    assert setting.best_run("accuracy").seed == 1


def test_the_lines_for_the_terminal():
    diverged = [result("RTE", 1e-5, 0, 0.0, diverged=True), result("RTE", 1e-5, 1, 0.5)]
    lines = best_lines(best_settings(settings_of(diverged), COLUMNS), COLUMNS)
    assert lines[0].split() == ["median", "worst", "best", "batch", "lr", "runs", "diverged"]
    assert lines[1].split() == ["RTE", "25.0", "0.0", "50.0", "16", "1e-05", "2", "1"]
    assert lines[2:] == ["", "A diverged run counts as 0 in the median."]
    assert len(best_lines(best(), COLUMNS)) == 4  # without diverged ones: a header and three metrics


def test_the_comparison_in_all_formats():
    rows = [*PUBLISHED, TableRow("elsewhere", {"STS-B": 88.0}), own_row("a_b|c & 5%", best(), COLUMNS)]
    cells = comparison(rows, ["RTE", "MRPC", "MRPC F1"])
    assert cells[0] == ["model", "RTE", "MRPC", "MRPC F1"]
    assert cells[2] == ["BERT-Base (Adam)", "68.2", "84.8", "-"]
    assert cells[-1] == ["a_b|c & 5%", "70.0", "75.0", "37.5"]
    assert len(cells) == 1 + 6 + 1  # "elsewhere" has none of the columns
    assert markdown(cells).splitlines()[1:3] == [
        "| --- | ---: | ---: | ---: |",
        "| BERT-Base (original) | 66.4 | 84.8 | - |",
    ]
    assert markdown(cells).splitlines()[-1] == "| a_b\\|c & 5% | 70.0 | 75.0 | 37.5 |"
    assert r"a\_b|c \& 5\% & 70.0 & 75.0 & 37.5 \\" in latex(cells)
    assert latex(cells).startswith("\\begin{tabular}{lrrr}\n")
    assert list(csv.reader(io.StringIO(to_csv(cells)))) == cells


def test_all_settings():
    cells = all_settings(settings_of(RESULTS), COLUMNS)
    assert len(cells) == 1 + 2 + 2 * 2
    assert cells[2] == ["RTE", "16", "3e-05", "accuracy", "0.700000", "0.000000", "0.700000", "3", "0"]


def test_published_rows_are_those_of_the_announcement():
    large = {row.model: row.values for row in PUBLISHED}["BERT-Large (1-bit Adam)"]
    assert large["CoLA"] == 62.0
    assert all(set(row.values) <= set(TITLES) for row in PUBLISHED)


def test_rows_that_a_user_adds(tmp_path):
    path = tmp_path / "more.csv"
    path.write_text("\ufeffmodel,RTE,MRPC F1\nours before,70.5,-\nother,,90\n", encoding="utf-8")
    assert read_published(path, TITLES) == [TableRow("ours before", {"RTE": 70.5}), TableRow("other", {"MRPC F1": 90})]
    path.write_text("model,CoLA\nchance,-1.5\n")  # a correlation
    assert read_published(path, TITLES) == [TableRow("chance", {"CoLA": -1.5})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model,RTL\nx,1\n", r"more.csv has a column 'RTL'; did you mean 'RTE'\?"),
        (b"model,RTE,RTE\nx,1,2\n", r"more.csv has a column 'RTE' twice; expected each once"),
        (b"RTE\n1\n", r"more.csv has no column 'model', only RTE"),
        (b"", r"more.csv has no column 'model', only nothing"),
        (b"model,RTE\nx,1\ny,high\n", r"more.csv line 3: RTE is 'high'; expected a number in per cent"),
        (b"model,RTE\nx,7050\n", r"more.csv line 2: RTE is '7050'"),
        (b"model,RTE\n\xff,1\n", r"more.csv is not a CSV file"),
        (b"model,RTE\nx,1,2\n", r"more.csv line 2 has more cells than columns"),
        (b"model,RTE\n,1\n", r"more.csv line 2 names no model"),
    ],
)
def test_rows_that_cannot_be_added(tmp_path, content, message):
    path = tmp_path / "more.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_published(path, TITLES)


def test_predictions_by_the_names_that_the_server_expects():
    three = np.asarray([[0, 1, 0], [2, 1, 0], [0, 0, 3]], dtype=np.float32)
    assert predictions(TASKS["MNLI"], three) == ["neutral", "entailment", "contradiction"]
    assert predictions(TASKS["RTE"], three[:, :2]) == ["not_entailment", "entailment", "entailment"]
    for task in ("CoLA", "SST-2", "MRPC", "QQP", "WNLI"):
        assert predictions(TASKS[task], three[:2, :2]) == ["1", "0"]
    scores = np.asarray([[-0.5], [2.34567], [7.0], [np.nan]], dtype=np.float32)
    assert predictions(TASKS["STS-B"], scores) == ["0.000", "2.346", "5.000", "0.000"]


def test_files_of_a_submission(tmp_path):
    names = {split.submission for task in TASKS.values() for split in task.test}
    expected = "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm QNLI RTE WNLI AX"
    assert names == {f"{name}.tsv" for name in expected.split()}
    examples = [Example("0", "a", None, None), Example("1", "b", None, None)]
    write_submission(tmp_path / "submission" / "RTE.tsv", examples, ["entailment", "not_entailment"])
    text = (tmp_path / "submission" / "RTE.tsv").read_text()
    assert text == "index\tprediction\n0\tentailment\n1\tnot_entailment\n"
