"""The exchanges over MPI: the same bits as over gloo, and what a user can get wrong."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from typing import Any

import pytest
import torch

from megatron01.comm import Topology
from megatron01.config import DistributedConfig, OptimizerConfig, PretrainConfig, TrainingConfig
from megatron01.errors import UserError
from megatron01.optim import ZeroOneAdam, build_optimizer, build_schedule
from megatron01.parallel import LaunchEnvironment, initialize, mpi
from tests.distributed import test_dense, test_hierarchical
from tests.distributed.topologies import Case, over_gloo, over_mpi, run_mpirun
from tests.tiers import slow_after


def collectives(topology: Topology) -> dict[str, Any]:
    transport = topology.world
    rank, size = transport.rank, transport.size
    sent = [torch.full((size, 100_000), 10 * rank + number, dtype=torch.uint8) for number in range(3)]
    received = [torch.zeros_like(rows) for rows in sent]
    works = [transport.all_to_all(into, rows) for into, rows in zip(received, sent, strict=True)]
    gathered = torch.zeros(size, 100_000, dtype=torch.uint8)
    works.append(transport.all_gather(gathered, sent[0][0]))
    for work in reversed(works):  # in any order
        work.wait()
    first = torch.full((3,), float(rank + 5), dtype=torch.bfloat16)
    transport.broadcast(first)
    return {
        "kind": type(transport).__name__,
        "scattered": [rows.unique_consecutive().tolist() for rows in received],
        "gathered": gathered.unique_consecutive().tolist(),
        "bytes": transport.bytes_sent,
        "first": first.tolist(),
    }


def large_broadcast(topology: Topology) -> list[int]:
    """Of more bytes than an int counts, as the weights of GPT-2 762M in fp32 are."""
    values = torch.full(((1 << 31) + 4096,), topology.world.rank + 5, dtype=torch.uint8)
    topology.world.broadcast(values)
    return [int(bound) for bound in values.aminmax()]


def miscounted(topology: Topology) -> str:
    environment = LaunchEnvironment.read(os.environ)
    with pytest.raises(UserError) as caught:
        mpi.connect(dataclasses.replace(environment, world_size=environment.world_size + 1))
    return str(caught.value)


def train(topology: Topology) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    weights = torch.nn.Parameter(torch.randn(70, 50))
    optimizer = ZeroOneAdam([weights], 1e-2, process_group=topology, sync_policy="constant:3", variance_freeze_step=6)
    generator = torch.Generator().manual_seed(topology.world.rank)
    for _ in range(24):
        weights.grad = weights.detach() - 1.0 + torch.randn(70, 50, generator=generator)
        optimizer.step()
    return {"weights": weights.detach(), **optimizer.replicated_state(), **optimizer.replica_state()}


def train_divided(topology: Topology) -> dict[str, torch.Tensor]:
    """With the optimizer state of a node sharded over its processes."""
    torch.manual_seed(1)
    model = torch.nn.Linear(70, 50)
    config = PretrainConfig(
        optimizer=OptimizerConfig(lr=1e-2, lr_warmup_iters=2, block_size=64, bucket_elements=1024),
        training=TrainingConfig(train_iters=24),
        distributed=DistributedConfig(replica="node", shard_optimizer=True),
    )
    optimizer = build_optimizer(model, config, build_schedule(config.optimizer, 24), topology)
    generator = torch.Generator().manual_seed(topology.world.rank)
    for _ in range(24):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() - 1.0 + torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {"weights": model.weight.detach(), **optimizer.replicated_state(), **optimizer.replica_state()}


FOUR: dict[str, Case] = {
    "collectives": Case(
        collectives, 4, (), 2, {"check_payloads": False}
    ),  # no address is given, so the rendezvous is at rank 0's host name
    "dense": Case(test_dense.wire_types, 4, (23, 5 * test_dense.BLOCK)),
    "dense, two nodes": Case(test_dense.wire_types, 4, (23, 5 * test_dense.BLOCK), 2),
    "dense, bucket by bucket": Case(test_dense.bucket_by_bucket, 4, (), 2),
    "one bit, two nodes": Case(test_hierarchical.hierarchical, 4, (40, [4, 1000], "sign"), 2),
    "one bit, node replicas": Case(test_hierarchical.hierarchical, 4, (40, [4], "random"), 2, {"replica": "node"}),
    "one bit, called off": Case(test_hierarchical.called_off, 4, (3,), 2),
    "optimizer, two nodes": Case(train, 4, (), 2),
    "optimizer, node replicas": Case(train, 4, (), 2, {"replica": "node"}),
    "divided optimizer": Case(train_divided, 4, (), 2, {"replica": "node"}),
}
TWO: dict[str, Case] = {
    "collectives": Case(collectives, 2, settings={"check_payloads": False}),
    "miscounted": Case(miscounted, 2),
    "dense": Case(test_dense.wire_types, 2, (23, 5 * test_dense.BLOCK)),
    "one bit": Case(test_hierarchical.flat, 2, (1, 40)),
    "optimizer": Case(train, 2),
}


CASES = {2: TWO, 4: FOUR}


@functools.cache
def results(size: int) -> dict[str, list[Any]]:
    """The ranks' return values for all cases of a world size, which share one mpirun."""
    return over_mpi(CASES[size])


