"""Tokenizer files of a Hugging Face folder: what ``AutoTokenizer`` reads, made from ours, and ours found in theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron01.convert.portable import TokenizerFiles
from megatron01.convert.sentencepiece import (
    NotExpressible,
    definition_of,
    require_same_ids,
    with_bert_template,
)
from megatron01.data.tokenizers import END_OF_DOCUMENT, FastTokenizer, SentencePieceTokenizer, Tokenizer, read_json
from megatron01.errors import UserError
from megatron01.utils.files import shipped

CONFIG_FILE = "tokenizer_config.json"
DEFINITION_FILE = "tokenizer.json"
_COMPANIONS = (CONFIG_FILE, "special_tokens_map.json")
_MADE_FROM = "made_from"  # in the configuration: the file in the folder that the definition follows from
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def write_tokenizer(files: TokenizerFiles, tokenizer: Tokenizer, folder: Path, *, max_length: int) -> str | None:
    """Write what ``AutoTokenizer.from_pretrained`` needs, and the original vocabulary beside it.

    Args:
        files: what ``tokenizer`` was built from.
        max_length: positions of the model.

    Returns:
        What is to be known about them; None where everything works as it should.
    """
    if files.tokenizer_type == "SentencePieceTokenizer":
        assert isinstance(tokenizer, SentencePieceTokenizer)
        return _write_sentencepiece(tokenizer, folder, max_length=max_length)
    if files.tokenizer_type == "HuggingFaceTokenizer":
        _copy_definition(Path(tokenizer.name), folder, max_length=max_length)
        return None
    assert isinstance(tokenizer, FastTokenizer)
    if files.tokenizer_type == "GPT2BPETokenizer":
        assert files.merge_file is not None
        shutil.copyfile(shipped(files.vocab_file), folder / "vocab.json")
        shutil.copyfile(shipped(files.merge_file), folder / "merges.txt")
        (folder / DEFINITION_FILE).write_text(tokenizer.definition, encoding="utf-8")
        names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_DOCUMENT)
        _write_json(
            folder / CONFIG_FILE,
            {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "model_max_length": max_length} | names,
        )
        return None
    shutil.copyfile(shipped(files.vocab_file), folder / "vocab.txt")
    (folder / DEFINITION_FILE).write_text(with_bert_template(tokenizer.definition, tokenizer), encoding="utf-8")
    _write_json(
        folder / CONFIG_FILE,
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": files.tokenizer_type == "BertWordPieceLowerCase",
            "tokenize_chinese_chars": True,
            "strip_accents": None,
            "model_max_length": max_length,
        }
        | {f"{part}_token": f"[{part.upper()}]" for part in ("cls", "sep", "mask", "pad", "unk")},
    )
    return None


def find_tokenizer(folder: Path, *, model_type: str) -> TokenizerFiles | None:
    """The tokenizer of a folder of transformers: of our own kinds where the files allow, so that it counts as the same.

    Args:
        model_type: as in its ``config.json``.

    Raises:
        UserError: if a file cannot be read.
    """
    names = {path.name for path in folder.iterdir()}
    if model_type == "gpt2" and {"vocab.json", "merges.txt"} <= names:
        return TokenizerFiles(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
        )
    if model_type != "gpt2" and "vocab.txt" in names:
        lower_case = _lower_case(folder)
        return TokenizerFiles(
            tokenizer_type="BertWordPieceLowerCase" if lower_case else "BertWordPieceCase",
            vocab_file=str(folder / "vocab.txt"),
        )
    if DEFINITION_FILE in names and not (_SENTENCEPIECE_FILES[0] in names and _is_made_from_sentencepiece(folder)):
        return TokenizerFiles(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / DEFINITION_FILE))
    for name in _SENTENCEPIECE_FILES:
        if name in names:
            return TokenizerFiles(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / name))
    return None


def copy_tokenizer(files: TokenizerFiles, folder: Path) -> dict[str, str]:
    """Copy the files of a tokenizer into a new folder.

    Returns:
        Their new names there, by setting.

    Raises:
        UserError: if one cannot be copied.
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
    """The model itself and, if the tokenizers library can do what it does, its definition there."""
    (folder / _SENTENCEPIECE_FILES[0]).write_bytes(tokenizer.model)
    try:
        definition = definition_of(tokenizer.model)
        require_same_ids(definition, tokenizer)
    except NotExpressible as reason:
        return (
            f"AutoTokenizer cannot read this SentencePiece model, which {reason}; it is in the folder as"
            f" {_SENTENCEPIECE_FILES[0]}, for the sentencepiece library"
        )
    special = {"unk_token": tokenizer.unknown}
    if tokenizer.eod is not None:
        special |= {"bos_token": tokenizer.eod, "eos_token": tokenizer.eod}
    if tokenizer.masking is not None:
        definition = with_bert_template(definition, tokenizer)
        special |= {f"{part}_token": getattr(tokenizer.masking, part) for part in ("cls", "sep", "mask", "pad")}
    (folder / DEFINITION_FILE).write_text(definition, encoding="utf-8")
    _write_json(
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


def _is_made_from_sentencepiece(folder: Path) -> bool:
    config = folder / CONFIG_FILE
    if not config.is_file():
        return False
    entries = read_json(str(config), "a file of the transformers library")
    return isinstance(entries, Mapping) and entries.get(_MADE_FROM) == _SENTENCEPIECE_FILES[0]


def _copy_definition(path: Path, folder: Path, *, max_length: int) -> None:
    shutil.copyfile(path, folder / DEFINITION_FILE)
    _copy_companions(path, folder)
    if not (folder / CONFIG_FILE).exists():
        _write_json(
            folder / CONFIG_FILE, {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
        )


def _copy_companions(path: Path, folder: Path) -> None:
    """Copy what lies beside a ``tokenizer.json`` and belongs to it."""
    for companion in _COMPANIONS:
        if path.with_name(companion).is_file():
            shutil.copyfile(path.with_name(companion), folder / companion)


def _lower_case(folder: Path) -> bool:
    """True if a BERT's text is to be lower-cased; transformers' rule is yes where no file says."""
    config = folder / CONFIG_FILE
    if config.is_file():
        entries = read_json(str(config), "a file of the transformers library")
        if isinstance(entries, Mapping) and isinstance(entries.get("do_lower_case"), bool):
            return bool(entries["do_lower_case"])
    definition = folder / DEFINITION_FILE
    if definition.is_file():
        entries = read_json(str(definition), "a tokenizer.json of the tokenizers library")
        normalizer = entries.get("normalizer") if isinstance(entries, Mapping) else None
        if isinstance(normalizer, Mapping) and isinstance(normalizer.get("lowercase"), bool):
            return bool(normalizer["lowercase"])
    return True


def _write_json(path: Path, entries: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
