"""Cost of an interruption: lost steps and lost time."""

from __future__ import annotations

import pytest

from megatron01.monitor import run_directory
from megatron01.monitor.run_directory import Heartbeat, Restart


class Clock:
    now = 5000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(run_directory, "time", made)
    return made


def live(path, resumed, *steps):
    """The restart that each step of an attempt reports."""
    heartbeat = Heartbeat(path, resumed_iteration=resumed)
    reports = [heartbeat.step_done(step) for step in steps]
    heartbeat.close()
    return reports


def test_the_first_step_after_a_resume_says_what_was_lost(tmp_path, clock):
    assert live(tmp_path / "heartbeat", 0, *range(1, 21)) == [None] * 20
    clock.now += 9.25
    assert live(tmp_path / "heartbeat", 8) == []  # one that ended before its first step leaves it as it is
    assert live(tmp_path / "heartbeat", 8, 9, 10) == [Restart(8, 12, 9.25), None]
    assert live(tmp_path / "heartbeat", 10, 11) == [Restart(10, 0, 0.0)]


def test_a_clock_that_was_set_back_does_not_tell(tmp_path, clock):
    live(tmp_path / "heartbeat", 0, 1, 2, 3)
    clock.now -= 1
    assert live(tmp_path / "heartbeat", 2, 3) == [Restart(2, 1, None)]


DAMAGED = '{"iteration": 1e400, "time": 1}'


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"iteration": 5}', '{"iteration": null}', "\x00" * 256, DAMAGED, "[" * 100_000]
)
def test_what_cannot_be_understood_is_no_sign(tmp_path, clock, content):
    (tmp_path / "heartbeat").write_text(content)
    assert live(tmp_path / "heartbeat", 2, 3) == [None]


def test_another_runs_signs_do_not_count(tmp_path, clock):
    live(tmp_path / "heartbeat", 0, 5)
    assert live(tmp_path / "heartbeat", 0, 1) == [None]  # a new run
    assert live(tmp_path / "heartbeat", 40, 41) == [None]  # one whose last attempt wrote to another folder


def test_the_sentence():
    assert str(Restart(8, 12, 9.34)) == (
        "resumed at iteration 8; 12 steps were lost; 9.3 s from the last heartbeat to the next step"
    )
    assert "; 1 step was lost; the clocks do not tell how long" in str(Restart(8, 1, None))
    assert "; no step was lost; " in str(Restart(8, 0, 1.0))
