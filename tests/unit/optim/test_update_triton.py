"""The Triton update gives the bits of the reference: in the interpreter on CPUs, or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.errors import UserError
from megatron01.optim import SGDM, BinSGDM, LRSchedule, OneBitAdam, SoftSignSGD, ZeroOneAdam
from megatron01.optim.flat_parameters import FlatLayout, Gradients, NamedParameter
from megatron01.optim.grad_scaling import add_up, all_finite
from megatron01.optim.kernels.specification import ReferenceBackend
from megatron01.optim.local_update import LOCAL, Rule, UpdateBackend
from tests.triton_setup import DEVICE, need_triton
from tests.unit.comm.buffers import bits_of
from tests.unit.optim.updates import BF16, FP16, FP32, MIXED, PHASES, Problem, coefficients, problem

need_triton()

from megatron01.comm.kernels import gpu  # noqa: E402
from megatron01.optim.kernels.gpu import TritonBackend  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning:triton"),  # of NumPy, in the interpreter
]

CPU = torch.device("cpu")


def both(use: Callable[[UpdateBackend, Problem, torch.device], list[torch.Tensor]], **options: Any) -> None:
    """Check that ``use`` gives, and leaves in a ``problem(**options)``, the same bits with both backends."""
    programs = options.pop("programs", 1 << 14)
    results = []
    for device in (DEVICE, CPU):
        given_problem = problem(device, **options)
        layout = given_problem.layout
        is_triton = not results
        backend = TritonBackend(layout, elements_per_program=programs) if is_triton else ReferenceBackend(layout)
        extra = use(backend, given_problem, device)
        results.append([*(tensor.cpu() for tensor in extra), *given_problem.tensors()])
    for index, (ours, theirs) in enumerate(zip(*results, strict=True)):
        assert torch.equal(bits_of(ours), bits_of(theirs)), index


@pytest.mark.parametrize(
    ("phase", "rule"),
    [
        (phase, rule)
        for phase in PHASES
        for rule in Rule
        if phase != "synchronize with gradients" or rule is Rule.SOFT_SIGN  # the others' exchange replaces the gradient
    ],
)
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_every_phase_of_every_rule(phase: str, rule: Rule, state_dtype: torch.dtype) -> None:
    if rule is Rule.SOFT_SIGN:
        state_dtype = FP32
    what = PHASES[phase]

    def use(backend: UpdateBackend, given_problem: Problem, device: torch.device) -> list[torch.Tensor]:
        last, result = given_problem.num_blocks, None
        if what.synchronize and not what.fresh:
            result = given_problem.result(device, scaled=rule is not Rule.SOFT_SIGN, first=1, num_rows=2)
        for refresh in (True, False):
            numbers = coefficients(rule, refresh=refresh, never_falls=refresh)
            backend.update(1, last, what, given_problem.state, numbers, given_problem.gradients, result)
        return []

    both(use, block_size=64, state_dtype=state_dtype)


@pytest.mark.parametrize("multiplier", [0.37, np.nan])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("rule", [Rule.ADAPTIVE, Rule.PLAIN])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_a_multiplier_that_is_known_on_the_device_only(
    rule: Rule, fresh: bool, multiplier: float, state_dtype: torch.dtype
) -> None:
    def use(backend: UpdateBackend, given_problem: Problem, device: torch.device) -> list[torch.Tensor]:
        late = torch.tensor(multiplier, dtype=torch.float32, device=device)
        numbers = replace(coefficients(rule, refresh=False), multiplier=late)
        phase = replace(LOCAL, fresh=fresh)
        backend.update(0, given_problem.num_blocks, phase, given_problem.state, numbers, given_problem.gradients)
        return []

    both(use, block_size=64, state_dtype=state_dtype)


@given(
    rule=st.sampled_from(list(Rule)),
    phase=st.sampled_from([name for name in PHASES if name != "synchronize with gradients"]),
    block_size=st.sampled_from([32, 64, 128, 256]),
    programs=st.sampled_from([32, 256, 1 << 14]),
    sizes=st.lists(st.integers(1, 600), min_size=2, max_size=7),
    dtypes=st.sampled_from([(FP32,), (BF16,), (FP16,), MIXED, (BF16, FP32)]),
    seed=st.integers(0, 2**31),
    offset=st.sampled_from([0, 1, 3]),
    state_dtype=st.sampled_from([FP32, BF16]),
    exchanged=st.booleans(),
    scaled=st.booleans(),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=30, deadline=None)
def test_any_layout(
    rule: Rule,
    phase: str,
    block_size: int,
    programs: int,
    sizes: list[int],
    dtypes: tuple[torch.dtype, ...],
    seed: int,
    offset: int,
    state_dtype: torch.dtype,
    exchanged: bool,
    scaled: bool,
    cuts: tuple[float, float],
) -> None:
    what = PHASES[phase]

    def use(backend: UpdateBackend, given_problem: Problem, device: torch.device) -> list[torch.Tensor]:
        first, last = sorted(int(cut * given_problem.num_blocks) for cut in cuts)
        result = None
        if what.synchronize and not what.gradient and exchanged:
            result = given_problem.result(device, scaled=scaled, first=first, num_rows=2)
        numbers = coefficients(rule, refresh=True, never_falls=True)
        backend.update(first, last, what, given_problem.state, numbers, given_problem.gradients, result)
        return []

    both(
        use,
        block_size=block_size,
        sizes=tuple(sizes),
        dtypes=dtypes,
        seed=seed,
        offset=offset,
        state_dtype=FP32 if rule is Rule.SOFT_SIGN else state_dtype,
        programs=programs,
    )


@pytest.mark.parametrize("dtypes", [(FP32,), (BF16,), (FP16,), MIXED])
@pytest.mark.parametrize("block_size", [32, 64, 128, 4096])
def test_copies_and_sums(block_size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    def use(backend: UpdateBackend, given_problem: Problem, device: torch.device) -> list[torch.Tensor]:
        gradients, last = given_problem.gradients, given_problem.num_blocks
        written = []
        backend.sum_squares(gradients, 2, last)
        backend.sum_squares(gradients, 0, 2)
        written.append(backend.square_sums.double())
        for dtype in (FP32, BF16, FP16):
            out = torch.full(((last - 1) * block_size,), 7.0, dtype=dtype, device=device)
            backend.read_gradients(gradients, 1, last, out)
            written.append(out)
        weights = torch.full((last * block_size,), 7.0, device=device)
        backend.read_weights(weights)
        for first, dtype in ((0, FP32), (1, BF16), (2, FP16)):
            backend.write_gradients(gradients, first, first + 1, given_problem.random(1).to(dtype).to(device))
        backend.write_weights(given_problem.random(last).to(device) * 1e3)
        return [*written, weights]

    both(use, block_size=block_size, dtypes=dtypes)


@pytest.mark.parametrize("threshold", [1e-3, 0.3, 1.0])
@pytest.mark.parametrize("block_size", [32, 1024])
def test_dead_elements(block_size: int, threshold: float) -> None:
    def use(backend: UpdateBackend, given_problem: Problem, device: torch.device) -> list[torch.Tensor]:
        live, v = torch.zeros_like(given_problem.live, device=device), given_problem.state.v
        # roots that are all equal, and so the mean; and all 0
        v[:block_size], v[2 * block_size : 3 * block_size] = 4.0, 0.0
        # what is behind the end of a parameter has no second moment
        backend.write_weights(v)
        backend.read_weights(v)
        backend.mark_live(v, threshold, given_problem.live.to(device), live)
        return [live]

    both(use, block_size=block_size, dtypes=(FP32,))


def test_rounding_to_16_bits_is_to_nearest_even_and_keeps_what_is_not_finite() -> None:
    near_ties = torch.arange(1 << 16, dtype=torch.int64).repeat_interleave(3) << 16
    near_ties += torch.tensor([0x7FFF, 0x8000, 0x8001]).repeat(1 << 16)
    values = near_ties[:: 1 << 3].to(torch.int32).view(torch.float32)
    values = torch.cat([values, torch.tensor([torch.inf, -torch.inf, 65519.0, 65520.0, 1e-8, 3e-8, 1e-40])])
    for dtype in (BF16, FP16):
        parameter = torch.nn.Parameter(torch.zeros(values.numel(), dtype=dtype, device=DEVICE))
        layout = FlatLayout([NamedParameter("0", parameter, 0)], 1024)
        flat = torch.zeros(layout.blocks.num_elements)
        flat[: values.numel()] = values
        TritonBackend(layout).write_weights(flat.to(DEVICE))
        torch.testing.assert_close(parameter.detach().cpu(), values.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_gradients_that_are_not_finite_are_noticed(bad: float) -> None:
    given_problem = problem(DEVICE, 64)
    backend = TritonBackend(given_problem.layout)
    last, gradients = given_problem.num_blocks, given_problem.gradients
    assert gradients.tensors[2] is not None
    gradients.tensors[2][70] = bad
    block = int(given_problem.layout.first_block[2]) + 1
    backend.sum_squares(gradients, 0, last)
    others = torch.arange(last, device=DEVICE) != block
    assert not all_finite(backend.square_sums) and all_finite(backend.square_sums[others])


def test_gradients_may_move_from_step_to_step() -> None:
    given_problem = problem(DEVICE, 64, dtypes=(FP32,))
    backend, sums = TritonBackend(given_problem.layout), []
    for factor in (1.0, 2.0):
        for parameter in given_problem.layout.parameters:
            parameter.tensor.main_grad = torch.full_like(parameter.tensor, factor)  # type: ignore[attr-defined]
        backend.sum_squares(Gradients(given_problem.layout, complete=False), 0, given_problem.num_blocks)
        sums.append(float(add_up(backend.square_sums)))
    count = given_problem.layout.num_parameters
    assert sums == [count, 4.0 * count]


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
    """All of an optimizer's state and the weights after some steps, and the reports."""
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
    state = {**optimizer.consensus_state(), **optimizer.replica_state()}
    return [tensor.detach().cpu() for tensor in (*state.values(), *(tensor for _, tensor in named))], reports


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_runs(name: str) -> None:
    """Several steps of one replica: with a missing gradient, an overflow, and a parameter that is frozen."""
    ours, our_reports = run(OPTIMIZERS[name], DEVICE, "triton", 9)
    theirs, their_reports = run(OPTIMIZERS[name], CPU, "reference", 9)
    assert our_reports == their_reports
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(bits_of(got), bits_of(wanted))


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    with pytest.raises(UserError, match="backend triton cannot run on cpu"):
        ZeroOneAdam([torch.nn.Parameter(torch.ones(3))], 0.1, backend="triton")
