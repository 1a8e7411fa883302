"""Which ranks share a node, and the transports that a run gets."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron01.comm import TorchTransport
from megatron01.comm.topology import build_topology
from megatron01.config import DistributedConfig, PretrainConfig
from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.parallel.launch import Place, nodes_of
from tests.distributed.harness import run_ranks

HOST = socket.gethostname()
UNEVEN = f"(2 on {HOST}, 1 on {HOST})"


@pytest.mark.parametrize(
    ("places", "nodes"),
    [
        ([("a", 0, 1)], [[0]]),
        ([("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2)], [[0, 1], [2, 3]]),
        ([("a", 0, 2), ("b", 0, 2), ("a", 1, 2), ("b", 1, 2)], [[0, 2], [1, 3]]),  # round-robin
        ([("a", 0, 2), ("a", 1, 2), ("a", 0, 2), ("a", 1, 2)], [[0, 1], [2, 3]]),  # simulated on one machine
        ([("a", 0, 2), ("a", 0, 2), ("a", 1, 2), ("a", 1, 2)], [[0, 2], [1, 3]]),
        ([("a", 1, 2), ("a", 0, 2)], [[1, 0]]),  # by local rank
        ([("a", 0, 3), ("a", 1, 3), ("a", 2, 3), ("b", 0, 1)], [[0, 1, 2], [3]]),
        ([("a", 0, 1), ("a", 0, 2), ("a", 1, 2)], [[0], [1, 2]]),
    ],
)
def test_nodes_are_recognized(places: list[tuple[str, int, int]], nodes: list[list[int]]) -> None:
    assert nodes_of([Place(*place) for place in places]) == nodes


def _build(rank: int, world_size: int, local_sizes: list[int], settings: dict[str, Any]) -> dict[str, Any]:
    local = [(index, size) for size in local_sizes for index in range(size)]
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = map(str, local[rank])
    # without payload checks, so that the transports are not wrapped
    config = DistributedConfig(threads_per_replica=1, distributed_timeout_minutes=3, check_payloads=False, **settings)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron01").addHandler(handler)
    with initialize(LaunchEnvironment.read(os.environ), config) as group:
        try:
            topology = build_topology(group, config)
        except UserError as error:
            return {"error": f"{error.scope}: {error}"}
        places = [(t.rank, t.size) for t in (topology.local, topology.across) if t is not None]
        timeouts = set()
        for transport in (topology.local, topology.across):
            if isinstance(transport, TorchTransport) and transport.size > 1:
                assert transport.process_group is not None
                backend = transport.process_group._get_backend(torch.device("cpu"))
                timeouts.add(backend.options._timeout.total_seconds())
        return {
            "places": places,
            "counts": (topology.num_nodes, topology.local_size, topology.num_replicas, topology.remote_peers),
            "world": (topology.world.rank, topology.world.size),
            "timeouts": timeouts,
            "said": said,
        }


def test_two_nodes_of_two() -> None:
    for rank, output in enumerate(run_ranks(_build, 4, [2, 2], {})):
        assert output["places"] == [(rank % 2, 2), (rank // 2, 2)] and output["world"] == (rank, 4)
        assert output["counts"] == (2, 2, 4, 2) and output["said"] == []
        assert output["timeouts"] == {180.0}, "a group does not inherit the time-out"


@pytest.mark.parametrize(
    ("local_sizes", "settings", "counts"),
    [
        ([2, 2], {"replica": "node"}, (2, 2, 2, 2)),
        ([3], {"replica": "node"}, (1, 3, 1, 0)),  # one replica, whose processes average their gradients
        ([2, 2], {"hierarchical": "off"}, (1, 1, 4, 2)),
        ([3], {}, (1, 1, 3, 0)),
        ([1, 1], {"replica": "node"}, (1, 1, 2, 1)),
        ([1], {}, (1, 1, 1, 0)),
    ],
)
def test_other_wishes(local_sizes: list[int], settings: dict[str, Any], counts: tuple[int, ...]) -> None:
    for output in run_ranks(_build, sum(local_sizes), local_sizes, settings):
        assert output["counts"] == counts
        assert len(output["places"]) == (2 if counts[1] > 1 else 0)


def test_uneven_nodes_are_flat_and_the_first_process_says_so() -> None:
    outputs = run_ranks(_build, 3, [2, 1], {})
    assert [output["counts"] for output in outputs] == [(1, 1, 3, 1), (1, 1, 3, 1), (1, 1, 3, 2)]
    message = f"the exchange is flat: the nodes hold different numbers of processes {UNEVEN}"
    assert [output["said"] for output in outputs] == [[message], [], []]


@pytest.mark.parametrize(
    ("local_sizes", "settings", "words"),
    [
        (
            [2, 1],
            {"hierarchical": "on"},
            f"hierarchical is on, but the nodes hold different numbers of processes {UNEVEN}",
        ),
        ([2], {"hierarchical": "on"}, "hierarchical is on, but all processes (2) run on one node"),
        ([1, 1], {"hierarchical": "on"}, "hierarchical is on, but each of the 2 nodes holds one process"),
        ([2, 1], {"replica": "node"}, f"replica is node, but the nodes hold different numbers of processes {UNEVEN}"),
    ],
)
def test_wishes_that_cannot_be_met(local_sizes: list[int], settings: dict[str, Any], words: str) -> None:
    for output in run_ranks(_build, sum(local_sizes), local_sizes, settings):
        assert output["error"].startswith(f"job: {words}; ") and "\n" not in output["error"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cuda_aware": True}, "cuda_aware is set, but comm_backend is torch"),
        ({"replica": "node", "hierarchical": "off"}, "replica is node, but hierarchical is off"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        DistributedConfig(**settings)


def _transports(rank: int, world_size: int) -> dict[str, Any]:
    transport, alone = TorchTransport(), TorchTransport(dist.new_group([rank], use_local_synchronization=True))
    sent = [torch.full((world_size, 8), 10 * rank + number, dtype=torch.uint8) for number in range(3)]
    received = [torch.zeros_like(rows) for rows in sent]
    works = [transport.all_to_all(into, rows) for into, rows in zip(received, sent, strict=True)]
    gathered = torch.zeros(world_size, 8, dtype=torch.uint8)
    works.append(transport.all_gather(gathered, sent[0][0]))
    for work in reversed(works):  # in any order
        work.wait()
    own = torch.zeros(1, 8, dtype=torch.uint8)
    alone.all_to_all(own, sent[1][:1]).wait()
    first = torch.tensor([float(rank + 5)])
    transport.broadcast(first)
    return {
        "scattered": [rows[:, 0].tolist() for rows in received],
        "gathered": gathered[:, 0].tolist(),
        "own": own[0, 0].item(),
        "bytes": (transport.bytes_sent, alone.bytes_sent),
        "first": first.item(),
    }


def test_several_collectives_may_be_under_way() -> None:
    for rank, output in enumerate(run_ranks(_transports, 3)):
        assert output["scattered"] == [[number, 10 + number, 20 + number] for number in range(3)]
        assert output["gathered"] == [0, 10, 20] and output["own"] == 10 * rank + 1
        assert output["bytes"] == (3 * 2 * 8 + 2 * 8, 0) and output["first"] == 5.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"comm_backend": "mpi"}, "adam cannot exchange over MPI"), ({"replica": "node"}, "no replicas of several")],
)
def test_adam_exchanges_by_itself(settings: dict[str, Any], words: str) -> None:
    from megatron01.config import OptimizerConfig

    with pytest.raises(UserError, match=words):
        PretrainConfig(optimizer=OptimizerConfig(optimizer="adam"), distributed=DistributedConfig(**settings))
