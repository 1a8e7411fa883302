"""Bugs of the published 0/1 Adam (DeepSpeed 0.19) that must not occur here; tests are named after what holds instead.

fault there                                               what holds here
-------------------------------------------------------   ---------------------------------------------------------
resume resets the schedule, discards the first update     a_resumed_run_goes_on_with_the_same_steps_and_loses_none
resume refreshes a frozen v from one rank's gradient      a_resumed_run_goes_on_with_the_same_steps_and_loses_none
error feedback and accumulated step dropped on load       everything_that_a_replica_accumulated_is_in_its_state
saving between two synchronizations keeps rank 0's only   everything_that_a_replica_accumulated_is_in_its_state
first step compresses zeros and drops its gradient        the_first_gradient_counts
no bias correction: a first step of 3.16 lr               the_first_gradient_counts
weight decay amplified by 1 / (1 - beta1)                 weight_decay_shrinks_weights_by_its_rate_and_nothing_else
lr = 0 divides 0 by 0                                     learning_rate_zero_keeps_weights_and_momentum
world size 1: no momentum outside full steps              one_replica_updates_its_momentum_at_every_step
replicas drift apart, v and m equal or not                models_are_equal_to_the_bit_after_every_synchronization
4 collectives a call (304 with a tensor each)             a_synchronization_is_two_collectives_and_a_local_step_none
one rank without a gradient leaves out a collective       a_gradient_missing_on_one_replica_counts_as_zero
a full step leaves stale error feedback of another kind   full_steps_leave_the_error_feedback_alone
fp32 accumulators beside the errors                       state_takes_20_bytes_and_a_share_per_parameter
clipping factors that differ at averaged steps            full_steps_clip_by_the_norm_of_the_mean
the key bias explodes                                     test_key_bias.py
one scale for all is no contraction, pads count           test_codec.py (contraction, real elements, golden payload)
-0.0 packed as -1, its error computed for +1              test_codec.py (zero counts as plus)
the freeze is a step late                                 test_policies.py (freezes at the given step)
an overflow is met in step only by an extra collective    test_overflow.py
"""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron01.comm import transport
from megatron01.optim import LRSchedule, TabulatedSchedule, ZeroOneAdam
from tests.distributed.harness import run_ranks

STEPS, FROZEN = 64, 12
SIZE = 300  # in blocks of 64: a last block with padding, and chunks of unequal length


def build(**options: Any) -> tuple[torch.nn.Parameter, ZeroOneAdam]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, SIZE))
    schedule = LRSchedule(style="linear", peak_lr=0.01, min_lr=2e-3, total_steps=STEPS)
    defaults: dict[str, Any] = {"block_size": 64, "variance_freeze_step": FROZEN, "variance_kappa": 4}
    defaults["sync_policy"] = "schedule"
    return parameter, ZeroOneAdam([parameter], options.pop("schedule", schedule), **{**defaults, **options})


def set_gradient(parameter: torch.nn.Parameter, rank: int, step: int) -> None:
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))
    parameter.grad = parameter.detach() - 0.5 + 0.3 * noise + 0.2 * rank


def loaded_copy(optimizer: ZeroOneAdam) -> tuple[torch.nn.Parameter, ZeroOneAdam]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    parameter, copy = build()
    copy.load_state_dict(torch.load(file, weights_only=True))
    return parameter, copy


