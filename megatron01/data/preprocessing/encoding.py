"""From a chunk of raw documents to token ids: what each worker process of preprocessing does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron01.data.indexed.dataset import token_dtype
from megatron01.data.preprocessing.corpus import Chunk
from megatron01.data.preprocessing.sentences import split_sentences
from megatron01.data.tokenization.tokenizer import BertTokenizer, GPT2Tokenizer, TokenizerSettings, build_tokenizer


class EncodingSettings(TokenizerSettings, Protocol):
    """The settings that decide into which tokens a document is turned."""

    def __hash__(self) -> int: ...

    @property
    def json_keys(self) -> tuple[str, ...]: ...
    @property
    def split_sentences(self) -> bool: ...
    @property
    def append_eod(self) -> bool: ...


@dataclass(frozen=True)
class EncodedDocuments:
    """Whole documents, ready to be written.

    Attributes:
        tokens: all token ids, one sequence after the other.
        sizes: int32, tokens in each sequence.
        sentences: int32, sequences in each document.
    """

    tokens: NDArray[np.integer]
    sizes: NDArray[np.int32]
    sentences: NDArray[np.int32]


@dataclass(frozen=True)
class Rejection:
    """A document that was left out."""

    reason: str
    source: str
    line_number: int


@dataclass(frozen=True)
class EncodedChunk:
    """The documents of a chunk for each JSON key, and those left out."""

    by_key: dict[str, EncodedDocuments]
    rejections: list[Rejection]
    num_bytes: int


class _Rejected(Exception):
    """The reason for which a document is left out."""


@lru_cache(maxsize=1)
def cached_tokenizer(settings: TokenizerSettings) -> BertTokenizer | GPT2Tokenizer:
    """The tokenizer of these settings, built once in each process."""
    return build_tokenizer(settings)


def encode_chunk(settings: EncodingSettings, chunk: Chunk) -> EncodedChunk:
    """Decode, cut and tokenize the documents of a chunk.

    A document is left out whole, for all keys, if any of its texts is missing or has no tokens, so that document k is
    the same in every output.
    """
    tokenizer = cached_tokenizer(settings)
    keys = settings.json_keys
    rejections: list[Rejection] = []
    documents: list[tuple[int, list[list[str]]]] = []  # line number; for each key its sentences
    for number, raw in zip(chunk.line_numbers, chunk.documents, strict=True):
        try:
            texts = _read_document(raw, chunk.format, keys)
        except _Rejected as reason:
            rejections.append(Rejection(str(reason), chunk.source, number))
            continue
        documents.append((number, [split_sentences(text) if settings.split_sentences else [text] for text in texts]))

    # One call for everything: the tokenizer's cost per call is that of some words.
    encoded = iter(tokenizer.encode_batch([text for _, by_key in documents for texts in by_key for text in texts]))
    kept: dict[str, list[list[list[int]]]] = {key: [] for key in keys}
    for number, by_key in documents:
        sequences = [[ids for ids in (next(encoded) for _ in texts) if ids] for texts in by_key]
        if not all(sequences):
            rejections.append(Rejection("empty document", chunk.source, number))
            continue
        for key, document in zip(keys, sequences, strict=True):
            if settings.append_eod:
                assert isinstance(tokenizer, GPT2Tokenizer)
                document[-1].append(tokenizer.eod)
            kept[key].append(document)
    rejections.sort(key=lambda rejection: rejection.line_number)
    dtype = token_dtype(tokenizer.vocab_size)
    return EncodedChunk({key: _flatten(kept[key], dtype) for key in keys}, rejections, chunk.num_bytes)


def _read_document(raw: bytes, chunk_format: str, keys: tuple[str, ...]) -> list[str]:
    """The text under each key."""
    try:
        decoded = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _Rejected("invalid UTF-8") from None
    if chunk_format == "text":
        return [decoded]
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError):
        raise _Rejected("invalid JSON") from None
    if not isinstance(record, dict):
        raise _Rejected("not a JSON object")
    texts = []
    for key in keys:
        if key not in record:
            raise _Rejected(f"no key {key!r}")
        text = record[key]
        if not isinstance(text, str):
            raise _Rejected(f"{key!r} is not a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair, written as \ud800
            raise _Rejected("invalid Unicode") from None
        if not text.strip():
            raise _Rejected("empty document")
        texts.append(text)
    return texts


def _flatten(documents: list[list[list[int]]], dtype: type[np.integer]) -> EncodedDocuments:
    sequences = [ids for document in documents for ids in document]
    sizes = np.fromiter(map(len, sequences), dtype=np.int32, count=len(sequences))
    tokens = np.empty(int(sizes.sum(dtype=np.int64)), dtype=dtype)
    start = 0
    for ids in sequences:
        tokens[start : start + len(ids)] = ids
        start += len(ids)
    return EncodedDocuments(tokens, sizes, np.fromiter(map(len, documents), dtype=np.int32, count=len(documents)))
