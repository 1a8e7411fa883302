"""The settings of ``megatron01 preprocess``, and those that it shares with ``megatron01 train-tokenizer``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Literal

from megatron01.config import TokenizerType
from megatron01.data.preprocessing.sentences import Lang
from megatron01.errors import UserError, require, require_not_negative, require_positive

InputFormat = Literal["auto", "jsonl", "text", "parquet", "huggingface"]


@dataclass(frozen=True, kw_only=True)
class TextConfig:
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
    max_document_mb: int = 128
    """Leave out documents that are longer; every process may need some gigabytes for a hundred megabytes in one."""

    def __post_init__(self) -> None:
        require(bool(self.input), "input is empty; expected one or more files of text")
        if not self.output_prefix or self.output_prefix.endswith(os.sep):
            raise UserError(f"output_prefix is {self.output_prefix!r}; expected a folder and the start of a file name")
        if not self.json_keys or len(set(self.json_keys)) < len(self.json_keys) or not all(self.json_keys):
            raise UserError(f"json_keys is {self.json_keys}; expected one or more different names")
        if any("/" in key or "\0" in key for key in self.json_keys):
            raise UserError(f"json_keys is {self.json_keys}; expected names that can be part of a file name")
        require_positive(self, "max_document_mb")

    def written_files(self) -> re.Pattern[str]:
        """Matches the absolute paths of what preprocessing writes under this output_prefix and these keys."""
        keys = "|".join(map(re.escape, self.json_keys))
        pair = r"(?:bin|idx|json|(?:bin|idx|sizes|documents)\.partial|json\.\d+\.tmp)"
        run = r"(?:lock|progress\.json(?:\.\d+\.tmp)?)"
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
    """How sentences are found: english by rules; lines takes each line of a text for one, for text in other languages
    that another program has cut."""
    keep_newlines: bool = False
    """With split_sentences, leave the line breaks in and after sentences, which WordPiece ignores but others do not."""
    append_eod: bool = False
    """End each document with the end-of-document token, as GPT-2 needs."""
    workers: int | None = None
    """Processes that tokenize; 1 works in the calling process. All cores, or 1 for little text, when not given."""
    partitions: int | None = None
    """Without effect, for command lines made for Megatron-LM: one pass of any number of workers writes one output."""
    log_interval: int = 10000
    """Documents between two progress lines, where the output is no terminal."""
    checkpoint_seconds: float = 20.0
    """Seconds between two records of progress, from which an interrupted run goes on; 0 records after each piece."""
    resume: bool = True
    """Go on where an interrupted run with the same output stopped; otherwise what it did is thrown away."""
    strict: bool = False
    """Stop at the first document that cannot be used instead of leaving it out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "workers", "partitions", "log_interval")
        require_not_negative(self, "checkpoint_seconds")
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
