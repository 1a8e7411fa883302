"""Delayed synchronization: the result of an exchange is applied one step later."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from megatron01.errors import UserError
from megatron01.optim import LossScaler, LRSchedule, OneBitAdam, TrainingDiverged, ZeroOneAdam
from tests.distributed.harness import run_ranks
from tests.distributed.replays import (
    Case,
    Replays,
    arrays,
    given_gradients,
    gradients,
    set_gradients,
)
from tests.reference.zero_one_adam import Reference, Settings
from tests.tiers import slow_after

COSINE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=8, total_steps=50)
CASES = {
    "cosine": Case(ZeroOneAdam, COSINE, {"delay": True, "variance_kappa": 2}),
    "groups": Case(
        ZeroOneAdam,
        COSINE,
        {"delay": True, "variance_kappa": 2, "block_size": 32, "bucket_elements": 256, "max_grad_norm": 20.0},
        weight_decay=(0.1, 0.0, 0.05, 0.0, 0.2),
        lr_scale=(1.0, 0.5, 1.0, 0.3, 1.0),
    ),
    "common momentum": Case(ZeroOneAdam, COSINE, {"delay": True, "variance_kappa": 2, "local_momentum": "common"}),
    "no compression": Case(ZeroOneAdam, COSINE, {"delay": True, "compressor": "none", "variance_kappa": 3}),
}


def reference_of(case: Case, n: int) -> Reference:
    settings = Settings(
        lr=case.schedule.lr,
        peak_lr=case.schedule.peak_lr,
        warmup=case.schedule.warmup_steps,
        total_steps=case.schedule.total_steps or 0,
        weight_decay=case.weight_decay,
        lr_scale=case.lr_scale,
        kappa=case.options["variance_kappa"],
        block_size=case.options.get("block_size", 64),
        common_momentum=case.options.get("local_momentum") == "common",
        compress=case.options.get("compressor") != "none",
        max_norm=case.options.get("max_grad_norm"),
    )
    return Reference(n, case.initial_weights(), settings)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_gradients_are_taken_before_the_result_is_there_and_all_else_is_the_same(replicas: int) -> None:
    replays = Replays(CASES, reference_of)
    for name, traces in replays.run(replicas).items():
        reference = replays.compare(name, traces)
        assert replicas == 1 or "one_bit" in reference.kinds


def settled(rank: int, size: int) -> dict[str, Any]:
    """Weights before, during and after each read of the state while an exchange is in flight, and master weights."""
    results: dict[str, Any] = {}
    for look in ("fingerprint", "replica_state", "master_parameters", "state_dict", "replicated_weights"):
        parameters, optimizer = Case(ZeroOneAdam, COSINE, {"delay": True, "variance_kappa": 1}).build()
        step = 0
        while not step or optimizer.last_step.kind != "one_bit":
            set_gradients(parameters, gradients(arrays(parameters), rank, step))
            optimizer.step()
            step += 1
        own = arrays(parameters)
        inside: Any = None
        if look == "replicated_weights":
            with optimizer.replicated_weights():
                inside = arrays(parameters)
        elif look == "master_parameters":
            inside = arrays(optimizer.master_parameters().values())
        else:
            getattr(optimizer, look)()
        after = arrays(parameters)
        masters = arrays(optimizer.master_parameters().values())
        results[look] = own, inside, after, masters
    return results


def test_looking_at_the_state_receives_what_is_under_way_and_keeps_the_weights_of_the_next_gradients() -> None:
    first, second = run_ranks(settled, 2)
    for look, (own, inside, after, masters) in first.items():
        others = second[look]
        for p in range(len(own)):
            assert (own[p] != others[0][p]).any(), "no replica was ahead of the exchange"
            assert (masters[p] == others[3][p]).all() and (after[p] == own[p]).all(), look
            assert inside is None or (inside[p] == masters[p]).all(), look


def overflowing(rank: int, size: int, delay: bool) -> list[Any]:
    """fp16 with overflows on one replica in every kind of step: reports and replicated state after each step."""
    case = Case(
        ZeroOneAdam,
        LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=8, total_steps=60),
        {"variance_kappa": 1, "delay": delay},
        weight_decay=(0.1,) * 5,
        dtype=torch.float16,
    )
    parameters, optimizer = case.build(loss_scaler=LossScaler(initial=2.0**16, hysteresis=1, window=7))
    trace = []
    for step in range(60):
        # gradients independent of the weights: with a delay they would be taken at other weights
        scale = optimizer.loss_scale
        # exact in fp16 at any loss scale
        noise = given_gradients(case.initial_weights(), rank, step)
        set_gradients(parameters, [g * (scale / 1024) for g in noise])
        if rank == 1 and step in (2, 5, 6, 14, 23, 39, 40):
            parameters[1].grad[3] = math.inf  # type: ignore[index]
        before = {name: t.clone() for name, t in {**optimizer.replicated_state(), **optimizer.replica_state()}.items()}
        optimizer.step()
        kind, loss_scale = optimizer.last_step.kind, optimizer.last_step.loss_scale
        after = {**optimizer.replicated_state(), **optimizer.replica_state()}
        kept = all(
            torch.equal(tensor, after[name]) for name, tensor in before.items() if name not in ("scalars", "weights")
        )
        trace.append((optimizer.fingerprint(), kind, loss_scale, scale, kept, optimizer.loss_scale))
    return trace


def test_an_exchange_called_off_late_leaves_no_trace() -> None:
    """With gradients that do not depend on the weights and state read after each step, a delay must change nothing."""
    delayed, prompt = (run_ranks(overflowing, 2, delay) for delay in (True, False))
    for late, usual in zip(delayed, prompt, strict=True):
        for step, (one, other) in enumerate(zip(late, usual, strict=True)):
            assert one[0] == other[0], f"step {step}"
            assert one[5] in (other[5], usual[step - 1][5]), f"scale after step {step}"  # may change one step later
            assert one[2] == one[3], "the gradient was divided by another scale than it was multiplied by"
            if other[1] == "skipped" and step in (2, 5, 6):
                assert one[4] and other[4], f"step {step}"


def scale_in_flight(rank: int, size: int) -> tuple[list[float], list[float]]:
    """Momentum after each step with gradient 1 times the loss scale, which an overflow in flight is about to halve."""
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=torch.float16))
    optimizer = OneBitAdam(
        [parameter],
        0.001,
        block_size=64,
        freeze_step=2,
        delay=True,
        loss_scaler=LossScaler(initial=1024.0, hysteresis=1, window=3),
    )
    scales = []
    for step in range(12):
        scales.append(optimizer.loss_scale)
        parameter.grad = torch.full((64,), optimizer.loss_scale, dtype=torch.float16)
        if step in (4, 9):
            parameter.grad[0] = math.inf
        optimizer.step()
        assert optimizer.last_step.loss_scale == scales[-1]
    momentum = optimizer.replica_state()["m"]
    return scales, momentum.tolist()


def test_the_loss_scale_may_move_while_a_gradient_is_made() -> None:
    for scales, momentum in run_ranks(scale_in_flight, 2):
        assert len(set(scales)) > 1
        # ten steps count; quantization of equal values loses only the rounding of the scale to bf16
        assert momentum == pytest.approx([1 - 0.9**10] * 64, rel=2.0**-8)


def diverging(rank: int, size: int) -> int:
    case = Case(ZeroOneAdam, LRSchedule(peak_lr=0.01, total_steps=100), {"variance_kappa": 1, "delay": True})
    parameters, optimizer = case.build(max_skipped_steps=5)
    for step in range(100):
        set_gradients(parameters, gradients(arrays(parameters), rank, step))
        if rank == 0 and step >= 10:
            parameters[0].grad[0] = math.nan  # type: ignore[index]
        try:
            optimizer.step()
        except TrainingDiverged:
            return step
    return -1


def test_all_replicas_give_up_at_the_same_step() -> None:
    steps = run_ranks(diverging, 2)
    assert steps[0] == steps[1] and 14 <= steps[0] < 20


def loaded_while_awaited(rank: int, size: int) -> bool:
    model, loaded = (torch.nn.Linear(40, 3) for _ in range(2))
    optimizer = ZeroOneAdam(model.named_parameters(), 0.01, delay=True, variance_kappa=1, sync_policy="every")
    torch.manual_seed(rank)
    while not optimizer.is_pending:
        model(torch.randn(4, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for value, parameter in enumerate(loaded.parameters()):
        torch.nn.init.constant_(parameter, value + 0.5)
    model.load_state_dict(loaded.state_dict())
    optimizer.reload_weights()
    with optimizer.replicated_weights():
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_weights_loaded_while_an_exchange_is_awaited_stay() -> None:
    assert run_ranks(loaded_while_awaited, 2) == [True, True]


def written_while_awaited(rank: int, size: int, write: str) -> str:
    """The error of the step after a write to weights; it follows one after which they are the same."""
    model = torch.nn.Linear(40, 3)
    optimizer = OneBitAdam(model.named_parameters(), 0.01, delay=True, freeze_step=2)
    try:
        for step in range(8):
            torch.manual_seed(8 * rank + step)
            model(torch.randn(4, 40)).square().mean().backward()
            with torch.no_grad():
                if step == 6 and write == "clamp":
                    model.weight.clamp_(-0.02, 0.02)
                elif step == 6 and write == "data":
                    model.weight.data.mul_(0.5)
                elif step == 6:
                    model.weight.mul_(2.0).mul_(0.5)
            assert optimizer.is_pending or step < 3
            optimizer.step()
            optimizer.zero_grad()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("write", ["clamp", "data", "none"])
def test_weights_written_while_an_exchange_is_awaited_are_not_overwritten_in_silence(write: str) -> None:
    for text in run_ranks(written_while_awaited, 2, write):
        assert ("have been written to since the last step" in text) == (write != "none")


def go_on(parameters: Any, optimizer: Any, rank: int, steps: Any, look: Any = None) -> list[Any]:
    """Weights, loss scale and kind after each step whose gradients depend on the weights; some of them overflow."""
    trace = []
    for step in steps:
        scale = optimizer.loss_scale
        set_gradients(parameters, [g * (scale / 1000) for g in gradients(arrays(parameters), rank, step)])
        if rank == 1 and step in (14, 23, 24):
            parameters[1].grad[3] = math.inf
        optimizer.step()
        trace.append((arrays(parameters), scale, optimizer.last_step.kind))
        if look is not None:
            look(optimizer)
    return trace


DELAYED = {
    "0/1 Adam": Case(ZeroOneAdam, COSINE, {"delay": True, "variance_kappa": 2}, dtype=torch.float16),
    "1-bit Adam": Case(OneBitAdam, COSINE, {"delay": True, "freeze_step": 6}, dtype=torch.float16),
}


def evaluate(optimizer: Any) -> None:
    with optimizer.replicated_weights():
        pass


def saved(optimizer: Any) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in optimizer.state_dict().items()}


def at_any_step(rank: int, size: int, case: Case) -> bool:
    """Whether the run is bit-identical if the state is read after every step, or if it is resumed after any step."""

    def build() -> Any:
        return case.build(loss_scaler=LossScaler(initial=1024.0, hysteresis=1, window=7))

    def equal(one: list[Any], other: list[Any]) -> bool:
        return len(one) == len(other) and all(
            a[1:] == b[1:] and all((x == y).all() for x, y in zip(a[0], b[0], strict=True))
            for a, b in zip(one, other, strict=True)
        )

    expected = go_on(*build(), rank, range(30))
    states: list[dict[str, Any]] = []
    looks = (lambda optimizer: optimizer.settle(), evaluate, lambda optimizer: states.append(saved(optimizer)))
    if not all(equal(go_on(*build(), rank, range(30), look), expected) for look in looks):
        return False
    for stop in range(5, 29):
        parameters, optimizer = build()
        optimizer.load_state_dict(states[stop - 1])
        if not equal(go_on(parameters, optimizer, rank, range(stop, 30)), expected[stop:]):
            return False
    return True


@pytest.mark.parametrize("name", slow_after(1, DELAYED))
def test_a_look_or_a_stop_after_any_step_changes_no_bit(name: str) -> None:
    assert run_ranks(at_any_step, 2, DELAYED[name]) == [True, True]
