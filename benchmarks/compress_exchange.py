"""Time of a 1-bit exchange between replicas, in turn with an fp32 all-reduce and with DeepSpeed's 1-bit exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from replica_pool import largest, run_replicas
from rivals.contestant import ring_bytes

from megatron01.comm import BlockLayout, OneBitAllReduce, Status, TorchTransport
from megatron01.utils.formatting import markdown

BLOCK_SIZE = 1024
REPLICAS = 2
NAMES = {
    "exchange": "1-bit exchange",
    "all_reduce": "fp32 all-reduce",
    "adam": "fp32 all-reduce and step of torch's fused Adam",
    "deepspeed_all_reduce": "DeepSpeed: 1-bit all-reduce",
    "deepspeed_step": "DeepSpeed: step of ZeroOneAdam with its 1-bit all-reduce",
}


class Rival(Protocol):
    """An alternative to the exchange, for a buffer of the same size."""

    def step(self) -> dict[str, dict[str, float]]:
        """Run once; by compared part, its ``seconds``, ``bytes_sent``, and possibly further times."""


def measure(sizes: Sequence[int], rounds: int, *, deepspeed: bool) -> tuple[list[dict[str, Any]], str]:
    """The results for buffers of these numbers of elements, and their tables."""
    results = [_of_size(elements, rounds, deepspeed=deepspeed) for elements in sizes]
    return results, "\n".join(map(_table, results))


def _table(result: dict[str, Any]) -> str:
    """Milliseconds of an exchange and of the alternatives, and paired ratios."""
    ours = result["exchange"]
    rows = [
        [
            NAMES[name],
            *(f"{1e3 * entry[key]:.1f}" for key in ("seconds", "best_seconds")),
            *(f"{entry.get(key, 1.0):.2f}" for key in ("ratio", "best_ratio")),
            f"{entry['bytes_sent'] / 1e6:.2f}",
        ]
        for name, entry in {"exchange": ours, **result["rivals"]}.items()
    ]
    rows.insert(1, ["1-bit exchange and decoding its result", f"{1e3 * ours['seconds_decoded']:.1f}", *[""] * 4])
    text = (
        f"## Exchange: {result['elements'] / 1e6:.0f} M elements, {result['replicas']} replicas with one thread each, "
        "gloo on loopback, medians\n\n"
        + markdown([["", "ms", "best, ms", "/ exchange", "best / best", "MB sent"], *rows])
    )
    if "deepspeed_step" in result["rivals"]:
        packing = {name: entry.get("packing_seconds") for name, entry in result["rivals"].items()}
        text += (
            f"\nDeepSpeed {result['deepspeed_version']} has no 1-bit back end for CPUs. Supplied to its `compressed` "
            f"one: a bit packer (numpy; {1e3 * packing['deepspeed_all_reduce']:.1f} ms of its all-reduce, "
            f"{1e3 * packing['deepspeed_step']:.1f} ms of its step) and a reshape of the scale that gloo gathers.\n"
        )
    return text


def _of_size(elements: int, rounds: int, *, deepspeed: bool) -> dict[str, Any]:
    """Medians over turns of the slower replica's seconds, and bytes.

    ``ratio`` is the median paired ratio, alternative / exchange; ``best_ratio`` is that of the fastest turns, which
    other load on the machine affects least.
    """
    rivals: dict[str, Callable[[int], Rival]] = {"adam": FP32Adam}
    result: dict[str, Any] = {"elements": elements, "replicas": REPLICAS, "rivals": {}}
    if deepspeed:
        from rivals.deepspeed import DeepSpeedZeroOneAdam, version

        rivals["deepspeed"] = DeepSpeedZeroOneAdam
        result["deepspeed_version"] = version()
    exchanges: list[dict[str, float]] = []
    for build_rival in rivals.values():
        replicas = run_replicas(_measure, REPLICAS, elements, rounds, build_rival)
        turns = [
            {part: largest([turn[part] for turn in same]) for part in same[0]} for same in zip(*replicas, strict=True)
        ]
        ours = [turn.pop("exchange") for turn in turns]
        exchanges += ours
        for part in turns[0]:
            rival = [turn[part] for turn in turns]
            result["rivals"][part] = {
                **_summary(rival),
                "ratio": median(r["seconds"] / o["seconds"] for r, o in zip(rival, ours, strict=True)),
                "best_ratio": min(r["seconds"] for r in rival) / min(o["seconds"] for o in ours),
            }
    result["exchange"] = _summary(exchanges)
    return result


def _summary(turns: list[dict[str, float]]) -> dict[str, float]:
    return {
        **{name: median(turn[name] for turn in turns) for name in turns[0]},
        "best_seconds": min(turn["seconds"] for turn in turns),
    }


def _measure(elements: int, rounds: int, build_rival: Callable[[int], Rival]) -> list[dict[str, Any]]:
    exchange, rival = OneBitExchange(elements), build_rival(elements)
    turns = []
    for _ in range(rounds + 1):
        ours = exchange.step()
        dist.barrier()
        turns.append({"exchange": ours, **rival.step()})
    return turns[1:]  # the first is warm-up: it loads kernels and touches memory


class OneBitExchange:
    """This library's exchange: from a buffer of values to the packed mean and the residuals, as in an optimizer."""

    def __init__(self, elements: int) -> None:
        num_blocks = -(-elements // BLOCK_SIZE)
        layout = BlockLayout(torch.full((num_blocks,), BLOCK_SIZE, dtype=torch.int32), BLOCK_SIZE)
        self._transport = TorchTransport()
        self._exchange = OneBitAllReduce(layout, self._transport, active=layout.real_elements())
        self._value = torch.empty(layout.num_elements)

    def step(self) -> dict[str, float]:
        self._value.uniform_(-1.0, 1.0)
        dist.barrier()
        exchange, sent_before = self._exchange, self._transport.bytes_sent
        start = time.perf_counter()
        exchange.begin()
        for bucket, (first, last) in enumerate(exchange.buckets):
            exchange.compress(bucket, first, last, self._value)
            exchange.send(bucket, Status.OK)
        exchange.reduce(stop_on_overflow=True)
        results, self._value = exchange.receive(self._value)
        seconds = time.perf_counter() - start
        for (first, last), packed in zip(exchange.buckets, results, strict=True):
            part = self._value[first * BLOCK_SIZE : last * BLOCK_SIZE]
            exchange._codec.decode(first, last, packed, part)
        decoded = time.perf_counter() - start
        sent = self._transport.bytes_sent - sent_before
        return {"seconds": seconds, "seconds_decoded": decoded, "bytes_sent": sent}


class FP32Adam:
    """fp32 all-reduce of the gradient and torch's fused Adam, on one flat tensor."""

    def __init__(self, elements: int) -> None:
        self._parameter = torch.nn.Parameter(torch.zeros(elements))
        self._gradient = torch.empty(elements).uniform_(-1.0, 1.0)
        self._parameter.grad = self._gradient
        self._adam = torch.optim.Adam([self._parameter], lr=1e-4, fused=True)

    def step(self) -> dict[str, dict[str, float]]:
        start = time.perf_counter()
        dist.all_reduce(self._gradient)
        reduced = time.perf_counter() - start
        self._gradient.div_(dist.get_world_size())
        self._adam.step()
        seconds = time.perf_counter() - start
        sent = ring_bytes(dist.get_world_size(), self._gradient.nbytes)
        return {
            "all_reduce": {"seconds": reduced, "bytes_sent": sent},
            "adam": {"seconds": seconds, "bytes_sent": sent},
        }
