"""Encoding by looking words up: text repeats its words, and a tokenizer takes ten times as long as a dictionary.

WordPiece and byte-level BPE never look across the beginning of white space, so the ids of a text are those of its
pieces, one after the other. The pieces that were not seen before still go through the tokenizer itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron01.config import TokenizerType
from megatron01.data.tokenization.tokenizer import Tokenizer

# What Unicode calls white space, and so does the pattern with which GPT-2 splits text. Python's \s has four more.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ASCII_MARK = r"!-/:-@\[-`{-~"

# In both patterns, plain words and marks are pieces of their own; whatever touches a control character, or one beyond
# ASCII, stays together up to the next space, for only the tokenizer knows what becomes of it.
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
_END_OF_DOCUMENT = "<|endoftext|>"  # an entry of its own wherever it stands, even inside a word
_PLACE_TO_CUT = re.compile(rf"[^{_SPACE}](?=[ \t\n\r])")
_CHARACTERS_AT_A_TIME = 1 << 20  # of text; the lists of its words and ids take some 100 bytes for each
_MOST_CHARACTERS = 1 << 21  # of the words that are remembered: 250,000 words or so, in about 60 MB


class WordCache:
    """Encodes texts as a tokenizer does, with a memory of words if the type of the tokenizer allows it.

    Args:
        tokenizer: what encodes words that were not seen yet, or all texts.
        tokenizer_type: its type.
        dtype: type of the token ids.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizer_type: TokenizerType, dtype: DTypeLike) -> None:
        self._tokenizer = tokenizer
        self._pieces = _PIECES.get(tokenizer_type)
        self._dtype = dtype
        self._ids: dict[str, list[int]] = {}
        self._num_characters = 0

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """The ids of all texts, one after the other, and int64, the number of ids of each."""
        parts: list[str] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            cut = [text] if self._pieces is None else _parts(text)
            parts += cut
            owners += [owner] * len(cut)
        tokens = [np.empty(0, self._dtype)]
        sizes = [np.empty(0, np.int64)]
        for batch in _batches(parts):
            by_part, lengths = self._encode_by_words(batch) if self._pieces else self._encode_whole(batch)
            tokens.append(by_part)
            sizes.append(lengths)
        of_texts = np.bincount(owners, np.concatenate(sizes), minlength=len(texts))
        return np.concatenate(tokens), of_texts.astype(np.int64)

    def _encode_whole(self, texts: Sequence[str]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        ids = self._tokenizer.encode_batch(texts)
        sizes = np.fromiter(map(len, ids), np.int64, count=len(texts))
        return self._join(ids, int(sizes.sum())), sizes

    def _encode_by_words(self, texts: Sequence[str]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        assert self._pieces is not None
        words = [[text] if _END_OF_DOCUMENT in text else self._pieces.findall(text) for text in texts]
        self._learn(set().union(*words))
        ids = list(map(self._ids.__getitem__, chain.from_iterable(words)))
        ends = np.cumsum(np.fromiter(chain([0], map(len, ids)), np.int64, count=len(ids) + 1))
        ends = ends[np.cumsum([0, *map(len, words)])]
        return self._join(ids, int(ends[-1])), np.diff(ends)

    def _learn(self, words: set[str]) -> None:
        """Remember the ids of these words, and forget all others when they become too many."""
        new = list(words - self._ids.keys())
        self._num_characters += sum(map(len, new))
        if self._num_characters > _MOST_CHARACTERS:
            self._ids.clear()
            new = list(words)
            self._num_characters = sum(map(len, new))
        self._ids.update(zip(new, self._tokenizer.encode_batch(new), strict=True))

    def _join(self, ids: Sequence[Sequence[int]], count: int) -> NDArray[np.integer]:
        return np.fromiter(chain.from_iterable(ids), self._dtype, count=count)


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
    return [*parts, text[start:]] if parts else [text]


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Consecutive texts of about ``_CHARACTERS_AT_A_TIME`` together; few, for a call costs as much as some words."""
    first = num_characters = 0
    for index, text in enumerate(texts):
        num_characters += len(text)
        if num_characters >= _CHARACTERS_AT_A_TIME:
            yield texts[first : index + 1]
            first, num_characters = index + 1, 0
    if first < len(texts):
        yield texts[first:]
