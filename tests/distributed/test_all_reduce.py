"""The collectives of ``megatron01.comm`` on 2 to 4 processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron01.comm import BlockLayout, DenseAllReduce, DenseExchange, OneBitAllReduce, Status, TorchTransport
from tests.distributed.harness import run_ranks

BLOCK = 64


def layout_of(num_blocks: int) -> BlockLayout:
    lengths = torch.full((num_blocks,), BLOCK, dtype=torch.int32)
    lengths[-1] = 17
    return BlockLayout(lengths, BLOCK)


def own_value(rank: int, num_blocks: int, step: int = 0) -> torch.Tensor:
    value = torch.randn(num_blocks * BLOCK, generator=torch.Generator().manual_seed(100 * step + rank))
    value[-(BLOCK - 17) :] = 0.0
    return value


def one_bit(rank: int, size: int, num_blocks: int, steps: int) -> dict[str, Any]:
    transport = TorchTransport()
    reduce = OneBitAllReduce(layout_of(num_blocks), transport)
    results = []
    for step in range(steps):
        value = own_value(rank, num_blocks, step)
        reduce.all_reduce(value)
        results.append(value)
    return {
        "results": results,
        "worker_error": reduce.worker_error,
        "server_error": reduce.server_error,
        "bytes": transport.bytes_sent,
        "rounds": transport.rounds,
    }


@pytest.mark.parametrize("replicas, num_blocks", [(2, 9), (3, 7), (4, 2), (4, 40)])
def test_one_bit_results_are_equal_everywhere_and_lose_nothing_for_good(replicas: int, num_blocks: int) -> None:
    steps = 12
    outputs = run_ranks(one_bit, replicas, num_blocks, steps)
    for output in outputs:
        for got, want in zip(output["results"], outputs[0]["results"], strict=True):
            assert torch.equal(got, want)
            assert not got[-(BLOCK - 17) :].any(), "padding took part"
        assert output["rounds"] == steps
    # what went in = what came out + mean of the worker errors + server errors, whose chunks make up the whole
    given_in = sum(own_value(rank, num_blocks, step) for rank in range(replicas) for step in range(steps)) / replicas
    came_out = sum(outputs[0]["results"])
    kept = sum(output["worker_error"] for output in outputs) / replicas
    kept = kept + torch.cat([output["server_error"] for output in outputs])
    torch.testing.assert_close(came_out + kept, given_in, rtol=1e-3, atol=1e-3)


def test_one_bit_bytes_are_those_of_the_formula() -> None:
    for output in run_ranks(one_bit, 4, 400, 3):
        d = 400 * BLOCK
        assert output["bytes"] == pytest.approx(3 * 2 * 3 / 4 * d * (1 / 8 + 4 / BLOCK), rel=0.02)


def withdrawn(rank: int, size: int) -> tuple[Status, bool, bool]:
    reduce = OneBitAllReduce(layout_of(5), TorchTransport())
    value = own_value(rank, 5)
    reduce.prepare(0, 5, value)
    status = reduce.exchange(value, status=Status.OVERFLOW if rank == 1 else Status.OK, stop_on_overflow=True)
    return status, bool(reduce.worker_error.any()), bool(reduce.server_error.any())


def test_an_exchange_that_is_called_off_leaves_the_errors_alone() -> None:
    assert run_ranks(withdrawn, 3) == [(Status.OVERFLOW, False, False)] * 3


def dense(
    rank: int, size: int, dtype: torch.dtype, num_blocks: int, bucket: int, scales: list[float]
) -> dict[str, Any]:
    transport = TorchTransport()
    layout = layout_of(num_blocks)
    mean = DenseAllReduce(layout, transport, dtype, bucket_elements=bucket)
    value = own_value(rank, num_blocks).view(-1, BLOCK) * scales[rank]
    out = torch.full_like(value, math.nan)

    def read(first: int, last: int, wire: torch.Tensor) -> None:
        wire.view(-1, BLOCK).copy_(value[first:last])

    def write(first: int, last: int, wire: torch.Tensor) -> None:
        out[first:last] = wire.view(-1, BLOCK).float()

    status, common = mean.all_reduce(read, write, inverse_scale=1.0 / scales[rank])
    return {"mean": out * common, "status": status, "common": common, "bytes": transport.bytes_sent}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("replicas, bucket", [(2, 1 << 20), (3, 4 * BLOCK), (4, BLOCK)])
def test_the_dense_mean_is_the_mean_with_the_same_bits_everywhere(
    dtype: torch.dtype, replicas: int, bucket: int
) -> None:
    num_blocks = 23
    outputs = run_ranks(dense, replicas, dtype, num_blocks, bucket, [1.0] * replicas)
    expected = sum(own_value(rank, num_blocks) for rank in range(replicas)).view(-1, BLOCK) / replicas
    for output in outputs:
        assert torch.equal(output["mean"], outputs[0]["mean"])
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(output["mean"], expected, rtol=tolerance, atol=tolerance)


def test_each_replica_may_bring_its_own_loss_scale() -> None:
    outputs = run_ranks(dense, 3, torch.float16, 5, 1 << 20, [1024.0, 256.0, 4096.0])
    expected = sum(own_value(rank, 5) for rank in range(3)).view(-1, BLOCK) / 3
    for output in outputs:
        assert output["common"] == 1 / 256.0
        assert torch.equal(output["mean"], outputs[0]["mean"])
        torch.testing.assert_close(output["mean"], expected, rtol=2e-3, atol=2e-3)


def test_dense_bytes_are_those_of_a_ring() -> None:
    for output in run_ranks(dense, 2, torch.bfloat16, 400, 1 << 20, [1.0, 1.0]):
        assert output["bytes"] == pytest.approx(2 * 1 / 2 * 400 * BLOCK * 2, rel=0.02)


def sums_in_fp32(rank: int, size: int) -> float:
    """2048 + 1 + 1 + 1 is 2048 when it accumulates in fp16."""
    layout = BlockLayout(torch.tensor([BLOCK], dtype=torch.int32), BLOCK)
    mean = DenseAllReduce(layout, TorchTransport(), torch.float16)
    out = torch.zeros(BLOCK)
    mean.all_reduce(
        lambda first, last, wire: wire.fill_(2048.0 if rank == 0 else 1.0),
        lambda first, last, wire: out[: wire.numel()].copy_(wire),
    )
    return float(out[0])


def test_sixteen_bit_gradients_are_summed_in_fp32() -> None:
    mean = torch.tensor(2051 / 4).half().item()
    assert run_ranks(sums_in_fp32, 4) == [mean] * 4


def uncompressed(rank: int, size: int) -> torch.Tensor:
    exchange = DenseExchange(layout_of(9), TorchTransport())
    value = own_value(rank, 9)
    assert exchange.exchange(value) is Status.OK
    return value


def test_the_uncompressed_exchange_is_the_mean() -> None:
    outputs = run_ranks(uncompressed, 3)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0], sum(own_value(rank, 9) for rank in range(3)) / 3)
