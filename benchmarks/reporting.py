"""What benchmarks read of the machine and its processes, and the tables that they print."""

from __future__ import annotations

import datetime
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def machine() -> str:
    """Processor, torch version and date as text."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].partition(":")[2].strip() if models else os.uname().machine
    return f"{os.cpu_count()}-core {processor}, torch {torch.__version__}, {datetime.date.today()}"


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that other programs keep busy while this one sleeps."""

    def used() -> float:
        user, nice, system, _, _, interrupt, soft_interrupt = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
        )
        return (user + nice + system + interrupt + soft_interrupt) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds


def resident(field: str) -> int:
    """Bytes of resident memory of this process: VmRSS is the present value, VmHWM the peak."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def reset_peak() -> None:
    """Set the peak of resident memory to its present value."""
    Path("/proc/self/clear_refs").write_text("5")


def report(title: str, parts: dict[str, Callable[[], tuple[Any, str]]], output: Path | None, **known: Any) -> None:
    """Measure each part, which gives its numbers and their Markdown; print it, and write all as JSON to ``output``."""
    result: dict[str, Any] = {**known, "machine": machine()}
    print(f"# {title}{result['machine']}\n", flush=True)
    busy = [busy_cores()]
    for name, measure in parts.items():
        result[name], text = measure()
        print(text, flush=True)
        busy.append(busy_cores())
    result["busy_cores"] = busy
    print(f"Cores busy with other work before, between and after the parts: {', '.join(f'{b:.1f}' for b in busy)}")
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Markdown table, first column left-aligned and all others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
