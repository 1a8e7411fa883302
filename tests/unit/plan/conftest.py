"""Runs the program in the source folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron01 import cli

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Map arguments to standard output, or to standard error where a ``status`` other than None is expected."""
    monkeypatch.chdir(ROOT)  # vocabulary paths in the recipes are relative to it

    def run(*argv: str, status: int | None = None) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        printed = capsys.readouterr()
        assert caught.value.code == status, printed
        return printed.err if status else printed.out

    return run
