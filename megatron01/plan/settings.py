"""Settings of ``megatron01 schedule`` and ``megatron01 plan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.fields import Bounded, Bounds
from megatron01.cost.cluster import ClusterConfig


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Bounded):
    """What is planned for, and how it is shown."""

    replicas: Annotated[int, Bounds(lambda value: 2 <= value <= 10**6, "2 to 1000000: one alone sends nothing")] = 8
    """Replicas among which the work is shared."""
    json: bool = False
    """Print JSON in place of text."""
    csv: Path | None = None
    """Write every step to this file."""


@dataclass(frozen=True, kw_only=True)
class GPTScheduleConfig(GPTPretrainConfig):
    """The schedule of a GPT-2 run."""

    plan: PlanConfig = field(default_factory=PlanConfig)


@dataclass(frozen=True, kw_only=True)
class BertScheduleConfig(BertPretrainConfig):
    """The schedule of a BERT run."""

    plan: PlanConfig = field(default_factory=PlanConfig)


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """How a forecast is shown."""

    json: bool = False
    """Print JSON in place of text."""
    memory: bool = False
    """Show what a process takes in memory with each optimizer, and whether its GPU has as much."""


@dataclass(frozen=True, kw_only=True)
class GPTForecastConfig(GPTPretrainConfig):
    """The time of a GPT-2 run."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)


@dataclass(frozen=True, kw_only=True)
class BertForecastConfig(BertPretrainConfig):
    """The time of a BERT run."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
