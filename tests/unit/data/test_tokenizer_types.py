"""What each kind of vocabulary file provides: special tokens, word boundaries, and errors that name the file."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron01.config import GPTDataConfig
from megatron01.data import Tokenizer, build_tokenizer
from megatron01.data.tokenizers import build_byte_level_bpe, build_wordpiece
from megatron01.errors import UserError
from tests.unit.data.conftest import DATA


def of_model(path: Path, kind: Any = "HuggingFaceTokenizer") -> Tokenizer:
    return build_tokenizer(GPTDataConfig(tokenizer_type=kind, tokenizer_model=str(path)))


def train_sentencepiece(path: Path, **options: Any) -> Tokenizer:
    model = io.BytesIO()
    text = ["the trees and the houses", "rivers, trees, unquestionable houses"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return of_model(path, "SentencePieceTokenizer")


def test_special_tokens_of_sentencepiece(tmp_path: Path) -> None:
    plain = train_sentencepiece(tmp_path / "plain.model")
    assert (plain.unknown, plain.eod, plain.masking) == (0, 2, None)
    assert plain.token(2) == "</s>"
    assert pickle.loads(pickle.dumps(plain)).encode("the trees") == plain.encode("the trees")
    named = train_sentencepiece(tmp_path / "named.model", control_symbols=["<eod>"])
    assert named.eod is not None and named.token(named.eod) == "<eod>"
    none = train_sentencepiece(tmp_path / "none.model", bos_id=-1, eos_id=-1)
    assert none.eod is None


@pytest.mark.parametrize("names", [["[CLS]", "[SEP]", "[MASK]"], ["<cls>", "<sep>", "<mask>"]])
def test_words_of_sentencepiece_begin_with_its_mark(tmp_path: Path, names: list[str]) -> None:
    tokenizer = train_sentencepiece(tmp_path / "x.model", control_symbols=names, pad_id=3)
    tokens = tokenizer.masking
    assert tokens is not None
    assert [tokenizer.token(token) for token in (tokens.cls, tokens.sep, tokens.mask)] == names
    assert tokens.pad == 3
    ids = tokenizer.encode("unquestionable trees")
    begins = [tokenizer.token(token).startswith("▁") for token in ids]
    assert begins.count(True) == 2 and len(ids) > 2
    assert tokens.is_continuation[ids].tolist() == [not first for first in begins]
    assert tokens.is_continuation.dtype == np.bool_ and len(tokens.is_continuation) == tokenizer.vocab_size
    assert not tokens.is_continuation[[tokens.cls, tokens.sep, tokens.mask, tokens.pad, 0]].any()
    # Control symbols in a text are not encoded as such, but decoding prints them.
    assert not {tokens.cls, tokens.mask} & set(tokenizer.encode(" ".join(names)))
    assert tokenizer.decode([tokens.cls, *ids, tokens.sep]) == f"{names[0]}unquestionable trees{names[1]}"


def test_words_that_end_with_the_mark_of_sentencepiece_cannot_be_masked(tmp_path: Path) -> None:
    names = ["[CLS]", "[SEP]", "[MASK]"]
    for at_end in (False, True):
        tokenizer = train_sentencepiece(
            tmp_path / "x.model", control_symbols=names, pad_id=3, treat_whitespace_as_suffix=at_end
        )
        assert (tokenizer.masking is None) == at_end


def test_unusable_sentencepiece_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"", b"no model", b"\x0a\x05ab"):
        (tmp_path / "x.model").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.model is not a SentencePiece model"):
            of_model(tmp_path / "x.model", "SentencePieceTokenizer")
    for path in (tmp_path, Path("/dev/zero")):  # of which the second has no end
        with pytest.raises(UserError, match=f"cannot read {path}: it is not a regular file"):
            of_model(path, "SentencePieceTokenizer")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'megatron01\[data\]'"):
        of_model(tmp_path / "x.model", "SentencePieceTokenizer")


@pytest.mark.parametrize("value", ["false", "0", "true"])
def test_threads_do_not_change_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    tokenizer = train_sentencepiece(tmp_path / "x.model")
    texts = [f"the trees and house {i}" for i in range(100)]
    expected = [tokenizer.encode(text) for text in texts]
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    assert tokenizer.encode_batch(texts) == expected


def save(folder: Path, backend: Backend, **companions: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, contents in companions.items():
        (folder / f"{name}.json").write_text(json.dumps(contents))
    return folder


def words(*entries: str) -> Backend:
    backend = Backend(models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token=entries[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def test_special_tokens_are_those_the_companion_files_name(tmp_path: Path) -> None:
    backend = words("?", "</s>", "<stop>", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "<m>", "a")
    assert of_model(save(tmp_path, backend)).eod == 1  # the usual name
    for form in ("<stop>", {"content": "<stop>", "special": True}):
        assert of_model(save(tmp_path, backend, tokenizer_config={"eos_token": form, "pad_token": None})).eod == 2
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = of_model(save(tmp_path, backend, special_tokens_map={"eos_token": "<stop>", "mask_token": "<m>"}))
    tokens = tokenizer.masking
    assert tokens is not None
    assert (tokenizer.eod, tokenizer.unknown) == (2, 0)
    assert (tokens.cls, tokens.sep, tokens.mask, tokens.pad) == (3, 4, 7, 6)
    both = save(tmp_path, backend, tokenizer_config={"eos_token": "</s>"}, special_tokens_map={"eos_token": "<stop>"})
    assert of_model(both).eod == 1
    absent = save(tmp_path, backend, tokenizer_config={"eos_token": "<not there>"})
    assert of_model(absent).eod is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        of_model(tmp_path)


SPECIAL = {"[CLS]": 0, "[SEP]": 1, "[MASK]": 2, "[PAD]": 3}


def unigram(mark: str) -> Backend:
    pieces = [*SPECIAL, f"{mark}tree", "s", mark, f"{mark}a"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    return backend


def marked_kinds() -> list[Any]:
    wordpiece = Backend(
        models.WordPiece({**SPECIAL, "tree": 4, "++s": 5}, unk_token="[PAD]", continuing_subword_prefix="++")
    )
    wordpiece.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    metaspace = unigram("▁")
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    other_mark = unigram("_")
    other_mark.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(replacement="_")])
    replaced = unigram("▁")
    replaced.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_level = Backend(
        models.BPE({**SPECIAL, "t": 4, "Ġ": 5, "s": 6, "Ġt": 7, "Ċ": 8}, [("Ġ", "t")], unk_token="[PAD]")
    )
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    byte_level.decoder = decoders.ByteLevel()
    return [
        pytest.param(wordpiece, "trees tree", [False, True, False], id="prefix"),
        pytest.param(metaspace, "trees tree", [False, True, False], id="metaspace"),
        pytest.param(other_mark, "trees tree", [False, True, False], id="other-mark"),
        pytest.param(replaced, "trees tree", [False, True, False], id="replaced"),
        pytest.param(byte_level, "ts t\n", [False, True, False, False], id="byte-level"),
        pytest.param(words("[UNK]", *SPECIAL, "a", "b"), "a b a", [False, False, False], id="words"),
    ]


@pytest.mark.parametrize(("backend", "text", "expected"), marked_kinds())
def test_where_words_begin(tmp_path: Path, backend: Backend, text: str, expected: list[bool]) -> None:
    tokenizer = of_model(save(tmp_path, backend))
    assert tokenizer.masking is not None
    assert tokenizer.masking.is_continuation[tokenizer.encode(text)].tolist() == expected


def test_without_a_mark_at_the_beginning_of_words_there_is_no_masking(tmp_path: Path) -> None:
    vocabulary = {**SPECIAL, "t": 4, "t</w>": 5}
    suffixed = Backend(models.BPE(vocabulary, [], unk_token="[PAD]", end_of_word_suffix="</w>"))
    suffixed.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert of_model(save(tmp_path, suffixed)).masking is None
    assert of_model(save(tmp_path, Backend(models.BPE(vocabulary, [], unk_token="[PAD]")))).masking is None


def test_what_a_tokenizer_json_asks_for_beside_ids_is_left_out(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], unk_token="a", dropout=0.9))
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = of_model(save(tmp_path, backend))
    assert tokenizer.encode("ab" * 10) == [2] * 10
    first = tokenizer.fingerprint
    backend.no_padding()
    assert of_model(save(tmp_path, backend)).fingerprint == first
    assert of_model(save(tmp_path, backend, tokenizer_config={"eos_token": "a"})).fingerprint != first


def test_a_vocabulary_that_cannot_spell_everything_needs_a_token_for_the_rest(tmp_path: Path) -> None:
    for model in (
        models.WordLevel({"a": 0}, unk_token="[UNK]"),
        models.WordPiece({"a": 0}, unk_token="[UNK]"),
        models.Unigram([("a", 0.0)], None, False),
    ):
        with pytest.raises(UserError, match=r"tokenizer\.json cannot encode every text"):
            of_model(save(tmp_path, Backend(model)))
    for pre_tokenizer in (pre_tokenizers.ByteLevel(), pre_tokenizers.Metaspace(), pre_tokenizers.WhitespaceSplit()):
        backend = Backend(models.BPE({"▁": 0, "Ġ": 1, "a": 2}, []))  # which leaves out what it does not know
        backend.pre_tokenizer = pre_tokenizer
        with pytest.raises(UserError, match=r"tokenizer\.json would leave out characters that are not in its vocab"):
            of_model(save(tmp_path, backend))


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    tokenizer = of_model(save(tmp_path, Backend(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))))
    assert tokenizer.vocab_size == 8 and tokenizer.encode("b") == [7]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is not JSON"),
        ("[" * 100000, "is not JSON"),
        (b"\xff", "is not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "has no model"),
        ('{"model": {}}', "is not a tokenizer.json that tokenizers .* can read"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "empty vocabulary"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "can read"),
        ('{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "can read"),
        (  # the library panics
            '{"model": {"type": "BPE", "continuing_subword_prefix": "##", "vocab": {"a": 0, "b": 1, "ab": 2},'
            ' "merges": ["a b"]}}',
            "can read",
        ),
    ],
)
def test_unusable_tokenizer_json(tmp_path: Path, content: str | bytes, reason: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=reason) as error:
        of_model(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(error.value)


@pytest.mark.parametrize(
    ("present", "hint"),
    [("merges.txt", "GPT2BPETokenizer"), ("vocab.txt", "BertWordPiece"), ("spiece.model", "SentencePiece"), ("x", "$")],
)
def test_a_folder_with_another_kind_of_vocabulary(tmp_path: Path, present: str, hint: str) -> None:
    (tmp_path / present).touch()
    with pytest.raises(UserError, match=rf"has no tokenizer\.json.*{hint}"):
        of_model(tmp_path)


def test_files_that_a_type_does_not_take(tmp_path: Path) -> None:
    for settings_, reason in [
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "tokenizer_model is not given"),
        ({"tokenizer_type": "SentencePieceTokenizer", "vocab_file": "x"}, "vocab_file x is given"),
        ({"vocab_file": "x", "merge_file": "y", "tokenizer_model": "z"}, "tokenizer_model z is given"),
    ]:
        with pytest.raises(UserError, match=reason):
            build_tokenizer(GPTDataConfig(**settings_))


def test_builders_of_vocabulary_files_name_what_they_read() -> None:
    vocab_file = str(DATA / "vocab" / "bert-small-5120-vocab.txt")
    assert build_wordpiece(vocab_file, lower_case=True).unknown == 1
    with pytest.raises(UserError, match=r"bert-small.*is not JSON"):
        build_byte_level_bpe(vocab_file, vocab_file)
