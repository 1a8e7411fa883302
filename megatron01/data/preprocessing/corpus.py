"""Input of preprocessing: sources of documents, positions in them, and chunks for workers.

Sources of text are files and pipes of JSON lines or plain text, compressed or not, cut into chunks of whole documents.
"""

from __future__ import annotations

import bz2
import lzma
import os
import re
import stat
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, Literal

from megatron01.errors import UserError, import_optional

CHUNK_BYTES = 1 << 19  # of text handed to a worker at a time; also bounds what is held in memory per worker


@dataclass(frozen=True)
class Position:
    """A position between two documents of the input."""

    source: int = 0  # number, from 0
    offset: int = 0  # bytes of (decompressed) text, or rows of a table, that lie before it in this source
    checksum: int = 0  # CRC-32 of that, 0 where the source has none
    consumed: int = 0  # bytes on disk of the source that were read up to it


@dataclass(frozen=True)
class Chunk:
    """Consecutive whole documents of one source, not decoded yet."""

    format: Literal["jsonl", "text", "table"]  # a JSON object a line; a blank line after each document; an Arrow stream
    data: bytes
    end: Position
    too_long: int = 0  # without data: lines of the one document that was skipped here because it is too long


class Source(ABC):
    """A file, pipe or data set with documents in a fixed order.

    ``files``: those that it consists of, if they are seekable and can be read more than once. Raises UserError if it
    cannot be read, or lacks a column or split.
    """

    def __init__(self, name: str, files: Sequence[str] = ()) -> None:
        self.name = name
        self._files = files
        # bytes on disk, for the progress bar, if known
        self.size = sum(file_status(file).st_size for file in files) if files else None
        # sizes and modification times, if they can tell that the content has changed
        self.stamp = self._present_stamp() if files else None

    def _present_stamp(self) -> str:
        found = map(file_status, self._files)
        return "; ".join(f"{status.st_size} bytes, modified {status.st_mtime_ns}" for status in found)

    def check_unchanged(self) -> None:
        """Raises: UserError if a file was changed since this object was made: it may still be being written."""
        if self.stamp is not None and self._present_stamp() != self.stamp:
            raise UserError(
                f"{self.name} was changed while this command ran; repeat it when nothing writes to the file any more"
            )

    @abstractmethod
    def chunks(self, start: Position) -> Iterator[Chunk]:
        """The documents after ``start``, a position in this source.

        Raises UserError if the source is damaged; without a stamp, also if it has changed before ``start``.
        """

    def check_unchanged_before(self, end: Position) -> None:
        """Raises: UserError unless a source with another stamp than before has the same content up to ``end``."""
        raise self.changed()

    def changed(self) -> UserError:
        """The error for a source that is not what it was when the run was interrupted."""
        return UserError(
            f"{self.name} has changed since the run was interrupted; restore it, or give --no-resume to begin again"
        )


def read_chunks(sources: Sequence[Source], start: Position) -> Iterator[Chunk]:
    """The documents of all sources in order from ``start`` on.

    Raises UserError if a source cannot be read, is damaged, or was changed before a chunk of it was read.
    """
    for number in range(start.source, len(sources)):
        for chunk in sources[number].chunks(start if number == start.source else Position()):
            sources[number].check_unchanged()  # a chunk may end in the middle of a document that is being written
            yield replace(chunk, end=replace(chunk.end, source=number))


def file_status(path: str) -> os.stat_result:
    """Raises: UserError if there is no such file."""
    try:
        return os.stat(path)
    except OSError as error:
        raise UserError(f"no input file {path} ({error.strerror})") from error


# Streaming decompression, so that damage is detected and memory stays small.
#
# The standard library's decompressors are used directly: its file objects take damage after the first stream of an
# ``.xz`` or ``.bz2`` file for the end of the file, and documents would be lost silently.


STANDARD_INPUT = "-"
Compression = Literal["gzip", "xz", "bzip2", "zstd"]

COMPRESSED_SUFFIXES: dict[str, Compression] = {
    ".gz": "gzip",
    ".xz": "xz",
    ".bz2": "bzip2",
    ".zst": "zstd",
    ".zstd": "zstd",
}
BLOCK_BYTES = 1 << 18  # read, and decompressed, at a time
_ZSTD_WINDOW_LOG = 31  # of `zstd --long=31`, the largest; the library's own limit, 27, refuses such files
_MAGIC: dict[Compression, re.Pattern[bytes]] = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),  # begins with a block, or ends at once
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a frame of data, or one to be skipped
}


