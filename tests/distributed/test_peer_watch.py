"""The watch for lost ranks when none is lost; for lost ones see tests/faults/test_faults.py."""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron01.config import DistributedConfig
from megatron01.parallel import LaunchEnvironment, ReplicaGroup, initialize, peer_watch
from megatron01.parallel.process_groups import LostReplica, Progress
from megatron01.parallel.rendezvous import open_store
from tests.distributed.harness import run_ranks


def leaving_after(rank: int, world_size: int) -> list[Any]:
    peer_watch.SECONDS_BETWEEN_ROUNDS = 0.05
    config = DistributedConfig(distributed_timeout_minutes=1, threads_per_replica=1)
    with initialize(LaunchEnvironment.read(os.environ), config) as group:
        watches = [thread for thread in threading.enumerate() if thread.name == "peer watch"]
        counts = group.progress.count
        group.any(False)
        time.sleep(0.5 * rank)
    return [len(watches), group.progress.count - counts, watches[0].is_alive()]


def test_ranks_leave_one_after_the_other_and_the_watch_ends() -> None:
    assert run_ranks(leaving_after, 3, default_group=False) == [[1, 1, False]] * 3


def failing_slowly(rank: int, world_size: int, folder: Path, *, of_agent: bool) -> None:
    peer_watch.SECONDS_BETWEEN_ROUNDS = 0.05
    peer_watch.LOST_RANK_SECONDS = 1.0
    peer_watch.report = lambda error: (folder / str(rank)).write_text(f"{error.scope}: {error}")
    config = DistributedConfig(distributed_timeout_minutes=1, threads_per_replica=1)
    environment = LaunchEnvironment.read(os.environ)
    store = open_store(environment, None, datetime.timedelta(minutes=1))
    try:
        with initialize(
            environment, config, store=dist.PrefixStore("restart_0", store) if of_agent else store
        ) as group:
            if rank != 2:  # which is a step behind, for less than the time-out
                group.progress.note(in_step=True)
            if rank == 1:
                time.sleep(0.5)  # for some rounds of the watch
                raise ValueError("of this rank alone")
            time.sleep(60)  # as in a collective of NCCL
    except ValueError:
        time.sleep(7)  # finishes logs, for instance


@pytest.mark.parametrize("of_agent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_end_when_another_fails_although_its_process_goes_on(tmp_path: Path, of_agent: bool) -> None:
    run_ranks(partial(failing_slowly, of_agent=of_agent), 3, tmp_path, default_group=False, may_die={0, 2})
    host = socket.gethostname()
    lost = f"(rank 1 on {host} failed) (no answer from rank 1 on {host})"
    for rank, scope in ((0, "rank"), (2, "elsewhere")):
        said = (tmp_path / str(rank)).read_text()
        assert said.startswith(f"{scope}: lost another replica") and said.endswith(lost)


def hang_here() -> None:
    time.sleep(60)


def hanging(rank: int, world_size: int, folder: Path) -> None:
    def report(error: LostReplica) -> None:
        with (folder / str(rank)).open("a") as said:
            said.write(f"{error.scope}: {error}\n")

    peer_watch.SECONDS_BETWEEN_ROUNDS = 0.05
    peer_watch.report = report
    peer_watch.waits_without_end = lambda backend: True
    config = DistributedConfig(distributed_timeout_minutes=0.05, threads_per_replica=1)
    with initialize(LaunchEnvironment.read(os.environ), config) as group:
        group.progress.note(in_step=True)
        if rank == 1:
            hang_here()
        group.progress.note(in_step=True)
        time.sleep(60)  # as in a collective of NCCL


def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    run_ranks(hanging, 3, tmp_path, default_group=False, may_die={0, 1, 2})
    said = [(tmp_path / str(rank)).read_text().splitlines() for rank in range(3)]
    named = f"lost another replica: others have waited 0.05 minutes for rank 1 on {socket.gethostname()}"
    assert [len(lines) for lines in said] == [1, 2, 1]
    assert said[0][0].startswith(f"rank: {named}") and said[2][0].startswith(f"elsewhere: {named}")
    where, ended = said[1]
    line = hang_here.__code__.co_firstlineno + 1
    assert where.startswith("rank: this rank does not go on, and others wait for it: it is in ")
    assert where.split("it is in ")[1].startswith(f"hang_here (distributed/test_peer_watch.py:{line})")
    assert ended.startswith(f"elsewhere: {named}")


def seen_by(rank: int, counts: list[float], seconds: float) -> Any:
    group = ReplicaGroup(
        rank=rank,
        world_size=len(counts),
        device=torch.device("cpu"),
        timeout=datetime.timedelta(minutes=10),
        hosts=[f"node{number}" for number in range(len(counts))],
        nodes=[list(range(len(counts)))],
    )
    return peer_watch.hung(group, counts, seconds)


def test_who_lives_and_does_not_go_on_is_named_by_one_rank() -> None:
    assert seen_by(0, [7, 6, 7, 6], 600.0) is None
    errors = [seen_by(rank, [6, 7, 7, 5], 600.1) for rank in range(4)]
    for error in errors:
        assert "have waited 10 minutes for rank 3 on node3, which answers but" in str(error)
    assert [error.scope for error in errors] == ["elsewhere", "rank", "elsewhere", "elsewhere"]


def test_ranks_that_others_have_waited_for_are_lost_even_if_they_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_watch._RollCall, "_ask_in_time", lambda self: {0, 1, 2})
    group: Any = SimpleNamespace(rank=1, world_size=3, hosts=["a", "b", "c"])
    store: Any = None
    roll_call, error = peer_watch._RollCall(group, store), LostReplica("lost another replica")
    roll_call.hung = [0]
    named = roll_call.name_lost_ranks(error)
    assert str(named) == "lost another replica (no answer from rank 0 on a)" and named.scope == "rank"


def test_where_all_are_as_far_the_run_ends_and_nobody_is_named() -> None:
    error = seen_by(1, [7, 7], 601.0)
    assert "although all answer" in str(error) and error.scope == "job" and error.exit_status == 74


def test_time_counts_from_the_first_step_on_and_not_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("megatron01.parallel.process_groups.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress()
    progress.note()
    assert (progress.count, progress.seconds) == (1, -1)
    progress.note(in_step=True)
    now[0] = 5.0
    assert progress.seconds == 5.0
    progress.note()
    now[0] = 7.0
    assert (progress.count, progress.seconds) == (3, 2.0)
    progress.pause()
    assert progress.seconds == -1
