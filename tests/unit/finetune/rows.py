"""Generated rows of every GLUE task, in the layouts in which GLUE is distributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron01.finetune.glue import TASKS

FIRST = ["the quick fox jumps .", 'a "lazy dog jumps home .', "seven boats sail home .", "the brown dog sails ."]
SECOND = ["a fox jumps .", "the dog sails .", "boats sail .", 'a fox sails "home" .']

HEADERS = {
    "RTE": ["index", "sentence1", "sentence2", "label"],
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "SST-2": ["sentence", "label"],
    "QNLI": ["index", "question", "sentence", "label"],
    "QQP": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "MNLI": ["index", "promptID", "genre", "sentence1_parse", "sentence1", "sentence2", "label1", "gold_label"],
    "STS-B": ["index", "genre", "old_index", "source1", "sentence1", "sentence2", "score"],
    "WNLI": ["index", "sentence1", "sentence2", "label"],
}
HUB_NAMES = {"CoLA": "cola", "SST-2": "sst2", "MRPC": "mrpc", "STS-B": "stsb", "QQP": "qqp", "MNLI": "mnli"}
HUB_NAMES |= {"QNLI": "qnli", "RTE": "rte", "WNLI": "wnli"}


def label_names(task: str) -> list[str]:
    """Four labels as the original files have them."""
    return [(list(TASKS[task].labels) * 4)[number] for number in range(4)] if TASKS[task].labels else SCORES


SCORES = ["0.000", "2.500", "5.000", "3.750"]


def labels(task: str) -> list[Any]:
    """The same labels as numbers."""
    if not TASKS[task].labels:
        return [float(score) for score in SCORES]
    return [TASKS[task].labels.index(name) for name in label_names(task)]


def _tsv_line(task: str, number: int, *, is_test: bool) -> dict[str, str]:
    known = {"index": str(number), "id": str(number), "genre": "letters"}
    known |= dict.fromkeys(("sentence1", "sentence", "question1", "question", "#1 String"), FIRST[number])
    known |= dict.fromkeys(("sentence2", "question2", "#2 String"), SECOND[number])
    if task == "QNLI":
        known["sentence"] = SECOND[number]
    if not is_test:
        known |= dict.fromkeys(("label", "gold_label", "score", "is_duplicate", "Quality"), label_names(task)[number])
    return known


def write_tsv(folder: Path, task: str) -> None:
    """The original layout, with the quirks of each task."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = ["train", *(split.names[0] for split in TASKS[task].dev)]
    for name in sets:
        lines = [_tsv_line(task, number, is_test=False) for number in range(4)]
        if task == "CoLA":
            text = "".join(
                f"src\t{line['label']}\t{'*' if line['label'] == '0' else ''}\t{line['sentence']}\n" for line in lines
            )
        else:
            text = _with_header(HEADERS[task], lines, mark=task == "MRPC")
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    for split in TASKS[task].test:
        if not split.is_optional:
            header = ["index", *(name for name in HEADERS.get(task, ["sentence"]) if name not in ("index", "id"))]
            header = [
                name for name in header if name not in ("label", "gold_label", "score", "is_duplicate", "Quality")
            ]
            lines = [_tsv_line(task, number, is_test=True) for number in range(4)]
            (folder / f"{split.names[0]}.tsv").write_text(_with_header(header, lines), encoding="utf-8")


def _with_header(header: list[str], lines: list[dict[str, str]], *, mark: bool = False) -> str:
    rows = ["\t".join(header), *("\t".join(line.get(name, "x") for name in header) for line in lines)]
    return ("\ufeff" if mark else "") + "\n".join(rows) + "\n"


def hub_rows(task: str, *, is_test: bool) -> list[dict[str, Any]]:
    """Rows as on the Hugging Face hub: numbers for labels, and -1 in test sets."""
    names = {"MNLI": ("premise", "hypothesis"), "QQP": ("question1", "question2"), "QNLI": ("question", "sentence")}
    first, second = names.get(task, ("sentence1", "sentence2") if TASKS[task].second else ("sentence", ""))
    rows = []
    for number, label in enumerate(labels(task)):
        row = {first: FIRST[number]} | ({second: SECOND[number]} if second else {})
        rows.append(row | {"label": -1 if is_test else label, "idx": number})
    return rows


def hub_sets(task: str) -> dict[str, list[dict[str, Any]]]:
    """All splits of a task by their names on the hub."""
    dev = [split.names[-1] for split in TASKS[task].dev]
    tests = [split.names[-1] for split in TASKS[task].test if not split.is_optional]
    return {name: hub_rows(task, is_test=name in tests) for name in ["train", *dev, *tests]}


def write_hub_layout(folder: Path, task: str, kind: str) -> None:
    """JSON lines, or Parquet as downloaded from the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in hub_sets(task).items():
        if kind == "jsonl":
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}-00000-of-00001.parquet")
