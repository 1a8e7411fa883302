"""python -m benchmarks.gpu: outcomes of parts, saved results, and the page; tests/integration runs the parts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import PARTS, Part

ROOT = Path(__file__).resolve().parents[3]


def run(part: Part, left: float, *, tiny: bool, stopped: threading.Event | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as running:
        return program.run(part, left, tiny=tiny, stopped=stopped or threading.Event(), running=Path(running))


def part(function: str, seconds: float = 100.0, **arguments: Any) -> Part:
    return Part(function, seconds, "tests.unit.benchmarks.gpu_parts", function, arguments)


@pytest.mark.slow
def test_what_a_part_found_is_kept_however_it_ends() -> None:
    record = run(part("good", number=3), 100.0, tiny=True)
    assert record["status"] == "done" and record["findings"] == {"number": {"value": 3}} and "output" not in record
    record = run(part("crashing"), 100.0, tiny=True)
    assert record["status"] == "ended by signal SIGSEGV" and record["findings"] == {"number": {"value": 1}}


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_and_one_that_fails_goes_on() -> None:
    for seconds, left, status in (
        (4.0, 100.0, "ran out of its time of 20 s"),  # five times that at tiny sizes
        (100.0, 20.0, "cut off after 20 s: the time for all parts was over"),
    ):
        record = run(part("hanging", seconds), left, tiny=True)
        assert record["status"] == status and record["findings"] == {"number": {"value": 1}}
        assert record["output"] == "waiting\n"
    record = run(part("failing"), 100.0, tiny=True)
    assert record["status"] == "1 failed, 1 not as it should be"
    assert record["findings"]["memory"] == {"failed": "out of memory: tried to allocate much"}
    assert record["findings"]["number"]["value"] == 1


def test_a_part_ends_when_it_is_stopped() -> None:
    stopped = threading.Event()
    threading.Timer(0.3, stopped.set).start()
    assert run(part("hanging", 1000.0), 1000.0, tiny=True, stopped=stopped)["status"] == "stopped"


def test_a_part_for_which_no_time_is_left_is_not_begun() -> None:
    record = run(part("crashing"), -1.0, tiny=True)
    assert record["status"].startswith("not begun") and record["findings"] == {}


def test_the_page_says_how_each_part_ended() -> None:
    ended = {"status": "ran out of its time of 60 s", "seconds": 60.0, "findings": {}, "output": "the last line\n"}
    ours = {
        "shape": [8, 1024],
        "tokens_per_second": 123456.0,
        "mfu": 0.456,
        "peak_memory": 20e9,
        "planned_memory": 22e9,
        "warm_up_seconds": 3.0,
    }
    theirs = {"failed": "out of memory: 141 GB"}
    whole = {"status": "1 failed", "seconds": 50.0, "findings": {"ours": ours, "hugging face": theirs}}
    wrong = {"codec, sign, 3 elements": {"agrees": False, "differing": {"reduce": 7}}}
    specification = {"status": "1 not as it should be", "seconds": 1.0, "findings": wrong}
    text = page(
        {
            "tiny": False,
            "commit": "abc",
            "date": "2026-01-01",
            "command": ["python", "-m", "benchmarks.gpu"],
            "parts": {
                name: record | {"commit": "def with changes"}
                for name, record in (("step", ended), ("gpt2 345m", whole), ("specification", specification))
            },
        }
    )
    assert "| step | ran out of its time of 60 s | 60 | def with changes |" in text and "the last line" in text
    assert "| gpt2 345m | ours | 8 x 1024 | 123,456 | 45.6% | 20 | 22 | 1.10 | 3 |" in text
    assert "* gpt2 345m, hugging face: out of memory: 141 GB" in text
    assert "| codec, sign, 3 elements | **NO** | {'differing': {'reduce': 7}} |" in text
    assert "commit abc, 2026-01-01" in text and "Tiny" not in text


def test_names_of_parts_are_their_own() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.slow
def test_while_a_part_measures_the_other_stands_still(tmp_path: Path) -> None:
    records, running = {}, tmp_path / "running"
    running.mkdir()

    def perform(name: str) -> None:
        one = part(name, folder=str(tmp_path))
        records[name] = program.run(one, 100.0, tiny=True, stopped=threading.Event(), running=running)

    threads = [threading.Thread(target=perform, args=(name,)) for name in ("counting", "measuring", "dying")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert records["counting"]["status"] == records["measuring"]["status"] == "done"
    counted = records["measuring"]["findings"]["counted"]
    assert counted["during"] == 0 < counted["before"]
    # it goes on, also after a part that died while it measured
    assert records["dying"]["status"] == "ended by signal SIGKILL"
    assert records["counting"]["findings"]["total"]["value"] > counted["before"]


def test_parts_run_in_their_order_and_fill_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spans: dict[str, list[float]] = {}

    def run(part: Part, *_: Any, **__: Any) -> dict[str, Any]:
        spans[part.name] = [time.monotonic()]
        time.sleep(0.3)
        spans[part.name].append(time.monotonic())
        return {"status": "done", "seconds": 0.3, "findings": {}}

    shares = {"a": 0.5, "b": 0.25, "c": 0.25, "d": 1.0, "e": 0.5, "f": 0.5}
    parts = tuple(Part(name, 9.0, "", "", {}, share) for name, share in shares.items())
    monkeypatch.setattr(program, "PARTS", parts)
    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path), "--tiny"])
    program.main()

    def overlap(one: str, other: str) -> bool:
        return max(spans[one][0], spans[other][0]) < min(spans[one][1], spans[other][1])

    assert overlap("a", "b") and overlap("b", "c") and overlap("e", "f")
    assert not any(overlap("d", other) for other in shares if other != "d")
    assert spans["c"][1] <= spans["d"][0] and spans["d"][1] <= spans["e"][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path / "out")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and not (tmp_path / "out").exists()
    assert ended.stderr == "error: torch sees no GPU here; give --tiny to see whether everything works without\n"
