"""Tokenizers: text to token ids and back, with the special tokens that training needs.

BERT's WordPiece, GPT-2's byte-level BPE and any ``tokenizer.json`` run in Hugging Face's ``tokenizers`` library,
SentencePiece models (unigram or BPE) in ``sentencepiece``, with its ids and no added tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from megatron01.config import DataConfig, TokenizerType
from megatron01.config.commands import LoadConfig, PreprocessConfig
from megatron01.errors import UserError, import_optional
from megatron01.utils.files import json_object, open_regular, read_json_object, shipped


@dataclass(frozen=True)
class MaskingTokens:
    """Special tokens and word boundaries for BERT samples."""

    cls: int  # ids
    sep: int
    mask: int
    pad: int
    is_continuation: NDArray[np.bool_]  # (vocab_size,), true for the entries that continue a word


@dataclass(kw_only=True, eq=False, repr=False)
class Tokenizer(ABC):
    """A vocabulary and the rules that cut text into its entries."""

    name: str  # the vocabulary's file, for messages
    vocab_size: int  # number of ids, before any padding for the model
    fingerprint: str  # hash of the vocabulary and the rules; equal wherever the files lie
    unknown: int | None  # id of the unknown token, None if the vocabulary can encode all text
    eod: int | None  # id of the token that ends a document, None if the vocabulary has none
    masking: MaskingTokens | None  # what BERT samples need, None if the vocabulary lacks some of it

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it.

        Raises UnicodeEncodeError if the text holds an unpaired surrogate, which no encoding of Unicode has.
        """
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As ``encode``, of many texts; releases the GIL, and uses threads unless TOKENIZERS_PARALLELISM=false."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""

    @abstractmethod
    def token(self, token_id: int) -> str:
        """The vocabulary's entry for an id."""


def checked_text(value: Any, what: str, place: str) -> str:
    """``value``, if it is text that a tokenizer can encode; ``what`` and ``place`` are for the message.

    Raises UserError if it is not text, or holds half of a surrogate pair, which cannot be encoded.
    """
    if not isinstance(value, str):
        raise UserError(f"{place}: {what} is {value!r}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: {what} holds half of a surrogate pair; expected text") from None
    return value


class FastTokenizer(Tokenizer):
    """A pipeline of the ``tokenizers`` library; its own template of special tokens is never applied.

    Encoding raises UserError for text outside of the vocabulary if there is no unknown token.
    """

    def __init__(self, backend: Backend, **attributes: Any) -> None:
        super().__init__(vocab_size=count_ids(backend.get_vocab(with_added_tokens=True)), **attributes)
        self._backend = backend

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                text.encode("utf-8")  # the library reports an unpaired surrogate as a wrong type
            raise
        except Exception as error:  # the library raises nothing more precise
            raise UserError(
                f"{self.name} cannot encode every text: {error}; it needs a token for what is not in its vocabulary"
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        entry = self._backend.id_to_token(token_id)
        assert entry is not None, f"id {token_id} of a vocabulary of {self.vocab_size}"
        return entry

    @property
    def definition(self) -> str:
        """The pipeline as a ``tokenizer.json``."""
        return str(self._backend.to_str())


def count_ids(vocabulary: Mapping[str, int]) -> int:
    """One more than the largest id: a vocabulary may leave ids out."""
    return max(vocabulary.values(), default=-1) + 1


WordRule = Callable[[str], bool]  # whether an entry of the vocabulary, other than a special token, continues a word


def masking_tokens(
    vocabulary: Mapping[str, int], names: Sequence[str], special: Collection[str], continues: WordRule | None
) -> MaskingTokens | None:
    """The special tokens called ``names`` (cls, sep, mask, pad); None without one of them or without a word rule.

    None of the ``special`` tokens continues a word.
    """
    if continues is None or any(name not in vocabulary for name in names):
        return None
    is_continuation = np.zeros(count_ids(vocabulary), dtype=np.bool_)
    for entry, token_id in vocabulary.items():
        is_continuation[token_id] = entry not in special and continues(entry)
    cls, sep, mask, pad = (vocabulary[name] for name in names)
    return MaskingTokens(cls, sep, mask, pad, is_continuation)


def read_bytes(path: str) -> bytes:
    """The content of a file. Raises UserError if it cannot be read."""
    try:
        with open_regular(Path(path)) as file:
            return file.read()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; check vocab_file, merge_file and tokenizer_model"
        ) from error


