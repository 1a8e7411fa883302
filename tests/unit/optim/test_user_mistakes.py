"""Arguments out of range, and later changes to a model or an optimizer that would otherwise fail silently."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from megatron01 import optim
from megatron01.config import OptimizerConfig
from megatron01.errors import UserError
from megatron01.optim import SGDM, Adam, BinSGDM, LossScaler, OneBitAdam, TabulatedSchedule, ZeroOneAdam
from megatron01.optim.specs import adaptive_arguments


def test_weights_that_lie_in_another_order_than_when_it_was_built_are_refused() -> None:
    """The master weights keep the old memory order: copied to the new one, they would be permuted."""
    layer = nn.Conv2d(4, 8, 3)
    optimizer = ZeroOneAdam(layer.named_parameters(), 1e-3)
    layer.to(memory_format=torch.channels_last)
    layer(torch.randn(2, 4, 6, 6)).square().mean().backward()
    before = layer.weight.detach().clone()
    with pytest.raises(UserError, match="weight"):
        optimizer.step()
    assert torch.equal(layer.weight, before)


def test_weights_of_another_shape_than_when_it_was_built_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = ZeroOneAdam([("grown", parameter)], 1e-3)
    parameter.data = torch.ones(50)
    parameter.grad = torch.ones(50)
    with pytest.raises(UserError, match="grown"):
        optimizer.step()


def test_a_parameter_that_was_frozen_when_it_was_built_cannot_be_thawed_in_silence() -> None:
    layer = nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    optimizer = ZeroOneAdam(layer.named_parameters(), 1e-2)
    layer.bias.requires_grad_(True)
    layer(torch.randn(4, 3)).square().sum().backward()
    with pytest.raises(UserError, match="bias"):
        optimizer.step()


def test_a_torch_scheduler_on_it_is_not_ignored_in_silence() -> None:
    """The learning rate comes from the schedule, which also determines when replicas synchronize."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = ZeroOneAdam([parameter], 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(UserError, match="from_torch"):
        for _ in range(3):
            parameter.grad = torch.ones(4)
            optimizer.step()
            scheduler.step()


def set_betas(group: dict[str, Any]) -> None:
    group["betas"] = (0.5, 0.9)


def set_decay_to_nan(group: dict[str, Any]) -> None:
    group["weight_decay"] = math.nan


def set_text_as_scale(group: dict[str, Any]) -> None:
    group["lr_scale"] = "0.1"


def append_parameter(group: dict[str, Any]) -> None:
    group["params"].append(nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_betas, r"^a parameter group sets \['betas'\]; expected only weight_decay and lr_scale beside params"),
        (set_decay_to_nan, "^a parameter group has weight_decay nan; expected a number of at least 0"),
        (set_text_as_scale, "^a parameter group has lr_scale '0.1'; expected a positive factor"),
        (append_parameter, "^parameters cannot be added or removed after construction"),
    ],
)
def test_changes_of_a_group_that_the_next_step_cannot_follow_are_refused_there(
    change: Callable[[dict[str, Any]], None], text: str
) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = ZeroOneAdam([parameter], 1e-2)
    parameter.grad = torch.ones(4)
    optimizer.step()
    change(optimizer.param_groups[0])
    before = parameter.detach().clone()
    with pytest.raises(UserError, match=text):
        optimizer.step()
    assert torch.equal(parameter, before)


def test_a_group_taken_out_by_hand_is_refused_and_one_changed_within_its_range_is_followed() -> None:
    one, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = ZeroOneAdam([{"params": [one]}, {"params": [other]}], 1e-2)
    optimizer.param_groups[1]["weight_decay"] = 0.5
    optimizer.param_groups[1]["initial_lr"] = 1e-2  # torch's schedulers leave it there
    optimizer.step()
    assert torch.equal(one, torch.ones(4)) and torch.all(other < 1.0)
    del optimizer.param_groups[1]
    with pytest.raises(UserError, match="cannot be added or removed"):
        optimizer.step()


def new_memory(layer: nn.Linear, weight: torch.Tensor) -> None:
    layer.weight.data = weight


def in_place(layer: nn.Linear, weight: torch.Tensor) -> None:
    layer.load_state_dict({"weight": weight, "bias": layer.bias.detach()})


def past_autograd(layer: nn.Linear, weight: torch.Tensor) -> None:
    """As averages of weights, clipping of weights and resets of layers often do it."""
    layer.weight.data.copy_(weight)


