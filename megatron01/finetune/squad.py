"""``megatron01 squad``: questions of SQuAD 1.1, windows over their contexts, answers and metrics, and a sweep.

Sources: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (EMNLP 2016); for sliding
windows Devlin et al., "BERT" (NAACL 2019), section 4.2, and its code: a long context is divided into windows whose
starts are ``doc_stride`` tokens apart.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron01.config.commands import SquadConfig
from megatron01.data.tokenizers import checked_text
from megatron01.errors import UserError
from megatron01.finetune.bench import FineTuneBench, evaluate
from megatron01.finetune.pretrained import Encoded, TextEncoder, as_input
from megatron01.finetune.results import Column, Run, fingerprint_of, write_file
from megatron01.finetune.sweep import Sweep, devices_for
from megatron01.utils.files import read_json_object


class Answer(NamedTuple):
    """A span of a context: ``context[start : start + len(text)]`` is ``text``."""

    start: int
    text: str


class Question(NamedTuple):
    """A question about a context, and its reference answers, at least one."""

    name: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_squad(path: Path) -> list[Question]:
    """The questions of a file.

    Raises:
        UserError: if it cannot be read, is not of SQuAD 1.1, or an answer is not at its stated offset; names the place.
    """
    contents = read_json_object(path, expected="a file of SQuAD 1.1")
    questions: dict[str, Question] = {}
    for article, place in _each(contents, "data", str(path)):
        for paragraph, inner in _each(article, "paragraphs", place):
            context = _text(paragraph, "context", inner)
            for entry, innermost in _each(paragraph, "qas", inner):
                question = _question(entry, context, innermost)
                if question.name in questions:
                    raise UserError(f"{path} has two questions with the id {question.name}; expected one")
                questions[question.name] = question
    if not questions:
        raise UserError(f"{path} holds no questions")
    return list(questions.values())


def _question(entry: Any, context: str, place: str) -> Question:
    name, question = _text(entry, "id", place), _text(entry, "question", place)
    where = f"{place} ({name})"
    answers = []
    for answer, inner in _each(entry, "answers", where):
        text, start = _text(answer, "text", inner), answer.get("answer_start")
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise UserError(f"{inner}: answer_start is {start!r}; expected the place of a character in the context")
        if not text or context[start : start + len(text)] != text:
            raise UserError(
                f"{inner}: the answer {text[:40]!r} is not at character {start} of its context; there is"
                f" {context[start : start + len(text)][:40]!r}"
            )
        answers.append(Answer(start, text))
    if not answers:
        raise UserError(f"{where} has no answer; expected one or more, as in SQuAD 1.1 (2.0 is another task)")
    return Question(name, question, context, tuple(answers))


def _each(entry: Any, key: str, place: str) -> Iterator[tuple[Any, str]]:
    values = entry.get(key) if isinstance(entry, Mapping) else None
    if not isinstance(values, list):
        raise UserError(f"{place}: there is no list {key!r}; expected a file of SQuAD 1.1")
    for number, value in enumerate(values):
        yield value, f"{place} {key}[{number}]"


def _text(entry: Any, key: str, place: str) -> str:
    value = entry.get(key) if isinstance(entry, Mapping) else None
    return checked_text(value, repr(key), place)


_CONTEXT = 1  # sequence id of the second text in an encoding


@dataclass(frozen=True, slots=True)
class Window:
    """A model input: the question and a range of its context's tokens."""

    question: int  # index of the question
    encoded: Encoded
    first: int  # position of the first of ``len(spans)`` context tokens
    spans: NDArray[np.int32]  # start and end character in the context of each context token: int32[context tokens, 2]
    best: NDArray[np.bool_]  # where they have more context than in other windows: bool[context tokens]
    answer: tuple[int, int]  # first and last token; (0, 0), the first special token, if it is not in this window

    def __len__(self) -> int:
        return len(self.encoded)


def windows(
    questions: Sequence[Question], encoder: TextEncoder, *, max_length: int, doc_stride: int, max_query_length: int
) -> list[Window]:
    """The windows of all questions, in order. Raises UserError if no token of a context fits into a window.

    Args:
        questions: the first answer of each is the training target.
        max_length: tokens of a window, special ones included.
        doc_stride: tokens between the starts of windows; at most the context tokens that fit into a window.
        max_query_length: tokens of a question; longer ones are truncated.
    """
    backend = encoder.backend
    backend.no_padding()
    backend.no_truncation()
    num_special = backend.num_special_tokens_to_add(is_pair=True)
    found: list[Window] = []
    for number, question in enumerate(questions):
        asked = backend.encode(question.question.strip(), add_special_tokens=False)
        asked.truncate(max_query_length)
        capacity = max_length - num_special - len(asked.ids)
        if capacity < 1:
            raise UserError(f"max_length is {max_length}; expected more than {max_length - capacity} tokens")
        context = backend.encode(question.context, add_special_tokens=False)
        if not context.ids:  # only white space
            continue
        whole = backend.post_process(asked, context)
        spans = np.asarray(context.offsets, dtype=np.int32)  # not those of ``whole``: RoBERTa's would be trimmed twice
        step = min(doc_stride, capacity)
        # the last window is the first that reaches the end of the context
        starts = range(0, max(1, len(spans) - capacity + step), step)
        ranges = [range(start, min(start + capacity, len(spans))) for start in starts]
        found += _windows_of(number, whole, spans, ranges, question.answers[0])
    return found