def read_text(path: str) -> str:
    """The content of a file of UTF-8 text, without a byte-order mark. Raises UserError if it is not readable text."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def fingerprint(rules: str, entries: Sequence[str]) -> str:
    """Hash of a tokenizer: the name of its rules and everything else it is made of."""
    return hashlib.sha256("\n".join((rules, *entries)).encode("utf-8")).hexdigest()


BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"
_LONGEST_WORD = 100  # characters of a word above which BERT's WordPiece gives [UNK]


def build_wordpiece(vocab_file: str, *, lower_case: bool) -> FastTokenizer:
    """BERT's WordPiece; ids equal those of ``BertTokenizerFast`` without added special tokens.

    Raises UserError if ``vocab_file`` is not the vocabulary of a BERT model, one entry a line.
    """
    lines = read_text(vocab_file).removesuffix("\n").split("\n")
    entries = [line.removesuffix("\r") for line in lines]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    if len(vocabulary) < len(entries):
        repeated = next(index for index, entry in enumerate(entries) if vocabulary[entry] != index)
        raise UserError(
            f"{vocab_file} line {repeated + 1} repeats {entries[repeated]!r}; expected one entry a line, each once"
        )
    missing = [token for token in BERT_SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise UserError(f"{vocab_file} lacks {', '.join(missing)}; expected the vocab.txt of a BERT model")
    backend = wordpiece_backend(vocabulary, lower_case=lower_case)
    return FastTokenizer(
        backend,
        name=vocab_file,
        fingerprint=fingerprint("BertWordPieceLowerCase" if lower_case else "BertWordPieceCase", entries),
        unknown=vocabulary["[UNK]"],
        eod=None,
        masking=masking_tokens(
            vocabulary,
            ("[CLS]", "[SEP]", "[MASK]", "[PAD]"),
            BERT_SPECIAL_TOKENS,
            lambda entry: entry.startswith(CONTINUATION),
        ),
    )


def wordpiece_backend(vocabulary: dict[str, int], *, lower_case: bool) -> Backend:
    """BERT's rules over a vocabulary; also the starting point for training a new one."""
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION)
    backend.add_special_tokens([token for token in BERT_SPECIAL_TOKENS if token in vocabulary])
    return backend


END_OF_DOCUMENT = "<|endoftext|>"
_MOST_UNMADE = 8  # and one in a hundred: entries that no merge makes, such as special tokens


def build_byte_level_bpe(vocab_file: str, merge_file: str) -> FastTokenizer:
    """GPT-2's byte-level BPE; ids equal those of ``GPT2TokenizerFast``.

    Raises UserError if a file is missing or is not that of a GPT-2 model.
    """
    vocabulary = json_object(read_bytes(vocab_file), vocab_file, expected="the vocab.json of a GPT-2 model")
    is_map = all(isinstance(token_id, int) for token_id in vocabulary.values())
    if not is_map or sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UserError(f"{vocab_file} does not map tokens to the ids 0 to their number - 1, each once")
    checked_text("".join(vocabulary), "its vocabulary", vocab_file)
    missing = [token for token in (*pre_tokenizers.ByteLevel.alphabet(), END_OF_DOCUMENT) if token not in vocabulary]
    if missing:
        raise UserError(f"{vocab_file} lacks {sorted(missing)[0]!r}; expected the vocab.json of a GPT-2 model")
    merges = _read_merges(merge_file, vocabulary)
    num_made = len(pre_tokenizers.ByteLevel.alphabet()) + len({left + right for left, right in merges})
    if len(vocabulary) - num_made > _MOST_UNMADE + len(vocabulary) // 100:
        raise UserError(
            f"{merge_file} makes {num_made} of the {len(vocabulary)} entries of {vocab_file}; expected the merges.txt"
            " that belongs to it, whole"
        )
    entries = sorted(vocabulary, key=vocabulary.__getitem__) + [" ".join(pair) for pair in merges]
    return FastTokenizer(
        byte_level_backend(vocabulary, merges),
        name=vocab_file,
        fingerprint=fingerprint("GPT2BPETokenizer", entries),
        unknown=None,
        eod=vocabulary[END_OF_DOCUMENT],
        masking=None,
    )