@pytest.mark.parametrize("size", slow_after(1, CASES))
def test_the_exchanges_give_the_same_bits_as_over_gloo(size: int) -> None:
    for name in CASES[size].keys() - {"collectives", "miscounted"}:
        assert_equal(results(size)[name], over_gloo(CASES[size][name]), name)


@pytest.mark.parametrize("size", slow_after(1, CASES))
def test_replicas_agree_to_the_bit(size: int) -> None:
    for name, states in results(size).items():
        if name.startswith("optimizer"):
            assert all(torch.equal(state["x"], states[0]["x"]) for state in states)
            assert all(torch.equal(state["v"], states[0]["v"]) for state in states)


@pytest.mark.slow
def test_parts_of_a_divided_optimizer_agree_to_the_bit() -> None:
    divided = results(4)["divided optimizer"]
    assert all(torch.equal(state["x"], divided[rank % 2]["x"]) for rank, state in enumerate(divided))
    assert divided[0]["x"].numel() + divided[1]["x"].numel() < 2 * divided[0]["weights"].numel()


@pytest.mark.parametrize("size", slow_after(1, CASES))
def test_several_collectives_may_be_under_way(size: int) -> None:
    for output in results(size)["collectives"]:
        assert output["kind"] == "MPITransport"
        assert output["scattered"] == [[10 * peer + number for peer in range(size)] for number in range(3)]
        assert output["gathered"] == [10 * peer for peer in range(size)]
        assert output["bytes"] == (3 + 1) * (size - 1) * 100_000 and output["first"] == [5.0] * 3


@pytest.mark.slow
def test_weights_of_more_than_2_gib_are_broadcast() -> None:
    assert over_mpi({"large": Case(large_broadcast, 2)}) == {"large": [[5, 5]] * 2}


def assert_equal(got: Any, want: Any, where: str) -> None:
    """Equal containers of tensors."""
    assert type(got) is type(want), where
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want), where
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            assert_equal(got[key], want[key], f"{where}, {key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_equal(a, b, f"{where}, {index}")
    else:
        assert got == want, where


LEAVES_EARLY = """
import os, sys, torch
from megatron01.comm.topology import build_topology
from megatron01.config import DistributedConfig
from megatron01.parallel import LaunchEnvironment, initialize
config = DistributedConfig(comm_backend="mpi", threads_per_replica=1)
with initialize(LaunchEnvironment.read(os.environ), config) as group:
    topology = build_topology(group, config)
    if group.rank == 1:
        sys.exit("rank 1 found a mistake")
    rows = torch.zeros(2, 1 << 20, dtype=torch.uint8)
    topology.world.all_to_all(torch.zeros_like(rows), rows).wait()
"""


def test_an_error_of_one_process_ends_the_others() -> None:
    ended = run_mpirun(2, "-c", LEAVES_EARLY)
    assert ended.returncode != 0 and "rank 1 found a mistake" in ended.stderr


NOBODY_WAITS = """
import os, torch
from megatron01.comm.topology import build_topology
from megatron01.config import DistributedConfig
from megatron01.parallel import LaunchEnvironment, initialize
config = DistributedConfig(comm_backend="mpi", threads_per_replica=1)

def exchange(group, requests):
    rows = torch.zeros(2, 48, dtype=torch.uint8)
    work = build_topology(group, config).world.all_to_all(torch.zeros_like(rows), rows)
    requests.append(work._request)

requests = []
with initialize(LaunchEnvironment.read(os.environ), config) as group:
    exchange(group, requests)
from mpi4py import MPI
finalize = MPI.Finalize
def show():
    print("complete" if requests[0] == MPI.REQUEST_NULL else "under way", flush=True)
    finalize()
MPI.Finalize = show
"""


def test_a_collective_that_nobody_waits_for_ends_before_a_finished_job() -> None:
    """MPI_Finalize may not come before: MPICH would write to buffers that are gone."""
    ended = run_mpirun(2, "-c", NOBODY_WAITS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["complete"] * 2


def test_ranks_that_mpi_counts_otherwise_are_the_users_to_mend() -> None:
    for rank, message in enumerate(results(2)["miscounted"]):
        assert message.startswith(
            f"MPI counts this process as rank {rank} of 2, but mpirun started it as rank {rank} of 3; mpi4py must use"
        )
        assert "\n" not in message


@pytest.mark.parametrize("launched", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_mpi_without_mpirun(launched: dict[str, str]) -> None:
    with (
        pytest.raises(UserError, match="not started by mpirun"),
        initialize(LaunchEnvironment.read(launched), DistributedConfig(comm_backend="mpi")),
    ):
        pass


def test_mpi_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = LaunchEnvironment.read(
        {
            f"OMPI_COMM_WORLD_{name}": value
            for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "0101", strict=True)
        }
    )
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"pip install 'megatron01\[mpi\]'"):
        mpi.connect(environment)
