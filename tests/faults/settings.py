"""The small runs into which faults are injected: the settings drawn, and their configuration."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.tiny import bert_config, gpt_config, with_settings

STEPS = 14
SAVED_EVERY = 5
TIMEOUT_SECONDS = 9.0  # of collectives, after which a replica that hangs is lost

MODELS = ("gpt", "bert")
OPTIMIZERS = ("zero_one_adam", "one_bit_adam", "bin_sgdm", "adam", "quantized_adam")
WIRE_DTYPES = ("auto", "4bit", "8bit", "fp32")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Setting:
    """Which run: model, optimizer, precision, nodes (simulated unless hosts are given), processes per node, saving."""

    model: str = "gpt"
    optimizer: str = "zero_one_adam"
    precision: str = "fp32"
    nodes: int = 1
    per_node: int = 2
    async_save: bool = False
    state_dtype: str = "fp32"
    delay: bool = False
    gradient_wire_dtype: str = "auto"

    @property
    def world_size(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        how = (" async" if self.async_save else "") + (" delayed" if self.delay else "")
        state = "" if self.state_dtype == "fp32" else f" {self.state_dtype} state"
        wire = "" if self.gradient_wire_dtype == "auto" else f" {self.gradient_wire_dtype} gradients"
        return f"{self.model} {self.optimizer} {self.precision}{state}{wire} {self.nodes}x{self.per_node}{how}"

    def config(self, corpus: Path, folder: Path, **changes: Any) -> Any:
        """The configuration; synchronizations are every second step from the ninth on, so that 10 lies between two."""
        build = gpt_config if self.model == "gpt" else bert_config
        config = build(
            corpus,
            save=str(folder / "saved"),
            load="auto",
            save_interval=SAVED_EVERY,
            async_save=self.async_save,
            train_iters=STEPS,
            eval_interval=6,
            log_interval=1,
            check_replicas_interval=1,
            run_dir=str(folder / "run"),
            optimizer=self.optimizer,
            precision=self.precision,
            freeze_step=6,
            distributed_timeout_minutes=TIMEOUT_SECONDS / 60,
            state_dtype=self.state_dtype,
            delay_synchronization=self.delay,
            gradient_wire_dtype=self.gradient_wire_dtype,
            threads_per_replica=1,  # a pool of threads would not survive the fork
        )
        return with_settings(config, **changes)


def draw_setting(numbers: random.Random, *, nodes: int | None = None) -> Setting:
    """A setting; on 2 nodes of 2 in a sixth of the cases, and with ``nodes = 2`` on 2 nodes of 1 or 2."""
    shape = numbers.choice([(1, 2)] * 5 + [(2, 2)]) if nodes is None else (nodes, numbers.choice([1, 1, 1, 2]))
    optimizer = numbers.choice((*OPTIMIZERS, "zero_one_adam"))
    return Setting(
        numbers.choice(MODELS),
        optimizer,
        numbers.choice(PRECISIONS),
        *shape,
        numbers.random() < 0.5,
        numbers.choice(["fp32", "bf16"]) if optimizer == "zero_one_adam" else "fp32",
        optimizer in ("zero_one_adam", "one_bit_adam") and numbers.random() < 0.4,
        numbers.choice(WIRE_DTYPES) if optimizer in ("zero_one_adam", "one_bit_adam") else "auto",
    )
