from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.errors import UserError
from megatron01.finetune.squad import Answer, Question, collate, n_best, windows

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "boats"]


def ask(context, answer, start=None, question="the fox"):
    return Question("q", question, context, (Answer(context.index(answer) if start is None else start, answer),))


def windows_of(question, encoder, *, max_length=12, doc_stride=3, max_query_length=8):
    return windows([question], encoder, max_length=max_length, doc_stride=doc_stride, max_query_length=max_query_length)


def text_of(window, question, tokens):
    first, last = (token - window.first for token in tokens)
    return question.context[window.spans[first, 0] : window.spans[last, 1]]


def test_windows_and_where_the_answer_is(encoder):
    """[CLS] the fox [SEP] + 7 tokens of 12 + [SEP]: windows from token 0, 3 and 6."""
    question = ask(" ".join(WORDS), "over a lazy")
    found = windows_of(question, encoder)
    ids = encoder.backend.token_to_id
    for start, window in zip((0, 3, 6), found, strict=True):
        here = WORDS[start : start + 7]
        assert [int(token) for token in window.encoded.ids] == [
            ids(token) for token in ["[CLS]", "the", "fox", "[SEP]", *here, "[SEP]"]
        ]
        assert list(window.encoded.types) == [0] * 4 + [1] * (len(here) + 1)
        assert window.first == 4
        assert [question.context[begin:end] for begin, end in window.spans] == here
    assert found[0].answer == (0, 0)  # token 7, "lazy", is in the second and third only
    assert found[1].answer == (4 + 2, 4 + 4)
    assert found[2].answer == (0, 0)  # token 5, "over", is not in the third
    assert text_of(found[1], question, found[1].answer) == "over a lazy"
    # a longer stride than fits into a window would leave tokens out
    wide = windows_of(question, encoder, max_length=10, doc_stride=9)
    assert [WORDS.index(text_of(window, question, (4, 4))) for window in wide] == [0, 5, 10]


def test_a_token_has_most_context_in_one_window(encoder):
    found = windows_of(ask(" ".join(WORDS), "fox"), encoder)
    owners = [[int(span[0]) for span in window.spans[window.best]] for window in found]
    assert sorted(start for starts in owners for start in starts) == sorted(
        {int(start) for window in found for start in window.spans[:, 0]}
    )
    # token 3 has a smaller side of 3 tokens in the first window and none in the second; 6 the other way round
    starts = [len(" ".join(WORDS[:number])) + (number > 0) for number in range(12)]
    assert starts[3] in owners[0]
    assert starts[6] in owners[1]


@given(
    st.lists(st.sampled_from([*WORDS, "dogs", "?!", "owl"]), min_size=1, max_size=40),
    st.data(),
    st.integers(1, 12),
    st.integers(10, 20),
)
def test_windows_cover_the_context_and_find_the_answer(encoder, words, data, doc_stride, max_length):
    context = "  ".join(words)
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, min(first + 3, len(words) - 1)))
    start = sum(len(word) + 2 for word in words[:first])
    answer = "  ".join(words[first : last + 1])
    question = ask(context, answer, start)
    found = windows_of(question, encoder, doc_stride=doc_stride, max_length=max_length)
    tokens = encoder.backend.encode(context, add_special_tokens=False)
    covered = {tuple(span) for window in found for span in window.spans.tolist()}
    assert covered == set(tokens.offsets)
    assert sum(int(window.best.sum()) for window in found) == len(tokens.ids)
    assert all(len(window) <= max_length for window in found)
    inside = [window for window in found if window.spans[0, 0] <= start and window.spans[-1, 1] >= start + len(answer)]
    for window in found:
        if any(window is other for other in inside):
            assert text_of(window, question, window.answer) == answer
        else:
            assert window.answer == (0, 0)


def test_an_answer_within_a_token(encoder):
    question = ask("seven dogs sail", "dog")
    window = windows_of(question, encoder)[0]
    assert text_of(window, question, window.answer) == "dog"  # "dogs" is "dog" and "##s"
    question = ask("seven boats sail", "boat")
    assert text_of(windows_of(question, encoder)[0], question, windows_of(question, encoder)[0].answer) == "boats"


def test_an_answer_between_marks_without_spaces(encoder):
    question = ask("seven (boats) sail", "boats")
    window = windows_of(question, encoder)[0]
    assert text_of(window, question, window.answer) == "boats"


def test_long_questions_are_cut_and_padding_is_the_batch_s(encoder):
    short, long = ask("a fox", "fox"), ask("a fox jumps over a dog", "dog", question="fox " * 30)
    found = windows([short, long], encoder, max_length=20, doc_stride=4, max_query_length=5)
    assert found[1].first == 1 + 5 + 1
    batch = collate(found, encoder)
    assert batch["input_ids"].shape == (2, len(found[1]))
    assert batch["attention_mask"].sum(1).tolist() == [len(window) for window in found]
    assert batch["start_positions"].tolist() == [window.answer[0] for window in found]
    with pytest.raises(UserError, match="max_length is 8; expected more than 8 tokens"):
        windows([long], encoder, max_length=8, doc_stride=4, max_query_length=5)


def test_a_context_without_tokens_has_no_window(encoder):
    assert windows_of(ask("   ", " "), encoder) == []


def logits(window, scores):
    """Zero except at tokens of the context."""
    values = np.zeros(len(window) + 3, dtype=np.float32)
    for token, value in scores.items():
        values[window.first + token] = value
    return values


def test_n_best(encoder):
    question = ask("the quick brown fox jumps over a lazy dog", "fox")
    (window,) = windows_of(question, encoder, max_length=20)
    starts, ends = logits(window, {3: 5, 2: 4}), logits(window, {3: 6, 8: 5.5})
    found = n_best([question], [(window, starts, ends)], count=4, max_answer_length=3)["q"]
    assert [candidate.text for candidate in found[:2]] == ["fox", "brown fox"]
    assert all(len(candidate.text.split()) <= 3 for candidate in found)
    assert sum(candidate.probability for candidate in found) == pytest.approx(1)
    assert [c.score for c in found] == sorted((c.score for c in found), reverse=True)
    assert found[0].start_logit == 5
    assert found[0].end_logit == 6
    longer = n_best([question], [(window, starts, ends)], count=4, max_answer_length=9)["q"]
    assert "fox jumps over a lazy dog" in [candidate.text for candidate in longer]


def test_a_token_begins_an_answer_only_where_it_has_most_context(encoder):
    question = ask(" ".join(WORDS), "fox")
    found = windows_of(question, encoder)
    weak = found[1].best.tolist().index(False)
    outputs = [(window, logits(window, {}), logits(window, {})) for window in found]
    outputs[1] = (found[1], logits(found[1], {weak: 50}), logits(found[1], {weak: 50}))
    best = n_best([question], outputs, count=5, max_answer_length=5)["q"]
    assert max(candidate.start_logit for candidate in best) < 50


def test_equal_texts_come_once_and_questions_without_windows_have_none(encoder):
    question = ask("fox fox fox", "fox", 0)
    (window,) = windows_of(question, encoder)
    zeros = logits(window, {})
    found = n_best([question], [(window, zeros, zeros)], count=20, max_answer_length=1)["q"]
    assert [candidate.text for candidate in found] == ["fox"]
    second = n_best([question], [(window, logits(window, {1: 3}), zeros)], count=20, max_answer_length=1)["q"]
    assert [(candidate.text, candidate.score) for candidate in second] == [("fox", 3)]  # with the best of its scores
    assert n_best([question], [], count=5, max_answer_length=5) == {"q": []}
