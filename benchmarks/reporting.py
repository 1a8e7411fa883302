"""What all benchmarks share: this checkout, the machine, the memory of a process, and how results are reported."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron01.errors import UserError
from megatron01.monitor.run_directory import git_revision, hardware
from megatron01.utils.files import writing

ROOT = Path(__file__).resolve().parents[1]


def run_program(main: Callable[[], None]) -> None:
    """Run a benchmark; a UserError ends it in one line."""
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def at_least(least: int) -> Callable[[str], int]:
    """The ``type`` of an argument that is a number from ``least`` on."""

    def integer(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{number} is too few; expected {least} or more")
        return number

    return integer


def revision() -> str:
    """The commit of this checkout, marked if there are uncommitted changes; "unknown" outside of git."""
    found = git_revision(ROOT)
    return "unknown" if found is None else found["revision"][:10] + ("-dirty" if found["dirty"] else "")


def machine() -> str:
    """Cores, processor and torch version."""
    return f"{os.cpu_count()}-core {hardware()['processor']}, torch {torch.__version__}"


def torchrun(processes: int) -> list[str]:
    """The command that starts so many processes on this machine; a program and its arguments follow."""
    of_one_machine = ["--standalone", "--local-addr", "127.0.0.1"]  # its own name may resolve to nothing
    return [sys.executable, "-m", "torch.distributed.run", *of_one_machine, "--nproc-per-node", str(processes)]


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


def report(title: str, parts: Mapping[str, Callable[[], tuple[Any, str]]], output: Path | None, **known: Any) -> None:
    """Measure each part, which gives its numbers and their Markdown; print it, and write all as JSON to ``output``."""
    result: dict[str, Any] = {**known, "machine": f"{machine()}, {datetime.date.today()}"}
    if output is not None:
        with writing(output):
            output.touch()  # a path that cannot be written ends it before the work, not after
    print(f"# {title}: {result['machine']}\n", flush=True)
    busy = [busy_cores()]
    for name, measure in parts.items():
        result[name], text = measure()
        print(text, flush=True)
        busy.append(busy_cores())
    result["busy_cores"] = busy
    print(f"Cores busy with other work before, between and after the parts: {', '.join(f'{b:.1f}' for b in busy)}")
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")
