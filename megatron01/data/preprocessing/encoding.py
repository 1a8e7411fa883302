"""From a chunk of raw documents to token ids: what each worker process of preprocessing does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron01.data.indexed.dataset import token_dtype
from megatron01.data.preprocessing.corpus import Chunk
from megatron01.data.preprocessing.documents import decode_chunk
from megatron01.data.preprocessing.sentences import Lang, split_sentences
from megatron01.data.preprocessing.word_cache import WordCache
from megatron01.data.tokenization.build import TokenizerSettings, build_tokenizer
from megatron01.data.tokenization.tokenizer import Tokenizer


class EncodingSettings(TokenizerSettings, Protocol):
    """The settings that decide into which tokens a document is turned."""

    def __hash__(self) -> int: ...

    @property
    def json_keys(self) -> tuple[str, ...]: ...
    @property
    def split_sentences(self) -> bool: ...
    @property
    def lang(self) -> Lang: ...
    @property
    def keep_newlines(self) -> bool: ...
    @property
    def append_eod(self) -> bool: ...
    @property
    def max_document_mb(self) -> int: ...


@dataclass(frozen=True)
class EncodedDocuments:
    """Whole documents, ready to be written.

    Attributes:
        tokens: all token ids, one sequence after the other.
        sizes: int32, tokens in each sequence.
        sentences: int32, sequences in each document.
        num_unknown: tokens that stand for what the vocabulary lacks.
    """

    tokens: NDArray[np.integer]
    sizes: NDArray[np.int32]
    sentences: NDArray[np.int32]
    num_unknown: int


@dataclass(frozen=True)
class Rejection:
    """A document that was left out.

    Attributes:
        reason: why.
        source: the file it is in.
        line: the line on which it begins, or its row; from 0 within the chunk, or from 1 within the source.
    """

    reason: str
    source: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True)
class EncodedChunk:
    """The documents of a chunk for each JSON key, and those left out.

    Attributes:
        by_key: the same documents for each key.
        rejections: in the order of the input, with lines counted from 0 within the chunk.
        num_lines: lines, or rows, of the chunk.
        num_bytes: bytes of the chunk.
    """

    by_key: dict[str, EncodedDocuments]
    rejections: list[Rejection]
    num_lines: int
    num_bytes: int


@lru_cache(maxsize=1)
def cached_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """The tokenizer of these settings, built once in each process."""
    return build_tokenizer(settings)


@lru_cache(maxsize=1)
def cached_words(settings: EncodingSettings) -> WordCache:
    """What this process knows of the words of the text."""
    tokenizer = cached_tokenizer(settings)
    return WordCache(tokenizer, settings.tokenizer_type, token_dtype(tokenizer.vocab_size))


def encode_chunk(settings: EncodingSettings, chunk: Chunk) -> EncodedChunk:
    """Decode, cut and tokenize the documents of a chunk.

    A document is left out whole, for all keys, if any of its texts is missing or has no tokens, so that document k is
    the same in every output.
    """
    tokenizer = cached_tokenizer(settings)
    decoded = decode_chunk(chunk, settings.json_keys, settings.max_document_mb)
    columns = [
        _encode(settings, tokenizer, [texts[number] for _, texts in decoded.documents])
        for number in range(len(settings.json_keys))
    ]
    kept = np.ones(len(decoded.documents), dtype=np.bool_)
    for column in columns:
        kept &= np.bincount(column.documents, column.sizes, minlength=kept.size) > 0
    empty = [(decoded.documents[index][0], "empty document") for index in np.flatnonzero(~kept)]
    rejected = sorted(decoded.rejected + empty)
    return EncodedChunk(
        by_key={key: column.select(kept) for key, column in zip(settings.json_keys, columns, strict=True)},
        rejections=[Rejection(reason, chunk.source, line) for line, reason in rejected],
        num_lines=decoded.num_lines,
        num_bytes=len(chunk.data),
    )


@dataclass(frozen=True)
class _Column:
    """The encoded texts of one key.

    Attributes:
        tokens: all token ids, one sequence after the other.
        sizes: int64, tokens in each sequence, 0 for some.
        documents: int64, number of the document of each sequence.
        unknown, eod: ids of the token for what the vocabulary lacks, and of one to end each document with.
    """

    tokens: NDArray[np.integer]
    sizes: NDArray[np.int64]
    documents: NDArray[np.int64]
    unknown: int | None
    eod: int | None

    def select(self, kept: NDArray[np.bool_]) -> EncodedDocuments:
        """The documents that are kept, without empty sequences."""
        kept_sequences = kept[self.documents] & (self.sizes > 0)
        tokens = self.tokens if kept_sequences.all() else self.tokens[np.repeat(kept_sequences, self.sizes)]
        sizes = self.sizes[kept_sequences]
        sentences = np.bincount(self.documents[kept_sequences], minlength=kept.size)[kept]
        num_unknown = 0 if self.unknown is None else np.count_nonzero(tokens == self.unknown)
        if self.eod is not None:
            last = np.cumsum(sentences) - 1
            tokens = np.insert(tokens, np.cumsum(sizes)[last], self.eod)
            sizes[last] += 1
        return EncodedDocuments(tokens, sizes.astype(np.int32), sentences.astype(np.int32), int(num_unknown))


def _encode(settings: EncodingSettings, tokenizer: Tokenizer, texts: Sequence[str]) -> _Column:
    """One text a document, cut into sentences if that is wanted."""
    if settings.split_sentences:
        cut = [split_sentences(text, lang=settings.lang, keep_newlines=settings.keep_newlines) for text in texts]
        documents = np.repeat(np.arange(len(texts)), [len(sentences) for sentences in cut])
        sequences: Sequence[str] = list(chain.from_iterable(cut))
    else:
        documents = np.arange(len(texts))
        sequences = texts
    tokens, sizes = cached_words(settings).encode(sequences)
    eod = tokenizer.eod if settings.append_eod else None
    return _Column(tokens, sizes, documents, tokenizer.unknown, eod)