def train(rank: int, save_at: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Kind and state after each step; the optimizer is replaced by a loaded one before the steps ``save_at``."""
    parameter, optimizer = build()
    trace = []
    for step in range(STEPS):
        if step in save_at:
            parameter, optimizer = loaded_copy(optimizer)
        before = parameter.detach().clone()
        set_gradient(parameter, rank, step)
        optimizer.step()
        report, state = optimizer.last_step, optimizer.replica_state()
        trace.append(
            {
                "kind": report.kind,
                "rounds": report.rounds,
                "synchronized": report.synchronized,
                "interval": report.interval,
                "moved": not torch.equal(parameter, before),
                "weights": parameter.detach().clone(),
                "v": optimizer.replicated_state()["v"].clone(),
                "x": optimizer.replicated_state()["x"].clone(),
                **{name: state[name].clone() for name in ("m", "u", "worker_error", "server_error") if name in state},
            }
        )
    return trace


SAVED = (1, 5, 13, 30, 50, 51, 58)


def facts_of_resuming(rank: int, size: int) -> dict[str, Any]:
    return {"whole": train(rank), "resumed": train(rank, SAVED)}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_ranks(facts_of_resuming, 2)


def test_a_resumed_run_goes_on_with_the_same_steps_and_loses_none(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        keys = ("kind", "rounds", "synchronized", "interval", "moved")
        for step, (whole, resumed) in enumerate(zip(run["whole"], run["resumed"], strict=True)):
            assert {key: whole[key] for key in keys} == {key: resumed[key] for key in keys}, f"step {step}"
            assert resumed["moved"], f"step {step} changed nothing"
        for step in range(FROZEN, STEPS):
            assert torch.equal(run["resumed"][step]["v"], run["whole"][FROZEN - 1]["v"]), "v was frozen"


def test_everything_that_a_replica_accumulated_is_in_its_state(runs: list[dict[str, Any]]) -> None:
    inside = [s for s in SAVED if not runs[0]["whole"][s - 1]["synchronized"]]
    assert inside, "no state was saved between two synchronizations"
    for step in inside:
        first, second = (run["whole"][step - 1] for run in runs)
        assert torch.equal(first["x"], second["x"]), "the synchronized weights are no replica's own"
        assert not torch.equal(first["u"], second["u"]) and first["worker_error"].any() and first["server_error"].any()
    for run in runs:
        for step, (whole, resumed) in enumerate(zip(run["whole"], run["resumed"], strict=True)):
            for name in ("weights", "x", "v", "m", "u", "worker_error", "server_error"):
                assert torch.equal(whole[name], resumed[name]), f"{name} after step {step}"


def test_models_are_equal_to_the_bit_after_every_synchronization(runs: list[dict[str, Any]]) -> None:
    kinds = set()
    for one, other in zip(runs[0]["whole"], runs[1]["whole"], strict=True):
        assert torch.equal(one["x"], other["x"]) and torch.equal(one["v"], other["v"])
        if one["synchronized"]:
            assert torch.equal(one["weights"], one["x"][:SIZE]) and torch.equal(one["weights"], other["weights"])
            assert torch.equal(one["m"], other["m"])
        kinds.add(one["kind"])
    assert kinds == {"full", "one_bit", "local"}


def test_full_steps_leave_the_error_feedback_alone(runs: list[dict[str, Any]]) -> None:
    trace = runs[0]["whole"]
    after_one_bit = [s for s in range(1, STEPS) if trace[s]["kind"] == "full" and trace[s - 1]["kind"] == "one_bit"]
    assert after_one_bit
    for step in after_one_bit:
        assert trace[step - 1]["worker_error"].any()
        for name in ("worker_error", "server_error"):
            assert torch.equal(trace[step][name], trace[step - 1][name])


def outcomes_of_two(rank: int, size: int) -> dict[str, Any]:
    """Short experiments on two replicas, one after the other."""
    return {
        "first": first_step(rank),
        "decay": decayed(),
        "rate zero": [rate_zero(rank, policy) for policy in ("every", "schedule")],
        "collectives": collectives(rank),
        "missing": missing(rank),
        "clipped": clipped(rank),
        "bytes": state_bytes(),
    }


def first_step(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Change of the weights, and momentum, after one step with gradient 1 on one and 3 on the other replica."""
    parameter, optimizer = build()
    before = parameter.detach().clone()
    parameter.grad = torch.full((SIZE,), 1.0 + 2.0 * rank)
    optimizer.step()
    return parameter.detach() - before, optimizer.replica_state()["m"][:SIZE].clone()


def decayed() -> list[tuple[bool, torch.Tensor, torch.Tensor, bool]]:
    """(synchronized, weights, weights by weight decay alone, any momentum) after steps without a gradient."""
    parameter, optimizer = build(weight_decay=0.5)
    expected = parameter.detach().double()
    trace = []
    for step in range(STEPS):
        parameter.grad = torch.zeros(SIZE)
        optimizer.step()
        expected = expected * (1 - optimizer.last_step.lr * 0.5)
        momentum = bool(optimizer.replica_state()["m"].any())
        trace.append((optimizer.last_step.synchronized, parameter.detach().clone(), expected.float(), momentum))
        assert optimizer.step_count == step + 1
    return trace


def rate_zero(rank: int, policy: str) -> tuple[bool, float, float, bool]:
    """Whether rate 0 kept the weights, the momentum before and after it, and whether all is finite in the end."""
    schedule = TabulatedSchedule([0.01] * 14 + [0.0] * 12 + [0.01] * 4)
    parameter, optimizer = build(schedule=schedule, sync_policy=policy)
    kept, momenta = True, []
    for step in range(30):
        before = parameter.detach().clone()
        parameter.grad = torch.full((SIZE,), 1.0 + rank)
        optimizer.step()
        if schedule.lr(step) == 0.0:
            kept = kept and torch.equal(parameter, before)
        momenta.append(float(optimizer.replica_state()["m"][0]))
    tensors = [parameter.detach(), *optimizer.replicated_state().values(), *optimizer.replica_state().values()]
    return kept, momenta[13], momenta[25], all(bool(torch.isfinite(t).all()) for t in tensors)


def collectives(rank: int) -> list[tuple[str, list[str]]]:
    """Kind of each step and the collectives that it called."""
    called: list[str] = []

    def counting(name: str, function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        return count

    parameter, optimizer = build()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "all_reduce", "broadcast", "all_gather", "reduce_scatter_tensor", "barrier"):
            patch.setattr(dist, name, counting(name, getattr(dist, name)))
        patch.setattr(transport, "_all_gather", counting("all_gather_into_tensor", transport._all_gather))
        patch.setattr(transport, "link_rate", lambda group: math.inf)  # found by an all-reduce in the first of them
        steps = []
        for step in range(STEPS):
            set_gradient(parameter, rank, step)
            called.clear()
            optimizer.step()
            steps.append((optimizer.last_step.kind, list(called)))
    return steps


def missing(rank: int) -> tuple[list[str], list[str]]:
    """Fingerprints of a run in which a gradient is sometimes missing on one replica, and of one in which it is zero."""
    prints: list[list[str]] = []
    for without in (True, False):
        parameter, optimizer = build()
        prints.append([])
        for step in range(STEPS):
            set_gradient(parameter, rank, step)
            if rank == 1 and step % 3 == 0:
                parameter.grad = None if without else torch.zeros(SIZE)
            optimizer.step()
            prints[-1].append(optimizer.fingerprint())
    return prints[0], prints[1]


def clipped(rank: int) -> tuple[float, torch.Tensor]:
    """Reported norm, and momentum, after a full step with gradients of different norms."""
    parameter, optimizer = build(max_grad_norm=1.0)
    parameter.grad = torch.full((SIZE,), 1.0 + 2.0 * rank)
    optimizer.step()
    return optimizer.last_step.grad_norm, optimizer.replica_state()["m"].clone()


def state_bytes() -> tuple[int, int]:
    """Bytes of the whole state, and number of elements, for a parameter of whole blocks."""
    optimizer = ZeroOneAdam([torch.nn.Parameter(torch.zeros(64, 64))], 0.01, block_size=64)
    tensors = {**optimizer.replicated_state(), **optimizer.replica_state()}
    del tensors["scalars"]
    return sum(t.nbytes for t in tensors.values()), 64 * 64


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(outcomes_of_two, 2)


def test_the_first_gradient_counts(outcomes: list[dict[str, Any]]) -> None:
    for moved, momentum in (of_rank["first"] for of_rank in outcomes):
        # the mean gradient is 2; corrected for their bias, momentum and sqrt(v) are 2 too
        torch.testing.assert_close(momentum, torch.full((SIZE,), 0.1 * 2.0))
        torch.testing.assert_close(moved, torch.full((SIZE,), -0.01), rtol=1e-3, atol=1e-6)


def test_weight_decay_shrinks_weights_by_its_rate_and_nothing_else(outcomes: list[dict[str, Any]]) -> None:
    for of_rank in outcomes:
        assert {synchronized for synchronized, *_ in of_rank["decay"]} == {True, False}
        for _, weights, expected, momentum in of_rank["decay"]:
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
            assert not momentum, "weight decay got into the momentum"


def test_learning_rate_zero_keeps_weights_and_momentum(outcomes: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(outcomes):
        for kept, before, after, finite in of_rank["rate zero"]:
            assert kept and finite
            share = 0.9**12  # after twelve steps at rate 0, each with this replica's own gradient
            assert after == pytest.approx(share * before + (1 - share) * (1.0 + rank), rel=1e-4)


def test_a_synchronization_is_two_collectives_and_a_local_step_none(outcomes: list[dict[str, Any]]) -> None:
    for of_rank in outcomes:
        assert {kind for kind, _ in of_rank["collectives"]} == {"full", "one_bit", "local"}
        for kind, called in of_rank["collectives"]:
            assert called[:2] == ([] if kind == "local" else ["all_to_all_single", "all_gather_into_tensor"])
            # replicated state is compared after some full steps, during the next step
            assert called[2:] in ([], ["all_gather_into_tensor"]) and (kind == "full" or not called[2:])
        assert 2 <= sum(len(called) == 3 for _, called in of_rank["collectives"]) <= 12


def test_a_gradient_missing_on_one_replica_counts_as_zero(outcomes: list[dict[str, Any]]) -> None:
    without, zero = outcomes[0]["missing"]
    assert without == zero and outcomes[1]["missing"] == outcomes[0]["missing"]


def test_full_steps_clip_by_the_norm_of_the_mean(outcomes: list[dict[str, Any]]) -> None:
    for norm, momentum in (of_rank["clipped"] for of_rank in outcomes):
        assert norm == pytest.approx(2.0 * SIZE**0.5)
        assert float(momentum.norm()) == pytest.approx(0.1, rel=1e-4)
        assert torch.equal(momentum, outcomes[0]["clipped"][1])


def test_state_takes_20_bytes_and_a_share_per_parameter(outcomes: list[dict[str, Any]]) -> None:
    for size, elements in (of_rank["bytes"] for of_rank in outcomes):
        assert size == (20 + 4 // 2) * elements


def test_one_replica_updates_its_momentum_at_every_step() -> None:
    """Without any process group; after a synchronization the momentum is the mean over the interval."""
    parameter, optimizer = build(sync_policy="every")
    momentum = torch.zeros(SIZE)
    kinds = set()
    for step in range(STEPS):
        set_gradient(parameter, 0, step)
        momentum = 0.9 * momentum + 0.1 * parameter.grad  # type: ignore[operator]
        before = parameter.detach().clone()
        optimizer.step()
        torch.testing.assert_close(optimizer.replica_state()["m"][:SIZE], momentum, rtol=1e-4, atol=1e-6)
        assert not torch.equal(parameter, before)
        kinds.add(optimizer.last_step.kind)
    assert kinds == {"full", "one_bit"}
