"""The 1-bit all-reduce between threads: bit-identical on all ranks for any bucket size; residuals keep the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.comm.kernels.specification import decode_packed, mean_scales, unpack_mask
from megatron01.comm.one_bit import OneBitAllReduce
from megatron01.comm.payload import HEADER_BYTES, BlockLayout, Packed, PackedFormat, Quantizer, Status
from megatron01.comm.transport import Topology, Transport
from tests.residuals import add_errors
from tests.unit.comm.buffers import bits_of, layout_of, random_active, random_buffer
from tests.unit.comm.in_process import InProcessTransport, run_replicas

BLOCK = 64


def own_value(layout: BlockLayout, rank: int, step: int) -> torch.Tensor:
    return random_buffer(layout, 1000 * step + rank, spread=1.0)


def exchange(
    one_bit: OneBitAllReduce,
    value: torch.Tensor,
    key: int,
    *,
    status: Status = Status.OK,
    stop_on_overflow: bool = False,
    ranges: int = 3,
) -> tuple[Status, list[Packed], torch.Tensor]:
    """One exchange as the optimizer runs it: most severe status, results by bucket, and the buffer to use next."""
    one_bit.begin(key)
    for bucket, (first, last) in enumerate(one_bit.buckets):
        for part in range(ranges):
            bounds = [first + (last - first) * p // ranges for p in (part, part + 1)]
            one_bit.compress(bucket, *bounds, value)
        one_bit.send(bucket, status)
    worst = one_bit.reduce(stop_on_overflow)
    if worst >= Status.OVERFLOW and stop_on_overflow:
        return worst, [], value
    return worst, *one_bit.receive(value)


def decode(one_bit: OneBitAllReduce, results: list[Packed]) -> torch.Tensor:
    parts = [decode_packed(p, *one_bit.buckets[bucket]) for bucket, p in enumerate(results)]
    return torch.cat(parts).flatten()


def take_steps(
    transport: Transport, layout: BlockLayout, active: torch.Tensor, steps: int, settings: dict[str, Any]
) -> dict[str, Any]:
    one_bit = OneBitAllReduce(layout, transport, active=active.clone(), **settings)
    buffer, results = torch.empty(layout.num_elements), []
    for step in range(steps):
        buffer.copy_(own_value(layout, transport.rank, step))
        status, packed, buffer = exchange(one_bit, buffer, key=step)
        assert status is Status.OK
        results.append(decode(one_bit, packed))
    return {
        "results": results,
        **{name: tensor.clone() for name, tensor in one_bit.state().items()},
        "server_ranges": one_bit.server_ranges,
        "bytes": transport.bytes_sent,
        "rounds": transport.rounds,
        "buckets": one_bit.buckets,
    }


def whole_server_error(layout: BlockLayout, outputs: list[dict[str, Any]]) -> torch.Tensor:
    """The errors of all servers, in the order of the buffer; each block has one server."""
    whole = torch.full((layout.num_blocks, BLOCK), torch.nan)
    for output in outputs:
        at = 0
        for first, last in output["server_ranges"]:
            assert whole[first:last].isnan().all()
            whole[first:last] = output["server_error"].view(-1, BLOCK)[at : at + last - first]
            at += last - first
    return whole.flatten()


@given(
    num_blocks=st.integers(1, 30),
    size=st.integers(1, 4),
    share=st.sampled_from([0.8, 1.0]),
    quantizer=st.sampled_from(["sign", "random", "4bit"]),
    bucket_blocks=st.lists(st.integers(1, 40), min_size=2, max_size=2),
    backends=st.permutations(["cpu", "reference"]),
)
@settings(max_examples=25, deadline=None)
def test_neither_buckets_nor_backend_change_a_bit(
    num_blocks: int, size: int, share: float, quantizer: Quantizer, bucket_blocks: list[int], backends: list[str]
) -> None:
    layout = layout_of([BLOCK] * (num_blocks - 1) + [17], BLOCK)
    active = random_active(layout, num_blocks, share)
    runs = []
    for blocks, backend in zip(bucket_blocks, backends, strict=True):
        settings = {"quantizer": quantizer, "bucket_elements": blocks * BLOCK, "backend": backend}
        outputs = run_replicas(take_steps, size, layout, active, 3, settings)
        for output in outputs:
            assert [
                torch.equal(bits_of(a), bits_of(b))
                for a, b in zip(output["results"], outputs[0]["results"], strict=True)
            ] == [True] * 3
            assert [a for bucket in output["buckets"] for a in range(*bucket)] == list(range(num_blocks))
            assert output["rounds"] == 3
        errors = [output["worker_error"] for output in outputs]
        runs.append((*outputs[0]["results"], *errors, whole_server_error(layout, outputs)))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(bits_of(first), bits_of(second))


@pytest.mark.parametrize("quantizer", ["sign", "random", "4bit"])
def test_nothing_is_lost_for_good(quantizer: Quantizer) -> None:
    """Inputs = outputs + mean of the worker errors + server errors, on active elements; 0 on others."""
    layout = layout_of([BLOCK] * 8 + [17], BLOCK)
    active, size, steps = random_active(layout, 3, 0.9), 3, 12
    outputs = run_replicas(
        take_steps, size, layout, active, steps, {"quantizer": quantizer, "bucket_elements": 4 * BLOCK}
    )
    mask = unpack_mask(active, BLOCK).flatten()
    given_in = sum(own_value(layout, rank, step) for rank in range(size) for step in range(steps)) / size
    came_out = sum(outputs[0]["results"])
    kept = sum(output["worker_error"] for output in outputs) / size + whole_server_error(layout, outputs)
    torch.testing.assert_close(came_out + kept, given_in * mask, rtol=1e-3, atol=1e-3)
    for tensor in (came_out, kept):
        assert not tensor[~mask].any()


def test_one_step_is_that_of_the_paper() -> None:
    """Against the paper's formulas without packing, chunks or buckets."""
    layout = layout_of([BLOCK] * 5, BLOCK)
    active = layout.real_elements()
    mask = torch.ones(5, BLOCK, dtype=torch.bool)

    def compressed(values: torch.Tensor) -> torch.Tensor:
        return torch.where(values >= 0, 1.0, -1.0) * mean_scales(values, mask)[:, None]

    outputs = run_replicas(take_steps, 2, layout, active, 2, {"bucket_elements": 2 * BLOCK})
    worker_errors, server_error = [torch.zeros(5, BLOCK) for _ in range(2)], torch.zeros(5, BLOCK)
    for step in range(2):
        totals = [own_value(layout, rank, step).view(5, BLOCK) + worker_errors[rank] for rank in range(2)]
        sent = [compressed(total) for total in totals]
        worker_errors = [total - bits for total, bits in zip(totals, sent, strict=True)]
        mean = (sent[0] + sent[1]) / 2 + server_error
        result = compressed(mean)
        server_error = mean - result
        torch.testing.assert_close(outputs[0]["results"][step].view(5, BLOCK), result)
    torch.testing.assert_close(whole_server_error(layout, outputs).view(5, BLOCK), server_error)


