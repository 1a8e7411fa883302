"""Decode a chunk into the texts of its documents, and the reasons for which documents are rejected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron01.data.preprocessing.corpus import Chunk, split_documents
from megatron01.data.preprocessing.inputs import rows

Texts = tuple[str, ...]  # one for each key


@dataclass
class DecodedChunk:
    """The documents of a chunk.

    Attributes:
        documents: line (or row) in the chunk, from 0, and the texts of each usable document.
        rejected: line and reason of each unusable document.
    """

    documents: list[tuple[int, Texts]] = field(default_factory=list)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    num_lines: int = 0


class _Rejected(Exception):
    """A document is left out; the message is the reason."""


def decode_chunk(chunk: Chunk, keys: Sequence[str], max_document_mb: int) -> DecodedChunk:
    """The texts under ``keys`` of each document; a document with an unusable text is rejected as a whole."""
    if chunk.too_long:
        return DecodedChunk(rejected=[(0, _too_long(max_document_mb))], num_lines=chunk.too_long)
    raw: Sequence[tuple[int, bytes | tuple[bytes | None, ...]]]
    if chunk.format == "table":
        raw = list(enumerate(rows(chunk.data, keys)))
        decoded = DecodedChunk(num_lines=len(raw))
    else:
        raw, num_lines = split_documents(chunk.data, chunk.format)
        decoded = DecodedChunk(num_lines=num_lines)
    for line, document in raw:
        try:
            decoded.documents.append((line, _texts(document, chunk.format, keys, max_document_mb)))
        except _Rejected as reason:
            decoded.rejected.append((line, str(reason)))
    return decoded


def _texts(document: bytes | tuple[bytes | None, ...], kind: str, keys: Sequence[str], max_document_mb: int) -> Texts:
    """The usable text under each key."""
    parts = document if isinstance(document, tuple) else (document,)
    if sum(len(part) for part in parts if part is not None) > max_document_mb * 1_000_000:
        raise _Rejected(_too_long(max_document_mb))
    try:
        found: list[Any] = [part if part is None else part.decode("utf-8") for part in parts]
    except UnicodeDecodeError:
        raise _Rejected("invalid UTF-8") from None
    if kind == "jsonl":
        found = _values_of_json(found[0], keys)
    elif kind == "text":
        found = [_without_nul(found[0])]
    return tuple(_usable(key, text) for key, text in zip(keys, found, strict=True))


def _values_of_json(line: str, keys: Sequence[str]) -> list[object]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise _Rejected("invalid JSON") from None
    if not isinstance(record, dict):
        raise _Rejected("not a JSON object")
    for key in keys:
        if key not in record:
            raise _Rejected(f"no key {key!r}")
    return [record[key] for key in keys]


def _without_nul(text: str) -> str:
    # NUL bytes come from a crash or from UTF-16; in JSON they are invalid unless they are written as \u0000.
    if "\0" in text:
        raise _Rejected("NUL byte")
    return text


def _usable(key: str, text: object) -> str:
    if not isinstance(text, str):
        raise _Rejected(f"{key!r} is not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, written as \ud800
        raise _Rejected("invalid Unicode") from None
    if not text or text.isspace():
        raise _Rejected("empty document")
    return text


def _too_long(max_document_mb: int) -> str:
    return f"longer than {max_document_mb} MB"
