"""A sample of ``resume_proof``, which resumes a run after each of 200 steps."""

from __future__ import annotations

import pytest

from tests.faults.resume_proof import prove
from tests.faults.settings import Setting


@pytest.mark.slow
def test_a_run_taken_up_after_any_step_or_killed_ends_with_the_same_bits(pool, tmp_path):
    proof = prove(pool, Setting(), tmp_path, steps=12, every=5, kills=1)
    assert proof.different == [] and proof.resumed == 3


@pytest.mark.slow
def test_adam_adds_gradients_in_the_same_order_after_a_restart(pool, tmp_path):
    """A ring all-reduce over three or more replicas sums in an order that depends on the position in a bucket."""
    proof = prove(pool, Setting(optimizer="adam", per_node=3), tmp_path, steps=5, every=2)
    assert proof.different == [] and proof.resumed == 2
