"""Throughput of the 1-bit codec against a plain copy, and time of a 1-bit exchange against an fp32 all-reduce.

    python benchmarks/compress.py
    python benchmarks/compress.py --section exchange --deepspeed --json result.json

Prints Markdown. Linux only, as it reads /proc. README.md explains the columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import compress_codec
import compress_exchange
from reporting import at_least, report, run_program


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the 1-bit codec and of a 1-bit exchange.")
    parser.add_argument(
        "--section", choices=("codec", "exchange"), action="append", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--elements", type=at_least(2048), default=30_000_000, help="of the codec's buffer (default: 30 M)"
    )
    parser.add_argument(
        "--exchange-elements",
        type=at_least(1),
        action="append",
        help="of an exchanged buffer; may be repeated (default: 10 M and 109 M)",
    )
    parser.add_argument("--rounds", type=at_least(1), default=15, help="measured turns (default: 15)")
    parser.add_argument("--deepspeed", action="store_true", help="compare with an installed DeepSpeed, too")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()

    sizes = arguments.exchange_elements or (10_000_000, 109_000_000)
    sections: dict[str, Callable[[], tuple[Any, str]]] = {
        "codec": partial(compress_codec.measure, arguments.elements, arguments.rounds),
        "exchange": partial(compress_exchange.measure, sizes, arguments.rounds, deepspeed=arguments.deepspeed),
    }
    report("Compression", {name: sections[name] for name in arguments.section or sections}, arguments.json)


if __name__ == "__main__":
    run_program(main)