def _windows_of(
    question: int, whole: Any, spans: NDArray[np.int32], ranges: Sequence[range], answer: Answer
) -> Iterator[Window]:
    """The windows of a question; ``whole`` is the encoding of the question with all of its context."""
    owners = whole.sequence_ids
    before, behind = owners.index(_CONTEXT), len(owners) - owners[::-1].index(_CONTEXT)
    encoded = as_input(whole)
    # the first and the last token that overlap the answer
    first = int(np.searchsorted(spans[:, 1], answer.start, side="right"))
    last = max(first, int(np.searchsorted(spans[:, 0], answer.start + len(answer.text), side="left")) - 1)
    owner = _owners(len(spans), ranges)
    for number, tokens in enumerate(ranges):
        inside = slice(tokens.start, tokens.stop)
        places = np.r_[:before, before + tokens.start : before + tokens.stop, behind : len(encoded)]
        has_answer = tokens.start <= first and last < tokens.stop
        yield Window(
            question=question,
            encoded=Encoded(encoded.ids[places], encoded.types[places]),
            first=before,
            spans=spans[inside],
            best=owner[inside] == number,
            answer=(before + first - tokens.start, before + last - tokens.start) if has_answer else (0, 0),
        )


def _owners(num_tokens: int, ranges: Sequence[range]) -> NDArray[np.int64]:
    """For each token the window that maximizes the smaller of its left and right context: int64[tokens].

    Ties go to the longer window, then to the first.
    """
    scores = np.full((len(ranges), num_tokens), -np.inf)
    for number, tokens in enumerate(ranges):
        left = np.arange(len(tokens))
        scores[number, tokens.start : tokens.stop] = np.minimum(left, left[::-1]) + 0.01 * len(tokens)
    result: NDArray[np.int64] = scores.argmax(axis=0)
    return result


def collate(examples: Sequence[Window], encoder: TextEncoder) -> dict[str, Tensor]:
    """Keyword arguments of a model for a batch, with ``start_positions`` and ``end_positions``, int64[examples]."""
    starts, ends = zip(*(window.answer for window in examples), strict=True)
    answers = {"start_positions": torch.tensor(starts), "end_positions": torch.tensor(ends)}
    return encoder.collate([window.encoded for window in examples]) | answers


class Candidate(NamedTuple):
    """A candidate answer: a span of a context."""

    text: str
    start_logit: float
    end_logit: float
    probability: float = 0.0  # softmax of the scores over the candidates of the question

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
    """The best spans of each question by its id, best first, each text once; an empty list if there are none.

    A span lies within one window, and starts with a token that has its most context there (``Window.best``).

    Args:
        outputs: windows with their start and end logits, float32[tokens] each or longer (padding).
        count, max_answer_length: most spans of a question, and most tokens of a span.
    """
    found: dict[str, list[Candidate]] = {question.name: [] for question in questions}
    for window, start_logits, end_logits in outputs:
        question = questions[window.question]
        tokens = slice(window.first, window.first + len(window.spans))
        starts, ends = start_logits[tokens].astype(np.float64), end_logits[tokens].astype(np.float64)
        num_tokens = len(starts)
        # pairs[start, length - 1]: the score of the span of that length
        lengths = np.arange(min(max_answer_length, num_tokens))
        last = np.arange(num_tokens)[:, None] + lengths
        allowed = (last < num_tokens) & window.best[:, None]
        pairs = np.where(allowed, starts[:, None] + ends[np.minimum(last, num_tokens - 1)], -np.inf)
        for place in np.argsort(-pairs, axis=None, kind="stable")[:count]:
            first, length = divmod(int(place), len(lengths))
            if not allowed[first, length]:
                break
            text = question.context[window.spans[first, 0] : window.spans[first + length, 1]]
            found[question.name].append(Candidate(text, float(starts[first]), float(ends[first + length])))
    return {name: _best(candidates, count) for name, candidates in found.items()}


def _best(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """The best candidate of each text, best first, with probabilities."""
    best: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: -candidate.score):
        best.setdefault(candidate.text, candidate)
    chosen = list(best.values())[:count]
    scores = torch.tensor([candidate.score for candidate in chosen], dtype=torch.float64)
    shares = scores.softmax(0).tolist()
    return [candidate._replace(probability=share) for candidate, share in zip(chosen, shares, strict=True)]


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(answer: str) -> list[str]:
    """Normalized words of an answer: lower case, without punctuation and articles (section 6.1)."""
    return _ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split()


