"""Warm processes for all tests here: they take longer to warm up than a test to run."""

from __future__ import annotations

import pytest

from tests.faults.nursery import Nursery


@pytest.fixture(scope="session")
def nursery():
    with Nursery() as made:
        yield made
