"""The settings of the commands beside ``pretrain``, ``plan`` and ``schedule``: models, text, machines, runs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from megatron01.config.data import TokenizerType
from megatron01.config.fields import Below1, Bounded, Bounds, Folder, NotNegative, Positive, UpTo1, ZeroIsOff
from megatron01.config.pretrain import Precision
from megatron01.errors import UserError, require


@dataclass(frozen=True, kw_only=True)
class OptionalTokenizer(Bounded):
    """A tokenizer that need not be given."""

    tokenizer_type: TokenizerType | None = None
    """In place of the model's own tokenizer, with the files below; not needed where those are found."""
    vocab_file: str = ""
    """vocab.txt for BertWordPiece..., vocab.json for GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt for GPT2BPETokenizer."""
    tokenizer_model: str | None = None
    """.model file for SentencePieceTokenizer; tokenizer.json, or a folder with one, for HuggingFaceTokenizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer_type is None and (self.vocab_file or self.merge_file or self.tokenizer_model):
            raise UserError(
                "files of a tokenizer are given, but not its type; give --tokenizer-type as well, such as"
                " GPT2BPETokenizer"
            )


@dataclass(frozen=True, kw_only=True)
class ModelFolder(Bounded):
    """A model."""

    load: Folder
    """Folder of the model: a checkpoint, a folder of them, a run's (--run-dir), one of Hugging Face, or one of
    Megatron-LM."""


@dataclass(frozen=True, kw_only=True)
class LoadConfig(OptionalTokenizer, ModelFolder):
    """A model, and its tokenizer where that is not with it."""


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(LoadConfig):
    """Convert a model between formats."""

    output: Folder = field(metadata={"aliases": ("save",)})
    """Folder to write; it must not exist."""
    to: Literal["auto", "huggingface", "megatron01"] = "auto"
    """Format to write; auto: huggingface for a checkpoint of megatron01, megatron01 for anything else."""
    dtype: Precision = "fp32"
    """huggingface: type of the weights in the files."""


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(LoadConfig):
    """A model, and how it is run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: on the GPU if there is one."""
    dtype: Precision = "fp32"
    """Type of weights and arithmetic."""
    batch_size: Positive[int] = 8
    """Sequences that are computed together."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    """Continue text with a GPT-2."""

    text: tuple[str, ...] | None = field(default=None, metadata={"aliases": ("prompt",)})
    """Texts to continue, each quoted."""
    input: Path | None = field(default=None, metadata={"aliases": ("prompt_file",)})
    """File with a text to continue in each line, or JSON lines with a key 'text' (.jsonl)."""
    interactive: bool = False
    """Read texts from standard input, line by line, and continue each at once."""
    output: Path | None = None
    """Write the results to this file as JSON lines, in place of printing them."""
    max_new_tokens: Positive[int] = 50
    """Tokens to add at most; the model's positions are a limit too."""
    num_samples: Positive[int] = 1
    """Continuations of each text."""
    greedy: bool = False
    """Always take the most likely token."""
    temperature: Annotated[float, Bounds(lambda value: value > 0, "a positive number, or give --greedy")] = 1.0
    """Logits are divided by it: below 1 likely tokens get more likely."""
    top_k: ZeroIsOff[int] = 0
    """Draw from this many of the most likely tokens; 0: from all."""
    top_p: UpTo1 = 1.0
    """Draw from the most likely tokens that make up this probability together."""
    seed: Annotated[int, Bounds(lambda value: 0 <= value < 2**63, "0 to 2**63 - 1")] = 1234
    """Seed of the random draws. Those of a text depend on nothing but it and the text's place among the texts."""
    stop_at_eod: bool = True
    """End a text where the model ends the document."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = [self.text is not None, self.input is not None, self.interactive]
        require(sum(sources) == 1, "expected one of --text, --input and --interactive")
        require(self.text is None or bool(self.text), "text is empty; expected one or more texts")
        require(
            not (self.interactive and self.output is not None),
            "output is given with interactive; leave one of them out",
        )
        if self.greedy:
            for name, idle in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("num_samples", 1)):
                require(
                    getattr(self, name) == idle, f"{name} is given with greedy, where it has no effect; leave one out"
                )


@dataclass(frozen=True, kw_only=True)
class FillMaskConfig(InferenceConfig):
    """Fill the [MASK] tokens of texts with a BERT."""

    text: tuple[str, ...] | None = field(default=None, metadata={"aliases": ("prompt",)})
    """Texts with [MASK] in them, each quoted; lines of standard input when not given."""
    top_k: Positive[int] = 5
    """Proposals for each mask."""
    json: bool = False
    """Print JSON lines."""


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(InferenceConfig):
    """How well a GPT-2 predicts held-out text."""

    input: str = field(metadata={"aliases": ("data",)})
    """A file of text (packed or not; .jsonl: a document in each line, under the key 'text'), or the prefix of a
    .bin/.idx pair."""
    window: Positive[int] | None = None
    """Tokens that the model sees at once; as many as it has positions when not given."""
    stride: Positive[int] | None = None
    """Tokens by which the window moves: each is predicted from at least window - stride tokens before it. Half the
    window when not given."""
    max_tokens: Positive[int] | None = None
    """Stop after about this many tokens."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.window is None or self.stride is None or self.stride <= self.window,
            f"stride {self.stride} is above window {self.window}, so tokens would be left out; lower it",
        )


