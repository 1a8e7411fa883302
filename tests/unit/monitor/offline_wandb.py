"""Offline runs of the wandb library, and their contents: protocol buffers in a log in LevelDB's format."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_BLOCK = 32768
_FILE_HEADER = 7
_RECORD_HEADER = 7
_WHOLE, _LAST = 1, 4


def set_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the wandb settings of whoever runs the tests; nothing is printed or reported."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def records(run_folder: Path) -> list[Any]:
    """All records of an offline run's folder, in order."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run_folder.glob("run-*.wandb")
    found = []
    for content in _contents(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        found.append(record)
    return found


def _contents(data: bytes) -> Iterator[bytes]:
    place, parts = _FILE_HEADER, b""
    while place < len(data):
        left = _BLOCK - place % _BLOCK
        if left < _RECORD_HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _RECORD_HEADER])
        place += _RECORD_HEADER + length
        parts += data[place - length : place]
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""


def history(found: list[Any]) -> list[dict[str, Any]]:
    """The logged values, one entry per call."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]


def axes(found: list[Any]) -> dict[str, str]:
    """Name or pattern of a metric -> the metric on its x axis."""
    metrics = [record.metric for record in found if record.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: metric.step_metric for metric in metrics}
