"""Correctness checks and benchmarks on one GPU, in less than ten minutes.

    python -m benchmarks.gpu --output runs/gpu
    python -m benchmarks.gpu --output runs/gpu --part "gpt2 345m, compiled" --part runs   # these anew; the rest stays
    python -m benchmarks.gpu --output runs/gpu --tiny        # on any machine: that it works, no figures

Every part has its own process, time limit and record, so that a part that crashes, hangs or runs out of memory does not
affect the others. Two models are compiled side by side; while one is timed, the other is stopped. Writes gpu.md and
gpu.json into the folder after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from reporting import ROOT, revision

from megatron01.utils.files import write_atomically

from .page import page
from .parts import PARTS, Part
from .report import locked, send_to_parts

_TINY_PATIENCE = 5  # factor on the time limit of a part, for machines of any speed
_GRACE_SECONDS = 10.0
_ALL_RIGHT = ("done", "not begun", "cut off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu.md and gpu.json")
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="only this; repeatable")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts together (default: 9.5)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU too: whether everything works")
    arguments = parser.parse_args()
    if arguments.minutes <= 0:
        parser.error(f"--minutes is {arguments.minutes:g}; expected a positive number")
    if not arguments.tiny and not _sees_gpu():
        raise SystemExit("error: torch sees no GPU here; give --tiny to see whether everything works without")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"error: --output {arguments.output}: {error.strerror}") from None
    result = _earlier(arguments.output / "gpu.json", arguments.tiny) if arguments.part else {}
    result |= {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "commit": revision()}
    result |= {"tiny": arguments.tiny, "command": ["python", "-m", "benchmarks.gpu", *sys.argv[1:]]}
    records = result.setdefault("parts", {})
    end = time.monotonic() + 60 * arguments.minutes
    chosen = [part for part in PARTS if not arguments.part or part.name in arguments.part]
    stopped, changed, free = threading.Event(), threading.Condition(), 1.0

    def perform(part: Part) -> None:
        nonlocal free
        try:
            record = run(part, end - time.monotonic(), tiny=arguments.tiny, stopped=stopped, running=Path(running))
        finally:
            with changed:
                free += part.share
                changed.notify()
        with changed:
            records[part.name] = record | {"commit": result["commit"]}
            print(f"{part.name}: {record['status']} ({record['seconds']:.0f} s)", flush=True)
            result["parts"] = {known.name: records[known.name] for known in PARTS if known.name in records}
            write_atomically(arguments.output / "gpu.json", json.dumps(result, indent=1) + "\n")
            write_atomically(arguments.output / "gpu.md", page(result))

    with (
        tempfile.TemporaryDirectory(prefix="gpu-parts-") as running,
        ThreadPoolExecutor(len(chosen)) as pool,
        contextlib.ExitStack() as leaving,
    ):
        leaving.callback(stopped.set)  # left by Ctrl-C, it stops the parts before it waits for them
        tasks = []
        for part in chosen:
            with changed:
                while free < part.share - 0.01:
                    changed.wait()
                free -= part.share
            tasks.append(pool.submit(perform, part))
        for task in tasks:
            task.result()
    print(f"see {arguments.output / 'gpu.md'}")
    if any(not records[part.name]["status"].startswith(_ALL_RIGHT) for part in chosen):
        raise SystemExit(1)


def run(part: Part, left: float, *, tiny: bool, stopped: threading.Event, running: Path) -> dict[str, Any]:
    """Run a part; returns its ``status`` in words, its ``seconds`` and its ``findings`` so far.

    Args:
        left: seconds left for all parts.
        stopped: ends the part when it is set.
        running: folder with a file for each running part, named by its process.
    """
    if left <= 0:
        return {"status": "not begun: the time for all parts was over", "seconds": 0.0, "findings": {}}
    own = part.seconds * (_TINY_PATIENCE if tiny else 1)
    with tempfile.TemporaryDirectory(prefix="gpu-part-") as folder:
        record, output = Path(folder, "record.json"), Path(folder, "output")
        what = [part.module, part.function, json.dumps(part.arguments), str(record)]
        command = [sys.executable, "-m", "benchmarks.gpu.parts", *what, *(["--tiny"] if tiny else [])]
        command += ["--share", str(part.share), "--running", str(running)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with output.open("w") as file:
            with locked(running):  # not while another part is timed
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
                own_file = running / str(process.pid)
                own_file.touch()
            start = time.monotonic()
            try:
                while process.poll() is None and time.monotonic() < start + min(own, left) and not stopped.wait(0.1):
                    pass
                if process.returncode is not None:
                    status = _status(process.returncode)
                elif stopped.is_set():
                    status = "stopped"
                elif left < own:
                    status = f"cut off after {left:.0f} s: the time for all parts was over"
                else:
                    status = f"ran out of its time of {own:.0f} s"
            finally:
                own_file.unlink(missing_ok=True)
                is_over = process.returncode == 0
                _end(process)
                if not is_over:  # while it was measuring, perhaps
                    send_to_parts(running, signal.SIGCONT)
        findings = json.loads(record.read_text()) if record.exists() else {}
        said = output.read_text(errors="replace")[-4000:]
    of_cases = [finding for finding in findings.values() if isinstance(finding, dict)]
    failed = sum("failed" in finding for finding in of_cases)
    wrong = sum(finding.get("agrees") is False for finding in of_cases)
    if status == "done" and (failed or wrong):
        status = ", ".join(f"{n} {what}" for n, what in ((failed, "failed"), (wrong, "not as it should be")) if n)
    found = {"status": status, "seconds": time.monotonic() - start, "findings": findings}
    return found if status == "done" else found | {"output": said}


def _status(code: int) -> str:
    if code == 0:
        return "done"
    return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"failed with status {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process of a part and its children; a launcher among them first gets the time to end its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGCONT)  # another part may have stopped it
        patience = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < patience:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _earlier(path: Path, tiny: bool) -> dict[str, Any]:
    """Result of an earlier run, if it was of the same kind (``tiny`` or not)."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found.get("tiny") == tiny else {}


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
