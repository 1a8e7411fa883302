"""Tokenizer files of Hugging Face folders: written for ``AutoTokenizer``, and read as tokenizers of this package.

A SentencePiece model becomes a ``tokenizer.json`` of the tokenizers library that gives the same ids (Kudo and
Richardson 2018; the format of ``.model`` files is that of sentencepiece's ``sentencepiece_model.proto``). It applies
the steps of the sentencepiece library in the same order: normalization by the table in the model, spaces stripped and
joined, a space put before the text, spaces replaced by U+2581, and then the whole text split into pieces.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from megatron01.convert.portable import TokenizerFiles
from megatron01.data.tokenizers import END_OF_DOCUMENT, WORD_START, FastTokenizer, SentencePieceTokenizer, Tokenizer
from megatron01.errors import UserError
from megatron01.utils.files import read_json_object, shipped

CONFIG_FILE = "tokenizer_config.json"
DEFINITION_FILE = "tokenizer.json"
_COMPANIONS = (CONFIG_FILE, "special_tokens_map.json")
_MADE_FROM = "made_from"  # in the configuration: the file in the folder that tokenizer.json was made from
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def write_tokenizer(files: TokenizerFiles, tokenizer: Tokenizer, folder: Path, *, max_length: int) -> str | None:
    """Write what ``AutoTokenizer.from_pretrained`` needs, and the original vocabulary beside it.

    ``max_length``: positions of the model. Returns a warning for the user, or None.
    """
    if files.tokenizer_type == "SentencePieceTokenizer":
        assert isinstance(tokenizer, SentencePieceTokenizer)
        return _write_sentencepiece(tokenizer, folder, max_length=max_length)
    entries: dict[str, Any] = {"model_max_length": max_length}
    if files.tokenizer_type == "HuggingFaceTokenizer":
        definition = Path(tokenizer.name)
        shutil.copyfile(definition, folder / DEFINITION_FILE)
        _copy_companions(definition, folder)
        if not (folder / CONFIG_FILE).exists():
            write_json(folder / CONFIG_FILE, {"tokenizer_class": "PreTrainedTokenizerFast"} | entries)
        return None
    assert isinstance(tokenizer, FastTokenizer)
    if files.tokenizer_type == "GPT2BPETokenizer":
        assert files.merge_file is not None
        shutil.copyfile(shipped(files.vocab_file), folder / "vocab.json")
        shutil.copyfile(shipped(files.merge_file), folder / "merges.txt")
        (folder / DEFINITION_FILE).write_text(tokenizer.definition, encoding="utf-8")
        entries |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
        entries |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_DOCUMENT)
    else:
        shutil.copyfile(shipped(files.vocab_file), folder / "vocab.txt")
        (folder / DEFINITION_FILE).write_text(_with_bert_template(tokenizer.definition, tokenizer), encoding="utf-8")
        entries |= {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": True, "strip_accents": None}
        entries |= {"do_lower_case": files.tokenizer_type == "BertWordPieceLowerCase"}
        entries |= {f"{part}_token": f"[{part.upper()}]" for part in ("cls", "sep", "mask", "pad", "unk")}
    write_json(folder / CONFIG_FILE, entries)
    return None


def find_tokenizer(folder: Path, *, model_type: str) -> TokenizerFiles | None:
    """The tokenizer of a folder of transformers; of megatron01's own types if possible, so that fingerprints agree.

    Raises UserError if a file cannot be read.
    """
    names = {path.name for path in folder.iterdir()}
    if model_type == "gpt2" and {"vocab.json", "merges.txt"} <= names:
        return TokenizerFiles(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
        )
    if model_type != "gpt2" and "vocab.txt" in names:
        return TokenizerFiles(
            tokenizer_type="BertWordPieceLowerCase" if _lower_case(folder) else "BertWordPieceCase",
            vocab_file=str(folder / "vocab.txt"),
        )
    original = _SENTENCEPIECE_FILES[0]
    is_copy = original in names and _entries(folder / CONFIG_FILE).get(_MADE_FROM) == original
    if DEFINITION_FILE in names and not is_copy:
        return TokenizerFiles(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / DEFINITION_FILE))
    for name in _SENTENCEPIECE_FILES:
        if name in names:
            return TokenizerFiles(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / name))
    return None


def copy_tokenizer(files: TokenizerFiles, folder: Path) -> dict[str, str]:
    """Copy the files of a tokenizer into a new folder; returns their names there by setting.

    Raises UserError if one cannot be copied.
    """
    names = {}
    try:
        folder.mkdir()
        for setting, file in files.by_setting.items():
            path = shipped(file)
            if path.is_dir():  # a folder with a tokenizer.json
                path = path / DEFINITION_FILE
            shutil.copyfile(path, folder / path.name)
            names[setting] = path.name
            if files.tokenizer_type == "HuggingFaceTokenizer":
                _copy_companions(path, folder)
    except OSError as error:
        raise UserError(f"cannot copy {error.filename or folder}: {error.strerror}") from error
    return names


def _write_sentencepiece(tokenizer: SentencePieceTokenizer, folder: Path, *, max_length: int) -> str | None:
    """Write the ``.model`` file and, if the tokenizers library can express it, ``tokenizer.json``, else a warning."""
    (folder / _SENTENCEPIECE_FILES[0]).write_bytes(tokenizer.model)
    try:
        definition = _definition_of(tokenizer.model)
        _require_same_ids(definition, tokenizer)
    except _NotExpressible as reason:
        return (
            f"AutoTokenizer cannot read this SentencePiece model, which {reason}; it is in the folder as"
            f" {_SENTENCEPIECE_FILES[0]}, for the sentencepiece library"
        )
    special = {"unk_token": tokenizer.unknown}
    if tokenizer.eod is not None:
        special |= {"bos_token": tokenizer.eod, "eos_token": tokenizer.eod}
    if tokenizer.masking is not None:
        definition = _with_bert_template(definition, tokenizer)
        special |= {f"{part}_token": getattr(tokenizer.masking, part) for part in ("cls", "sep", "mask", "pad")}
    (folder / DEFINITION_FILE).write_text(definition, encoding="utf-8")
    write_json(
        folder / CONFIG_FILE,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            _MADE_FROM: _SENTENCEPIECE_FILES[0],
        }
        | {name: tokenizer.token(token) for name, token in special.items() if token is not None},
    )
    return None


def _copy_companions(path: Path, folder: Path) -> None:
    """Copy the files beside a ``tokenizer.json`` that belong to it."""
    for companion in _COMPANIONS:
        if path.with_name(companion).is_file():
            shutil.copyfile(path.with_name(companion), folder / companion)


def _lower_case(folder: Path) -> bool:
    """True if a BERT's text is to be lower-cased; the default is True, as in transformers."""
    chosen = _entries(folder / CONFIG_FILE).get("do_lower_case")
    if not isinstance(chosen, bool):
        normalizer = _entries(folder / DEFINITION_FILE).get("normalizer")
        chosen = normalizer.get("lowercase") if isinstance(normalizer, Mapping) else None
    return chosen if isinstance(chosen, bool) else True


