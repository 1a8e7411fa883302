"""SentencePiece models (unigram or BPE); ids equal those of the ``sentencepiece`` library without added tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from megatron01.data.tokenizers import MaskingTokens, Tokenizer, read_bytes
from megatron01.errors import UserError

WORD_START = "\u2581"  # the mark with which a piece begins that follows a space
_END_OF_DOCUMENT = ("<eod>", "<EOD>", "<|endoftext|>")  # win over the end of a sentence, which every model has
_MASKING_TOKENS = (("[CLS]", "<cls>"), ("[SEP]", "<sep>"), ("[MASK]", "<mask>"), ("[PAD]", "<pad>"))
_FALSE = ("", "off", "false", "f", "no", "n", "0")  # of TOKENIZERS_PARALLELISM, as the tokenizers library reads it


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Control symbols such as ``</s>`` never come from text. A piece that begins with the mark of a space begins a word;
    every other one continues a word.

    Attributes:
        model: content of the ``.model`` file.

    Args:
        model: as the attribute.
        name: the file, for messages.
    """

    def __init__(self, model: bytes, *, name: str) -> None:
        self.model = model
        self._processor = processor = load_processor(model, name)
        super().__init__(
            name=name,
            vocab_size=processor.get_piece_size(),
            fingerprint=hashlib.sha256(b"SentencePieceTokenizer\n" + model).hexdigest(),
            unknown=processor.unk_id(),
            eod=_find_end_of_document(processor),
            masking=_find_masking(processor),
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        parallel = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() not in _FALSE and len(texts) > 1
        try:
            ids: list[list[int]] = self._processor.encode(list(texts), out_type=int, num_threads=-1 if parallel else 1)
        except (RuntimeError, TypeError):
            for text in texts:
                text.encode("utf-8")  # the library does not say what is wrong with half a surrogate pair
            raise
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        # The library leaves control symbols out.
        processor = self._processor
        runs = ((control, list(run)) for control, run in groupby(map(int, ids), key=processor.is_control))
        return "".join("".join(map(self.token, run)) if control else processor.decode(run) for control, run in runs)

    def is_control(self, token_id: int) -> bool:
        """Whether a piece never comes from text."""
        return bool(self._processor.is_control(token_id))

    def token(self, token_id: int) -> str:
        piece: str = self._processor.id_to_piece(token_id)
        return piece

    def __reduce__(self) -> str | tuple[object, ...]:
        return _restore, (self.model, self.name)


def build_sentencepiece(tokenizer_model: str) -> SentencePieceTokenizer:
    """The tokenizer of a ``.model`` file.

    Raises:
        UserError: if the file is missing or is not a SentencePiece model, or if the library is not installed.
    """
    return SentencePieceTokenizer(read_bytes(tokenizer_model), name=tokenizer_model)


def import_sentencepiece() -> Any:
    """The ``sentencepiece`` library.

    Raises:
        UserError: if it is not installed.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise UserError("SentencePieceTokenizer needs sentencepiece; run: pip install 'megatron01[data]'") from error
    return sentencepiece


def load_processor(model: bytes, name: str) -> Any:
    """The library's object for a model.

    Raises:
        UserError: if it is not a model.
    """
    sentencepiece = import_sentencepiece()
    processor = sentencepiece.SentencePieceProcessor()
    try:
        if not model:
            raise RuntimeError("it is empty")
        processor.load_from_serialized_proto(model)
    except RuntimeError as error:
        raise UserError(f"{name} is not a SentencePiece model; expected a .model file of its trainer") from error
    return processor


def _first_of(processor: Any, pieces: Sequence[str]) -> int:
    """The id of the first of these pieces that the model has, -1 if it has none of them."""
    ids = ((piece, processor.piece_to_id(piece)) for piece in pieces)  # of what it has not: the id of the unknown piece
    return next((token_id for piece, token_id in ids if processor.id_to_piece(token_id) == piece), -1)


def _find_end_of_document(processor: Any) -> int | None:
    token_id = _first_of(processor, _END_OF_DOCUMENT)
    token_id = token_id if token_id >= 0 else processor.eos_id()  # -1 if the model was trained without
    return token_id if token_id >= 0 else None


def _find_masking(processor: Any) -> MaskingTokens | None:
    ids = [_first_of(processor, names) for names in _MASKING_TOKENS]
    if min(ids) < 0:
        return None
    num_pieces = processor.get_piece_size()
    pieces = map(processor.id_to_piece, range(num_pieces))
    if not any(len(piece) > 1 and piece.startswith(WORD_START) for piece in pieces):
        return None  # trained with the mark behind words, so that no piece tells whether it begins one
    is_continuation = np.zeros(num_pieces, dtype=np.bool_)
    for token_id in range(num_pieces):
        special = processor.is_control(token_id) or processor.is_unknown(token_id) or token_id in ids
        is_continuation[token_id] = not special and not processor.id_to_piece(token_id).startswith(WORD_START)
    cls, sep, mask, pad = ids
    return MaskingTokens(cls, sep, mask, pad, is_continuation)


def _restore(model: bytes, name: str) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model, name=name)
