"""Throughput of the data pipeline: preprocessing, sample indices, samples and batches.

    python benchmarks/data.py --json result.json

Prints Markdown. Linux only, as it reads /proc. README.md explains the columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import data_preprocessing
import data_samples
from reporting import busy_cores, machine

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

    print(f"# Data: {machine()}\n", flush=True)
    result: dict[str, Any] = {"machine": machine()}
    busy = [busy_cores()]
    for section in arguments.section or SECTIONS:
        rates, text = _measure(section, arguments)
        result[section] = [dataclasses.asdict(rate) for rate in rates]
        print(f"## {text}\n", flush=True)
        busy.append(busy_cores())
    result["busy_cores"] = busy
    print(f"Cores busy with other work before, between and after the sections: {', '.join(f'{b:.1f}' for b in busy)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def _measure(section: str, arguments: argparse.Namespace) -> tuple[list[Any], str]:
    """The rates of a section, and its heading and table."""
    if section == "preprocessing":
        rates: list[Any] = data_preprocessing.measure(
            megabytes=arguments.megabytes, workers=arguments.workers, rounds=arguments.rounds
        )
        return rates, f"Preprocessing, {arguments.megabytes:g} MB\n\n{data_preprocessing.markdown(rates)}"
    if section == "indices":
        rates = data_samples.measure_indices(int(arguments.documents))
        return rates, f"Indices of {arguments.documents:g} documents\n\n{data_samples.indices_table(rates)}"
    rates = data_samples.measure_samples(seconds=arguments.seconds, workers=[0, *arguments.workers])
    heading = f"Samples, micro-batches of {data_samples.MICRO_BATCH}"
    return rates, f"{heading}\n\n{data_samples.samples_table(rates)}"


if __name__ == "__main__":
    main()
