"""Damaged pairs of token files."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from pathlib import Path

import numpy as np

from megatron01.data import IndexedDataset, IndexedDatasetBuilder
from megatron01.data.commands import data as data_command
from megatron01.errors import UserError
from tests.fuzz.damage import damage_file

NUM_TOKENS = 600


class TokenFiles:
    """A pair of files, one of them damaged: it is refused, or its sequences can all be read."""

    name = "token files"

    @staticmethod
    def prepare(folder: Path) -> None:
        """Write the pair."""
        (folder / "whole").mkdir()
        lengths = np.random.default_rng(0).integers(0, 30, 40)
        with IndexedDatasetBuilder(folder / "whole" / "text", np.uint16) as builder:
            for number, length in enumerate(lengths):
                builder.add_sentence(np.arange(length) % NUM_TOKENS)
                if number % 3 == 0:
                    builder.end_document()
            builder.end_document()

    def __init__(self, folder: Path) -> None:
        self._whole = folder / "whole"

    def round(self, numbers: random.Random, folder: Path, victim: Path) -> tuple[str, str | None]:
        """Damage a copy, and read it. Returns what was done, and the error if it was refused."""
        place = folder / "data"
        shutil.copytree(self._whole, place)
        files = [place / "text.idx", place / "text.bin"]
        path = numbers.choice(files)
        kind = f"{path.suffix}, {damage_file(path, [file for file in files if file != path], numbers, victim)}"
        for command in ("verify", "inspect"):
            with contextlib.suppress(UserError), contextlib.redirect_stdout(io.StringIO()):
                data_command([command, str(place / "text")], "data")
        try:
            dataset = IndexedDataset(place / "text")
        except UserError as error:
            return kind, str(error)
        assert sum(len(tokens) for tokens in dataset) == dataset.tokens.size
        assert dataset.documents[-1] == len(dataset) and len(dataset.layout_fingerprint) == 64
        return kind, None

    def close(self) -> None:
        pass