def test_random_draws_differ_between_replicas_and_steps() -> None:
    layout = layout_of([1024], 1024)
    codes = run_replicas(send_zeros, 2, layout)
    flat = [code for replica in codes for code in replica]
    for i, first in enumerate(flat):
        for second in flat[:i]:
            assert 400 < int((first != second).sum()) < 624


def send_zeros(transport: Transport, layout: BlockLayout) -> list[torch.Tensor]:
    """The new errors after exchanging zeros, which reveal the random draws."""
    one_bit = OneBitAllReduce(layout, transport, active=layout.real_elements(), quantizer="random")
    codes = []
    for step in range(2):
        one_bit.state()["worker_error"].zero_()
        value = torch.zeros(layout.num_elements)
        exchange(one_bit, value, key=step)
        codes.append(value.clone())
    return codes


def withdrawn(transport: InProcessTransport, layout: BlockLayout, severe: Status) -> None:
    one_bit = OneBitAllReduce(layout, transport, active=layout.real_elements(), bucket_elements=4 * BLOCK)
    value = own_value(layout, transport.rank, 0)
    value = exchange(one_bit, value, key=0)[2]
    before = {name: tensor.clone() for name, tensor in one_bit.state().items()}
    assert all(bool(tensor.any()) for tensor in before.values())

    sent_before = transport.bytes_sent
    status = severe if transport.rank == 1 else Status.OK
    value.copy_(own_value(layout, transport.rank, 1))
    worst, _, same = exchange(one_bit, value, key=1, status=status, stop_on_overflow=True)
    assert worst is severe and same is value and transport.rounds == 2
    assert transport.bytes_sent - sent_before == sent_before // 2  # the all-to-all only
    for name, tensor in one_bit.state().items():
        assert torch.equal(bits_of(tensor), bits_of(before[name]))

    # the next exchange is not affected by the one called off
    value.copy_(own_value(layout, transport.rank, 2))
    worst, packed, _ = exchange(one_bit, value, key=2, stop_on_overflow=True)
    assert worst is Status.OK
    fresh = OneBitAllReduce(layout, transport, active=layout.real_elements(), bucket_elements=4 * BLOCK)
    for name, tensor in fresh.state().items():
        tensor.copy_(before[name])
    other = exchange(fresh, own_value(layout, transport.rank, 2), key=2)[1]
    assert torch.equal(decode(one_bit, packed), decode(fresh, other))