@pytest.mark.parametrize("write", [new_memory, in_place, past_autograd])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("attached", [False, True])
def test_weights_written_into_the_model_are_not_overwritten_in_silence(write: Any, steps: int, attached: bool) -> None:
    layer = nn.Linear(4, 4)
    optimizer = ZeroOneAdam(layer.parameters(), 1e-2, sync_policy="constant:4", variance_freeze_step=1)
    if attached:
        optimizer.attach(layer)

    def step() -> None:
        layer(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        step()
    before = layer.weight.detach().clone()
    write(layer, before + 1)
    for use in (optimizer.replicated_weights().__enter__, step):
        with pytest.raises(UserError, match="reload_weights"):
            use()
        assert torch.equal(layer.weight, before + 1)
    optimizer.reload_weights()
    step()
    assert (layer.weight - before > 0.5).all()


@pytest.mark.parametrize("shape", [(50, 8), (1000, 40)])
def test_a_weight_written_past_autograd_at_each_step_is_noticed(shape: tuple[int, int]) -> None:
    """Clipping, say, or a row that is to stay 0, which need not be at the beginning of a block."""
    weight = nn.Parameter(torch.ones(shape))
    optimizer = ZeroOneAdam([weight], 1e-2)
    with pytest.raises(UserError, match="reload_weights"):
        for _ in range(60):
            weight.grad = torch.ones(shape)
            optimizer.step()
            weight.data[3, 1] = 0.0


def test_weights_that_were_exchanged_and_put_back_are_no_mistake() -> None:
    """Evaluation of averaged weights does this."""
    layer = nn.Linear(4, 4)
    optimizer = ZeroOneAdam(layer.parameters(), 1e-2, sync_policy="constant:4", variance_freeze_step=1)
    for _ in range(3):
        layer(torch.ones(2, 4)).square().sum().backward()
        kept = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        layer.load_state_dict({name: tensor + 1 for name, tensor in kept.items()})
        layer.load_state_dict(kept)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("at", [0, 3])
def test_weights_that_go_to_shared_memory_are_trained_on(at: int) -> None:
    """As torch.multiprocessing does with a state_dict() that is sent to an evaluating process, in place."""

    def trained_weights(shares: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        optimizer = ZeroOneAdam(layer.parameters(), 1e-2)
        for step in range(6):
            if shares and step == at:
                for tensor in layer.state_dict().values():
                    tensor.share_memory_()
            one_step(layer, optimizer)
        return layer.weight.detach()

    assert torch.equal(trained_weights(True), trained_weights(False))


@pytest.mark.parametrize(
    "build",
    [partial(ZeroOneAdam, sync_policy="constant:4", variance_freeze_step=1), partial(SGDM, beta=0.9), OneBitAdam],
    ids=["mostly local steps", "full steps alone", "full steps so far"],
)
def test_parameters_that_the_model_no_longer_has_are_noticed_once(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The model would stand still for the rest of the run."""
    layer = nn.Linear(4, 4)
    optimizer = build(layer.parameters(), 1e-2)
    for _ in range(20):
        one_step(layer, optimizer)
    assert not caplog.messages
    layer.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True)
    for _ in range(30):
        one_step(layer, optimizer)
    (text,) = caplog.messages
    assert "had no gradient" in text and "load_state_dict(assign=True)" in text


def test_a_parameter_thawed_after_the_second_moment_has_frozen_without_it_does_not_stand_still_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has no step size, and never gets one: gradual unfreezing would train a part of the model."""
    layer = nn.Linear(4, 4)
    optimizer = ZeroOneAdam(layer.named_parameters(), 1e-2, sync_policy="constant:4", variance_freeze_step=2)
    layer.weight.requires_grad_(False)
    for _ in range(4):
        one_step(layer, optimizer)
    assert not caplog.messages
    layer.weight.requires_grad_(True)
    one_step(layer, optimizer)
    (text,) = caplog.messages
    assert text.startswith("weight ") and "variance_freeze_step" in text
    one_step(layer, optimizer)
    assert len(caplog.messages) == 1


def test_a_parameter_thawed_with_a_second_moment_is_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(4, 4)
    optimizer = ZeroOneAdam(layer.named_parameters(), 1e-2, sync_policy="constant:4", variance_freeze_step=2)
    for step in range(9):
        layer.weight.requires_grad_(step < 2 or step > 5)
        before = layer.weight.detach().clone()
        one_step(layer, optimizer)
    assert not torch.equal(layer.weight, before)
    assert not caplog.messages


class TwoHeads(nn.Module):
    """Linear layers 4 to 4, of which ``late`` is only called on request; until then its gradient may be 0."""

    def __init__(self, *, zero: bool = False) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls_late, self.zero = False, zero

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # (b, 4) -> (b, 4)
        late = self.late(inputs) * float(self.calls_late) if self.calls_late or self.zero else 0.0
        return self.first(inputs) + late


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("build", "frozen_from"),
    [
        (lambda named: ZeroOneAdam(named, 1e-2, variance_kappa=1, variance_freeze_step=11), 8),  # T_v: 0, 1, 3, 7
        (lambda named: ZeroOneAdam(named, 1e-2, sync_policy="doubling:5,5"), 10),
        (lambda named: OneBitAdam(named, 1e-2, freeze_step=6), 6),
    ],
)
def test_a_parameter_without_a_gradient_until_the_second_moment_freezes_does_not_stand_still_in_silence(
    build: Callable[[Any], ZeroOneAdam | OneBitAdam], frozen_from: int, zero: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A branch of the model that is used later, or an expert that got no tokens, would not be trained."""
    model = TwoHeads(zero=zero)
    optimizer = build(model.named_parameters())
    for step in range(30):
        model.calls_late = step > 15
        assert len(caplog.messages) == (step > frozen_from)  # the step after the last refresh says it
        one_step(model, optimizer)
    (text,) = caplog.messages
    assert (
        text.startswith("late.weight, late.bias had no gradient, or one of 0, at every full step")
        and "freeze_step" in text
    )


@pytest.mark.parametrize("never", ["frozen", "masked"])
def test_a_parameter_that_is_to_stand_still_may_do_so(never: str, caplog: pytest.LogCaptureFixture) -> None:
    model = TwoHeads()
    masks = {"late.weight": torch.zeros(4, dtype=torch.bool), "late.bias": torch.zeros(4, dtype=torch.bool)}
    optimizer = ZeroOneAdam(
        model.named_parameters(), 1e-2, variance_freeze_step=4, masks=masks if never == "masked" else None
    )
    model.late.requires_grad_(never == "masked")
    for _ in range(8):
        one_step(model, optimizer)
    assert not caplog.messages


def test_gradients_that_are_kept_are_not_those_of_the_next_backward_pass() -> None:
    """Whoever compares the gradients of two losses or batches keeps them, as torch makes new ones."""
    layer = nn.Linear(4, 4)
    optimizer = ZeroOneAdam(layer.parameters(), 1e-2)
    for clear in (layer.zero_grad, optimizer.zero_grad):
        for steps in (False, True):
            layer(torch.ones(2, 4)).square().sum().backward()
            if steps:
                optimizer.step()
            kept = [parameter.grad for parameter in layer.parameters()]
            before = [gradient.clone() for gradient in kept if gradient is not None]
            clear()
            layer(torch.full((2, 4), 3.0)).square().sum().backward()
            assert all(map(torch.equal, kept, before))
            clear()


def test_gradients_summed_in_fp32_that_were_not_cleared_are_not_added_to_in_silence() -> None:
    """A model's ``zero_grad`` does not know of them."""
    layer = nn.Linear(4, 4).bfloat16()
    optimizer = ZeroOneAdam(layer.named_parameters(), 1e-2)
    optimizer.sum_gradients_in_fp32()

    def backward() -> None:
        layer(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()

    for clear in (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False), layer.zero_grad):
        backward()
        backward()
        optimizer.step()
        clear()
    with pytest.raises(UserError, match=r"weight|bias.*optimizer\.zero_grad\(\)"):
        backward()
    optimizer.zero_grad()
    backward()


@pytest.mark.parametrize("build", [Adam, ZeroOneAdam])
def test_parameters_without_a_shape_yet_are_refused(build: Any) -> None:
    with pytest.raises(UserError, match=r"0\.weight .*forward pass"):
        build(nn.Sequential(nn.LazyLinear(3)).named_parameters(), 1e-2)


def after_local_steps(**options: Any) -> tuple[nn.Linear, ZeroOneAdam]:
    """A layer whose weights are not those of the last synchronization."""
    layer = nn.Linear(4, 4)
    optimizer = ZeroOneAdam(layer.parameters(), 1e-2, sync_policy="constant:4", variance_freeze_step=1, **options)
    for _ in range(6):
        one_step(layer, optimizer)
    return layer, optimizer


def one_step(layer: nn.Linear, optimizer: ZeroOneAdam) -> None:
    layer(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_replicated_weights_may_be_asked_for_inside_of_replicated_weights() -> None:
    """A function that evaluates does so, and its caller may as well."""
    layer, optimizer = after_local_steps()
    own = layer.weight.detach().clone()
    with optimizer.replicated_weights():
        replicated = layer.weight.detach().clone()
        with optimizer.replicated_weights():
            assert torch.equal(layer.weight, replicated)
        assert torch.equal(layer.weight, replicated) and not torch.equal(own, replicated)
    assert torch.equal(layer.weight, own)


@pytest.mark.parametrize("delay", [False, True])
def test_a_model_that_was_moved_under_its_replicated_weights_has_its_own_again(delay: bool) -> None:
    """accelerate moves it from "cpu" to "cpu:0", another device to torch: the next gradient would be one of x."""
    layer, optimizer = after_local_steps(delay=delay)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    with optimizer.replicated_weights():
        assert not torch.equal(layer.weight, before[0])
        layer.to("cpu:0")
    assert all(map(torch.equal, layer.parameters(), before))
    with optimizer.replicated_weights():
        layer.half()  # an error at the next step
    with pytest.raises(UserError, match="float16"):
        optimizer.step()


def test_a_step_with_the_replicated_weights_is_refused() -> None:
    layer, optimizer = after_local_steps()
    with pytest.raises(UserError, match=r"step\(\) .*replicated_weights"), optimizer.replicated_weights():
        one_step(layer, optimizer)
    one_step(layer, optimizer)


@pytest.mark.parametrize(
    "use",
    [
        ZeroOneAdam.step,
        ZeroOneAdam.state_dict,
        ZeroOneAdam.portable_state_dict,
        lambda optimizer: optimizer.replicated_weights().__enter__(),
    ],
)
def test_a_step_that_was_interrupted_is_neither_gone_on_from_nor_saved(use: Callable[..., Any]) -> None:
    """Some of its updates are made, and on several replicas others than elsewhere."""
    layer, optimizer = after_local_steps()
    layer(torch.ones(1, 4)).sum().backward()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optimizer, "_end_step", Mock(side_effect=KeyboardInterrupt))
        optimizer.step()
    with pytest.raises(UserError, match="interrupted half-way"):
        use(optimizer)


def test_a_state_that_later_steps_have_changed_is_refused() -> None:
    layer, optimizer = after_local_steps()
    weights, state = layer.weight.detach().clone(), optimizer.state_dict()
    optimizer.load_state_dict(state)  # nothing has changed yet
    copied = copy.deepcopy(state)
    one_step(layer, optimizer)
    with pytest.raises(UserError, match=r"is of step 6, .*7 steps; keep copy\.deepcopy"):
        optimizer.load_state_dict(state)
    assert optimizer.step_count == 7
    optimizer.load_state_dict(copied)
    assert optimizer.step_count == 6 and torch.equal(layer.weight, weights)


class Falling:
    """A schedule that is no good after its third step."""

    peak_lr, warmup_steps, total_steps = 0.1, 0, None

    def __init__(self, after: float) -> None:
        self.after = after

    def lr(self, step: int) -> float:
        return self.peak_lr if step < 3 else self.after


@pytest.mark.parametrize("policy", ["every", "schedule:2"])
@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1])
def test_rates_of_a_schedule_of_ones_own_that_are_out_of_range_are_refused(rate: float, policy: str) -> None:
    layer = nn.Linear(4, 4)
    optimizer = ZeroOneAdam(layer.parameters(), Falling(rate), sync_policy=policy, variance_freeze_step=2)
    for _ in range(3):
        one_step(layer, optimizer)
    with pytest.raises(UserError, match=f"learning rate of step 3 is {rate}; expected a finite number"):
        one_step(layer, optimizer)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_any_sequence_is_a_table_of_rates(make: Any) -> None:
    layer = nn.Linear(4, 4)
    optimizer = ZeroOneAdam(layer.parameters(), TabulatedSchedule(make([0.5, 1.0, 0.25])))
    one_step(layer, optimizer)
    assert optimizer.last_step is not None and optimizer.last_step.lr == 0.5


@pytest.mark.parametrize("name", ["lr_scale", "weight_decay"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, None, "1e-2"])
def test_groups_with_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"group has {name} {value!r}; expected"):
        ZeroOneAdam([{"params": [nn.Parameter(torch.ones(4))], name: value}], 0.1)


