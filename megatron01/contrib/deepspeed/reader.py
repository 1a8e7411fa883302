"""Reads DeepSpeed's JSON: with comments and trailing commas, which its reader accepts, without keys given twice."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from megatron01.errors import UserError, nearest

# Strings come first, so that what looks like a comment inside one stays.
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|(?://|#)[^\n]*', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def read_json(path: str) -> dict[str, Any]:
    """The object in a file.

    Raises:
        UserError: if the file is missing, unreadable or no JSON object, or gives a key twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = Path(path).parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        raise UserError(f"DeepSpeed config {path} does not exist{nearest(Path(path).name, names)}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"DeepSpeed config {path} cannot be read: {reason}") from None
    return parse_json(text, source=path)


def parse_json(text: str, *, source: str) -> dict[str, Any]:
    """The object that ``text`` holds; ``source`` names it in messages. Raises as ``read_json`` does."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise UserError(f"{source}: {twice[0]!r} is given twice in one object; keep one of them")
        return dict(pairs)

    def not_finite(name: str) -> NoReturn:
        raise UserError(f"{source}: {name} is no number that a setting can have; expected a finite one")

    plain = _TRAILING_COMMA.sub(_keep_strings, _COMMENT.sub(_keep_strings, text))
    try:
        content = json.loads(plain, object_pairs_hook=without_duplicates, parse_constant=not_finite)
    except json.JSONDecodeError as error:
        raise UserError(f"{source} line {error.lineno}: not valid JSON: {error.msg}") from None
    except UserError:
        raise
    except ValueError:
        raise UserError(f"{source}: a number has too many digits") from None
    except RecursionError:
        raise UserError(f"{source}: not valid JSON: nested too deeply") from None
    if not isinstance(content, dict):
        raise UserError(f"{source} holds no JSON object; expected {{...}} with DeepSpeed's fields")
    return content


def _keep_strings(match: re.Match[str]) -> str:
    """A string as it is; of a comment or comma, the line ends, so that messages name the right line."""
    text = match.group()
    return text if text.startswith('"') else "\n" * text.count("\n")