@pytest.mark.parametrize("severe", [Status.OVERFLOW, Status.GIVING_UP])
def test_an_exchange_that_is_cancelled_leaves_the_residuals_alone(severe: Status) -> None:
    run_replicas(withdrawn, 3, layout_of([BLOCK] * 11, BLOCK), severe)


@pytest.mark.parametrize("status", [Status.OVERFLOW, Status.GIVING_UP])
def test_a_status_that_calls_nothing_off_is_told_to_all(status: Status) -> None:
    layout = layout_of([BLOCK] * 7, BLOCK)

    def worker(transport: Transport) -> tuple[Status, torch.Tensor]:
        one_bit = OneBitAllReduce(layout, transport, active=layout.real_elements())
        value = own_value(layout, transport.rank, 0)
        own = status if transport.rank == 0 else Status.OK
        worst, packed, _ = exchange(one_bit, value, key=0, status=own, stop_on_overflow=False)
        return worst, decode(one_bit, packed)

    outputs = run_replicas(worker, 2)
    assert [worst for worst, _ in outputs] == [status, status]
    assert outputs[0][1].all() and torch.equal(outputs[0][1], outputs[1][1])


def test_swapping_gives_the_old_error_and_keeps_the_new_one() -> None:
    layout = layout_of([BLOCK] * 3, BLOCK)

    def worker(transport: Transport) -> None:
        one_bit = OneBitAllReduce(layout, transport, active=layout.real_elements())
        old = one_bit.state()["worker_error"]
        value = own_value(layout, transport.rank, 0)
        returned = exchange(one_bit, value, key=0)[2]
        assert returned is old and one_bit.state()["worker_error"] is value

    run_replicas(worker, 2)


