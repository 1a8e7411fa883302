"""A few rounds of each target; ``campaign`` makes as many as are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.fuzz.rounds import TARGETS, run_rounds
from tests.tiers import slow_after

ROUNDS = {"checkpoints": 40, "token files": 60, "settings": 60}


@pytest.mark.parametrize("name", slow_after(1, TARGETS))
def test_damaged_files_are_refused_in_one_line_or_harmless(name: str, tmp_path: Path) -> None:
    TARGETS[name].prepare(tmp_path)
    (outcome,) = run_ranks(run_rounds, 1, name, tmp_path, 0, range(ROUNDS[name]), default_group=False)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.refused.total() > ROUNDS[name] // 4 and outcome.harmless.total() > 0
