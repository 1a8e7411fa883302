"""Training of vocabularies: the same bytes every time, with all that preprocessing and training need."""

from __future__ import annotations

import gzip
import json
import os
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron01.config.commands import PreprocessConfig, TrainTokenizerConfig
from megatron01.data import Tokenizer, build_tokenizer
from megatron01.data.tokenizers import wordpiece_backend
from megatron01.data.train_tokenizer import _alphabet, train_tokenizer
from megatron01.errors import UserError

TEXTS = [
    "The trees near the river, and the houses near the trees.",
    "Unquestionably, the river's houses are near; the unquestionable trees aren't!",
    "東京 and Привет, naïve café — 1234.5 €uro",
    "Near the river the tallest tree is taller than the taller houses.",
]
KINDS = [
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
]
SIZES = dict(zip(KINDS, [125, 125, 290, 290, 64], strict=True))


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "corpus.jsonl", TEXTS * 5)


def config(corpus: Path, kind: Any, name: str = "made") -> TrainTokenizerConfig:
    prefix = str(corpus.parent / name)
    return TrainTokenizerConfig(input=(str(corpus),), output_prefix=prefix, tokenizer_type=kind, vocab_size=SIZES[kind])


def load(config: TrainTokenizerConfig, files: list[Path]) -> Tokenizer:
    names = {".txt": ["vocab_file"], ".model": ["tokenizer_model"]}
    names[".json"] = ["vocab_file"] if config.tokenizer_type == "GPT2BPETokenizer" else ["tokenizer_model"]
    settings = {name: str(path) for path in files for name in names.get(path.suffix, ["merge_file"])}
    if len(files) == 2:
        settings = {"vocab_file": str(files[0]), "merge_file": str(files[1])}
    return build_tokenizer(
        PreprocessConfig(input=config.input, output_prefix="x", tokenizer_type=config.tokenizer_type, **settings)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_is_deterministic_and_usable(corpus: Path, kind: str) -> None:
    first = train_tokenizer(config(corpus, kind))
    for name in ("again", "once-more"):
        again = train_tokenizer(config(corpus, kind, name))
        assert [path.read_bytes() for path in again] == [path.read_bytes() for path in first]
    tokenizer = load(config(corpus, kind), first)
    assert tokenizer.vocab_size == SIZES[kind]
    ids = tokenizer.encode("the unquestionable trees, near")
    assert tokenizer.unknown not in ids
    assert tokenizer.decode(ids).replace(" ,", ",") == "the unquestionable trees, near"
    assert len(ids) < 15  # pieces, not characters
    if kind != "BertWordPieceLowerCase" and kind != "BertWordPieceCase":
        assert tokenizer.eod is not None and tokenizer.token(tokenizer.eod) in ("<|endoftext|>", "</s>")
    if kind not in ("GPT2BPETokenizer", "HuggingFaceTokenizer"):
        assert tokenizer.masking is not None
        first_word = tokenizer.encode("unquestionable")
        continues = tokenizer.masking.is_continuation[first_word]
        assert not continues[0] and continues[1:].all()


def test_case_is_kept_or_not(corpus: Path) -> None:
    lower = load(config(corpus, KINDS[0]), train_tokenizer(config(corpus, KINDS[0], "lower")))
    cased = load(config(corpus, KINDS[1]), train_tokenizer(config(corpus, KINDS[1], "cased")))
    assert lower.encode("THE TREES") == lower.encode("the trees")
    assert lower.encode("Café") == lower.encode("cafe")
    assert cased.encode("The") != cased.encode("the")


@pytest.mark.parametrize("lower_case", [True, False])
def test_characters_are_counted_as_the_normalizer_writes_them(lower_case: bool) -> None:
    text = "Éé e\u0301 E\u0301 ΟΣ Ος İi ǅ ﬁ 각 \u1112\u1161\u11ab q\u0307\u0323 東京\u200d\x00 a\u00a0b"
    backend = wordpiece_backend({"[UNK]": 0}, lower_case=lower_case)
    counts = Counter(backend.normalizer.normalize_str(text))
    expected = sorted((character for character in counts if not character.isspace()), key=lambda c: (-counts[c], c))
    assert _alphabet(backend, [text], 1000) == expected


def test_rare_characters_are_left_out_of_the_alphabet(corpus: Path) -> None:
    small = replace(config(corpus, KINDS[0]), alphabet_size=20)
    entries = train_tokenizer(small)[0].read_text().split("\n")[:-1]
    assert entries[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = [entry for entry in entries if len(entry) == 1]
    assert len(alphabet) == 20 and "東" not in alphabet and alphabet[0] == "e"
    assert "##e" in entries and "##," not in entries  # punctuation is never within a word
    assert all(set(entry.removeprefix("##")) <= set(alphabet) for entry in entries[5:])


def test_an_even_sample_of_the_documents(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = [letter * 4 for letter in "abcdefghij"]
    path = write_lines(tmp_path / "x.jsonl", texts)
    made = train_tokenizer(replace(config(path, "GPT2BPETokenizer"), sample=0.2, vocab_size=1000))
    entries = json.loads(made[0].read_text())
    assert [text for text in texts if text in entries] == ["eeee", "jjjj"]
    printed = capfd.readouterr().err
    assert "from 2 documents, 8 characters" in printed and "does not hold the 1000 entries" in printed
    assert f"--tokenizer-type GPT2BPETokenizer --vocab-file {made[0]} --merge-file {made[1]}" in printed


def test_flags_can_be_copied_to_a_shell(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "x.jsonl", TEXTS)
    (made,) = train_tokenizer(
        replace(config(path, "HuggingFaceTokenizer"), output_prefix=str(tmp_path / "my vocabulary"))
    )
    printed = capfd.readouterr().err
    assert shlex.split(printed)[-4:] == ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(made)]


def test_unusable_documents_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "x.jsonl", TEXTS * 5)
    path.write_bytes(path.read_bytes() + b'{"text": 3}\n[\n')
    train_tokenizer(config(path, "GPT2BPETokenizer"))
    printed = capfd.readouterr().err
    assert (
        "left out 1 documents ('text' is not a string)" in printed and "left out 1 documents (invalid JSON)" in printed
    )
    path.write_bytes(b"[\n")
    with pytest.raises(UserError, match=r"no usable document in .*x\.jsonl; left out: 1 \(invalid JSON\)"):
        train_tokenizer(config(path, "GPT2BPETokenizer", "none"))


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_reading_come_through_the_trainers(corpus: Path, kind: str) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        train_tokenizer(replace(config(corpus, kind), input=(str(corpus), str(corpus.parent / "nowhere.jsonl"))))
    cut = corpus.parent / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(corpus.read_bytes() * 100)[:-20])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz"):
        train_tokenizer(replace(config(corpus, kind), input=(str(corpus), str(cut))))


