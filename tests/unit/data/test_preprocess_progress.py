"""Progress lines of preprocessing, and its summary."""

from __future__ import annotations

import io

import pytest

from megatron01.data.indexed import BuilderState
from megatron01.data.preprocessing import preprocess as progress_module
from megatron01.data.preprocessing.preprocess import PreprocessSummary, ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A mocked clock that reads the value in the list."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def summary(documents: int, megabytes: float) -> PreprocessSummary:
    written = {"a": BuilderState(num_tokens=documents * 10), "b": BuilderState(num_tokens=documents)}
    return PreprocessSummary(["a", "b"], documents=documents, written=written, num_bytes=int(megabytes * 1e6))


def test_lines(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressBar(1000, 100, summary(10, 1), 20)  # resumed after 10 documents
    for seconds, documents, done in [(2, 29, 200), (4, 30, 300), (6, 49, 400), (10, 95, 550), (11, 99, 600)]:
        clock[0] = 100.0 + seconds
        progress.update(summary(documents, 1 + seconds), done)
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "30 documents, 330 tokens, 1.0 MB/s, 30% done, 14.0 s left",
        "49 documents, 539 tokens, 1.0 MB/s, 40% done, 12.0 s left",
        "95 documents, 1045 tokens, 1.0 MB/s, 55% done, 10.0 s left",
    ]


def test_lines_without_a_known_size(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressBar(None, 0, summary(0, 0), 1)
    clock[0] = 102.0
    progress.update(summary(5, 1), 0)
    assert capsys.readouterr().err == "5 documents, 55 tokens, 0.5 MB/s\n"


@pytest.mark.parametrize("total", [1000, None])
def test_a_bar_on_a_terminal(clock: list[float], total: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    progress = ProgressBar(total, 0, summary(0, 0), 1)
    clock[0] = 102.0
    progress.update(summary(200_000, 4), 500)
    progress.close()
    shown = stream.getvalue().split("\r")[-1]
    assert ", 200000 documents, 2200000 tokens, 2.0 MB/s" in shown
    assert ("50%" in shown and "left, 200000" in shown) == (total is not None)
