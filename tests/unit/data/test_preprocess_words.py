"""Encoding with a cache of words gives the ids of the tokenizer itself, on any text."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron01.config import TokenizerType
from megatron01.data import Tokenizer, build_tokenizer
from megatron01.data.preprocessing import encoding as word_cache
from megatron01.data.preprocessing.encoding import WordCache
from tests.unit.data.test_preprocess import bert_config, gpt_config

# Characters at which tokenizers split, join, drop or add something, and words around them.
HOSTILE = (
    "aB1.'-_ \t\n\r\x0b\x0c\x00\x07\x1c\x1f\x7f\x85\xad\xa0\u0301\u1680\u180e\u2003\u200b\u2028\u3000\ufeff\ufffd"
    "éİßﬁ“—東ก🙂Ⅷ²"
)
WORDS = [
    "don't",
    "'s",
    "'seven",
    "'LL",
    "[MASK]",
    "[CLS]",
    "[",
    "<|endoftext|>",
    "<|",
    "##ing",
    "naïve",
    "x́",
    "  ",
    "the",
]
TEXTS = st.lists(st.sampled_from([*HOSTILE, *WORDS]) | st.text(max_size=3), max_size=30).map("".join)


def has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


@pytest.fixture(scope="module", params=["BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer"])
def tokenizer_type(request: pytest.FixtureRequest) -> TokenizerType:
    return cast(TokenizerType, request.param)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_type: TokenizerType) -> Tokenizer:
    config = gpt_config if tokenizer_type == "GPT2BPETokenizer" else bert_config
    return build_tokenizer(replace(config(Path("unused"), Path("unused")), tokenizer_type=tokenizer_type))


def check(cache: WordCache, tokenizer: Tokenizer, texts: list[str]) -> None:
    tokens, sizes = cache.encode(texts)
    expected = tokenizer.encode_batch(texts)
    assert sizes.tolist() == list(map(len, expected))
    assert tokens.tolist() == list(chain.from_iterable(expected))


@given(texts=st.lists(TEXTS.filter(lambda text: not has_surrogates(text)), max_size=4))
@example(
    texts=["a\x0bb a\x1cb a\x85b", " \u3000 \n x", "", "a  <|endoftext|>  b", "[MASK]ing [MASK", "e\u0301 .\u0301x"]
)
def test_ids_are_those_of_the_tokenizer(tokenizer: Tokenizer, tokenizer_type: TokenizerType, texts: list[str]) -> None:
    cache = WordCache(tokenizer, tokenizer_type, np.uint16)
    check(cache, tokenizer, texts)
    check(cache, tokenizer, texts[::-1])  # with the words cached already


@given(texts=st.lists(TEXTS.filter(lambda text: not has_surrogates(text)), max_size=4))
def test_long_texts_and_a_small_memory(tokenizer: Tokenizer, tokenizer_type: TokenizerType, texts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_cache, "_CHARACTERS_AT_A_TIME", 9)
        patch.setattr(word_cache, "_MOST_CHARACTERS", 5)
        cache = WordCache(tokenizer, tokenizer_type, np.uint16)
        check(cache, tokenizer, texts * 2)


def test_memory_is_bounded(
    tokenizer: Tokenizer, tokenizer_type: TokenizerType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_cache, "_MOST_CHARACTERS", 100)
    cache = WordCache(tokenizer, tokenizer_type, np.uint16)
    held = []
    for number in range(1000):
        cache.encode([f"word{number}"])
        held.append(sum(map(len, cache._ids)))
    assert max(held) <= 100
    assert max(held[500:]) > 50  # it fills again after it was cleared
