"""The command ``megatron01 train-tokenizer``: from a corpus of one's own to a vocabulary that every command reads."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron01.config import TokenizerType
from megatron01.data.preprocessing.config import InputFormat, PreprocessConfig
from megatron01.errors import UserError
from megatron01.files import write_atomically

_MEGABYTES_PER_LINE = 200  # of text between two lines on how far reading is


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig:
    """Make a vocabulary from text."""

    input: tuple[str, ...]
    """Text in any form that the command preprocess reads."""
    output_prefix: str
    """Path of the vocabulary, to which -vocab.txt, -vocab.json and -merges.txt, -tokenizer.json or .model is added."""
    tokenizer_type: TokenizerType
    """For which type: WordPiece (BertWordPiece...), byte-level BPE (GPT2BPETokenizer, or HuggingFaceTokenizer as one
    tokenizer.json), or SentencePieceTokenizer."""
    vocab_size: int = 30522
    """Entries of the vocabulary, special tokens included; some fewer if the text does not hold as many."""
    alphabet_size: int = 1000
    """WordPiece: most different characters; text with rarer ones becomes [UNK]."""
    sentencepiece_type: Literal["unigram", "bpe"] = "unigram"
    """SentencePiece: how text is cut."""
    sample: float = 1.0
    """Share of the documents to learn from, taken evenly; some gigabytes of text are plenty."""
    input_format: InputFormat = "auto"
    """What the input is; as for preprocess."""
    dataset_config: str | None = None
    """huggingface: which configuration of the data set."""
    dataset_split: str | None = None
    """huggingface: which part of the data set, such as train."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of each JSON object, or columns of each table, that hold text."""
    max_document_mb: int = 128
    """Leave out documents that are longer."""

    def __post_init__(self) -> None:
        if not self.output_prefix or self.output_prefix.endswith(os.sep):
            raise UserError(f"output_prefix is {self.output_prefix!r}; expected a folder and the start of a file name")
        for name in ("vocab_size", "alphabet_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if not 0 < self.sample <= 1:
            raise UserError(f"sample is {self.sample}; expected a share above 0 and up to 1")
        self.text_settings()

    def text_settings(self) -> PreprocessConfig:
        """How the text is read: as by preprocess with the same settings.

        Raises:
            UserError: if they contradict each other.
        """
        shared = ("input", "input_format", "dataset_config", "dataset_split", "json_keys", "max_document_mb")
        return PreprocessConfig(
            output_prefix=self.output_prefix,
            tokenizer_type=self.tokenizer_type,
            **{name: getattr(self, name) for name in shared},
        )


def train_tokenizer(config: TrainTokenizerConfig) -> list[Path]:
    """Make the vocabulary's files; what was read and the flags to use it with go to standard error.

    Returns:
        The files.

    Raises:
        UserError: if an input cannot be read, holds no usable text or too little for the size, or if a file of the
            vocabulary is there already.
    """
    from megatron01.data.tokenization import trainers

    files = [Path(config.output_prefix + ending) for ending in _ENDINGS[config.tokenizer_type]]
    for path in files:
        if path.exists():
            raise UserError(f"{path} exists, and text may have been encoded with it; choose another output_prefix")
    _make_folder(files[0].parent)
    texts = _Texts(config)
    kind, size = config.tokenizer_type, config.vocab_size
    if kind in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        if "-" in config.input:
            raise UserError("the text for WordPiece is read twice, which standard input cannot be; write it to a file")
        contents = trainers.train_wordpiece(
            texts.read, vocab_size=size, alphabet_size=config.alphabet_size, lower_case=kind == "BertWordPieceLowerCase"
        )
    elif kind == "GPT2BPETokenizer":
        contents = trainers.train_byte_level_bpe(texts.read, vocab_size=size)
    elif kind == "HuggingFaceTokenizer":
        contents = trainers.train_tokenizer_json(texts.read, vocab_size=size)
    else:
        contents = trainers.train_sentencepiece(texts.read, vocab_size=size, model_type=config.sentencepiece_type)
    try:
        for path, content in zip(files, (contents[ending] for ending in _ENDINGS[kind]), strict=True):
            write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; check output_prefix") from error
    _report(config, files, texts)
    return files


def _make_folder(folder: Path) -> None:
    """Before the text is read, which may take long.

    Raises:
        UserError: if nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; check output_prefix") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {folder}: permission denied; check output_prefix")


class _Texts:
    """The texts of the input, as often as they are wanted.

    Attributes:
        num_documents, num_characters: what was given out the last time.
        left_out: number of unusable documents by reason, the last time.
    """

    def __init__(self, config: TrainTokenizerConfig) -> None:
        self._config = config
        self.num_documents = self.num_characters = 0
        self.left_out: Counter[str] = Counter()

    def read(self) -> Iterator[str]:
        """The texts.

        Raises:
            UserError: if there is none, or an input cannot be read.
        """
        self.num_documents = self.num_characters = 0
        self.left_out = Counter()
        number = 0
        next_line = _MEGABYTES_PER_LINE
        for texts in self._documents():
            number += 1
            if int(number * self._config.sample) == int((number - 1) * self._config.sample):
                continue
            yield from texts
            self.num_documents += 1
            self.num_characters += sum(map(len, texts))
            if self.num_characters >= next_line * 1_000_000:
                _say(f"{self.num_documents} documents, {self.num_characters // 1_000_000} million characters")
                next_line += _MEGABYTES_PER_LINE
        if not self.num_documents:
            inputs = ", ".join(self._config.input)
            if number:
                raise UserError(
                    f"sample {self._config.sample} takes none of the {number} documents in {inputs}; raise it"
                )
            reasons = ", ".join(f"{count} ({reason})" for reason, count in self.left_out.most_common())
            raise UserError(f"no usable document in {inputs}; left out: {reasons or 'none'}")

    def _documents(self) -> Iterator[tuple[str, ...]]:
        """The texts of each document, one for each key, read as preprocessing reads them."""
        from megatron01.data.preprocessing.corpus import Position, read_chunks
        from megatron01.data.preprocessing.documents import decode_chunk
        from megatron01.data.preprocessing.inputs import resolve_inputs

        settings = self._config.text_settings()
        for chunk in read_chunks(resolve_inputs(settings), Position()):
            decoded = decode_chunk(chunk, settings.json_keys, settings.max_document_mb)
            self.left_out.update(reason for _, reason in decoded.rejected)
            yield from (texts for _, texts in decoded.documents)


_ENDINGS: dict[TokenizerType, tuple[str, ...]] = {
    "BertWordPieceLowerCase": ("-vocab.txt",),
    "BertWordPieceCase": ("-vocab.txt",),
    "GPT2BPETokenizer": ("-vocab.json", "-merges.txt"),
    "HuggingFaceTokenizer": ("-tokenizer.json",),
    "SentencePieceTokenizer": (".model",),
}
_FLAGS = {
    "-vocab.txt": "--vocab-file",
    "-vocab.json": "--vocab-file",
    "-merges.txt": "--merge-file",
    "-tokenizer.json": "--tokenizer-model",
    ".model": "--tokenizer-model",
}


def _report(config: TrainTokenizerConfig, files: list[Path], texts: _Texts) -> None:
    """Say what was made; the vocabulary is loaded as a run would load it."""
    from megatron01.data.tokenization.build import build_tokenizer

    chosen = {_FLAGS[ending]: str(path) for ending, path in zip(_ENDINGS[config.tokenizer_type], files, strict=True)}
    tokenizer = build_tokenizer(
        replace(
            config.text_settings(),
            vocab_file=chosen.get("--vocab-file", ""),
            merge_file=chosen.get("--merge-file"),
            tokenizer_model=chosen.get("--tokenizer-model"),
        )
    )
    _say(f"{tokenizer.vocab_size} entries from {texts.num_documents} documents, {texts.num_characters} characters")
    if tokenizer.vocab_size < config.vocab_size:
        _say(f"note: the text does not hold the {config.vocab_size} entries of vocab_size")
    for reason, count in texts.left_out.most_common():
        _say(f"left out {count} documents ({reason})")
    _say(" ".join(["use it with: --tokenizer-type", config.tokenizer_type, *(f"{f} {p}" for f, p in chosen.items())]))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