def test_two_parameters_of_one_name_are_refused() -> None:
    """``master_parameters`` would hold only one of them."""
    encoder, decoder = nn.Linear(3, 3), nn.Linear(3, 3)
    with pytest.raises(UserError, match="weight"):
        ZeroOneAdam([*encoder.named_parameters(), *decoder.named_parameters()], 1e-3)


def test_a_scheduler_that_needs_metrics_cannot_be_tabulated() -> None:
    with pytest.raises(UserError, match="ReduceLROnPlateau"):
        TabulatedSchedule.from_torch(torch.optim.lr_scheduler.ReduceLROnPlateau, base_lr=1.0, total_steps=3)  # type: ignore[arg-type]
    greedy = pytest.importorskip("transformers", "5.24").optimization.GreedyLR  # of another class
    with pytest.raises(UserError, match="GreedyLR follows measurements"):
        TabulatedSchedule.from_torch(greedy, base_lr=1.0, total_steps=3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; .* or None for no clipping"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm is nan"),
        ({"betas": 0.9}, r"betas is 0.9; expected two numbers in \[0, 1\), such as \(0.9, 0.999\)"),
        ({"betas": (0.9,)}, r"betas is \(0.9,\); expected two numbers"),
        ({"betas": ("0.9", 0.999)}, r"betas is \('0.9', 0.999\); expected two numbers"),
        ({"betas": (0.9, math.nan)}, r"betas is \(0.9, nan\); expected two numbers"),
        ({"eps": math.nan}, "eps is nan"),
        ({"step_bound": math.nan}, "step_bound is nan"),
        ({"step_bound": math.inf}, "step_bound is inf; .* or None for no bound"),
        ({"local_momentum": "both"}, "local_momentum is 'both'; expected 'own' or 'common'"),
        ({"local_scale": 1.5}, r"local_scale is 1.5; expected a number in \[0, 1\]"),
        ({"local_scale": math.nan}, "local_scale is nan"),
        ({"local_scale": "0.5"}, "local_scale is '0.5'; expected a number"),
        ({"variance_decay_floor": 1.0}, r"variance_decay_floor is 1.0; expected a number in \[0, 1\)"),
        ({"variance_decay_floor": None}, "variance_decay_floor is None"),
        ({"sync_policy": None}, "sync_policy is None; expected schedule, every"),
        ({"masks": [torch.ones(4, dtype=torch.bool)]}, "masks are not bool tensors by parameter name"),
        ({"masks": {"0": [True] * 4}}, "masks are not bool tensors by parameter name"),
        ({"masks": {0: torch.ones(4, dtype=torch.bool)}}, r"a mask names parameter 0, .*'0'"),
        ({"backend": "cuda"}, "backend is 'cuda'; expected auto, cpu, triton or reference"),
        ({"gradient_wire_dtype": torch.float64}, "gradient_wire_dtype is torch.float64; .*bfloat16"),
        ({"max_skipped_steps": 0}, "max_skipped_steps is 0"),
        ({"watch_interval": -1}, "watch_interval is -1"),
        ({"bucket_elements": 4e6}, "bucket_elements is 4000000.0; expected an int"),
        ({"variance_kappa": 16.0}, "variance_kappa is 16.0; expected an int"),
        ({"variance_kappa": 0}, "variance_kappa is 0"),
        ({"max_sync_interval": 8.0}, "max_sync_interval is 8.0; expected an int"),
        ({"variance_freeze_step": 0}, "variance_freeze_step is 0"),
        ({"loss_scaler": torch.amp.GradScaler("cpu")}, "loss_scaler is of type GradScaler; expected megatron01.LossSc"),
        ({"loss_scaler": True}, "loss_scaler is of type bool; expected megatron01.LossScaler, or None"),
        ({"block_size": 1024.0}, "block_size is 1024.0; expected an int"),
        ({"max_gradnorm": 1.0}, "ZeroOneAdam has no argument 'max_gradnorm'; did you mean 'max_grad_norm'"),
        ({"process_group": "world"}, "process_group is of type str; expected a ProcessGroup"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=f"^{expected}") as caught:
        ZeroOneAdam([nn.Parameter(torch.ones(4))], 1e-3, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("saved", "other"), [("own", "common"), ("common", "own")])
