from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.finetune.squad import Answer, Question, exact_match, f1, score, words


@pytest.mark.parametrize(
    ("predicted", "answer", "exact", "overlap"),
    [
        ("The Fox!", "fox", 1.0, 1.0),
        ("a  fox,  an owl", "fox owl", 1.0, 1.0),
        ("the brown fox", "fox", 0.0, 2 / 3),
        ("fox fox", "fox", 0.0, 2 / 3),
        ("an", "the", 1.0, 0.0),  # both are empty without articles, so no word is common
        ("owl", "fox", 0.0, 0.0),
        ("1,000 boats", "1000 boats", 1.0, 1.0),
        ("fox-owl", "foxowl", 1.0, 1.0),
        ("theme", "me", 0.0, 0.0),  # only whole words count as articles
        ("It's", "its", 1.0, 1.0),
        ("Zürich", "zürich", 1.0, 1.0),
        ("owl the fox", "fox owl", 0.0, 1.0),
    ],
)
def test_golden_values(predicted, answer, exact, overlap):
    assert exact_match(predicted, answer) == exact
    assert f1(predicted, answer) == pytest.approx(overlap)


@given(st.text(), st.text())
def test_both_are_shares_and_symmetric(one, other):
    assert 0 <= f1(one, other) <= 1
    assert f1(one, other) == pytest.approx(f1(other, one))
    assert exact_match(one, one) == 1
    if words(one):
        assert f1(one, one) == 1
    if exact_match(one, other) and words(one):
        assert f1(one, other) == 1


def test_the_best_answer_counts_and_nothing_is_wrong():
    context = "the brown fox met an owl"
    fox = Question("q1", "who?", context, (Answer(4, "brown fox"), Answer(10, "fox")))
    owl = Question("q2", "whom?", context, (Answer(18, "an owl"),))
    assert score([fox, owl], {"q1": "fox", "q2": "owl"}) == {"exact_match": 1.0, "f1": 1.0}
    assert score([fox, owl], {"q1": "brown", "q2": "the"}) == {"exact_match": 0.0, "f1": pytest.approx(1 / 3)}
    assert score([fox, owl], {"q2": "owl"}) == {"exact_match": 0.5, "f1": 0.5}
