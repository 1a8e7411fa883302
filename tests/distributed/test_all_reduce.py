"""The 1-bit all-reduce on 2 to 4 processes over gloo; see tests/unit/comm/test_one_bit.py for what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron01.comm import OneBitAllReduce, Status, TorchTransport
from tests.distributed.harness import run_ranks
from tests.unit.comm.buffers import short_last_block
from tests.unit.comm.in_process import run_replicas

BLOCK = 64


def own_value(rank: int, num_blocks: int, step: int = 0) -> torch.Tensor:
    value = torch.randn(num_blocks * BLOCK, generator=torch.Generator().manual_seed(100 * step + rank))
    value[-(BLOCK - 17) :] = 0.0
    return value


def one_bit(transport: Any, num_blocks: int, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    layout = short_last_block(num_blocks)
    reduce = OneBitAllReduce(layout, transport, active=layout.real_elements(), **settings)
    results = []
    for step in range(steps):
        value = own_value(transport.rank, num_blocks, step)
        reduce.all_reduce(value, key=step)
        results.append(value)
    return {"results": results, **reduce.state(), "bytes": transport.bytes_sent, "rounds": transport.rounds}


def one_bit_over_gloo(rank: int, size: int, *args: Any) -> dict[str, Any]:
    return one_bit(TorchTransport(), *args)


@pytest.mark.parametrize("quantizer", ["sign", "random"])
@pytest.mark.parametrize("replicas, num_blocks, bucket_blocks", [(2, 9, 2), (3, 7, 99), (4, 2, 99), (4, 40, 11)])
def test_processes_compute_what_threads_compute(
    replicas: int, num_blocks: int, bucket_blocks: int, quantizer: str
) -> None:
    arguments = (num_blocks, 5, {"quantizer": quantizer, "bucket_elements": bucket_blocks * BLOCK})
    outputs = run_ranks(one_bit_over_gloo, replicas, *arguments)
    for output, expected in zip(outputs, run_replicas(one_bit, replicas, *arguments), strict=True):
        for step, got in enumerate(output["results"]):
            assert torch.equal(got, expected["results"][step]) and torch.equal(got, outputs[0]["results"][step])
            assert not got[-(BLOCK - 17) :].any(), "padding took part"
        for name in ("worker_error", "server_error"):
            assert torch.equal(output[name], expected[name])
        assert output["rounds"] == 5 and output["bytes"] == expected["bytes"]


def test_bytes_are_those_of_the_formula() -> None:
    for output in run_ranks(one_bit_over_gloo, 4, 400, 3, {}):
        d = 400 * BLOCK
        assert output["bytes"] == pytest.approx(3 * 2 * 3 / 4 * d * (1 / 8 + 2 / BLOCK), rel=0.02)


def withdrawn(rank: int, size: int) -> tuple[Status, bool, bool]:
    layout = short_last_block(5)
    reduce = OneBitAllReduce(layout, TorchTransport(), active=layout.real_elements(), bucket_elements=3 * BLOCK)
    value = own_value(rank, 5)
    reduce.begin()
    for bucket, (first, last) in enumerate(reduce.buckets):
        reduce.compress(bucket, first, last, value)
        reduce.send(bucket, Status.OVERFLOW if rank == 1 else Status.OK)
    worst = reduce.reduce(stop_on_overflow=True)
    state = reduce.state()
    return worst, bool(state["worker_error"].any()), bool(state["server_error"].any())


def test_an_exchange_that_is_called_off_leaves_the_errors_alone() -> None:
    assert run_ranks(withdrawn, 3) == [(Status.OVERFLOW, False, False)] * 3


def test_one_replica_needs_no_process_group() -> None:
    value = own_value(0, 3)
    layout, transport = short_last_block(3), TorchTransport()
    one_bit_alone = OneBitAllReduce(layout, transport, active=layout.real_elements())
    result = value.clone()
    one_bit_alone.all_reduce(result)
    errors = one_bit_alone.state()
    torch.testing.assert_close(result + errors["worker_error"] + errors["server_error"], value)
    assert transport.bytes_sent == 0