TaskName = Literal["RTE", "MRPC", "CoLA", "SST-2", "QNLI", "QQP", "MNLI", "STS-B", "WNLI"]

TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)  # the tasks of GLUE, in the order of the published tables

FROM_MNLI: tuple[TaskName, ...] = ("RTE", "MRPC", "STS-B")
"""The tasks that may start from a model of MNLI, as is usual for these small sets."""


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig(LoadConfig):
    """What a sweep tries, and how each of its runs trains: Adam, with a warm-up and then linear decay to 0."""

    output: Path
    """Folder of the sweep: one file for each finished run, and the tables. The same command resumes there."""
    name: str = ""
    """What the model is called in the table; its folder when not given."""
    batch_sizes: tuple[int, ...] = (8, 16, 32)
    """Batch sizes to try."""
    learning_rates: tuple[float, ...] = (1e-5, 3e-5, 5e-5, 8e-5)
    """Peak learning rates to try."""
    seeds: Positive[int] = 10
    """Runs of each setting, with the seeds 0, 1, ...; the median over them counts."""
    epochs: Positive[float] = 3.0
    """Passes over the training set."""
    warmup_fraction: Below1 = 0.1
    """Share of the steps in which the learning rate grows from 0."""
    weight_decay: NotNegative[float] = 0.01
    """Decoupled decay of all weights but biases and layer norms."""
    clip_grad: NotNegative[float] = 1.0
    """Largest norm of the gradient; 0: no limit."""
    dropout: Below1 | None = None
    """Dropout of activations and attention, in place of the model's own."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model; weights and optimizer are fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the runs train; auto: on all GPUs that are visible, if there are any."""
    jobs: Positive[int] = 1
    """Runs at a time on each GPU, or on the CPU, whose cores they share."""
    eval_batch_size: Positive[int] = 64
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
        for name in ("save_models", "submission"):
            require(
                not (self.report_only and getattr(self, name, False)),
                f"{name} is given with report_only, which trains nothing; leave one of them out",
            )


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
    max_length: Annotated[int, Bounds(lambda value: value >= 8, "8 or more")] = 128
    """Tokens of an example; longer ones are truncated. Batches are padded to their own longest."""
    quick: bool = field(
        default=False,
        metadata={"implies": {"batch_sizes": (16,), "learning_rates": (5e-5,), "seeds": 1, "epochs": 1.0}},
    )
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
        super().__post_init__()
        require(len(self.tasks) > 0, "tasks is empty; expected one or more")
        require(len(set(self.tasks)) == len(self.tasks), "tasks holds a task twice; give each once")
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
    learning_rates: tuple[float, ...] = (3e-5, 5e-5)
    seeds: Positive[int] = 5
    max_length: int = 384
    """Tokens of question and context together; a longer context is divided into windows."""
    doc_stride: Positive[int] = 128
    """Tokens from the start of a window to that of the next."""
    max_query_length: Positive[int] = 64
    """Tokens of a question; longer ones are truncated."""
    max_answer_length: Positive[int] = 30
    """Tokens of an answer at most."""
    n_best: Positive[int] = 20
    """Answers in the file of the n best for each question."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_length >= self.max_query_length + 16,
            f"max_length is {self.max_length}; expected 16 or more tokens beyond max_query_length"
            f" {self.max_query_length}",
        )


def _check_prefix(output_prefix: str) -> None:
    if not output_prefix or output_prefix.endswith(os.sep):
        raise UserError(f"output_prefix is {output_prefix!r}; expected a folder and the start of a file name")


Lang = Literal["english", "lines"]
InputFormat = Literal["auto", "jsonl", "text", "parquet", "huggingface"]


@dataclass(frozen=True, kw_only=True)
class TextConfig(Bounded):
    """Text, and where what is made of it goes."""

    input: tuple[str, ...]
    """Files, folders or patterns ('data/*.jsonl.zst') of JSON lines, plain text with a blank line after each document,
    or Parquet, also compressed (.gz, .zst, .xz, .bz2); folders saved by Hugging Face datasets; - for standard input."""
    output_prefix: str = field(metadata={"aliases": ("output",)})
    """Path of the outputs, to which the key and "sentence" or "document" are added."""
    tokenizer_type: TokenizerType
    """How text is turned into tokens."""
    input_format: InputFormat = "auto"
    """What the input is; auto goes by names and first bytes. huggingface: names of data sets of the Hugging Face Hub,
    or anything else that datasets.load_dataset takes."""
    dataset_config: str | None = None
    """huggingface: which configuration of the data set."""
    dataset_split: str | None = None
    """huggingface: which split of the data set, such as train."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of each JSON object, or columns of each table, that hold text; each gives an output of its own."""
    max_document_mb: Positive[int] = 128
    """Leave out documents that are longer; every process may need some gigabytes for a hundred megabytes in one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.input), "input is empty; expected one or more files of text")
        _check_prefix(self.output_prefix)
        if not self.json_keys or len(set(self.json_keys)) < len(self.json_keys) or not all(self.json_keys):
            raise UserError(f"json_keys is {self.json_keys}; expected one or more different names")
        if any("/" in key or "\0" in key for key in self.json_keys):
            raise UserError(f"json_keys is {self.json_keys}; expected names that can be part of a file name")

    def written_files(self) -> re.Pattern[str]:
        """Matches the absolute paths of what preprocessing writes under this output_prefix and these keys."""
        keys = "|".join(map(re.escape, self.json_keys))
        pair = r"(?:bin|idx|json|(?:bin|idx|sizes|documents)\.partial|json\.[\da-f]+\.tmp)"
        run = r"(?:lock|progress\.json(?:\.[\da-f]+\.tmp)?)"
        level = "(?:sentence|document)"
        return re.compile(
            rf"{re.escape(os.path.abspath(self.output_prefix))}_(?:(?:{keys})_{level}\.{pair}|{level}\.{run})"
        )


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(TextConfig):
    """Turn text into the token files that training reads."""

    vocab_file: str = ""
    """vocab.txt for BertWordPiece..., vocab.json for GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt for GPT2BPETokenizer."""
    tokenizer_model: str | None = None
    """.model file for SentencePieceTokenizer; tokenizer.json, or a folder with one, for HuggingFaceTokenizer."""
    split_sentences: bool = False
    """Store one sequence per sentence, as BERT needs, instead of one per document."""
    lang: Lang = "english"
    """How sentences are found: english: by rules; lines: each line is one, for text that another program has split."""
    keep_newlines: bool = False
    """With split_sentences, leave the line breaks in and after sentences, which WordPiece ignores but others do not."""
    append_eod: bool = False
    """End each document with the end-of-document token, as GPT-2 needs."""
    workers: Positive[int] | None = None
    """Processes that tokenize; 1 works in the calling process. All cores, or 1 for little text, when not given."""
    partitions: Positive[int] | None = None
    """Ignored; accepted for Megatron-LM's command lines, as one pass of any number of workers writes one output."""
    log_interval: Positive[int] = 10000
    """Documents between two progress lines, where the output is no terminal."""
    checkpoint_seconds: NotNegative[float] = 20.0
    """Seconds between two records of progress, from which an interrupted run resumes; 0 records after each piece."""
    resume: bool = True
    """Go on where an interrupted run with the same output stopped; otherwise what it did is thrown away."""
    strict: bool = False
    """Stop at the first document that cannot be used, instead of skipping it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("lang", self.lang != "english"), ("keep_newlines", self.keep_newlines)):
            if value and not self.split_sentences:
                raise UserError(f"{name} is set without split_sentences, so it has no effect; give both or neither")

    @property
    def level(self) -> str:
        """What a sequence is."""
        return "sentence" if self.split_sentences else "document"

    def output(self, key: str) -> str:
        """The prefix of the pair that a key gives: the data_path of a training run."""
        return f"{self.output_prefix}_{key}_{self.level}"


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig(TextConfig):
    """Make a vocabulary from text."""

    output_prefix: str = field(metadata={"aliases": ("output",)})
    """Path of the vocabulary, to which -vocab.txt, -vocab.json and -merges.txt, -tokenizer.json or .model is added."""
    tokenizer_type: TokenizerType
    """For which type: WordPiece (BertWordPiece...), byte-level BPE (GPT2BPETokenizer, or HuggingFaceTokenizer as one
    tokenizer.json), or SentencePieceTokenizer."""
    vocab_size: Annotated[int, Bounds(lambda value: 0 < value <= 10**7, "a positive number, at most 10000000")] = 30522
    """Entries of the vocabulary, special tokens included; some fewer if the text does not hold as many."""
    alphabet_size: Positive[int] = 1000
    """WordPiece: most different characters; text with rarer ones becomes [UNK]."""
    sentencepiece_type: Literal["unigram", "bpe"] = "unigram"
    """SentencePiece: how text is cut."""
    sample: UpTo1 = 1.0
    """Share of the documents to learn from, taken evenly; some gigabytes of text are plenty."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of each JSON object, or columns of each table, that hold text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("alphabet_size", "WordPiece"), ("sentencepiece_type", "SentencePiece")):
            require(
                kind in self.tokenizer_type or getattr(self, name) == getattr(type(self), name),
                f"{name} is given, but {self.tokenizer_type} has none; leave it out",
            )


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(Bounded):
    """Check token files to the last byte."""

    input: tuple[str, ...]
    """Paths of .bin/.idx pairs, or folders of them; their extensions may stay, so that data/*.idx is such a list."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(all(self.input), "input holds an empty path; expected paths of .bin/.idx pairs")


@dataclass(frozen=True, kw_only=True)
class MergeConfig(VerifyConfig):
    """Make one pair of token files out of several."""

    input: tuple[str, ...]
    """Paths of .bin/.idx pairs, in the order in which their documents are to follow each other; their extensions may
    stay. All pairs of a folder, by name, where one is given."""
    output_prefix: str = field(metadata={"aliases": ("output",)})
    """Path of the new pair without extension."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_prefix(self.output_prefix)


