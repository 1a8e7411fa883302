"""Ids equal those of the reference libraries: on the whole shipped corpus and on hostile Unicode."""

from __future__ import annotations

import io
import json
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from transformers import BertTokenizerFast, GPT2TokenizerFast, PreTrainedTokenizerFast

from megatron01.config import BertDataConfig, GPTDataConfig
from megatron01.data import Tokenizer, build_tokenizer
from tests.tiers import slow_after
from tests.unit.data.conftest import DATA
from tests.unit.data.hostile_text import hostile_texts

Reference = Callable[[list[str]], list[list[int]]]
VOCABULARIES = DATA / "vocab"


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    with lzma.open(DATA / "corpus.jsonl.xz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def bert(lower_case: bool) -> tuple[Tokenizer, Reference]:
    vocab_file = VOCABULARIES / "bert-small-5120-vocab.txt"
    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    vocabulary = {entry: index for index, entry in enumerate(vocab_file.read_text().split("\n")[:-1])}
    reference = BertTokenizerFast(vocab=vocabulary, do_lower_case=lower_case)
    ours = build_tokenizer(BertDataConfig(tokenizer_type=kind, vocab_file=str(vocab_file)))
    return ours, lambda texts: reference(texts, add_special_tokens=False)["input_ids"]


def gpt2() -> tuple[Tokenizer, Reference]:
    vocab_file, merge_file = (VOCABULARIES / f"gpt2-tiny-5000-{name}" for name in ("vocab.json", "merges.txt"))
    merges = [tuple(line.split(" ")) for line in merge_file.read_text().split("\n")[1:] if line]
    reference = GPT2TokenizerFast(vocab=json.loads(vocab_file.read_text()), merges=merges)
    ours = build_tokenizer(GPTDataConfig(vocab_file=str(vocab_file), merge_file=str(merge_file)))
    return ours, lambda texts: reference(texts, add_special_tokens=False)["input_ids"]


def tokenizer_json(folder: Path) -> tuple[Tokenizer, Reference]:
    """A pipeline that none of the others has: NFKC, Metaspace, unigram."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(["the tree and the house", "trees, houses and rivers"] * 20, trainer)
    backend.enable_truncation(16)
    backend.save(str(folder / "tokenizer.json"))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = build_tokenizer(GPTDataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)))
    return ours, lambda texts: reference(texts, add_special_tokens=False)["input_ids"]


def sentence_piece(folder: Path, corpus: list[str], model_type: str) -> tuple[Tokenizer, Reference]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line[:500] for text in corpus[:8] for line in text.split("\n")),
        model_writer=model,
        vocab_size=500,
        model_type=model_type,
        byte_fallback=model_type == "bpe",
        minloglevel=2,
        num_threads=1,
    )
    (folder / "x.model").write_bytes(model.getvalue())
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    settings = GPTDataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / "x.model"))
    return build_tokenizer(settings), lambda texts: [reference.encode(text) for text in texts]


@pytest.fixture(scope="module", params=["lower case", "cased", "gpt2", "tokenizer.json", "unigram", "bpe"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: list[str]
) -> tuple[Tokenizer, Reference]:
    """The project's tokenizer and the reference."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param in ("lower case", "cased"):
        return bert(request.param == "lower case")
    if request.param == "gpt2":
        return gpt2()
    if request.param == "tokenizer.json":
        return tokenizer_json(folder)
    return sentence_piece(folder, corpus, request.param)


@pytest.mark.parametrize("step", slow_after(1, [10, 1]))
def test_the_shipped_corpus(pair: tuple[Tokenizer, Reference], corpus: list[str], step: int) -> None:
    ours, reference = pair
    texts = corpus[::step]
    assert ours.encode_batch(texts) == reference(texts)


@given(text=hostile_texts)
def test_hostile_unicode(pair: tuple[Tokenizer, Reference], text: str) -> None:
    ours, reference = pair
    ids = ours.encode(text)
    assert ids == reference([text])[0]
    assert ours.encode_batch([text, "", text]) == [ids, [], ids]
    assert all(0 <= token < ours.vocab_size for token in ids)
    decoded = ours.decode(ids)
    if ours.unknown is None:
        assert decoded == text


def test_half_of_a_surrogate_pair_is_an_encoding_error(pair: tuple[Tokenizer, Reference]) -> None:
    ours, _ = pair
    for text in ("\ud800", "a\udfff b", "\udc00\ud800"):
        with pytest.raises(UnicodeEncodeError):
            ours.encode_batch(["good", text])
    assert ours.encode("good") == ours.encode_batch(["good"])[0]


def test_another_process_gets_the_same_tokenizer(pair: tuple[Tokenizer, Reference]) -> None:
    ours, _ = pair
    copy = pickle.loads(pickle.dumps(ours))
    assert type(copy) is type(ours) and copy.fingerprint == ours.fingerprint
    assert (copy.name, copy.vocab_size, copy.unknown, copy.eod) == (ours.name, ours.vocab_size, ours.unknown, ours.eod)
    assert copy.encode("the trees, the houses") == ours.encode("the trees, the houses")
