from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron01.config import DistributedConfig
from megatron01.errors import UserError
from megatron01.optim import SGDM, ZeroOneAdam
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.parallel.process_groups import Progress
from megatron01.training.consistency import (
    ReplicasDiverged,
    require_agreement,
    require_equal_replicas,
)
from megatron01.training.state import meter_state
from megatron01.training.step import LocalComputeTime, LossModule, mean_loss, training_step


@pytest.fixture
def group():
    with initialize(LaunchEnvironment.read({}), DistributedConfig(threads_per_replica=1)) as group:
        yield group


class Model(nn.Module):
    """Sum of a product with dropout."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))
        self.dropout = nn.Dropout(dropout)

    def loss(self, x):
        return self.dropout(x * self.weight).sum()


def forward_step(loss_module, batch):
    return loss_module(batch["x"]), {}


def test_the_loss_module_calls_the_models_loss():
    model = Model(dropout=0.0)
    x = torch.rand(8)
    assert torch.equal(LossModule(model)(x), model.loss(x))


def test_fp32_sums_keep_what_16_bit_sums_lose():
    """256 + 1 is 256 in bf16, whose mantissa has 8 bits."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    model = nn.ParameterList([weight, frozen])
    optimizer = ZeroOneAdam(model.named_parameters(), 0.1)
    optimizer.sum_gradients_in_fp32()
    for factor in (256.0, 1.0, 1.0):
        (weight * factor).sum().backward()
        assert weight.grad is None
    assert weight.main_grad.dtype == torch.float32
    assert weight.main_grad.tolist() == [258.0] * 4
    assert not hasattr(frozen, "main_grad")


def test_mean_loss_is_without_dropout_and_leaves_no_trace(group):
    module = LossModule(Model())
    batches = [{"x": torch.full((8,), float(number))} for number in range(1, 4)]
    expected = sum(float((batch["x"] * module.model.weight.detach()).sum()) for batch in batches) / 3
    state = torch.get_rng_state()

    def draws(loss_module, batch):
        torch.rand(1)
        return forward_step(loss_module, batch)

    assert mean_loss(module, draws, batches, group) == pytest.approx(expected, abs=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training and module.model.weight.grad is None


def test_mean_loss_restores_training_mode_after_an_error(group):
    module = LossModule(Model())
    with pytest.raises(KeyError):
        mean_loss(module, forward_step, [{"y": torch.zeros(8)}], group)
    assert module.training


def test_mean_loss_leaves_what_a_model_has_frozen_in_evaluation_mode(group):
    module = LossModule(Model())
    module.model.dropout.eval()
    mean_loss(module, forward_step, [{"x": torch.ones(8)}], group)
    assert module.training and module.model.training and not module.model.dropout.training


def test_a_part_of_the_loss_that_is_called_loss_does_not_take_its_place():
    def with_parts(loss_module, batch):
        loss = loss_module(batch["x"])
        return loss, {"loss": loss * 0 + 7.0, "part": loss * 0 + 8.0}

    module = LossModule(Model(dropout=0.0))
    batch = {"x": torch.ones(8)}
    expected = module(batch["x"]).item()
    optimizer = ZeroOneAdam(module.model.named_parameters(), 0.1)
    losses = training_step(
        optimizer,
        optimizer.attach(module),
        with_parts,
        iter([batch]),
        1,
        local_compute_time=LocalComputeTime(torch.device("cpu")),
        progress=Progress(),
    )
    assert {name: float(value) for name, value in losses.items()} == {"loss": pytest.approx(expected), "part": 8.0}


def test_a_step_takes_the_mean_over_its_micro_batches():
    module, progress = LossModule(Model(dropout=0.0)), Progress()
    before = module.model.weight.detach().clone() + 1.0
    module.model.weight.data.copy_(before)
    optimizer = SGDM(module.model.named_parameters(), 0.1, beta=0.0)
    batches = iter([{"x": torch.full((8,), factor)} for factor in (1.0, 3.0, 50.0)])

    def with_double(loss_module, batch):
        loss = loss_module(batch["x"])
        return loss, {"double": 2 * loss}

    losses = training_step(
        optimizer,
        optimizer.attach(module),
        with_double,
        batches,
        2,
        local_compute_time=LocalComputeTime(torch.device("cpu")),
        progress=progress,
    )
    assert {name: float(value) for name, value in losses.items()} == pytest.approx({"loss": 16.0, "double": 32.0})
    torch.testing.assert_close(module.model.weight.detach(), before - 0.1 * 2.0)
    assert progress.count == 3, "each micro-batch, and the end of the passes"


class Group:
    """Two replicas, of which the other one reports different values."""

    rank = 1
    hosts = ("here", "there")

    def gather(self, values):
        return [[f"{value}?" for value in values], values]


def test_disagreement_is_named(group):
    require_agreement({"the settings": "abc"}, group)
    require_equal_replicas("abc", 3, group)
    with pytest.raises(
        UserError, match=r"disagree on the settings: replica 0 has abc\?, replica 1 has abc \(on there\)"
    ):
        require_agreement({"the settings": "abc"}, Group())
    with pytest.raises(ReplicasDiverged, match="replica 1 differs from replica 0 after iteration 3"):
        require_equal_replicas("abc", 3, Group())


@pytest.mark.parametrize(
    ("size", "replica", "comm_bytes", "between"), [(1, 1, 50, 20), (1, 3, 50, 20), (4, 0, 2, 1), (2, 9, 20, 8)]
)
def test_bytes_sent_by_a_replica_are_divided_among_the_ranks_of_another_tensor_parallel_size(
    size, replica, comm_bytes, between
):
    meters = [
        {kind: {"comm_bytes": 10 * rank, "comm_bytes_between_nodes": 4 * rank, "steps": 7} for kind in ("run", "line")}
        for rank in range(4)
    ]
    replicas = [{"meter": meter} for meter in meters]
    saved = SimpleNamespace(tensor_model_parallel_size=2, num_replicas=2, world_size=4, replicas=replicas)
    found = meter_state(saved, 2, SimpleNamespace(size=size, replica=replica))
    wanted = {"comm_bytes": comm_bytes, "comm_bytes_between_nodes": between, "steps": 7}
    assert found == {"run": wanted, "line": wanted}
    assert meters[0]["run"] == {"comm_bytes": 0, "comm_bytes_between_nodes": 0, "steps": 7}
