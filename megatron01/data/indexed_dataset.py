"""Token files: a flat ``.bin`` of token ids and an ``.idx`` that cuts it into sequences and documents.

The format is Megatron-LM's memory-mapped one ("MMIDIDX", version 1, little-endian), unchanged since 2020:

    ========  ==============  =====================================================================
    bytes     type            meaning
    ========  ==============  =====================================================================
    9         magic           ``MMIDIDX\\0\\0``
    8         uint64          version, 1
    1         uint8           type of the tokens in ``.bin``, see ``TOKEN_DTYPES``
    8         uint64          S, number of sequences (sentences for BERT, documents for GPT)
    8         uint64          D, length of the document index = number of documents + 1
    4 S       int32           tokens in each sequence
    8 S       int64           byte at which each sequence starts in ``.bin``; cumulative from 0
    8 D       int64           document k holds sequences [d[k], d[k+1]); d[0] = 0, d[-1] = S
    ========  ==============  =====================================================================
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from megatron01.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D: 34 bytes
OLD_MAGIC = b"TNTIDX\x00\x00"

TOKEN_DTYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
"""Code in the header -> type of the tokens. Codes 6 and 7 are floats, whose order differs between forks: no tokens."""

_ROWS_PER_CHECK = 1 << 22  # sequences whose pointers are checked at a time: bounds the memory of opening a large file


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The type in which Megatron-LM stores tokens of a vocabulary (its size before padding)."""
    return np.uint16 if vocab_size < 65500 else np.int32


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """The file of tokens that belongs to a prefix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """The index file that belongs to a prefix."""
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """Sequences of tokens in a memory-mapped ``.bin``/``.idx`` pair; nothing is copied and nothing is written.

    Attributes:
        prefix: path of the pair without extension.
        sizes: int32[S], tokens in each sequence.
        documents: int64[D], document k holds sequences ``documents[k]`` to ``documents[k + 1] - 1``.
        starts: int64[S], byte at which each sequence starts in ``.bin``.
        tokens: every token of the file, flat, in the type of the file.

    Raises:
        UserError: if a file of the pair is missing, of another format, cut short, or does not match the other.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        _check_pair_exists(self.prefix)
        index_file, token_file = idx_path(prefix), bin_path(prefix)
        self._index = _map_bytes(index_file)
        dtype, num_sequences, document_index_length = _read_header(index_file, self._index)
        starts_at = HEADER.size + 4 * num_sequences
        documents_at = starts_at + 8 * num_sequences
        end = documents_at + 8 * document_index_length
        _check_index_size(index_file, self._index.size, end, num_sequences)
        self.sizes: NDArray[np.int32] = self._index[HEADER.size : starts_at].view("<i4")
        self.starts: NDArray[np.int64] = self._index[starts_at:documents_at].view("<i8")
        self.documents: NDArray[np.int64] = self._index[documents_at:end].view("<i8")
        token_bytes = _map_bytes(token_file)
        self._check(index_file, token_file, token_bytes.size, np.dtype(dtype).itemsize)
        self.tokens: NDArray[np.integer] = token_bytes.view(np.dtype(dtype).newbyteorder("<"))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.integer]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.integer]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.integer] | list[NDArray[np.integer]]:
        """The tokens of one sequence, or a list of those of several; read-only views into the file.

        Negative numbers count from the end, as everywhere in Python.
        """
        if isinstance(index, slice):
            return [self.read(sequence) for sequence in range(*index.indices(len(self)))]
        return self.read(index + len(self) if index < 0 else index)

    def __iter__(self) -> Iterator[NDArray[np.integer]]:
        return (self.read(index) for index in range(len(self)))

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)  # another process maps the files itself

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """Type of the tokens."""
        return self.tokens.dtype

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.documents) - 1

    def first_token(self, sequence: int) -> int:
        """Position of a sequence's first token in ``tokens``."""
        return int(self.starts[sequence]) // self.dtype.itemsize

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[np.integer]:
        """``length`` tokens of a sequence from ``offset`` on, or all that follow; a read-only view into the file."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {self.prefix}, which has {len(self)}")
        size = int(self.sizes[sequence])
        stop = size if length is None else offset + length
        assert 0 <= offset <= stop <= size, f"tokens [{offset}, {stop}) of a sequence of {size}"
        start = self.first_token(sequence)
        return self.tokens[start + offset : start + stop]

    @cached_property
    def layout_fingerprint(self) -> str:
        """Hash of everything but the token values: how the file is cut into sequences and documents.

        It depends neither on the file's place nor on its time stamps, so that copies of a file share it.
        """
        digest = hashlib.sha256(self._index[: HEADER.size + 4 * len(self)].data)
        digest.update(self._index[self._index.size - 8 * len(self.documents) :].data)
        return digest.hexdigest()

    def _check(self, index_file: Path, token_file: Path, num_bytes: int, itemsize: int) -> None:
        """Lengths, pointers and documents agree with each other and with the size of ``.bin``."""
        expected_start, or_more = 0, ""
        for first in range(0, len(self), _ROWS_PER_CHECK):
            sizes = self.sizes[first : first + _ROWS_PER_CHECK].astype(np.int64)
            starts = self.starts[first : first + _ROWS_PER_CHECK]
            if sizes.min() < 0:
                shortest = first + int(sizes.argmin())
                raise UserError(f"{index_file} is damaged: sequence {shortest} has a negative length; copy it again")
            ends = expected_start + np.cumsum(sizes * itemsize)
            wrong = np.flatnonzero(starts != ends - sizes * itemsize)
            if wrong.size:
                raise UserError(
                    f"{index_file} is damaged: sequence {first + int(wrong[0])} starts at byte {starts[wrong[0]]},"
                    f" expected {ends[wrong[0]] - sizes[wrong[0]] * itemsize}; preprocess or copy the data again"
                )
            expected_start = int(ends[-1])
            if expected_start > num_bytes and first + len(sizes) < len(self):
                or_more = " or more"  # whatever follows, the other file is too short
                break
        documents = self.documents
        if documents[0] != 0 or documents[-1] != len(self) or not _is_rising(documents):
            raise UserError(
                f"{index_file} is damaged: its document index runs from {documents[0]} to {documents[-1]}, expected to"
                f" rise from 0 to {len(self)}; preprocess or copy the data again"
            )
        if num_bytes != expected_start:
            raise UserError(
                f"{token_file} has {num_bytes} bytes, but {index_file.name} describes {expected_start}{or_more}: a copy"
                " was cut short or the files are of two different runs; copy or preprocess the pair again"
            )


def _check_pair_exists(prefix: str) -> None:
    if not prefix:
        raise UserError("data_path is empty; expected the path of a .bin/.idx pair without extension")
    missing = [path for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if not missing:
        return
    path = Path(prefix)
    if path.suffix in (".bin", ".idx") and path.is_file():
        raise UserError(f"{prefix} is one file of a pair; leave out the extension: {path.with_suffix('')}")
    hint = "check the path" if len(missing) == 2 else "its partner exists: finish copying or preprocess the data again"
    raise UserError(f"no file {missing[0]}; expected the path of a .bin/.idx pair without extension; {hint}")


def _map_bytes(path: Path) -> NDArray[np.uint8]:
    """The file's bytes, memory-mapped and read-only (an empty file cannot be mapped)."""
    try:
        if path.stat().st_size == 0:
            empty = np.empty(0, dtype=np.uint8)
            empty.flags.writeable = False
            return empty
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _is_rising(values: NDArray[np.int64]) -> bool:
    """Whether no value is smaller than the one before it."""
    parts = (values[first : first + _ROWS_PER_CHECK + 1] for first in range(0, len(values), _ROWS_PER_CHECK))
    return all((part[1:] >= part[:-1]).all() for part in parts)


