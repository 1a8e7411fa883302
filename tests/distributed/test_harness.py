from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import RankFailed, run_ranks


def _sum_of_ranks(rank: int, world_size: int, factor: int) -> tuple[float, int]:
    value = torch.tensor([float(factor * rank)])
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads()


def _rank_one_fails(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one's own mistake")
    dist.barrier()


def _rank_one_dies(rank: int, world_size: int) -> str:
    dist.barrier()  # by then rank 0 is connected: a peer that dies earlier causes another error
    if rank == 1:
        os._exit(9)
    try:
        dist.barrier()
    except RuntimeError:
        dist.destroy_process_group()
        return "noticed"
    return "missed"


def _sleep(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        time.sleep(60)


def test_returns_each_ranks_value_in_order() -> None:
    assert run_ranks(_sum_of_ranks, 3, 10) == [(30.0, 1)] * 3


def test_a_failing_rank_shows_its_own_traceback() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 ended(.|\n)*rank one's own mistake"):
        run_ranks(_rank_one_fails, 2)


def test_a_death_that_the_test_wants_is_no_failure() -> None:
    assert run_ranks(_rank_one_dies, 2, may_die={1}) == ["noticed", None]


def test_the_time_out_ends_ranks_that_wait_for_each_other() -> None:
    with pytest.raises(RankFailed, match="still running after 2 s"):
        run_ranks(_sleep, 2, timeout=2)
