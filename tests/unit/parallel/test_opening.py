"""Process groups whose initialization never completes."""

from __future__ import annotations

import datetime
import threading

import pytest

from megatron01.parallel import process_groups
from megatron01.parallel.process_groups import LostReplica, open_in_time, timeout_for

SOON = datetime.timedelta(seconds=0.1)


def test_what_never_opens_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "_GRACE", 0.1)
    forever = threading.Event()
    with pytest.raises(LostReplica, match="lost another replica while it joined the job"):
        open_in_time(forever.wait, SOON)
    forever.set()


def test_what_opens_or_fails_in_time_does_so_as_without_a_thread() -> None:
    def fail() -> None:
        raise RuntimeError("Connection refused")

    assert open_in_time(lambda: 3, SOON) == 3
    assert open_in_time(lambda: None, SOON) is None
    with pytest.raises(RuntimeError, match="Connection refused"):
        open_in_time(fail, SOON)


def test_groups_of_gpus_are_opened_by_the_thread_that_uses_them() -> None:
    assert open_in_time(threading.get_ident, SOON, backend="nccl") == threading.get_ident()
    assert open_in_time(threading.get_ident, SOON) != threading.get_ident()


def test_nccl_gives_up_after_the_watch_that_says_which_rank_is_lost() -> None:
    ten = datetime.timedelta(minutes=10)
    assert timeout_for("gloo", ten) == ten < timeout_for("nccl", ten) <= 1.2 * ten
