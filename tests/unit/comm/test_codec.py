"""The 1-bit codec: what its bits mean, that it is a contraction, and that every backend gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.comm import DenseExchange, OneBitAllReduce, Status, TorchTransport
from megatron01.comm.codec import Codec, build_codec
from megatron01.comm.payload import HEADER_BYTES, BlockLayout, packed_row_bytes
from megatron01.comm.reference import block_sums, pack_signs, unpack_signs
from megatron01.comm.workers import BlockWorkers

BACKENDS = ("cpu", "reference")


def layout_of(lengths: list[int], block_size: int) -> BlockLayout:
    return BlockLayout(torch.tensor(lengths, dtype=torch.int32), block_size)


def random_buffer(layout: BlockLayout, seed: int, spread: float = 0.0) -> torch.Tensor:
    """Gaussian values whose magnitude varies by 10^+-spread between blocks; zeros in the padding."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.num_blocks, layout.block_size, generator=generator)
    values *= 10 ** (spread * torch.randn(layout.num_blocks, 1, generator=generator))
    values[torch.arange(layout.block_size) >= layout.lengths[:, None]] = 0.0
    return values.flatten()


def round_trip(
    codec: Codec,
    layout: BlockLayout,
    value: torch.Tensor,
    error: torch.Tensor,
    variance: torch.Tensor | None,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compress, and finish with what was sent as the result: (value + error, new error, what the bits say)."""
    rows = torch.zeros(num_rows, packed_row_bytes(layout.row_blocks(num_rows), layout.block_size), dtype=torch.uint8)
    codec.compress(0, layout.num_blocks, value, error, variance, rows)
    corrected = value.clone()
    codec.finish(0, layout.num_blocks, value, error, variance, rows, rows)
    return corrected, error, value


def test_bits_are_signs_with_the_least_significant_first_and_zero_counts_as_plus() -> None:
    values = torch.tensor([[1.0, -1.0, 0.0, -0.0, -2.0, 3.0, -1e-30, 1e-30] * 4])
    packed = pack_signs(values)
    assert packed.tolist() == [[0b10101101] * 4]
    assert unpack_signs(packed, torch.tensor([2.0]))[0, :8].tolist() == [2, -2, 2, 2, -2, 2, -2, 2]


def test_golden_payload() -> None:
    """One block of 32 in one row: header, scale, one little-endian word."""
    layout = layout_of([32], 32)
    value = torch.tensor([1.0, -3.0] * 16)
    for backend in BACKENDS:
        rows = torch.zeros(1, packed_row_bytes(1, 32), dtype=torch.uint8)
        build_codec(layout, 1, 1e-3, backend=backend).compress(0, 1, value.clone(), torch.zeros(32), None, rows)
        assert bytes(rows[0, HEADER_BYTES:].tolist()).hex() == "00000040" + "55555555"


def test_scale_is_the_mean_magnitude_over_the_real_live_elements() -> None:
    layout = layout_of([5], 32)
    value, variance = torch.zeros(32), torch.zeros(32)
    value[:5] = torch.tensor([2.0, -4.0, 6.0, 100.0, 0.0])
    variance[:5] = torch.tensor([1.0, 1.0, 1.0, 1e-12, 1.0])  # the fourth is dead
    for backend in BACKENDS:
        codec = build_codec(layout, 1, 1e-3, backend=backend)
        _, error, sent = round_trip(codec, layout, value.clone(), torch.zeros(32), variance, 1)
        assert sent[:5].tolist() == [3.0, -3.0, 3.0, 0.0, 3.0]
        assert error[:5].tolist() == [-1.0, -1.0, 3.0, 0.0, -3.0]
        assert not sent[5:].any() and not error[5:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_that_are_zero_stay_zero(backend: str) -> None:
    layout = layout_of([64, 64], 64)
    value = torch.zeros(128)
    value[64:] = torch.randn(64)
    _, error, sent = round_trip(build_codec(layout, 1, 1e-3, backend=backend), layout, value, torch.zeros(128), None, 1)
    assert not sent[:64].any() and not error[:64].any() and sent[64:].all()


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    num_rows=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    dead=st.floats(0, 0.9),
    with_variance=st.booleans(),
    first=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_backends_agree_to_the_bit(
    lengths: list[int], num_rows: int, seed: int, dead: float, with_variance: bool, first: int
) -> None:
    layout = layout_of(lengths, 64)
    first = min(first, layout.num_blocks)
    variance = None
    if with_variance:
        generator = torch.Generator().manual_seed(seed)
        variance = random_buffer(layout, seed + 2, 3).square()
        variance[torch.rand(variance.shape, generator=generator) < dead] *= 1e-9
    results = []
    for backend in BACKENDS:
        codec = build_codec(layout, num_rows, 1e-3, backend=backend)
        value, error = random_buffer(layout, seed, 3), random_buffer(layout, seed + 1, 3)
        rows = torch.zeros(num_rows, packed_row_bytes(layout.row_blocks(num_rows), 64), dtype=torch.uint8)
        codec.compress(0, first, value, error, variance, rows)  # two calls give what one does
        codec.compress(first, layout.num_blocks, value, error, variance, rows)
        start, end = layout.row_range(num_rows - 1, num_rows)
        server_error = random_buffer(layout, seed + 3, 3)[: (end - start) * 64].clone()
        out = torch.zeros_like(rows[0])
        codec.reduce(start, end - start, rows, server_error, variance, out)
        codec.finish(0, layout.num_blocks, value, error, variance, rows, rows.flip(0).contiguous())
        results.append((value, error, server_error, rows, out))
    for compiled, plain in zip(*results, strict=True):
        assert torch.equal(compiled, plain)


@given(seed=st.integers(0, 2**31), spread=st.floats(0, 4), block_size=st.sampled_from([32, 128, 1024]))
@settings(max_examples=40, deadline=None)
def test_compression_is_a_contraction_whatever_the_scales(seed: int, spread: float, block_size: int) -> None:
    """|a - C(a)|^2 <= |a|^2 - (sum over blocks of |a|_1^2 / size) < |a|^2, the bound for one L1 scale per block."""
    layout = layout_of([block_size] * 7 + [block_size // 3], block_size)
    value = random_buffer(layout, seed, spread)
    codec = build_codec(layout, 1, 1e-3, backend="cpu")
    corrected, error, sent = round_trip(codec, layout, value, torch.zeros_like(value), None, 1)
    assert torch.allclose(error, corrected - sent)
    blocks = corrected.double().view(-1, block_size)
    bound = blocks.square().sum() - (blocks.abs().sum(1).square() / layout.lengths).sum()
    assert error.double().square().sum() == pytest.approx(float(bound), rel=1e-4)
    assert error.norm() < corrected.norm()


def test_error_feedback_telescopes() -> None:
    """The sum of what was sent plus the last error is the sum of what went in: nothing is lost for good."""
    layout = layout_of([64] * 5, 64)
    codec = build_codec(layout, 1, 1e-3, backend="cpu")
    error, sent, given_in = torch.zeros(320), torch.zeros(320), torch.zeros(320)
    for step in range(50):
        value = random_buffer(layout, step)
        given_in += value
        sent += round_trip(codec, layout, value, error, None, 1)[2]
    torch.testing.assert_close(sent + error, given_in, rtol=1e-4, atol=1e-4)


def test_one_replica_needs_no_process_group() -> None:
    layout = layout_of([64] * 3, 64)
    value = random_buffer(layout, 0)
    whole, transport = value.clone(), TorchTransport()
    assert DenseExchange(layout, transport).exchange(whole) is Status.OK
    assert torch.equal(whole, value)
    one_bit = OneBitAllReduce(layout, transport)
    result = value.clone()
    one_bit.all_reduce(result)
    torch.testing.assert_close(result + one_bit.worker_error + one_bit.server_error, value)
    assert transport.bytes_sent == 0


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    layout = layout_of([1024] * 300, 1024)
    payloads = []
    for threads in (1, 2, 3):
        codec = build_codec(layout, 2, 1e-3, backend="cpu", num_threads=threads)
        rows = torch.zeros(2, packed_row_bytes(150, 1024), dtype=torch.uint8)
        codec.compress(0, 300, random_buffer(layout, 0), torch.zeros(300 * 1024), None, rows)
        payloads.append(rows)
    assert torch.equal(payloads[0], payloads[1]) and torch.equal(payloads[0], payloads[2])


def test_workers_cover_every_block_once() -> None:
    for threads in (1, 2, 4, 7):
        counts = np.zeros(1000, np.int64)

        def count(first: int, last: int, counts: np.ndarray = counts) -> None:
            counts[first:last] += 1

        BlockWorkers(threads).run(count, 3, 997)
        assert counts[3:997].tolist() == [1] * 994 and not counts[:3].any() and not counts[997:].any()


def test_block_sums_add_halves() -> None:
    values = torch.rand(3, 256)
    torch.testing.assert_close(block_sums(values), values.sum(1))


@pytest.mark.parametrize("block_size", [0, 16, 48, 1000])
def test_block_sizes_are_powers_of_two(block_size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        layout_of([1], block_size)
