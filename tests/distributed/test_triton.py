"""Replicas whose arithmetic is done by Triton kernels, in the interpreter, end up with the bits of the reference."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

from megatron01.comm import Topology, build_exchange
from megatron01.comm.payload import BlockLayout
from megatron01.optim import BinSGDM, LRSchedule, ZeroOneAdam
from megatron01.optim.zero import NodeShard, ShardedOptimizer
from tests.distributed.topologies import Case, over_gloo
from tests.triton_setup import need_triton

need_triton()

pytestmark = pytest.mark.triton

OPTIMIZERS: dict[str, Any] = {
    "zero_one_adam": ZeroOneAdam,
    "zero_one_adam, bf16": partial(ZeroOneAdam, state_dtype=torch.bfloat16),
    "bin_sgdm": BinSGDM,
}
BACKENDS = ("triton", "reference")
BLOCK = 64


def train(topology: Topology, name: str) -> list[tuple[str, dict[str, torch.Tensor], list[torch.Tensor]]]:
    """Fingerprint, state and weights of this replica after some steps with each backend."""
    os.environ["TRITON_INTERPRET"] = "1"
    outcomes = []
    for backend in BACKENDS:
        same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + topology.world.rank)
        sizes, dtypes = (185, 70, 81), (torch.float32, torch.bfloat16, torch.float16)
        parameters = [
            torch.nn.Parameter(torch.randn(size, generator=same).to(dtype))
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]
        optimizer: Any = OPTIMIZERS[name](
            parameters,
            LRSchedule(style="cosine", peak_lr=1e-2, total_steps=8),
            process_group=topology,
            bucket_elements=4 * BLOCK,
            backend=backend,
            block_size=BLOCK,
        )
        for step in range(8):
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=own)
                parameter.grad = (noise + parameter.detach()).to(parameter.dtype)
            if step == 6 and topology.world.rank == 1:
                parameters[1].grad = torch.full_like(parameters[1], torch.inf)
            optimizer.step()
        weights = [parameter.detach().clone() for parameter in parameters]
        outcomes.append((optimizer.fingerprint(), optimizer.replica_state(), weights))
    return outcomes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_replicas(name: str) -> None:
    outcomes = over_gloo(Case(train, 2, (name,)))
    assert len({fingerprint for ranks in outcomes for fingerprint, _, _ in ranks}) == 1
    for (_, ours, our_weights), (_, theirs, their_weights) in outcomes:
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert all(torch.equal(a, b) for a, b in zip(our_weights, their_weights, strict=True))


def train_divided(topology: Topology) -> list[tuple[str, list[torch.Tensor]]]:
    """Fingerprint and weights, with the optimizer of the node divided between its processes."""
    os.environ["TRITON_INTERPRET"] = "1"
    outcomes = []
    for backend in BACKENDS:
        same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + topology.world.rank)
        dtypes = {"one": torch.float32, "two": torch.bfloat16, "three": torch.float16}
        named = {name: torch.nn.Parameter(torch.randn(170, generator=same).to(dtype)) for name, dtype in dtypes.items()}
        sizes: dict[str, int] = {"block_size": BLOCK, "bucket_elements": 4 * BLOCK}
        shard = NodeShard([{"params": list(named.items())}], topology, backend=backend, **sizes)
        inner = ZeroOneAdam(
            shard.groups,
            LRSchedule(style="cosine", peak_lr=1e-2, total_steps=8),
            process_group=shard.across,
            partial=shard.partial,
            shard=shard,
            backend=backend,
            **sizes,
        )
        optimizer = ShardedOptimizer(inner, shard, overlap=False)
        for _ in range(6):
            for parameter in named.values():
                noise = torch.randn(parameter.shape, generator=own)
                parameter.grad = (noise + parameter.detach()).to(parameter.dtype)
            optimizer.step()
        outcomes.append((optimizer.fingerprint(), [parameter.detach().clone() for parameter in named.values()]))
    return outcomes


def test_a_divided_optimizer() -> None:
    outcomes = over_gloo(Case(train_divided, 2, settings={"replica": "node"}))
    assert len({fingerprint for ranks in outcomes for fingerprint, _ in ranks}) == 1
    for (_, ours), (_, theirs) in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours, outcomes[0][0][1], strict=True))


def exchange(topology: Topology, quantizer: Any) -> list[list[torch.Tensor]]:
    """Results and errors of some exchanges with each backend."""
    os.environ["TRITON_INTERPRET"] = "1"
    assert topology.is_hierarchical
    outcomes = []
    for backend in BACKENDS:
        layout = BlockLayout(torch.tensor([BLOCK] * 10 + [17], dtype=torch.int32), BLOCK)
        live = layout.real_elements() & 0x00FFFFFF
        exchange = build_exchange(
            layout, topology, quantizer=quantizer, active=live, bucket_elements=8 * BLOCK, backend=backend
        )
        outcome = []
        for step in range(2):
            value = torch.randn(11 * BLOCK, generator=torch.Generator().manual_seed(10 * step + topology.world.rank))
            exchange.all_reduce(value, key=step)
            outcome.append(value)
        outcomes.append([*outcome, *exchange.state().values()])
    return outcomes


@pytest.mark.parametrize("quantizer", ["sign", "random"])
def test_two_nodes_of_two_processes(quantizer: str) -> None:
    for ours, theirs in over_gloo(Case(exchange, 4, (quantizer,), local_world_size=2)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
