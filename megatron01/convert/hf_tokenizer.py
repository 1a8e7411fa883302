"""Tokenizer files of Hugging Face folders: written for ``AutoTokenizer``, and read as tokenizers of this package."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from megatron01.data.tokenizers import (
    COMPANIONS,
    CONFIG_FILE,
    DEFINITION_FILE,
    END_OF_DOCUMENT,
    WORD_START,
    FastTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerFiles,
    library_entries,
)
from megatron01.errors import UserError, import_optional
from megatron01.utils.files import shipped

SENTENCEPIECE_FILE = "tokenizer.model"  # as it is exported
_SENTENCEPIECE_ENTRY = "sentencepiece_model"  # of a tokenizer_config.json, beside a tokenizer.json made from that model
_ADDED_TOKENS_FILE = "added_tokens.json"  # of transformers 4: token -> id, beyond the vocabulary
_OWN_CLASSES = ("BertTokenizer", "GPT2Tokenizer")  # transformers' names of the tokenizers that megatron01 has, too
_SENTENCEPIECE_FILES = (SENTENCEPIECE_FILE, "spiece.model", "sentencepiece.bpe.model")


def write_tokenizer(files: TokenizerFiles, folder: Path, *, max_length: int) -> str | None:
    """Write what ``AutoTokenizer.from_pretrained`` needs, and the original vocabulary beside it.

    ``max_length``: positions of the model. Returns a warning for the user, or None.
    """
    tokenizer = files.built
    entries: dict[str, Any] = {"model_max_length": max_length}
    if tokenizer.masking is not None:  # else transformers 5 leaves out which text of a pair a token is of
        entries["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if isinstance(tokenizer, SentencePieceTokenizer):
        (folder / SENTENCEPIECE_FILE).write_bytes(tokenizer.model)
        backend = sentencepiece_backend(tokenizer)
        if backend is None:
            return (
                f"no {DEFINITION_FILE} for AutoTokenizer: {tokenizer.name} is a SentencePiece model of words or"
                " characters, or marks the ends of words; the tokenizers library takes unigram and BPE models that mark"
                " the beginnings"
            )
        special = {"unk": tokenizer.unknown, "bos": tokenizer.eod, "eos": tokenizer.eod}
        if tokenizer.masking is not None:
            special |= {part: getattr(tokenizer.masking, part) for part in ("cls", "sep", "mask", "pad")}
            add_bert_template(backend, tokenizer)
        (folder / DEFINITION_FILE).write_text(backend.to_str(), encoding="utf-8")
        entries |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        entries |= {f"{name}_token": tokenizer.token(token) for name, token in special.items() if token is not None}
        write_json(folder / CONFIG_FILE, entries | {_SENTENCEPIECE_ENTRY: SENTENCEPIECE_FILE})
        return None
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
        backend = Backend.from_str(tokenizer.definition)
        add_bert_template(backend, tokenizer)
        (folder / DEFINITION_FILE).write_text(backend.to_str(), encoding="utf-8")
        entries |= {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": True, "strip_accents": None}
        entries |= {"do_lower_case": files.tokenizer_type == "BertWordPieceLowerCase"}
        entries |= {f"{part}_token": f"[{part.upper()}]" for part in ("cls", "sep", "mask", "pad", "unk")}
    write_json(folder / CONFIG_FILE, entries)
    return None


def find_tokenizer(folder: Path, *, model_type: str, num_ids: int) -> TokenizerFiles | None:
    """The tokenizer of a folder of transformers; of megatron01's own types if possible, so that fingerprints agree.

    ``num_ids``: rows of the model's vocabulary. Raises UserError if a file cannot be read, or if no type of tokenizer
    does what ``tokenizer_config.json`` says.
    """
    names = {path.name for path in folder.iterdir()}
    settings, definition = library_entries(folder / CONFIG_FILE), library_entries(folder / DEFINITION_FILE)
    rules = _rules(settings, definition)
    lower_case = rules["do_lower_case"]
    kind = settings.get("tokenizer_class") or library_entries(folder / "config.json").get("tokenizer_class")
    is_own = kind is None or str(kind).removesuffix("Fast") in _OWN_CLASSES  # others divide text into words otherwise
    if settings.get(_SENTENCEPIECE_ENTRY) == SENTENCEPIECE_FILE and SENTENCEPIECE_FILE in names:  # as written above
        return TokenizerFiles(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / SENTENCEPIECE_FILE))
    own = None
    if is_own and model_type == "gpt2" and {"vocab.json", "merges.txt"} <= names:
        own = TokenizerFiles(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
        )
    if is_own and model_type != "gpt2" and "vocab.txt" in names:
        own = TokenizerFiles(
            tokenizer_type="BertWordPieceLowerCase" if lower_case else "BertWordPieceCase",
            vocab_file=str(folder / "vocab.txt"),
        )
    if own is not None:
        own_rules = _rules({"do_lower_case": lower_case}, {})
        tokens = definition.get("added_tokens")
        added = [token.get("id") for token in tokens if isinstance(token, Mapping)] if isinstance(tokens, list) else []
        added += library_entries(folder / _ADDED_TOKENS_FILE).values()
        has_more = any(token_id in range(own.built.vocab_size, num_ids) for token_id in added)
        if rules == own_rules and not has_more:
            return own
        if has_more and DEFINITION_FILE not in names:
            raise UserError(
                f"{folder} has an {_ADDED_TOKENS_FILE} and no {DEFINITION_FILE}, which would hold those tokens too;"
                " save the tokenizer again with transformers, which writes it"
            )
        defined = _rules({}, definition)
        if name := next((name for name in rules if rules[name] != defined[name]), None):
            raise UserError(
                f"{folder / CONFIG_FILE} has {name} {rules[name]}, and no {DEFINITION_FILE} there agrees; save the"
                " tokenizer again with transformers, which writes both"
            )
    if DEFINITION_FILE in names:
        return TokenizerFiles(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / DEFINITION_FILE))
    for name in _SENTENCEPIECE_FILES:
        if name in names:
            return TokenizerFiles(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / name))
    return None


def copy_tokenizer(files: TokenizerFiles, folder: Path) -> dict[str, str]:
    """Copy the files of a tokenizer into a new folder; returns their names there by setting.

    Raises UserError if one cannot be copied.
    """
    names: dict[str, str] = {}
    try:
        folder.mkdir()
        for setting, file in files.by_setting.items():
            path = shipped(file)
            if path.is_dir():  # a folder with a tokenizer.json
                path = path / DEFINITION_FILE
            names[setting] = f"{setting}-{path.name}" if path.name in names.values() else path.name
            shutil.copyfile(path, folder / names[setting])
            if files.tokenizer_type == "HuggingFaceTokenizer":
                _copy_companions(path, folder)
    except OSError as error:
        raise UserError(f"cannot copy {error.filename or folder}: {error.strerror}") from error
    return names


def sentencepiece_backend(tokenizer: SentencePieceTokenizer) -> Backend | None:
    """A SentencePiece model, unigram or BPE, as a pipeline of the ``tokenizers`` library: the same ids.

    But where two ways to cut a text are equally likely up to rounding, and for the name of a control symbol in a text,
    which becomes that symbol. None for a model of another kind. Raises UserError if protobuf is not installed.
    """
    proto = import_optional("sentencepiece.sentencepiece_model_pb2", tokenizer.name).ModelProto
    model = proto.FromString(tokenizer.model)
    kinds, rules, pieces = proto.SentencePiece, model.normalizer_spec, model.pieces
    by_kind: dict[int, dict[str, int]] = {}
    for index, piece in enumerate(pieces):
        by_kind.setdefault(piece.type, {})[piece.piece] = index
    normal, whole = by_kind.get(kinds.NORMAL, {}), by_kind.get(kinds.USER_DEFINED, {})
    training = model.trainer_spec
    if training.treat_whitespace_as_suffix or training.model_type not in (training.UNIGRAM, training.BPE):
        return None
    if training.model_type == training.UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in pieces]
        backend = Backend(models.Unigram(scores, tokenizer.unknown, training.byte_fallback))
    else:
        merges = [
            (-pieces[index].score, index, name[:cut], name[cut:])
            for name, index in normal.items()
            for cut in range(1, len(name))
            if name[:cut] in normal and name[cut:] in normal
        ]
        backend = Backend(
            models.BPE(
                {piece.piece: index for index, piece in enumerate(pieces)},
                [(left, right) for _, _, left, right in sorted(merges)],
                unk_token=pieces[tokenizer.unknown].piece,
                fuse_unk=True,
                byte_fallback=training.byte_fallback,
                ignore_merges=bool(whole),  # takes a piece of `whole` as it is
            )
        )
    mark = WORD_START if rules.escape_whitespaces else " "
    spaces = [(r"\A +| +\z", ""), (" {2,}", " ")] if rules.remove_extra_whitespaces else []
    steps: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    steps += [normalizers.Replace(Regex(pattern), content) for pattern, content in (*spaces, (" ", mark))]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(mark))
    backend.normalizer = normalizers.Sequence(steps)
    if whole:
        longest_first = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(WORD_START, " ")]
        + [decoders.ByteFallback()] * training.byte_fallback
        + [decoders.Fuse()]
        + [decoders.Strip(" ", left=1)] * rules.add_dummy_prefix
    )
    backend.add_special_tokens(list(by_kind.get(kinds.CONTROL, {})))
    return backend


def add_bert_template(backend: Backend, tokenizer: Tokenizer) -> None:
    """Let ``backend``, with the ids of a BERT's ``tokenizer``, put [CLS] before and [SEP] after each text."""
    assert tokenizer.masking is not None
    cls, sep = tokenizer.token(tokenizer.masking.cls), tokenizer.token(tokenizer.masking.sep)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.masking.cls), (sep, tokenizer.masking.sep)],
    )


def _copy_companions(path: Path, folder: Path) -> None:
    """Copy the files beside a ``tokenizer.json`` that belong to it."""
    for companion in COMPANIONS:
        if path.with_name(companion).is_file():
            shutil.copyfile(path.with_name(companion), folder / companion)


_RULES = {  # setting -> step of a tokenizer.json, and its name there
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
}


def _rules(settings: Mapping[str, Any], definition: Mapping[str, Any]) -> dict[str, bool]:
    """What is done to text first, by name: as the settings say, else the ``tokenizer.json``, else as is usual."""
    rules: dict[str, bool] = {}
    for name, (step, there) in _RULES.items():
        inner = definition.get(step)
        usual = {"strip_accents": rules.get("do_lower_case"), "add_prefix_space": False}.get(name, True)
        values = (settings.get(name), inner.get(there) if isinstance(inner, Mapping) else None)
        rules[name] = bool(next((value for value in values if isinstance(value, bool)), usual))
    return rules


def write_json(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a JSON object, formatted as transformers does."""
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
