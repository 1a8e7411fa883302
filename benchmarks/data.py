"""Throughput of the data pipeline: preprocessing, sample indices, samples and batches.

    python benchmarks/data.py --json result.json

Prints Markdown. Linux only, as it reads /proc. README.md explains the columns.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import data_preprocessing
import data_samples
from reporting import at_least, report, run_program


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of preprocessing, index building, samples and batches.")
    parser.add_argument(
        "--section",
        choices=("preprocessing", "indices", "samples"),
        action="append",
        help="only this one; may be repeated",
    )
    parser.add_argument(
        "--workers", type=at_least(1), nargs="+", default=[1, 2], help="processes to try (default: 1 2)"
    )
    parser.add_argument("--megabytes", type=float, default=8, help="text to preprocess at a time (default: 8)")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="repetitions of preprocessing (default: 3)")
    parser.add_argument("--documents", type=float, default=1e7, help="documents to index (default: 1e7)")
    parser.add_argument("--seconds", type=float, default=2, help="for each measurement of samples (default: 2)")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()

    workers = arguments.workers
    sections = {
        "preprocessing": partial(data_preprocessing.measure, arguments.megabytes, workers, arguments.rounds),
        "indices": partial(data_samples.measure_indices, int(arguments.documents)),
        "samples": partial(data_samples.measure_samples, arguments.seconds, [0, *workers]),
    }
    report("Data", {name: sections[name] for name in arguments.section or sections}, arguments.json)


if __name__ == "__main__":
    run_program(main)
