"""The names of metrics at wandb, which shows what stands before the slash as a section of panels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP = "progress/iteration"
TOKENS = "progress/tokens"
HOURS = "progress/hours"
BYTES = "traffic/bytes_total"
AXES = {"loss": STEP, "loss_by_tokens": TOKENS, "loss_by_hours": HOURS, "loss_by_bytes": BYTES}
"""Sections that show the losses -> what they are drawn over: iterations, tokens, hours of training, bytes sent."""

SYNC_KIND_LEVELS = {"skipped": 0, "local": 1, "one_bit": 2, "full": 3}
"""Kinds of steps as heights of a curve: wandb draws numbers alone."""

_SECTIONS = {
    "schedule": ("lr", "sync_interval", "sync_kind"),
    "traffic": (
        "comm_bytes",
        "comm_bytes_between_nodes",
        "comm_bytes_total",
        "comm_rounds",
        "comm_rounds_total",
        "bits_per_parameter",
    ),
    "compression": ("compression_error", "compression_errors", "error_feedback_ratio"),
    "speed": (
        "tokens_per_second",
        "step_seconds",
        "training_seconds",
        "flops_per_second",
        "mfu",
        "memory_bytes",
        "own_seconds",
    ),
    "health": ("grad_norm", "loss_scale", "slowest_replica", "lost_steps", "restart_seconds"),
    "progress": ("iteration", "consumed_samples"),
}
_OF_KEY = {
    **{
        key: f"{section}/{key.removeprefix('comm_').removeprefix('sync_')}"
        for section, keys in _SECTIONS.items()
        for key in keys
    },
    "compression_error": "compression/error",
    "compression_errors": "compression/error_of_bucket",
    "loss": "loss/train",
    "eval_loss": "loss/held_out",
}
SECTIONS = (*AXES, *_SECTIONS)


def name_of(key: str) -> str:
    """The name of a key of metrics.jsonl; those that are not known, the parts of the loss, are losses."""
    return _OF_KEY.get(key, f"loss/{key}")


def to_wandb(line: Mapping[str, Any], *, seq_length: int) -> dict[str, float]:
    """A line of metrics as wandb gets it: all its numbers by name, those of losses once for each axis.

    Args:
        line: keys and values as in metrics.jsonl; what is None is left out.
        seq_length: tokens of a sample.
    """
    values: dict[str, float] = {}
    for key, value in line.items():
        name = name_of(key)
        if key == "sync_kind":
            values[name] = SYNC_KIND_LEVELS.get(value, 0)
        elif isinstance(value, list):
            values |= {f"{name}_{number}": entry for number, entry in enumerate(value)}
        elif isinstance(value, (int, float)):
            values[name] = value
    values[TOKENS] = line["consumed_samples"] * seq_length
    if "training_seconds" in line:
        values[HOURS] = line["training_seconds"] / 3600
    losses = {name.removeprefix("loss/"): value for name, value in values.items() if name.startswith("loss/")}
    for section, axis in AXES.items():
        if axis in values:
            values |= {f"{section}/{name}": value for name, value in losses.items()}
    return values
