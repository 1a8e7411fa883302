"""Training time over restarts and roll-backs, and the peak FLOP/s of hardware."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from megatron01.config import GPTPretrainConfig, LoggingConfig
from megatron01.cost.cluster import peak_flops, peak_of
from megatron01.monitor.metrics import Metrics, TrainingClock
from megatron01.monitor.run_directory import Heartbeat, LastHeartbeat, read_heartbeat
from megatron01.monitor.writers import open_recorder, peak_memory
from megatron01.parallel import LaunchEnvironment


def metrics(iteration: int, seconds: float | None) -> Metrics:
    return Metrics(iteration=iteration, consumed_samples=0, step_seconds=seconds)


def test_steps_done_again_take_time_again() -> None:
    clock = TrainingClock()
    clock.add(metrics(10, 2.0))
    clock.add(metrics(20, 1.0))
    clock.restart_after(10)
    clock.add(metrics(20, 1.0))
    clock.add(metrics(21, None))
    assert clock.seconds == 40


def test_undone_steps_count_also_without_a_line_of_their_own() -> None:
    clock = TrainingClock()
    clock.add(metrics(10, 2.0))
    assert [clock.step_done(1.5), clock.step_done(4.0)] == [21.5, 24.0]
    clock.restart_after(10)
    assert clock.step_done(1.0) == 25.0
    clock.add(metrics(20, 1.0))
    assert clock.seconds == 34
    clock.step_done(5.0)
    clock.add(metrics(25, 1.0))  # the line has the time of all steps so far
    clock.restart_after(20)
    assert clock.seconds == 39


def test_a_resumed_clock_knows_what_was_spent_also_on_lost_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert TrainingClock.after(path, 10).seconds == 0
    path.write_text(
        '{"training_seconds": 5.0}\nnonsense\n[]\n{"training_seconds": 1%s}\n{"training_seconds": 9.0}\n{"training_sec'
        % ("0" * 400)
    )
    assert TrainingClock.after(path, 0).seconds == 0  # a new run
    clock = TrainingClock.after(path, 10)
    clock.add(metrics(12, 1.0))
    assert clock.seconds == 11
    last = LastHeartbeat(9, 0.0, False, 9.5)  # half a second after the last line
    assert TrainingClock.after(path, 8, last).seconds == 9.5 and TrainingClock.after(path, 0, last).seconds == 0


@pytest.mark.parametrize("is_killed", [False, True])
def test_steps_after_the_last_line_of_an_attempt_take_time(tmp_path: Path, is_killed: bool) -> None:
    config = GPTPretrainConfig(logging=LoggingConfig(run_dir=str(tmp_path)))
    first = open_recorder(config, LaunchEnvironment.read({}))
    first.write(metrics(10, 2.0))
    for iteration in (11, 12):
        first.step_done(iteration, 2.0 * (iteration - 10))
    if not is_killed:
        first.close()
    with open_recorder(config, LaunchEnvironment.read({}), resumed_iteration=12) as second:
        second.write(metrics(20, 1.0))  # the mean of its own 8 steps
    assert [json.loads(line)["training_seconds"] for line in (tmp_path / "metrics.jsonl").open()] == [20, 32]


def test_peaks_of_hardware() -> None:
    assert peak_of("NVIDIA A100-SXM4-80GB", "bf16") == 312e12 and peak_of("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_of("NVIDIA A10G", "fp16") == 70e12 and peak_of("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_of("NVIDIA A100-SXM4-80GB", "fp32", tf32=True) == 156e12
    assert peak_of("Tesla V100-SXM2-32GB", "fp32", tf32=True) == 15.7e12  # has no TF32
    assert peak_of("NVIDIA GH200 480GB", "bf16") == 989e12
    assert peak_of("NVIDIA L40", "bf16") == 181e12  # no L4
    assert peak_of("NVIDIA RTX A6000", "bf16") == 154.8e12
    assert peak_of("NVIDIA RTX 6000 Ada Generation", "bf16") == 364.2e12
    for other in ("abacus", "NVIDIA L40G", "NVIDIA RTX A1000", "NVIDIA T400 4GB"):  # no L4, L40, A100 or T4
        assert peak_of(other, "bf16") is None
    cpu = torch.device("cpu")
    assert peak_flops(cpu, "bf16", 8, None) is None and peak_flops(cpu, "bf16", 8, 2.5) == 20e12
    assert peak_memory() > 1e6


def test_a_heartbeat_that_cannot_be_closed_ends_no_run(tmp_path: Path) -> None:
    """As on a file server that is gone, where close fails, too."""
    heartbeat = Heartbeat(tmp_path / "last_step.json", resumed_iteration=0)
    assert heartbeat._descriptor is not None
    os.close(heartbeat._descriptor)
    heartbeat.step_done(1)
    heartbeat.close()


def test_a_heartbeat_tells_whether_an_attempt_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "last_step.json"
    assert read_heartbeat(path) is None
    heartbeat = Heartbeat(path, resumed_iteration=0)
    heartbeat.step_done(3)
    last = read_heartbeat(path)
    assert last is not None and (last.iteration, last.has_ended) == (3, False)
    heartbeat.close()
    heartbeat.close()
    last = read_heartbeat(path)
    assert last is not None and (last.iteration, last.has_ended) == (3, True)
    restart = Heartbeat(path, resumed_iteration=2).step_done(3)
    assert restart is not None and restart.lost_steps == 1  # the next attempt reads it nevertheless
    last = read_heartbeat(path)  # shorter than what it replaces
    assert last is not None and (last.iteration, last.has_ended) == (3, False)


@pytest.mark.parametrize("content", ["", "[]", '{"iteration": 1}', '{"iteration": "x", "time": 1}', "{}"])
def test_a_heartbeat_that_makes_no_sense(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").write_text(content)
    assert read_heartbeat(tmp_path / "file") is None
