"""Gradients quantized to 4 and 8 bits: bytes, residuals, skipped steps, and replicas that stay equal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron01.comm import Topology
from megatron01.comm.kernels.specification import decode_packed
from megatron01.config import OptimizerConfig
from megatron01.cost.volume import Wire, traffic
from megatron01.optim import LossScaler, LRSchedule, QuantizedAdam, ZeroOneAdam
from tests.distributed.harness import run_ranks
from tests.distributed.replays import (
    Case,
    Replays,
    average_of,
    given_gradients,
    gradients,
    initial_weights,
)
from tests.distributed.topologies import Case as OnNodes
from tests.distributed.topologies import over_gloo
from tests.reference.one_bit_adam import OneBitAdamReference, Settings
from tests.residuals import add_errors
from tests.tiers import slow_after

COSINE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=6, total_steps=24)


ADAM = {
    "4 bits": Case(QuantizedAdam, COSINE, weight_decay=(0.1, 0.0, 0.05, 0.0, 0.2), lr_scale=(1.0, 0.5, 1.0, 0.3, 1.0)),
    "8 bits, clipped": Case(QuantizedAdam, COSINE, {"gradient_wire_dtype": "8bit", "max_grad_norm": 5.0}),
    "fp32": Case(QuantizedAdam, COSINE, {"gradient_wire_dtype": torch.float32, "betas": (0.8, 0.95)}),
    "bf16": Case(QuantizedAdam, COSINE, {"gradient_wire_dtype": None}, dtype=torch.bfloat16, gradients=given_gradients),
}


def reference_of(case: Case, n: int) -> OneBitAdamReference:
    options = case.options
    with_wire = Case(**{**vars(case), "options": {"gradient_wire_dtype": "4bit", **options}})
    betas = options.get("betas", (0.9, 0.999))
    settings = Settings(
        lr=case.schedule.lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=case.weight_decay,
        lr_scale=case.lr_scale,
        freeze_step=10**9,
        block_size=64,
        step_bound=None,
        max_norm=options.get("max_grad_norm"),
        average=average_of(with_wire, n),
    )
    return OneBitAdamReference(n, case.initial_weights(), settings)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_adam_with_quantized_gradients_follows_the_float64_reference(n: int) -> None:
    replays = Replays(ADAM, reference_of)
    for name, traces in replays.run(n).items():
        replays.compare(name, traces)


def test_one_replica_is_adamw() -> None:
    own, theirs = ([torch.nn.Parameter(torch.from_numpy(w.copy())) for w in initial_weights()] for _ in range(2))
    schedule = LRSchedule(peak_lr=0.01, total_steps=30)
    optimizer = QuantizedAdam(own, schedule, weight_decay=0.1)
    adamw = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    for step in range(30):
        for parameters in (own, theirs):
            for p, g in zip(parameters, gradients(initial_weights(), 0, step), strict=True):
                p.grad = torch.from_numpy(g).float()
        optimizer.step()
        adamw.step()
    for p, q in zip(own, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


SIZES = (70, 700, 33)
BLOCK = 64


def own_gradients(rank: int, step: int) -> list[torch.Tensor]:
    """Numbers that bf16 represents, so that their sum inside a node is exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [(torch.randn(size, generator=generator) * 16).round() / 16 for size in SIZES]


def build(topology: Topology | None, **options: Any) -> tuple[list[torch.nn.Parameter], ZeroOneAdam]:
    dtype = options.pop("dtype", torch.float32)
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in SIZES]
    schedule = LRSchedule(style="linear", peak_lr=0.01, total_steps=40)
    settings = {"block_size": BLOCK, "gradient_wire_dtype": "4bit", "bucket_elements": 256, "variance_kappa": 100}
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    return parameters, ZeroOneAdam(named, schedule, process_group=topology, **(settings | options))


def errors_of(optimizer: ZeroOneAdam) -> dict[str, torch.Tensor]:
    return {k: t.clone() for k, t in optimizer.replica_state().items() if k.startswith("gradient_")}


