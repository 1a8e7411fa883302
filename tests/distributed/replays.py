"""Runs of any optimizer on given gradients, compared with a float64 reference of all its replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron01.optim import LRSchedule
from megatron01.optim.base import FlatOptimizer
from tests.distributed.harness import run_ranks
from tests.reference.exchange import Arrays, LevelMean, bf16, mean_in_bf16, mean_of

SHAPES = ((7, 13), (31,), (1,), (65, 3), (200,))


def initial_weights() -> Arrays:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def gradients(weights: Arrays, replica: int, step: int, seed: int = 0) -> Arrays:
    """Noisy gradients that pull each weight towards a target of this replica, with another scale for each parameter."""
    rng = np.random.default_rng((step, replica, seed))
    pull = []
    for index, weight in enumerate(weights):
        scale = 10.0 ** (index - 2)
        target = np.linspace(-1, 1, weight.size).reshape(weight.shape) + 0.1 * replica
        pull.append(scale * (weight - target + 0.3 * rng.standard_normal(weight.shape)))
    return pull


def uneven_gradients(weights: Arrays, replica: int, step: int, seed: int = 0) -> Arrays:
    """An element's gradient is far smaller than others of its block; it takes part in the exchange all the same."""
    pull = gradients(weights, replica, step, seed)
    pull[-1][0] *= 3e-4
    return pull


