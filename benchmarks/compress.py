"""Throughput of the 1-bit codec against a plain copy, and time of a 1-bit exchange against an fp32 all-reduce.

    python benchmarks/compress.py
    python benchmarks/compress.py --section exchange --deepspeed --json result.json

Prints Markdown. Linux only, as it reads /proc. README.md explains the columns.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import codec_rates
import synchronization
from reporting import report

from megatron01.utils.formatting import markdown

NAMES = {
    "exchange": "1-bit exchange",
    "all_reduce": "fp32 all-reduce",
    "adam": "fp32 all-reduce and step of torch's fused Adam",
    "deepspeed_all_reduce": "DeepSpeed: 1-bit all-reduce",
    "deepspeed_step": "DeepSpeed: step of ZeroOneAdam with its 1-bit all-reduce",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the 1-bit codec and of a 1-bit exchange.")
    parser.add_argument("--section", choices=tuple(SECTIONS), action="append", help="only this one; may be repeated")
    parser.add_argument("--elements", type=int, default=30_000_000, help="of the codec's buffer (default: 30 M)")
    parser.add_argument(
        "--exchange-elements",
        type=int,
        action="append",
        help="of an exchanged buffer; may be repeated (default: 10 M and 109 M)",
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured turns (default: 15)")
    parser.add_argument("--deepspeed", action="store_true", help="compare with an installed DeepSpeed, too")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()

    report(
        "Compression",
        {name: partial(SECTIONS[name], arguments) for name in arguments.section or SECTIONS},
        arguments.json,
    )


def measure_codec(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """GB/s of each phase and of a copy, and the ratio of the two."""
    result = codec_rates.measure(arguments.elements, arguments.rounds)
    rows = [
        [
            f"{entry['quantizer']}, {entry['phase']}",
            str(entry["threads"]),
            f"{entry['gigabytes_per_second']:.1f}",
            f"{entry['copy_gigabytes_per_second']:.1f}",
            f"{entry['ratio']:.2f}",
            f"{entry['best_ratio']:.2f}",
        ]
        for entry in result["phases"]
    ]
    return result, (
        f"## Codec: {result['elements'] / 1e6:.0f} M elements, blocks of {result['block_size']}, "
        f"{result['replicas']} replicas, medians\n\n"
        + markdown([["quantizer, phase", "threads", "GB/s of fp32", "copy, GB/s", "rate / copy", "best / best"], *rows])
    )


def measure_exchange(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    results = [
        synchronization.measure(elements, arguments.rounds, deepspeed=arguments.deepspeed)
        for elements in arguments.exchange_elements or (10_000_000, 109_000_000)
    ]
    return results, "\n".join(map(exchange_table, results))


def exchange_table(result: dict[str, Any]) -> str:
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


SECTIONS = {"codec": measure_codec, "exchange": measure_exchange}

if __name__ == "__main__":
    main()
