from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron01.optim import LRSchedule
from megatron01.optim.policies import StepPlan
from megatron01.optim.safety import NormWatch, ReplicaCheck, SameDataWatch, TrafficWatch, _checksum, is_averaged


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_of_state_needs_no_copy_of_it(dtype: torch.dtype) -> None:
    state = torch.ones(1 << 24, dtype=dtype)
    _checksum(state[:1024])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    found = _checksum(state)
    assert resident("VmHWM") - before < state.nbytes / 4
    state[12345] = 1.0 + torch.finfo(dtype).eps
    assert _checksum(state) != found


def test_gradients_that_are_the_same_now_and_then_are_no_same_data(caplog: pytest.LogCaptureFixture) -> None:
    watch = SameDataWatch(1e-6, logs=True)
    for norm in (1.0, 1.0, 0.9, 1.0, 1.0):
        watch.record(norm, 1.0)
    assert not caplog.messages
    watch.record(1.0, 1.0)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("is_own", "lowest", "warns"), [(True, 1.0, True), (True, 0.99, False), (False, 1.0, False)])
def test_only_own_gradients_of_one_norm_seem_clipped(
    is_own: bool, lowest: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The mean's norm is one that a replica may well have clipped to."""
    watch = NormWatch(2)
    for norm in (lowest, *[1.0] * 7):
        watch.record(norm, is_own=is_own)
    assert len(caplog.messages) == warns


@pytest.mark.parametrize("share", [1.005, 1.02])
def test_traffic_is_compared_at_ever_longer_intervals_and_at_the_end(
    share: float, caplog: pytest.LogCaptureFixture
) -> None:
    watch = TrafficWatch(1e6, LRSchedule(peak_lr=1.0, total_steps=1500), 1.0, logs=True)
    found = []
    for step in range(1500):
        caplog.clear()
        watch.add(step, int(share * 1e6))
        found += [step + 1] if caplog.messages else []
    assert found == ([100, 1000, 1500] if share > 1.01 else [])


@pytest.mark.parametrize(
    ("padded", "reason"), [(1.0, "full steps are too frequent"), (2.0, "fill 50% of their blocks")]
)
def test_the_reason_for_much_traffic_is_named(padded: float, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    TrafficWatch(1.0, LRSchedule(peak_lr=1.0, total_steps=1), padded, logs=True).add(0, 2)
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("averages", "interval", "expected"), [(True, 1, [0, *range(8, 400, 8)]), (False, 3, [2, 128, 257, 386])]
)
def test_replicas_are_compared_now_and_then_whatever_the_interval(
    averages: bool, interval: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every 8th full step, and the first synchronization in 128 steps."""
    sent = []
    monkeypatch.setattr(ReplicaCheck, "_send", lambda self, step, *rest: sent.append(step))
    topology: Any = SimpleNamespace(world=SimpleNamespace(size=2))
    check = ReplicaCheck(topology, None)  # type: ignore[arg-type]
    for step in range(400):
        plan = StepPlan(averages, synchronizes=(step + 1) % interval == 0, interval=interval)
        check.after(step, plan, (), (), was_full=averages and step > 0)
    assert sent == expected


class OverRanks(DistributedDataParallel):
    """As if over the ranks 0 and 1."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self.process_group = module, None


def test_a_model_may_be_averaged_over_processes_of_which_one_alone_is_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [0, 1])
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    found = [is_averaged([OverRanks(model)], model.parameters(), ranks) for ranks in (None, [0, 1, 2], [0, 2])]
    assert found == [True, True, False]
    assert not is_averaged([OverRanks(other)], model.parameters(), None)
