"""The Triton codec is bit-identical to the reference: in the interpreter on CPUs, or on a GPU if there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.comm import OneBitAllReduce, TorchTransport
from megatron01.comm.kernels import Codec, RowKernels, build_codec, build_row_kernels
from megatron01.comm.kernels.specification import ReferenceCodec, ReferenceRows, uniform_draws
from megatron01.comm.payload import HEADER_BYTES, BlockLayout, Header, Quantizer, Status, damages
from megatron01.errors import UserError
from tests.triton_setup import DEVICE, need_triton
from tests.unit.comm.buffers import KINDS, bits_of, empty_payload, layout_of, random_active, random_buffer

need_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from megatron01.comm.kernels import gpu  # noqa: E402
from megatron01.comm.kernels.gpu import TritonCodec  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    # raised by NumPy in the interpreter
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning:triton"),
]

CPU = torch.device("cpu")
QUANTIZERS: tuple[Quantizer, ...] = ("sign", "random", "4bit", "8bit")


def all_phases(
    codec: Codec,
    device: torch.device,
    lengths: list[int],
    block_size: int,
    *,
    num_rows: int,
    seed: int,
    share: float,
    kinds: tuple[str, ...],
    key: int,
    first: int,
    cut: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """All outputs of a codec: compressing a bucket in two ranges and at once, decoding a part, reducing a row."""
    layout = layout_of(lengths, block_size)
    value, error = random_buffer(layout, seed, 3, kinds), random_buffer(layout, seed + 1, 3, kinds[::-1])
    value, error = value.to(dtype).to(device), error.to(dtype)
    active, old_error = random_active(layout, seed, share), error.clone()
    error = error.to(device)
    packed = empty_payload(layout, codec, num_rows, active, first)
    packed = replace(packed, rows=packed.rows.to(device), active=active.to(device))
    codec.compress(cut, layout.num_blocks, value, error, packed, key)
    codec.compress(first, cut, value, error, packed, key)
    assert torch.equal(bits_of(error.cpu()), bits_of(old_error))
    decoded = torch.full(((layout.num_blocks - cut) * block_size,), torch.nan, device=device)
    codec.decode(cut, layout.num_blocks, packed, decoded)

    sealed, lost = replace(packed, rows=torch.zeros_like(packed.rows)), torch.zeros_like(value)
    header = Header(torch.full((), 1.0, device=device), 0.5, torch.full((), 7.5, device=device))
    codec.compress(first, layout.num_blocks, value, error, sealed, key, new_error=lost, header=header)
    assert not damages(sealed.rows).any()

    row = min(1, num_rows - 1)  # the second server's, which may be empty
    start = min(first + row * packed.row_blocks, layout.num_blocks)
    count = min(packed.row_blocks, layout.num_blocks - start)
    server_error = random_buffer(layout, seed + 3, 3)[: count * block_size].to(dtype).to(device)
    out = replace(packed, rows=torch.zeros_like(packed.rows))
    codec.reduce(packed, server_error, out, row, key)
    return [tensor.cpu() for tensor in (value, packed.rows, decoded, sealed.rows, lost, server_error, out.rows)]


def whole_rows(
    kernels: RowKernels, device: torch.device, values: torch.Tensor, num_rows: int, length: int, wire: torch.dtype
) -> list[torch.Tensor]:
    """Operations on whole rows of ``length`` elements: two kinds are finished, averaged and read, one damaged."""
    values, status = values.to(device), torch.full((), 1.0, device=device)
    filled = torch.full((num_rows, HEADER_BYTES + length * wire.itemsize), 77, dtype=torch.uint8, device=device)
    other = torch.zeros(num_rows, HEADER_BYTES + 2 * length + 4, dtype=torch.uint8, device=device)
    other.view(torch.int32)[:, 4:] = torch.arange(length // 2 + 1, dtype=torch.int32, device=device) * -123_456_789
    for rows, header, content in (
        (filled, Header(status, 0.25, torch.full((), 7.5, device=device)), values),
        (filled[:1], Header(Status.OK, torch.full((), 2.0, device=device)), values[:length]),
        (other, Header(Status.GIVING_UP), None),
    ):
        kernels.finish_rows(rows, header, content, wire)
        assert not damages(rows).any()
    written = filled.cpu().clone()
    filled[-1, -1] ^= 32
    found = []
    for mean in (
        torch.full_like(values[:length], torch.nan, dtype=torch.bfloat16),
        torch.full_like(values[:length], torch.nan, dtype=torch.float32),
        torch.zeros(2, HEADER_BYTES + length // 2 * wire.itemsize, dtype=torch.uint8, device=device),
        torch.zeros(1, HEADER_BYTES + length * wire.itemsize, dtype=torch.uint8, device=device),
    ):
        header, damage = kernels.mean_rows(filled, mean, wire)
        found += [mean, header[[0, 1, 3]], damage]
        assert mean.dtype != torch.uint8 or not damages(mean).any()
    read = torch.full_like(values, torch.nan)
    damage = kernels.read_rows(filled, read, wire)
    return [written, *(tensor.cpu() for tensor in (other, *found, read, damage))]


@given(
    lengths=st.lists(st.integers(0, 256), min_size=1, max_size=24),
    block_size=st.sampled_from([32, 64, 128, 256]),
    programs=st.sampled_from([32, 256, 1 << 14]),
    num_rows=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    share=st.sampled_from([0.0, 0.3, 0.97, 1.0]),
    quantizer=st.sampled_from(QUANTIZERS),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    key=st.integers(0, 2**64 - 1),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=30, deadline=None)
def test_it_agrees_with_the_reference_to_the_bit(
    lengths: list[int],
    block_size: int,
    programs: int,
    num_rows: int,
    seed: int,
    share: float,
    quantizer: Quantizer,
    kinds: list[str],
    key: int,
    cuts: tuple[float, float],
    dtype: torch.dtype,
) -> None:
    lengths = [min(length, block_size) for length in lengths]
    first, cut = sorted(int(x * len(lengths)) for x in cuts)
    got, wanted = (
        all_phases(
            codec,
            device,
            lengths,
            block_size,
            num_rows=num_rows,
            seed=seed,
            share=share,
            kinds=tuple(kinds),
            key=key,
            first=first,
            cut=cut,
            dtype=dtype,
        )
        for codec, device in (
            (TritonCodec(block_size, quantizer, DEVICE, elements_per_program=programs), DEVICE),
            (ReferenceCodec(block_size, quantizer), CPU),
        )
    )
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(bits_of(ours), bits_of(theirs))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize(
    ("block_size", "dtype"),
    [(32, torch.float32), (512, torch.float32), (1024, torch.bfloat16), (1024, torch.float32), (4096, torch.float32)],
)
def test_block_sizes(block_size: int, dtype: torch.dtype, quantizer: Quantizer) -> None:
    lengths = [block_size] * 4 + [block_size // 3, 1, block_size - 1]
    got, wanted = (
        all_phases(
            codec,
            device,
            lengths,
            block_size,
            num_rows=3,
            seed=7,
            share=0.97,
            kinds=KINDS,
            key=0xFEDCBA9876543210,
            first=0,
            cut=3,
            dtype=dtype,
        )
        for codec, device in (
            (TritonCodec(block_size, quantizer, DEVICE), DEVICE),
            (ReferenceCodec(block_size, quantizer), CPU),
        )
    )
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(bits_of(ours), bits_of(theirs))


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "length", "left_out"), [(1, 64, 0), (3, 192, 64), (5, 8192, 0), (2, 40_000, 39_936)]
)
def test_whole_rows(
    num_rows: int, length: int, left_out: int, dtype: torch.dtype, wire: torch.dtype, backend: str
) -> None:
    values = torch.randn(num_rows * length - left_out, generator=torch.Generator().manual_seed(0)).to(dtype)
    device = DEVICE if backend == "triton" else CPU
    got, wanted = (
        whole_rows(kernels, device, values, num_rows, length, wire)
        for kernels, device in (
            (build_row_kernels(device, backend=backend, num_threads=2), device),
            (ReferenceRows(), CPU),
        )
    )
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(bits_of(ours), bits_of(theirs))
    damaged = got[-1].bool().tolist()
    assert damaged == [False] * (num_rows - 1) + [True]


def test_each_call_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, launch = [], gpu.launch
    monkeypatch.setattr(
        gpu, "launch", lambda kernel, *rest, **named: launches.append(kernel) or launch(kernel, *rest, **named)
    )
    whole_rows(TritonCodec(64, "sign", DEVICE), DEVICE, torch.randn(576), 3, 192, torch.float16)
    lengths, settings = [64] * 6, {"share": 1.0, "kinds": KINDS, "key": 0, "first": 0, "cut": 3, "dtype": torch.float32}
    all_phases(TritonCodec(64, "sign", DEVICE), DEVICE, lengths, 64, num_rows=2, seed=0, **settings)
    assert [kernel.__name__ for kernel in launches] == [
        *["finish_kernel"] * 3,
        *["mean_kernel"] * 4,
        "read_kernel",
        *("compress_kernel", "compress_kernel", "decode_kernel", "compress_kernel", "reduce_kernel"),
    ]


def test_a_scale_that_vanishes_keeps_its_sign() -> None:
    """The mean of one denormal and zeros is 0: the reference decodes it to -0."""
    results = []
    for codec, device in ((TritonCodec(64, "sign", DEVICE), DEVICE), (ReferenceCodec(64, "sign"), CPU)):
        layout = layout_of([64], 64)
        value = torch.zeros(64)
        value[3] = -1e-45
        value, packed = value.to(device), empty_payload(layout, codec, 1)
        packed = replace(packed, rows=packed.rows.to(device), active=packed.active.to(device))
        codec.compress(0, 1, value, torch.zeros_like(value), packed, 0)
        decoded = torch.ones_like(value)
        codec.decode(0, 1, packed, decoded)
        results.append((value.cpu(), packed.rows.cpu(), decoded.cpu()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(bits_of(ours), bits_of(theirs))
    assert not decoded.any() and torch.signbit(decoded[3])


def test_a_value_that_equals_its_draw_is_minus_one() -> None:
    """So that 0, the middle of the range of draws, becomes +1 and -1 equally often."""
    layout, codec = layout_of([64] * 2, 64), TritonCodec(64, "random", DEVICE)
    packed = empty_payload(layout, codec, 1)
    packed = replace(packed, rows=packed.rows.to(DEVICE), active=packed.active.to(DEVICE))
    value = uniform_draws(99, torch.arange(128)).to(DEVICE)
    codec.compress(0, 2, value, torch.zeros_like(value), packed, 99)
    decoded = torch.zeros_like(value)
    codec.decode(0, 2, packed, decoded)
    assert (decoded == -1.0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_block_and_no_other(bad: float) -> None:
    layout = layout_of([64] * 3, 64)
    value = random_buffer(layout, 0).to(DEVICE)
    value[70] = bad
    codec = TritonCodec(64, "sign", DEVICE)
    packed = empty_payload(layout, codec, 1)
    packed = replace(packed, rows=packed.rows.to(DEVICE), active=packed.active.to(DEVICE))
    codec.compress(0, 3, value, torch.zeros_like(value), packed, 0)
    decoded = torch.empty_like(value)
    codec.decode(0, 3, packed, decoded)
    spoilt = torch.tensor([False, True, False]).repeat_interleave(64)
    assert torch.equal(~decoded.isfinite().cpu(), spoilt) and torch.equal(~value.isfinite().cpu(), spoilt)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _draw(elements, key_low, key_high, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, gpu.uniform_draws(key_low, key_high, tl.load(elements + at)))


@pytest.mark.parametrize("key", [0, 0x89ABCDEF, 0xFFFFFFFF_FFFFFFFF, 0x01234567_89ABCDEF])
def test_draws_are_those_of_the_reference_behind_4_billion_elements_too(key: int) -> None:
    elements = torch.cat([torch.arange(32) + start for start in (0, 2**31 - 16, 2**32 - 16, 2**40)])
    out = torch.zeros(128, device=DEVICE)
    words = [gpu.signed_word(word) for word in (key & 0xFFFFFFFF, key >> 32)]
    _draw[(1,)](elements.to(DEVICE), *words, out, COUNT=128)
    assert torch.equal(out.cpu(), uniform_draws(key, elements))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_an_exchange_of_one_replica(quantizer: Quantizer) -> None:
    results = []
    for backend, device in (("triton", DEVICE), ("reference", CPU)):
        layout = BlockLayout(torch.tensor([64, 64, 64, 17], dtype=torch.int32, device=device), 64)
        exchange = OneBitAllReduce(
            layout,
            TorchTransport(),
            active=layout.real_elements(),
            quantizer=quantizer,
            bucket_elements=128,
            backend=backend,
        )
        value = random_buffer(layout_of([64] * 4, 64), 0).to(device)
        exchange.all_reduce(value, key=5)
        results.append([tensor.cpu() for tensor in (value, *exchange.state().values())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(bits_of(ours), bits_of(theirs))


def test_it_needs_a_gpu_and_blocks_that_fit_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="block_size is 65536; backend triton takes at most 32768"):
        TritonCodec(1 << 16, "sign", DEVICE)
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    with pytest.raises(UserError, match="backend triton cannot run on cpu"):
        build_codec(64, "sign", CPU, backend="triton")
    monkeypatch.setattr(gpu, "INTERPRETED", True)
    with pytest.raises(UserError, match=r"TRITON_INTERPRET is set, .* but parameters are on cuda:0"):
        build_codec(64, "sign", torch.device("cuda", 0), backend="triton")
