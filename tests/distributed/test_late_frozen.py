"""A parameter whose ``requires_grad`` is turned off during a run stops moving on all replicas; the rest still train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron01.optim import LRSchedule, ZeroOneAdam
from tests.distributed.harness import run_ranks

STEPS = 60
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=5, total_steps=STEPS)


def pull(weight: Tensor, rank: int, step: int) -> Tensor:
    """A gradient of this replica's own."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1000 * rank + step))
    return weight.detach() - 2.0 + 0.1 * rank + 0.3 * noise


def frozen_during_the_run(rank: int, size: int, freeze: int, thaw: int, stale: str) -> dict[str, list[Any]]:
    """Weights after each step of a parameter that is frozen from step ``freeze`` to ``thaw``, and of one that is not.

    ``stale``: what the frozen parameter's ``grad`` holds: "nothing", "zeros", or the last "gradient".
    """
    torch.manual_seed(0)
    frozen, other = nn.Parameter(torch.randn(90)), nn.Parameter(torch.randn(70))
    optimizer = ZeroOneAdam([("frozen", frozen), ("other", other)], SCHEDULE, weight_decay=0.1, block_size=64)
    trace: dict[str, list[Any]] = {"weights": [], "masters": [], "other": [], "prints": []}
    for step in range(STEPS):
        frozen.requires_grad_(not freeze <= step < thaw)
        other.grad = pull(other, rank, step)
        if frozen.requires_grad:
            frozen.grad = pull(frozen, rank, step)
        elif stale == "nothing":
            frozen.grad = None
        elif stale == "zeros":
            frozen.grad = torch.zeros_like(frozen)
        optimizer.step()
        trace["weights"].append(frozen.detach().clone())
        trace["masters"].append(optimizer.master_parameters()["frozen"].clone())
        trace["other"].append(other.detach().clone())
        trace["prints"].append(optimizer.fingerprint())
    return trace


@pytest.mark.parametrize("stale", ["nothing", "zeros", "gradient"])
@pytest.mark.parametrize("freeze", [4, 18, 30, 41, 50], ids=lambda step: f"step {step}")
def test_it_stops_on_all_replicas(freeze: int, stale: str) -> None:
    traces = run_ranks(frozen_during_the_run, 2, freeze, STEPS, stale)
    # local steps since the last synchronization are dropped, on all replicas alike
    expected = traces[0]["masters"][freeze - 1]
    for trace in traces:
        assert trace["prints"] == traces[0]["prints"]
        for step in range(freeze, STEPS):
            assert torch.equal(trace["weights"][step], expected), f"moved in step {step}"
            assert torch.equal(trace["masters"][step], expected), f"master moved in step {step}"
        assert not torch.equal(trace["other"][STEPS - 1], trace["other"][freeze])


def test_it_moves_again_once_it_is_thawed() -> None:
    traces = run_ranks(frozen_during_the_run, 2, 20, 35, "nothing")
    for trace in traces:
        assert trace["prints"] == traces[0]["prints"]
        assert torch.equal(trace["masters"][34], trace["masters"][19])
        before, after = trace["masters"][34], trace["masters"][STEPS - 1]
        assert float((after - 2.0).abs().mean()) < float((before - 2.0).abs().mean()), "it moves towards its target"
        assert float((after - before).abs().max()) < 0.3, "no step is out of proportion"
