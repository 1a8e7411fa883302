"""Numbers of the network's measurement, from times that are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron01.config import DistributedConfig
from megatron01.doctor import network

SIZE = 1 << 16  # bytes of the first attempt


def group_of_four() -> Any:
    return SimpleNamespace(rank=0, world_size=4, device=torch.device("cpu"), maxima=list, control_group=None)


def test_a_rate_is_that_at_which_each_process_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_seconds", lambda group, collective: 0.25)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: None)
    work = SimpleNamespace(wait=lambda: None)
    transport = SimpleNamespace(all_to_all=lambda received, rows: work)
    monkeypatch.setattr(network, "build_topology", lambda group, settings: SimpleNamespace(world=transport))
    group, settings = group_of_four(), DistributedConfig()
    for prepare, sent in (
        (network._all_reduce(group, None), 1.5 * SIZE),  # 3/4 twice: to reduce, and to bring it to all
        (network._all_to_all(group, settings), 0.75 * SIZE),  # all but its own
    ):
        rate = network._measure(group, prepare, "name", "4 processes", 10**7)
        assert (rate.size, rate.seconds) == (SIZE, 0.25)
        assert rate.megabits == pytest.approx(8 * sent / 1e6 / 0.25)


def test_messages_grow_until_one_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_seconds", lambda group, collective: collective() / 1e7)
    group = group_of_four()

    def prepare(size: int) -> tuple[Any, float]:
        return lambda: size, float(size)

    assert network._measure(group, prepare, "name", "among", 10**9).size == 64 * SIZE  # 0.4 s
    assert network._measure(group, prepare, "name", "among", 10**6).size == 10**6


def test_the_quickest_answer_tells_the_offset_of_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers take all of a round trip, so each offset seems larger than 3 s by half of it."""
    now, round_trips = [100.0], iter([0.4, 0.3, 0.1, 0.5, 0.4, 0.2, 0.6, 0.7])

    def answer(stamp: torch.Tensor, peer: int, group: Any) -> None:
        now[0] += next(round_trips)
        stamp[0] = now[0] + 3.0

    monkeypatch.setattr(network, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(dist, "send", lambda stamp, peer, group: None)
    monkeypatch.setattr(dist, "recv", answer)
    group = group_of_four()
    group.gather = lambda offsets: [offsets]
    ((rank, offset, uncertainty),) = network._clocks(group, [0, 2])
    assert (rank, offset, uncertainty) == (2, pytest.approx(3.05), pytest.approx(0.05))
