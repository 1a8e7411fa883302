"""Files are replaced as a whole or stay as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron01.files import write_atomically


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "old")
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_the_old_content_stays_when_the_new_cannot_be_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "file", "old")

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
