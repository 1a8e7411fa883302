"""Throughput of the codec's phases against a plain copy of as many fp32 elements, in turn on the same buffers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, get_args

import torch
from timing import seconds_of

from megatron01.comm import BlockLayout
from megatron01.comm.kernels import Codec, build_codec
from megatron01.comm.kernels.cpu import BlockWorkers
from megatron01.comm.payload import Header, Packed, Quantizer, Status
from megatron01.utils.formatting import markdown

BLOCK_SIZE = 1024
REPLICAS = 2  # rows that a server reduces


def measure(elements: int, rounds: int) -> tuple[dict[str, Any], str]:
    """GB/s of fp32 of each phase and of a copy with as many threads: medians, and the median paired ratio; a table.

    ``best_ratio`` is that of the fastest turns, which other load on the machine affects least. The fp32 buffer counted
    is the value (compress), the server's residual (reduce) or the output (decode).
    """
    num_blocks = elements // BLOCK_SIZE // REPLICAS * REPLICAS
    layout = BlockLayout(torch.full((num_blocks,), BLOCK_SIZE, dtype=torch.int32), BLOCK_SIZE)
    value, error = torch.randn(layout.num_elements), 0.1 * torch.randn(layout.num_elements)
    out = torch.empty_like(value)

    def copy(first: int, last: int) -> None:
        part = slice(first * BLOCK_SIZE, last * BLOCK_SIZE)
        out[part].copy_(value[part])

    torch.set_num_threads(1)  # the copy uses the codec's threads: torch's wait for each other
    phases = []
    for threads, quantizer in product(sorted({1, os.cpu_count() or 1}), get_args(Quantizer)):
        workers = BlockWorkers(threads)
        codec = build_codec(BLOCK_SIZE, quantizer, value.device, num_threads=threads)
        for phase, (count, function) in codec_phases(codec, layout, value, error, out).items():
            seconds: list[float] = []
            copy_seconds: list[float] = []
            for _ in range(rounds + 1):
                copy_seconds.append(seconds_of(partial(workers.run, copy, 0, num_blocks)) / out.numel())
                seconds.append(seconds_of(function) / count)
            pairs = list(zip(copy_seconds, seconds, strict=True))[1:]  # the first is warm-up: it loads the kernel
            phases.append(
                {
                    "quantizer": quantizer,
                    "phase": phase,
                    "threads": threads,
                    "gigabytes_per_second": 4e-9 / median(own for _, own in pairs),
                    "copy_gigabytes_per_second": 4e-9 / median(copy for copy, _ in pairs),
                    "ratio": median(copy / own for copy, own in pairs),
                    "best_ratio": min(copy for copy, _ in pairs) / min(own for _, own in pairs),
                }
            )
    rows = [
        [
            f"{entry['quantizer']}, {entry['phase']}",
            str(entry["threads"]),
            f"{entry['gigabytes_per_second']:.1f}",
            f"{entry['copy_gigabytes_per_second']:.1f}",
            f"{entry['ratio']:.2f}",
            f"{entry['best_ratio']:.2f}",
        ]
        for entry in phases
    ]
    header = ["quantizer, phase", "threads", "GB/s of fp32", "copy, GB/s", "rate / copy", "best / best"]
    millions = layout.num_elements / 1e6
    title = f"## Codec: {millions:.0f} M elements, blocks of {BLOCK_SIZE}, {REPLICAS} replicas, medians\n\n"
    result = {"elements": layout.num_elements, "block_size": BLOCK_SIZE, "replicas": REPLICAS, "phases": phases}
    return result, title + markdown([header, *rows])


def codec_phases(
    codec: Codec,
    layout: BlockLayout,
    value: torch.Tensor,
    error: torch.Tensor,
    out: torch.Tensor,
    replicas: int = REPLICAS,
) -> dict[str, tuple[int, Callable[[], None]]]:
    """By phase: the number of elements it processes, and a function that runs it once."""
    row_blocks = layout.num_blocks // replicas
    row_bytes = codec.format.row_bytes(row_blocks)
    rows = torch.zeros(replicas, row_bytes, dtype=torch.uint8, device=value.device)
    packed = Packed(rows, row_blocks, 0, codec.format, layout.real_elements())
    reduced, server_error = replace(packed, rows=torch.zeros_like(rows)), value.new_zeros(row_blocks * BLOCK_SIZE)
    header = Header(Status.OK)  # with which rows get their checksums
    return {
        "compress": (
            value.numel(),
            lambda: codec.compress(0, layout.num_blocks, value, error, packed, 1, header=header),
        ),
        "reduce": (server_error.numel(), lambda: codec.reduce(packed, server_error, reduced, 0, 1)),
        "decode": (value.numel(), lambda: codec.decode(0, layout.num_blocks, packed, out)),
    }
