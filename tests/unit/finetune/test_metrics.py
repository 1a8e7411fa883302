"""The metrics against their definitions, and golden cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.finetune.glue import TASKS, score

PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=60)
SCORES = st.lists(st.tuples(st.integers(-40, 40), st.integers(0, 50)), min_size=2, max_size=40)


def of_classes(task, expected, predicted):
    outputs = np.eye(len(TASKS[task].labels), dtype=np.float32)[list(predicted)]
    return score(TASKS[task], outputs, np.asarray(expected, dtype=np.float64))


def counts(pairs):
    return {(e, p): sum(pair == (e, p) for pair in pairs) for e in (0, 1) for p in (0, 1)}


@given(PAIRS)
def test_matthews_correlation_by_its_definition(pairs):
    n = counts(pairs)
    sizes = [n[1, 1] + n[0, 1], n[1, 1] + n[1, 0], n[0, 0] + n[0, 1], n[0, 0] + n[1, 0]]
    expected = (n[1, 1] * n[0, 0] - n[0, 1] * n[1, 0]) / math.sqrt(math.prod(sizes)) if all(sizes) else 0.0
    assert of_classes("CoLA", *zip(*pairs, strict=True)) == {"matthews": pytest.approx(expected)}


@given(PAIRS)
def test_f1_of_the_positive_class_by_its_definition(pairs):
    n = counts(pairs)
    errors = n[0, 1] + n[1, 0]
    expected = 2 * n[1, 1] / (2 * n[1, 1] + errors) if n[1, 1] else 0.0
    found = of_classes("MRPC", *zip(*pairs, strict=True))
    assert found == {"accuracy": pytest.approx((n[1, 1] + n[0, 0]) / len(pairs)), "f1": pytest.approx(expected)}


def ranks(values):
    """Ranks from 1; equal values share the mean of theirs."""
    return [(sum(v < x for v in values) + 1 + sum(v <= x for v in values)) / 2 for x in values]


def correlation(a, b):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt((a @ a) * (b @ b))
    return float(a @ b) / norm if norm > 0 else 0.0


@given(SCORES)
def test_correlations_by_their_definitions(pairs):
    predicted, expected = (np.asarray(side) / 8 for side in zip(*pairs, strict=True))
    found = score(TASKS["STS-B"], predicted[:, None].astype(np.float32), expected)
    assert found["pearson"] == pytest.approx(correlation(predicted, expected), abs=1e-6)
    assert found["spearman"] == pytest.approx(correlation(ranks(predicted), ranks(expected)), abs=1e-9)


def test_golden_values():
    expected, predicted = [0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 0, 2]
    assert of_classes("MNLI", expected, predicted) == {"accuracy": pytest.approx(4 / 6)}
    assert of_classes("CoLA", [1, 1, 1, 0], [1, 0, 1, 1]) == {"matthews": pytest.approx(-1 / 3)}
    assert of_classes("QQP", [1, 1, 0, 0], [0, 0, 0, 0]) == {"accuracy": 0.5, "f1": 0.0}


def test_a_correlation_that_is_not_defined_is_zero(recwarn):
    same = np.ones((4, 1), dtype=np.float32)
    assert score(TASKS["STS-B"], same, np.arange(4.0)) == {"pearson": 0.0, "spearman": 0.0}
    assert score(TASKS["STS-B"], same[:1], np.arange(1.0)) == {"pearson": 0.0, "spearman": 0.0}
    assert of_classes("CoLA", [1, 1], [1, 1]) == {"matthews": 0.0}
    assert not recwarn.list
