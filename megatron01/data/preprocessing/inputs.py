"""Resolve ``--input`` to sources, in order; Parquet files and Hugging Face data sets.

Of tables only the text columns are read; their chunks are Arrow streams.
"""

from __future__ import annotations

import glob
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron01.config.commands import TextConfig
from megatron01.data.preprocessing.corpus import (
    CHUNK_BYTES,
    COMPRESSED_SUFFIXES,
    STANDARD_INPUT,
    Chunk,
    Position,
    Source,
    TextSource,
    detect_compression,
    is_pipe,
    open_stream,
    unpacked_blocks,
)
from megatron01.errors import UserError, import_optional
from megatron01.utils.files import files_below
from megatron01.utils.formatting import one_line

if TYPE_CHECKING:
    import pyarrow

_DEFAULT_ROWS = 256  # per chunk where the size of a row is not known beforehand
_MOST_ROWS = 16384


class ParquetSource(Source):
    """A Parquet file, read one row group at a time."""

    def __init__(self, path: str, keys: Sequence[str]) -> None:
        super().__init__(path, [path])
        self.keys = list(keys)
        with _errors_explained(path), self._open() as file:
            _check_columns(path, file.schema_arrow, keys)

    def chunks(self, start: Position) -> Iterator[Chunk]:
        assert self.size is not None
        row = 0
        with _errors_explained(self.name), self._open() as file:
            total = max(file.metadata.num_rows, 1)
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if row + num_rows <= start.offset:
                    row += num_rows
                    continue
                step = _rows_per_chunk(file.metadata.row_group(group), self.keys)
                for batch in file.iter_batches(batch_size=step, row_groups=[group], columns=self.keys):
                    data = batch.slice(max(start.offset - row, 0))
                    row += batch.num_rows
                    if data.num_rows:
                        end = Position(offset=row, consumed=self.size * row // total)
                        yield Chunk("table", _serialize(data), end)

    def _open(self) -> pyarrow.parquet.ParquetFile:
        return import_optional("pyarrow.parquet", self.name).ParquetFile(self.name, page_checksum_verification=True)


class DatasetSource(Source):
    """A data set loaded by Hugging Face's ``datasets``: saved in a folder, or streamed from the Hub, for instance."""

    def __init__(self, name: str, config: TextConfig) -> None:
        datasets = import_optional("datasets", name)
        is_saved = _is_saved_dataset(name)
        super().__init__(name, sorted(map(str, files_below(Path(name)))) if is_saved else ())
        with _errors_explained(name):
            if is_saved:
                loaded = datasets.load_from_disk(name)
            else:
                loaded = datasets.load_dataset(name, config.dataset_config, streaming=True)
            rows = _chosen_split(name, loaded, config.dataset_split)
            if rows.features is None:
                rows = rows._resolve_features()
            _check_columns(name, rows.features.arrow_schema, config.json_keys)
            self._rows = rows.select_columns(list(config.json_keys)).with_format("arrow")

    def chunks(self, start: Position) -> Iterator[Chunk]:
        rows, row, checksum, consumed = self._rows, 0, 0, 0
        if self.stamp is not None:
            rows, row, checksum = rows.select(range(start.offset, len(rows))), start.offset, start.checksum
        # A stream is read again from the start: only its checksum tells whether the part already read is the same.
        with _errors_explained(self.name):
            for table in rows.iter(batch_size=_DEFAULT_ROWS):
                data = _serialize(table)
                before, row, checksum = row, row + table.num_rows, zlib.crc32(data, checksum)
                if before < start.offset <= row and (row, checksum) != (start.offset, start.checksum):
                    raise self.changed()  # or comes in other batches, which cannot be compared
                if row > start.offset:
                    if self.size is not None:
                        consumed = self.size * row // len(self._rows)
                    yield Chunk("table", data, Position(offset=row, checksum=checksum, consumed=consumed))
        if row < start.offset:
            raise self.changed()


def rows(data: bytes, keys: Sequence[str]) -> list[tuple[bytes | None, ...]]:
    """For each row of a chunk the bytes of each key's text, None where it is null; not always UTF-8."""
    import pyarrow

    table = pyarrow.ipc.open_stream(data).read_all()
    columns = []
    for key in keys:
        column = table.column(key)
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        columns.append(column.cast(pyarrow.large_binary()).to_pylist())
    return list(zip(*columns, strict=True))


@contextmanager
def _errors_explained(name: str) -> Iterator[None]:
    """Turn errors of the libraries into a UserError that names the file or data set."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError) as error:  # the libraries' own errors derive from these
        reason = one_line(error, 300)
        raise UserError(f"cannot read {name}: {reason or type(error).__name__}") from error


def _chosen_split(name: str, loaded: Any, split: str | None) -> Any:
    if not isinstance(loaded, dict):
        if split is not None:
            raise UserError(f"dataset_split is {split}, but {name} has no splits; leave it out")
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        given = "is not given" if split is None else f"is {split}"
        raise UserError(f"dataset_split {given}; expected one of {', '.join(map(str, loaded))}, the splits of {name}")
    return loaded[split]


def _check_columns(name: str, schema: pyarrow.Schema, keys: Sequence[str]) -> None:
    from pyarrow import types

    for key in keys:
        if key not in schema.names:
            raise UserError(f"{name} has no column {key!r}, only {', '.join(schema.names)}; set json_keys")
        kind = schema.field(key).type
        values = kind.value_type if types.is_dictionary(kind) else kind
        if not any(is_text(values) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
            raise UserError(f"column {key!r} of {name} holds {kind}; expected text (string); set json_keys")


def _rows_per_chunk(group: Any, keys: Sequence[str]) -> int:
    """Number of rows of a row group that hold about ``CHUNK_BYTES`` of text."""
    columns = [group.column(index) for index in range(group.num_columns)]
    num_bytes = sum(column.total_uncompressed_size for column in columns if column.path_in_schema in keys)
    return int(max(1, min(CHUNK_BYTES * group.num_rows // max(num_bytes, 1), _MOST_ROWS)))


def _serialize(data: pyarrow.Table | pyarrow.RecordBatch) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, data.schema) as writer:
        writer.write(data)
    return bytes(sink.getvalue().to_pybytes())


FileFormat = Literal["jsonl", "text", "parquet"]

_SUFFIXES: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
}
_PARQUET_MAGIC = b"PAR1"
_SAVED_DATASET = ("state.json", "dataset_dict.json")  # one of these is in every folder that datasets has saved


def resolve_inputs(config: TextConfig) -> list[Source]:
    """The sources of a run. Patterns and folders expand to their files, sorted by name.

    Raises UserError if an input is missing, given twice, or of an unknown or unsuitable format.
    """
    if config.input_format == "huggingface":
        return [DatasetSource(name, config) for name in config.input]
    for name in ("dataset_config", "dataset_split"):
        if getattr(config, name) and not any(map(_is_saved_dataset, config.input)):
            raise UserError(f"{name} is set, but no input is a data set; give --input-format huggingface as well")
    own = config.written_files()
    paths = [path for given in config.input for path in _expand(given, own)]
    by_file: dict[str, list[str]] = {}
    for path in paths:
        by_file.setdefault(os.path.realpath(path), []).append(os.path.normpath(path))
    repeated = next((same for same in by_file.values() if len(same) > 1), None)
    if repeated is not None:
        also = f", also as {repeated[1]}" if repeated[1] != repeated[0] else ""
        raise UserError(f"{repeated[0]} is given twice{also}; to see text more often, repeat it in training")
    return [_source(config, path) for path in paths]


def _expand(given: str, own: re.Pattern[str]) -> Iterator[str]:
    """The files that an input expands to, but the run's ``own`` output, so that a resume does not read it."""

    def others(files: Iterable[str]) -> list[str]:
        return sorted(file for file in files if not own.fullmatch(os.path.abspath(file)))

    path = Path(given)
    if given == STANDARD_INPUT or path.is_file() or _is_saved_dataset(given):
        yield given
    elif path.is_dir():
        # skips what programs leave there beside data: .cache/..., _SUCCESS
        data = (f for f in files_below(path) if not any(p.startswith((".", "_")) for p in f.relative_to(path).parts))
        found = others(map(str, data))
        if not found:
            raise UserError(f"input {given} is a folder without files")
        yield from found
    elif os.path.lexists(path):  # a pipe, or a link to nothing, which is refused when it is opened
        yield given
    elif found := others(_matches(given)):
        expanded = (file for match in found for file in _expand(match, own))  # ** gives folders and their files
        yield from {os.path.normpath(file): file for file in expanded}.values()
    elif glob.has_magic(given):
        raise UserError(f"no input file matches {given}")
    else:
        raise UserError(
            f"no input file {given}; if it is the name of a Hugging Face data set, give --input-format huggingface"
        )


def _matches(pattern: str) -> list[str]:
    """What a pattern matches. Raises UserError if a folder in which it looks cannot be read, which glob passes over."""
    folder, name = os.path.split(pattern)
    while folder and glob.has_magic(os.path.join(folder, name)):
        for place in glob.glob(os.path.join(folder, ""), recursive=True):
            try:
                os.scandir(place).close() if glob.has_magic(name) else os.lstat(os.path.join(place, name))
            except FileNotFoundError:
                continue
            except OSError as error:
                advice = f"make it readable, or leave it out of {pattern}"
                raise UserError(f"folder {place} cannot be read: {error.strerror}; {advice}") from error
        folder, name = os.path.split(folder)
    return glob.glob(pattern, recursive=True)


def _is_saved_dataset(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in _SAVED_DATASET)


def _source(config: TextConfig, path: str) -> Source:
    if _is_saved_dataset(path):
        return DatasetSource(path, config)
    found = config.input_format if config.input_format in ("jsonl", "text", "parquet") else _detect_format(path)
    if found == "parquet":
        if is_pipe(path):
            raise UserError(f"Parquet has its index at the end and cannot be read from the pipe {path}; give the file")
        return ParquetSource(path, config.json_keys)
    if found == "text" and len(config.json_keys) > 1:
        raise UserError(f"json_keys are {', '.join(config.json_keys)}, but {path} is plain text; give one key")
    return TextSource(path, "text" if found == "text" else "jsonl", longest=config.max_document_mb * 1_000_000)


def _detect_format(path: str) -> FileFormat:
    """Format by extension, else by the first bytes; JSON lines for a pipe, which can be read only once."""
    if is_pipe(path):
        return "jsonl"
    name = Path(path)
    if name.suffix.lower() in COMPRESSED_SUFFIXES:
        name = name.with_suffix("")
    if name.suffix.lower() in _SUFFIXES:
        return _SUFFIXES[name.suffix.lower()]
    with open_stream(path) as stream:
        head = next(unpacked_blocks(stream, detect_compression(stream)), b"")
    if head.startswith(_PARQUET_MAGIC):
        return "parquet"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return "jsonl"
    raise UserError(
        f"the format of {path} cannot be detected from its name or first bytes; expected an extension of"
        f" {', '.join(_SUFFIXES)} (and {', '.join(COMPRESSED_SUFFIXES)}), or give --input-format"
    )
