"""ZeroOneAdam on one replica: as a torch optimizer in a plain training loop, and against torch's Adam."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from megatron01.comm import Topology
from megatron01.comm.transport import Transport
from megatron01.errors import UserError
from megatron01.optim import (
    LossScaler,
    LRSchedule,
    TabulatedSchedule,
    TrainingDiverged,
    ZeroOneAdam,
    weight_decay_groups,
)
from tests.unit.comm.in_process import run_replicas


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 5))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(13, 5, generator=generator)
    losses = []
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        inputs = torch.randn(64, 13, generator=generator)
        loss = (model(inputs.to(dtype)).float() - (inputs @ target / 4).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_without_compression_and_local_steps_and_with_every_refresh_it_is_adam() -> None:
    steps, lr = 150, 3e-3
    ours, torchs = small_model(), small_model()
    optimizer = ZeroOneAdam(
        ours.parameters(),
        lr,
        compressor="none",
        sync_policy="every",
        variance_kappa=10**6,
        variance_decay="per_refresh",
        step_bound=None,  # Adam sometimes moves a weight by more than the learning rate
    )
    losses = train(ours, optimizer, steps)
    assert losses == pytest.approx(train(torchs, torch.optim.Adam(torchs.parameters(), lr=lr), steps), rel=1e-4)
    for got, want in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert {"full"} == {optimizer.last_step.kind}


def test_weight_decay_is_that_of_adamw() -> None:
    """Also over local steps, where it acts through the product P; here the gradient is always 0."""
    schedule = LRSchedule(style="cosine", peak_lr=0.1, total_steps=60)
    one = nn.Parameter(torch.ones(10))
    other = nn.Parameter(torch.ones(10))
    optimizer = ZeroOneAdam([one], schedule, weight_decay=0.5)
    adamw = torch.optim.AdamW([other], weight_decay=0.5)
    kinds = set()
    for step in range(60):
        adamw.param_groups[0]["lr"] = schedule.lr(step)
        one.grad, other.grad = torch.zeros(10), torch.zeros(10)
        optimizer.step()
        adamw.step()
        kinds.add(optimizer.last_step.kind)
        torch.testing.assert_close(one, other)
    assert kinds == {"full", "one_bit", "local"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_trains_in_every_precision(dtype: torch.dtype) -> None:
    model = small_model().to(dtype)
    schedule = LRSchedule(style="cosine", peak_lr=1e-2, warmup_steps=10, total_steps=200)
    losses = train(model, ZeroOneAdam(model.named_parameters(), schedule, block_size=64), 200)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_parameter_groups_share_one_buffer_and_keep_their_settings() -> None:
    model = small_model()
    groups: list[dict[str, Any]] = weight_decay_groups(model, 0.3)
    assert [name for name, _ in groups[1]["params"]] == ["0.bias", "2.bias"]
    groups[1]["lr_scale"] = 0.5
    optimizer = ZeroOneAdam(groups, LRSchedule(style="linear", peak_lr=1e-2, total_steps=30), weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    train(model, optimizer, 5)
    rate = optimizer.last_step.lr
    assert [group["lr"] for group in optimizer.param_groups] == [rate, rate * 0.5]


def test_a_group_with_half_the_rate_moves_half_as_far() -> None:
    fast, slow = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
    schedule = LRSchedule(style="linear", peak_lr=1e-2, total_steps=40)
    optimizer = ZeroOneAdam([{"params": [fast]}, {"params": [slow], "lr_scale": 0.5}], schedule)
    for _ in range(40):
        fast.grad = torch.linspace(-1, 1, 50)
        slow.grad = torch.linspace(-1, 1, 50)
        optimizer.step()
    torch.testing.assert_close(slow * 2, fast)


def test_a_group_whose_rate_is_lost_in_fp32_stays_where_it_is() -> None:
    moving, still = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    optimizer = ZeroOneAdam([{"params": [moving]}, {"params": [still], "lr_scale": 1e-50}], 0.01)
    for _ in range(3):
        moving.grad, still.grad = torch.ones(8), torch.ones(8)
        optimizer.step()
    assert (moving < 1).all() and torch.equal(still, torch.ones(8))
    assert torch.isfinite(optimizer.replica_state()["m"]).all()


def test_master_parameters_have_names_or_positions_and_the_weights_shapes() -> None:
    model = small_model()
    by_name = ZeroOneAdam(model.named_parameters(), 1e-3).master_parameters()
    by_position = ZeroOneAdam(model.parameters(), 1e-3).master_parameters()
    assert list(by_name) == ["0.weight", "0.bias", "2.weight", "2.bias"] and list(by_position) == [0, 1, 2, 3]
    for master, parameter in zip(by_name.values(), model.parameters(), strict=True):
        assert torch.equal(master, parameter) and master.dtype == torch.float32


def test_consensus_weights_are_those_of_the_last_synchronization_and_give_way_again() -> None:
    model = small_model().bfloat16()
    optimizer = ZeroOneAdam(model.named_parameters(), LRSchedule(style="linear", peak_lr=1e-2, total_steps=100))
    train(model, optimizer, 85)
    assert optimizer.last_step.kind == "local"
    own = [p.detach().clone() for p in model.parameters()]
    with optimizer.replicated_weights():
        for master, parameter in zip(optimizer.master_parameters().values(), model.parameters(), strict=True):
            assert torch.equal(master.bfloat16(), parameter)
        assert any(not torch.equal(a, b) for a, b in zip(own, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own, model.parameters(), strict=True))


def test_frozen_tied_unused_and_strided_parameters() -> None:
    torch.manual_seed(0)
    used = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    twin = nn.Conv2d(3, 8, 3)
    twin.load_state_dict(used.state_dict())
    frozen, unused = nn.Parameter(torch.ones(4), requires_grad=False), nn.Parameter(torch.ones(4))
    schedule = LRSchedule(style="linear", peak_lr=1e-2, total_steps=40)
    one = ZeroOneAdam([*used.parameters(), frozen, unused, nn.Parameter(torch.empty(0))], schedule)
    other = ZeroOneAdam(twin.parameters(), schedule)
    for _ in range(40):
        images = torch.randn(4, 3, 8, 8)
        for model, optimizer in ((used, one), (twin, other)):
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(used.weight, twin.weight)
    assert used.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(frozen, torch.ones(4)) and torch.equal(unused, torch.ones(4))
    shared = nn.Linear(6, 6)
    tied = nn.Sequential(shared, nn.ReLU(), shared)
    assert len(ZeroOneAdam(tied.parameters(), 1e-3).master_parameters()) == 2


def test_a_closure_and_fp32_gradient_sums_are_used() -> None:
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = ZeroOneAdam([parameter], 0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 8.0 and (parameter < 1).all()
    parameter.main_grad = torch.full((8,), -1.0)  # type: ignore[attr-defined]
    parameter.grad = None
    optimizer.step()
    assert optimizer.last_step.grad_norm == pytest.approx(math.sqrt(8))
    optimizer.zero_grad()
    assert not parameter.main_grad.any()  # type: ignore[attr-defined]


@pytest.mark.parametrize("total", [torch.ones(1), torch.ones(8, dtype=torch.float64), torch.ones(4, 2)])
def test_fp32_gradient_sums_of_another_shape_or_type_are_refused(total: torch.Tensor) -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = ZeroOneAdam([parameter], 0.1)
    parameter.main_grad = total  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="the gradient of 0 is"):
        optimizer.step()


def test_a_main_grad_of_none_stands_for_none_at_all() -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = ZeroOneAdam([parameter], 0.1)
    parameter.main_grad, parameter.grad = None, torch.ones(8)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
    assert (parameter < 1).all() and parameter.grad is None


def test_weights_loaded_into_the_model_can_become_the_master_weights() -> None:
    model = small_model()
    optimizer = ZeroOneAdam(model.parameters(), LRSchedule(style="linear", peak_lr=1e-2, total_steps=50))
    train(model, optimizer, 42)
    other = small_model(seed=5)
    model.load_state_dict(other.state_dict())
    optimizer.reload_weights()
    for master, parameter in zip(optimizer.master_parameters().values(), other.parameters(), strict=True):
        assert torch.equal(master, parameter)
    with optimizer.replicated_weights():
        pass
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_no_learning_rate_at_all_changes_nothing_but_the_moments() -> None:
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = ZeroOneAdam(model.parameters(), 0.0, weight_decay=0.1)
    train(model, optimizer, 20)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.isfinite(t).all() for t in optimizer.replica_state().values())


def test_a_schedule_that_falls_to_zero_and_rises_again() -> None:
    rates = [0.01] * 10 + [0.0] * 40 + [0.01] * 10
    model = small_model()
    optimizer = ZeroOneAdam(model.parameters(), TabulatedSchedule(rates))
    train(model, optimizer, 60)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_an_element_without_any_gradient_at_a_refresh_is_not_thrown_away() -> None:
    """Its second moment is 0; dividing by eps alone would move it by lr * m / 1e-8."""
    parameter = nn.Parameter(torch.zeros(40))
    optimizer = ZeroOneAdam([parameter], 0.01, variance_freeze_step=3, sync_policy="constant:2")
    for step in range(10):
        parameter.grad = torch.ones(40)
        if step < 3:
            parameter.grad[7] = 0.0
        optimizer.step()
        assert parameter.abs().max() < 1.0


def test_steps_are_skipped_and_the_loss_scale_falls_when_a_gradient_is_not_finite() -> None:
    parameter = nn.Parameter(torch.ones(40))
    optimizer = ZeroOneAdam([parameter], 0.01, loss_scaler=LossScaler(initial=8.0, hysteresis=1), max_skipped_steps=4)
    parameter.grad = torch.full((40,), math.inf) * optimizer.loss_scale
    optimizer.step()
    assert (optimizer.last_step.kind, optimizer.loss_scale) == ("skipped", 4.0)
    assert torch.equal(parameter, torch.ones(40))
    optimizer.step()
    optimizer.step()
    with pytest.raises(TrainingDiverged, match="4 steps in a row"):
        optimizer.step()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_single_replica_gives_up_in_local_steps_whose_norm_is_read_late(backend: str) -> None:
    """A step without a finite gradient changes nothing; the fifth in a row ends the run, or the one after it."""
    parameter = nn.Parameter(torch.ones(40))
    options = {"variance_freeze_step": 2, "sync_policy": "constant:100", "max_skipped_steps": 5}
    optimizer = ZeroOneAdam([parameter], 0.01, backend=backend, **options)
    for step in range(6):
        parameter.grad = torch.full((40,), 1.0 + step)
        optimizer.step()
    before = parameter.clone()
    with pytest.raises(TrainingDiverged, match="5 steps in a row"):
        for _ in range(6):
            parameter.grad = torch.full((40,), math.nan)
            optimizer.step()
            assert torch.equal(parameter, before) and optimizer.last_step.planned_kind == "local"
    assert torch.equal(parameter, before)


def single_replica(
    overflows: tuple[int, ...], steps: int, backend: str = "cpu", own_norm: float | None = None, **options: Any
) -> tuple[torch.Tensor, list[str]]:
    """Weights after ``steps`` and the planned kinds; of steps from 3 on, those that are 2 modulo 3 synchronize."""
    parameter, generator = nn.Parameter(torch.ones(64)), torch.Generator().manual_seed(1)
    options |= {"variance_freeze_step": 3, "sync_policy": "constant:3", "weight_decay": 0.1, "backend": backend}
    optimizer, kinds = ZeroOneAdam([parameter], 0.01, **options), []
    for step in range(steps):
        gradient = torch.randn(64, generator=generator)
        gradient *= optimizer.loss_scale if own_norm is None else own_norm / gradient.norm()
        parameter.grad = gradient.fill_(math.nan) if step in overflows else gradient
        optimizer.step()
        kinds.append(optimizer.last_step.planned_kind)
    return parameter.detach(), kinds


@pytest.mark.parametrize("overflow", range(9, 12))
def test_a_single_replica_drops_a_gradient_alike_whenever_its_norm_is_read(overflow: int) -> None:
    weights, kinds = single_replica((overflow,), 20)
    assert kinds[9:12] == ["local", "local", "one_bit"]
    torch.testing.assert_close(weights, single_replica((overflow,), 20, "reference")[0])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_single_replica_gives_up_though_the_next_gradient_is_finite(backend: str, is_scaled: bool) -> None:
    """The norm of the last local step is read in the synchronization after it at the latest."""
    scaler = LossScaler(initial=8.0) if is_scaled else None
    single_replica((9, 10), 9, backend, loss_scaler=scaler, max_skipped_steps=2)
    with pytest.raises(TrainingDiverged, match="2 steps in a row"):
        single_replica((9, 10), 12, backend, loss_scaler=scaler, max_skipped_steps=2)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_single_replica_may_clip_its_gradients_itself(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    single_replica((), 30, backend, own_norm=1.0)
    assert not caplog.messages


def test_clipping_bounds_the_momentum() -> None:
    parameter = nn.Parameter(torch.zeros(100))
    optimizer = ZeroOneAdam([parameter], 0.1, max_grad_norm=2.0)
    parameter.grad = torch.full((100,), 3.0)
    optimizer.step()
    assert optimizer.last_step.grad_norm == pytest.approx(30.0)
    assert optimizer.replica_state()["m"].norm() == pytest.approx(0.1 * 2.0, rel=1e-4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"betas": (1.0, 0.9)}, "betas is .1.0, 0.9.; expected two numbers in"),
        ({"betas": (0.9, 1.0)}, "betas is .0.9, 1.0.; expected two numbers in"),
        ({"bucket_elements": 0}, "bucket_elements is 0"),
        ({"variance_decay_floor": 1.0}, "variance_decay_floor is 1.0"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"variance_decay": "steps"}, "variance_decay is 'steps'"),
        ({"compressor": "two_bit"}, "compressor is 'two_bit'"),
        ({"block_size": 100}, "block_size is 100"),
        ({"max_sync_interval": 0}, "max_sync_interval is 0"),
        ({"variance_kappa": 0}, "variance_kappa is 0"),
        ({"sync_policy": "never"}, "sync_policy is 'never'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ZeroOneAdam(small_model().parameters(), 1e-3, **arguments)


@pytest.mark.parametrize(
    "parameters, message",
    [
        ([nn.Parameter(torch.zeros(3, dtype=torch.float64))], "is torch.float64; expected float32"),
        ([nn.Parameter(torch.zeros(3), requires_grad=False)], "no parameters that require a gradient"),
        ([nn.Parameter(torch.zeros(4, 4)[:, ::2])], "gaps or overlaps"),
        ([{"params": [nn.Parameter(torch.zeros(3))], "momentum": 0.9}], "sets .'momentum'."),
        ([{"params": [nn.Parameter(torch.zeros(3))], "lr": 0.5}], "use lr_scale"),
        ([{"params": [nn.Parameter(torch.zeros(3))], "lr_scale": 0.0}], "lr_scale 0.0"),
        ([{"params": [nn.Parameter(torch.zeros(3))], "weight_decay": -1.0}], "weight_decay -1.0"),
    ],
)
def test_wrong_parameters_are_named(parameters: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ZeroOneAdam(parameters, 1e-3)


def test_sparse_gradients_and_late_parameters_are_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = ZeroOneAdam(embedding.parameters(), 1e-3)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UserError, match="sparse"):
        optimizer.step()
    with pytest.raises(UserError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_the_state_of_another_model_is_refused() -> None:
    one, other = nn.Linear(40, 40), nn.Linear(400, 40)
    saved = ZeroOneAdam(one.parameters(), 1e-3).state_dict()
    with pytest.raises(UserError, match="parameter 0 has shape"):
        ZeroOneAdam(other.parameters(), 1e-3).load_state_dict(saved)


def test_state_survives_torch_save(tmp_path: Any) -> None:
    model = small_model()
    schedule = LRSchedule(style="linear", peak_lr=1e-2, total_steps=50)
    optimizer = ZeroOneAdam(model.parameters(), schedule)
    train(model, optimizer, 30)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    twin = small_model(seed=3)
    again = ZeroOneAdam(twin.parameters(), schedule)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert train(twin, again, 20, seed=9) == train(model, optimizer, 20, seed=9)
    assert again.fingerprint() == optimizer.fingerprint()


def test_memory_per_parameter_is_five_buffers_and_a_share() -> None:
    """x, v, m, u (and, with several replicas, the worker error and a share of the server error) in fp32."""
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = ZeroOneAdam(model.parameters(), 1e-3)
    tensors = {**optimizer.replicated_state(), **optimizer.replica_state()}
    tensors.pop("scalars")
    assert sum(t.nbytes for t in tensors.values()) == 16 * 1024 * 1024


@pytest.mark.parametrize("attached", [False, True])
def test_the_memory_of_an_optimizer_is_free_once_nothing_uses_it_though_the_model_lives(attached: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = ZeroOneAdam(model.named_parameters(), 0.1)
    if attached:
        optimizer.attach(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    master = weakref.ref(optimizer.replicated_state()["x"])
    del optimizer
    gc.collect()
    assert master() is None
    model(torch.ones(1, 3)).sum().backward()


def test_a_run_that_goes_on_in_fp16_starts_with_a_loss_scale_of_its_own() -> None:
    model = small_model()
    saved = ZeroOneAdam(model.parameters(), 1e-3).state_dict()
    scaled = ZeroOneAdam(model.parameters(), 1e-3, loss_scaler=LossScaler(initial=256.0))
    scaled.load_state_dict(saved)
    assert scaled.loss_scale == 256.0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_backward_pass_through_weights_that_have_moved_fails_as_with_torchs_optimizers(backend: str) -> None:
    model = small_model()
    optimizer = ZeroOneAdam(model.parameters(), 0.1, backend=backend)
    loss = model(torch.ones(3, next(model.parameters()).shape[1])).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_penalty_on_gradients_has_a_gradient() -> None:
    """``create_graph`` makes gradients that are functions of the weights, and stay so until the step."""
    totals = []
    for build in (lambda p: ZeroOneAdam(p, 1e-2), lambda p: torch.optim.SGD(p, 1e-2)):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = build(layer.parameters())
        layer(torch.ones(2, 3)).square().sum().backward(create_graph=True)
        penalty = sum(parameter.grad.square().sum() for parameter in layer.parameters())
        assert isinstance(penalty, torch.Tensor)
        penalty.backward()
        totals.append([parameter.grad.detach().clone() for parameter in layer.parameters()])
        optimizer.step()
    for one, other in zip(*totals, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype yet")
@pytest.mark.parametrize("computed", [False, True])
def test_gradients_of_bf16_weights_may_be_summed_in_fp32_by_torch(computed: bool) -> None:
    """``grad_dtype`` is torch's own way; ``main_grad`` holds the same sums, of which bf16 would lose the last one."""
    weights = []
    for dtype in (torch.float32, None):
        weight, other = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
        optimizer = ZeroOneAdam([weight, other], 1e-2, sync_policy="every")
        total = torch.full((4,), 1.0 + 2.0**-12)
        if dtype is None:
            weight.main_grad = total.clone()  # type: ignore[attr-defined]
        else:
            weight.grad_dtype = dtype
            if computed:
                for part in (1.0, 2.0**-12):
                    (weight * part).sum().backward()
            else:
                weight.grad = total.clone()
        other.grad = torch.ones_like(other)
        optimizer.step()
        weights.append(optimizer.replica_state()["m"].clone())
        optimizer.zero_grad()
        assert weight.grad is None
    assert torch.equal(*weights) and weights[0][0] > weights[0][1024]


