"""Worker processes: results, reports, and every way in which they or their parent may exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from megatron01.errors import UserError
from megatron01.utils.process_pool import ProcessPool, WorkerDied


def open_worker(offset: int):
    def work(task, report):
        report(("began", task))
        if task == "user error":
            raise UserError("no such thing")
        if task == "bug":
            raise KeyError("lost")
        if task == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "pid":
            return os.getpid()
        if task == "signals":
            return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return task + offset

    return work


def open_broken_worker():
    raise UserError("no model")


@pytest.mark.parametrize(("workers", "tasks_ahead"), [(1, 1), (2, 1), (2, 3)])
def test_all_tasks_are_done(workers, tasks_ahead):
    reports = []
    with ProcessPool(open_worker, [(100,)] * workers, tasks_ahead=tasks_ahead) as pool:
        assert [pool.submit(task) for task in range(10)] == list(range(10))
        results = dict(pool.receive(reports.append) for _ in range(10))
    assert results == {task: task + 100 for task in range(10)}
    assert sorted(reports) == [("began", task) for task in range(10)]


def test_large_messages_in_both_directions_do_not_block():
    with ProcessPool(open_worker, [(b"x" * 2_000_000,)], tasks_ahead=4) as pool:
        for _ in range(8):
            pool.submit(b"y" * 2_000_000)
        assert all(len(pool.receive()[1]) == 4_000_000 for _ in range(8))


def test_workers_have_signals_blocked():
    resource_tracker._resource_tracker._stop()  # as in a new process: starting it would unblock signals again
    with ProcessPool(open_worker, [(0,)]) as pool:
        pool.submit("signals")
        assert {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1} <= pool.receive()[1]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ("user error", UserError, "^no such thing$"),
        ("bug", RuntimeError, "KeyError: 'lost'"),
        ("death", WorkerDied, "ended with status -9"),
    ],
)
def test_what_fails_in_a_worker_is_raised(task, error, message):
    with pytest.raises(error, match=message), ProcessPool(open_worker, [(0,), (0,)]) as pool:
        pool.submit(task)
        pool.receive()


def test_a_worker_that_cannot_be_opened():
    with pytest.raises(UserError, match="no model"), ProcessPool(open_broken_worker, [()]) as pool:
        pool.submit(0)
        pool.receive()


def ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_workers_are_killed_at_the_end():
    with ProcessPool(open_worker, [(0,)]) as pool:
        pool.submit("pid")
        pid = pool.receive()[1]
        assert not ended(pid)
    assert ended(pid)


def test_workers_end_with_a_parent_that_is_killed():
    program = """
import sys, time
from megatron01.utils.process_pool import ProcessPool
from tests.unit.utils.test_process_pool import open_worker
if __name__ == "__main__":
    with ProcessPool(open_worker, [(0,)]) as pool:
        pool.submit("pid")
        print(pool.receive()[1], flush=True)
        time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not ended(pid)
        parent.kill()
    for _ in range(1000):
        if ended(pid):
            return
        time.sleep(0.01)
    pytest.fail("the worker goes on")
