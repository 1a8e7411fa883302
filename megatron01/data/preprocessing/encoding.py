"""Decode and tokenize chunks of documents, in several processes, in the order of the input."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron01.config import TokenizerType
from megatron01.config.commands import PreprocessConfig
from megatron01.data.indexed import token_dtype
from megatron01.data.preprocessing.corpus import CHUNK_BYTES, Chunk, Position, split_documents
from megatron01.data.preprocessing.inputs import rows
from megatron01.data.preprocessing.sentences import split_sentences
from megatron01.data.tokenizers import Tokenizer, build_tokenizer
from megatron01.errors import UserError
from megatron01.utils.process_pool import ProcessPool, WorkerDied

Texts = tuple[str, ...]  # one for each key


@dataclass
class DecodedChunk:
    """The texts of the usable documents of a chunk, and the reasons to leave out others; lines are counted from 0."""

    documents: list[tuple[int, Texts]] = field(default_factory=list)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    num_lines: int = 0


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
        num_bytes = sum(len(part) for part in parts if part is not None)
        found = too_long if num_bytes > max_document_mb * 1_000_000 else _texts(parts, chunk.format, keys)
        if isinstance(found, str):
            decoded.rejected.append((line, found))
        else:
            decoded.documents.append((line, found))
    return decoded


def _texts(parts: tuple[bytes | None, ...], kind: str, keys: Sequence[str]) -> Texts | str:
    """The text under each key of a document (a table's row, a JSON object or plain text), or why it is not usable."""
    try:
        found: list[Any] = [part if part is None else part.decode("utf-8") for part in parts]
    except UnicodeDecodeError:
        return "invalid UTF-8"
    if kind == "jsonl":
        try:
            record = json.loads(found[0])
        except (ValueError, RecursionError):
            return "invalid JSON"
        if not isinstance(record, dict):
            return "not a JSON object"
        if missing := [key for key in keys if key not in record]:
            return f"no key {missing[0]!r}"
        found = [record[key] for key in keys]
    elif kind == "text" and "\0" in found[0]:
        # from a crash or from UTF-16; in JSON NUL bytes are invalid unless they are written as \u0000
        return "NUL byte"
    for key, text in zip(keys, found, strict=True):
        if not isinstance(text, str):
            return f"{key!r} is not a string"
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair, written as \ud800
            return "invalid Unicode"
        if not text or text.isspace():
            return "empty document"
    return tuple(found)


# Encoding with a cache of words: text repeats its words, and a tokenizer takes ten times as long as a dictionary.
#
# WordPiece and byte-level BPE never merge across the beginning of white space, so the ids of a text are the
# concatenated ids of its pieces. Pieces that are not in the cache go through the tokenizer.


# What Unicode calls white space, and so does the pattern with which GPT-2 splits text. Python's \s has four more.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ASCII_MARK = r"!-/:-@\[-`{-~"

# In both patterns, plain words and marks are separate pieces; whatever touches a control or non-ASCII character stays
# together up to the next space, and is left to the tokenizer.
_WORDPIECE = re.compile(
    rf"\[(?:PAD|UNK|CLS|SEP|MASK)\]|[a-zA-Z0-9]++(?=[ \t\n\r{_ASCII_MARK}]|\Z)|[{_ASCII_MARK}]|[^ \t\n\r]+"
)
_BYTE_LEVEL_BPE = re.compile(
    r"'(?:[sdmt]|ll|ve|re)| ?(?:[a-zA-Z]++|[0-9]++|[^\sa-zA-Z0-9\x80-\U0010ffff]++)(?![\x80-\U0010ffff])"
    rf"| ?[^{_SPACE}]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)

_PIECES: dict[TokenizerType, re.Pattern[str]] = {
    "BertWordPieceCase": _WORDPIECE,
    "BertWordPieceLowerCase": _WORDPIECE,
    "GPT2BPETokenizer": _BYTE_LEVEL_BPE,
}
_END_OF_DOCUMENT = "<|endoftext|>"  # a special token wherever it stands, even inside a word
_PLACE_TO_CUT = re.compile(rf"[^{_SPACE}](?=[ \t\n\r])")
_CHARACTERS_AT_A_TIME = 1 << 20  # of text; lists of its words and ids take some 100 bytes for each
_MOST_CHARACTERS = 1 << 21  # of cached words: 250,000 words or so, in about 60 MB
_CHUNKS_PER_WORKER = 4  # submitted in advance: keeps workers busy, bounds memory
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # read by the tokenizers library at each call


class WordCache:
    """Encodes texts as ``tokenizer`` does, with a cache of words if the type of the tokenizer allows it."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_type: TokenizerType, dtype: DTypeLike) -> None:
        self._tokenizer = tokenizer
        self._pieces = _PIECES.get(tokenizer_type)
        self._dtype = dtype
        self._ids: dict[str, list[int]] = {}
        self._num_characters = 0

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Token ids of all texts, concatenated, in ``dtype``; and int64[len(texts)], the number of ids of each."""
        parts = [[text] if self._pieces is None else _parts(text) for text in texts]
        all_parts = list(chain.from_iterable(parts))
        ends = accumulate(map(len, all_parts))
        tokens = [np.empty(0, self._dtype)]
        sizes = [np.empty(0, np.int64)]
        # each tokenizer call has overhead: parts are encoded together, as many as _CHARACTERS_AT_A_TIME allows
        for _, batch in groupby(zip(all_parts, ends, strict=True), key=lambda part: part[1] // _CHARACTERS_AT_A_TIME):
            words = [self._words(part) for part, _ in batch]
            ids = self._encode_words(list(chain.from_iterable(words)))
            lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
            tokens.append(np.fromiter(chain.from_iterable(ids), self._dtype, count=int(lengths.sum())))
            sizes.append(_sums(lengths, words))
        return np.concatenate(tokens), _sums(np.concatenate(sizes), parts)

    def _words(self, text: str) -> list[str]:
        return [text] if self._pieces is None or _END_OF_DOCUMENT in text else self._pieces.findall(text)

    def _encode_words(self, words: list[str]) -> list[list[int]]:
        """The ids of each word; new words are added to the cache, which is cleared first if it would get too large."""
        if self._pieces is None:
            return self._tokenizer.encode_batch(words)
        present = set(words)
        new = list(present - self._ids.keys())
        self._num_characters += sum(map(len, new))
        if self._num_characters > _MOST_CHARACTERS:
            self._ids.clear()
            new = list(present)
            self._num_characters = sum(map(len, new))
        self._ids.update(zip(new, self._tokenizer.encode_batch(new), strict=True))
        return list(map(self._ids.__getitem__, words))


def _sums(values: NDArray[np.int64], groups: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Sum of the values of each group: consecutive values, as many as the group has members."""
    owners = np.repeat(np.arange(len(groups)), [len(members) for members in groups])
    return np.bincount(owners, values, minlength=len(groups)).astype(np.int64)


def _parts(text: str) -> list[str]:
    """A text in parts of about ``_CHARACTERS_AT_A_TIME``, cut where white space begins."""
    parts: list[str] = []
    start = 0
    while len(text) - start > _CHARACTERS_AT_A_TIME:
        place = _PLACE_TO_CUT.search(text, start + _CHARACTERS_AT_A_TIME)
        if place is None:
            break
        parts.append(text[start : place.end()])
        start = place.end()
    return [*parts, text[start:]]


@dataclass(frozen=True)
class EncodedDocuments:
    """Whole documents, ready to be written."""

    tokens: NDArray[np.integer]  # ids, flat, one sequence after the other
    sizes: NDArray[np.int32]  # (sequences,), tokens in each
    sentences: NDArray[np.int32]  # (documents,), sequences in each
    num_unknown: int  # number of unknown tokens, such as [UNK]


@dataclass(frozen=True)
class EncodedChunk:
    """The documents of a chunk, once for each JSON key, and those left out."""

    columns: list[EncodedDocuments]
    rejected: list[tuple[int, str]]  # line (from 0 within the chunk) and reason, in the order of the input
    num_lines: int
    num_bytes: int


class Encoder:
    """Decodes, splits and tokenizes the documents of chunks."""

    def __init__(self, settings: PreprocessConfig, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._words = WordCache(tokenizer, settings.tokenizer_type, token_dtype(tokenizer.vocab_size))

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """The token ids of a chunk.

        A document is left out whole, for all keys, if any of its texts is missing or has no tokens, so that document k
        is the same in every output.
        """
        settings = self._settings
        decoded = decode_chunk(chunk, settings.json_keys, settings.max_document_mb)
        columns = [
            self._tokenize([texts[number] for _, texts in decoded.documents])
            for number in range(len(settings.json_keys))
        ]
        kept = np.ones(len(decoded.documents), dtype=np.bool_)
        for _, sizes, documents in columns:
            kept &= np.bincount(documents, sizes, minlength=kept.size) > 0
        empty = [(decoded.documents[index][0], "empty document") for index in np.flatnonzero(~kept)]
        return EncodedChunk(
            columns=[self._select(kept, *column) for column in columns],
            rejected=sorted(decoded.rejected + empty),
            num_lines=decoded.num_lines,
            num_bytes=len(chunk.data),
        )

    def _tokenize(self, texts: Sequence[str]) -> tuple[NDArray[np.integer], NDArray[np.int64], NDArray[np.int64]]:
        """Token ids of documents, flat; int64, tokens in each sequence, 0 for some; int64, document of each sequence.

        A sequence is a sentence if ``split_sentences`` is set, else a document.
        """
        settings = self._settings
        documents, sequences = np.arange(len(texts)), texts
        if settings.split_sentences:
            split = [split_sentences(text, lang=settings.lang, keep_newlines=settings.keep_newlines) for text in texts]
            documents = np.repeat(documents, [len(sentences) for sentences in split])
            sequences = list(chain.from_iterable(split))
        tokens, sizes = self._words.encode(sequences)
        return tokens, sizes, documents

    def _select(
        self,
        kept: NDArray[np.bool_],
        tokens: NDArray[np.integer],
        sizes: NDArray[np.int64],
        documents: NDArray[np.int64],
    ) -> EncodedDocuments:
        """The kept documents, without empty sequences, with end-of-document tokens if ``append_eod`` is set."""
        unknown, eod = self._tokenizer.unknown, self._tokenizer.eod
        kept_sequences = kept[documents] & (sizes > 0)
        if not kept_sequences.all():
            tokens = tokens[np.repeat(kept_sequences, sizes)]
        sizes = sizes[kept_sequences]
        sentences = np.bincount(documents[kept_sequences], minlength=kept.size)[kept]
        num_unknown = 0 if unknown is None else int(np.count_nonzero(tokens == unknown))
        if self._settings.append_eod and eod is not None:
            last = np.cumsum(sentences) - 1
            tokens = np.insert(tokens, np.cumsum(sizes)[last], eod)
            sizes[last] += 1
        return EncodedDocuments(tokens, sizes.astype(np.int32), sentences.astype(np.int32), num_unknown)


def encode_in_order(
    settings: PreprocessConfig, tokenizer: Tokenizer, chunks: Iterator[Chunk], workers: int
) -> Generator[tuple[Position, EncodedChunk], None, None]:
    """(end, encoded chunk) in the order of the input, whatever the number of processes; one is this process.

    Raises UserError if a process dies.
    """
    with _single_threaded_tokenizer():
        if workers == 1:
            encoder = Encoder(settings, tokenizer)
            for chunk in chunks:
                yield chunk.end, encoder.encode(chunk)
            return
        try:
            with ProcessPool(_open_encoder, [(settings,)] * workers, tasks_ahead=_CHUNKS_PER_WORKER) as pool:
                yield from _encode_with(pool, chunks, _CHUNKS_PER_WORKER * workers)
        except WorkerDied as error:
            raise UserError(
                f"one of {workers} preprocessing processes ended with status {error.status}, perhaps because memory"
                " ran out; use fewer workers"
            ) from error


def _encode_with(pool: ProcessPool, chunks: Iterator[Chunk], most: int) -> Iterator[tuple[Position, EncodedChunk]]:
    """As ``encode_in_order``, with at most ``most`` chunks, fewer of long documents, in flight."""
    pending: deque[tuple[int, Position, int]] = deque()  # number, end and bytes of chunks, in the order of the input
    encoded: dict[int, EncodedChunk] = {}

    def first() -> tuple[Position, EncodedChunk]:
        number, end, _ = pending.popleft()
        while number not in encoded:
            done, result = pool.receive()
            encoded[done] = result
        return end, encoded.pop(number)

    for chunk in chunks:
        pending.append((pool.submit(chunk), chunk.end, len(chunk.data)))
        while len(pending) >= most or sum(size for _, _, size in pending) > 2 * most * CHUNK_BYTES:
            yield first()
    while pending:
        yield first()


def _open_encoder(settings: PreprocessConfig) -> Callable[[Chunk, Any], EncodedChunk]:
    encoder = Encoder(settings, build_tokenizer(settings))
    return lambda chunk, report: encoder.encode(chunk)


@contextmanager
def _single_threaded_tokenizer() -> Iterator[None]:
    """Limit the tokenizers library to one thread, here and in processes started inside, in favour of ``workers``."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before
