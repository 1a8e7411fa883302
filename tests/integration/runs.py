"""Whole runs of the shipped models, in this process or in several."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from megatron01.config import BertPretrainConfig
from megatron01.errors import UserError
from megatron01.pretraining import BERT, GPT
from megatron01.training import pretrain
from tests.distributed.harness import run_ranks


def run(config: Any) -> None:
    script = BERT if isinstance(config, BertPretrainConfig) else GPT
    pretrain(config, script.build_datasets, script.build_model, script.forward_step)


def run_each(rank: int, world_size: int, configs: Any) -> list[str | None]:
    """Runs one after the other in the same processes; a UserError is returned as text."""
    messages: list[str | None] = []
    for config in configs:
        try:
            run(config)
            messages.append(None)
        except UserError as error:
            messages.append(str(error))
    return messages


def run_together(*configs: Any, world_size: int = 2) -> list[list[str | None]]:
    """The messages of the runs, rank by rank."""
    return run_ranks(run_each, world_size, configs, default_group=world_size > 1)


def run_and_read(rank: int, world_size: int, config: Any) -> tuple[str | None, str]:
    """The message of a run, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        (message,) = run_each(rank, world_size, [config])
    return message, output.getvalue()
