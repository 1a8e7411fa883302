from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config import DistributedConfig
from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment, initialize, process_groups
from megatron01.parallel.rendezvous import each_has_own_gpu
from megatron01.parallel.startup import gpu_index, share_of_cores


@pytest.mark.parametrize(
    ("own", "neighbours", "threads"),
    [
        ([0, 1, 2, 3], [[0, 1, 2, 3]], 4),  # one process
        ([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, 2),  # torchrun: all ranks share all cores
        ([0, 1], [[0, 1], [2, 3]], 2),  # srun: each rank is bound to its own cores
        ([0, 1], [[0, 1]] * 4, 1),  # more replicas than cores
        ([0, 1, 2], [[0, 1, 2]] * 3, 1),  # thirds of the cores add up to one
    ],
)
def test_cores_are_shared(own: list[int], neighbours: list[list[int]], threads: int) -> None:
    assert share_of_cores(own, neighbours) == threads


@given(st.lists(st.lists(st.integers(0, 31), min_size=1, unique=True), min_size=1, max_size=8))
def test_replicas_use_no_core_twice_unless_they_must(masks: list[list[int]]) -> None:
    threads = [share_of_cores(mask, masks) for mask in masks]
    assert all(1 <= count <= len(mask) for count, mask in zip(threads, masks, strict=True))
    assert sum(count for count in threads if count > 1) <= len(set().union(*masks))


@pytest.mark.parametrize(("visible", "index"), [(0, None), (1, 0), (4, 2)])
def test_a_replica_takes_its_own_gpu_whether_it_sees_one_or_all(
    visible: int, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    third = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    assert gpu_index(LaunchEnvironment.read(third)) == index


def test_gpus_that_are_missing_or_shared_are_noticed() -> None:
    assert each_has_own_gpu(["a/1", "a/2", "b/1"])
    assert not each_has_own_gpu(["a/1", ""])
    assert not each_has_own_gpu(["a/1", "a/1"])


@pytest.mark.parametrize(
    ("visible", "backend", "device", "expected"),
    [
        (1, "auto", "auto", "cuda:0"),
        (1, "gloo", "auto", "cpu"),
        (1, "gloo", "cuda", "cuda:0"),
        (1, "auto", "cpu", "cpu"),
        (0, "auto", "auto", "cpu"),
        (0, "gloo", "cpu", "cpu"),
    ],
)
def test_a_replica_computes_where_its_settings_say(
    visible: int, backend: Any, device: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with initialize(LaunchEnvironment.read({}), DistributedConfig(distributed_backend=backend, device=device)) as group:
        assert str(group.device) == expected
    assert [str(one) for one in taken] == [expected] * (expected != "cpu")


def test_a_gpu_that_is_not_there_and_nccl_on_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    group = initialize(LaunchEnvironment.read({}), DistributedConfig(distributed_backend="gloo", device="cuda"))
    with pytest.raises(UserError, match="device is cuda, but torch sees no GPU"):
        group.__enter__()
    with pytest.raises(UserError, match="device is cpu, but distributed_backend is nccl"):
        DistributedConfig(distributed_backend="nccl", device="cpu")


TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading"
    " and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.mark.parametrize(
    ("device", "reason", "words"),
    [
        ("gloo", TOO_OLD, None),  # --device auto
        (
            "auto",
            TOO_OLD,
            r"driver of \S+ is too old \(it is for CUDA 11\.4\) for torch \S+, which needs CUDA 13\.0;",
        ),
        ("cuda", TOO_OLD, "is too old"),
        ("cpu", TOO_OLD, None),
        ("auto", "Found no NVIDIA driver on your system.", None),
        ("auto", "No CUDA GPUs are available", None),
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_no_reason_to_train_on_cpus(
    device: Any, reason: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    config = DistributedConfig(distributed_backend="gloo") if device == "gloo" else DistributedConfig(device=device)
    group = initialize(LaunchEnvironment.read({}), config)
    with nullcontext() if words is None else pytest.raises(UserError, match=words), group as opened:
        assert opened.device.type == "cpu"


def test_a_group_is_destroyed_when_its_threads_had_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.6, its destructor waits for threads that want the GIL, and holds it."""
    calls: list[Any] = []
    monkeypatch.setattr(process_groups.time, "sleep", calls.append)
    monkeypatch.setattr(process_groups.dist, "destroy_process_group", lambda: calls.append("destroyed"))
    process_groups.close_default_group()
    assert calls == [process_groups.EXIT_DELAY, "destroyed"]