@dataclass(frozen=True, kw_only=True)
class InspectConfig(OptionalTokenizer, VerifyConfig):
    """Show what token files hold."""

    documents: NotNegative[int] = 3
    """How many of the first documents are shown."""
    tokens: NotNegative[int] = 64
    """How many tokens of each of them are shown."""
    tokenizer_type: TokenizerType | None = None
    """The tokenizer with which the files were made, to show text instead of token ids."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Bounded):
    """Token files of the shipped corpus."""

    output: Folder = "data/prepared"
    """Folder for gpt_text_document.{bin,idx} (byte-level BPE of 5000 entries, documents end with <|endoftext|>) and
    bert_text_sentence.{bin,idx} (WordPiece of 5120 entries, one sequence per sentence)."""
    workers: int = 1
    """Processes that tokenize."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Bounded):
    """Checks of the machines of a job."""

    shared_folder: Path = Path()
    """A folder that all nodes must share: the run's folder, or its parent."""
    required_gigabytes: NotNegative[float] = 1.0
    """Free space in GB that shared_folder must have; a checkpoint takes up to 20 bytes per parameter and replica."""
    expected_gpus: NotNegative[int] | None = None
    """GPUs that every process must see at least; when not given, all nodes must have as many."""
    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library to measure; auto: nccl where every process has a GPU."""
    comm_backend: Literal["torch", "mpi"] = "torch"
    """Transport as in training; mpi measures the all-to-all over MPI."""
    megabytes: Positive[float] = 64.0
    """Largest message that is measured, per process; slower networks get smaller ones."""
    timeout_seconds: Annotated[
        float, Bounds(lambda value: 0 < value <= 86400, "a positive number, at most 86400 (a day)")
    ] = 120.0
    """Seconds for the processes to find each other, and for each exchange; the command as a whole ends after three
    times as long."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Bounded):
    """How runs are compared."""

    output: Path = Path("comparison")
    """Folder for index.html and the pictures; it is made."""
    title: str = "Runs side by side"
    """Heading of the page."""
    png: bool = True
    """Draw PNG files too. Charts need matplotlib: without it, --no-png writes a page of tables."""
    baseline: str | None = None
    """Group that losses and speed-ups are relative to, by its label's beginning; Adam or 1-bit Adam if not given."""
    target_loss: float | None = None
    """Loss that speed-ups are about; the lowest that all runs reach if not given."""
    smoothing: Positive[int] | None = None
    """Lines of metrics that a training loss is averaged over; a fortieth of the run if not given."""
    freeze_step: Positive[int] | None = None
    """Full steps of the 1-bit Adam that traffic is compared with where none of the runs is one."""
    wandb: bool = False
    """Put the comparison on wandb: the runs that are not there yet, the table and the curves, and a report."""
    wandb_project: str | None = None
    """Project of the comparison; that of the runs if not given."""
    wandb_entity: str | None = None
    """User or team of that project; your default one if not given."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline writes folders that 'wandb sync' accepts; a report needs online."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("wandb_project", "wandb_entity", "wandb_mode"):
            is_given = getattr(self, name) != getattr(type(self), name)
            require(self.wandb or not is_given, f"{name} is given, but not --wandb")


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Bounded):
    """How a run is followed."""

    once: bool = False
    """Show the present state and end."""
    interval: Annotated[float, Bounds(lambda value: 0.05 <= value <= 3600, "seconds between 0.05 and 3600")] = 1.0
    """Seconds between two looks at the run's files."""
