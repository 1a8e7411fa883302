"""What every tokenizer offers: text to token ids and back, and the special tokens that training needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MaskingTokens:
    """What BERT samples are made with.

    Attributes:
        cls, sep, mask, pad: ids of the special tokens.
        is_continuation: bool[vocab_size], true for the entries that continue a word instead of beginning one.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    is_continuation: NDArray[np.bool_]


class Tokenizer(ABC):
    """A vocabulary and the rules that cut text into its entries.

    Attributes:
        name: the vocabulary's file, for messages.
        vocab_size: number of ids, before any padding for the model.
        fingerprint: hash of the vocabulary and the rules; equal wherever the files lie.
        unknown: id that stands for what the vocabulary cannot spell, None if it can spell everything.
        eod: id of the token that ends a document, None if the vocabulary has none.
        masking: what BERT samples need, None if the vocabulary lacks some of it.
    """

    def __init__(
        self,
        *,
        name: str,
        vocab_size: int,
        fingerprint: str,
        unknown: int | None,
        eod: int | None,
        masking: MaskingTokens | None,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.unknown = unknown
        self.eod = eod
        self.masking = masking

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it.

        Raises:
            UnicodeEncodeError: if the text holds half of a surrogate pair, which no encoding of Unicode has.
        """
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts; runs outside the interpreter's lock, in threads unless TOKENIZERS_PARALLELISM=false.

        Raises:
            UnicodeEncodeError: if a text holds half of a surrogate pair.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""

    @abstractmethod
    def token(self, token_id: int) -> str:
        """The vocabulary's entry for an id."""
