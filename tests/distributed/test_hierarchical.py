"""The 1-bit exchange over simulated nodes: its result, its residuals, the bytes it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron01.comm import BlockLayout, OneBitAllReduce, Packed, Status, Topology
from megatron01.comm.payload import PackedFormat, Quantizer
from tests.distributed.topologies import Case, over_gloo
from tests.unit.comm.buffers import short_last_block

BLOCK = 64
STEPS = 6


def active_of(layout: BlockLayout) -> torch.Tensor:
    """Participation mask: all real elements but the last 8 of every 32."""
    return layout.real_elements() & 0x00FFFFFF


def own_value(rank: int, num_blocks: int, step: int) -> torch.Tensor:
    """Numbers that bf16 represents, so that their sum inside a node is exact."""
    value = torch.randn(num_blocks * BLOCK, generator=torch.Generator().manual_seed(100 * step + rank))
    value[-(BLOCK - 17) :] = 0.0
    return (value * 16).round() / 16


def node_value(node: int, local_size: int, num_blocks: int, step: int) -> torch.Tensor:
    return sum(own_value(node * local_size + local, num_blocks, step) for local in range(local_size)) / local_size


def exchange_of(topology: Topology, num_blocks: int, bucket: int, quantizer: Quantizer) -> OneBitAllReduce:
    layout = short_last_block(num_blocks)
    active = active_of(layout)
    return OneBitAllReduce(
        layout, topology, active=active, quantizer=quantizer, bucket_elements=bucket * BLOCK, backend="cpu"
    )


def hierarchical(given: Topology, num_blocks: int, buckets: list[int], quantizer: Quantizer) -> list[dict[str, Any]]:
    assert given.local is not None
    rank, node = given.world.rank, given.world.rank // given.local_size
    runs = []
    for bucket in buckets:
        topology = given.with_own_counters()
        exchange = exchange_of(topology, num_blocks, bucket, quantizer)
        results = []
        for step in range(STEPS):
            if topology.replica == "node":
                value = node_value(node, topology.local_size, num_blocks, step)
            else:
                value = own_value(rank, num_blocks, step)
            exchange.all_reduce(value, key=step)
            results.append(value)
        runs.append(
            {
                "results": results,
                "state": exchange.state(),
                "worker_ranges": exchange.worker_ranges,
                "server_ranges": exchange.server_ranges,
                "rounds": topology.sent().rounds,
                "between": topology.sent().bytes_between_nodes,
            }
        )
    return runs


def flat(topology: Topology, local_size: int, num_blocks: int) -> list[torch.Tensor]:
    layout = short_last_block(num_blocks)
    exchange = OneBitAllReduce(layout, topology.world, active=active_of(layout), backend="cpu")
    results = [node_value(topology.world.rank, local_size, num_blocks, step) for step in range(STEPS)]
    for value in results:
        exchange.all_reduce(value)
    return results


SHAPES = [(2, 2, 40), (2, 3, 23), (3, 2, 5)]  # nodes, ranks of a node, blocks


@pytest.mark.parametrize("replica", ["process", "node"])
@pytest.mark.parametrize(("nodes", "local_size", "num_blocks"), SHAPES)
def test_it_is_the_flat_exchange_of_the_nodes_means(nodes: int, local_size: int, num_blocks: int, replica: str) -> None:
    case = Case(hierarchical, nodes * local_size, (num_blocks, [4, 9, 1000], "sign"), local_size, {"replica": replica})
    (expected, *others) = over_gloo(Case(flat, nodes, (local_size, num_blocks)))
    assert all(torch.equal(a, b) for other in others for a, b in zip(expected, other, strict=True))
    outputs = over_gloo(case)
    for runs in outputs:
        for run in runs:  # for any bucket size
            assert run["rounds"] == STEPS
            for got, want in zip(run["results"], expected, strict=True):
                assert torch.equal(got, want)
    # but for headers, a node sends as much as one process of a flat exchange over the nodes
    sent_by_node = sum(runs[-1]["between"] for runs in outputs[:local_size]) / STEPS
    row_bytes = PackedFormat.of("sign", BLOCK).row_bytes(-(-num_blocks // (nodes * local_size)))
    assert sent_by_node == local_size * 2 * (nodes - 1) * row_bytes


def whole(outputs: list[dict[str, Any]], ranges: str, error: str, num_blocks: int) -> torch.Tensor:
    """The residuals of several processes, added at their positions in the buffer."""
    buffer = torch.zeros(num_blocks * BLOCK)
    for output in outputs:
        blocks = torch.cat([torch.arange(first, last) for first, last in output[ranges]])
        buffer.view(-1, BLOCK)[blocks] += output["state"][error].view(-1, BLOCK)
    return buffer


@pytest.mark.parametrize("quantizer", ["sign", "random"])
@pytest.mark.parametrize(("nodes", "local_size", "num_blocks"), SHAPES)
def test_nothing_is_lost_for_good(nodes: int, local_size: int, num_blocks: int, quantizer: Quantizer) -> None:
    case = Case(hierarchical, nodes * local_size, (num_blocks, [4], quantizer), local_size)
    outputs = [runs[0] for runs in over_gloo(case)]
    for output in outputs:
        assert all(torch.equal(a, b) for a, b in zip(output["results"], outputs[0]["results"], strict=True))
        assert sum(last - first for first, last in output["worker_ranges"]) <= -(-num_blocks // local_size) + 4
    given_in = sum(node_value(node, local_size, num_blocks, step) for node in range(nodes) for step in range(STEPS))
    given_in = given_in / nodes
    given_in.view(-1, 32)[:, 24:] = 0.0  # not active
    kept = whole(outputs, "worker_ranges", "worker_error", num_blocks) / nodes
    kept += whole(outputs, "server_ranges", "server_error", num_blocks)
    torch.testing.assert_close(sum(outputs[0]["results"]) + kept, given_in, rtol=1e-4, atol=1e-4)


def called_off(topology: Topology, culprit: int) -> dict[str, Any]:
    num_blocks, rank = 23, topology.world.rank
    exchange = exchange_of(topology, num_blocks, 8, "sign")
    exchange.all_reduce(own_value(rank // topology.local_size, num_blocks, 0))
    before = {name: error.clone() for name, error in exchange.state().items()}

    def attempt(status: Status) -> tuple[Status, list[Packed]]:
        value = own_value(rank // topology.local_size, num_blocks, 1)
        exchange.begin()
        for bucket, (first, last) in enumerate(exchange.buckets):
            for block in range(first, last):  # in several ranges
                exchange.compress(bucket, block, block + 1, value)
            late = bucket == len(exchange.buckets) - 1 and rank == culprit
            exchange.send(bucket, status if late else Status.OK)
        worst = exchange.reduce(stop_on_overflow=True)
        if worst >= Status.OVERFLOW:
            return worst, []
        results, following = exchange.receive(value)
        assert following is value
        return worst, results

    worst, _ = attempt(Status.OVERFLOW)
    unchanged = all(torch.equal(error, before[name]) for name, error in exchange.state().items())
    worst_after, results = attempt(Status.OK)
    changed = not torch.equal(exchange.state()["worker_error"], before["worker_error"])
    return {
        "seen": (worst, unchanged, worst_after, changed),
        "rows": [(packed.first_block, packed.row_blocks, packed.rows.size(0)) for packed in results],
        "nonzero": bool(before["worker_error"].any()),
    }


@pytest.mark.parametrize("replica", ["process", "node"])
@pytest.mark.parametrize("culprit", [0, 3])
def test_any_process_can_call_it_off_without_a_trace(culprit: int, replica: str) -> None:
    for output in over_gloo(Case(called_off, 4, (culprit,), 2, {"replica": replica})):
        assert output["seen"] == (Status.OVERFLOW, True, Status.OK, True)
        assert output["rows"] == [(0, 2, 4), (8, 2, 4), (16, 2, 4)]
        assert output["nonzero"]


def reversed_buckets(topology: Topology) -> bool:
    num_blocks, forward, backward = 23, *(exchange_of(topology, 23, 4, "sign") for _ in range(2))
    same = True
    for step in range(3):
        value = own_value(topology.world.rank, num_blocks, step)
        backward.begin()
        for bucket, (first, last) in reversed(list(enumerate(backward.buckets))):
            backward.compress(bucket, first, last, value)
            backward.send(bucket, Status.OK)
        assert backward.reduce(stop_on_overflow=True) is Status.OK
        results, _ = backward.receive(value)
        rows = [result.rows.clone() for result in results]
        forward.all_reduce(value)
        for sent, payload in zip(rows, forward._payloads, strict=True):
            same = same and torch.equal(sent[:, 16:], payload.result.rows[:, 16:])
    return same


@pytest.mark.parametrize("replica", ["process", "node"])
def test_buckets_may_be_sent_in_another_order(replica: str) -> None:
    assert over_gloo(Case(reversed_buckets, 4, (), 2, {"replica": replica})) == [True] * 4


def averaged_in_bf16(topology: Topology) -> torch.Tensor:
    exchange = exchange_of(topology, 1, 1, "sign")
    value = torch.full((BLOCK,), 1e-12 if topology.world.rank % 2 else 3e-12)
    value[17:] = 0.0
    exchange.all_reduce(value)
    return value


def test_tiny_values_survive_the_way_inside_the_node() -> None:
    for value in over_gloo(Case(averaged_in_bf16, 4, (), 2)):
        torch.testing.assert_close(value[:17], torch.full((17,), 2e-12), rtol=1e-2, atol=0.0)
