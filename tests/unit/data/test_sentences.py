"""Sentence splitting: places where a period ends a sentence and where it does not."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config.commands import Lang
from megatron01.data.preprocessing.sentences import split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["Mr. Smith went to Washington.", "He met Dr. J. R. Jones, Ph.D.", "They talked."],
        ["The U.S. Army arrived at 5 p.m.", "It was late.", "The U.S. is big."],
        ["Prices rose 3.5 percent.", "No. 5 is alive.", "He said no.", "They left."],
        ["He saw it (see Fig. 3).", "Apples, pears, etc. were there, i.e. Many of them.", "The end."],
        ["J. S. Bach lived.", "So did I.", "Then we ate.", "It was 1999.", "In 2000 it was over."],
        ['"What?" he said.', '"I never did!"', "She left...", "Then he wept."],
        ["“Stop.”", "He did.", "(He had to.)", "Wait!!", "Really?!", "Yes."],
        ["In 1687 I. Newton wrote it.", "So did I.", "Nobody else did."],
        ["1. Introduction to the matter.", "See Smith et al. (2004).", "It works, cf. Jones."],
        ["It cost $5.", "Then he left for St. Louis, Mo. and died.", "Apple Inc. grew.", "Apple Inc.", "The firm."],
        ["He fell ill.", "Doctors came on Jan. 5 at noon.", "In Jan. 1900 nobody did.", "Henry VIII.", "The king."],
        ["他来了。", "她走了！"],  # noqa: RUF001
    ],
)
def test_sentences_on_one_line(sentences: list[str]) -> None:
    joined = "" if sentences[0][0] > "\u2fff" else " "
    assert split_sentences(joined.join(sentences)) == sentences


def test_line_breaks_separate_paragraphs_and_headings() -> None:
    assert split_sentences("A heading\nA paragraph. And more\n\nThe next") == [
        "A heading",
        "A paragraph.",
        "And more",
        "The next",
    ]


def test_a_line_ends_a_sentence_where_the_next_word_had_room() -> None:
    lines = "A line of twenty one\nShort line here"  # the longest has 20 characters
    assert split_sentences(f"{lines}\nFits") == ["A line of twenty one Short line here", "Fits"]
    assert split_sentences(f"{lines}\nLarge") == ["A line of twenty one Short line here Large"]


def test_wrapped_lines_are_joined() -> None:
    text = (
        "This text is wrapped to a width, so that the break of a line at this place\n"
        "does not end a sentence. But this one ends. And that holds for a name: Mr.\n"
        "Jefferson, whose name did not fit the line.\n\nA new paragraph"
    )
    assert split_sentences(text) == [
        "This text is wrapped to a width, so that the break of a line at this place does not end a sentence.",
        "But this one ends.",
        "And that holds for a name: Mr. Jefferson, whose name did not fit the line.",
        "A new paragraph",
    ]


@given(st.text(alphabet=st.sampled_from("aB1 .!?…\"'()\n\r\t“”。é"), max_size=80) | st.text(max_size=60))
def test_nothing_is_lost_and_nothing_is_empty(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)


def test_long_input_takes_linear_time() -> None:
    texts = ["a" * 300_000, "." * 300_000, "a. b " * 60_000, "\n" * 300_000, "A.B." * 75_000]
    for text in (*texts, "." * 300_000 + "x", "A. " * 100_000, "\n " * 150_000, ".)" * 150_000 + "x"):
        kept = split_sentences(text, keep_newlines=True)
        assert "".join(kept) == (text if text.split() else "")


def test_a_long_wrapped_paragraph_takes_linear_time() -> None:
    began = time.process_time()
    line = " ".join(["word"] * 12)
    assert split_sentences(f"{line}\n" * 80_000) == [" ".join([line] * 80_000)]
    assert time.process_time() - began < 5


MIXED = st.text(alphabet=st.sampled_from("aB1 .!?…\"'()\n\r\t“”。é"), max_size=80) | st.text(max_size=60)


@pytest.mark.parametrize("lang", ["english", "lines"])
@given(text=MIXED)
def test_keep_newlines_keeps_all(lang: Lang, text: str) -> None:
    sentences = split_sentences(text, lang=lang)
    kept = split_sentences(text, lang=lang, keep_newlines=True)
    assert "".join(kept) == (text.lstrip() if sentences else "")
    assert [sentence.split() for sentence in kept] == [sentence.split() for sentence in sentences]


def test_lines_are_sentences() -> None:
    text = "Das ist der 1. Januar. Es schneit.\r\n  \n  Ein Satz\rNoch einer "
    assert split_sentences(text, lang="lines") == ["Das ist der 1. Januar. Es schneit.", "Ein Satz", "Noch einer"]
    kept = ["Das ist der 1. Januar. Es schneit.\r\n  \n  ", "Ein Satz\r", "Noch einer "]
    assert split_sentences(text, lang="lines", keep_newlines=True) == kept
