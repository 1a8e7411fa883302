"""The codec: meaning of its codes, that it is a contraction, and that all backends are bit-identical."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.comm.kernels import Codec, build_codec
from megatron01.comm.kernels.cpu import BlockWorkers
from megatron01.comm.kernels.specification import (
    block_sums,
    decode_packed,
    pack_bits,
    pack_mask,
    uniform_draws,
    unpack_bits,
    unpack_mask,
)
from megatron01.comm.payload import (
    HEADER_BYTES,
    BlockLayout,
    Header,
    Packed,
    PackedFormat,
    Quantizer,
    Status,
    damages,
    headers_of,
)
from tests.unit.comm.buffers import KINDS, bits_of, empty_payload, layout_of, random_active, random_buffer

BACKENDS = ("cpu", "reference")
CPU = torch.device("cpu")
ALL = ("sign", "random", "4bit", "8bit")


def codec_of(block_size: int, quantizer: Quantizer = "sign", backend: str = "cpu", num_threads: int = 1) -> Codec:
    return build_codec(block_size, quantizer, CPU, backend=backend, num_threads=num_threads)


def round_trip(
    codec: Codec,
    layout: BlockLayout,
    value: torch.Tensor,
    error: torch.Tensor,
    active: torch.Tensor | None = None,
    key: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(decoded value + error, new error)"""
    packed = empty_payload(layout, codec, 1, active)
    new_error, decoded = value.clone(), torch.full_like(value, torch.nan)
    codec.compress(0, layout.num_blocks, new_error, error, packed, key)
    codec.decode(0, layout.num_blocks, packed, decoded)
    return decoded, new_error


def test_the_least_significant_bit_comes_first() -> None:
    bits = torch.tensor([[True, False, True, True, False, True, False, True] * 4])
    packed = pack_bits(bits)
    assert packed.tolist() == [[0b10101101] * 4]
    assert torch.equal(unpack_bits(packed), bits)
    assert pack_mask(bits[0]).tolist() == [0b10101101_10101101_10101101_10101101 - (1 << 32)]


def test_real_elements_leave_out_the_padding() -> None:
    lengths = [64, 0, 1, 31, 32, 33, 63]
    active = unpack_mask(layout_of(lengths, 64).real_elements(), 64)
    assert active.tolist() == [[i < length for i in range(64)] for length in lengths]


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_payload(backend: str) -> None:
    """One block of 32 in one row: header, bf16 scale and padding, one little-endian word. Both zeros are +."""
    layout, codec = layout_of([32], 32), codec_of(32, backend=backend)
    value = torch.tensor([1.0, -3.0] * 14 + [0.0, -0.0, 2.0, -2.0])
    packed = empty_payload(layout, codec, 1)
    codec.compress(0, 1, value, torch.zeros(32), packed, 0)
    scale = torch.tensor([(14 * 4.0 + 4.0) / 32], dtype=torch.bfloat16).view(torch.uint8).tolist()
    assert packed.rows[0, HEADER_BYTES:].tolist() == [*scale, 0, 0, 0x55, 0x55, 0x55, 0b01110101]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantizer", ["4bit", "8bit"])
