"""Cost of an exchange per replica as the number of replicas grows, over gloo on one machine.

    python benchmarks/scaling.py

For 2, 4, 8 and 16 replicas, flat and hierarchical: memory of an exchange, messages and bytes that a replica sends, open
files and threads of a process. Times are left out: on the few cores of one machine they mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replica_pool import ReplicaPool, largest, launch_environment
from reporting import at_least, run_program
from torch.utils._python_dispatch import TorchDispatchMode

from megatron01.comm import BlockLayout, DenseAllReduce, OneBitAllReduce, Topology
from megatron01.comm.topology import build_topology
from megatron01.comm.transport import Transport, Work
from megatron01.config import DistributedConfig
from megatron01.parallel import initialize
from megatron01.utils.formatting import markdown

BLOCK_SIZE = 1024
BUCKET_ELEMENTS = 1 << 22
REPLICAS = (2, 4, 8, 16)
EXCHANGES = ("1 bit", "16 bit")


class Counting(Transport):
    """Counts the messages of another transport and records the largest buffer, which has a row for each replica."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport.rank, transport.size, checks=transport._checks)
        self._transport = transport
        self.messages = self.largest_buffer = 0

    def _start(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        self.messages += self.size - 1
        self.largest_buffer = max(self.largest_buffer, received.nbytes)
        return self._transport._start(received, sent)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._transport.broadcast(tensor)


def measure(elements: int, replicas: int) -> list[dict[str, Any]]:
    """One line per exchange and topology, with the maximum over replicas."""
    lines = []
    with ReplicaPool(replicas) as pool:
        joined = pool.run(_resources)
        for hierarchical in ("off", "on"):
            if hierarchical == "on" and replicas < 4:
                continue  # a hierarchical exchange needs two nodes of two processes
            everyones = pool.run(_measure_replica, elements, replicas, hierarchical)
            for kind in EXCHANGES:
                most = largest([each[kind] for each in everyones])
                for name in ("files", "threads"):
                    pairs = zip(everyones, joined, strict=True)
                    most[name] = max(each[name] - alone[name] for each, alone in pairs)
                topology = "flat" if hierarchical == "off" else f"{replicas // _per_node(replicas)} nodes"
                place = {"replicas": replicas, "exchange": kind, "topology": topology}
                lines.append(place | most)
    return lines


def _per_node(replicas: int) -> int:
    """Processes per node: as many as there are nodes, or half as many."""
    return 1 << ((replicas.bit_length() - 1) // 2)


def _resources() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    threads = next(line for line in status.splitlines() if line.startswith("Threads:"))
    return {"files": len(os.listdir("/proc/self/fd")), "threads": int(threads.split()[1])}


def _measure_replica(elements: int, replicas: int, hierarchical: str) -> dict[str, Any]:
    settings = DistributedConfig(hierarchical=hierarchical, threads_per_replica=1)  # type: ignore[arg-type]
    with initialize(launch_environment(_per_node(replicas)), settings) as group:
        topology = build_topology(group, settings)
        counted = _counting(topology)
        layout = BlockLayout(torch.full((-(-elements // BLOCK_SIZE),), BLOCK_SIZE, dtype=torch.int32), BLOCK_SIZE)
        value = torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(dist.get_rank()))
        result: dict[str, Any] = {kind: _exchange(kind, layout, counted, value) for kind in EXCHANGES}
        return result | _resources()


def _counting(topology: Topology) -> Topology:
    world = Counting(topology.world)
    if topology.local is None or topology.across is None:
        return Topology(world=world)
    return Topology.hierarchical(world, Counting(topology.local), Counting(topology.across))


def _exchange(kind: str, layout: BlockLayout, topology: Topology, value: torch.Tensor) -> dict[str, float]:
    before = sum(_storages().values())
    run = _one_bit(layout, topology, value) if kind == "1 bit" else _dense(layout, topology, value)
    run()  # opens the connections
    held = sum(_storages().values()) - before
    transports = [each for each in (topology.world, topology.local, topology.across) if isinstance(each, Counting)]
    for transport in transports:
        transport.messages = transport.largest_buffer = 0
    sent = topology.sent().bytes_sent
    known = _storages()
    with Temporaries(known) as temporaries:
        run()
    return {
        "held": held / layout.num_elements,
        "temporary": temporaries.largest,
        "bits": 8 * (topology.sent().bytes_sent - sent) / layout.num_elements,
        "messages": sum(transport.messages for transport in transports),
        "largest_message": max(transport.largest_buffer // transport.size for transport in transports),
        "largest_buffer": max(transport.largest_buffer for transport in transports),
    }


def _one_bit(layout: BlockLayout, topology: Topology, value: torch.Tensor) -> Callable[[], object]:
    exchange = OneBitAllReduce(
        layout, topology, quantizer="sign", active=layout.real_elements(), bucket_elements=BUCKET_ELEMENTS
    )
    return lambda: exchange.all_reduce(value)


def _dense(layout: BlockLayout, topology: Topology, value: torch.Tensor) -> Callable[[], object]:
    mean = DenseAllReduce(layout, topology, torch.bfloat16, bucket_elements=BUCKET_ELEMENTS)

    def blocks(first: int, last: int) -> list[torch.Tensor]:
        return [value[first * layout.block_size : last * layout.block_size]]

    return lambda: mean.all_reduce(blocks, blocks)


def _storages() -> dict[int, int]:
    """Address -> bytes of the storages of all tensors in this process."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor:
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return storages


class Temporaries(TorchDispatchMode):
    """Records the peak memory that operations allocate in addition to the ``known`` storages."""

    def __init__(self, known: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self.largest = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in self._known:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return made


HEADER = {
    "replicas": "replicas",
    "topology": "topology",
    "exchange": "exchange",
    "held": "held, B/element",
    "temporary": "largest temporary, kB",
    "bits": "sent, bit/element",
    "messages": "messages",
    "largest_message": "largest message, kB",
    "largest_buffer": "largest buffer, kB",
    "files": "files",
    "threads": "threads",
}


def table(lines: list[dict[str, Any]]) -> list[list[str]]:
    """The lines as cells of text, in the order of ``HEADER``."""
    rows = []
    for line in lines:
        shown = {
            **{name: str(value) for name, value in line.items()},
            **{name: f"{line[name]:.2f}" for name in ("held", "bits")},
            **{name: f"{line[name] / 1e3:.1f}" for name in ("temporary", "largest_message", "largest_buffer")},
        }
        rows.append([shown[name] for name in HEADER])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements", type=at_least(1), default=1 << 23, help="of the exchanged buffer (default: %(default)s)"
    )
    parser.add_argument("--replicas", type=at_least(2), nargs="+", default=REPLICAS, help="default: 2 4 8 16")
    given = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for replicas in given.replicas:
        lines += measure(given.elements, replicas)
    print(markdown([list(HEADER.values()), *table(lines)]), end="")


if __name__ == "__main__":
    run_program(main)
