"""Adam with a deferred gradient norm, as on a GPU, is bit-identical to Adam with a norm that is read at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron01.comm import Topology
from megatron01.errors import UserError
from megatron01.optim import LossScaler, TrainingDiverged
from megatron01.optim.adam import Adam
from megatron01.optim.schedule import as_schedule

STEPS = 12
BAD = {3: math.inf, 4: math.nan, 9: -math.inf}


def build(
    dtype: torch.dtype, max_grad_norm: float | None, *, runs_behind: bool
) -> tuple[list[torch.nn.Parameter], Adam]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((7, 5), (3,), (40,))]
    scaler = LossScaler(initial=256.0, hysteresis=1, window=4) if dtype == torch.float16 else None
    groups = [{"params": [(str(index), weight) for index, weight in enumerate(weights)], "weight_decay": 0.1}]
    adam = Adam(groups, as_schedule(0.01), max_grad_norm=max_grad_norm, loss_scaler=scaler, max_skipped_steps=3)
    adam._runs_behind = runs_behind
    return weights, adam


def train(
    weights: list[torch.nn.Parameter], adam: Adam, bad: dict[int, float], steps: int = STEPS
) -> list[list[torch.Tensor]]:
    """After each step: weights, state, and the report's kind and norm."""
    generator = torch.Generator().manual_seed(1)
    trace = []
    for step in range(steps):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator) * adam.loss_scale
            weight.grad = gradient.to(weight.dtype)
        if step in bad:
            assert weights[2].grad is not None
            weights[2].grad[17] = bad[step]
        adam.step()
        assert adam.last_step is not None
        report = adam.last_step
        told = [float(report.kind == "skipped"), report.grad_norm, report.loss_scale, adam.loss_scale]
        state = [*adam.replicated_state().values(), adam.replica_state()["scalars"], torch.tensor(told)]
        trace.append([tensor.detach().clone() for tensor in (*weights, *state)])
    return trace


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_that_is_not_waited_for_changes_no_bit(dtype: torch.dtype, max_grad_norm: float | None) -> None:
    known = train(*build(dtype, max_grad_norm, runs_behind=False), BAD)
    late = train(*build(dtype, max_grad_norm, runs_behind=True), BAD)
    for step, (ours, theirs) in enumerate(zip(late, known, strict=True)):
        for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(own.nan_to_num(-1.0), other.nan_to_num(-1.0)), (step, index)
    skipped = [bool(state[-1][0]) for state in known]
    assert skipped == [step in BAD for step in range(STEPS)]


@pytest.mark.parametrize("runs_behind", [False, True])
def test_it_gives_up_after_too_many_bad_steps(runs_behind: bool) -> None:
    weights, adam = build(torch.float32, None, runs_behind=runs_behind)
    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        train(weights, adam, dict.fromkeys((2, 3, 4), math.inf), 6)
    assert adam.step_count == 5


@pytest.mark.parametrize(
    ("device", "deterministic", "keeps"), [("cpu", False, True), ("cuda", False, False), ("cuda", True, True)]
)
def test_buckets_keep_their_places_where_bits_are_promised(
    device: str, deterministic: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, ``find_unused_parameters`` costs a collective and a host sync at every step."""
    wrap = MagicMock()
    monkeypatch.setattr("megatron01.optim.adam.DistributedDataParallel", wrap)
    monkeypatch.setattr("megatron01.optim.adam.refuse_averaging", lambda *_: None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(3, device=device))
        adam = Adam([{"params": [("weight", weight)]}], as_schedule(0.01))
        adam._num_replicas = 3
        adam.attach(torch.nn.Linear(1, 1))
    assert wrap.call_args.kwargs["find_unused_parameters"] is keeps


def test_it_takes_what_torchs_adamw_takes() -> None:
    """Parameters with and without names or groups, a number as learning rate, and a closure."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)]

    def trained(make: Callable[[list[torch.nn.Parameter]], Any]) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(weight.clone()) for weight in start]
        optimizer = make(weights)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = weights[0].square().sum() + weights[1].square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(5)]
        assert losses[-1] < losses[0]
        return [weight.detach() for weight in weights]

    ways: list[Callable[[Any], Any]] = [
        lambda weights: weights,
        lambda weights: zip("ab", weights, strict=True),
        lambda weights: [{"params": weights[:1]}, {"params": weights[1:]}],
    ]
    known = trained(lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1, fused=True))
    for way in ways:
        ours = trained(lambda weights, way=way: Adam(way(weights), 0.1, weight_decay=0.1))  # type: ignore[misc]
        assert all(map(torch.equal, ours, known))
    known = trained(lambda w: torch.optim.AdamW([{"params": w[:1], "lr": 0.05}, {"params": w[1:]}], lr=0.1, fused=True))
    ours = trained(lambda w: Adam([{"params": w[:1], "lr_scale": 0.5}, {"params": w[1:]}], 0.1, weight_decay=0.01))
    assert all(map(torch.equal, ours, known))


