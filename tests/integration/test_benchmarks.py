"""Every part of the benchmarks runs at tiny sizes and reports all that it measures; no result is judged here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron01.errors import UserError
from tests.programs import ROOT, run_python

pytestmark = pytest.mark.slow


def numbers(value: Any) -> list[float]:
    """All numbers in a structure of lists and dicts."""
    if isinstance(value, dict | list):
        return [n for inner in (value.values() if isinstance(value, dict) else value) for n in numbers(inner)]
    return [value] if isinstance(value, int | float) else []


def measured(folder: Path, benchmark: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a benchmark prints, and what it writes as JSON."""
    output = folder / "result.json"
    printed = run_python(ROOT / "benchmarks" / benchmark, *arguments, "--json", output)
    result = json.loads(output.read_text())
    assert all(math.isfinite(number) for number in numbers(result))
    return printed, result


STEP = ("step.py", "--size", "tiny", "--steps", "2")


def test_steps_of_bert(tmp_path: Path) -> None:
    _, result = measured(tmp_path, *STEP, "--model", "bert", "--section", "phases")
    assert set(result["phases"]["kinds"]) == {"adam", "full", "one_bit", "local"}


def test_every_kind_of_step_and_every_buffer(tmp_path: Path) -> None:
    stdout, result = measured(tmp_path, *STEP, "--model", "gpt2")
    kinds = result["phases"]["kinds"]
    parameters = result["phases"]["parameters"]
    assert set(kinds) == {"adam", "full", "one_bit", "local"}
    assert [kinds[kind]["steps"] for kind in ("full", "one_bit", "local")] == [4, 4, 4]  # two on each of two replicas
    assert kinds["local"]["bytes_sent"] == 0 == kinds["local"]["seconds"]["communication"]
    assert kinds["adam"]["bytes_sent"] == pytest.approx(4 * parameters, rel=0.02)
    assert 0 < kinds["one_bit"]["bytes_sent"] < kinds["full"]["bytes_sent"] / 20
    for entry in kinds.values():
        assert sum(entry["seconds"].values()) > 0 and entry["step_seconds"] > 0

    assert [(entry["precision"], entry["threads"]) for entry in result["arithmetic"]] == [
        ("fp32", 1),
        ("fp32", 2),
        ("bf16", 1),
        ("bf16", 2),
    ]
    assert {name: set(kinds) for name, kinds in result["optimizers"].items()} == {
        "zero_one_adam": {"full", "local", "one_bit"},
        "zero_one_adam, gradients not quantized": {"full", "local", "one_bit"},
        "one_bit_adam": {"full", "one_bit"},
        "quantized_adam": {"full"},
        "bin_sgdm": {"one_bit"},
        "soft_sign_sgd": {"full"},
        "sgdm": {"full"},
    }
    sent = {title: kinds["full"]["bytes_sent"] for title, kinds in result["optimizers"].items() if "full" in kinds}
    assert sent["zero_one_adam"] < sent["zero_one_adam, gradients not quantized"] / 6
    assert set(result["arithmetic"][0]["adamw_seconds"]) == {"alone", "clip"}
    assert set(result["arithmetic"][2]["adamw_seconds"]) == {"alone", "clip", "cast"}

    memory = result["memory"]
    buffers = memory["buffers"]
    assert memory["parameters"] == parameters
    assert all(buffers[name] == 4 * memory["padded_parameters"] for name in ("x", "v", "m", "u", "worker_error"))
    assert buffers["server_error"] == pytest.approx(2 * memory["padded_parameters"], abs=4 * 1024)
    for section in ("Phases of a step", "Optimizer arithmetic", "Steps of every optimizer", "Memory"):
        assert section in stdout


def test_both_kinds_of_saves(tmp_path: Path) -> None:
    _, measurements = measured(tmp_path, "checkpoint.py", "--size", "tiny", "--rounds", "2", "--folder", str(tmp_path))
    result = measurements["saves"]
    assert result["replicas"] == 2 and result["megabytes"] > 0 and result["parameters"] > 0
    for kind in ("waiting", "meanwhile"):
        assert result[kind]["stall"] > 0 and result[kind]["step_seconds"] > 0
    assert result["waiting"]["slowdown"] == 1 and result["waiting"]["writing"] == result["waiting"]["stall"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]  # what was written is gone


def test_a_folder_for_saves_that_is_not_there_is_named(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["checkpoint.py", "--folder", "/nowhere"])
    with pytest.raises(SystemExit):
        benchmarks("checkpoint").main()
    assert capsys.readouterr().err.endswith("error: --folder /nowhere is not a folder\n")


