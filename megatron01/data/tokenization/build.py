"""From settings to a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron01.config import TokenizerType
from megatron01.data.tokenization.tokenizer import Tokenizer
from megatron01.errors import UserError


class TokenizerSettings(Protocol):
    """The settings that choose a tokenizer; DataConfig and PreprocessConfig have them."""

    @property
    def tokenizer_type(self) -> TokenizerType: ...
    @property
    def vocab_file(self) -> str: ...
    @property
    def merge_file(self) -> str | None: ...
    @property
    def tokenizer_model(self) -> str | None: ...


@dataclass(frozen=True)
class _Kind:
    files: dict[str, str]  # setting -> what it has to name
    build: Callable[..., Tokenizer]  # from the values of these settings, in their order


def _wordpiece_lower_case(vocab_file: str) -> Tokenizer:
    from megatron01.data.tokenization.wordpiece import build_wordpiece

    return build_wordpiece(vocab_file, lower_case=True)


def _wordpiece_cased(vocab_file: str) -> Tokenizer:
    from megatron01.data.tokenization.wordpiece import build_wordpiece

    return build_wordpiece(vocab_file, lower_case=False)


def _byte_level_bpe(vocab_file: str, merge_file: str) -> Tokenizer:
    from megatron01.data.tokenization.byte_level_bpe import build_byte_level_bpe

    return build_byte_level_bpe(vocab_file, merge_file)


def _sentencepiece(tokenizer_model: str) -> Tokenizer:
    from megatron01.data.tokenization.sentencepiece_model import build_sentencepiece

    return build_sentencepiece(tokenizer_model)


def _tokenizer_json(tokenizer_model: str) -> Tokenizer:
    from megatron01.data.tokenization.tokenizer_json import build_tokenizer_json

    return build_tokenizer_json(tokenizer_model)


_BERT_FILES = {"vocab_file": "the vocab.txt of a BERT model"}
_KINDS: dict[TokenizerType, _Kind] = {
    "BertWordPieceLowerCase": _Kind(_BERT_FILES, _wordpiece_lower_case),
    "BertWordPieceCase": _Kind(_BERT_FILES, _wordpiece_cased),
    "GPT2BPETokenizer": _Kind(
        {"vocab_file": "the vocab.json of a GPT-2 model", "merge_file": "the merges.txt that belongs to vocab_file"},
        _byte_level_bpe,
    ),
    "SentencePieceTokenizer": _Kind({"tokenizer_model": "the .model file of SentencePiece"}, _sentencepiece),
    "HuggingFaceTokenizer": _Kind({"tokenizer_model": "a tokenizer.json or a folder with one"}, _tokenizer_json),
}


def build_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """The tokenizer of a run, from its vocabulary files.

    Raises:
        UserError: if a file is missing or is not a vocabulary of the chosen type, or if a file is given that the type
            does not take.
    """
    kind = _KINDS[settings.tokenizer_type]
    for setting in ("vocab_file", "merge_file", "tokenizer_model"):
        path = getattr(settings, setting)
        if setting in kind.files and not path:
            raise UserError(f"{setting} is not given; {settings.tokenizer_type} needs {kind.files[setting]}")
        if setting not in kind.files and path:
            flag = "--" + setting.replace("_", "-")
            raise UserError(
                f"{setting} {path} is given, but {settings.tokenizer_type} takes {' and '.join(kind.files)} alone;"
                f" leave it out ({flag} '' if a --config file sets it) or choose another tokenizer_type"
            )
    return kind.build(*(getattr(settings, setting) for setting in kind.files))
