"""Replicas with Triton kernels, on a GPU or interpreted, match those with the reference back end."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron01.comm import OneBitAllReduce, Topology
from megatron01.comm.payload import BlockLayout
from megatron01.optim import BinSGDM, LRSchedule, ZeroOneAdam
from tests.distributed.topologies import Case, over_gloo
from tests.triton_setup import DEVICE, need_triton

need_triton()

pytestmark = pytest.mark.triton

OPTIMIZERS: dict[str, Any] = {
    "zero_one_adam": ZeroOneAdam,
    "zero_one_adam, bf16": partial(ZeroOneAdam, state_dtype=torch.bfloat16),
    "bin_sgdm": BinSGDM,
}
BACKENDS = ("triton", "reference")
BLOCK = 64
SETTINGS = {"device": DEVICE.type}  # ranks may share a GPU


def train(topology: Topology, name: str) -> list[tuple[str, list[torch.Tensor]]]:
    """Fingerprint and weights of this replica after some steps with each backend."""
    outcomes = []
    for backend in BACKENDS:
        same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + topology.world.rank)
        sizes, dtypes = (185, 70, 81), (torch.float32, torch.bfloat16, torch.float16)
        parameters = [
            torch.nn.Parameter(torch.randn(size, generator=same).to(DEVICE, dtype))
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
                noise = torch.randn(parameter.shape, generator=own).to(DEVICE)
                parameter.grad = (noise + parameter.detach()).to(parameter.dtype)
            if step == 6 and topology.world.rank == 1:
                parameters[1].grad = torch.full_like(parameters[1], torch.inf)
            optimizer.step()
        weights = [parameter.detach().cpu() for parameter in parameters]
        outcomes.append((optimizer.fingerprint(), weights))
    return outcomes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_replicas(name: str) -> None:
    outcomes = over_gloo(Case(train, 2, (name,), settings=SETTINGS))
    for of_ranks in zip(*outcomes, strict=True):  # one back end
        assert len({fingerprint for fingerprint, _ in of_ranks}) == 1
    for (_, our_weights), (_, their_weights) in outcomes:
        assert_close(our_weights, their_weights)


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Up to rounding units of each dtype, over some steps."""
    for one, other in zip(ours, theirs, strict=True):
        unit = 1e-5 if one.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(one, other, rtol=unit, atol=unit)


def train_divided(topology: Topology) -> list[tuple[str, list[torch.Tensor]]]:
    """Fingerprint and weights, with the optimizer state of the node sharded over its processes."""
    outcomes = []
    for backend in BACKENDS:
        same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + topology.world.rank)
        dtypes = {"one": torch.float32, "two": torch.bfloat16, "three": torch.float16}
        named = {
            name: torch.nn.Parameter(torch.randn(170, generator=same).to(DEVICE, dtype))
            for name, dtype in dtypes.items()
        }
        sizes: dict[str, int] = {"block_size": BLOCK, "bucket_elements": 4 * BLOCK}
        optimizer = ZeroOneAdam(
            named.items(),
            LRSchedule(style="cosine", peak_lr=1e-2, total_steps=8),
            process_group=topology,
            shard=True,
            overlap=False,
            backend=backend,
            **sizes,
        )
        for _ in range(6):
            for parameter in named.values():
                noise = torch.randn(parameter.shape, generator=own).to(DEVICE)
                parameter.grad = (noise + parameter.detach()).to(parameter.dtype)
            optimizer.step()
        outcomes.append((optimizer.fingerprint(), [parameter.detach().cpu() for parameter in named.values()]))
    return outcomes


def test_a_divided_optimizer() -> None:
    outcomes = over_gloo(Case(train_divided, 2, settings={**SETTINGS, "replica": "node"}))
    for of_ranks in zip(*outcomes, strict=True):
        assert len({fingerprint for fingerprint, _ in of_ranks}) == 1
    for (_, ours), (_, theirs) in outcomes:
        assert_close(ours, theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, outcomes[0][0][1], strict=True))


def exchange(topology: Topology, quantizer: Any) -> list[list[torch.Tensor]]:
    """Results and errors of some exchanges with each backend."""
    assert topology.local is not None
    outcomes = []
    for backend in BACKENDS:
        layout = BlockLayout(torch.tensor([BLOCK] * 10 + [17], dtype=torch.int32, device=DEVICE), BLOCK)
        live = layout.real_elements() & 0x00FFFFFF
        exchange = OneBitAllReduce(
            layout, topology, quantizer=quantizer, active=live, bucket_elements=8 * BLOCK, backend=backend
        )
        outcome = []
        for step in range(2):
            value = torch.randn(11 * BLOCK, generator=torch.Generator().manual_seed(10 * step + topology.world.rank))
            value = value.to(DEVICE)
            exchange.all_reduce(value, key=step)
            outcome.append(value)
        outcomes.append([tensor.cpu() for tensor in (*outcome, *exchange.state().values())])
    return outcomes


@pytest.mark.parametrize("quantizer", ["sign", "random"])
def test_two_nodes_of_two_processes(quantizer: str) -> None:
    for ours, theirs in over_gloo(Case(exchange, 4, (quantizer,), local_world_size=2, settings=SETTINGS)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
