from __future__ import annotations

from megatron01.data import build_tokenizer
from megatron01.evaluate.generation import continuation, pieces
from tests.integration.tiny import bert_config, gpt_config


def test_a_space_between_words_is_kept(corpus):
    words = build_tokenizer(bert_config(corpus).data)  # its decoder joins words by spaces
    prompt, new = words.encode("the quick"), words.encode("brown fox")
    assert words.decode(new) == "brown fox"
    assert continuation(prompt, new, words) == " brown fox"
    assert list(pieces(prompt, new, words)) == [" brown", " fox", ""]
    assert continuation(prompt, [], words) == ""


def test_a_character_of_several_tokens_comes_whole(corpus):
    letters = build_tokenizer(gpt_config(corpus).data)  # one token for each byte
    new = letters.encode("a\u00e9\u4e1c")
    found = list(pieces(letters.encode("x"), new, letters))
    assert found == ["a", "\u00e9", "\u4e1c", ""]
    incomplete = list(pieces(letters.encode("x"), new[:-1], letters))
    assert incomplete[:2] == ["a", "\u00e9"] and incomplete[-1].startswith("\ufffd")
    assert continuation([letters.eod], new, letters) == "a\u00e9\u4e1c"
    replaced = letters.encode("\ufffd")  # in the text itself, which nothing completes
    assert list(pieces(replaced, letters.encode("ab"), letters)) == ["a", "b", ""]
