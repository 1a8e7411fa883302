"""Damaged and invented configuration files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from megatron01.config import GPTPretrainConfig
from megatron01.config.fields import Settings
from megatron01.config.yaml_files import dump_yaml, load_plain_yaml, load_yaml
from megatron01.errors import UserError
from tests.fuzz.damage import damage_file, damaged_bytes, edited

PIECES = [
    "[",
    "{",
    "- ",
    "? ",
    ": ",
    "&a ",
    "*a",
    "!!python/name:os.system ",
    "<<: ",
    "|\n",
    ">\n",
    '"',
    "'",
    "\n",
    " ",
]
PIECES += [
    "optimizer:",
    "lr:",
    "training:\n  seed:",
    "1e400",
    "0x",
    "1:1:1",
    "~",
    "%YAML 1.1\n",
    "---\n",
    "\t",
    "\r",
    "#",
]
PIECES += ["\x85", "\u2028", "\ufeff", "\U0001f600", "\\", "!!binary ", "!!set", "...", "==", "`", "@", "\x07"]


class SettingsFiles:
    """The settings of a run: damaged, with other entries, or drawn from pieces of YAML."""

    name = "settings"

    @staticmethod
    def prepare(folder: Path) -> None:
        """No files are needed."""

    def __init__(self, folder: Path) -> None:
        self._settings: Settings[Any] = Settings(GPTPretrainConfig)
        self._text = dump_yaml(GPTPretrainConfig())

    def round(self, numbers: random.Random, folder: Path, victim: Path) -> tuple[str, str | None]:
        """Write a file, and read it. Returns what was done, and the error if it was refused."""
        path = folder / "config.yaml"
        kind = numbers.choice(["bytes", "entries", "entries", "pieces", "pieces", "repeated", "nested", "file"])
        content = self._text.encode()
        if kind == "bytes":
            kind, content = damaged_bytes(content, numbers)
        elif kind == "entries":
            tree = edited(yaml.safe_load(self._text), numbers)
            content = yaml.safe_dump(tree, allow_unicode=numbers.random() < 0.5).encode("utf-8", "surrogatepass")
        elif kind == "pieces":
            content = "".join(numbers.choices(PIECES, k=numbers.randint(1, 200))).encode()
        elif kind == "repeated":
            content = (numbers.choice(PIECES) * numbers.choice([100, 1000, 20_000])).encode()
        elif kind == "nested":
            opening = numbers.choice(PIECES)
            content = "\n".join(" " * depth + opening for depth in range(numbers.choice([50, 400]))).encode()
        path.write_bytes(content)
        if kind == "file":
            other = folder / "other.yaml"
            other.write_text("optimizer: {lr: 0.1}\n")
            kind = damage_file(path, [other], numbers, victim)
            if path.is_fifo():
                path.unlink()  # reading a user's named pipe would block
        messages = []
        for read in (self._as_settings, load_plain_yaml):
            try:
                read(path)
            except UserError as error:
                messages.append(str(error))
        return kind, max(messages, key=len, default=None)

    def _as_settings(self, path: Path) -> None:
        self._settings.build(load_yaml(path, self._settings))

    def close(self) -> None:
        pass
