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
    """The texts of the usable documents of a chunk, and the reasons to leave out others; lines are counted from 0."""

    documents: list[tuple[int, Texts]] = field(default_factory=list)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    num_lines: int = 0


class _Rejected(Exception):
    """A document is left out; the message is the reason."""


def decode_chunk(chunk: Chunk, keys: Sequence[str], max_document_mb: int) -> DecodedChunk:
    """The texts under ``keys`` of each document; a document with an unusable text is rejected as a whole."""
    too_long = f"longer than {max_document_mb} MB"
    if chunk.too_long:
        return DecodedChunk(rejected=[(0, too_long)], num_lines=chunk.too_long)
    documents: list[tuple[int, tuple[bytes | None, ...]]]
    if chunk.format == "table":
        documents = list(enumerate(rows(chunk.data, keys)))
        decoded = DecodedChunk(num_lines=len(documents))
    else:
        lines, num_lines = split_documents(chunk.data, chunk.format)
        documents = [(line, (document,)) for line, document in lines]
        decoded = DecodedChunk(num_lines=num_lines)
    for line, parts in documents:
        try:
            if sum(len(part) for part in parts if part is not None) > max_document_mb * 1_000_000:
                raise _Rejected(too_long)
            decoded.documents.append((line, _texts(parts, chunk.format, keys)))
        except _Rejected as reason:
            decoded.rejected.append((line, str(reason)))
    return decoded


def _texts(parts: tuple[bytes | None, ...], kind: str, keys: Sequence[str]) -> Texts:
    """The usable text under each key of a document: of a table's row, a JSON object or plain text."""
    try:
        found: list[Any] = [part if part is None else part.decode("utf-8") for part in parts]
    except UnicodeDecodeError:
        raise _Rejected("invalid UTF-8") from None
    if kind == "jsonl":
        found = _values_of_json(found[0], keys)
    elif kind == "text" and "\0" in found[0]:
        # from a crash or from UTF-16; in JSON NUL bytes are invalid unless they are written as \u0000
        raise _Rejected("NUL byte")
    for key, text in zip(keys, found, strict=True):
        if not isinstance(text, str):
            raise _Rejected(f"{key!r} is not a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair, written as \ud800
            raise _Rejected("invalid Unicode") from None
        if not text or text.isspace():
            raise _Rejected("empty document")
    return tuple(found)


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