def byte_level_backend(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
    """GPT-2's rules over a vocabulary; also the starting point for training a new one."""
    backend = Backend(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if END_OF_DOCUMENT in vocabulary:
        backend.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return backend


def _read_merges(merge_file: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(merge_file).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or any(part not in vocabulary for part in (*parts, "".join(parts))):
            raise UserError(
                f"{merge_file} line {number} is {line[:60]!r}, not two entries of the vocabulary that join into a"
                " third; expected the merges.txt that belongs to vocab_file"
            )
        merges.append((parts[0], parts[1]))
    return merges


# files of the transformers library; the others may lie beside the first
DEFINITION_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
COMPANIONS = (CONFIG_FILE, "special_tokens_map.json")
_USUAL_NAMES = {
    "eos_token": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<eod>"),
    "cls_token": ("[CLS]", "<cls>", "<s>"),
    "sep_token": ("[SEP]", "<sep>", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>"),
}
_RARE_TEXT = "a\u01c0 \u6771\U0001f3fb \U000e0100"
_BYTE_LEVEL_SPACES = tuple(chr(256 + byte) for byte in b"\t\n\v\f\r ")  # how byte-level vocabularies spell white space


def build_tokenizer_json(tokenizer_model: str) -> FastTokenizer:
    """The tokenizer of a ``tokenizer.json``, or of a folder with one; no code is loaded with it.

    Ids equal those of ``PreTrainedTokenizerFast`` without added special tokens. Roles of special tokens are read from
    ``tokenizer_config.json`` or ``special_tokens_map.json`` in the same folder, else found by the usual names.
    Truncation, padding, template of special tokens and random merges (dropout) are disabled: encoding is complete and
    deterministic. Raises UserError if the file is missing or is not one of the ``tokenizers`` library.
    """
    path = Path(tokenizer_model)
    if path.is_dir():
        path = _file_in(path)
    definition = json_object(read_bytes(str(path)), str(path), expected="a tokenizer.json of the tokenizers library")
    if not isinstance(definition.get("model"), dict):
        raise UserError(f"{path} has no model; expected a tokenizer.json of the tokenizers library")
    definition |= {"truncation": None, "padding": None, "post_processor": None}
    if "dropout" in definition["model"]:
        definition["model"]["dropout"] = None
    try:
        backend = Backend.from_str(json.dumps(definition))
    except BaseException as error:  # the library raises nothing more precise; a panic of its Rust code is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{path} is not a tokenizer.json that tokenizers {metadata.version('tokenizers')} can read: {error}"
        ) from error
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UserError(f"{path} has an empty vocabulary")
    names = _special_names(path, vocabulary)
    model = definition["model"]
    unknown = model.get("unk_id") if model.get("type") == "Unigram" else vocabulary.get(model.get("unk_token") or "")
    for_masking = [names[f"{role}_token"] for role in ("cls", "sep", "mask", "pad")]
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    rules = json.dumps(definition, sort_keys=True)
    tokenizer = FastTokenizer(
        backend,
        name=str(path),
        fingerprint=fingerprint("HuggingFaceTokenizer", [rules, json.dumps(names, sort_keys=True)]),
        unknown=unknown if isinstance(unknown, int) else None,
        eod=vocabulary.get(names["eos_token"]),
        masking=masking_tokens(vocabulary, for_masking, special, _word_rule(definition)),
    )
    tokenizer.encode(_RARE_TEXT)  # a vocabulary that cannot encode it is refused now, not after hours
    if tokenizer.unknown is None and tokenizer.encode(f"a{_RARE_TEXT[1]}a") == tokenizer.encode("aa"):
        raise UserError(
            f"{path} would leave out characters that are not in its vocabulary; give its model an unk_token, or train"
            " one on bytes"
        )
    return tokenizer


def _file_in(folder: Path) -> Path:
    path = folder / DEFINITION_FILE
    if path.is_file():
        return path
    models, hint = sorted(folder.glob("*.model")), ""
    if (folder / "merges.txt").is_file():
        hint = "; it has a merges.txt: use tokenizer_type GPT2BPETokenizer with its vocab_file and merge_file"
    elif (folder / "vocab.txt").is_file():
        hint = "; it has a vocab.txt: use tokenizer_type BertWordPieceLowerCase or BertWordPieceCase"
    elif models:
        hint = f"; for {models[0].name} use tokenizer_type SentencePieceTokenizer and its path as tokenizer_model"
    raise UserError(f"folder {folder} has no {DEFINITION_FILE}{hint}")


def _special_names(path: Path, vocabulary: Mapping[str, int]) -> dict[str, str]:
    """Role of a special token -> its name, which the vocabulary need not hold."""
    names = {}
    for role, usual in _USUAL_NAMES.items():
        names[role] = next((name for name in usual if name in vocabulary), usual[0])
    for companion in reversed(COMPANIONS):  # the first one wins
        contents = library_entries(path.with_name(companion))
        for role in _USUAL_NAMES:
            token = contents.get(role)
            content = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(content, str) and content:
                names[role] = content
    return names


def library_entries(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file of the transformers library; empty if there is no such file."""
    return read_json_object(path, expected="a file of the transformers library") if path.is_file() else {}


def _word_rule(definition: Mapping[str, Any]) -> WordRule | None:
    """The rule that follows from this vocabulary's word-boundary marks; None if it has none."""
    model = definition["model"]
    prefix = model.get("continuing_subword_prefix")
    if prefix:
        return lambda entry: entry.startswith(prefix)
    if model.get("end_of_word_suffix"):
        return None  # whether an entry continues a word depends on the entry before it
    steps = list(_steps([definition.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]))
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
    """All JSON objects nested in a value, itself included."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _steps(inner)


WORD_START = "\u2581"  # prefix of a piece that follows a space
_ENDS_OF_DOCUMENT = ("<eod>", "<EOD>", "<|endoftext|>")  # take precedence over the end of a sentence, </s>
_MASKING_TOKENS = (("[CLS]", "<cls>"), ("[SEP]", "<sep>"), ("[MASK]", "<mask>"), ("[PAD]", "<pad>"))
_FALSE = ("", "off", "false", "f", "no", "n", "0")  # of TOKENIZERS_PARALLELISM, as the tokenizers library reads it


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, from its .model file; control symbols such as ``</s>`` never come from text."""

    def __init__(self, name: str) -> None:
        self.model = read_bytes(name)
        self._processor = processor = import_optional("sentencepiece", name).SentencePieceProcessor()
        try:
            if not self.model:
                raise RuntimeError("it is empty")
            processor.load_from_serialized_proto(self.model)
        except RuntimeError as error:
            raise UserError(f"{name} is not a SentencePiece model; expected a .model file of its trainer") from error
        vocabulary = {processor.id_to_piece(index): index for index in range(processor.get_piece_size())}
        eod = next((vocabulary[name] for name in _ENDS_OF_DOCUMENT if name in vocabulary), processor.eos_id())
        super().__init__(
            name=name,
            vocab_size=processor.get_piece_size(),
            fingerprint=hashlib.sha256(b"SentencePieceTokenizer\n" + self.model).hexdigest(),
            unknown=processor.unk_id(),
            eod=eod if eod >= 0 else None,  # -1 if the model was trained without
            masking=self._masking(vocabulary),
        )

    def _masking(self, vocabulary: Mapping[str, int]) -> MaskingTokens | None:
        processor = self._processor
        names = [next((name for name in usual if name in vocabulary), "") for usual in _MASKING_TOKENS]
        symbols = {p for p, index in vocabulary.items() if processor.is_control(index) or processor.is_unknown(index)}
        if not any(len(piece) > 1 and piece.startswith(WORD_START) for piece in vocabulary):
            return None  # trained with the mark as a suffix, so that no piece tells whether it begins a word
        return masking_tokens(vocabulary, names, {*symbols, *names}, lambda piece: not piece.startswith(WORD_START))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        parallel = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() not in _FALSE and len(texts) > 1
        try:
            return list(self._processor.encode(list(texts), out_type=int, num_threads=-1 if parallel else 1))
        except (RuntimeError, TypeError):
            for text in texts:
                text.encode("utf-8")  # the library does not name an unpaired surrogate as the cause
            raise

    def decode(self, ids: Sequence[int]) -> str:
        # The library leaves control symbols out.
        processor = self._processor
        runs = ((control, list(run)) for control, run in groupby(map(int, ids), key=processor.is_control))
        return "".join("".join(map(self.token, run)) if control else processor.decode(run) for control, run in runs)

    def token(self, token_id: int) -> str:
        return str(self._processor.id_to_piece(token_id))


class VocabularyFile(NamedTuple):
    """A file of a vocabulary."""

    description: str  # for messages
    ending: str  # of its name, where it is trained


class TokenizerKind(NamedTuple):
    """How a type of tokenizer is built."""

    files: dict[str, VocabularyFile]  # by the setting that names the file
    build: Callable[..., Tokenizer]  # of the files' paths, in this order


_BERT_FILES = {"vocab_file": VocabularyFile("the vocab.txt of a BERT model", "-vocab.txt")}
_GPT2_FILES = {
    "vocab_file": VocabularyFile("the vocab.json of a GPT-2 model", "-vocab.json"),
    "merge_file": VocabularyFile("the merges.txt that belongs to vocab_file", "-merges.txt"),
}
_SENTENCEPIECE_FILES = {"tokenizer_model": VocabularyFile("the .model file of SentencePiece", ".model")}
_JSON_FILES = {"tokenizer_model": VocabularyFile("a tokenizer.json or a folder with one", "-tokenizer.json")}
TOKENIZERS: dict[TokenizerType, TokenizerKind] = {
    "BertWordPieceLowerCase": TokenizerKind(_BERT_FILES, partial(build_wordpiece, lower_case=True)),
    "BertWordPieceCase": TokenizerKind(_BERT_FILES, partial(build_wordpiece, lower_case=False)),
    "GPT2BPETokenizer": TokenizerKind(_GPT2_FILES, build_byte_level_bpe),
    "SentencePieceTokenizer": TokenizerKind(_SENTENCEPIECE_FILES, SentencePieceTokenizer),
    "HuggingFaceTokenizer": TokenizerKind(_JSON_FILES, build_tokenizer_json),
}


def build_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """The tokenizer of a run, from its vocabulary files.

    Raises UserError if a file is missing or is not a vocabulary of the chosen type, or if a file is given that the type
    does not take.
    """
    files, build = TOKENIZERS[settings.tokenizer_type]
    for setting in ("vocab_file", "merge_file", "tokenizer_model"):
        path = getattr(settings, setting)
        if setting in files and not path:
            raise UserError(f"{setting} is not given; {settings.tokenizer_type} needs {files[setting].description}")
        if setting not in files and path:
            flag = "--" + setting.replace("_", "-")
            raise UserError(
                f"{setting} {path} is given, but {settings.tokenizer_type} takes {' and '.join(files)} only;"
                f" leave it out ({flag} '' if a --config file sets it) or choose another tokenizer_type"
            )
    return build(*(str(shipped(getattr(settings, setting))) for setting in files))


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """Type and files of a tokenizer."""

    tokenizer_type: TokenizerType
    vocab_file: str = ""
    merge_file: str | None = None
    tokenizer_model: str | None = None

    @classmethod
    def of(cls, settings: TokenizerSettings) -> TokenizerFiles:
        """The tokenizer settings among ``settings``."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    @classmethod
    def given(cls, config: LoadConfig) -> TokenizerFiles | None:
        """The tokenizer that the settings choose; None to use the model's own."""
        return None if config.tokenizer_type is None else cls.of(config)  # type: ignore[arg-type]

    @property
    def by_setting(self) -> dict[str, str]:
        """The files that are given, by the name of their setting."""
        values = {name: getattr(self, name) for name in ("vocab_file", "merge_file", "tokenizer_model")}
        return {name: value for name, value in values.items() if value}

    @cached_property
    def built(self) -> Tokenizer:
        """The tokenizer. Raises UserError if its files cannot be read."""
        return build_tokenizer(self)


TokenizerSettings = DataConfig | PreprocessConfig | TokenizerFiles
"""Settings that choose a tokenizer."""
