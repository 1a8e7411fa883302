"""Synthetic run folders for tests of comparisons."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

PARAMETERS = 1000
REPLICAS = 4
BITS = {"adam": 48.0, "one_bit_adam": 8.0, "zero_one_adam": 2.0}


def line(iteration: int, **changes: Any) -> dict[str, Any]:
    """One line of metrics of a converging run; 8 sequences a step."""
    values = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "loss": 2 + 6 * math.exp(-iteration / 30),
        "lr": 1e-3,
        "step_seconds": 0.5,
        "tokens_per_second": 512.0,
        "sync_kind": "one_bit",
        "sync_interval": 1,
    }
    return values | changes


def settings(**changes: Any) -> dict[str, dict[str, Any]]:
    """The compared part of config.yaml; keys are ``section__name``."""
    values: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 2, "hidden_size": 64},
        "data": {"data_path": ["text"], "seq_length": 32, "tokenizer_type": "GPT2BPETokenizer"},
        "optimizer": {"optimizer": "adam", "lr": 1e-3, "sync_policy": "schedule:2"},
        "training": {"seed": 0, "precision": "fp32", "train_iters": 100},
        "logging": {"run_dir": "anywhere"},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return values


def lines(
    *, optimizer: str = "adam", steps: int = 100, worse: float = 0.0, seconds: float = 0.5
) -> list[dict[str, Any]]:
    """A line every 5 steps, with an evaluation every 20."""
    bits = BITS.get(optimizer, 4.0)
    made = []
    for step in range(5, steps + 1, 5):
        sent = round(bits * PARAMETERS * step / 8)
        own = line(step, step_seconds=seconds, comm_bytes=round(bits * PARAMETERS * 5 / 8), comm_rounds=5)
        own |= {"comm_bytes_total": sent, "comm_rounds_total": step, "bits_per_parameter": bits}
        own["loss"] += worse
        if step % 20 == 0:
            own["eval_loss"] = own["loss"] + 0.1
        made.append(own)
    return made


def write_run(folder: Path, content: list[dict[str, Any]] | str, *, world_size: int = REPLICAS, **changes: Any) -> Path:
    """A run folder with these lines (or this text) as metrics.jsonl; ``changes`` are passed to ``settings``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in content)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(**changes)))
    environment = {
        "world_size": world_size,
        "started": "2026-01-01T00:00:00+00:00",
        "hardware": {"processor": "abacus"},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def write_family(root: Path) -> list[Path]:
    """Adam with two seeds, 1-bit Adam, and 0/1 Adam with and without local steps."""
    return [
        write_run(root / "adam-0", lines()),
        write_run(root / "adam-1", lines(worse=0.02), training__seed=1),
        write_run(root / "onebit", lines(optimizer="one_bit_adam", worse=0.3), optimizer__optimizer="one_bit_adam"),
        write_run(
            root / "zero",
            lines(optimizer="zero_one_adam", worse=0.1, seconds=0.2),
            optimizer__optimizer="zero_one_adam",
        ),
        write_run(
            root / "every",
            lines(optimizer="zero_one_adam", worse=0.1, seconds=0.3),
            optimizer__optimizer="zero_one_adam",
            optimizer__sync_policy="every",
        ),
    ]
