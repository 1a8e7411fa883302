"""Texts as the inputs of a model: tokens, special tokens, and batches that are padded to their own longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_TEXTS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Encoded:
    """The input of one example.

    Attributes:
        ids: of its tokens, special ones included: int32[tokens].
        types: 0 for the first sentence and 1 for the second, as the model has it: int8[tokens].
    """

    ids: NDArray[np.int32]
    types: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer of Hugging Face, with the special tokens around single texts and pairs that its model expects.

    Attributes:
        backend: the pipeline, with its template of special tokens.
        pad, pad_type: what fills batches.
        uses_types: whether the model takes token types.
        vocab_size: number of ids.
    """

    backend: Backend
    pad: int
    pad_type: int
    uses_types: bool
    vocab_size: int

    def encode(self, first: Sequence[str], second: Sequence[str] | None, max_length: int) -> list[Encoded]:
        """Single texts or pairs of them, each cut to ``max_length`` tokens at the end of its longer text."""
        self.backend.no_padding()
        self.backend.enable_truncation(max_length, strategy="longest_first")
        encoded = []
        for start in range(0, len(first), _TEXTS_AT_ONCE):
            part = slice(start, start + _TEXTS_AT_ONCE)
            texts: Any = first[part] if second is None else list(zip(first[part], second[part], strict=True))
            encoded += [as_input(encoding) for encoding in self.backend.encode_batch_fast(list(texts))]
        return encoded

    def collate(self, examples: Sequence[Encoded]) -> dict[str, Tensor]:
        """The arguments of a model of transformers: int64[examples, longest] each."""
        longest = max(map(len, examples))
        ids = np.full((len(examples), longest), self.pad, dtype=np.int64)
        types = np.full((len(examples), longest), self.pad_type, dtype=np.int64)
        mask = np.zeros((len(examples), longest), dtype=np.int64)
        for row, example in enumerate(examples):
            ids[row, : len(example)] = example.ids
            types[row, : len(example)] = example.types
            mask[row, : len(example)] = 1
        arrays = {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": types} if self.uses_types else {})
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def as_input(encoding: Any) -> Encoded:
    """What a model gets of an encoding of the ``tokenizers`` library."""
    return Encoded(np.asarray(encoding.ids, dtype=np.int32), np.asarray(encoding.type_ids, dtype=np.int8))
