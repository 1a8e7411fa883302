"""Collectives in pairwise rounds: same results over slow and fast links, and the same errors when a peer dies."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron01.comm import BlockLayout, DenseAllReduce, OneBitAllReduce, TorchTransport, slow_links
from megatron01.comm import transport as transport_module
from megatron01.comm.slow_links import PairwiseRounds, link_rate
from megatron01.parallel.process_groups import lost_replica
from tests.distributed.harness import run_ranks

BLOCK = 64
SLOW, QUICK = 1.0, 1e15  # bytes per second: every message takes long, or none does


def value_of(rank: int) -> torch.Tensor:
    return torch.randn(23 * BLOCK, generator=torch.Generator().manual_seed(rank))


def exchanges(transport: TorchTransport) -> list[torch.Tensor]:
    """A dense and a 1-bit exchange of several buckets, twice."""
    layout = BlockLayout(torch.full((23,), BLOCK, dtype=torch.int32), BLOCK)
    value = value_of(transport.rank)
    mean = torch.zeros_like(value)
    dense = DenseAllReduce(layout, transport, torch.bfloat16, bucket_elements=5 * BLOCK)
    bits = OneBitAllReduce(
        layout, transport, active=layout.real_elements(), bucket_elements=5 * BLOCK, backend="reference"
    )
    results = []
    for _ in range(2):
        dense.all_reduce(
            lambda first, last: [value[first * BLOCK : last * BLOCK]],
            lambda first, last: [mean[first * BLOCK : last * BLOCK]],
        )
        told = value.clone()
        bits.all_reduce(told)
        results += [mean.clone(), told]
    return results


def both_ways(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, rate in (("slow", SLOW), ("quick", QUICK), ("large", QUICK)):
        with pytest.MonkeyPatch.context() as patch:
            for function in {"slow": ("all_to_all_single",), "quick": ("isend", "irecv"), "large": ()}[name]:
                patch.delattr(dist, function)
            if name != "quick":
                patch.delattr(transport_module, "_all_gather")
            if name == "large":
                patch.setattr(transport_module, "LARGE_ROW", 1)
            transport = TorchTransport(checks=True, link_rate=rate)
            found[name] = exchanges(transport), transport.bytes_sent
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rounds_bring_the_same_bits_as_the_groups_own_collectives(size: int) -> None:
    outputs = run_ranks(both_ways, size)
    for output in outputs:
        (slow, sent), *others = (output[name] for name in ("slow", "quick", "large"))
        for quick, sent_quickly in others:
            assert sent == sent_quickly > 0
            for one, other, everywhere in zip(slow, quick, outputs[0]["slow"][0], strict=True):
                assert torch.equal(one, other) and torch.equal(one, everywhere)


def rows_under_way(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three collectives in flight, waited for in another order than they were started in."""
    rounds = PairwiseRounds(None)
    sent = [torch.full((size, 5), 10 * rank + call, dtype=torch.uint8) for call in range(2)]
    sent[0] += 100 * torch.arange(size, dtype=torch.uint8)[:, None] // 50  # a row for each
    received = [torch.empty_like(sent[0]) for _ in range(3)]
    works = [rounds.start(received[0], sent[0]), rounds.start(received[1], sent[1])]
    works.append(rounds.start(received[2], sent[1][0]))
    time.sleep(0.05 * rank)
    for work in reversed(works):
        work.wait()
    return torch.stack(received), torch.stack([sent[0], sent[1]])


def test_every_row_arrives_at_its_place_whatever_the_order_of_waiting() -> None:
    outputs = run_ranks(rows_under_way, 4)
    for rank, (received, _) in enumerate(outputs):
        for peer, (_, sent) in enumerate(outputs):
            assert torch.equal(received[0][peer], sent[0][rank])
            assert torch.equal(received[1][peer], sent[1][rank])
            assert torch.equal(received[2][peer], sent[1][0])


def two_at_once(rank: int, size: int) -> list[list[list[int]]]:
    """Three collectives of one transport, then three of another over the same group, all in flight at once."""
    send_all = slow_links._Batch.send_all

    def late(batch: slow_links._Batch) -> None:
        if batch.rows[0][0] < 100:  # rows of the first transport: the second one's could overtake them
            time.sleep(0.1)
        send_all(batch)

    works, received = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow_links._Batch, "send_all", late)
        for number, group in enumerate((None, dist.group.WORLD)):
            transport = TorchTransport(group, link_rate=SLOW)
            for call in range(3):
                sent = torch.full((size, 64), 100 * number + 10 * call + rank, dtype=torch.uint8)
                received.append(torch.empty_like(sent))
                works.append(transport.all_to_all(received[-1], sent))
        for work in works:
            work.wait()
    return [place.unique(dim=1).tolist() for place in received]


