"""A run without what Linux alone has. What else macOS lacks, types tell (`mypy --platform darwin`, in `make lint`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatron01.checkpoint.manifest import read_tracker
from megatron01.doctor.diagnosis import examine
from megatron01.parallel import LaunchEnvironment
from megatron01.pretraining import GPT
from megatron01.training import pretrain
from megatron01.utils import system
from tests.distributed.harness import run_ranks
from tests.integration.tiny import gpt_config


def refuse_system_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(arguments[0])


def trained_as_on_macos(rank: int, world_size: int, config: Any, folder: str) -> tuple[int, list[int], float]:
    sys.addaudithook(refuse_system_files)
    in_kib = system.peak_resident_bytes()
    del os.sched_getaffinity  # this process is this test's own
    with patch.object(system, "sys", SimpleNamespace(platform="darwin")):
        in_bytes = system.peak_resident_bytes()
        examined = examine(LaunchEnvironment.read({}), Path(folder))
        pretrain(config, GPT.build_datasets, GPT.build_model, GPT.forward_step)
        return examined.cores, system.usable_cores(), in_kib / in_bytes


def test_a_run_needs_nothing_that_linux_alone_has(corpus: Path, tmp_path: Path) -> None:
    config = gpt_config(corpus, save=str(tmp_path / "saved"), run_dir=str(tmp_path / "run"))
    for examined, usable, ratio in run_ranks(trained_as_on_macos, 2, config, str(tmp_path), default_group=False):
        assert usable == list(range(os.cpu_count() or 0)) and examined == len(usable)
        assert 1000 < ratio < 1050  # Linux counts in KiB, macOS in bytes
    assert read_tracker(tmp_path / "saved") == config.training.train_iters
