"""What is left out of ``make test``: see docs/testing.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(quick: int, values: Iterable[Any]) -> list[Any]:
    """Values for ``parametrize`` or a fixture, of which those after the first ``quick`` are marked slow."""
    return [
        value
        if index < quick
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for index, value in enumerate(values)
    ]