def test_two_transports_over_one_group_do_not_mix_their_rows() -> None:
    right = [[[call], [call + 1], [call + 2]] for call in (0, 10, 20, 100, 110, 120)]
    assert run_ranks(two_at_once, 3) == [right] * 3


def measured_meanwhile(rank: int, size: int) -> list[list[int]]:
    """The link rate is measured after a collective has started, but before any of it has been sent."""
    measured, send_all = threading.Event(), slow_links._Batch.send_all

    def late(batch: slow_links._Batch) -> None:
        assert measured.wait(30.0)
        send_all(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow_links._Batch, "send_all", late)
        received = torch.empty(size, 1 << 15, dtype=torch.uint8)
        work = PairwiseRounds(None).start(received, torch.full((1 << 15,), rank + 1, dtype=torch.uint8))
        threading.Timer(0.3, measured.set).start()  # also if the measurement waits for rows that are not sent yet
        link_rate(None)
        measured.set()
        work.wait()
    return received.unique(dim=1).tolist()


def test_the_rate_is_measured_beside_what_is_under_way() -> None:
    assert run_ranks(measured_meanwhile, 3) == [[[1], [2], [3]]] * 3


def threads_of_rounds() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "megatron01-rounds"]


def built_and_dropped(rank: int, size: int) -> tuple[list[int], list[int]]:
    """The number of sending threads while rounds are created and dropped over one group, and what the last receive."""
    group, numbers = dist.new_group(), []
    kept: list[PairwiseRounds] = []
    sent = torch.full((64,), rank, dtype=torch.uint8)
    for round_number in range(3):
        received = torch.empty(size, 64, dtype=torch.uint8)
        rounds = PairwiseRounds(group)
        # dropped at different times on each process, as by its garbage collector
        kept += [rounds] * (rank <= round_number)
        rounds.start(received, sent).wait()
        numbers.append(len(threads_of_rounds()))
    dist.barrier()
    dist.destroy_process_group(group)
    del group, rounds, kept
    gc.collect()
    for thread in threads_of_rounds():
        thread.join(30.0)
    return [*numbers, len(threads_of_rounds())], received[:, 0].tolist()


def test_one_thread_sends_for_a_group_and_ends_with_it() -> None:
    assert run_ranks(built_and_dropped, 3) == [([1, 1, 1, 0], [0, 1, 2])] * 3


def measured(rank: int, size: int) -> float:
    time.sleep(0.02 * rank)
    return link_rate(None)


def test_all_processes_measure_the_same_rate() -> None:
    rates = run_ranks(measured, 3)
    assert len(set(rates)) == 1 and rates[0] > 0


def test_the_rate_is_that_of_a_quick_message_over_the_slowest_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first message that takes long enough; another rank takes twice as long as this one."""
    now, seconds, sizes = [0.0], iter([9.0, 1e-3, 9.0, 9.0, 9.0, 0.03, 0.02, 0.05, 0.04, 0.06]), []

    def send(row: torch.Tensor, **_: Any) -> None:
        sizes.append(row.nbytes)
        now[0] += next(seconds)

    def slowest(own: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MAX
        own.mul_(2.0)

    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(slow_links, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for name, function in {"send": send, "irecv": lambda *_, **__: work, "all_reduce": slowest}.items():
        monkeypatch.setattr(dist, name, function)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    assert slow_links._measured_rate(None) == pytest.approx((1 << 17) / 0.04)
    assert sizes == [1 << 15] * 5 + [1 << 17] * 5


def test_a_row_that_cannot_be_sent_is_an_error_of_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "isend", refuse)
    batch = slow_links._Batch(None, [], [torch.zeros(1)], [1], 0)
    batch.send_all()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        batch.wait()


def lost_peer(rank: int, size: int) -> tuple[list[str | None], float]:
    """Rank 2 dies after the first collective, while the others are in the next ones."""
    transport = TorchTransport(checks=True, link_rate=SLOW)
    sent = torch.zeros(size, 1 << 20, dtype=torch.uint8)
    received = torch.empty_like(sent)
    transport.all_to_all(received, sent).wait()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start, reasons = time.monotonic(), []
    for _ in range(2):  # rows still to be sent to the lost rank must not block the others
        try:
            transport.all_to_all(torch.empty_like(sent), sent.clone()).wait()
        except RuntimeError as error:
            reasons.append(lost_replica(error))
    dist.destroy_process_group()
    return reasons, time.monotonic() - start


def test_a_peer_lost_in_the_middle_of_a_round_is_an_error_on_every_living_rank() -> None:
    outputs = run_ranks(lost_peer, 4, may_die=[2], timeout=60.0)
    assert outputs[2] is None
    for rank in (0, 1, 3):
        reasons, seconds = outputs[rank]
        assert len(reasons) == 2 and all(reasons) and seconds < 30.0
