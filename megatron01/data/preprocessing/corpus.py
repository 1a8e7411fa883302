"""Reading of text corpora: JSON lines or plain text, compressed or not, as a stream of chunks for worker processes."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

from megatron01.errors import UserError

InputFormat = Literal["auto", "jsonl", "text"]

_SUFFIXES: dict[str, Literal["jsonl", "text"]] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 19  # of text handed to a worker at a time; also bounds what is held in memory per worker


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents of one input file, undecoded.

    Attributes:
        source: the file.
        format: what ``documents`` holds: a JSON object each, or plain text.
        line_numbers: line on which each document begins, from 1.
        documents: the documents' bytes.
    """

    source: str
    format: Literal["jsonl", "text"]
    line_numbers: tuple[int, ...]
    documents: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of text, uncompressed."""
        return sum(map(len, self.documents))


def read_chunks(paths: Sequence[str], input_format: InputFormat) -> Iterator[Chunk]:
    """The documents of all files in order, in chunks of about half a megabyte.

    Args:
        paths: files of JSON lines, or of plain text with a blank line after each document; ``.gz`` and ``.xz`` are
            unpacked on the way.
        input_format: what the files hold; ``auto`` goes by each file's extension.

    Raises:
        UserError: if a file is missing or damaged, or its format cannot be told from its name.
    """
    formats = [_resolve_format(path, input_format) for path in paths]
    for path in paths:
        if not Path(path).is_file():
            raise UserError(f"no input file {path}")  # before any work is done, not hours later
    for path, resolved in zip(paths, formats, strict=True):
        documents = _lines(path) if resolved == "jsonl" else _paragraphed_documents(path)
        yield from _group(path, resolved, documents)


def _resolve_format(path: str, input_format: InputFormat) -> Literal["jsonl", "text"]:
    if input_format != "auto":
        return input_format
    name = Path(path.removesuffix(".gz").removesuffix(".xz"))
    if name.suffix not in _SUFFIXES:
        raise UserError(
            f"the format of {path} cannot be told from its name; expected an extension of {', '.join(_SUFFIXES)}"
            " (and .gz or .xz), or set input_format to jsonl or text"
        )
    return _SUFFIXES[name.suffix]


def _open(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.endswith(".xz"):
        return cast(IO[bytes], lzma.open(path, "rb"))
    return open(path, "rb")


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line, without its end."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                yield number, line.rstrip(b"\r\n")
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged or cut short ({error}); copy it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _paragraphed_documents(path: str) -> Iterator[tuple[int, bytes]]:
    """Documents that are separated by blank lines, with the number of each one's first line."""
    lines: list[bytes] = []
    first = 0
    for number, line in _lines(path):
        if line.strip():
            first = first if lines else number
            lines.append(line)
        elif lines:
            yield first, b"\n".join(lines)
            lines = []
    if lines:
        yield first, b"\n".join(lines)


def _group(path: str, resolved: Literal["jsonl", "text"], documents: Iterator[tuple[int, bytes]]) -> Iterator[Chunk]:
    numbers: list[int] = []
    contents: list[bytes] = []
    num_bytes = 0
    for number, content in documents:
        if resolved == "jsonl" and not content.strip():
            continue  # a blank line is no document
        numbers.append(number)
        contents.append(content)
        num_bytes += len(content)
        if num_bytes >= _CHUNK_BYTES:
            yield Chunk(path, resolved, tuple(numbers), tuple(contents))
            numbers, contents, num_bytes = [], [], 0
    if numbers:
        yield Chunk(path, resolved, tuple(numbers), tuple(contents))
