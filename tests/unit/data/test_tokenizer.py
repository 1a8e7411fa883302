"""Token ids against Hugging Face's tokenizers on real text, and unusable vocabularies."""

from __future__ import annotations

import json
import lzma
import pickle
from pathlib import Path

import pytest
from transformers import BertTokenizerFast, GPT2TokenizerFast

from megatron01.config import BertDataConfig, GPTDataConfig
from megatron01.data import Tokenizer, build_tokenizer
from megatron01.errors import UserError
from tests.unit.data.conftest import DATA

ODD_TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\nand\tlines ",
    "naïve café — “quoted” ﬁ…",
    "東京 and Привет 🎉",
    "don't I'll we've 1,234.56 $5 C++",
    "a [MASK] b [SEP] <|endoftext|> c",
    "x" * 150,
    "\u200b\x00\x07zero",
    "ÀÉÎ İ ß",
]


def real_texts() -> list[str]:
    with lzma.open(DATA / "corpus.jsonl.xz", "rt", encoding="utf-8") as file:
        return [json.loads(file.readline())["text"] for _ in range(25)] + ODD_TEXTS


@pytest.mark.parametrize("name", ["bert-small-5120", "bert-base-uncased"])
@pytest.mark.parametrize("lower_case", [True, False])
def test_bert_ids_equal_hugging_face(name: str, lower_case: bool, tmp_path: Path) -> None:
    vocab_file = DATA / "vocab" / f"{name}-vocab.txt"
    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    ours = build_tokenizer(BertDataConfig(tokenizer_type=kind, vocab_file=str(vocab_file)))
    vocabulary = {entry: index for index, entry in enumerate(vocab_file.read_text().split("\n")[:-1])}
    theirs = BertTokenizerFast(vocab=vocabulary, do_lower_case=lower_case)
    texts = real_texts()
    assert ours.encode_batch(texts) == [theirs.encode(text, add_special_tokens=False) for text in texts]
    assert ours.encode(texts[0]) == ours.encode_batch(texts)[0]


@pytest.mark.parametrize("name", ["gpt2-tiny-5000", "gpt2"])
def test_gpt2_ids_equal_hugging_face(name: str) -> None:
    vocab_file, merge_file = DATA / "vocab" / f"{name}-vocab.json", DATA / "vocab" / f"{name}-merges.txt"
    ours = build_tokenizer(GPTDataConfig(vocab_file=str(vocab_file), merge_file=str(merge_file)))
    merges = [tuple(line.split(" ")) for line in merge_file.read_text().split("\n")[1:] if line]
    theirs = GPT2TokenizerFast(vocab=json.loads(vocab_file.read_text()), merges=merges)
    texts = real_texts()
    encoded = ours.encode_batch(texts)
    assert encoded == [theirs.encode(text, add_special_tokens=False) for text in texts]
    assert [ours.decode(ids) for ids in encoded] == texts  # byte-level: nothing is lost


def test_attributes(gpt2_tokenizer: Tokenizer, bert_tokenizer: Tokenizer) -> None:
    assert (gpt2_tokenizer.vocab_size, gpt2_tokenizer.eod) == (5000, 4999)
    assert gpt2_tokenizer.masking is None
    tokens = bert_tokenizer.masking
    assert tokens is not None
    ids = (tokens.pad, tokens.cls, tokens.sep, tokens.mask)
    assert (bert_tokenizer.vocab_size, bert_tokenizer.eod, ids) == (5120, None, (0, 2, 3, 4))
    assert tokens.is_continuation.shape == (5120,)
    pieces = bert_tokenizer.encode("unquestionableness")
    assert tokens.is_continuation[pieces].tolist() == [False] + [True] * (len(pieces) - 1)
    assert bert_tokenizer.decode(pieces) == "unquestionableness"