@pytest.mark.parametrize(
    ("program", "flag", "value", "least"),
    [
        ("step", "--steps", 0, 1),
        ("compress", "--elements", 2047, 2048),
        ("data", "--workers", 0, 1),
        ("checkpoint", "--rounds", 1, 2),
        ("scaling", "--replicas", 1, 2),
        ("convergence", "--replicas", 0, 1),
        ("elastic_resume", "--steps", 1, 2),
        ("slow_network", "--evaluations", 0, 1),
    ],
)
def test_too_few_are_named(
    benchmarks: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    flag: str,
    value: int,
    least: int,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{program}.py", flag, str(value)])
    with pytest.raises(SystemExit):
        benchmarks(program).main()
    expected = f"error: argument {flag}: {value} is too few; expected {least} or more\n"
    assert capsys.readouterr().err.endswith(expected)


def test_a_report_that_cannot_be_written_is_named_before_the_work(benchmarks: Any, tmp_path: Path) -> None:
    def work() -> tuple[Any, str]:
        raise AssertionError("begun")

    with pytest.raises(UserError, match=r"missing/result\.json cannot be written"):
        benchmarks("reporting").report("Title", {"work": work}, tmp_path / "missing" / "result.json")


def test_an_endurance_run_that_ends_too_soon_to_be_sampled_is_named(benchmarks: Any, tmp_path: Path) -> None:
    lines = [{"step": 480, "rank": rank, "memory": 100.0, "files": 30, "threads": 9} for rank in (0, 1)]
    with pytest.raises(SystemExit, match="no sample of each rank in tenth 3 of 500 steps; give more --steps"):
        benchmarks("endurance").report(lines, 500, tmp_path / "endurance")


def test_every_phase_of_compression_and_the_exchange(tmp_path: Path) -> None:
    elements = 200_000
    sizes = ["--elements", "65536", "--exchange-elements", str(elements), "--rounds", "2"]
    printed, result = measured(tmp_path, "compress.py", *sizes)
    phases = result["codec"]["phases"]
    names = {(entry["quantizer"], entry["phase"]) for entry in phases}
    assert names == {
        (quantizer, phase)
        for quantizer in ("sign", "random", "4bit", "8bit")
        for phase in ("compress", "reduce", "decode")
    }
    assert {entry["threads"] for entry in phases} == {1, os.cpu_count()}
    assert all(entry["ratio"] > 0 for entry in phases)

    (exchange,) = result["exchange"]
    ours, rivals = exchange["exchange"], exchange["rivals"]
    assert 0 < ours["seconds"] <= ours["seconds_decoded"]
    assert ours["bytes_sent"] == pytest.approx(elements * (1 / 8 + 2 / 1024), rel=0.02)
    assert set(rivals) == {"all_reduce", "adam"}
    assert rivals["adam"]["bytes_sent"] == 4 * elements
    assert 0 < rivals["all_reduce"]["seconds"] < rivals["adam"]["seconds"]
    for section in ("## Codec", "## Exchange"):
        assert section in printed


def test_every_stage_of_data(tmp_path: Path) -> None:
    sizes = ["--megabytes", "0.2", "--rounds", "1", "--documents", "2e3", "--seconds", "0.05", "--workers", "1"]
    printed, result = measured(tmp_path, "data.py", *sizes)
    for heading in ("## Preprocessing", "## Indices of 2000 documents", "## Samples"):
        assert heading in printed
    assert all(rate["megabytes"] > 0 for rate in result["preprocessing"])
    indices = {rate["name"]: rate for rate in result["indices"]}
    assert indices["GPT-2, three epochs"]["num_samples"] > 2.5 * indices["GPT-2, one epoch"]["num_samples"]
    assert all(rate["seconds"] > 0 and rate["megabytes"] > 0 for rate in indices.values())
    rates = {(rate["samples"], rate["workers"]): rate["per_second"] for rate in result["samples"]}
    assert len(rates) == 4 * 3 and all(rate > 0 for rate in rates.values())


def test_each_resize_is_compared_with_the_run_of_its_seed(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs of elastic_resume.py are formulas here."""
    benchmark = benchmarks("elastic_resume")
    starts: list[tuple[int, int, tuple[str, ...]]] = []

    def train(arguments: Any, seed: int, replicas: int, folder: Path, *more: str) -> float:
        starts.append((seed, replicas, more))
        return 7.0 + seed + (0.01 * (seed + 1) if more else 0.0)

    monkeypatch.setattr(benchmark, "train", train)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["elastic_resume.py", "--seeds", "0", "1", "--steps", "40", "--resumed", "8"])
    benchmark.main()
    assert [(seed, replicas) for seed, replicas, _ in starts] == [(0, 4), (0, 8), (1, 4), (1, 8)]
    assert starts[1][2][0] == "--load" and starts[1][2][1].endswith("whole/iter_0000020")
    printed = capsys.readouterr().out
    assert "over the seeds: 0.7071" in printed
    assert "| 4, then 8 | 7.5150 | +0.0150 | +0.0200 |" in printed
