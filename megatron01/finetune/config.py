"""The settings of ``megatron01 glue`` and ``megatron01 squad``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from megatron01.convert.config import LoadConfig
from megatron01.errors import require, require_not_negative, require_positive

TaskName = Literal["RTE", "MRPC", "CoLA", "SST-2", "QNLI", "QQP", "MNLI", "STS-B", "WNLI"]

TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
"""The tasks of GLUE, in the order of the published tables."""

FROM_MNLI: tuple[TaskName, ...] = ("RTE", "MRPC", "STS-B")
"""The tasks that may start from a model of MNLI, as is usual for these small sets."""


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig(LoadConfig):
    """What a sweep tries, and how each of its runs trains: Adam, with a warm-up and then linear decay to 0."""

    output: Path
    """Folder of the sweep: one file for each finished run, and the tables. The same command goes on there."""
    name: str = ""
    """What the model is called in the table; its folder when not given."""
    batch_sizes: tuple[int, ...] = (8, 16, 32)
    """Batch sizes to try."""
    learning_rates: tuple[float, ...] = (1e-5, 3e-5, 5e-5, 8e-5)
    """Peak learning rates to try."""
    seeds: int = 10
    """Runs of each setting, with the seeds 0, 1, ...; the median over them counts."""
    epochs: float = 3.0
    """Passes over the training set."""
    warmup_fraction: float = 0.1
    """Share of the steps in which the learning rate grows from 0."""
    weight_decay: float = 0.01
    """Decoupled decay of all weights but biases and layer norms."""
    clip_grad: float = 1.0
    """Largest norm of the gradient; 0: no limit."""
    dropout: float | None = None
    """Dropout of activations and attention, in place of the model's own."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model; weights and optimizer are fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the runs train; auto: on all GPUs that are visible, if there are any."""
    jobs: int = 1
    """Runs at a time on each GPU, or on the CPU, whose cores they share."""
    eval_batch_size: int = 64
    """Examples that are evaluated together."""
    save_models: bool = False
    """At the end train the best run once more and keep its model, as a Hugging Face folder below models/."""
    report_only: bool = False
    """Train nothing; only show what is there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_sizes", "learning_rates"):
            values = getattr(self, name)
            require(len(values) > 0, f"{name} is empty; expected one or more")
            require(min(values) > 0, f"{name} holds {min(values)}; expected positive numbers")
            require(len(set(values)) == len(values), f"{name} holds a value twice; give each once")
        require_positive(self, "seeds", "jobs", "eval_batch_size", "epochs")
        require(0 <= self.warmup_fraction < 1, f"warmup_fraction is {self.warmup_fraction}; expected 0 to below 1")
        require_not_negative(self, "weight_decay", "clip_grad")
        require(
            self.dropout is None or 0 <= self.dropout < 1, f"dropout is {self.dropout}; expected 0 to below 1, or none"
        )
        for name in ("save_models", "submission"):
            require(
                not (self.report_only and getattr(self, name, False)),
                f"{name} is given with report_only, which trains nothing; leave one of them out",
            )


QUICK = {"batch_sizes": (16,), "learning_rates": (5e-5,), "seeds": 1, "epochs": 1.0}
"""What ``GlueConfig.quick`` puts in the place of defaults."""

QUICK_EXAMPLES, QUICK_DEV_EXAMPLES = 3200, 1000
"""Examples of a task that a quick run trains on at most, and evaluates of each development set: the first ones."""


@dataclass(frozen=True, kw_only=True)
class GlueConfig(FineTuneConfig):
    """Fine-tune a BERT on the tasks of GLUE."""

    input: str = field(metadata={"aliases": ("data", "data_dir")})
    """Folder with a folder for each task (TSV, JSON lines or Parquet), or a data set of the Hugging Face hub, such as
    nyu-mll/glue."""
    tasks: tuple[TaskName, ...] = TASK_NAMES
    """Which tasks."""
    max_length: int = 128
    """Tokens of an example; longer ones are truncated. Batches are padded to their own longest."""
    quick: bool = False
    """A first look: one run for each task, of one epoch over at most 3,200 examples, evaluated on at most 1,000, unless
    other values are given."""
    mnli_model: str | None = None
    """Model that RTE, MRPC and STS-B start from, with a new head: one that save_models wrote for MNLI."""
    submission: bool = False
    """At the end train the best run of each task once more and write its predictions for the test set, as the GLUE
    server takes them, below submission/."""
    published: Path | None = None
    """CSV file with more rows for the comparison: a column 'model', and columns named as in results.csv."""

    def __post_init__(self) -> None:
        if self.quick:
            for name, value in QUICK.items():
                if getattr(self, name) == getattr(GlueConfig, name):
                    object.__setattr__(self, name, value)
        super().__post_init__()
        require(len(self.tasks) > 0, "tasks is empty; expected one or more")
        require(len(set(self.tasks)) == len(self.tasks), "tasks holds a task twice; give each once")
        require(self.max_length >= 8, f"max_length is {self.max_length}; expected 8 or more")
        require(
            self.mnli_model is None or bool(set(FROM_MNLI) & set(self.tasks)),
            "mnli_model is given, but none of RTE, MRPC and STS-B is among the tasks; leave it out",
        )


@dataclass(frozen=True, kw_only=True)
class SquadConfig(FineTuneConfig):
    """Fine-tune a BERT on SQuAD 1.1."""

    train_file: Path
    """Training set, such as train-v1.1.json."""
    dev_file: Path
    """Development set, such as dev-v1.1.json."""
    batch_sizes: tuple[int, ...] = (32,)
    """Batch sizes to try."""
    learning_rates: tuple[float, ...] = (3e-5, 5e-5)
    """Peak learning rates to try."""
    seeds: int = 5
    """Runs of each setting, with the seeds 0, 1, ...; the median over them counts."""
    max_length: int = 384
    """Tokens of question and context together; a longer context is divided into windows."""
    doc_stride: int = 128
    """Tokens from the start of a window to that of the next."""
    max_query_length: int = 64
    """Tokens of a question; longer ones are truncated."""
    max_answer_length: int = 30
    """Tokens of an answer at most."""
    n_best: int = 20
    """Answers in the file of the n best for each question."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "doc_stride", "max_query_length", "max_answer_length", "n_best")
        require(
            self.max_length >= self.max_query_length + 16,
            f"max_length is {self.max_length}; expected 16 or more tokens beyond max_query_length"
            f" {self.max_query_length}",
        )
