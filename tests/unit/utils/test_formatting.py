"""Human-readable numbers."""

from __future__ import annotations

import pytest

from megatron01.utils.formatting import (
    ASCII,
    BLOCKS,
    format_bytes,
    format_count,
    format_duration,
    one_line,
    ramp,
    sparkline,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12_345, "12.3 kB"), (999_700, "1.00 MB"), (2.5e9, "2.50 GB")],
)
def test_bytes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_counts_for_people() -> None:
    assert [format_count(count) for count in (12, 1234, 345_678)] == ["12", "1.23k", "346k"]


def test_time_for_people() -> None:
    assert [format_duration(seconds) for seconds in (0.25, 12.34, 119, 150, 7000, 9000)] == [
        *("0.25 s", "12.3 s", "119.0 s", "2.5 min", "116.7 min", "2.5 h"),
    ]


def test_sparkline() -> None:
    assert sparkline(range(8), 8) == BLOCKS
    assert sparkline(range(16), 8, ASCII) == ASCII
    assert sparkline([5.0] * 10, 4) == "▁▁▁▁"
    assert sparkline([1, 2], 40) == "▁█"
    assert sparkline([0.1, 0.1 + 2e-17, 0.1], 3) == "▁▁▁"


def test_characters_suit_the_terminal() -> None:
    assert ramp("utf-8") == BLOCKS
    assert ramp("ascii") == ramp("latin-1") == ramp(None) == ramp("unheard-of") == ASCII


def test_messages_of_errors_on_one_line() -> None:
    assert one_line(OSError("no\n  \x1b[2Jroom"), 9) == "no [2Jroo"
    assert one_line(TimeoutError()) == "TimeoutError" and one_line("\n") == ""