def test_all_reduce_does_the_same_in_one_call() -> None:
    layout = layout_of([BLOCK] * 10 + [3], BLOCK)

    def worker(transport: Transport) -> list[torch.Tensor]:
        one_bit = OneBitAllReduce(layout, transport, active=layout.real_elements(), bucket_elements=1)
        results = []
        for step in range(3):
            value = own_value(layout, transport.rank, step)
            one_bit.all_reduce(value, key=step)
            results.append(value)
        return [*results, *one_bit.state().values()]

    outputs = run_replicas(worker, 2)
    expected = run_replicas(take_steps, 2, layout, layout.real_elements(), 3, {"bucket_elements": 1})
    for output, want in zip(outputs, expected, strict=True):
        for got, wanted in zip(output, [*want["results"], want["worker_error"], want["server_error"]], strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "quantizer, bits, scale_bytes", [("sign", 1, 2), ("random", 1, 0), ("4bit", 4, 2), ("8bit", 8, 2)]
)
@pytest.mark.parametrize("size, bucket_blocks", [(2, 400), (3, 50), (4, 8)])
def test_bytes_are_those_of_the_formula(
    quantizer: Quantizer, bits: int, scale_bytes: int, size: int, bucket_blocks: int
) -> None:
    """2 (n - 1) / n d (bits / 8 + scale_bytes / block), and a header for each row."""
    layout = layout_of([BLOCK] * 400, BLOCK)
    settings = {"quantizer": quantizer, "bucket_elements": bucket_blocks * BLOCK}
    for output in run_replicas(take_steps, size, layout, layout.real_elements(), 2, settings):
        rows = [-(-(last - first) // size) for first, last in output["buckets"]]
        per_row = sum(PackedFormat.of(quantizer, BLOCK).row_bytes(blocks) for blocks in rows)
        assert output["bytes"] == 2 * 2 * (size - 1) * per_row
        without_headers = output["bytes"] - 4 * (size - 1) * HEADER_BYTES * len(rows)
        formula = 2 * 2 * (size - 1) / size * layout.num_elements * (bits / 8 + scale_bytes / BLOCK)
        assert without_headers == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("quantizer", ["sign", "random", "4bit"])
def test_the_errors_add_up_to_what_has_not_been_sent(quantizer: Quantizer) -> None:
    layout = layout_of([BLOCK] * 9 + [5], BLOCK)

    def worker(transport: Transport) -> tuple[torch.Tensor, dict[str, Any]]:
        one_bit = OneBitAllReduce(
            layout, transport, active=layout.real_elements(), quantizer=quantizer, bucket_elements=1
        )
        one_bit.all_reduce(own_value(layout, transport.rank, 0))
        errors = {name: tensor.clone() for name, tensor in one_bit.state().items()}
        residual = torch.zeros(layout.num_elements)
        add_errors(one_bit.error_places(), one_bit.state(), residual, BLOCK)
        one_bit.set_errors(torch.zeros_like(residual))
        assert not any(bool(tensor.any()) for tensor in one_bit.state().values())
        return residual, {**errors, "server_ranges": one_bit.server_ranges}

    outputs = run_replicas(worker, 3)
    mean = sum(residual for residual, _ in outputs) / 3
    states = [state for _, state in outputs]
    kept = sum(state["worker_error"] for state in states) / 3 + whole_server_error(layout, states)
    torch.testing.assert_close(mean, kept)


@pytest.mark.parametrize("quantizer", ["sign", "random"])
def test_what_an_exchange_loses_is_measured(quantizer: Quantizer) -> None:
    layout = layout_of([BLOCK] * 9 + [5], BLOCK)
    active = random_active(layout, 1, 0.8)

    def worker(transport: Transport) -> None:
        one_bit = OneBitAllReduce(layout, transport, active=active, quantizer=quantizer, bucket_elements=4 * BLOCK)
        value = own_value(layout, transport.rank, 0)
        total = value.clone() * unpack_mask(active, BLOCK).flatten()  # the errors are 0 before
        one_bit.begin(watch=True)
        for bucket, (first, last) in enumerate(one_bit.buckets):
            one_bit.compress(bucket, first, last, value)
            one_bit.send(bucket, Status.OK)
        one_bit.reduce(stop_on_overflow=True)
        one_bit.receive(value)
        for (first, last), compression in zip(one_bit.buckets, one_bit.compression(), strict=True):
            part = slice(first * BLOCK, last * BLOCK)
            for got, wanted in (
                (compression.quantized, total[part] - value[part]),
                (compression.residual, value[part]),
            ):
                assert got == pytest.approx(float(wanted.double().square().sum()), rel=1e-4)

    run_replicas(worker, 2)


def test_an_element_that_is_taken_out_loses_its_error() -> None:
    layout = layout_of([BLOCK] * 4, BLOCK)

    def worker(transport: Transport) -> None:
        active = layout.real_elements()
        one_bit = OneBitAllReduce(layout, transport, active=active)
        value = exchange(one_bit, own_value(layout, transport.rank, 0), key=0)[2]
        active[3] = 0
        value.copy_(own_value(layout, transport.rank, 1))
        _, packed, _ = exchange(one_bit, value, key=1)
        errors = one_bit.state()
        for tensor in (decode(one_bit, packed), errors["worker_error"]):
            assert not tensor[96:128].any() and tensor[:96].all() and tensor[128:].all()
        if transport.rank == 0:  # the server of the first two blocks
            assert not errors["server_error"][96:128].any() and errors["server_error"][:96].all()

    run_replicas(worker, 2)


def test_memory_is_two_errors_and_two_payloads() -> None:
    layout = layout_of([1024] * 256, 1024)

    def worker(transport: Transport) -> int:
        active = layout.real_elements()
        one_bit = OneBitAllReduce(layout, transport, active=active, bucket_elements=1 << 16)
        one_bit.all_reduce(torch.ones(layout.num_elements))
        seen: dict[int, int] = {}
        pending: list[Any] = [one_bit]
        while pending:
            item = pending.pop()
            if isinstance(item, torch.Tensor):
                if item is not active:
                    seen[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
            elif isinstance(item, (list, tuple)):
                pending += item
            elif hasattr(item, "__dict__") and item is not transport:
                pending += vars(item).values()
        return sum(seen.values())

    d, n = layout.num_elements, 2
    assert run_replicas(worker, n) == [pytest.approx(4 * d * (1 + 1 / n) + 2 * d * (1 / 8 + 2 / 1024), rel=1e-3)] * n


def counted_by_node(transport: Transport) -> tuple[int, int, int]:
    row = torch.zeros(16, dtype=torch.uint8)
    transport.all_gather(row.new_empty(transport.size, 16), row).wait()
    return Topology.flat(transport, local_size=2).sent()


def test_of_what_a_flat_exchange_sends_the_rows_to_other_nodes_leave_this_one() -> None:
    assert run_replicas(counted_by_node, 4) == [(48, 32, 0)] * 4
