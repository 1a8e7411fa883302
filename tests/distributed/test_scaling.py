"""benchmarks/scaling.py, and its result: a replica's share of an exchange does not grow with their number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import run_ranks

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
ELEMENTS = 1 << 20
BUCKET = 1 << 17  # elements


def shares(rank: int, world_size: int, hierarchical: str) -> dict[str, Any]:
    sys.path.insert(0, BENCHMARKS)
    import scaling

    scaling.BUCKET_ELEMENTS = BUCKET
    found: dict[str, Any] = scaling._measure_replica(ELEMENTS, world_size, hierarchical)
    return found


def most_temporary(collectives: int, processes: int) -> int:
    """Bytes: a number for each received row, and a header, read on the host together."""
    return 8 * (collectives * processes * (ELEMENTS // BUCKET) + 4)


@pytest.mark.slow
def test_flat_exchanges() -> None:
    found = {replicas: run_ranks(shares, replicas, "off") for replicas in (2, 4, 8)}
    for replicas, everyones in found.items():
        buckets = ELEMENTS // BUCKET
        for each in everyones:
            for kind in ("1 bit", "16 bit"):
                assert each[kind]["messages"] == 2 * buckets * (replicas - 1)
                assert each[kind]["largest_buffer"] <= 2 * BUCKET + 64 * replicas
                assert each[kind]["temporary"] <= most_temporary(2, replicas)
            assert each["1 bit"]["bits"] == pytest.approx(2 * (replicas - 1) / replicas * (1 + 32 / 1024), rel=0.02)
            # residuals, two payloads, the words of the participation mask
            assert each["1 bit"]["held"] == pytest.approx(
                4 * (1 + 1 / replicas) + 2 * (1 + 32 / 1024) / 8 + 1 / 8, rel=0.02
            )
            assert each["16 bit"]["held"] == pytest.approx(found[2][0]["16 bit"]["held"], rel=0.4)


@pytest.mark.slow
def test_exchanges_over_nodes() -> None:
    for each in run_ranks(shares, 4, "on", local_world_size=2):
        for kind in ("1 bit", "16 bit"):
            assert each[kind]["largest_buffer"] <= 2 * BUCKET + 64 * 4
            assert each[kind]["temporary"] <= most_temporary(4, 2)
            assert each[kind]["messages"] == 4 * (ELEMENTS // BUCKET)


def test_the_table(benchmarks: Any) -> None:
    scaling = benchmarks("scaling")
    line = dict.fromkeys(scaling.HEADER, 2500.0) | {"replicas": 2, "topology": "flat", "exchange": "1 bit"}
    (row,) = scaling.table([line])
    assert len(scaling.HEADER) == len(row) and row[:4] == ["2", "flat", "1 bit", "2500.00"] and "2.5" in row
