from __future__ import annotations

import gzip
import json
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron01.data import build_tokenizer
from megatron01.errors import UserError
from megatron01.evaluate.perplexity import HeldOutText, read_held_out, token_losses, windows
from tests.integration.tiny import bert_config, gpt_config


@given(st.integers(2, 200), st.integers(1, 40), st.data())
def test_every_token_is_predicted_once_from_enough_before_it(num_tokens, window, data):
    stride = data.draw(st.integers(1, window))
    predicted = []
    for number, (start, first, last) in enumerate(windows(num_tokens, window, stride)):
        assert start < first <= last < num_tokens and last - start <= window
        assert number == 0 or first - start >= window - stride + 1
        predicted += range(first, last + 1)
    assert predicted == list(range(1, num_tokens))


@pytest.mark.parametrize(("window", "stride"), [(20, 10), (20, 20), (7, 3), (5, 1), (20, 1), (1, 1)])
@pytest.mark.parametrize("num_tokens", [2, 20, 21, 57])
def test_losses_equal_those_of_one_prediction_after_the_other(gpt2, num_tokens, window, stride):
    tokens = np.random.default_rng(0).integers(0, gpt2.vocab_size, num_tokens)
    counted = []
    losses = token_losses(gpt2, tokens, window=window, stride=stride, batch_size=3, progress=counted.append)
    assert sum(counted) == len(losses) == num_tokens - 1
    seen_from = {}
    for start in range(0, num_tokens, stride):
        for target in range(start + 1, min(start + window, num_tokens - 1) + 1):
            seen_from.setdefault(target, start)
    for target in range(1, num_tokens):
        with torch.no_grad():
            logits = gpt2(torch.from_numpy(tokens[None, seen_from[target] : target]))[0, -1]
        expected = -torch.log_softmax(logits.double(), -1)[tokens[target]]
        assert losses[target - 1] == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_units():
    scores = HeldOutText(np.zeros(31, np.int64), num_words=20, num_bytes=100).scores(2.0)
    assert scores["perplexity_per_token"] == pytest.approx(math.e**2)
    assert scores["perplexity_per_word"] == pytest.approx(math.e**3)
    assert scores["bits_per_byte"] == pytest.approx(0.6 / math.log(2))
    for loss, num_tokens, size in [(2.0, 3, 0), (20.0, 3000, 1)]:
        text = HeldOutText(np.zeros(num_tokens + 1, np.int64), size, size)
        assert text.scores(loss)["perplexity_per_word"] == math.inf
    for loss in (710.0, 2000.0):  # e^710 is the first that fp64 does not hold
        assert HeldOutText(np.zeros(2, np.int64), 1, 1).scores(loss)["perplexity_per_token"] == math.inf


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return build_tokenizer(gpt_config(corpus).data)


