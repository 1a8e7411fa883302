"""Reading of vocabulary files, with errors that a user understands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron01.errors import UserError


def read_bytes(path: str) -> bytes:
    """The content of a file.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; check vocab_file, merge_file and tokenizer_model"
        ) from error


def read_text(path: str) -> str:
    """The content of a file of UTF-8 text, without a byte-order mark.

    Raises:
        UserError: if it cannot be read or is no such text.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(path: str, expected: str) -> Any:
    """The content of a JSON file.

    Args:
        expected: what the file should be, for the message.

    Raises:
        UserError: if it cannot be read or is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); expected {expected}") from error


def fingerprint(rules: str, entries: Sequence[str]) -> str:
    """Hash of a tokenizer: the name of its rules and everything else it is made of."""
    return hashlib.sha256("\n".join((rules, *entries)).encode("utf-8")).hexdigest()
