from __future__ import annotations

from types import SimpleNamespace

from megatron01.training import Trainer, consistency
from megatron01.training.consistency import MOST_STEPS_BETWEEN_CHECKS, PreemptionConsensus


class Group:
    """Two replicas, of which the other takes ``slowest`` seconds a step."""

    world_size = 2

    def __init__(self, slowest):
        self.slowest = slowest
        self.votes = 0

    def maxima(self, values):
        self.votes += 1
        return [max(values[0], self.slowest), values[1]]

    def gather(self, message):
        return [None, message]


def steps_until_stopped(seconds_per_step, slowest, asked_at):
    now, stop, group = [0.0], SimpleNamespace(reason=None), Group(slowest)
    vote = PreemptionConsensus(stop, group, clock=lambda: now[0])
    for step in range(1, 10_000):
        now[0] += seconds_per_step
        if step == asked_at:
            stop.reason = "signal SIGTERM"
        if reason := vote.after_step():
            assert reason == "signal SIGTERM (rank 1)"
            return step - asked_at, group.votes
    raise AssertionError("never stopped")


def test_a_slow_run_stops_after_the_step_at_hand():
    assert steps_until_stopped(30.0, 30.0, asked_at=7) == (0, 7)


def test_the_slowest_replica_sets_the_pace():
    delay, votes = steps_until_stopped(0.1, 1.0, asked_at=100)
    assert delay <= consistency.SECONDS_BETWEEN_CHECKS / 1.0
    assert votes > 40


def test_a_fast_run_is_seldom_asked():
    delay, votes = steps_until_stopped(1e-4, 0.0, asked_at=6400)
    assert delay <= MOST_STEPS_BETWEEN_CHECKS
    assert votes <= 102


def test_it_stops_at_once_when_asked_for():
    vote = PreemptionConsensus(SimpleNamespace(reason="the clock"), Group(1.0))
    assert vote.now() == "the clock (rank 1)"
    alone = SimpleNamespace(world_size=1, gather=lambda reason: [reason])
    assert PreemptionConsensus(SimpleNamespace(reason="the clock"), alone).now() == "the clock"


def test_a_lost_folder_ends_a_run_that_saves_and_is_told_once_by_another():
    printed, asked = [], []
    for save in ("saved", None):
        trainer = SimpleNamespace(
            folders=SimpleNamespace(lost="the folder is another job's"),
            config=SimpleNamespace(checkpoint=SimpleNamespace(save=save)),
            recorder=SimpleNamespace(print=printed.append),
            _has_lost_folder=False,
        )
        for _ in range(3):
            Trainer._check_ownership(trainer, SimpleNamespace(ask=asked.append))
    assert asked == ["the folder is another job's"] * 3
    assert printed == [
        "WARNING: the folder is another job's; lines since are lost, and training goes on, as it saves nothing"
    ]
