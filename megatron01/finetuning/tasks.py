"""The nine tasks of GLUE: how their files name things, how they are scored, and what the server wants to get.

Source: Wang et al., "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding" (ICLR
2019), the files of its download, and the columns of the data set ``nyu-mll/glue``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron01.finetuning.config import TaskName

ENTAILMENT = ("entailment", "not_entailment")
INFERENCE = ("entailment", "neutral", "contradiction")
BINARY = ("0", "1")


@dataclass(frozen=True)
class Column:
    """A column of the table of results.

    Attributes:
        metric: its key in the result of a run.
        title: its head.
    """

    metric: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """One of the sets of a task that are evaluated or predicted.

    Attributes:
        names: of its file, without ending: those of the download first, then those of the hub.
        folders: names of its folder, in small letters, where it is not the task's; the last is its name on the hub.
        suffix: of its metrics' keys, as "_matched".
        submission: file of its predictions, for a test set.
        is_optional: whether it may be missing.
    """

    names: tuple[str, ...]
    folders: tuple[str, ...] = ()
    suffix: str = ""
    submission: str = ""
    is_optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task.

    Attributes:
        name: as the papers write it.
        folders: names of its folder, in small letters; the last is its name on the hub.
        first, second: columns of the sentences, with the names they have in different layouts; ``second`` is empty for
            single sentences.
        label: columns of the label, likewise.
        labels: names of the classes in the order of their numbers; empty for scores from 0 to 5.
        columns: of the results; the first decides which setting is best (accuracy where there is F1 too, as it is
            what the published tables show).
        dev, test: sets to evaluate and to predict.
        headless_tsv: column numbers by column name of training and development files that have no header.
        has_broken_rows: whether the original training file has rows that break off, which are left out.
    """

    name: TaskName
    folders: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    labels: tuple[str, ...] = BINARY
    columns: tuple[Column, ...]
    dev: tuple[Split, ...] = (Split(names=("dev", "validation")),)
    test: tuple[Split, ...]
    headless_tsv: dict[str, int] | None = None
    has_broken_rows: bool = False

    @property
    def is_regression(self) -> bool:
        return not self.labels

    @property
    def num_outputs(self) -> int:
        """Outputs of the head: one for each class, or the score alone."""
        return max(1, len(self.labels))


def _test(name: str) -> tuple[Split, ...]:
    return (Split(names=("test",), submission=f"{name}.tsv"),)


def _accuracy(name: str) -> tuple[Column, ...]:
    return (Column("accuracy", name),)


TASKS: dict[TaskName, Task] = {
    task.name: task
    for task in (
        Task(
            name="RTE",
            folders=("rte",),
            first=("sentence1", "premise"),
            second=("sentence2", "hypothesis"),
            labels=ENTAILMENT,
            columns=_accuracy("RTE"),
            test=_test("RTE"),
        ),
        Task(
            name="MRPC",
            folders=("mrpc",),
            first=("#1 String", "sentence1"),
            second=("#2 String", "sentence2"),
            label=("Quality", "label"),
            columns=(Column("accuracy", "MRPC"), Column("f1", "MRPC F1")),
            test=_test("MRPC"),
        ),
        Task(
            name="CoLA",
            folders=("cola",),
            first=("sentence",),
            columns=(Column("matthews", "CoLA"),),
            test=_test("CoLA"),
            headless_tsv={"label": 1, "sentence": 3},
        ),
        Task(
            name="SST-2",
            folders=("sst-2", "sst2"),
            first=("sentence",),
            columns=_accuracy("SST-2"),
            test=_test("SST-2"),
        ),
        Task(
            name="QNLI",
            folders=("qnli",),
            first=("question",),
            second=("sentence",),
            labels=ENTAILMENT,
            columns=_accuracy("QNLI"),
            test=_test("QNLI"),
        ),
        Task(
            name="QQP",
            folders=("qqp",),
            first=("question1",),
            second=("question2",),
            label=("is_duplicate", "label"),
            columns=(Column("accuracy", "QQP"), Column("f1", "QQP F1")),
            test=_test("QQP"),
            has_broken_rows=True,
        ),
        Task(
            name="MNLI",
            folders=("mnli",),
            first=("sentence1", "premise"),
            second=("sentence2", "hypothesis"),
            label=("gold_label", "label"),
            labels=INFERENCE,
            columns=(Column("accuracy_matched", "MNLI-m"), Column("accuracy_mismatched", "MNLI-mm")),
            dev=(
                Split(names=("dev_matched", "validation_matched"), suffix="_matched"),
                Split(names=("dev_mismatched", "validation_mismatched"), suffix="_mismatched"),
            ),
            test=(
                Split(names=("test_matched",), submission="MNLI-m.tsv"),
                Split(names=("test_mismatched",), submission="MNLI-mm.tsv"),
                Split(
                    names=("diagnostic", "test"), folders=("diagnostic", "ax"), submission="AX.tsv", is_optional=True
                ),
            ),
        ),
        Task(
            name="STS-B",
            folders=("sts-b", "stsb"),
            first=("sentence1",),
            second=("sentence2",),
            label=("score", "label"),
            labels=(),
            columns=(Column("spearman", "STS-B"), Column("pearson", "STS-B Pearson")),
            test=_test("STS-B"),
        ),
        Task(
            name="WNLI",
            folders=("wnli",),
            first=("sentence1",),
            second=("sentence2",),
            columns=_accuracy("WNLI"),
            test=_test("WNLI"),
        ),
    )
}

MAX_SCORE = 5.0
"""STS-B's scores go from 0 to this."""
