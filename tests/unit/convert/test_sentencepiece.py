"""SentencePiece models as files of the tokenizers library, which any ``AutoTokenizer`` reads: the same ids."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from hypothesis import given
from hypothesis import strategies as st

from megatron01.convert.hf_tokenizer import find_tokenizer, write_tokenizer
from megatron01.data import build_tokenizer
from megatron01.data.tokenizers import SentencePieceTokenizer, TokenizerFiles
from megatron01.errors import UserError

LINE = (
    "the quick brown fox jumps over lazy dogs unquestionable trees \u00c9tienne Z\u00fcrich 1234 isn't \ufb01ne \u00bd"
    " hello, world! (old) na\u00efve \u4f60\u597d \u4e16\u754c"
)
WORDS = LINE.split()
SENTENCES = [" ".join(WORDS[i * j % len(WORDS)] for j in range(1, 12)) for i in range(1, 60)]
MASKING = ["[CLS]", "[SEP]", "[MASK]", "[PAD]"]
SYMBOLS = ["<sep>", "fox", "fox jumps", "((", "((("]
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "unigram of bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 380},
    "bpe of bytes": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 380},
    "unigram as it stands": {
        "model_type": "unigram",
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    },
    "bpe without mapping": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "bpe for masking": {"model_type": "bpe", "control_symbols": MASKING},
    "unigram for masking": {"model_type": "unigram", "control_symbols": MASKING},
    "unigram with symbols": {"model_type": "unigram", "user_defined_symbols": SYMBOLS},
    "bpe with symbols": {"model_type": "bpe", "user_defined_symbols": SYMBOLS},
}
TEXTS = [
    "",
    "  ",
    " a  b ",
    "the\ttrees\nhome  \n  fox",
    "\u3000The QUICK \u2581 brown",
    "\U0001f600\U0001f600 e\u0301tienne \u200b\u65e5\u672c",
    "the fox  jumps<sep>over ((the)) (((fox jumps <sep> ",
    *SENTENCES[:5],
]


def trained(**options: Any) -> bytes:
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=content,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **({"vocab_size": 120} | options),
    )
    return content.getvalue()


def exported(model: bytes, folder: Path) -> tuple[str | None, SentencePieceTokenizer]:
    path = folder / "spiece.model"
    path.write_bytes(model)
    files = TokenizerFiles(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path))
    tokenizer = files.built
    assert isinstance(tokenizer, SentencePieceTokenizer)
    target = folder / "hf"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return write_tokenizer(files, target, max_length=64), tokenizer


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    folder = tmp_path_factory.mktemp("sentencepiece")
    note, ours = exported(trained(**MODELS[request.param]), folder)
    assert note is None
    return ours, transformers.AutoTokenizer.from_pretrained(folder / "hf"), folder / "hf"


def compare(ours: SentencePieceTokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert theirs(text, add_special_tokens=False).input_ids == ids, text
    if ours.unknown not in ids:  # which each library decodes differently
        assert theirs.decode(ids) == ours.decode(ids), text


def test_ids_and_texts_are_those_of_the_sentencepiece_library(pair: tuple[Any, Any, Path]) -> None:
    ours, theirs, _ = pair
    for text in TEXTS:
        compare(ours, theirs, text)


@given(
    text=st.text(
        st.sampled_from(list(" \u3000abcdefhijlmnoqrstuvz\u00e9\u00bd\ufb01.,'1\u4f60\U0001f600")), max_size=30
    )
)
def test_any_text(pair: tuple[Any, Any, Path], text: str) -> None:
    compare(*pair[:2], text)


def test_special_tokens(pair: tuple[Any, Any, Path]) -> None:
    ours, theirs, _ = pair
    assert theirs.eos_token_id == ours.eod and theirs.unk_token_id == ours.unknown
    assert len(theirs) == ours.vocab_size and theirs.model_max_length == 64
    text = ours.encode("the fox")
    if ours.masking is None:
        assert theirs("the fox").input_ids == text
    else:
        cls, sep, mask, pad = theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id, theirs.pad_token_id
        assert (cls, sep, mask, pad) == tuple(getattr(ours.masking, part) for part in ("cls", "sep", "mask", "pad"))
        pair = theirs("the fox", "the fox")
        assert pair.input_ids == [cls, *text, sep, *text, sep]
        assert pair.token_type_ids == [0] * (len(text) + 2) + [1] * (len(text) + 1)
        assert theirs("the [MASK]").input_ids[-2:] == [mask, sep]


def test_the_way_back_is_the_same_tokenizer(pair: tuple[Any, Any, Path]) -> None:
    ours, _, folder = pair
    files = find_tokenizer(folder, model_type="gpt2", num_ids=ours.vocab_size)
    assert files is not None and files.tokenizer_type == "SentencePieceTokenizer"
    assert build_tokenizer(files).fingerprint == ours.fingerprint


@pytest.mark.parametrize(
    "options", [{"model_type": "word"}, {"model_type": "char"}, {"treat_whitespace_as_suffix": True}]
)
def test_other_kinds_are_left_to_the_sentencepiece_library(options: dict[str, Any], tmp_path: Path) -> None:
    note, ours = exported(trained(**options, vocab_size=60), tmp_path)
    assert note is not None and "no tokenizer.json for AutoTokenizer" in note and "takes unigram and BPE" in note
    files = find_tokenizer(tmp_path / "hf", model_type="gpt2", num_ids=ours.vocab_size)
    assert files is not None and files.built.fingerprint == ours.fingerprint


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"])
def test_a_model_file_is_found_by_the_names_that_others_give_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    expected = TokenizerFiles(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / name))
    assert find_tokenizer(tmp_path, model_type="gpt2", num_ids=120) == expected


def test_without_protobuf_an_export_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than leave out the file, without which a later reader is told of missing special tokens."""
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    with pytest.raises(UserError, match=r"needs sentencepiece.sentencepiece_model_pb2; run: pip install"):
        exported(trained(), tmp_path)