def opposed_gradients(weights: Arrays, replica: int, step: int, seed: int = 0) -> Arrays:
    """Gradients whose mean over each two replicas is far shorter than they are."""
    noise = gradients(weights, 0, step, seed + 1)
    pull = gradients(weights, replica // 2, step, seed)
    return [own + (8.0 if replica % 2 else -8.0) * both for own, both in zip(pull, noise, strict=True)]


def fixed_gradients(weights: Arrays, replica: int, step: int, seed: int = 0) -> Arrays:
    """fp32 gradients that do not depend on the weights, so that rounding of the weights does not change them."""
    rng = np.random.default_rng((step, replica, seed))
    return [(0.5 + rng.standard_normal(weight.shape)).astype(np.float32) for weight in weights]


def given_gradients(weights: Arrays, replica: int, step: int, seed: int = 0) -> Arrays:
    """bf16 gradients that do not depend on the weights, so that rounding of the weights does not change later steps."""
    rng = np.random.default_rng((step, replica, seed))
    return [bf16(0.5 + rng.standard_normal(weight.shape)) for weight in weights]


@dataclass(frozen=True)
class Case:
    """An optimizer, its arguments, and its gradients.

    Attributes:
        weight_decay, lr_scale: for each parameter; empty for the defaults.
        dtype: of the weights and gradients.
        margin: how far from a tie every bit must be, in units of the quantized element's size.
        delayed: whether gradients are taken at the model's weights before the result of the exchange is applied.
    """

    optimizer: type[FlatOptimizer]
    schedule: LRSchedule
    options: dict[str, Any] = field(default_factory=dict)
    weight_decay: tuple[float, ...] = ()
    lr_scale: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32
    gradients: Callable[[Arrays, int, int, int], Arrays] = gradients
    margin: float = 1e-5

    @property
    def delayed(self) -> bool:
        return bool(self.options.get("delay"))

    def initial_weights(self) -> Arrays:
        weights = initial_weights()
        return weights if self.dtype == torch.float32 else [bf16(weight) for weight in weights]

    def build(self, **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
        """The parameters and the optimizer of a replica."""
        parameters = [torch.nn.Parameter(torch.from_numpy(w).to(self.dtype)) for w in self.initial_weights()]
        groups: list[dict[str, Any]] = [{"params": [p]} for p in parameters]
        for key, values in (("weight_decay", self.weight_decay), ("lr_scale", self.lr_scale)):
            for group, value in zip(groups, values, strict=False):
                group[key] = value
        return parameters, self.optimizer(groups, self.schedule, **{"block_size": 64, **self.options, **options})


@dataclass
class Trace:
    """A replica after each step: kind of step, fingerprint, master weights and the model's weights."""

    kinds: list[str] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)
    masters: list[Arrays] = field(default_factory=list)
    weights: list[Arrays] = field(default_factory=list)
    frozen_since: int | None = None


def set_gradients(parameters: list[torch.nn.Parameter], values: Arrays) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.from_numpy(np.asarray(value)).to(parameter.dtype)


def arrays(tensors: Any) -> Arrays:
    return [tensor.detach().double().numpy().copy() for tensor in tensors]


def replay(case: Case, rank: int, seed: int, **options: Any) -> Trace:
    """Run a case. With a delay, only the model's weights are read: reading the state would end the delay."""
    parameters, optimizer = case.build(**options)
    trace = Trace()
    for step in range(case.schedule.total_steps or 0):
        set_gradients(parameters, case.gradients(arrays(parameters), rank, step, seed))
        optimizer.step()
        trace.kinds.append(optimizer.last_step.kind)
        trace.weights.append(arrays(parameters))
        if not case.delayed:
            trace.fingerprints.append(optimizer.fingerprint())
            trace.masters.append(arrays(optimizer.master_parameters().values()))
    if case.delayed:
        trace.fingerprints.append(optimizer.fingerprint())
        trace.masters.append(arrays(optimizer.master_parameters().values()))
    trace.frozen_since = getattr(optimizer, "frozen_since", None)
    return trace


def replay_cases(rank: int, size: int, cases: dict[str, tuple[Case, int]], options: dict[str, Any]) -> dict[str, Trace]:
    """Each case with its seed."""
    return {name: replay(case, rank, seed, **options) for name, (case, seed) in cases.items()}


@dataclass
class Expected:
    """The reference's run of a case with ``seed``."""

    seed: int
    reference: Any
    masters: list[Arrays] = field(default_factory=list)
    weights: list[list[Arrays]] = field(default_factory=list)  # by step and replica


def average_of(case: Case, n: int) -> Callable[[Arrays], np.ndarray]:
    """How gradients are averaged."""
    wire = case.options.get("gradient_wire_dtype")
    if n == 1:
        return mean_of
    if isinstance(wire, str):
        return LevelMean(n, list(SHAPES), case.options.get("block_size", 64), int(wire.removesuffix("bit")))
    return mean_of if case.dtype == torch.float32 else mean_in_bf16


class Replays:
    """Cases of optimizers, with the float64 reference's run of each, which is computed once for a number of replicas.

    Args:
        build_reference: makes the reference of a case for a number of replicas.
    """

    def __init__(self, cases: dict[str, Case], build_reference: Callable[[Case, int], Any]) -> None:
        self.cases = cases
        self._build_reference = build_reference
        self._expected: dict[tuple[str, int], Expected] = {}

    def expected(self, name: str, n: int) -> Expected:
        """The reference's run, with the first seed for which no bit depends on a rounding error.

        After a bit decided by rounding, fp32 and float64 would diverge although both are right.
        """
        if (name, n) not in self._expected:
            case = self.cases[name]
            runs = (Expected(seed, self._build_reference(case, n)) for seed in range(60))
            found = next((expected for expected in runs if _follow(case, n, expected)), None)
            assert found is not None, "every seed has a bit that hangs on a rounding error"
            self._expected[name, n] = found
        return self._expected[name, n]

    def run(self, n: int, **options: Any) -> dict[str, list[Trace]]:
        """What n replicas do, by case."""
        cases = {name: (case, self.expected(name, n).seed) for name, case in self.cases.items()}
        of_ranks = run_ranks(replay_cases, n, cases, options)
        return {name: [of_rank[name] for of_rank in of_ranks] for name in cases}

    def compare(self, name: str, traces: list[Trace]) -> Any:
        """Assert that every replica matches the reference and x is bit-identical on all; returns the reference."""
        case, expected = self.cases[name], self.expected(name, len(traces))
        last = len(expected.masters) - 1
        for rank, trace in enumerate(traces):
            assert trace.kinds == expected.reference.kinds
            assert trace.fingerprints == traces[0].fingerprints, "the common state differs between replicas"
            masters = zip([last] if case.delayed else range(last + 1), trace.masters, strict=True)
            for step, values in masters:
                _assert_close(values, expected.masters[step], f"x after step {step}")
            for step, values in enumerate(trace.weights):
                wanted = expected.weights[step][rank]
                _assert_close(values, wanted, f"weights after step {step}", exact=case.dtype == torch.float32)
        return expected.reference


def _follow(case: Case, n: int, expected: Expected) -> bool:
    reference = expected.reference
    seen = reference.delayed_weights if case.delayed else reference.weights
    for step in range(case.schedule.total_steps or 0):
        reference.step([case.gradients(seen(i), i, step, expected.seed) for i in range(n)])
        if reference.margin <= case.margin:
            return False
        expected.masters.append([x.copy() for x in reference.x])
        expected.weights.append([seen(i) for i in range(n)])
    return True


def _assert_close(got: Arrays, wanted: Arrays, where: str, *, exact: bool = True) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4 if exact else 2.0**-7, atol=2e-5, err_msg=where)