def test_golden_payload_of_levels(backend: str, quantizer: Quantizer) -> None:
    """Intervals [(k / h)^2, ((k + 1) / h)^2) of the largest magnitude, 16, which is exact in bf16."""
    layout, codec = layout_of([32], 32), codec_of(32, quantizer, backend)
    value = torch.zeros(32)
    value[:8] = torch.tensor([16.0, -16.0, 4.0, -3.99, 0.25, -0.2499, 0.0, -0.0])
    packed = empty_payload(layout, codec, 1)
    decoded = torch.full((32,), torch.nan)
    codec.compress(0, 1, value.clone(), torch.zeros(32), packed, 0)
    codec.decode(0, 1, packed, decoded)
    codes = packed.rows[0, HEADER_BYTES + 4 :].tolist()
    half = 8 if quantizer == "4bit" else 128
    levels = [half - 1, half - 1, half // 2, half // 2 - 1, half // 8, half // 8 - 1, 0, 0]
    expected = [level + (half if v < 0 else 0) for level, v in zip(levels, value.tolist(), strict=False)]
    assert packed.rows[0, HEADER_BYTES : HEADER_BYTES + 2].view(torch.bfloat16).item() == 16.0
    assert codes[:8] == expected  # with 4 bits, the upper half of each byte is the code of element i + 16: 0
    sizes = [16.0 * ((level + 0.5) / half) ** 2 for level in levels]
    assert decoded[:8].tolist() == [-s if v < 0 else s for s, v in zip(sizes, value.tolist(), strict=False)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantizer", ["4bit", "8bit"])
def test_the_scale_of_levels_is_rounded_up(backend: str, quantizer: Quantizer) -> None:
    layout, codec = layout_of([64] * 4, 64), codec_of(64, quantizer, backend)
    value = torch.zeros(256)
    value[0], value[65], value[130], value[200] = 1.0 + 2.0**-20, -(2.0**-127), 2.0**-126, -3e-45
    packed = empty_payload(layout, codec, 1)
    error = value.clone()
    codec.compress(0, 4, error, torch.zeros(256), packed, 0)
    scales = packed.rows[0, HEADER_BYTES : HEADER_BYTES + 8].view(torch.bfloat16).tolist()
    assert scales == [1.0 + 2.0**-7, 0.0, 2.0**-126, 0.0]
    assert torch.equal(error[64:128], value[64:128]) and torch.equal(error[192:], value[192:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scale_is_the_mean_magnitude_over_the_active_elements(backend: str) -> None:
    layout = layout_of([5], 32)
    value = torch.zeros(32)
    value[:6] = torch.tensor([2.0, -4.0, 6.0, 100.0, 0.0, 77.0])  # the fourth is inactive, the sixth padding
    active = torch.tensor([0b10111], dtype=torch.int32)
    sent, error = round_trip(codec_of(32, backend=backend), layout, value, torch.zeros(32), active)
    assert sent[:5].tolist() == [3.0, -3.0, 3.0, 0.0, 3.0]
    assert error[:5].tolist() == [-1.0, -1.0, 3.0, 0.0, -3.0]
    assert not sent[5:].any() and not error[5:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantizer", ["sign", "4bit", "8bit"])
def test_blocks_that_are_zero_stay_zero(backend: str, quantizer: Quantizer) -> None:
    layout = layout_of([64, 64], 64)
    value = torch.zeros(128)
    value[64:] = torch.randn(64)
    sent, error = round_trip(codec_of(64, quantizer, backend), layout, value, torch.zeros(128))
    assert not sent[:64].any() and not error[:64].any() and sent[64:].all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("quantizer", ["sign", "4bit", "8bit"])
def test_what_is_not_finite_spoils_its_block_and_no_other(backend: str, bad: float, quantizer: Quantizer) -> None:
    layout = layout_of([64] * 3, 64)
    value = random_buffer(layout, 0)
    value[70] = bad
    sent, error = round_trip(codec_of(64, quantizer, backend), layout, value, torch.zeros(192))
    spoilt = torch.tensor([False, True, False]).repeat_interleave(64)
    assert torch.equal(~sent.isfinite(), spoilt) and torch.equal(~error.isfinite(), spoilt)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad, sign", [(torch.nan, -1.0), (torch.inf, 1.0), (-torch.inf, -1.0)])
def test_random_bits_hide_what_is_not_finite(backend: str, bad: float, sign: float) -> None:
    layout = layout_of([64] * 2, 64)
    value = random_buffer(layout, 0)
    value[70] = bad
    sent, error = round_trip(codec_of(64, "random", backend), layout, value, torch.zeros(128))
    assert sent[70] == sign and bool(sent.isfinite().all())
    assert (~error.isfinite()).nonzero().tolist() == [[70]]


@given(
    lengths=st.lists(st.integers(0, 256), min_size=1, max_size=24),
    block_size=st.sampled_from([32, 64, 128, 256, 512]),
    num_rows=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    share=st.sampled_from([0.0, 0.3, 0.97, 1.0]),
    quantizer=st.sampled_from(ALL),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    key=st.integers(0, 2**64 - 1),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=150, deadline=None)
def test_backends_agree_to_the_bit(
    lengths: list[int],
    block_size: int,
    num_rows: int,
    seed: int,
    share: float,
    quantizer: Quantizer,
    kinds: list[str],
    key: int,
    cuts: tuple[float, float],
    dtype: torch.dtype,
) -> None:
    layout = layout_of([min(length, block_size) for length in lengths], block_size)
    first, cut = sorted(int(x * layout.num_blocks) for x in cuts)  # a bucket that starts at first, in two ranges
    active = random_active(layout, seed, share)
    results = []
    for backend in BACKENDS:
        codec = codec_of(block_size, quantizer, backend)
        value, error = random_buffer(layout, seed, 3, kinds), random_buffer(layout, seed + 1, 3, kinds[::-1])
        value, error = value.to(dtype), error.to(dtype)
        old_value, old_error = value.clone(), error.clone()
        packed = empty_payload(layout, codec, num_rows, active, first)
        codec.compress(cut, layout.num_blocks, value, error, packed, key)
        codec.compress(first, cut, value, error, packed, key)
        assert torch.equal(bits_of(error), bits_of(old_error))
        assert torch.equal(bits_of(value[: first * block_size]), bits_of(old_value[: first * block_size]))
        decoded = torch.full(((layout.num_blocks - cut) * block_size,), torch.nan)
        codec.decode(cut, layout.num_blocks, packed, decoded)

        sealed, lost = replace(packed, rows=torch.zeros_like(packed.rows)), old_value.clone()
        given_in, header = old_value.clone(), Header(Status.OVERFLOW, 0.5, torch.tensor(7.5))
        codec.compress(first, layout.num_blocks, given_in, error, sealed, key, new_error=lost, header=header)
        assert torch.equal(bits_of(given_in), bits_of(old_value)) and torch.equal(bits_of(lost), bits_of(value))
        assert (
            not damages(sealed.rows).any()
            and headers_of(sealed.rows)[:, [0, 1, 3]].tolist() == [[1, 0.5, 7.5]] * num_rows
        )
        assert torch.equal(sealed.rows[:, HEADER_BYTES:], packed.rows[:, HEADER_BYTES:])

        row = min(1, num_rows - 1)  # the second server's, which may be empty
        start = min(first + row * packed.row_blocks, layout.num_blocks)
        count = min(packed.row_blocks, layout.num_blocks - start)
        server_error = random_buffer(layout, seed + 3, 3)[: count * block_size].to(dtype, copy=True)
        out = replace(packed, rows=torch.zeros_like(packed.rows))
        codec.reduce(packed, server_error, out, row, key)
        results.append((value, decoded, server_error, packed.rows, out.rows))
    for compiled, plain in zip(*results, strict=True):
        assert torch.equal(bits_of(compiled), bits_of(plain))


@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 4),
    block_size=st.sampled_from([32, 128, 1024]),
    share=st.sampled_from([0.1, 0.9, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_signs_are_a_contraction_whatever_the_scales(seed: int, spread: float, block_size: int, share: float) -> None:
    """|a - C(a)|^2 = |a|^2 - sum over blocks of |a|_1^2 / active elements, so the error is below |a| in each block."""
    layout = layout_of([block_size] * 7 + [block_size // 3], block_size)
    active = random_active(layout, seed, share)
    mask = unpack_mask(active, block_size)
    value, error = random_buffer(layout, seed, spread), random_buffer(layout, seed + 1, spread)
    sent, new_error = round_trip(codec_of(block_size), layout, value, error, active)
    corrected = ((value + error).view(-1, block_size) * mask).double()
    sent, new_error = sent.view(-1, block_size), new_error.view(-1, block_size)
    assert torch.allclose(new_error.double(), corrected - sent, rtol=1e-5, atol=0)
    bound = corrected.square().sum(1) - corrected.abs().sum(1).square() / mask.sum(1).clamp(min=1)
    rounding = 2.0**-16 * corrected.square().sum(1)  # of the scale to bf16, squared
    assert bool(((new_error.double().square().sum(1) - bound).abs() <= 1e-4 * bound + rounding).all())
    norms = corrected.norm(dim=1)
    assert bool((new_error.norm(dim=1) <= norms).all()) and bool(
        (new_error.norm(dim=1)[norms > 0] < norms[norms > 0]).all()
    )


def test_draws_are_uniform_and_differ_by_key_and_element() -> None:
    elements = torch.arange(1 << 16)
    drawn = uniform_draws(12345, elements).double()
    assert drawn.min() >= -1.0 and drawn.max() < 1.0
    # mean and variance of a uniform distribution on [-1, 1), within five standard deviations
    assert abs(float(drawn.mean())) < 5 * (1 / 3) ** 0.5 / 256
    assert abs(float(drawn.square().mean()) - 1 / 3) < 5 * (4 / 45) ** 0.5 / 256
    counts = torch.histc(drawn, 64, -1, 1)
    assert float(((counts - 1024) ** 2 / 1024).sum()) < 63 + 5 * (2 * 63) ** 0.5
    for other in (
        uniform_draws(12346, elements),
        uniform_draws(12345 + (1 << 32), elements),
        uniform_draws(12345, elements + (1 << 16)),
        uniform_draws(12345, elements + (1 << 32)),
    ):
        assert abs(float((drawn * other).mean())) < 5 / 3 / 256
    assert abs(float((drawn[1:] * drawn[:-1]).mean())) < 5 / 3 / 256


def test_random_bits_are_unbiased() -> None:
    layout, codec = layout_of([1024] * 2, 1024), codec_of(1024, "random")
    value = torch.linspace(-1.5, 1.5, 2048)
    total, count = torch.zeros(2048), 400
    for key in range(count):
        sent, error = round_trip(codec, layout, value, torch.zeros(2048), key=key << 17)
        assert torch.equal(error, value - sent) and torch.equal(sent.abs(), torch.ones(2048))
        total += sent
    expected = value.clamp(-1, 1)
    deviation = ((1 - expected.square()) / count).sqrt()
    assert bool(((total / count - expected).abs() <= 5 * deviation).all())
    assert bool((total / count == expected)[value.abs() >= 1].all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_is_always_plus_and_minus_one_always_minus(backend: str) -> None:
    layout = layout_of([1024] * 64, 1024)
    value = torch.tensor([1.0, -1.0]).repeat(layout.num_elements // 2)
    sent, error = round_trip(codec_of(1024, "random", backend), layout, value, torch.zeros_like(value), key=99)
    assert torch.equal(sent, value) and not error.any()


@pytest.mark.parametrize("quantizer", ALL)
def test_error_feedback_telescopes(quantizer: Quantizer) -> None:
    """Error feedback: the sum of what was sent plus the last error is the sum of the inputs."""
    layout, codec = layout_of([64] * 5, 64), codec_of(64, quantizer)
    error, sent, given_in = torch.zeros(320), torch.zeros(320), torch.zeros(320)
    for step in range(50):
        value = random_buffer(layout, step).clamp(-1, 1)
        given_in += value
        decoded, error = round_trip(codec, layout, value, error, key=step)
        sent += decoded
    torch.testing.assert_close(sent + error, given_in, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantizer", ALL)
def test_the_number_of_threads_does_not_change_a_bit(quantizer: Quantizer) -> None:
    layout = layout_of([1024] * 300, 1024)
    results = []
    for threads in (1, 2, 3):
        codec = codec_of(1024, quantizer, num_threads=threads)
        packed = empty_payload(layout, codec, 2)
        value, server_error = random_buffer(layout, 0), random_buffer(layout, 1)[: 150 * 1024].clone()
        codec.compress(0, 300, value, torch.zeros(300 * 1024), packed, 7)
        out, decoded = replace(packed, rows=torch.zeros_like(packed.rows)), torch.zeros_like(value)
        codec.reduce(packed, server_error, out, 1, 7)
        codec.decode(0, 300, packed, decoded)
        results.append((packed.rows, value, server_error, out.rows, decoded))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("quantizer", ALL)
def test_a_part_of_a_buffer_reads_like_the_whole(quantizer: Quantizer) -> None:
    layout, codec = layout_of([64] * 10, 64), codec_of(64, quantizer)
    packed = empty_payload(layout, codec, 3)
    codec.compress(0, 10, random_buffer(layout, 0), torch.zeros(640), packed, 3)
    whole = decode_packed(packed, 0, 10)
    assert torch.equal(decode_packed(packed, 3, 7), whole[3:7])
    shifted = Packed(packed.rows[1:], packed.row_blocks, packed.row_blocks, packed.format, packed.active)
    assert torch.equal(decode_packed(shifted, packed.row_blocks, 10), whole[packed.row_blocks :])


@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 4),
    block_size=st.sampled_from([32, 128, 1024]),
    quantizer=st.sampled_from(["4bit", "8bit"]),
)
@settings(max_examples=40, deadline=None)
def test_levels_lose_less_than_half_an_interval(
    seed: int, spread: float, block_size: int, quantizer: Quantizer
) -> None:
    """An interval from (k/h)^2 to ((k+1)/h)^2 of the scale s decodes to ((k+0.5)/h)^2, at most (k + 0.75) s/h^2 off."""
    layout = layout_of([block_size] * 7 + [block_size // 3], block_size)
    value, error = random_buffer(layout, seed, spread), random_buffer(layout, seed + 1, spread)
    mask = unpack_mask(layout.real_elements(), block_size)
    sent, new_error = round_trip(codec_of(block_size, quantizer), layout, value, error)
    corrected = (value + error).view(-1, block_size) * mask
    scale = corrected.abs().amax(1, keepdim=True) * (1 + 2.0**-7)
    half = 8 if quantizer == "4bit" else 128
    level = (sent.view(-1, block_size).abs() / scale).sqrt() * half
    lost = new_error.view(-1, block_size).abs()
    assert bool((lost <= (level + 0.3) * scale / half**2 * (1 + 1e-3)).all())
    norms = corrected.norm(dim=1)
    share = {"4bit": 0.2, "8bit": 0.015}[quantizer]
    assert bool((new_error.view(-1, block_size).norm(dim=1) <= share * norms).all())


@given(st.integers(0, 50), st.sampled_from([32, 64, 1024]), st.sampled_from(ALL))
def test_rows_are_whole_words(row_blocks: int, block_size: int, quantizer: Quantizer) -> None:
    assert PackedFormat.of(quantizer, block_size).row_bytes(row_blocks) % 4 == 0


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


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="quantizer is 'ternary'; expected sign, random, 4bit, 8bit"):
        build_codec(64, "ternary", CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend is 'fpga'"):
        build_codec(64, "sign", CPU, backend="fpga")
