"""docs/dashboards.md names every key of a line of metrics, flags that exist, and the sections that wandb gets."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from megatron01.config import GPTPretrainConfig
from megatron01.config.commands import CompareConfig, WatchConfig
from megatron01.config.fields import Settings
from megatron01.monitor.metrics import Metrics
from megatron01.monitor.wandb_writer import SECTIONS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "dashboards.md").read_text()


def test_every_key_of_metrics_is_documented() -> None:
    table = TEXT.split("## What a line of metrics holds")[1].split("## ")[0]
    keys = [
        key for row in table.splitlines() if row.startswith("| `") for key in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(keys) == sorted(field.name for field in dataclasses.fields(Metrics) if field.name != "losses")


def test_every_flag_exists() -> None:
    known = {"--help", "--published"}
    for config in (CompareConfig, WatchConfig, GPTPretrainConfig):
        for setting in Settings(config).by_key.values():
            known |= {setting.flag, f"--no-{setting.flag[2:]}"}
    found = set(re.findall(r"--[a-z][a-z-]+", TEXT))
    assert "--wandb-checkpoints" in found and found <= known, found - known


def test_every_section_of_panels_is_documented() -> None:
    missing = [section for section in SECTIONS if f"`{section}`" not in TEXT]
    assert not missing
