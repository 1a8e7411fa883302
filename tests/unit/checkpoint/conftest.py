from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron01.parallel import ReplicaGroup
from tests.unit.checkpoint.saved import one_replica


@pytest.fixture
def group() -> Iterator[ReplicaGroup]:
    """A replica group of one."""
    with one_replica() as group:
        yield group