def test_a_vocabulary_is_never_replaced(corpus: Path) -> None:
    files = train_tokenizer(config(corpus, "GPT2BPETokenizer"))
    before = files[1].read_bytes()
    files[0].unlink()
    with pytest.raises(UserError, match=r"made-merges\.txt exists"):
        train_tokenizer(config(corpus, "GPT2BPETokenizer"))
    assert files[1].read_bytes() == before and not files[0].exists()


def test_a_pipe_cannot_be_read_twice(corpus: Path) -> None:
    pipe = corpus.with_name("pipe.jsonl")
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="read twice"):
        train_tokenizer(replace(config(corpus, "BertWordPieceCase"), input=(str(pipe),)))


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("GPT2BPETokenizer", {"vocab_size": 256}, "vocab_size is 256; expected 257 or more"),
        ("HuggingFaceTokenizer", {"vocab_size": 5}, "expected 257 or more"),
        ("BertWordPieceCase", {"vocab_size": 20}, "or lower alphabet_size"),
        ("BertWordPieceCase", {"vocab_size": 10**9}, "vocab_size is 1000000000; expected a positive number, at most"),
        ("GPT2BPETokenizer", {"alphabet_size": 60}, "alphabet_size is given, but GPT2BPETokenizer has none"),
        ("BertWordPieceCase", {"sentencepiece_type": "bpe"}, "sentencepiece_type is given, but BertWordPieceCase has"),
        ("SentencePieceTokenizer", {"vocab_size": 9}, "SentencePiece cannot make 9 entries"),
        ("BertWordPieceCase", {"input": ("-",)}, "read twice"),
        ("GPT2BPETokenizer", {"sample": 0.0}, "sample is 0.0"),
        ("GPT2BPETokenizer", {"sample": 0.01}, "sample 0.01 takes none of the 20 documents"),
        ("GPT2BPETokenizer", {"input": ("nowhere.jsonl",)}, "nowhere.jsonl"),
        ("GPT2BPETokenizer", {"output_prefix": "x/"}, "output_prefix is 'x/'"),
        ("GPT2BPETokenizer", {"output_prefix": "/dev/null/x"}, "cannot be written"),
        ("GPT2BPETokenizer", {"output_prefix": "/dev/null/x", "input": ("nowhere.jsonl",)}, "cannot be written"),
    ],
)
def test_mistakes(corpus: Path, kind: str, change: dict[str, Any], reason: str) -> None:
    before = sorted(corpus.parent.iterdir())
    with pytest.raises(UserError, match=reason):
        train_tokenizer(replace(config(corpus, kind), **change))
    assert sorted(corpus.parent.iterdir()) == before