def test_fingerprint_depends_on_contents_and_rules(bert_tokenizer: Tokenizer, tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_bytes((DATA / "vocab" / "bert-small-5120-vocab.txt").read_bytes())
    assert build_tokenizer(BertDataConfig(vocab_file=str(copy))).fingerprint == bert_tokenizer.fingerprint
    cased = BertDataConfig(vocab_file=str(copy), tokenizer_type="BertWordPieceCase")
    assert build_tokenizer(cased).fingerprint != bert_tokenizer.fingerprint
    copy.write_text(copy.read_text() + "##zzqqzz\n")
    assert build_tokenizer(BertDataConfig(vocab_file=str(copy))).fingerprint != bert_tokenizer.fingerprint


def test_pickle(gpt2_tokenizer: Tokenizer, bert_tokenizer: Tokenizer) -> None:
    for tokenizer in (gpt2_tokenizer, bert_tokenizer):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert type(copy) is type(tokenizer) and copy.fingerprint == tokenizer.fingerprint
        assert copy.encode(ODD_TEXTS[2]) == tokenizer.encode(ODD_TEXTS[2])


SPECIAL = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (SPECIAL.replace("[MASK]\n", ""), r"lacks \[MASK\]"),
        (SPECIAL + "a\nb\na\n", "line 6 repeats 'a'"),
        (SPECIAL + "a\n\n\n", "repeats ''"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_unusable_bert_vocabulary(content: str | bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=reason):
        build_tokenizer(BertDataConfig(vocab_file=str(path)))


def test_unusable_gpt2_vocabulary(tmp_path: Path) -> None:
    vocab_file, merge_file = DATA / "vocab" / "gpt2-tiny-5000-vocab.json", tmp_path / "merges.txt"
    vocabulary = json.loads(vocab_file.read_text())
    merge_file.write_text("#version: 0.2\na zz\n")
    with pytest.raises(UserError, match=r"merges\.txt line 2 is 'a zz'"):
        build_tokenizer(GPTDataConfig(vocab_file=str(vocab_file), merge_file=str(merge_file)))
    broken = tmp_path / "vocab.json"
    for content, reason in [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        (json.dumps({**vocabulary, "more": 7}), "each once"),
        (json.dumps({**vocabulary, "\ud800": len(vocabulary)}), "its vocabulary holds half of a surrogate pair"),
        (json.dumps({"a": 0}), "lacks"),
        (json.dumps({token: i for token, i in vocabulary.items() if token != "<|endoftext|>"}), "endoftext"),
    ]:
        broken.write_text(content)
        with pytest.raises(UserError, match=reason):
            build_tokenizer(GPTDataConfig(vocab_file=str(broken), merge_file=str(merge_file)))


def test_merges_of_another_vocabulary_or_cut_short(tmp_path: Path) -> None:
    vocabularies, cut = DATA / "vocab", tmp_path / "merges.txt"
    cut.write_text("\n".join((vocabularies / "gpt2-merges.txt").read_text().split("\n")[:40000]))
    for merge_file, count in [(cut, 40255), (vocabularies / "gpt2-tiny-5000-merges.txt", 4999)]:
        with pytest.raises(UserError, match=f"merges.txt makes {count} of the 50257 entries of .*gpt2-vocab.json"):
            build_tokenizer(GPTDataConfig(vocab_file=str(vocabularies / "gpt2-vocab.json"), merge_file=str(merge_file)))


def test_missing_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_file is not given"):
        build_tokenizer(BertDataConfig())
    with pytest.raises(UserError, match="merge_file is not given"):
        build_tokenizer(GPTDataConfig(vocab_file="x"))
    with pytest.raises(UserError, match="merge_file y is given, but BertWordPieceLowerCase takes vocab_file only"):
        build_tokenizer(BertDataConfig(vocab_file="x", merge_file="y"))
    with pytest.raises(UserError, match="No such file"):
        build_tokenizer(BertDataConfig(vocab_file=str(tmp_path / "none")))