def test_accumulated_steps_of_the_other_local_momentum_are_refused(saved: str, other: str) -> None:
    def build(local_momentum: Any) -> tuple[nn.Parameter, ZeroOneAdam]:
        parameter = nn.Parameter(torch.ones(4))
        options: dict[str, Any] = {"sync_policy": "constant:4", "variance_freeze_step": 2}
        return parameter, ZeroOneAdam([parameter], 1e-3, local_momentum=local_momentum, **options)

    parameter, optimizer = build(saved)
    for step in range(1, 9):
        parameter.grad = torch.full((4,), 0.1)
        optimizer.step()
        if step == 6:
            expected = (
                f"^the state was saved between two synchronizations with local_momentum '{saved}', and .*'{other}'"
            )
            with pytest.raises(UserError, match=expected):
                build(other)[1].load_state_dict(optimizer.state_dict())
    build(other)[1].load_state_dict(optimizer.state_dict())  # right after a synchronization


@pytest.mark.parametrize("scale", [-0.5, math.nan])
def test_a_share_out_of_range_is_refused_in_a_configuration(scale: float) -> None:
    with pytest.raises(UserError, match=rf"^local_scale is {scale}; expected a number in \[0, 1\]$"):
        OptimizerConfig(local_scale=scale)


@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_a_bound_out_of_range_is_refused_in_a_configuration(bound: float) -> None:
    with pytest.raises(UserError, match=rf"^step_bound is {bound}; expected 0 \(no bound\) or more$"):
        OptimizerConfig(step_bound=bound)


