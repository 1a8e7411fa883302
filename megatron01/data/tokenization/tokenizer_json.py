"""Any tokenizer of Hugging Face's ``tokenizers`` library, from its ``tokenizer.json``; no code is loaded with it.

Ids equal those of ``PreTrainedTokenizerFast`` without added special tokens. Which special token plays which part is
read from ``tokenizer_config.json`` or ``special_tokens_map.json`` in the same folder, or else told by the usual names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from megatron01.data.tokenization.fast_tokenizer import FastTokenizer, masking_tokens
from megatron01.data.tokenization.vocabulary_files import fingerprint, read_json
from megatron01.errors import UserError

_FILE = "tokenizer.json"
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
_USUAL_NAMES = {
    "eos_token": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<eod>"),
    "cls_token": ("[CLS]", "<cls>", "<s>"),
    "sep_token": ("[SEP]", "<sep>", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>"),
}
_UNUSUAL = "a\u01c0 \u6771\U0001f3fb \U000e0100"
_BYTE_LEVEL_SPACES = tuple(chr(256 + byte) for byte in b"\t\n\v\f\r ")  # how byte-level vocabularies spell white space


def build_tokenizer_json(tokenizer_model: str) -> FastTokenizer:
    """The tokenizer of a ``tokenizer.json``, or of a folder with one.

    Its truncation, padding, template of special tokens and random merges (dropout) are left out: every text becomes all
    of its own tokens, always the same.

    Raises:
        UserError: if the file is missing or is not one of the ``tokenizers`` library.
    """
    path = Path(tokenizer_model)
    if path.is_dir():
        path = _file_in(path)
    definition = read_json(str(path), "a tokenizer.json of the tokenizers library")
    if not isinstance(definition, dict) or not isinstance(definition.get("model"), dict):
        raise UserError(f"{path} has no model; expected a tokenizer.json of the tokenizers library")
    definition |= {"truncation": None, "padding": None, "post_processor": None}
    if "dropout" in definition["model"]:
        definition["model"]["dropout"] = None
    try:
        backend = Backend.from_str(json.dumps(definition))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(
            f"{path} is not a tokenizer.json that tokenizers {_library_version()} can read: {error}"
        ) from error
    names = _special_names(path, backend)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UserError(f"{path} has an empty vocabulary")
    continues = _word_rule(definition)
    masking = None
    if continues is not None:
        parts = (names["cls_token"], names["sep_token"], names["mask_token"], names["pad_token"])
        masking = masking_tokens(backend, parts, continues)
    rules = json.dumps(definition, sort_keys=True)
    tokenizer = FastTokenizer(
        backend,
        name=str(path),
        fingerprint=fingerprint("HuggingFaceTokenizer", [rules, json.dumps(names, sort_keys=True)]),
        unknown=_find_unknown(definition["model"], vocabulary),
        eod=vocabulary.get(names["eos_token"]),
        masking=masking,
    )
    tokenizer.encode(_UNUSUAL)  # a vocabulary that cannot spell it is refused now, not after hours
    return tokenizer


def _file_in(folder: Path) -> Path:
    path = folder / _FILE
    if path.is_file():
        return path
    hint = ""
    if (folder / "merges.txt").is_file():
        hint = "; it has a merges.txt: use tokenizer_type GPT2BPETokenizer with its vocab_file and merge_file"
    elif (folder / "vocab.txt").is_file():
        hint = "; it has a vocab.txt: use tokenizer_type BertWordPieceLowerCase or BertWordPieceCase"
    else:
        models = sorted(folder.glob("*.model"))
        if models:
            hint = f"; for {models[0].name} use tokenizer_type SentencePieceTokenizer and its path as tokenizer_model"
    raise UserError(f"folder {folder} has no {_FILE}{hint}")


def _special_names(path: Path, backend: Backend) -> dict[str, str]:
    """For each part that a special token plays, its name; the vocabulary does not have to hold it."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    said: dict[str, str] = {}
    for companion in reversed(_COMPANIONS):  # the first one wins
        file = path.with_name(companion)
        if file.is_file():
            said |= _names_in(read_json(str(file), "a file of the transformers library"))
    names = {}
    for part, usual in _USUAL_NAMES.items():
        names[part] = said.get(part) or next((name for name in usual if name in vocabulary), usual[0])
    return names


def _names_in(contents: Any) -> dict[str, str]:
    """The special tokens that a companion file names, each as text or as an object with the text as ``content``."""
    names = {}
    for part in _USUAL_NAMES:
        token = contents.get(part) if isinstance(contents, Mapping) else None
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str):
            names[part] = content
    return names


def _find_unknown(model: Mapping[str, Any], vocabulary: Mapping[str, int]) -> int | None:
    if model.get("type") == "Unigram":
        unknown = model.get("unk_id")
        return unknown if isinstance(unknown, int) else None
    return vocabulary.get(model.get("unk_token") or "")


def _word_rule(definition: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """Whether an entry continues a word, by the mark that this kind of vocabulary has; None if it has no such mark."""
    model = definition["model"]
    prefix = model.get("continuing_subword_prefix")
    if prefix:
        return lambda entry: entry.startswith(prefix)
    if model.get("end_of_word_suffix"):
        return None  # whether an entry continues a word depends on the entry before it
    steps = list(_steps([definition.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]))
    for step in steps:
        mark = step.get("replacement") if step.get("type") == "Metaspace" else None
        if mark is None and step.get("type") == "Replace" and step.get("content") == "\u2581":
            mark = "\u2581"  # as vocabularies converted from SentencePiece without a Metaspace step have it
        if isinstance(mark, str):
            return lambda entry: not entry.startswith(mark)
    if any(step.get("type") == "ByteLevel" for step in steps):
        return lambda entry: not entry.startswith(_BYTE_LEVEL_SPACES)
    if model.get("type") == "WordLevel":
        return lambda entry: False
    return None


def _steps(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects within a value, itself included."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _steps(inner)


def _library_version() -> str:
    import tokenizers

    return tokenizers.__version__
