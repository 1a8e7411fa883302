"""Questions and contexts as inputs of a model: windows over the context, and where the answer lies in each.

Source: Devlin et al., "BERT" (NAACL 2019), section 4.2, and its code: a context that is too long is cut into windows
whose starts are ``doc_stride`` tokens apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron01.errors import UserError
from megatron01.finetuning.encoding import Encoded, TextEncoder, as_input
from megatron01.finetuning.squad_data import Answer, Question

_CONTEXT = 1  # the number of the second text in an encoding


@dataclass(frozen=True, slots=True)
class Window:
    """The question and a part of its context.

    Attributes:
        question: place of the question in its list.
        encoded: the input.
        first: place of the first token of the context; those behind it belong to it too, up to ``len(spans)``.
        spans: the characters of the context that each of its tokens stands for: int32[context tokens, 2].
        best: for each of them whether this is the window in which it has the most context: bool[context tokens].
        answer: first and last token of the answer; (0, 0), the first special token, where it is not in this window.
    """

    question: int
    encoded: Encoded
    first: int
    spans: NDArray[np.int32]
    best: NDArray[np.bool_]
    answer: tuple[int, int]

    def __len__(self) -> int:
        return len(self.encoded)


def windows(
    questions: Sequence[Question], encoder: TextEncoder, *, max_length: int, doc_stride: int, max_query_length: int
) -> list[Window]:
    """The windows of all questions, in order.

    Args:
        questions: with the answers; of several answers the first is the one to learn.
        encoder: the tokenizer.
        max_length: tokens of a window, special ones included.
        doc_stride: tokens between the starts of windows; where they hold fewer, the next begins behind the last.
        max_query_length: tokens of a question; longer ones are cut.

    Raises:
        UserError: if no token of a context fits into a window.
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
        if not context.ids:  # white space alone
            continue
        found += _cut(number, _frame(backend, asked, context), context, question.answers[0], capacity, doc_stride)
    return found


@dataclass(frozen=True)
class _Frame:
    """What is around the context in every window: special tokens and the question."""

    before: Encoded
    behind: Encoded
    context_type: int

    def around(self, ids: NDArray[np.int32]) -> Encoded:
        """A window with these tokens of the context."""
        types = np.full(len(ids), self.context_type, dtype=np.int8)
        return Encoded(
            np.concatenate([self.before.ids, ids, self.behind.ids]),
            np.concatenate([self.before.types, types, self.behind.types]),
        )


def _frame(backend: Any, asked: Any, context: Any) -> _Frame:
    joined = backend.post_process(asked, context, add_special_tokens=True)
    whole, owners = as_input(joined), joined.sequence_ids
    first, end = owners.index(_CONTEXT), len(owners) - owners[::-1].index(_CONTEXT)
    return _Frame(
        before=Encoded(whole.ids[:first], whole.types[:first]),
        behind=Encoded(whole.ids[end:], whole.types[end:]),
        context_type=int(whole.types[first]),
    )


def _cut(
    question: int, frame: _Frame, context: Any, answer: Answer, capacity: int, doc_stride: int
) -> Iterator[Window]:
    ids, spans = np.asarray(context.ids, dtype=np.int32), np.asarray(context.offsets, dtype=np.int32)
    first, last = _tokens_of(answer, spans)
    parts = _parts(len(ids), capacity, doc_stride)
    owners = _owners(len(ids), parts)
    before = len(frame.before)
    for number, part in enumerate(parts):
        is_inside = part.start <= first and last < part.stop
        yield Window(
            question=question,
            encoded=frame.around(ids[part.start : part.stop]),
            first=before,
            spans=spans[part.start : part.stop],
            best=owners[part.start : part.stop] == number,
            answer=(before + first - part.start, before + last - part.start) if is_inside else (0, 0),
        )


def _parts(num_tokens: int, capacity: int, doc_stride: int) -> list[range]:
    """The tokens of each window; the last one reaches the end of the context."""
    step = min(doc_stride, capacity)
    num_parts = 1 + max(0, -(-(num_tokens - capacity) // step))
    return [range(start, min(start + capacity, num_tokens)) for start in range(0, num_parts * step, step)]


def _owners(num_tokens: int, parts: Sequence[range]) -> NDArray[np.int64]:
    """For each token the number of the window in which it has the most context on its poorer side: int64[tokens].

    Among equals a longer window wins, and then the first.
    """
    scores = np.full((len(parts), num_tokens), -np.inf)
    for number, part in enumerate(parts):
        left = np.arange(len(part))
        scores[number, part.start : part.stop] = np.minimum(left, left[::-1]) + 0.01 * len(part)
    return scores.argmax(axis=0)


def _tokens_of(answer: Answer, spans: NDArray[np.int32]) -> tuple[int, int]:
    """The first and the last token that an answer touches."""
    first = int(np.searchsorted(spans[:, 1], answer.start, side="right"))
    last = int(np.searchsorted(spans[:, 0], answer.start + len(answer.text), side="left")) - 1
    return first, max(first, last)


def collate(examples: Sequence[Window], encoder: TextEncoder) -> dict[str, Tensor]:
    """The arguments of a model for a batch, with the answers' places."""
    starts, ends = zip(*(window.answer for window in examples), strict=True)
    return encoder.collate([window.encoded for window in examples]) | {
        "start_positions": torch.tensor(starts, dtype=torch.int64),
        "end_positions": torch.tensor(ends, dtype=torch.int64),
    }
