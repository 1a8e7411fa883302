"""From what ``--input`` names to the sources that are read, in order."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from megatron01.data.preprocessing.config import PreprocessConfig
from megatron01.data.preprocessing.corpus import Source
from megatron01.data.preprocessing.tables import NamedDatasetSource, ParquetSource, SavedDatasetSource
from megatron01.data.preprocessing.text_files import (
    STANDARD_INPUT,
    ByteStream,
    TextSource,
    detect_compression,
    is_pipe,
    unpacked_blocks,
)
from megatron01.data.preprocessing.text_files import SUFFIXES as COMPRESSED
from megatron01.errors import UserError
from megatron01.utils.files import files_below

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


def resolve_inputs(config: PreprocessConfig) -> list[Source]:
    """The sources of a run. Patterns and folders stand for the files they match, in the order of their names.

    Raises:
        UserError: if something is missing, is given twice, or is of a format that cannot be told or does not fit.
    """
    if config.input_format == "huggingface":
        return [_dataset(config, name) for name in config.input]
    for name in ("dataset_config", "dataset_split"):
        if getattr(config, name) and not any(map(_is_saved_dataset, config.input)):
            raise UserError(f"{name} is set, but no input is a data set; give --input-format huggingface as well")
    own = config.written_files()
    paths = [path for given in config.input for path in _expand(given, own)]
    repeated = [path for path, count in Counter(map(os.path.normpath, paths)).items() if count > 1]
    if repeated:
        raise UserError(f"{repeated[0]} is named twice by input; to see text more often, repeat it in training")
    return [_source(config, path) for path in paths]


def _expand(given: str, own: re.Pattern[str]) -> Iterator[str]:
    """The files that an input stands for.

    Args:
        own: matches what the run writes, for which no pattern or folder stands: it is not its input when it goes on.
    """

    def others(files: Iterable[str]) -> list[str]:
        return sorted(file for file in files if not own.fullmatch(os.path.abspath(file)))

    path = Path(given)
    if given == STANDARD_INPUT or path.is_file() or _is_saved_dataset(given):
        yield given
    elif path.is_dir():
        files = (str(file) for file in files_below(path) if not _is_hidden(file, path))
        found = others(files)
        if not found:
            raise UserError(f"input {given} is a folder without files")
        yield from found
    elif path.exists():  # a pipe
        yield given
    elif found := others(glob.glob(given, recursive=True)):
        expanded = (file for match in found for file in _expand(match, own))  # ** gives folders and what is in them
        yield from {os.path.normpath(file): file for file in expanded}.values()
    elif glob.has_magic(given):
        raise UserError(f"no input file matches {given}")
    else:
        raise UserError(
            f"no input file {given}; if it is the name of a Hugging Face data set, give --input-format huggingface"
        )


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file below a folder is no data but what programs leave there: .cache/..., _SUCCESS."""
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _is_saved_dataset(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in _SAVED_DATASET)


def _dataset(config: PreprocessConfig, name: str) -> Source:
    if _is_saved_dataset(name):
        return SavedDatasetSource(name, config.dataset_split, config.json_keys)
    return NamedDatasetSource(name, config.dataset_config, config.dataset_split, config.json_keys)


def _source(config: PreprocessConfig, path: str) -> Source:
    if _is_saved_dataset(path):
        return _dataset(config, path)
    found = config.input_format if config.input_format in ("jsonl", "text", "parquet") else _detect_format(path)
    if found == "parquet":
        if is_pipe(path):
            raise UserError(f"Parquet has its index at the end and cannot be read from the pipe {path}; give the file")
        return ParquetSource(path, config.json_keys)
    if found == "text" and len(config.json_keys) > 1:
        raise UserError(f"json_keys are {', '.join(config.json_keys)}, but {path} is plain text; give one key")
    return TextSource(path, "text" if found == "text" else "jsonl", longest=config.max_document_mb * 1_000_000)


def _detect_format(path: str) -> FileFormat:
    """By the extension; else by the first bytes of the content, but those of a pipe can be read only once."""
    if is_pipe(path):
        return "jsonl"
    name = Path(path)
    if name.suffix in COMPRESSED:
        name = name.with_suffix("")
    if name.suffix in _SUFFIXES:
        return _SUFFIXES[name.suffix]
    try:
        with open(path, "rb") as file:
            stream = ByteStream(path, file)
            compression = detect_compression(stream)
            head = next(unpacked_blocks(stream, compression), b"")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if head.startswith(_PARQUET_MAGIC):
        return "parquet"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return "jsonl"
    raise UserError(
        f"the format of {path} cannot be told from its name or beginning; expected an extension of"
        f" {', '.join(_SUFFIXES)} (and {', '.join(COMPRESSED)}), or set input_format"
    )
