"""The key bias of attention, whose gradient is rounding noise, must not grow by the 1-bit exchange."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron01.optim import LRSchedule, ZeroOneAdam
from tests.distributed.harness import run_ranks

STEPS = 300
PEAK_LR = 3e-3


class OneLayer(nn.Module):
    """Self-attention with one fused bias; the key's third of it does not change the softmax."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.query_key_value.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # (b, s, width)
        parts = self.query_key_value(inputs).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts]  # (b, 4, s, width / 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


def largest_key_bias(rank: int, size: int, step_bound: float | None) -> float:
    torch.manual_seed(0)
    model = OneLayer()
    schedule = LRSchedule(style="linear", peak_lr=PEAK_LR, min_lr=1e-4, warmup_steps=30, total_steps=STEPS)
    optimizer = ZeroOneAdam(model.named_parameters(), schedule, variance_kappa=4, step_bound=step_bound)
    module = optimizer.attach(model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        inputs = torch.randn(8, 12, 48, generator=generator)
        (module(inputs) - inputs.cumsum(1).tanh()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(model.query_key_value.bias.detach().chunk(3)[1].abs().max())


@pytest.mark.slow
def test_the_bound_on_steps_keeps_the_key_bias_small() -> None:
    """Without the bound on steps it would move by the scale of its block, which it shares with query and value."""
    ours = run_ranks(largest_key_bias, 2, 1.0)[0]
    unbounded = run_ranks(largest_key_bias, 2, None)[0]
    assert ours < 6 * PEAK_LR, f"key bias {ours}, more than to and fro by a few learning rates"
    assert unbounded > 100 * ours, "the experiment no longer shows what the bound is for"
