"""Throughput of the data pipeline: preprocessing, sample indices, samples and batches.

    python benchmarks/data.py --json result.json

Prints Markdown. Linux only, as it reads /proc. README.md explains the columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import data_preprocessing
import data_samples
from reporting import report

SECTIONS = ("preprocessing", "indices", "samples")


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of preprocessing, index building, samples and batches.")
    parser.add_argument("--section", choices=SECTIONS, action="append", help="only this one; may be repeated")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="processes to try (default: 1 2)")
    parser.add_argument("--megabytes", type=float, default=8, help="text to preprocess at a time (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of preprocessing (default: 3)")
    parser.add_argument("--documents", type=float, default=1e7, help="documents to index (default: 1e7)")
    parser.add_argument("--seconds", type=float, default=2, help="for each measurement of samples (default: 2)")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()

    sections = arguments.section or SECTIONS
    report("Data", {section: partial(measure, section, arguments) for section in sections}, arguments.json)


def measure(section: str, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """The rates of a section, and its heading and table."""
    rates: Sequence[Any]
    if section == "preprocessing":
        rates = data_preprocessing.measure(
            megabytes=arguments.megabytes, workers=arguments.workers, rounds=arguments.rounds
        )
        text = f"Preprocessing, {arguments.megabytes:g} MB\n\n{data_preprocessing.table(rates)}"
    elif section == "indices":
        rates = data_samples.measure_indices(int(arguments.documents))
        text = f"Indices of {arguments.documents:g} documents\n\n{data_samples.indices_table(rates)}"
    else:
        rates = data_samples.measure_samples(seconds=arguments.seconds, workers=[0, *arguments.workers])
        text = f"Samples, micro-batches of {data_samples.MICRO_BATCH}\n\n{data_samples.samples_table(rates)}"
    return [rate._asdict() for rate in rates], f"## {text}"


if __name__ == "__main__":
    main()
