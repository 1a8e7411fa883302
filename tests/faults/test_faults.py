"""A few faults of each kind; ``campaign`` draws as many as are asked for."""

from __future__ import annotations

import pytest

from tests.faults.campaign import reference, suffer
from tests.faults.injection import Fault
from tests.integration.tiny import make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    return reference(corpus, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("killed", "in the backward pass", 6, 1), "lost another replica"),
        (Fault("killed", "before an all-gather", 5, 0), "lost another replica"),
        (Fault("killed", "before tensors are saved", 1, 1), "lost another replica"),
        (Fault("killed", "before a checkpoint gets its name", 1, 0), "lost another replica"),
        (Fault("killed", "before the tracker file", 2, 0), "lost another replica"),
        (Fault("stopped", "before an all-to-all", 3, 1), "lost another replica"),
        (Fault("bit on the wire", "before an all-to-all", 4, 1), "checksum"),
        (Fault("bit in the weights", "in the optimizer", 9, 0), "differs from replica 0"),
    ],
    ids=lambda value: f"{value.kind} {value.place}" if isinstance(value, Fault) else "",
)
def test_it_is_noticed_by_all_who_live_and_nothing_is_lost(corpus, expected, tmp_path, fault, message):
    outcome = suffer(fault, corpus, tmp_path, expected)
    assert outcome.detected and any(message in text for text in outcome.messages), outcome
    assert all("\n" not in text for text in outcome.messages)
    assert outcome.recovered
