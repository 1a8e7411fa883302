"""The command ``megatron01 train-tokenizer``: train a vocabulary, in a format that every command reads, on a corpus."""

from __future__ import annotations

import io
import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers, trainers

from megatron01.config import DataConfig
from megatron01.config.commands import TrainTokenizerConfig
from megatron01.data.preprocessing.corpus import Position, read_chunks
from megatron01.data.preprocessing.encoding import decode_chunk
from megatron01.data.preprocessing.inputs import resolve_inputs
from megatron01.data.tokenizers import (
    BERT_SPECIAL_TOKENS,
    CONTINUATION,
    END_OF_DOCUMENT,
    TOKENIZERS,
    build_tokenizer,
    byte_level_backend,
    wordpiece_backend,
)
from megatron01.errors import UserError, import_optional
from megatron01.utils.files import write_atomically, writing

_MEGABYTES_PER_LINE = 200  # (million characters) of text between two lines of progress


def train_tokenizer(config: TrainTokenizerConfig) -> list[Path]:
    """Train a vocabulary and write its files; returns their paths.

    Counts, and the flags to use the vocabulary with, go to standard error. Raises UserError if an input cannot be read,
    holds no usable text or too little for the size, or if a file of the vocabulary exists already.
    """
    kind, size = config.tokenizer_type, config.vocab_size
    files = {name: Path(config.output_prefix + file.ending) for name, file in TOKENIZERS[kind].files.items()}
    for path in files.values():
        if path.exists():
            raise UserError(f"{path} exists, and text may have been encoded with it; choose another output_prefix")
    folder = Path(config.output_prefix).parent
    with writing(folder, "check output_prefix"):  # text is read for long before the files are written
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    texts = _Texts(config)
    if kind in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        if any(path == "-" or Path(path).is_fifo() for path in config.input):
            raise UserError("the text for WordPiece is read twice, which a pipe cannot be; write it to a file")
        lower_case = kind == "BertWordPieceLowerCase"
        contents = [train_wordpiece(texts.read, size, config.alphabet_size, lower_case=lower_case)]
    elif kind == "GPT2BPETokenizer":
        contents = train_byte_level_bpe(texts.read(), size)
    elif kind == "HuggingFaceTokenizer":
        contents = [_byte_level(texts.read(), size).to_str(pretty=True).encode()]
    else:
        contents = [train_sentencepiece(texts.read(), size, config.sentencepiece_type)]
    with writing(config.output_prefix, "check output_prefix"):
        for path, content in zip(files.values(), contents, strict=True):
            write_atomically(path, content)
    settings: dict[str, Any] = {name: str(path) for name, path in files.items()}
    tokenizer = build_tokenizer(DataConfig(tokenizer_type=kind, **settings))  # as a run would load it
    _log(f"{tokenizer.vocab_size} entries from {texts.num_documents} documents, {texts.num_characters} characters")
    if tokenizer.vocab_size < config.vocab_size:
        _log(f"note: the text does not hold the {config.vocab_size} entries of vocab_size")
    for reason, count in texts.left_out.most_common():
        _log(f"left out {count} documents ({reason})")
    flags = [f"--{name.replace('_', '-')} {shlex.quote(str(path))}" for name, path in files.items()]
    _log(" ".join(["use it with: --tokenizer-type", kind, *flags]))
    return list(files.values())


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Texts:
    """The texts of the input, which can be read several times, and counts of the last reading."""

    def __init__(self, config: TrainTokenizerConfig) -> None:
        self._config = config
        self.num_documents = self.num_characters = 0
        self.left_out: Counter[str] = Counter()  # number of unusable documents by reason

    def read(self) -> Iterator[str]:
        """The texts. Raises UserError if there is none, or an input cannot be read."""
        config = self._config
        self.num_documents = self.num_characters = 0
        self.left_out = Counter()
        number = 0
        next_line = _MEGABYTES_PER_LINE
        for chunk in read_chunks(resolve_inputs(config), Position()):
            decoded = decode_chunk(chunk, config.json_keys, config.max_document_mb)
            self.left_out.update(reason for _, reason in decoded.rejected)
            for _, texts in decoded.documents:
                number += 1
                if int(number * config.sample) == int((number - 1) * config.sample):
                    continue
                yield from texts
                self.num_documents += 1
                self.num_characters += sum(map(len, texts))
                if self.num_characters >= next_line * 1_000_000:
                    _log(f"{self.num_documents} documents, {self.num_characters // 1_000_000} million characters")
                    next_line += _MEGABYTES_PER_LINE
        if not self.num_documents:
            inputs = ", ".join(config.input)
            if number:
                raise UserError(f"sample {config.sample} takes none of the {number} documents in {inputs}; raise it")
            reasons = ", ".join(f"{count} ({reason})" for reason, count in self.left_out.most_common())
            raise UserError(f"no usable document in {inputs}; left out: {reasons or 'none'}")