def _entries(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file of the transformers library; empty if there is no such file."""
    return read_json_object(path, expected="a file of the transformers library") if path.is_file() else {}


def write_json(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a JSON object, formatted as transformers does."""
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


# A SentencePiece model as a tokenizer.json of the tokenizers library.

_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # SentencePiece.Type

_ODD_TEXT = "  Some  text, 1234 \u00bd \ufb01ne; \u00c9tienne e\u0301t \u4f60\u597d \U0001f600\U0001f600 \u3000(end) "

Value = int | bytes


class _NotExpressible(Exception):
    """The tokenizers library cannot express the model; the message says why."""


@dataclass(frozen=True)
class _Piece:
    text: str
    score: float
    kind: int


def _definition_of(model: bytes) -> str:
    """The ``tokenizer.json`` of a ``.model`` file that the sentencepiece library has read.

    Raises _NotExpressible if the tokenizers library cannot express it.
    """
    fields = list(_fields(model))
    pieces = [_piece(value) for number, value in fields if number == 1 and isinstance(value, bytes)]
    trainer, normalizer = (_message(fields, number) for number in (2, 3))
    if trainer.get(24, 0):
        raise _NotExpressible("marks words by a space behind them")
    if any(piece.kind == _UNUSED for piece in pieces):
        raise _NotExpressible("has pieces that are not to be used")
    backend = Backend(_model(trainer, pieces))
    _set_rules(backend, normalizer)
    for piece in pieces:
        if piece.kind in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(piece.text, normalized=False, special=piece.kind == _CONTROL)])
    definition: str = backend.to_str()
    return definition


