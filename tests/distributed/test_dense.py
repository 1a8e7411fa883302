"""The full-precision all-reduce: flat and over simulated nodes, as a whole and bucket by bucket."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron01.comm import DenseAllReduce, DenseExchange, Status, Topology, Transport
from megatron01.comm.kernels import specification
from tests.distributed.topologies import Case, over_gloo
from tests.unit.comm.buffers import short_last_block

BLOCK = 64
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def own_value(rank: int, num_blocks: int) -> torch.Tensor:
    value = torch.randn(num_blocks * BLOCK, generator=torch.Generator().manual_seed(rank))
    value[-(BLOCK - 17) :] = 0.0
    return value


def mean_value(replicas: int, num_blocks: int) -> torch.Tensor:
    return sum(own_value(rank, num_blocks).double() for rank in range(replicas)).float() / replicas


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_are_averaged_alike_at_once_and_in_turn(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    rows = torch.stack([own_value(rank, 5).to(dtype) for rank in range(7)])
    factors = torch.tensor([1.0, 0.5, 0.25, 1.0, 0.5, 0.25, 1.0])
    means = []
    for at_once in (True, False):
        monkeypatch.setattr(specification, "sums_at_once", lambda device, chosen=at_once: chosen)
        means.append(torch.full((5 * BLOCK,), math.nan, dtype=dtype))
        specification.mean_of(rows, means[-1], factors)
    wanted = sum(factor * row.double() for factor, row in zip(factors, rows, strict=True)) / 7
    for mean in means:
        torch.testing.assert_close(mean.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class Buffer:
    """Source and target of an all-reduce, in two pieces, of which the second starts at the block ``cut``."""

    def __init__(self, value: torch.Tensor, cut: int | None = None) -> None:
        self.value = value.view(-1, BLOCK)
        self.mean = torch.full_like(self.value, math.nan)
        self._cut = cut

    def source(self, first: int, last: int) -> list[torch.Tensor]:
        return self._pieces(self.value, first, last)

    def target(self, first: int, last: int) -> list[torch.Tensor]:
        assert self.mean[first:last].isnan().all(), "written twice"
        return self._pieces(self.mean, first, last)

    def _pieces(self, blocks: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
        cut = last if self._cut is None else min(max(self._cut, first), last)
        return [blocks[a:b].view(-1) for a, b in ((first, cut), (cut, last)) if a < b]


def wire_types(topology: Topology, num_blocks: int, bucket: int) -> dict[str, Any]:
    means: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in TOLERANCE:
        reduce = DenseAllReduce(short_last_block(num_blocks), topology, dtype, bucket_elements=bucket)
        means[dtype] = []
        for factor in (1, 2):  # the second time, buffers hold the rows of the first
            buffer = Buffer(own_value(topology.world.rank, num_blocks) * factor, cut=num_blocks // 2)
            assert reduce.all_reduce(buffer.source, buffer.target) == (Status.OK, 1.0)
            means[dtype].append(buffer.mean.view(-1) / factor)
    return {"means": means, "hierarchical": topology.local is not None, "rounds": topology.sent().rounds}


# ranks, ranks per node; sizes that the ranks do not divide
@pytest.mark.parametrize(
    ("ranks", "local_size", "bucket"),
    [(2, None, 3), (3, None, 5), (4, None, 100), (4, 1, 1), (4, 2, 5), (4, 2, 100), (6, 3, 7)],
)
def test_the_mean_has_the_same_bits_everywhere(ranks: int, local_size: int | None, bucket: int) -> None:
    num_blocks = 23
    outputs = over_gloo(Case(wire_types, ranks, (num_blocks, bucket * BLOCK), local_size))
    expected = mean_value(ranks, num_blocks)
    for output in outputs:
        assert output["hierarchical"] is (local_size in (2, 3)) and output["rounds"] == 6
        for dtype, tolerance in TOLERANCE.items():
            for mean in output["means"][dtype]:
                assert torch.equal(mean, outputs[0]["means"][dtype][0])
            torch.testing.assert_close(mean, expected, rtol=tolerance, atol=tolerance)


def loss_scales(topology: Topology, scales: list[float]) -> dict[str, Any]:
    scale = scales[topology.world.rank]
    buffer = Buffer(own_value(topology.world.rank, 5) * scale)
    reduce = DenseAllReduce(short_last_block(5), topology, torch.float16)
    _, common = reduce.all_reduce(buffer.source, buffer.target, inverse_scale=1.0 / scale)
    return {"mean": buffer.mean.view(-1) * common, "common": common}


@pytest.mark.parametrize("local_size", [None, 2])
def test_each_replica_may_bring_its_own_loss_scale(local_size: int | None) -> None:
    outputs = over_gloo(Case(loss_scales, 4, ([1024.0, 256.0, 4096.0, 1024.0],), local_size))
    for output in outputs:
        assert output["common"] == 1 / 256.0
        assert torch.equal(output["mean"], outputs[0]["mean"])
        torch.testing.assert_close(output["mean"], mean_value(4, 5), rtol=3e-3, atol=3e-3)


def squares(topology: Topology) -> list[float]:
    """Sums of squares over all replicas; each sends its own bucket by bucket, and one block is not counted."""
    counted = torch.arange(23) != 4
    reduce = DenseAllReduce(short_last_block(23), topology, torch.float32, bucket_elements=5 * BLOCK, counted=counted)
    found = []
    for factor in (1.0, 3.0):
        buffer = Buffer(own_value(topology.world.rank, 23) * factor)
        reduce.begin(buffer.source, buffer.target, inverse_scale=1.0 / factor)
        for bucket, (first, last) in enumerate(reduce.buckets):
            of_blocks = buffer.value[first:last].square().sum(1) / factor**2
            reduce.send(bucket, square_sum=of_blocks[counted[first:last]].sum())
        reduce.finish()
        found.append(reduce.square_sum)
    return found


@pytest.mark.parametrize("settings", [{}, {"hierarchical": "on"}, {"replica": "node"}])
def test_squares_of_all_replicas_travel_in_the_headers(settings: dict[str, Any]) -> None:
    local_size = 2 if settings else None
    outputs = over_gloo(Case(squares, 4, (), local_size, settings))
    replicas = [own_value(rank, 23).view(23, BLOCK)[torch.arange(23) != 4].double() for rank in range(4)]
    if "replica" in settings:
        replicas = [(replicas[0] + replicas[1]) / 2, (replicas[2] + replicas[3]) / 2]
    expected = sum(float(value.square().sum()) for value in replicas)
    for output in outputs:
        assert output == outputs[0] and output == pytest.approx([expected, expected], rel=1e-5)


def bucket_by_bucket(topology: Topology) -> dict[str, Any]:
    reduce = DenseAllReduce(short_last_block(23), topology, torch.bfloat16, bucket_elements=5 * BLOCK)
    value = own_value(topology.world.rank, 23)
    at_once, piecewise = Buffer(value), Buffer(value)
    reduce.all_reduce(at_once.source, at_once.target)
    piecewise.value = torch.full_like(at_once.value, math.nan)
    reduce.begin(piecewise.source, piecewise.target, inverse_scale=0.5)
    for bucket in reversed(range(len(reduce.buckets))):  # the order of a backward pass
        first, last = reduce.buckets[bucket]
        piecewise.value[first:last] = at_once.value[first:last]
        late = Status.OVERFLOW if bucket == 0 and topology.world.rank == 1 else Status.OK
        reduce.send(bucket, late)
    result = reduce.finish()
    return {"result": result, "same": torch.equal(at_once.mean, piecewise.mean)}


@pytest.mark.parametrize("local_size", [None, 2])
def test_buckets_may_be_sent_as_they_become_ready(local_size: int | None) -> None:
    outputs = over_gloo(Case(bucket_by_bucket, 4, (), local_size))
    assert outputs == [{"result": (Status.OVERFLOW, 0.5), "same": True}] * 4


def overflows(topology: Topology) -> dict[str, Any]:
    reduce = DenseAllReduce(short_last_block(23), topology, torch.float32, bucket_elements=5 * BLOCK)
    rank = topology.world.rank
    statuses = [Status.GIVING_UP if rank == 2 else Status.OVERFLOW if rank == 1 else Status.OK, Status.OK]
    seen = []
    for status in statuses:
        buffer = Buffer(own_value(rank, 23))
        worst, _ = reduce.all_reduce(buffer.source, buffer.target, status=status)
        seen.append((worst, bool(buffer.mean.isfinite().all())))
    return {"seen": seen}


@pytest.mark.parametrize("local_size", [None, 2])
def test_the_gravest_status_is_told_to_all_once(local_size: int | None) -> None:
    seen = [(Status.GIVING_UP, True), (Status.OK, True)]
    assert over_gloo(Case(overflows, 4, (), local_size)) == [{"seen": seen}] * 4


def large_and_small(topology: Topology) -> float:
    reduce = DenseAllReduce(short_last_block(1), topology, torch.float16)
    buffer = Buffer(torch.full((BLOCK,), 2048.0 if topology.world.rank == 0 else 1.0))
    reduce.all_reduce(buffer.source, buffer.target)
    return float(buffer.mean[0, 0])


def test_sixteen_bit_gradients_are_summed_in_fp32() -> None:
    """2048 + 1 + 1 + 1 is 2048 in fp16."""
    assert over_gloo(Case(large_and_small, 4)) == [torch.tensor(2051 / 4).half().item()] * 4


def traffic(topology: Topology) -> tuple[int, int]:
    buffer = Buffer(own_value(topology.world.rank, 400))
    DenseAllReduce(short_last_block(400), topology, torch.bfloat16).all_reduce(buffer.source, buffer.target)
    return topology.sent()[:2]


@pytest.mark.parametrize(
    ("ranks", "local_size", "sent", "between"),
    [
        (2, None, 1.0, 0.0),  # as shares of the buffer's bytes; all ranks on one node
        (4, 1, 1.5, 1.5),
        (4, 2, 1.5, 0.5),  # 1/2 + 1/2 inside the node, 1/2 between nodes
    ],
)
def test_the_bytes_are_those_of_a_ring(ranks: int, local_size: int | None, sent: float, between: float) -> None:
    buffer_bytes = 400 * BLOCK * 2
    for own_sent, own_between in over_gloo(Case(traffic, ranks, (), local_size)):
        assert own_sent == pytest.approx(sent * buffer_bytes, rel=0.02)
        assert own_between == pytest.approx(between * buffer_bytes, rel=0.02)


def test_the_next_bucket_is_read_while_one_is_on_the_wire() -> None:
    events: list[str] = []

    class Recorded(Transport):
        def _start(self, received: torch.Tensor, sent: torch.Tensor) -> Any:
            received.view(2, -1).copy_(sent.view(-1, received.numel() // 2))
            name = "gather" if sent.numel() < received.numel() else "scatter"
            events.append(f"start {name}")
            return SimpleNamespace(wait=lambda: events.append(f"wait {name}"))

        def broadcast(self, tensor: torch.Tensor) -> None: ...

    reduce = DenseAllReduce(short_last_block(6), Recorded(0, 2), torch.float32, bucket_elements=2 * BLOCK)
    value, mean = Buffer(own_value(0, 6)), Buffer(own_value(0, 6))
    reduce.all_reduce(
        lambda first, last: events.append(f"read {first // 2}") or value.source(first, last),
        lambda first, last: events.append(f"write {first // 2}") or mean.target(first, last),
    )
    first = ["read 0", "start scatter", "read 1", "start scatter", "wait scatter", "start gather"]
    second = ["wait gather", "write 0", "read 2", "start scatter", "wait scatter", "start gather"]
    last = ["wait gather", "write 1", "wait scatter", "start gather", "wait gather", "write 2"]
    assert events == [*first, *second, *last]


def exchange(topology: Topology) -> dict[str, Any]:
    plain, rank = DenseExchange(short_last_block(9), topology, bucket_elements=4 * BLOCK), topology.world.rank
    value = own_value(rank, 9)
    plain.begin()
    for bucket, (first, last) in enumerate(plain.buckets):
        plain.compress(bucket, first, last, value)
        plain.send(bucket, Status.OVERFLOW if rank == topology.world.size - 1 else Status.OK)
    assert plain.reduce(stop_on_overflow=True) is Status.OVERFLOW
    value = own_value(rank, 9)
    plain.all_reduce(value)
    results, following = plain.receive(value)
    assert results is None and following is value and plain.state() == {}
    return {"value": value, "rounds": topology.sent().rounds}


@pytest.mark.parametrize(("ranks", "local_size"), [(1, None), (3, None), (4, 2)])
def test_the_uncompressed_exchange_is_the_mean(ranks: int, local_size: int | None) -> None:
    outputs = over_gloo(Case(exchange, ranks, (), local_size))
    for output in outputs:
        assert torch.equal(output["value"], outputs[0]["value"]) and output["rounds"] == 2
    torch.testing.assert_close(outputs[0]["value"], mean_value(ranks, 9))
