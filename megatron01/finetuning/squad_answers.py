"""Answers out of the outputs of a model: the n best spans of each question, over all its windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron01.finetuning.squad_data import Question
from megatron01.finetuning.squad_features import Window


@dataclass(frozen=True)
class Candidate:
    """A span of a context.

    Attributes:
        text: of the context.
        start_logit, end_logit: of its first and last token.
        probability: among the candidates of the question.
    """

    text: str
    start_logit: float
    end_logit: float
    probability: float = 0.0

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


def n_best(
    questions: Sequence[Question],
    outputs: Iterable[tuple[Window, NDArray[np.float32], NDArray[np.float32]]],
    *,
    count: int,
    max_answer_length: int,
) -> dict[str, list[Candidate]]:
    """The best spans of each question, best first, by its id; a text comes once. A question without any has none.

    A span lies within one window, and begins with a token that has its most context there.

    Args:
        questions: all of them.
        outputs: windows with their start and end logits, float32[tokens] each or longer (padding).
        count: spans of a question at most.
        max_answer_length: tokens of a span at most.
    """
    found: list[list[Candidate]] = [[] for _ in questions]
    for window, starts, ends in outputs:
        context = questions[window.question].context
        found[window.question] += _of_window(window, context, starts, ends, count, max_answer_length)
    return {
        question.name: _with_probabilities(_distinct(candidates, count))
        for question, candidates in zip(questions, found, strict=True)
    }


def _of_window(
    window: Window,
    context: str,
    start_logits: NDArray[np.float32],
    end_logits: NDArray[np.float32],
    count: int,
    max_answer_length: int,
) -> list[Candidate]:
    tokens = slice(window.first, window.first + len(window.spans))
    starts, ends = start_logits[tokens].astype(np.float64), end_logits[tokens].astype(np.float64)
    num_tokens = len(starts)
    # pairs[start, length - 1]: the score of the span of that length
    lengths = np.arange(min(max_answer_length, num_tokens))
    last = np.arange(num_tokens)[:, None] + lengths
    allowed = (last < num_tokens) & window.best[:, None]
    pairs = np.where(allowed, starts[:, None] + ends[np.minimum(last, num_tokens - 1)], -np.inf)
    order = np.argsort(-pairs, axis=None, kind="stable")[:count]
    candidates = []
    for place in order:
        first, length = divmod(int(place), len(lengths))
        if not allowed[first, length]:
            break
        begin, end = int(window.spans[first, 0]), int(window.spans[first + length, 1])
        candidates.append(Candidate(context[begin:end], float(starts[first]), float(ends[first + length])))
    return candidates


def _distinct(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    best: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: -candidate.score):
        best.setdefault(candidate.text, candidate)
    return list(best.values())[:count]


def _with_probabilities(candidates: Sequence[Candidate]) -> list[Candidate]:
    if not candidates:
        return []
    weights = np.exp(np.asarray([candidate.score for candidate in candidates]) - candidates[0].score)
    shares = weights / weights.sum()
    return [
        Candidate(candidate.text, candidate.start_logit, candidate.end_logit, float(share))
        for candidate, share in zip(candidates, shares, strict=True)
    ]
