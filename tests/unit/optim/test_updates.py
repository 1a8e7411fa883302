"""The compiled updates give the results of the reference: on CPUs, and by Triton in its interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.comm import Packed, Quantizer, Status
from megatron01.comm.kernels.specification import ReferenceCodec, decode_packed
from megatron01.comm.payload import PackedBlocks, PackedFormat
from megatron01.errors import UserError
from megatron01.optim import SGDM, BinSGDM, LRSchedule, OneBitAdam, SoftSignSGD, ZeroOneAdam
from megatron01.optim.flat_parameters import FlatParameters, NamedParameter, mark_active
from megatron01.optim.gradients import add_up
from megatron01.optim.kernels.cpu import CPUKernels
from megatron01.optim.kernels.specification import TorchKernels
from megatron01.optim.local_update import (
    ACCUMULATE,
    LOCAL,
    SYNCHRONIZE,
    WRITE_WEIGHTS,
    Coefficients,
    Kernels,
    Phase,
    Rule,
    Slices,
    square_sums,
)
from megatron01.optim.loss_scaler import overflow_status
from tests.triton_setup import DEVICE, has_triton
from tests.unit.optim.updates import BF16, FP16, FP32, MIXED, PHASES, Problem, assert_same, coefficients, problem

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning:triton")  # of the interpreter

CPU = torch.device("cpu")


def triton(device: torch.device, **options: Any) -> Kernels:
    from megatron01.optim.kernels.gpu import TritonKernels

    return TritonKernels(device, **options)


BACKENDS = [
    pytest.param((CPU, lambda _: CPUKernels(2)), id="cpu"),
    pytest.param(
        (DEVICE, triton),
        id="triton",
        marks=[pytest.mark.triton, pytest.mark.skipif(not has_triton(), reason="no recent Triton is installed")],
    ),
]
Backend = tuple[torch.device, Callable[[torch.device], Kernels]]


def both(backend: Backend, use: Callable[[Problem], list[torch.Tensor]], **options: Any) -> None:
    """Check that ``use`` returns, and leaves in ``problem(**options)``, the same with the back end as the reference."""
    results = []
    for device, kernels in (backend, (CPU, TorchKernels)):
        given_problem = problem(device, kernels, **options)
        extra = use(given_problem)
        results.append([*(tensor.cpu() for tensor in extra), *given_problem.tensors()])
    assert_same(*results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("phase", "rule", "common", "state_dtype"),
    [
        (phase, rule, common, state_dtype)
        for phase in PHASES
        for rule in Rule
        if phase != "synchronize with gradients" or rule is Rule.SOFT_SIGN  # other exchanges replace the gradient
        for common in ([False, True] if rule is Rule.ADAPTIVE else [False])
        for state_dtype in ([FP32] if rule is Rule.SOFT_SIGN else [FP32, BF16])
    ],
)
@pytest.mark.parametrize("dtypes", [(FP32,), MIXED])
def test_every_phase_of_every_rule(
    backend: Backend, phase: str, rule: Rule, common: bool, state_dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> None:
    what = PHASES[phase]

    def use(given_problem: Problem) -> list[torch.Tensor]:
        last, result = given_problem.num_blocks, None
        if what.synchronize and not what.fresh and (not what.gradient or rule is Rule.SOFT_SIGN) and not what.exchange:
            result = given_problem.random(last)
        for refresh in (True, False):
            numbers = coefficients(rule, refresh=refresh, never_falls=refresh, common=common)
            given_problem.local.run(what, numbers, (1, last), result)
        return []

    both(backend, use, block_size=64, state_dtype=state_dtype, dtypes=dtypes)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("multiplier", [0.37, np.nan])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("phase", [LOCAL, ACCUMULATE])
@pytest.mark.parametrize(("rule", "common"), [(Rule.ADAPTIVE, False), (Rule.ADAPTIVE, True), (Rule.PLAIN, False)])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_a_multiplier_that_is_known_on_the_device_only(
    backend: Backend, rule: Rule, common: bool, phase: Phase, fresh: bool, multiplier: float, state_dtype: torch.dtype
) -> None:
    def use(given_problem: Problem) -> list[torch.Tensor]:
        deferred = torch.tensor(multiplier, dtype=torch.float32, device=given_problem.flat.device)
        numbers = replace(coefficients(rule, refresh=False, common=common), multiplier=deferred)
        given_problem.local.run(replace(phase, fresh=fresh), numbers)
        return []

    both(backend, use, block_size=64, state_dtype=state_dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    rule=st.sampled_from(list(Rule)),
    common=st.booleans(),
    phase=st.sampled_from([name for name in PHASES if name != "synchronize with gradients"]),
    block_size=st.sampled_from([32, 64, 128, 256]),
    sizes=st.lists(st.integers(1, 600), min_size=2, max_size=7),
    dtypes=st.sampled_from([(FP32,), (BF16,), (FP16,), MIXED, (BF16, FP32)]),
    seed=st.integers(0, 2**31),
    sums=st.booleans(),
    state_dtype=st.sampled_from([FP32, BF16]),
    exchanged=st.booleans(),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=30)
def test_any_layout(
    backend: Backend,
    rule: Rule,
    common: bool,
    phase: str,
    block_size: int,
    sizes: list[int],
    dtypes: tuple[torch.dtype, ...],
    seed: int,
    sums: bool,
    state_dtype: torch.dtype,
    exchanged: bool,
    cuts: tuple[float, float],
) -> None:
    what = PHASES[phase]

    def use(given_problem: Problem) -> list[torch.Tensor]:
        first, last = sorted(int(cut * given_problem.num_blocks) for cut in cuts)
        result = None
        if what.synchronize and not what.gradient and not what.exchange and exchanged:
            result = given_problem.random(given_problem.num_blocks)
        numbers = coefficients(rule, refresh=True, never_falls=True, common=common)
        given_problem.local.run(what, numbers, (first, last), result)
        return []

    both(
        backend,
        use,
        block_size=block_size,
        sizes=tuple(sizes),
        dtypes=dtypes,
        seed=seed,
        sums=sums,
        state_dtype=FP32 if rule is Rule.SOFT_SIGN else state_dtype,
    )


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param((CPU, TorchKernels), id="reference")])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("quantizer", ["sign", "random", "4bit"])
@pytest.mark.parametrize(("block_size", "dtypes"), [(32, MIXED), (64, (BF16,)), (1 << 16, (FP32,))])
def test_a_packed_result_moves_the_weights_as_its_values_do(
    backend: Backend, block_size: int, dtypes: tuple[torch.dtype, ...], quantizer: Quantizer, rule: Rule
) -> None:
    device, kernels = backend
    if device.type == "cpu" and kernels is triton and block_size > 1 << 15:
        block_size = 1 << 15  # the longest that Triton's codec takes
    outcomes = []
    for is_packed in (True, False):
        given_problem = problem(device, kernels, block_size, dtypes=dtypes)
        last = given_problem.num_blocks
        form, row_blocks = PackedFormat.of(quantizer, block_size), -(-(last - 1) // 3)
        rows = torch.zeros(3, form.row_bytes(row_blocks), dtype=torch.uint8)
        packed = Packed(rows, row_blocks, 1, form, given_problem.active)
        values = given_problem.random(last).cpu()
        ReferenceCodec(block_size, quantizer).compress(1, last, values, torch.zeros_like(values), packed, 5)
        result: torch.Tensor | Packed = F.pad(decode_packed(packed, 2, last).view(-1), (2 * block_size, 0)).to(device)
        if is_packed:
            result = replace(packed, rows=rows.to(device), active=packed.active.to(device))
        given_problem.local.run(SYNCHRONIZE, coefficients(rule, refresh=False), (2, last), result)
        outcomes.append(given_problem.tensors())
    for ours, theirs in zip(*outcomes, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param((CPU, TorchKernels), id="reference")])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("phase", ["local", "accumulate", "synchronize alone from 0", "synchronize with gradients"])
@pytest.mark.parametrize(("block_size", "dtypes"), [(32, MIXED), (64, (BF16,)), (1 << 15, (FP32,))])
def test_a_packed_mean_is_used_as_gradients_of_its_values_are(
    backend: Backend, block_size: int, dtypes: tuple[torch.dtype, ...], phase: str, rule: Rule
) -> None:
    device, kernels = backend
    outcomes = []
    for is_packed in (True, False):
        given_problem = problem(device, kernels, block_size, dtypes=dtypes, sums=True)
        flat, last = given_problem.flat, given_problem.num_blocks
        form, numbers = PackedFormat.of("4bit", block_size), coefficients(rule, refresh=True)
        values, buckets = given_problem.random(last).cpu(), []
        for first, end in ((0, last // 2), (last // 2, last)):
            row_blocks = -(-(end - first) // 3)
            rows = torch.zeros(3, form.row_bytes(row_blocks), dtype=torch.uint8)
            packed = Packed(rows, row_blocks, first, form, given_problem.active)
            ReferenceCodec(block_size, "4bit").compress(first, end, values, torch.zeros_like(values), packed, 5)
            decoded = decode_packed(packed, first, end).view(-1).to(device)
            pieces = flat.gradients(first, end)
            for piece, part in zip(pieces, decoded.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(part)
            packed = replace(packed, rows=rows.to(device), active=packed.active.to(device))
            buckets.append(PackedBlocks(packed, first, end))
        if is_packed:
            numbers = replace(numbers, mean=buckets)
            for gradients in flat.gradients(0, last):
                gradients.fill_(np.nan)
            sums = [given_problem.local.kernels.sum_squares(bucket, block_size) for bucket in buckets]
        else:
            sums = [square_sums(flat, given_problem.local.kernels, 0, last)]
        step = given_problem.random(last) if rule is Rule.SOFT_SIGN else None
        given_problem.local.run(PHASES[phase], numbers, (1, last), step)
        outcomes.append([torch.cat(sums).cpu(), *given_problem.tensors()])
    for ours, theirs in zip(*outcomes, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtypes", [(FP32,), (BF16,), (FP16,), MIXED])
@pytest.mark.parametrize("block_size", [32, 64, 128, 4096])
def test_sums_of_squares(backend: Backend, block_size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    def use(given_problem: Problem) -> list[torch.Tensor]:
        flat, kernels = given_problem.flat, given_problem.local.kernels
        return [square_sums(flat, kernels, 0, given_problem.num_blocks), square_sums(flat, kernels, 1, 3)]

    both(backend, use, block_size=block_size, dtypes=dtypes)


@pytest.mark.parametrize("dtypes", [(FP32,), MIXED])
def test_copies_to_and_from_flat_buffers(dtypes: tuple[torch.dtype, ...]) -> None:
    given_problem = problem(CPU, TorchKernels, 64, dtypes=dtypes)
    flat, last = given_problem.flat, given_problem.num_blocks
    for dtype in (FP32, BF16, FP16):
        out = torch.full((last * 64,), 7.0, dtype=dtype)
        flat.read_gradients(1, last, out)
        whole = torch.zeros(last * 64)
        for parameter, view in flat.named_views(whole):
            if parameter.tensor.grad is not None:
                view.copy_(parameter.tensor.grad)
        assert torch.equal(out[64:], whole[64:].to(dtype)) and bool((out[:64] == 7.0).all())
    values = given_problem.random(last) * 1e3
    flat.write_weights(values)
    for parameter, view in flat.named_views(values):
        assert torch.equal(parameter.tensor.detach(), view.to(parameter.tensor.dtype))
    read = torch.full((last * 64,), 7.0)
    flat.read_weights(read)
    for parameter, view in flat.named_views(read):
        assert torch.equal(view, parameter.tensor.detach().float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_elements_are_active_once_a_refresh_has_seen_them(backend: Backend, dtype: torch.dtype) -> None:
    device = backend[0]
    v = torch.tensor([0.0, 1e-30, 0.0, 4.0]).repeat(24).to(device, dtype)
    candidates = torch.tensor([-1, 0b0110, 0], dtype=torch.int32, device=device)
    active = torch.full_like(candidates, 7)
    mark_active(active, candidates, v, 64)  # two words at a time, then the last one
    assert active.tolist() == [0xAAAAAAAA - (1 << 32), 0b0010, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_to_16_bits_is_to_nearest_even_and_keeps_what_is_not_finite(backend: Backend) -> None:
    near_ties = torch.arange(1 << 16, dtype=torch.int64).repeat_interleave(3) << 16
    near_ties += torch.tensor([0x7FFF, 0x8000, 0x8001]).repeat(1 << 16)
    values = near_ties[:: 1 << 3].to(torch.int32).view(torch.float32)
    values = torch.cat([values, torch.tensor([torch.inf, -torch.inf, 65519.0, 65520.0, 1e-8, 3e-8, 1e-40])])
    for dtype in (BF16, FP16):
        device, kernels = backend
        parameter = torch.nn.Parameter(torch.zeros(values.numel(), dtype=dtype, device=device))
        flat = FlatParameters([NamedParameter("0", parameter, 0)], 1024)
        x = torch.zeros(flat.blocks.num_elements)
        x[: values.numel()] = values
        x = x.to(device)
        zeros = torch.zeros_like(x)
        numbers = replace_numbers(coefficients(Rule.PLAIN, refresh=False))
        weights = flat.weight_buffers[0]
        kernels(device).update(WRITE_WEIGHTS, numbers, Slices(x, zeros[:0], zeros, zeros, weights, None))
        torch.testing.assert_close(parameter.detach().cpu(), values.to(dtype), rtol=0, atol=0, equal_nan=True)


def replace_numbers(numbers: Coefficients) -> Any:
    return numbers.of(-1, WRITE_WEIGHTS)._replace(step_size=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_gradients_that_are_not_finite_are_noticed(backend: Backend, bad: float) -> None:
    given_problem = problem(*backend, 64)
    flat, last = given_problem.flat, given_problem.num_blocks
    index = next(i for i, p in enumerate(flat.parameters) if p.position == 2)
    flat.gradient(index)[70] = bad
    sums = square_sums(flat, given_problem.local.kernels, 0, last)
    others = torch.arange(last, device=sums.device) != int(flat.first_block[index]) + 1
    assert overflow_status(sums.sum()) == Status.OVERFLOW and overflow_status(sums[others].sum()) == Status.OK


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", [Rule.ADAPTIVE, Rule.PLAIN])
def test_weights_follow_from_what_a_step_has_written(backend: Backend, rule: Rule) -> None:
    given_problem = problem(*backend, 64, state_dtype=BF16)
    numbers = coefficients(rule, refresh=True)
    before = [tensor.clone() for tensor in given_problem.tensors()]
    given_problem.local.run(LOCAL, numbers)
    after = [tensor.clone() for tensor in given_problem.tensors()]
    given_problem.local.run(WRITE_WEIGHTS, replace(numbers, variance_decay=None))
    assert all(torch.equal(a, b) for a, b in zip(given_problem.tensors(), after, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_gradients_may_move_from_step_to_step() -> None:
    given_problem = problem(CPU, TorchKernels, 64, dtypes=(FP32,))
    flat, sums = given_problem.flat, []
    for factor in (1.0, 2.0):
        for parameter in flat.parameters:
            parameter.tensor.main_grad = torch.full_like(parameter.tensor, factor)  # type: ignore[attr-defined]
        flat.gather_gradients()
        sums.append(float(add_up(square_sums(flat, given_problem.local.kernels, 0, given_problem.num_blocks))))
    assert sums == [flat.num_parameters, 4.0 * flat.num_parameters]


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "zero_one_adam": ZeroOneAdam,
    "zero_one_adam, bf16": lambda *args, **options: ZeroOneAdam(*args, state_dtype=BF16, **options),
    "one_bit_adam": lambda *args, **options: OneBitAdam(*args, freeze_step=4, **options),
    "bin_sgdm": BinSGDM,
    "soft_sign_max": lambda *args, **options: SoftSignSGD(*args, soft_sign_max=True, **options),
    "sgdm": SGDM,
}


def run(
    new: Callable[..., Any], device: torch.device, backend: str, steps: int
) -> tuple[list[torch.Tensor], list[Any]]:
    """State, weights and reports of an optimizer after some steps."""
    generator = torch.Generator().manual_seed(0)

    def parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(*shape, generator=generator).to(dtype).to(device))

    named = [
        ("a", parameter(37, 5, dtype=FP32)),
        ("b", parameter(70, dtype=BF16)),
        ("c", parameter(9, 9, dtype=FP16)),
    ]
    optimizer = new(
        named,
        LRSchedule(style="cosine", peak_lr=1e-2, warmup_steps=2, total_steps=steps),
        backend=backend,
        block_size=64,
        max_grad_norm=1.0,
        weight_decay=0.1,
    )
    reports = []
    for step in range(steps):
        for _, tensor in named:
            noise = torch.randn(tensor.shape, generator=generator).to(device)
            tensor.grad = (noise + tensor.detach().float()).to(tensor.dtype)
        if step == 3:
            named[1][1].grad = None
        if step == 5:
            named[2][1].grad.fill_(torch.inf)  # type: ignore[union-attr]
        if step == 6:
            named[0][1].requires_grad_(False)
        optimizer.step()
        reports.append(optimizer.last_step)
    state = {**optimizer.replicated_state(), **optimizer.replica_state()}
    return [tensor.detach().cpu() for tensor in (*state.values(), *(tensor for _, tensor in named))], reports


@pytest.mark.parametrize("backend", [pytest.param("cpu"), pytest.param("triton", marks=BACKENDS[1].marks)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_runs(name: str, backend: str) -> None:
    """Several steps of one replica: with a missing gradient, an overflow, and a frozen parameter."""
    device = DEVICE if backend == "triton" else CPU
    ours, our_reports = run(OPTIMIZERS[name], device, backend, 9)
    theirs, their_reports = run(OPTIMIZERS[name], CPU, "reference", 9)
    for our_report, their_report in zip(our_reports, their_reports, strict=True):
        assert our_report.grad_norm == pytest.approx(their_report.grad_norm, rel=1e-6)
        assert replace(our_report, norm=0.0, called_off=False) == replace(their_report, norm=0.0, called_off=False)
        assert our_report.kind == their_report.kind
    for got, wanted in zip(ours, theirs, strict=True):
        unit = {FP16: 2e-3, BF16: 2e-2}.get(got.dtype, 1e-4 if "bf16" not in name else 2e-2)
        torch.testing.assert_close(got, wanted, rtol=unit, atol=unit)


@pytest.mark.skipif(not has_triton(), reason="no recent Triton is installed")
@pytest.mark.triton
def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron01.comm.kernels import gpu

    monkeypatch.setattr(gpu, "INTERPRETED", False)
    with pytest.raises(UserError, match="backend triton cannot run on cpu"):
        ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], 0.1, backend="triton")