@pytest.mark.parametrize(("bound", "passed_on"), [(None, {}), (0.0, {"step_bound": None}), (2.0, {"step_bound": 2.0})])
def test_a_bound_that_is_not_given_is_left_to_the_optimizer(bound: float | None, passed_on: dict[str, Any]) -> None:
    arguments = adaptive_arguments(OptimizerConfig(step_bound=bound))
    assert {name: value for name, value in arguments.items() if name == "step_bound"} == passed_on


@pytest.mark.parametrize(
    ("optimizer", "options", "expected"),
    [
        (SGDM, {"beta": "0.9"}, "the decay of the momentum is '0.9'; expected a number in"),
        (BinSGDM, {"beta": 1.0}, "the decay of the momentum is 1.0; expected a number in"),
        (BinSGDM, {"seed": 1.5}, "seed is 1.5; expected an int of at least 0"),
        (OneBitAdam, {"freeze_ratio": 0.0}, r"freeze_ratio is 0.0; expected a number in \(0, 1\]"),
        (OneBitAdam, {"freeze_ratio": "0.9"}, "freeze_ratio is '0.9'; expected a number in"),
        (Adam, {"max_skipped_steps": 0}, "max_skipped_steps is 0; expected an int of at least 1"),
        (Adam, {"loss_scaler": torch.amp.GradScaler("cpu")}, "loss_scaler is of type GradScaler"),
    ],
)
def test_arguments_of_others_out_of_range_are_refused(
    optimizer: Callable[..., object], options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=f"^{expected}"):
        optimizer([nn.Parameter(torch.ones(4))], 1e-3, **options)