@pytest.mark.parametrize(
    ("setting", "words"), [({"betas": (0.5, 0.5)}, "sets .'betas'.; expected only"), ({"lr": 0.5}, "use lr_scale")]
)
def test_settings_of_groups_that_it_would_not_follow_are_refused(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Adam([{"params": [torch.nn.Parameter(torch.ones(1))], **setting}], 0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"betas": 0.9}, "betas is 0.9; expected two numbers in"),
        ({"eps": 0.0}, "eps is 0.0; expected a positive finite number"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; expected a positive finite number, or None for no clipping"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}"):
        Adam([torch.nn.Parameter(torch.ones(1))], 0.1, **arguments)


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two parameters are called a"):
        Adam([("a", torch.nn.Parameter(torch.ones(1))) for _ in range(2)], 0.1)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ([torch.ones(1, dtype=torch.float64)], "parameter 0 is torch.float64; expected float32, bfloat16 or float16"),
        ([torch.ones(1, dtype=torch.complex64)], "parameter 0 is torch.complex64; expected float32"),
        ([torch.ones(1), torch.ones(1, device="meta")], "parameter 1 is on meta but 0 on cpu; expected all on one"),
        ([torch.ones(0)], "got no parameters that require a gradient"),
    ],
)
def test_parameters_that_it_cannot_train_are_refused(parameters: list[torch.Tensor], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Adam(map(torch.nn.Parameter, parameters), 0.1)


def test_it_is_told_that_a_topology_is_no_group() -> None:
    with pytest.raises(UserError, match="is a Topology; expected a ProcessGroup"):
        Adam([torch.nn.Parameter(torch.ones(1))], 0.1, process_group=Topology.flat())  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("moves", [False, True])
def test_weights_written_into_a_16_bit_model_are_trained_on(steps: int, moves: bool) -> None:
    """A pretrained model's, say: computed from fp32 weights of its own, they would be lost at the next step."""
    layer = torch.nn.Linear(4, 4).bfloat16()
    adam = Adam(layer.named_parameters(), 1e-3)
    for step in range(steps + 1):
        if step == steps:
            if moves:
                layer.weight.data = torch.full((4, 4), 3.0, dtype=torch.bfloat16)
            else:
                layer.load_state_dict({"weight": torch.full((4, 4), 3.0), "bias": torch.ones(4)})
        layer(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
        adam.step()
        adam.zero_grad()
    assert (layer.weight - 3).abs().max() < 0.02
    assert (adam.master_parameters()["weight"] - 3).abs().max() < 0.02


def test_what_16_bit_weights_have_lost_in_rounding_stays_in_the_fp32_weights() -> None:
    """Weights that are written back as they were change nothing."""

    def trained(writes_back: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4).bfloat16()
        adam = Adam(layer.named_parameters(), 1e-4)
        for _ in range(5):
            if writes_back:
                layer.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()})
            layer(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
            adam.step()
            adam.zero_grad()
        return adam.master_parameters()["weight"]

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda state: state.pop("v.2"), "lacks 'v.2'"),
        (lambda state: state.update({"x.2": torch.zeros(1, 40)}), r"'x.2' .* has shape \[1, 40\], not \[40\]"),
        (lambda state: state["m.2"].fill_(math.nan), "'m.2' .* holds NaN"),
        (lambda state: state.update({"scalars": torch.zeros(9)}), r"'scalars' .* has shape \[9\], not \[8\]"),
    ],
)
def test_a_state_that_does_not_fit_leaves_all_as_it_was(damage: Callable[..., object], words: str) -> None:
    weights, adam = build(torch.bfloat16, None, runs_behind=False)
    train(weights, adam, {}, steps=2)
    state = {name: tensor.clone() for name, tensor in (adam.replicated_state() | adam.replica_state()).items()}
    damage(state)
    weights, adam = build(torch.bfloat16, None, runs_behind=False)
    before = [tensor.clone() for tensor in (*weights, *adam.replicated_state().values())]
    with pytest.raises(UserError, match=words):
        adam.load_state(state, state)
    assert all(map(torch.equal, before, (*weights, *adam.replicated_state().values())))


@pytest.mark.parametrize("runs_behind", [False, True])
def test_a_step_without_a_gradient_changes_nothing(runs_behind: bool) -> None:
    weights, adam = build(torch.float16, None, runs_behind=runs_behind)
    before = [weight.detach().clone() for weight in weights]
    adam.step()
    assert all(map(torch.equal, before, weights)) and adam.step_count == 1


def test_a_copy_is_refused_for_what_it_is() -> None:
    _, adam = build(torch.float32, None, runs_behind=False)
    with pytest.raises(UserError, match=r"Adam cannot be copied or pickled.*load_state\(\)"):
        copy.deepcopy(adam)
