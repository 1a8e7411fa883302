"""What people do to a model or an optimizer after it was built, and which would go wrong in silence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron01.errors import UserError
from megatron01.optim import TabulatedSchedule, ZeroOneAdam


def test_weights_that_lie_in_another_order_than_when_it_was_built_are_refused() -> None:
    """The master weights are in the old order: written to the new one, they would come out permuted."""
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
    """The learning rate comes from the schedule, from which the replicas also know when to synchronize."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = ZeroOneAdam([parameter], 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(UserError, match="from_torch"):
        for _ in range(3):
            parameter.grad = torch.ones(4)
            optimizer.step()
            scheduler.step()


def test_two_parameters_of_one_name_are_refused() -> None:
    """``master_parameters`` would hold only one of them."""
    encoder, decoder = nn.Linear(3, 3), nn.Linear(3, 3)
    with pytest.raises(UserError, match="weight"):
        ZeroOneAdam([*encoder.named_parameters(), *decoder.named_parameters()], 1e-3)


def test_a_scheduler_that_needs_metrics_cannot_be_tabulated() -> None:
    with pytest.raises(UserError, match="ReduceLROnPlateau"):
        TabulatedSchedule.from_torch(torch.optim.lr_scheduler.ReduceLROnPlateau, base_lr=1.0, total_steps=3)  # type: ignore[arg-type]
