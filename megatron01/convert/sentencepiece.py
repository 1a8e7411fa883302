"""A SentencePiece model as a ``tokenizer.json`` of the tokenizers library, which finds the same ids.

Kudo and Richardson 2018; the format of ``.model`` files is that of sentencepiece's ``sentencepiece_model.proto``. What
the sentencepiece library does to a text is done here in its order: its own normalization (a table in the model), spaces
stripped and joined, a space put before the text, spaces written as U+2581, and then the whole text split into pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from megatron01.data.tokenizers import WORD_START, SentencePieceTokenizer
from megatron01.data.tokenizers import Tokenizer as TokenizerInterface

_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # SentencePiece.Type

_UNUSUAL = "  Some  text, 1234 \u00bd \ufb01ne; \u00c9tienne e\u0301t \u4f60\u597d \U0001f600\U0001f600 \u3000(end) "

Value = int | bytes


class NotExpressible(Exception):
    """The tokenizers library has nothing that does what the model does; the message says what it is."""


@dataclass(frozen=True)
class _Piece:
    text: str
    score: float
    kind: int


def definition_of(model: bytes) -> str:
    """The ``tokenizer.json`` of a SentencePiece model.

    Args:
        model: content of a ``.model`` file that the sentencepiece library has read.

    Raises:
        NotExpressible: if there is none.
    """
    fields = list(_fields(model))
    pieces = [_piece(value) for number, value in fields if number == 1 and isinstance(value, bytes)]
    trainer, normalizer = (_message(fields, number) for number in (2, 3))
    if trainer.get(24, 0):
        raise NotExpressible("marks words by a space behind them")
    if any(piece.kind == _UNUSED for piece in pieces):
        raise NotExpressible("has pieces that are not to be used")
    unknown = next(index for index, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
    backend = Tokenizer(_model(trainer.get(3, _UNIGRAM), pieces, unknown, byte_fallback=bool(trainer.get(35, 0))))
    _set_rules(backend, normalizer)
    for piece in pieces:
        if piece.kind in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(piece.text, normalized=False, special=piece.kind == _CONTROL)])
    definition: str = backend.to_str()
    return definition


def require_same_ids(definition: str, tokenizer: SentencePieceTokenizer) -> None:
    """Check on texts made of all of its pieces that the definition finds the ids that the tokenizer finds.

    Raises:
        NotExpressible: if it does not.
    """
    backend = Tokenizer.from_str(definition)
    ids = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_control(token)]
    texts = [_UNUSUAL, *(tokenizer.decode(ids[start : start + 16]) for start in range(0, len(ids), 16))]
    expected = tokenizer.encode_batch(texts)
    for text, its_ids, encoding in zip(texts, expected, backend.encode_batch(texts), strict=True):
        if encoding.ids != its_ids:
            raise NotExpressible(f"splits texts as the tokenizers library cannot, {text[:40]!r} for instance")


def with_bert_template(definition: str, tokenizer: TokenizerInterface) -> str:
    """The definition of a BERT's tokenizer, with [CLS] before and [SEP] behind each text."""
    assert tokenizer.masking is not None
    cls, sep = (tokenizer.token(token) for token in (tokenizer.masking.cls, tokenizer.masking.sep))
    backend = Tokenizer.from_str(definition)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.masking.cls), (sep, tokenizer.masking.sep)],
    )
    return str(backend.to_str())


def _model(kind: Value, pieces: list[_Piece], unknown: int, *, byte_fallback: bool) -> models.Model:
    if kind == _UNIGRAM:
        return models.Unigram([(piece.text, piece.score) for piece in pieces], unknown, byte_fallback)
    if kind == _BPE:
        ids = {piece.text: index for index, piece in enumerate(pieces)}
        return models.BPE(
            ids, _merges(pieces), unk_token=pieces[unknown].text, fuse_unk=True, byte_fallback=byte_fallback
        )
    raise NotExpressible("is of words or characters; only unigram and BPE models are known there")


def _merges(pieces: list[_Piece]) -> list[tuple[str, str]]:
    """Pairs of pieces that make another one, in the order in which sentencepiece joins them: best results first."""
    normal = {piece.text: piece.score for piece in pieces if piece.kind not in (_UNKNOWN, _CONTROL)}
    found = []
    for text, score in normal.items():
        places = range(1, len(text))
        found += [(-score, text[:at], text[at:]) for at in places if text[:at] in normal and text[at:] in normal]
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


def _set_rules(backend: Tokenizer, normalizer: Mapping[int, Value]) -> None:
    rules: list[normalizers.Normalizer] = []
    table = normalizer.get(2, b"")
    if table:
        assert isinstance(table, bytes)
        rules.append(normalizers.Precompiled(table))
    if normalizer.get(4, 1):  # remove_extra_whitespaces
        rules += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    adds_space = bool(normalizer.get(3, 1))  # add_dummy_prefix
    if adds_space:
        rules.append(normalizers.Prepend(" "))
    backend.normalizer = normalizers.Sequence([*rules, normalizers.Replace(" ", WORD_START)])
    steps = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)


def _message(fields: list[tuple[int, Value]], number: int) -> dict[int, Value]:
    """The fields of the last message of this number inside another one; of repeated fields the last one."""
    found = [value for its_number, value in fields if its_number == number and isinstance(value, bytes)]
    return dict(_fields(found[-1])) if found else {}


def _piece(message: bytes) -> _Piece:
    fields = dict(_fields(message))
    text, score = fields.get(1, b""), fields.get(2, bytes(4))
    assert isinstance(text, bytes) and isinstance(score, bytes)
    return _Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], int(fields.get(3, 1)))


def _fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Numbers and values of a protocol buffer's fields: integers, or the bytes of anything else."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        wire = tag & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, place = _varint(message, place)
        else:
            size = {1: 8, 5: 4}[wire]
        yield tag >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