def test_the_step_that_freezes_one_bit_adam_is_an_int() -> None:
    with pytest.raises(UserError, match=r"^freeze_step is 10\.0; expected an int"):
        OneBitAdam([nn.Parameter(torch.ones(4))], 1e-3, freeze_step=10.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"initial": 0.0}, "initial"),
        ({"initial": math.inf}, "initial"),
        ({"minimum": 0.0}, "minimum"),
        ({"window": 0}, "window"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"constant": -1.0}, "constant"),
        ({"constant": math.nan}, "constant"),
    ],
)
def test_loss_scalers_that_could_not_work_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=f"^LossScaler: {name} is "):
        LossScaler(**options)


@pytest.mark.parametrize("count", [np.int64(8), 8])
def test_integers_of_numpy_are_integers(count: Any) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = ZeroOneAdam([parameter], 1e-3, variance_kappa=count, max_sync_interval=count)
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert parameter.max() < 1


@pytest.mark.parametrize("rate", [np.float32(0.25), np.float64(0.25), 0.25, Fraction(1, 4)])
def test_any_real_number_is_a_constant_learning_rate(rate: Any) -> None:
    optimizer = ZeroOneAdam([nn.Parameter(torch.ones(4))], rate)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    "schedule",
    [
        None,
        "cosine",
        torch.tensor(1e-3),
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 3),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_what_is_no_schedule_is_refused(schedule: Any) -> None:
    with pytest.raises(UserError, match=r"LRSchedule.*TabulatedSchedule\.from_torch") as caught:
        ZeroOneAdam([nn.Parameter(torch.ones(4))], schedule)
    assert "\n" not in str(caught.value)


