"""Text to token ids: BERT's WordPiece and GPT-2's byte-level BPE, built from vocabulary files alone.

The work is done by Hugging Face's ``tokenizers``; the ids equal those of ``BertTokenizerFast`` and
``GPT2TokenizerFast`` without added special tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from megatron01.config import TokenizerType
from megatron01.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LONGEST_WORD = 100  # characters of a word above which BERT's WordPiece gives [UNK]


class TokenizerSettings(Protocol):
    """The settings that choose a tokenizer; DataConfig and PreprocessConfig have them."""

    @property
    def tokenizer_type(self) -> TokenizerType: ...
    @property
    def vocab_file(self) -> str: ...
    @property
    def merge_file(self) -> str | None: ...


class Tokenizer:
    """A vocabulary and the rules that cut text into its entries.

    Attributes:
        name: the vocabulary's file, for messages.
        vocab_size: number of entries, before any padding for the model.
        fingerprint: hash of the vocabulary and the rules; equal wherever the files lie.
    """

    def __init__(self, backend: Backend, *, name: str, fingerprint: str) -> None:
        self.name = name
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.fingerprint = fingerprint
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts; runs in parallel threads unless TOKENIZERS_PARALLELISM is false."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        """The vocabulary's entry for an id."""
        entry = self._backend.id_to_token(token_id)
        assert entry is not None, f"id {token_id} of a vocabulary of {self.vocab_size}"
        return entry

    def __reduce__(self) -> str | tuple[object, ...]:
        # Rebuilt from its serialized form, so that a tokenizer can be sent to another process.
        return _restore, (type(self), self._backend.to_str(), self.name, self.fingerprint)


class BertTokenizer(Tokenizer):
    """BERT's WordPiece.

    Attributes:
        cls, sep, pad, mask: ids of the special tokens.
        is_continuation: bool[vocab_size], true for the ``##`` pieces, which continue a word.
    """

    def __init__(self, backend: Backend, *, name: str, fingerprint: str) -> None:
        super().__init__(backend, name=name, fingerprint=fingerprint)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        ids = {token: vocabulary[token] for token in BERT_SPECIAL_TOKENS}
        self.pad, self.cls, self.sep, self.mask = (ids[entry] for entry in ("[PAD]", "[CLS]", "[SEP]", "[MASK]"))
        entries = (self.token(token_id) for token_id in range(self.vocab_size))
        self.is_continuation: NDArray[np.bool_] = np.array([entry.startswith("##") for entry in entries])


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE.

    Attributes:
        eod: id of the end-of-document token.
    """

    def __init__(self, backend: Backend, *, name: str, fingerprint: str) -> None:
        super().__init__(backend, name=name, fingerprint=fingerprint)
        self.eod = backend.get_vocab(with_added_tokens=True)[END_OF_DOCUMENT]


def build_tokenizer(settings: TokenizerSettings) -> BertTokenizer | GPT2Tokenizer:
    """The tokenizer of a run, from its vocabulary files.

    Raises:
        UserError: if a file is missing or is not a vocabulary of the chosen type.
    """
    if not settings.vocab_file:
        raise UserError(f"vocab_file is not given; expected the vocabulary of {settings.tokenizer_type}")
    if settings.tokenizer_type == "GPT2BPETokenizer":
        if not settings.merge_file:
            raise UserError("merge_file is not given; GPT2BPETokenizer needs the merges.txt of its vocab_file")
        return _build_gpt2(settings.vocab_file, settings.merge_file)
    if settings.merge_file:
        raise UserError(f"merge_file {settings.merge_file} is given, but {settings.tokenizer_type} has no merges")
    return _build_bert(settings.vocab_file, lower_case=settings.tokenizer_type == "BertWordPieceLowerCase")


def bert_backend(vocabulary: dict[str, int], *, lower_case: bool) -> Backend:
    """BERT's WordPiece rules over a vocabulary; also the starting point for training a new one."""
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens([token for token in BERT_SPECIAL_TOKENS if token in vocabulary])
    return backend


def _build_bert(vocab_file: str, *, lower_case: bool) -> BertTokenizer:
    lines = _read(vocab_file).removesuffix("\n").split("\n")
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
    rules = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    backend = bert_backend(vocabulary, lower_case=lower_case)
    return BertTokenizer(backend, name=vocab_file, fingerprint=_fingerprint(rules, entries))


def _build_gpt2(vocab_file: str, merge_file: str) -> GPT2Tokenizer:
    try:
        vocabulary = json.loads(_read(vocab_file))
    except json.JSONDecodeError as error:
        raise UserError(f"{vocab_file} is not JSON ({error}); expected the vocab.json of a GPT-2 model") from error
    is_map = isinstance(vocabulary, dict) and all(isinstance(token_id, int) for token_id in vocabulary.values())
    if not is_map or sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UserError(f"{vocab_file} does not map tokens to the ids 0 to their number - 1, each once")
    missing = [token for token in (*pre_tokenizers.ByteLevel.alphabet(), END_OF_DOCUMENT) if token not in vocabulary]
    if missing:
        raise UserError(f"{vocab_file} lacks {sorted(missing)[0]!r}; expected the vocab.json of a GPT-2 model")
    merges = _read_merges(merge_file, vocabulary)
    backend = Backend(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    entries = sorted(vocabulary, key=vocabulary.__getitem__) + [" ".join(pair) for pair in merges]
    return GPT2Tokenizer(backend, name=vocab_file, fingerprint=_fingerprint("GPT2BPETokenizer", entries))


def _read_merges(merge_file: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_read(merge_file).split("\n"), start=1):
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


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check vocab_file and merge_file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _fingerprint(rules: str, entries: Sequence[str]) -> str:
    return hashlib.sha256("\n".join((rules, *entries)).encode("utf-8")).hexdigest()


def _restore(kind: type[Tokenizer], backend: str, name: str, fingerprint: str) -> Tokenizer:
    return kind(Backend.from_str(backend), name=name, fingerprint=fingerprint)
