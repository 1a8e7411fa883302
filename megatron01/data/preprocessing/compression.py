"""Unpacking of compressed byte streams, piece by piece, so that damage is found and memory stays small.

The decompressors of the standard library are driven directly: its file objects take whatever follows the first
stream of an ``.xz`` or ``.bz2`` file for its end if it is damaged, and documents would be lost without a word.
"""

from __future__ import annotations

import bz2
import lzma
import re
import sys
import zlib
from collections.abc import Iterator
from typing import IO, Literal, Protocol

from megatron01.errors import UserError

Compression = Literal["gzip", "xz", "bzip2", "zstd"]

SUFFIXES: dict[str, Compression] = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd", ".zstd": "zstd"}
BLOCK_BYTES = 1 << 18  # read, and unpacked, at a time
_MAGIC: dict[Compression, re.Pattern[bytes]] = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),  # begins with a block, or ends at once
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a frame of data, or one to be skipped
}


class ByteStream:
    """The bytes of a file or pipe, with a look ahead.

    Attributes:
        name: for messages.
        position: bytes handed out so far.
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self.position = 0
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


def detect_compression(stream: ByteStream) -> Compression | None:
    """How a stream is compressed, by its first bytes; None if it is not.

    Raises:
        UserError: if the stream's name says otherwise.
    """
    head = stream.peek(16)
    found = next((kind for kind, magic in _MAGIC.items() if magic.match(head)), None)
    expected = next((kind for suffix, kind in SUFFIXES.items() if stream.name.endswith(suffix)), None)
    if expected not in (None, found):
        raise UserError(
            f"{stream.name} is damaged, cut short or misnamed: it does not begin as a {expected} file does; copy it"
            " again, or rename it"
        )
    return found


def unpacked_blocks(stream: ByteStream, compression: Compression | None) -> Iterator[bytes]:
    """The content of a stream in blocks of about ``BLOCK_BYTES``; compressed streams may follow one another.

    Raises:
        UserError: if it is damaged or ends too early.
    """
    if compression is None:
        while block := stream.read():
            yield block
        return
    errors = _errors(compression)
    packed = stream.read()
    while packed:
        decompressor = _new_decompressor(compression)
        while not decompressor.eof:
            if decompressor.needs_input and not packed and not (packed := stream.read()):
                raise _damaged(stream, "it ends in the middle")
            try:
                block = decompressor.decompress(packed, BLOCK_BYTES)
            except errors as error:
                raise _damaged(stream, str(error)) from error
            packed = b""
            if block:
                yield block
        packed = decompressor.unused_data.lstrip(b"\0")  # zeros fill up xz files and tapes
        while not packed and (following := stream.read()):
            packed = following.lstrip(b"\0")


def _damaged(stream: ByteStream, reason: str) -> UserError:
    return UserError(f"{stream.name} is damaged or cut short ({reason}); copy it again")


class _Decompressor(Protocol):
    """What the decompressors of bz2, lzma and zstd have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _GzipDecompressor:
    """zlib's decompressor for one gzip member, in the manner of the others."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


def _new_decompressor(compression: Compression) -> _Decompressor:
    if compression == "gzip":
        return _GzipDecompressor()
    if compression == "xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ)
    if compression == "bzip2":
        return bz2.BZ2Decompressor()
    return _zstd().ZstdDecompressor()


def _errors(compression: Compression) -> tuple[type[Exception], ...]:
    """What the decompressor raises for damaged data."""
    return (_zstd().ZstdError,) if compression == "zstd" else (zlib.error, lzma.LZMAError, OSError)


def _zstd():  # type: ignore[no-untyped-def]  # a module
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd  # the same module for older versions of Python
    except ImportError as error:
        raise UserError("zstd files need an optional package: pip install 'megatron01[data]'") from error
    return zstd
