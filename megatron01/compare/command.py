"""``megatron01 compare``: from run folders to a page, pictures, and a table on the terminal."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron01.command_line import parse
from megatron01.compare.config import CompareConfig
from megatron01.errors import UserError


def compare(argv: Sequence[str], prog: str) -> None:
    """Compare the runs that a command line names first; what cannot be used of them is said, and the rest is shown.

    Raises:
        UserError: for a mistake in the settings, if no run can be shown, or if a file cannot be written.
    """
    folders = list(itertools.takewhile(lambda argument: not argument.startswith("-"), argv))
    config = parse(
        CompareConfig,
        argv[len(folders) :],
        prog=f"{prog} RUN ...",
        description="Compare runs by their folders: losses over steps, tokens, time and bytes, and what they sent.",
    )
    if not folders:
        raise UserError(f"no run is given; expected {prog} RUN ..., each the folder of a run (its --run-dir)")
    from megatron01.compare.pictures import check_matplotlib
    from megatron01.compare.show import show

    if config.png:
        check_matplotlib("--png")
    show(config, folders_once(folders))


def folders_once(names: Sequence[str]) -> list[Path]:
    """The folders without those given twice, which are said; a pattern that no shell has resolved is resolved."""
    found: dict[str, Path] = {}
    for path in map(Path, names):
        real = os.path.realpath(path)
        if real in found:
            print(f"note: {path} is given twice; it counts once", file=sys.stderr)
        found.setdefault(real, path)
    return list(found.values())