class ByteStream:
    """The bytes of a file or pipe, called ``name`` in messages."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self.position = 0  # bytes returned by ``read`` so far
        self._file = file
        self._ahead = b""

    def peek(self, num_bytes: int) -> bytes:
        """The next bytes, which ``read`` will give again; fewer only at the end."""
        while len(self._ahead) < num_bytes and (more := self._read(num_bytes - len(self._ahead))):
            self._ahead += more
        return self._ahead

    def read(self) -> bytes:
        """The next block; empty at the end."""
        block = self._ahead or self._read(BLOCK_BYTES)
        self._ahead = b""
        self.position += len(block)
        return block

    def seek(self, position: int) -> None:
        """Go to a byte of a file."""
        self._file.seek(position)
        self._ahead = b""
        self.position = position

    def _read(self, num_bytes: int) -> bytes:
        try:
            return self._file.read(num_bytes)
        except OSError as error:
            raise UserError(f"cannot read {self.name}: {error.strerror}") from error


@contextmanager
def open_stream(path: str) -> Iterator[ByteStream]:
    """The bytes of a file, a pipe, or standard input. Raises UserError if it cannot be opened."""
    if path == STANDARD_INPUT:
        if sys.stdin is None:
            raise UserError("standard input is closed; give a file, or a pipe into this command")
        yield ByteStream("standard input", sys.stdin.buffer)
        return
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; what happens meanwhile is not for this try
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    with file:
        yield ByteStream(path, file)


def detect_compression(stream: ByteStream) -> Compression | None:
    """How a stream is compressed, by its first bytes, or None. Raises UserError if its name says otherwise."""
    head = stream.peek(16)
    found = next((kind for kind, magic in _MAGIC.items() if magic.match(head)), None)
    name = stream.name.lower()
    expected = next((kind for suffix, kind in COMPRESSED_SUFFIXES.items() if name.endswith(suffix)), None)
    if expected not in (None, found):
        raise UserError(
            f"{stream.name} is damaged, cut short or misnamed: it does not begin as a {expected} file does; copy it"
            " again, or rename it"
        )
    return found


def unpacked_blocks(stream: ByteStream, compression: Compression | None) -> Iterator[bytes]:
    """The decompressed content of a stream in blocks of about ``BLOCK_BYTES``; compressed streams may be concatenated.

    Raises UserError if it is damaged or ends too early.
    """
    if compression is None:
        yield from iter(stream.read, b"")
        return
    errors: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, OSError)
    if compression == "zstd":
        zstd = import_optional("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", stream.name)
        errors = (EOFError, zstd.ZstdError)
    packed = stream.read()
    while packed:
        decompressor: Any  # has eof, unused_data and decompress(data, max_length)
        if compression == "gzip":
            decompressor = zlib.decompressobj(wbits=31)
        elif compression == "xz":
            decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        elif compression == "bzip2":
            decompressor = bz2.BZ2Decompressor()
        else:
            decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})
        while not decompressor.eof:
            try:
                if not packed and getattr(decompressor, "needs_input", True) and not (packed := stream.read()):
                    raise EOFError("it ends in the middle")
                block = decompressor.decompress(packed, BLOCK_BYTES)
            except errors as error:
                raise UserError(f"{stream.name} is damaged or cut short ({error}); copy it again") from error
            packed = getattr(decompressor, "unconsumed_tail", b"")  # zlib's returns it, the others keep it
            if block:
                yield block
        packed = decompressor.unused_data.lstrip(b"\0")  # zeros are padding of xz files and tapes
        while not packed and (following := stream.read()):
            packed = following.lstrip(b"\0")


TextFormat = Literal["jsonl", "text"]

# A carriage return alone ends a line too; at the end of the buffer, a line feed may still belong to it.
_LINE_END = rb"(?:\r\n|\n|\r(?=[^\n]))"
_SPACE = rb"[ \t\x0b\x0c]*"
_LINE = re.compile(_LINE_END)
_ENDS: dict[TextFormat, tuple[re.Pattern[bytes], re.Pattern[bytes]]] = {
    "jsonl": (_LINE, re.compile(rb"\r\Z")),
    "text": (re.compile(_LINE_END + _SPACE + _LINE_END), re.compile(rb"(?:\r\n|\n|\r)" + _SPACE + rb"\r?\Z")),
}
"""Patterns of the end of a document, and of a possibly incomplete one at the end of the buffer."""
_LONGEST_END = 1 << 16  # bytes; longer ones, blank lines with much whitespace, may be missed


class TextSource(Source):
    """A file, a named pipe, or standard input (``-``): JSON lines, or text with a blank line after each document.

    Documents of more than ``longest`` bytes are skipped, which bounds memory.
    """

    def __init__(self, path: str, text_format: TextFormat, *, longest: int) -> None:
        self.path = path
        self.format = text_format
        self.longest = longest
        super().__init__("standard input" if path == STANDARD_INPUT else path, [] if is_pipe(path) else [path])

    def chunks(self, start: Position) -> Iterator[Chunk]:
        with open_stream(self.path) as stream:
            if self.stamp is not None and detect_compression(stream) is None:
                stream.seek(start.offset)
                blocks = unpacked_blocks(stream, None)
            else:
                blocks = self._blocks_after(start, stream)
            cutter = _Cutter(blocks, self.format, self.longest, start)
            for data, too_long in cutter.pieces():
                end = Position(offset=cutter.offset, checksum=cutter.checksum, consumed=stream.position)
                yield Chunk(self.format, data, end, too_long)

    def check_unchanged_before(self, end: Position) -> None:
        with open_stream(self.path) as stream:
            next(self._blocks_after(end, stream), None)

    def _blocks_after(self, start: Position, stream: ByteStream) -> Iterator[bytes]:
        """The blocks from ``start`` on, after comparing the checksum of what lies before."""
        missing, checksum = start.offset, 0
        for block in unpacked_blocks(stream, detect_compression(stream)):
            skipped = block[:missing]
            missing -= len(skipped)
            checksum = zlib.crc32(skipped, checksum)
            if skipped and not missing and checksum != start.checksum:
                raise self.changed()
            if len(block) > len(skipped):
                yield block[len(skipped) :]
        if missing:
            raise self.changed()


def is_pipe(path: str) -> bool:
    """True if a path can be read only once, from its beginning."""
    return path == STANDARD_INPUT or stat.S_ISFIFO(mode := file_status(path).st_mode) or stat.S_ISCHR(mode)


def split_documents(data: bytes, text_format: TextFormat) -> tuple[list[tuple[int, bytes]], int]:
    """Split a chunk: its documents, each with the line on which it begins (from 0), and the number of lines.

    Blank lines are no documents. Byte-order marks are removed from every line, as files may have been concatenated.
    """
    lines = [line.removeprefix(b"\xef\xbb\xbf") for line in data.splitlines()]
    if text_format == "jsonl":
        return [(number, line) for number, line in enumerate(lines) if line and not line.isspace()], len(lines)
    found: list[tuple[int, bytes]] = []
    first = 0
    for number in range(len(lines) + 1):
        if number == len(lines) or not lines[number].strip():
            if number > first:
                found.append((first, b"\n".join(lines[first:number])))
            first = number + 1
    return found, len(lines)


class _Cutter:
    """Splits a stream of blocks between documents, into pieces of about ``CHUNK_BYTES`` or one long document each."""

    def __init__(self, blocks: Iterator[bytes], text_format: TextFormat, longest: int, start: Position) -> None:
        self.offset, self.checksum = start.offset, start.checksum  # of the text up to the end of the last piece
        self._blocks = blocks
        self._end, self._open_end = _ENDS[text_format]
        self._longest = longest
        self._buffer = bytearray()  # always begins with a document

    def pieces(self) -> Iterator[tuple[bytes, int]]:
        """Yields (whole documents, 0), or (no bytes, number of lines) for a skipped document that is too long."""
        searched = 0  # where the next end of a document may begin
        for block in self._blocks:
            self._buffer += block
            if len(self._buffer) < CHUNK_BYTES:
                continue
            if end := self._last_end(searched):
                yield self._take(end), 0
            elif len(self._buffer) > self._longest:
                yield b"", self._skip_document()
                searched = 0
                continue
            searched = self._undecided()
        if self._buffer:
            yield self._take(len(self._buffer)), 0

    def _last_end(self, searched: int) -> int:
        """End of the last whole document in the buffer; 0 if none ends after ``searched``."""
        if self._end is _LINE:  # faster than the pattern
            line_feed, carriage_return = self._buffer.rfind(b"\n", searched), self._buffer.rfind(b"\r", searched, -1)
            return max(line_feed, carriage_return) + 1
        return max((match.end() for match in self._end.finditer(self._buffer, searched)), default=0)

    def _undecided(self) -> int:
        """Position from which more input is needed to tell whether a document has ended."""
        match = self._open_end.search(self._buffer, max(len(self._buffer) - _LONGEST_END, 0))
        return match.start() if match else len(self._buffer)

    def _take(self, end: int) -> bytes:
        with memoryview(self._buffer) as view:
            data = bytes(view[:end])
        del self._buffer[:end]
        self.offset += end
        self.checksum = zlib.crc32(data, self.checksum)
        return data

    def _skip_document(self) -> int:
        """Skip the first document of the buffer; returns the number of its lines."""
        num_lines = 0
        while True:
            num_lines += _count_line_ends(self._take(self._undecided()))
            block = next(self._blocks, b"")
            self._buffer += block
            if not block:
                return num_lines + _count_line_ends(self._take(len(self._buffer))) + 1
            if match := self._end.search(self._buffer):
                return num_lines + _count_line_ends(self._take(match.end()))


def _count_line_ends(data: bytes) -> int:
    return len(_LINE.findall(data + b" "))
