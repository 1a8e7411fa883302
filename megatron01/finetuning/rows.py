"""Rows of a few named columns out of TSV, JSON lines and Parquet files, each with the place it comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron01.errors import UserError

ENDINGS = (".tsv", ".jsonl", ".json", ".parquet")
"""Of the files that can be read; where a set is there in several, the first counts."""

_BYTE_ORDER_MARK = "\ufeff"  # MRPC's files begin with one


@dataclass(frozen=True)
class Wanted:
    """A column that is needed.

    Attributes:
        names: that it may have.
        is_optional: whether it may be missing; its values are then None.
    """

    names: tuple[str, ...]
    is_optional: bool = False


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        place: file and line, for messages.
        values: of the wanted columns, in their order; None where a TSV row breaks off before the column.
    """

    place: str
    values: tuple[Any, ...]


def read_rows(path: Path, wanted: Sequence[Wanted], headless: Mapping[str, int] | None = None) -> Iterator[Row]:
    """The rows of a file.

    Args:
        path: a file with one of ``ENDINGS``. A TSV file has a header and no quoting: a quotation mark is text.
        wanted: the columns.
        headless: column numbers by name, for a TSV file whose first line names none of the wanted columns.

    Raises:
        UserError: if the file cannot be read, or lacks a column.
    """
    try:
        if path.suffix == ".tsv":
            yield from _tsv(path, wanted, headless)
        elif path.suffix == ".parquet":
            yield from rows_of(_parquet(path), wanted, f"{path} row")
        else:
            yield from rows_of(_json_lines(path), wanted, f"{path} line")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def rows_of(entries: Iterator[Mapping[str, Any]], wanted: Sequence[Wanted], place: str) -> Iterator[Row]:
    """The wanted values of entries by name.

    Raises:
        UserError: if an entry lacks a column.
    """
    for number, entry in enumerate(entries, start=1):
        where = f"{place} {number}"
        names = [_choose(column, entry, where) for column in wanted]
        yield Row(where, tuple(None if name is None else entry[name] for name in names))


def _choose(column: Wanted, names: Mapping[str, Any] | Sequence[str], where: str) -> str | None:
    for name in column.names:
        if name in names:
            return name
    if column.is_optional:
        return None
    expected = " or ".join(map(repr, column.names))
    raise UserError(f"{where}: there is no column {expected}, only {', '.join(map(repr, names))}")


def _tsv(path: Path, wanted: Sequence[Wanted], headless: Mapping[str, int] | None) -> Iterator[Row]:
    lines = _lines(path)
    _, first = next(lines, (1, ""))
    header = first.removeprefix(_BYTE_ORDER_MARK).split("\t")
    if headless is not None and not any(name in header for column in wanted for name in column.names):
        columns: Mapping[str, int] = headless
        lines = _lines(path)
    else:
        columns = {name: number for number, name in enumerate(header)}
    chosen = [_choose(column, list(columns), f"{path} line 1") for column in wanted]
    positions = [None if name is None else columns[name] for name in chosen]
    for number, line in lines:
        fields = line.split("\t")
        values = (fields[place] if place is not None and place < len(fields) else None for place in positions)
        yield Row(f"{path} line {number}", tuple(values))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers; only \\n ends one, as texts hold other line breaks."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                raise UserError(f"{path} line {number} is not UTF-8 text ({error.reason})") from error
            if text:
                yield number, text


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in _lines(path):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number} is not JSON ({error}); expected one object a line") from error
        if not isinstance(entry, dict):
            raise UserError(f"{path} line {number} is not a JSON object; expected columns by name")
        yield entry


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} needs an optional package: pip install 'megatron01[data]'") from error
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged or not a Parquet file ({error}); copy it again") from error