def test_a_loss_scaler_that_nobody_asks_is_not_ignored_in_silence() -> None:
    """Gradients would be divided by a loss scale that the loss was never multiplied by."""
    parameter = nn.Parameter(torch.ones(5))
    optimizer = ZeroOneAdam([parameter], 0.1, loss_scaler=LossScaler(initial=64.0))
    optimizer.step()  # a replica that leaves out its first batch must come to the step, and has no loss to multiply
    assert optimizer.last_step.loss_scale == 64.0 and parameter.eq(1.0).all()
    parameter.square().sum().backward()
    for _ in range(2):
        with pytest.raises(UserError, match=r"scale of 64, .*scale_loss"):
            optimizer.step()
    optimizer.attach(nn.ParameterList([parameter]))
    with pytest.raises(UserError, match=r"scale of 64, .*scale_loss"):
        parameter.square().sum().backward()  # where exchanges start in the backward pass, it reads the scale
        optimizer.step()
    optimizer.zero_grad()
    optimizer.scale_loss(parameter.square().sum()).backward()
    optimizer.step()
    by_hand = ZeroOneAdam([nn.Parameter(torch.ones(5))], 0.1, loss_scaler=LossScaler(constant=64.0))
    by_hand.param_groups[0]["params"][0].grad = torch.ones(5)
    by_hand.step()  # with a constant scale, scale_loss is not required


@pytest.mark.parametrize("state", [None, [], {}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(UserError, match=r"lacks .*expected what state_dict"):
        ZeroOneAdam([nn.Parameter(torch.ones(5))], 0.1).load_state_dict(state)


@pytest.mark.parametrize(
    ("policy", "hint"), [("shedule:2", "'schedule'"), ("schdule", "'schedule'"), ("constnt:4", "'constant'")]
)
def test_a_misspelt_policy_is_met_with_the_nearest(policy: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {hint}"):
        ZeroOneAdam([nn.Parameter(torch.ones(5))], 0.1, sync_policy=policy)


def in_inference_mode_only_the_model() -> None:
    with torch.inference_mode():
        layer = nn.Linear(4, 4)
    ZeroOneAdam(layer.parameters(), 0.1)


def in_inference_mode_only_the_optimizer() -> None:
    layer = nn.Linear(4, 4)
    with torch.inference_mode():
        ZeroOneAdam(layer.parameters(), 0.1)


@pytest.mark.parametrize("build", [in_inference_mode_only_the_model, in_inference_mode_only_the_optimizer])
def test_what_is_built_in_inference_mode_is_refused(build: Any) -> None:
    with pytest.raises(UserError, match="inference_mode"):
        build()


@pytest.mark.parametrize(
    "name", ["Adam", "BinSGDM", "OneBitAdam", "QuantizedAdam", "SGDM", "SoftSignSGD", "ZeroOneAdam"]
)
def test_a_learning_rate_given_as_to_torch_is_told_its_place(name: str) -> None:
    for arguments in ({"lr": 1e-3}, {}):
        with pytest.raises(UserError, match=f"{name}.*second argument, schedule"):
            getattr(optim, name)([nn.Parameter(torch.ones(1))], **arguments)


def test_an_optimizer_of_ones_own_may_name_its_arguments_as_it_likes() -> None:
    class Renamed(ZeroOneAdam):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)

    assert Renamed([nn.Parameter(torch.ones(1))], lr=0.5).schedule.peak_lr == 0.5


def test_torchs_distributed_checkpoint_is_told_where_the_state_is() -> None:
    model = nn.Linear(3, 3)
    optimizer = ZeroOneAdam(model.named_parameters(), 1e-2)
    with pytest.raises(
        UserError, match=r"get_optimizer_state_dict.*optimizer\.state_dict\(\) or portable_state_dict\(\)"
    ):
        get_optimizer_state_dict(model, optimizer)


def test_a_step_that_raised_does_not_change_the_scale_of_a_grad_scaler() -> None:
    parameter = nn.Parameter(torch.ones(5))
    optimizer, scaler = ZeroOneAdam([parameter], 0.1), torch.amp.GradScaler("cpu", init_scale=64.0)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    with torch.no_grad():
        parameter.zero_()
    with pytest.raises(UserError, match="reload_weights"):
        step()
    optimizer.reload_weights()
    scaler.update()
    step()
    assert optimizer.last_step is not None
    assert optimizer.last_step.loss_scale == 64.0 and optimizer.last_step.grad_norm == pytest.approx(5**0.5)


def test_a_state_of_which_a_part_does_not_fit_changes_nothing() -> None:
    optimizer = trained(0)
    for part, replaced in (("u", {}), ("m", {"m": torch.ones(3)})):
        state = copy.deepcopy(trained(2).state_dict())
        del state["replica"][part]
        state["replica"] |= replaced
        state["param_groups"][0]["weight_decay"] = 0.5
        before = optimizer.fingerprint()
        with pytest.raises(UserError, match=f"'{part}'"):
            optimizer.load_state_dict(state)
        assert optimizer.fingerprint() == before and optimizer.param_groups[0]["weight_decay"] != 0.5


@pytest.mark.parametrize(("kind", "name"), [(ZeroOneAdam, "x"), (OneBitAdam, "v"), (BinSGDM, "m"), (SGDM, "m")])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_state_that_is_not_finite_is_refused(kind: Any, name: str, value: float) -> None:
    optimizer = trained(0, kind)
    for state in (trained(2, kind).state_dict(), trained(2, kind).portable_state_dict()):
        parts = (state["replicated"], state.get("replica", {}), state.get("portable", {}).get("average", {}))
        (part,) = (part for part in parts if name in part)
        part[name][3] = value
        before = optimizer.fingerprint()
        with pytest.raises(UserError, match=f"'{name}' in the optimizer state holds NaN or infinity; load a"):
            optimizer.load_state_dict(state)
        assert optimizer.fingerprint() == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("owner", r"state lacks \['owner'\]; expected what"),
        ("owner shapes", r"state's owner lacks \['shapes'\]; expected what"),
        ("replica scalars", "lacks 'scalars'"),
        ("param_groups 0 lr_scale", r"state's param_groups lacks \['lr_scale'\]"),
        ("portable errors", r"state's portable part lacks \['errors'\]"),
        ("portable scalars", r"state's portable part lacks \['scalars'\]"),
        ("portable average m", "lacks 'm'"),
        ("replicated x", "lacks 'x'"),
    ],
)
def test_a_state_that_lacks_an_entry_is_refused(path: str, message: str) -> None:
    state = copy.deepcopy(trained(2).portable_state_dict() if "portable" in path else trained(2).state_dict())
    part: Any = state
    *places, name = path.split()
    for place in places:
        part = part[int(place) if place.isdigit() else place]
    del part[name]
    with pytest.raises(UserError, match=message):
        trained(0).load_state_dict(state)