def test_a_file_of_text(tokenizer, tmp_path):
    text = "the quick fox\n\n = \u00c9tienne =\n"
    (tmp_path / "held.txt").write_text(text, encoding="utf-8")
    (tmp_path / "held.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "marked.txt").write_text(text, encoding="utf-8-sig")
    for name in ("held.txt", "held.txt.gz", "marked.txt"):
        held = read_held_out(str(tmp_path / name), tokenizer)
        assert held.tokens.tolist() == [tokenizer.eod, *tokenizer.encode(text)]
        assert (held.num_words, held.num_bytes) == (6, len(text.encode()))
    beginning = read_held_out(str(tmp_path / "held.txt"), tokenizer, max_tokens=13)
    assert beginning.tokens.size == 14 and (beginning.num_words, beginning.num_bytes) == (3, 13)


def test_lines_of_json(tokenizer, tmp_path):
    (tmp_path / "held.jsonl").write_text('{"text": "a b"}\n\n{"text": "c", "id": 3}\n')
    held = read_held_out(str(tmp_path / "held.jsonl"), tokenizer)
    assert held.tokens.tolist() == [tokenizer.eod, *tokenizer.encode("a b"), tokenizer.eod, *tokenizer.encode("c")]
    assert (held.num_words, held.num_bytes) == (3, 4)
    (tmp_path / "empty_first.jsonl").write_text('{"text": ""}\n{"text": "a b"}\n')
    empty_first = read_held_out(str(tmp_path / "empty_first.jsonl"), tokenizer)
    assert empty_first.tokens.tolist() == [tokenizer.eod, *tokenizer.encode("a b")]


def test_documents_beyond_the_most_tokens_are_not_encoded(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "held.jsonl"
    path.write_text('{"text": "a b"}\n' * 300)
    whole = read_held_out(str(path), tokenizer)
    assert whole.tokens.tolist() == [tokenizer.eod, *tokenizer.encode("a b")] * 300
    encode, encoded = tokenizer.encode_batch, []
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: encode(encoded.extend(texts) or texts))
    beginning = read_held_out(str(path), tokenizer, max_tokens=9)
    assert beginning.tokens.tolist() == whole.tokens[:10].tolist()
    assert len(encoded) < 100


def test_token_files(tokenizer, corpus):
    held = read_held_out(str(corpus / "gpt"), tokenizer)
    text = tokenizer.decode(held.tokens.tolist())
    documents = text.split("<|endoftext|>")
    assert documents[0] == "" and len(documents) == 120 + 2
    assert held.num_bytes == sum(len(document) for document in documents)
    assert held.num_words == sum(len(document.split()) for document in documents)
    beginning = read_held_out(str(corpus / "gpt"), tokenizer, max_tokens=100)
    assert beginning.tokens.tolist() == held.tokens[:101].tolist()


def test_without_an_end_of_document_token_documents_follow_each_other(corpus, tmp_path):
    tokenizer = build_tokenizer(bert_config(corpus).data)
    assert tokenizer.eod is None
    (tmp_path / "held.jsonl").write_text('{"text": "the quick fox"}\n{"text": "a dog"}\n')
    held = read_held_out(str(tmp_path / "held.jsonl"), tokenizer)
    assert held.tokens.tolist() == tokenizer.encode("the quick fox a dog")
    assert (held.num_words, held.num_bytes) == (5, 13 + 5)
    beginning = read_held_out(str(tmp_path / "held.jsonl"), tokenizer, max_tokens=3)
    assert beginning.tokens.tolist() == tokenizer.encode("the quick fox a")
    assert (beginning.num_words, beginning.num_bytes) == (3, len("quick fox a"))  # the first token is context only
    pair = read_held_out(str(corpus / "bert"), tokenizer)
    text = tokenizer.decode(pair.tokens[1:].tolist())
    assert (pair.num_words, pair.num_bytes) == (len(text.split()), len(text))


def test_of_a_long_text_only_a_beginning_is_encoded(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "long.txt").write_text("the fox " * 5000 + " " * 5000)
    whole = read_held_out(str(tmp_path / "long.txt"), tokenizer)
    encode_batch, lengths = tokenizer.encode_batch, []

    def counting(texts):
        lengths.extend(map(len, texts))
        return encode_batch(texts)

    monkeypatch.setattr(tokenizer, "encode_batch", counting)
    beginning = read_held_out(str(tmp_path / "long.txt"), tokenizer, max_tokens=50)
    assert beginning.tokens.tolist() == whole.tokens[:51].tolist()
    assert max(lengths) < 2000


def test_the_beginning_of_a_text_whose_tokens_are_long(corpus, tmp_path):
    words = build_tokenizer(bert_config(corpus).data)
    (tmp_path / "long.txt").write_text(("x" * 150 + " ") * 400)  # an unknown word each, of more than 8 characters
    whole, beginning = (read_held_out(str(tmp_path / "long.txt"), words, most) for most in (None, 50))
    assert beginning.tokens.tolist() == whole.tokens[:51].tolist() and whole.tokens.size >= 400


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("held.txt", b"", "holds no text to predict"),
        ("held.txt", b"\xff\xfe", "not UTF-8"),
        ("held.jsonl", b'{"text": "a"}\n[', "line 2 is not JSON"),
        ("held.jsonl", b'{"txt": "a"}', "line 1 has no text"),
        ("held.jsonl", b'{"text": ["a"]}', "line 1: 'text' is \\['a'\\]; expected text"),
        ("held.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}', "line 2: 'text' holds half of a surrogate pair"),
        ("held.txt.gz", b"no gzip", "damaged, cut short or misnamed"),
    ],
)
def test_files_that_cannot_be_used(tokenizer, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_held_out(str(tmp_path / name), tokenizer)


def test_what_is_not_there_or_of_another_tokenizer(tokenizer, corpus, tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_held_out(str(tmp_path / "none"), tokenizer)
    with pytest.raises(UserError, match="is one file of a pair; leave out the extension"):
        read_held_out(str(corpus / "gpt.bin"), tokenizer)
    words = build_tokenizer(bert_config(corpus).data)
    with pytest.raises(UserError, match=r"the token id 256, but .*vocab.txt has ids 0 to 20"):
        read_held_out(str(corpus / "gpt"), words)
    for extension in ("bin", "idx"):
        shutil.copy(corpus / f"gpt.{extension}", tmp_path)
    origin = {"tokenizer": {"fingerprint": "f"}}
    (tmp_path / "gpt.json").write_text(json.dumps(origin))  # ids that the tokenizer has, but for other words
    with pytest.raises(UserError, match=r"gpt\.bin was made with another vocabulary or tokenizer_type"):
        read_held_out(str(tmp_path / "gpt"), tokenizer)