def replica_with_a_pause(transport: Transport) -> tuple[list[str], list[str]]:
    """The kind of each step and the replicated state's digest after it; the learning rate of step 5 is 0."""
    parameter = nn.Parameter(torch.ones(64))
    optimizer = ZeroOneAdam(
        [parameter],
        TabulatedSchedule([0.1] * 5 + [0.0] + [0.1] * 6),
        process_group=Topology.flat(transport),
        sync_policy="every",
        variance_kappa=2,
        variance_freeze_step=20,
    )
    generator = torch.Generator().manual_seed(transport.rank)
    kinds, digests = [], []
    for _ in range(12):
        parameter.grad = torch.randn(64, generator=generator)
        optimizer.step()
        assert optimizer.last_step is not None
        kinds.append(optimizer.last_step.kind)
        digests.append(optimizer.fingerprint())
    return kinds, digests


def test_replicas_stay_equal_when_a_full_step_follows_one_whose_learning_rate_is_0() -> None:
    """Nothing is exchanged at that step, so their momenta differ: the full step has to exchange more than gradients."""
    (kinds, digests), others = run_replicas(replica_with_a_pause, 2)
    assert kinds[5:7] == ["one_bit", "full"] and (kinds, digests) == others


def clipped_replica(transport: Transport, loss_scale: float, wire: Any) -> tuple[list[float], torch.Tensor]:
    parameter = nn.Parameter(torch.ones(64))
    optimizer = ZeroOneAdam(
        [parameter],
        LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=2, total_steps=40),
        max_grad_norm=1.0,
        loss_scaler=LossScaler(initial=loss_scale),
        block_size=64,
        gradient_wire_dtype=wire,
        process_group=Topology.flat(transport),
    )
    generator = torch.Generator().manual_seed(transport.rank)
    norms = []
    for _ in range(24):
        parameter.grad = torch.randn(64, generator=generator) * optimizer.loss_scale
        optimizer.step()
        norms.append(optimizer.last_step.grad_norm)
    assert optimizer.last_step.grad_norm_estimated
    return norms, parameter.detach()


@pytest.mark.parametrize("wire", [torch.float32, "4bit"])
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit_of_clipping(wire: Any) -> None:
    """Nor of the norms estimated between two full steps, for which replicas send each other those of their own."""
    for plain, scaled in zip(
        run_replicas(clipped_replica, 2, 1.0, wire), run_replicas(clipped_replica, 2, 64.0, wire), strict=True
    ):
        assert scaled[0] == plain[0]
        assert torch.equal(scaled[1], plain[1])