def test_errors_that_are_not_finite_are_refused() -> None:
    state = trained(2).portable_state_dict()
    state["portable"]["errors"]["error"][0] = float("nan")
    with pytest.raises(UserError, match="'error' in the optimizer state holds NaN or infinity"):
        trained(0).load_state_dict(state)


@pytest.mark.parametrize(("nodes", "processes"), [(4, 1), (2, 2)])
def test_a_state_whose_errors_belong_to_other_elements_is_refused(
    monkeypatch: pytest.MonkeyPatch, nodes: int, processes: int
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    from simulated_replicas import loop_topology

    def optimizer(bucket_elements: int) -> ZeroOneAdam:
        topology = loop_topology(nodes, processes)
        parameter = nn.Parameter(torch.ones(1024))
        return ZeroOneAdam([parameter], 0.1, process_group=topology, block_size=32, bucket_elements=bucket_elements)

    state, other = optimizer(256).state_dict(), optimizer(512)
    sizes = {name: tensor.numel() for name, tensor in other.state_dict()["replica"].items()}
    assert sizes == {name: tensor.numel() for name, tensor in state["replica"].items()}
    before = other.fingerprint()
    with pytest.raises(UserError, match="give the optimizer the bucket_elements"):
        other.load_state_dict(state)
    assert other.fingerprint() == before
    optimizer(256).load_state_dict(state)


def trained(steps: int, kind: Callable[..., Any] = ZeroOneAdam) -> Any:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = kind([parameter], 0.1)
    for _ in range(steps):
        parameter.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_masks_of_a_sharded_optimizer_are_refused() -> None:
    masks = {"0": torch.ones(5, dtype=torch.bool)}
    with pytest.raises(UserError, match="shard is set and masks are given"):
        ZeroOneAdam([nn.Parameter(torch.ones(5))], 0.1, masks=masks, shard=True)