# Training is deterministic, the same text gives the same bytes: where the libraries' trainers depend on hash order or
# on the number of threads, these are fixed here.

_SENTENCEPIECE_THREADS = 4  # fixed, as sums depend on the number of threads
_LONGEST_LINE = 1 << 24  # bytes; SentencePiece's trainer skips longer lines


def train_wordpiece(
    read: Callable[[], Iterable[str]], vocab_size: int, alphabet_size: int, *, lower_case: bool
) -> bytes:
    """Train WordPiece; returns a vocab.txt: special tokens, characters, characters with ##, merged pieces.

    ``read`` is called twice. Characters rarer than the ``alphabet_size`` most frequent ones become [UNK].
    """
    backend = wordpiece_backend(
        {token: index for index, token in enumerate(BERT_SPECIAL_TOKENS)}, lower_case=lower_case
    )
    alphabet = _alphabet(backend, read(), alphabet_size)
    inner = [CONTINUATION + character for character in alphabet if _continues_a_word(backend, character)]
    base = [*BERT_SPECIAL_TOKENS, *alphabet, *inner]
    _check_size(vocab_size, len(base), "special tokens and characters; or lower alphabet_size")
    # The trainer assigns ids to characters within words in hash order, and of two equally frequent pairs merges the one
    # with lower ids. Entries that are given beforehand have fixed ids.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*BERT_SPECIAL_TOKENS, *inner],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(read(), trainer)
    known = set(base)
    entries = base + [entry for entry in _entries(backend) if entry not in known]
    return "".join(f"{entry}\n" for entry in entries).encode()


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> list[bytes]:
    """Train byte-level BPE; returns GPT-2's vocab.json and merges.txt, with <|endoftext|> as the last entry."""
    backend = _byte_level(texts, vocab_size)
    entries = [entry for entry in _entries(backend) if entry != END_OF_DOCUMENT]
    vocabulary = {entry: index for index, entry in enumerate([*entries, END_OF_DOCUMENT])}
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    lines = "".join(f"{line}\n" for line in ["#version: 0.2", *merges])
    return [json.dumps(vocabulary, ensure_ascii=False).encode(), lines.encode()]


def train_sentencepiece(texts: Iterable[str], vocab_size: int, model_type: Literal["unigram", "bpe"]) -> bytes:
    """Train SentencePiece; returns a .model with <pad>, <unk>, <s>, </s>, [CLS], [SEP], [MASK], for GPT-2 and BERT."""
    sentencepiece = import_optional("sentencepiece", "SentencePieceTokenizer")
    model = io.BytesIO()
    errors: list[UserError] = []  # some versions of the library swallow what an iterator raises

    def lines() -> Iterator[str]:
        try:
            for text in texts:
                yield from filter(None, text.splitlines())
        except UserError as error:
            errors.append(error)

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # less text gives fewer entries, as with the other kinds
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            max_sentence_length=_LONGEST_LINE,
            num_threads=_SENTENCEPIECE_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or "the trainer gives no reason"
        errors.append(UserError(f"SentencePiece cannot make {vocab_size} entries of this text: {reason}"))
    if errors:
        raise errors[0]
    return model.getvalue()


def _alphabet(backend: Backend, texts: Iterable[str], size: int) -> list[str]:
    """The ``size`` most frequent characters of the words, in descending order; ties by code point."""
    written: Counter[str] = Counter()
    for text in texts:
        written.update(text)
    counts: Counter[str] = Counter()
    for character, count in written.items():  # the normalizer takes each alone
        for normalized in backend.normalizer.normalize_str(character):
            counts[normalized] += count
    frequent = sorted(counts, key=lambda character: (-counts[character], character))
    return [character for character in frequent if not character.isspace()][:size]


def _continues_a_word(backend: Backend, character: str) -> bool:
    """True if a character can follow another one in a word; punctuation, for instance, is always a separate word."""
    return len(backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(f"a{character}"))) == 1


def _byte_level(texts: Iterable[str], vocab_size: int) -> Backend:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_size(vocab_size, len(alphabet) + 1, "bytes and the end of a document")
    backend = byte_level_backend({}, [])
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _check_size(vocab_size: int, needed: int, what: str) -> None:
    if vocab_size < needed:
        raise UserError(f"vocab_size is {vocab_size}; expected {needed} or more, for that many {what}")


def _entries(backend: Backend) -> list[str]:
    """The vocabulary in the order of its ids."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return sorted(vocabulary, key=vocabulary.__getitem__)