def conserving(topology: Topology, steps: int, options: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(sum of the mean gradients of all steps, this replica's share of the mean residual), each flat."""
    parameters, optimizer = build(topology, sync_policy="every", variance_freeze_step=1000, **options)
    rank = topology.world.rank
    received = [torch.zeros(size) for size in SIZES]
    for step in range(steps):
        for parameter, gradient in zip(parameters, own_gradients(rank, step), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        assert optimizer.last_step.kind == "full"
        mean = torch.cat([decode_packed(*vars(bucket).values()) for bucket in optimizer._quantized.packed])
        for total, part in zip(received, by_parameter(mean.view(-1)), strict=True):
            total += part
    places = {key: place for key, place in optimizer.error_places().items() if key.startswith("gradient_")}
    kept = torch.zeros(optimizer.replica_state()["u"].numel())
    add_errors(places, optimizer.replica_state(), kept, BLOCK)
    return received, by_parameter(kept)


def by_parameter(flat: torch.Tensor) -> list[torch.Tensor]:
    """The parameters' parts of a flat buffer."""
    found, start = [], 0
    for size in SIZES:
        found.append(flat[start : start + size].clone())
        start += -(-size // BLOCK) * BLOCK
    return found


@pytest.mark.parametrize("wire", ["4bit", "8bit"])
@pytest.mark.parametrize(("size", "local_size", "replica"), [(2, 2, "process"), (3, 3, "process"), (4, 2, "process")])
def test_what_codes_lose_is_sent_later(wire: str, size: int, local_size: int, replica: str) -> None:
    """The sum of inputs is the sum of results plus the residual, which in the end is less than a step's gradient."""
    steps = 7
    case = OnNodes(conserving, size, (steps, {"gradient_wire_dtype": wire}), local_size, {"replica": replica})
    outputs = over_gloo(case)
    for p in range(len(SIZES)):
        given_in = sum(own_gradients(rank, step)[p] for rank in range(size) for step in range(steps)) / size
        kept = sum(found[p] for _, found in outputs) / size
        for received, _ in outputs:
            assert torch.equal(received[p], outputs[0][0][p])
            torch.testing.assert_close(received[p] + kept, given_in, rtol=1e-4, atol=1e-4)
        last = sum(own_gradients(rank, steps - 1)[p] for rank in range(size)) / size
        assert 0 < kept.norm() < 0.6 * last.norm()


def overflowing(topology: Topology, options: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Kind, fingerprint and whether errors have changed, by step; the second process overflows at steps 2 and 8."""
    fp16 = options.get("dtype") == torch.float16
    if fp16:
        options = options | {"loss_scaler": LossScaler(initial=64.0, hysteresis=1)}
    parameters, optimizer = build(topology, variance_kappa=4, variance_freeze_step=30, **options)
    rank, trace = topology.world.rank, []
    for step in range(20):
        for parameter, gradient in zip(parameters, own_gradients(rank, step), strict=True):
            parameter.grad = (gradient * optimizer.loss_scale).to(parameter.dtype)
        if rank == 1 and step in (2, 8):
            parameters[1].grad[5] = math.nan if step == 2 else math.inf
        before = errors_of(optimizer)
        optimizer.step()
        after = errors_of(optimizer)
        assert all(bool(tensor.isfinite().all()) for tensor in after.values()) and len(after) == 2
        changed = any(not torch.equal(before[key], after[key]) for key in after)
        trace.append((optimizer.last_step.kind, optimizer.fingerprint(), changed))
    return trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "local_size"), [(2, 2), (4, 2)])
def test_overflow_of_one_replica_skips_the_step_everywhere_and_leaves_the_errors(
    dtype: torch.dtype, size: int, local_size: int
) -> None:
    options = {"dtype": dtype, "sync_policy": "every"}
    first, *others = over_gloo(OnNodes(overflowing, size, (options,), local_size))
    for step, (kind, _, changed) in enumerate(first):
        assert (kind == "skipped") == (step in (2, 8))
        assert changed == (kind == "full")
    for other in others:
        assert [(kind, found) for kind, found, _ in other] == [(kind, found) for kind, found, _ in first]


def masked(rank: int, size: int) -> tuple[bool, bool, bool, str]:
    mask = torch.arange(700) % 3 > 0
    parameters, optimizer = build(None, variance_kappa=4, sync_policy="every", masks={"1": mask})
    for step in range(8):
        if step == 4:
            parameters[0].requires_grad_(False)
        for parameter, gradient in zip(parameters, own_gradients(rank, step), strict=True):
            parameter.grad = gradient if parameter.requires_grad else None
        optimizer.step()
    worker = optimizer.replica_state()["gradient_worker_error"]
    of_mask = worker[128 : 128 + 700]
    return not worker[:128].any(), not of_mask[~mask].any(), bool(of_mask[mask].any()), optimizer.fingerprint()


def test_masked_and_frozen_elements_take_no_part() -> None:
    first, second = run_ranks(masked, 2)
    assert first[:3] == second[:3] == (True, True, True) and first[3] == second[3]


def resumed_at(rank: int, size: int, steps: list[int]) -> list[list[str]]:
    return [resumed(rank, save_at) for save_at in steps]


def resumed(rank: int, save_at: int) -> list[str]:
    """Fingerprints of a run that is saved and loaded into new objects; full steps come between local ones too."""
    options: Any = {"sync_policy": "constant:3", "variance_kappa": 4, "variance_freeze_step": 30}
    parameters, optimizer = build(None, **options)
    prints = []
    for step in range(32):
        if step == save_at:
            saved = optimizer.state_dict()
            parameters, optimizer = build(None, **options)
            optimizer.load_state_dict(saved)
        for parameter, gradient in zip(parameters, own_gradients(rank, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        prints.append(optimizer.fingerprint())
    return prints


@pytest.mark.parametrize("every", slow_after(1, [5, 1]))
def test_resume_is_exact_at_every_step(every: int) -> None:
    steps = [-1, *range(1, 32, every)]
    for prints in run_ranks(resumed_at, 2, steps):
        for save_at, found in zip(steps, prints, strict=True):
            assert found == prints[0], f"saved before step {save_at}"


def count_bytes(rank: int, size: int, wire: str) -> list[int]:
    parameter = torch.nn.Parameter(torch.randn(300, 512))
    schedule = LRSchedule(style="linear", peak_lr=0.01, total_steps=40)
    optimizer = ZeroOneAdam([parameter], schedule, gradient_wire_dtype=wire)
    sent = []
    for _ in range(40):
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        sent.append(optimizer.last_step.bytes_sent)
    return sent


@pytest.mark.parametrize(("replicas", "wire"), [(2, "4bit"), (3, "4bit"), (2, "8bit")])
def test_bytes_are_those_that_the_planner_expects(replicas: int, wire: Any) -> None:
    config = OptimizerConfig(lr=0.01, lr_decay_style="linear", gradient_wire_dtype=wire)
    planned = traffic(
        config,
        train_iters=40,
        precision="fp32",
        wire=Wire(parameter_sizes=(300 * 512,), replicas=replicas, block_size=1024),
    )
    headers = 2 * (replicas - 1) * (16 + 2)  # of an exchange, and the padding of the last word of scales
    for sent in run_ranks(count_bytes, replicas, wire):
        for found, expected, rounds in zip(sent, planned.bytes_sent.tolist(), planned.rounds.tolist(), strict=True):
            assert 0 <= found - expected <= rounds * headers
    bits = 8 * planned.bytes_sent[0] / (300 * 512) / (2 * (replicas - 1) / replicas)
    assert bits == pytest.approx(int(wire[0]) + 16 / 1024, rel=0.01)


def asked_early(rank: int, size: int) -> str:
    parameters, optimizer = build(None)
    model = torch.nn.ParameterList(parameters)
    optimizer.attach(model)
    sum((p * p).sum() for p in parameters).backward()
    with pytest.raises(Exception, match="between a backward pass") as caught:
        optimizer.replica_state()
    optimizer.step()
    return str(caught.value)


def test_state_is_refused_while_gradients_are_under_way() -> None:
    assert all("\n" not in message for message in run_ranks(asked_early, 2))
