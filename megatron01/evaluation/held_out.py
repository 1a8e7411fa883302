"""Held-out text as one stream of tokens, and how many words and bytes it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron01.data.indexed.dataset import IndexedDataset, idx_path
from megatron01.data.indexed.origin import check_fingerprint, read_origin
from megatron01.data.preprocessing.compression import ByteStream, detect_compression, unpacked_blocks
from megatron01.data.tokenization.tokenizer import Tokenizer
from megatron01.errors import UserError

_JSON_LINES = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class HeldOutText:
    """Text that a model is to predict.

    Attributes:
        tokens: int64[n]; the first one is there to predict the others from.
        num_words: what white space separates.
        num_bytes: in UTF-8, without end-of-document tokens.
    """

    tokens: NDArray[np.int64]
    num_words: int
    num_bytes: int


def read_held_out(data: str, tokenizer: Tokenizer, max_tokens: int | None = None) -> HeldOutText:
    """The tokens of a file of text, or of a .bin/.idx pair, as training would see them.

    Documents follow each other, with the end-of-document token between them; it counts as a token, but neither as a
    word nor as bytes. One stands before the first document, if the tokenizer has it, so that every token is predicted.

    Args:
        data: the file or prefix.
        tokenizer: of the model.
        max_tokens: of the beginning, if not all.

    Raises:
        UserError: if it cannot be read, is empty, or was made with another tokenizer.
    """
    limit = None if max_tokens is None else max_tokens + 1
    if idx_path(data).is_file():
        documents, tokens = None, _indexed_tokens(data, tokenizer)[:limit]
    else:
        documents = _documents(data)
        tokens = _encoded(documents, tokenizer)
    if tokenizer.eod is not None and (tokens.size == 0 or tokens[0] != tokenizer.eod):
        tokens = np.concatenate([[tokenizer.eod], tokens])
    if tokens.size < 2:
        raise UserError(f"{data} holds no text to predict; expected more than one token")
    if documents is None or (limit is not None and tokens.size > limit):
        tokens = tokens[:limit]
        documents = _decoded(tokens[1:], tokenizer)
    num_words = sum(len(document.split()) for document in documents)
    num_bytes = sum(len(document.encode("utf-8", "replace")) for document in documents)
    return HeldOutText(tokens.astype(np.int64), num_words, num_bytes)


def _indexed_tokens(prefix: str, tokenizer: Tokenizer) -> NDArray[np.integer]:
    dataset = IndexedDataset(prefix)
    origin = read_origin(dataset.prefix)
    if origin is not None:
        check_fingerprint(dataset.prefix, origin, tokenizer)
    tokens = dataset.tokens
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
        raise UserError(
            f"{prefix}.bin holds the token id {int(tokens.max())}, but {tokenizer.name} has ids 0 to"
            f" {tokenizer.vocab_size - 1}; give text that was preprocessed with the model's tokenizer"
        )
    return tokens


def _documents(data: str) -> list[str]:
    path = Path(data)
    try:
        with open(path, "rb") as file:
            stream = ByteStream(data, file)
            content = b"".join(unpacked_blocks(stream, detect_compression(stream)))
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"data {data} cannot be read: {error.strerror}; expected a file, or a prefix with .idx"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"data {data} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not any(suffix in _JSON_LINES for suffix in path.suffixes):
        return [text]
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            documents.append(_text_of(line, f"{data} line {number}"))
    return documents


def _text_of(line: str, place: str) -> str:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error})") from error
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{place} has no text under the key 'text'")
    return text


def _encoded(documents: list[str], tokenizer: Tokenizer) -> NDArray[np.int64]:
    parts: list[int] = []
    for index, ids in enumerate(tokenizer.encode_batch(documents)):
        if index and tokenizer.eod is not None:
            parts.append(tokenizer.eod)
        parts += ids
    return np.array(parts, dtype=np.int64)


def _decoded(tokens: NDArray[np.integer], tokenizer: Tokenizer) -> list[str]:
    """The text between end-of-document tokens."""
    ends = np.flatnonzero(tokens == tokenizer.eod) if tokenizer.eod is not None else np.array([], dtype=np.int64)
    starts = np.concatenate([[0], ends + 1])
    return [
        tokenizer.decode(tokens[start:end].tolist())
        for start, end in zip(starts, [*ends, tokens.size], strict=True)
        if end > start
    ]