def _require_same_ids(definition: str, tokenizer: SentencePieceTokenizer) -> None:
    """Check on texts made of all pieces that the definition gives the same ids as the tokenizer.

    Raises _NotExpressible if it does not.
    """
    ids = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_control(token)]
    texts = [_ODD_TEXT, *(tokenizer.decode(ids[start : start + 16]) for start in range(0, len(ids), 16))]
    encodings = Backend.from_str(definition).encode_batch(texts)
    for text, expected, encoding in zip(texts, tokenizer.encode_batch(texts), encodings, strict=True):
        if encoding.ids != expected:
            raise _NotExpressible(f"splits texts as the tokenizers library cannot, {text[:40]!r} for instance")


def _with_bert_template(definition: str, tokenizer: Tokenizer) -> str:
    """The definition of a BERT's tokenizer, with [CLS] before and [SEP] after each text."""
    assert tokenizer.masking is not None
    cls, sep = (tokenizer.token(token) for token in (tokenizer.masking.cls, tokenizer.masking.sep))
    backend = Backend.from_str(definition)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.masking.cls), (sep, tokenizer.masking.sep)],
    )
    return str(backend.to_str())


def _model(trainer: Mapping[int, Value], pieces: list[_Piece]) -> models.Model:
    kind, byte_fallback = trainer.get(3, _UNIGRAM), bool(trainer.get(35, 0))
    unknown = next(index for index, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
    if kind == _UNIGRAM:
        return models.Unigram([(piece.text, piece.score) for piece in pieces], unknown, byte_fallback)
    if kind == _BPE:
        ids = {piece.text: index for index, piece in enumerate(pieces)}
        unk_token = pieces[unknown].text
        return models.BPE(ids, _merges(pieces), unk_token=unk_token, fuse_unk=True, byte_fallback=byte_fallback)
    raise _NotExpressible("is of words or characters; only unigram and BPE models are known there")


def _merges(pieces: list[_Piece]) -> list[tuple[str, str]]:
    """Pairs of pieces that join to another piece, in sentencepiece's merge order: highest score of the result first."""
    normal = {piece.text: piece.score for piece in pieces if piece.kind not in (_UNKNOWN, _CONTROL)}
    found = []
    for text, score in normal.items():
        places = range(1, len(text))
        found += [(-score, text[:at], text[at:]) for at in places if text[:at] in normal and text[at:] in normal]
    return [(left, right) for _, left, right in sorted(found, key=lambda merge: merge[0])]


def _set_rules(backend: Backend, normalizer: Mapping[int, Value]) -> None:
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
    """The fields of the last nested message with this field number; of repeated fields the last one."""
    found = [value for its_number, value in fields if its_number == number and isinstance(value, bytes)]
    return dict(_fields(found[-1])) if found else {}


def _piece(message: bytes) -> _Piece:
    fields = dict(_fields(message))
    text, score = fields.get(1, b""), fields.get(2, bytes(4))
    assert isinstance(text, bytes) and isinstance(score, bytes)
    return _Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], int(fields.get(3, 1)))


def _fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Numbers and values of a protocol buffer's fields: integers, or bytes for all other types."""
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
