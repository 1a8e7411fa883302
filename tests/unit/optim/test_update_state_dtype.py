"""State in bf16: compiled kernels give the bits of the reference, and the weights follow from what has been written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron01.optim.kernels.cpu import CPUBackend
from megatron01.optim.kernels.specification import ReferenceBackend
from megatron01.optim.local_update import LOCAL, WRITE_WEIGHTS, Rule
from tests.unit.optim.updates import BF16, PHASES, Problem, coefficients, problem

CPU = torch.device("cpu")
RULES = (Rule.ADAPTIVE, Rule.PLAIN)
ALL = {name: phase for name, phase in PHASES.items() if name != "synchronize with gradients"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("phase", ALL)
@pytest.mark.parametrize("block_size", [64, 256])
def test_backends_agree(block_size: int, phase: str, rule: Rule) -> None:
    results = []
    for compiled in (True, False):
        given = problem(CPU, block_size, state_dtype=BF16)
        backend = CPUBackend(given.layout, 2) if compiled else ReferenceBackend(given.layout)
        result = None
        if ALL[phase].synchronize and not ALL[phase].fresh and not ALL[phase].gradient:
            result = given.result(CPU, scaled=True, first=1, num_rows=2)
        for refresh in (True, False):
            numbers = coefficients(rule, refresh=refresh)
            backend.update(1, given.num_blocks, ALL[phase], given.state, numbers, given.gradients, result)
        results.append(given.tensors())
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)  # but for the sign of a zero


def copies(given: Problem) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in given.tensors()]


@pytest.mark.parametrize("rule", RULES)
def test_weights_follow_from_what_a_step_has_written(rule: Rule) -> None:
    given = problem(CPU, 64, state_dtype=BF16)
    backend, last = CPUBackend(given.layout, 1), given.num_blocks
    numbers = coefficients(rule, refresh=True)
    before = copies(given)
    backend.update(0, last, LOCAL, given.state, numbers, given.gradients)
    after = copies(given)
    backend.update(0, last, WRITE_WEIGHTS, given.state, replace(numbers, variance_decay=None), None)
    assert all(torch.equal(a, b) for a, b in zip(copies(given), after, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
