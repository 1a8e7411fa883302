"""The flag ``--deepspeed-config``: a DeepSpeed configuration as a source of settings."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron01.config.fields import Settings
from megatron01.contrib.deepspeed.reader import read_json
from megatron01.contrib.deepspeed.translate import Translation, translate
from megatron01.parallel import LaunchEnvironment
from megatron01.utils.formatting import wrapped_columns


class DeepSpeedSource:
    """Reads the file, prints what becomes of it, once per job and to stderr, and hands over the settings.

    Args:
        replicas: from the values of flags to the number of replicas; the launched processes when None.
    """

    flag = "--deepspeed-config"
    help = "DeepSpeed's JSON configuration, translated; wins over --config files, and flags over it."

    def __init__(self, replicas: Callable[[Mapping[str, Any]], int] | None = None) -> None:
        self._replicas = replicas

    def read(
        self, path: str, settings: Settings[Any], from_files: Mapping[str, Any], from_flags: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The settings of ``from_files`` with what the file at ``path`` changes; see ``translate``."""
        content = read_json(path)
        environment = LaunchEnvironment.read(os.environ)
        parts = {**from_files, **from_flags}.get("distributed.tensor_model_parallel_size", 1)
        replicas = (
            max(1, environment.world_size // max(1, parts)) if self._replicas is None else self._replicas(from_flags)
        )
        translation = translate(content, settings, replicas=replicas, from_files=from_files, from_flags=from_flags)
        if environment.rank == 0:
            width = min(140, shutil.get_terminal_size(fallback=(120, 24)).columns)
            print(describe(path, translation, width), file=sys.stderr, flush=True)
        return translation.values


def describe(path: str, translation: Translation, width: int) -> str:
    """The translation as a table, of at most ``width`` characters if they suffice, and what is not honoured."""
    if not translation.rows:
        return f"{path} sets nothing"
    rows = [("DeepSpeed", "value", "here", "remark")]
    for row in translation.rows:
        here = row.here or ("-" if row.honoured else "NOT HONOURED")
        rows.append((row.field, row.value, here, row.remark.replace("`", "")))
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    left = [names, min(values, 24), 32]
    table = wrapped_columns(rows, [*left, max(24, width - sum(left) - 2 * len(left))])
    missed = translation.not_honoured
    verdict = f"not honoured: {', '.join(missed)}" if missed else "every field is honoured"
    return "\n".join([f"{path}, translated:", *table, verdict])
