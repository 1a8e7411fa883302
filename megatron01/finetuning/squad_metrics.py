"""Exact match and F1 of SQuAD 1.1.

Source: Rajpurkar et al. (EMNLP 2016), section 6.1: answers are compared in small letters, without punctuation, articles
and superfluous white space; F1 is over the words that both have; each question counts by its best-matching answer.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from megatron01.finetuning.squad_data import Question

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(answer: str) -> list[str]:
    """What counts of an answer."""
    return _ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split()


def exact_match(predicted: str, answer: str) -> float:
    """1 if two answers have the same words in the same order, else 0."""
    return float(words(predicted) == words(answer))


def f1(predicted: str, answer: str) -> float:
    """Harmonic mean of the shares of words, each as often as it comes, that the other answer has too."""
    ours, theirs = words(predicted), words(answer)
    num_common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * num_common / (len(ours) + len(theirs)) if num_common else 0.0


def score(questions: Sequence[Question], predicted: Mapping[str, str]) -> dict[str, float]:
    """Means over all questions, as shares of 1; a question without a prediction counts as wrong."""
    totals = {"exact_match": 0.0, "f1": 0.0}
    for question in questions:
        text = predicted.get(question.name)
        if text is not None:
            totals["exact_match"] += max(exact_match(text, answer.text) for answer in question.answers)
            totals["f1"] += max(f1(text, answer.text) for answer in question.answers)
    return {name: total / len(questions) for name, total in totals.items()}