def exact_match(predicted: str, answer: str) -> float:
    """1 if two answers have the same words in the same order, else 0."""
    return float(words(predicted) == words(answer))


def f1(predicted: str, answer: str) -> float:
    """F1 of word overlap: harmonic mean of precision and recall over the words as multisets."""
    ours, theirs = words(predicted), words(answer)
    num_common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * num_common / (len(ours) + len(theirs)) if num_common else 0.0


def score(questions: Sequence[Question], predicted: Mapping[str, str]) -> dict[str, float]:
    """Exact match and F1, means over all questions of the maximum over reference answers; 0 without a prediction."""
    totals = {"exact_match": 0.0, "f1": 0.0}
    for question in questions:
        text = predicted.get(question.name)
        if text is not None:
            totals["exact_match"] += max(exact_match(text, answer.text) for answer in question.answers)
            totals["f1"] += max(f1(text, answer.text) for answer in question.answers)
    return {name: total / len(questions) for name, total in totals.items()}


# The sweep.

TASK = "SQuAD"
COLUMNS = (Column("f1", "SQuAD F1"), Column("exact_match", "SQuAD EM"))


class SquadBench(FineTuneBench):
    """Executes the runs of a sweep over SQuAD. Predicted answers are written below ``answers/`` of its folder."""

    head = "QuestionAnswering"
    config: SquadConfig

    def __init__(self, config: SquadConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.train_set = read_squad(config.train_file)
        self.dev_set = read_squad(config.dev_file)
        self._fingerprint = fingerprint_of(self.train_set, self.dev_set)

    def columns(self, task: str) -> Sequence[Column]:
        return COLUMNS

    def fingerprint(self, task: str) -> str:
        return self._fingerprint

    def inputs(self, task: str) -> list[list[Window]]:
        return self._windows

    def amounts(self, task: str) -> tuple[float, float]:
        return len(self._windows[0]), len(self._windows[1])

    def collate(self, task: str, examples: Sequence[Window]) -> dict[str, Tensor]:
        return collate(examples, self.pretrained.encoder)

    def score(self, run: Run, model: Any) -> dict[str, float]:
        config = self.config
        answers = n_best(
            self.dev_set, self._span_logits(model), count=config.n_best, max_answer_length=config.max_answer_length
        )
        folder = self.answers_folder(run)
        candidates = {name: [candidate._asdict() for candidate in found] for name, found in answers.items()}
        predicted = {name: found[0].text for name, found in answers.items() if found}
        write_file(folder / "nbest_predictions.json", json.dumps(candidates, indent=1) + "\n")
        write_file(folder / "predictions.json", json.dumps(dict.fromkeys(answers, "") | predicted, indent=1) + "\n")
        return score(self.dev_set, predicted)

    def answers_folder(self, run: Run) -> Path:
        """Folder of the predicted answers of a run."""
        return self.config.output / "answers" / run.file_name

    @cached_property
    def _windows(self) -> list[list[Window]]:
        encoder, config = self.pretrained.encoder, self.config
        sizes = {name: getattr(config, name) for name in ("max_length", "doc_stride", "max_query_length")}
        return [windows(questions, encoder, **sizes) for questions in (self.train_set, self.dev_set)]

    def _span_logits(self, model: Any) -> Iterator[tuple[Window, NDArray[np.float32], NDArray[np.float32]]]:
        """Each window of the development set with its start and end logits, float32[padded tokens] each."""
        dev_set = self._windows[1]
        encoded = [window.encoded for window in dev_set]
        for places, output in evaluate(model, encoded, self.pretrained.encoder.collate, self.config):
            starts, ends = output.start_logits.float().cpu().numpy(), output.end_logits.float().cpu().numpy()
            for row, place in enumerate(places):
                yield dev_set[place], starts[row], ends[row]


def squad(config: SquadConfig) -> None:
    """Execute the unfinished runs of a sweep, and print and write its tables.

    Raises UserError if the model, the data or the folder cannot be used.
    """
    bench = SquadBench(config, devices_for(config)[0])
    sweep = Sweep(
        bench,
        [TASK],
        command="squad",
        doc_stride=config.doc_stride,
        max_query_length=config.max_query_length,
        max_answer_length=config.max_answer_length,
        model=bench.pretrained.fingerprint,
    )
    sweep.execute()
    best = sweep.show()
    # a run that diverged has none
    if best and (answers := bench.answers_folder(best[TASK].best_run(COLUMNS[0].metric))).is_dir():
        print(f"answers of the best run: {answers}")
    sweep.finish(best)
