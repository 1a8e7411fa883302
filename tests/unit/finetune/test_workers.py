"""Worker processes that execute runs: their results, and how they fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch

from megatron01.config.commands import GlueConfig
from megatron01.errors import FaultError, UserError
from megatron01.finetune.results import Result, Run
from megatron01.finetune.sweep import devices_for, measure, run_in_processes
from tests.tiers import slow_after

RUNS = [Run("RTE", 8, 1e-5, seed) for seed in range(4)]
CPU = torch.device("cpu")


class Bench:
    """Returns the seed, or fails at seed 2."""

    def __init__(self, how: str, device: torch.device = CPU) -> None:
        self._how, self._device = how, device

    def measure(self, run: Run, progress: Callable[[Run, int, int], None]) -> Result:
        progress(run, 1, 2)
        if run.seed == 2:
            if self._how == "user":
                raise UserError("no such thing")
            if self._how == "memory":
                raise torch.OutOfMemoryError("2 GiB")
            if self._how == "bug":
                raise KeyError("lost")
            if self._how == "death":
                os._exit(9)
        metrics = {"accuracy": float(run.seed), "threads": torch.get_num_threads(), "device": self._device.index or 0}
        return Result(run, "d", metrics, 1, 0.0, False, 0.0)


def open_bench(how: str, device: torch.device) -> Bench:
    assert device.type == "cpu"
    return Bench(how, device)


def do(how: str, *, jobs: int, runs: Sequence[Run] = RUNS, num_devices: int = 1) -> list[Result]:
    found: list[Result] = []
    devices = [torch.device("cpu", index) for index in range(num_devices)]
    run_in_processes(open_bench, how, runs, found.append, lambda *step: None, devices=devices, jobs=jobs)
    return found


def test_all_runs_are_done_and_share_the_cores():
    found = do("well", jobs=2)
    assert sorted(result.run.seed for result in found) == [0, 1, 2, 3]
    assert all(result.metrics["accuracy"] == result.run.seed for result in found)
    cores = len(os.sched_getaffinity(0))
    assert {result.metrics["threads"] for result in found} == {max(1, cores // 2)}


def test_few_runs_take_all_devices():
    assert {result.metrics["device"] for result in do("well", jobs=2, runs=RUNS[:2], num_devices=2)} == {0, 1}


@pytest.mark.parametrize(
    ("how", "error", "message"),
    slow_after(
        1,
        [
            ("death", FaultError, "a process of the sweep ended with status 9"),
            ("bug", RuntimeError, "KeyError: 'lost'"),
            ("user", UserError, "^no such thing$"),
        ],
    ),
)
def test_what_fails_in_a_process_is_reported(how, error, message):
    with pytest.raises(error, match=message):
        do(how, jobs=1)


def test_in_this_process():
    bench = Bench("memory")
    steps: list[tuple[Run, int, int]] = []
    assert measure(bench, RUNS[0], lambda *step: steps.append(step)).run == RUNS[0]
    assert steps == [(RUNS[0], 1, 2)]
    with pytest.raises(UserError, match=r"RTE batch 8 lr 1e-05 seed 2 needs more memory than the GPU has"):
        measure(bench, RUNS[2], lambda *step: None)


def config(device: Literal["auto", "cpu", "cuda"], precision: Literal["fp32", "bf16"] = "fp32") -> GlueConfig:
    return GlueConfig(load="model", input="GLUE", output=Path("sweep"), device=device, precision=precision)


def test_devices():
    assert devices_for(config("cpu", "bf16")) == [CPU]
    if not torch.cuda.is_available():
        assert devices_for(config("auto")) == [CPU]
        with pytest.raises(UserError, match="device is cuda, but torch sees no GPU"):
            devices_for(config("cuda"))


def test_gpus_without_the_precision_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert devices_for(config("auto")) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(UserError, match=r"precision is bf16, .* Tesla V100 .* give --precision fp32"):
        devices_for(config("auto", "bf16"))
