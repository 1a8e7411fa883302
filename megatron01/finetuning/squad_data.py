"""Questions of SQuAD 1.1 out of its JSON files.

Source: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (EMNLP 2016).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron01.errors import UserError
from megatron01.files import read_json_object


@dataclass(frozen=True, slots=True)
class Answer:
    """A part of a context: ``context[start : start + len(text)]`` is ``text``."""

    start: int
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context, and the answers that people gave, at least one."""

    name: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_squad(path: Path) -> list[Question]:
    """The questions of a file.

    Raises:
        UserError: if it cannot be read, is not of SQuAD 1.1, or an answer is not where it is said to be; it names the
            place.
    """
    contents = read_json_object(path, expected="a file of SQuAD 1.1")
    questions = list(_questions(contents, str(path)))
    if not questions:
        raise UserError(f"{path} holds no questions")
    names = set()
    for question in questions:
        if question.name in names:
            raise UserError(f"{path} has two questions with the id {question.name}; expected one")
        names.add(question.name)
    return questions


def fingerprint(sets: Iterable[Iterable[Question]]) -> str:
    """Hash of all questions, contexts and answers of some files."""
    digest = hashlib.sha256()
    for questions in sets:
        for question in questions:
            answers = [(answer.start, answer.text) for answer in question.answers]
            digest.update(json.dumps([question.name, question.question, question.context, answers]).encode())
    return digest.hexdigest()[:16]


def _questions(contents: Any, source: str) -> Iterator[Question]:
    for article, place in _each(contents, "data", source):
        for paragraph, inner in _each(article, "paragraphs", place):
            context = _text(paragraph, "context", inner)
            for entry, innermost in _each(paragraph, "qas", inner):
                yield _question(entry, context, innermost)


def _question(entry: Any, context: str, place: str) -> Question:
    name, question = _text(entry, "id", place), _text(entry, "question", place)
    where = f"{place} ({name})"
    answers = []
    for answer, inner in _each(entry, "answers", where):
        text, start = _text(answer, "text", inner), answer.get("answer_start")
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise UserError(f"{inner}: answer_start is {start!r}; expected a place in the context")
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
    if not isinstance(value, str):
        raise UserError(f"{place}: {key!r} is {value!r}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: {key!r} holds half of a surrogate pair; expected text") from None
    return value