def _read_header(path: Path, index: NDArray[np.uint8]) -> tuple[type[np.integer], int, int]:
    """Token type, number of sequences and length of the document index."""
    start = index[: HEADER.size].tobytes()
    if start.startswith(OLD_MAGIC):
        raise UserError(
            f"{path} is in the old TNTIDX format (dataset-impl lazy or cached), which is not read;"
            " preprocess the text again or convert it to the mmap format with the program that wrote it"
        )
    if not start.startswith(MAGIC):
        raise UserError(f"{path} is not a Megatron index: it starts with {start[:9]!r}, expected {MAGIC!r}")
    if len(start) < HEADER.size:
        raise UserError(f"{path} has {len(start)} bytes, fewer than its header of {HEADER.size}; copy it again")
    _, version, code, num_sequences, document_index_length = HEADER.unpack(start)
    if version != VERSION:
        raise UserError(f"{path} is of version {version}; expected {VERSION}")
    if code not in TOKEN_DTYPES:
        kind = "floating-point values, not tokens" if code in (6, 7) else "an unknown type"
        raise UserError(f"{path} says that its tokens have type code {code}, {kind}; expected one of {[*TOKEN_DTYPES]}")
    if document_index_length == 0:
        raise UserError(f"{path} has an empty document index; expected at least the entry 0; preprocess the data again")
    return TOKEN_DTYPES[code], num_sequences, document_index_length


def _check_index_size(path: Path, size: int, expected: int, num_sequences: int) -> None:
    if size == expected:
        return
    if num_sequences and size == expected + num_sequences:
        raise UserError(f"{path} carries a mode per sequence (multimodal data), which is not read; expected text only")
    raise UserError(f"{path} has {size} bytes, but its header describes {expected}; copy or preprocess it again")
