"""One process pool for all tests here: it takes longer to warm up than a test to run."""

from __future__ import annotations

import pytest

from tests.faults.process_pool import ProcessPool


@pytest.fixture(scope="session")
def pool():
    with ProcessPool() as made:
        yield made
