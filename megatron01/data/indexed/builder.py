"""Writing of ``.bin``/``.idx`` pairs (format: ``megatron01.data.indexed.dataset``), as a stream and atomically."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron01.data.indexed.dataset import HEADER, MAGIC, TOKEN_DTYPES, VERSION, bin_path, idx_path
from megatron01.errors import UserError
from megatron01.files import flush_to_disk, sync_folder, temporary_path

_ROWS_PER_WRITE = 1 << 20


class IndexedDatasetBuilder:
    """Writes a ``.bin``/``.idx`` pair that appears under its name only when it is complete.

    Tokens and lengths go to temporary files beside the result, so memory does not grow with the data. Use it as a
    context manager: an error inside leaves no file behind.

    Args:
        prefix: path of the pair without extension; its folder is created.
        dtype: type of the stored tokens, one of ``TOKEN_DTYPES``; see ``token_dtype``.

    Raises:
        UserError: if the folder cannot be written.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: type[np.integer]) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, stored in TOKEN_DTYPES.items() if np.dtype(stored) == np.dtype(dtype)]
        if not codes:
            raise ValueError(f"tokens of type {np.dtype(dtype)} cannot be stored; expected one of {TOKEN_DTYPES}")
        self._code = codes[0]
        folder = bin_path(prefix).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._tokens = _temporary(bin_path(prefix))
            self._sizes = _spool(folder)  # int32, tokens in each sequence
            self._documents = _spool(folder)  # int64, sequences up to each document's end
        except OSError as error:
            raise UserError(f"cannot write {prefix}.bin: {error.strerror}; check output_prefix") from error
        self._documents.write(np.int64(0).tobytes())
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0

    def add_sentence(self, tokens: ArrayLike) -> None:
        """Append one sequence of token ids to the current document."""
        values = np.asarray(tokens)
        if values.size == 0:
            values = values.astype(np.int64)
        self._add_sequences(values, np.array([values.size], dtype=np.int64))

    def end_document(self) -> None:
        """End the current document, which may hold no sequence."""
        self._documents.write(np.int64(self.num_sequences).tobytes())
        self.num_documents += 1

    def add_documents(
        self, tokens: NDArray[np.integer], sizes: NDArray[np.integer], sentences: NDArray[np.integer]
    ) -> None:
        """Append many whole documents at once.

        Args:
            tokens: all token ids, one sequence after the other.
            sizes: tokens in each sequence.
            sentences: sequences in each document.
        """
        assert sizes.sum() == tokens.size and sentences.sum() == sizes.size
        ends = self.num_sequences + np.cumsum(sentences, dtype=np.int64)
        self._add_sequences(tokens, sizes)
        self._documents.write(ends.astype("<i8").tobytes())
        self.num_documents += len(sentences)

    def finalize(self) -> None:
        """Write the index and give both files their names; a document that was begun is ended first."""
        if self.num_sequences != self._last_document_end():
            self.end_document()
        with _temporary(idx_path(self.prefix)) as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1))
            _copy(self._sizes, index)
            self._write_starts(index)
            _copy(self._documents, index)
            flush_to_disk(index)
        flush_to_disk(self._tokens)
        self._tokens.close()
        # The index goes last and an old one first: whatever happens in between, no index ever describes other tokens.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._tokens.name, bin_path(self.prefix))
        os.replace(index.name, idx_path(self.prefix))
        sync_folder(bin_path(self.prefix).parent)
        self._close_spools()

    def abort(self) -> None:
        """Remove the temporary files; an older pair under the same name stays as it is."""
        self._tokens.close()
        self._close_spools()
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            temporary_path(path).unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finalize()
        except BaseException:
            self.abort()
            raise

    def _add_sequences(self, tokens: NDArray[np.integer], sizes: NDArray[np.integer]) -> None:
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens have shape {tokens.shape} and type {tokens.dtype}; expected a flat integer array")
        if tokens.size:
            limits = np.iinfo(self.dtype)
            least, most = int(tokens.min()), int(tokens.max())
            if least < limits.min or most > limits.max:
                raise ValueError(f"token ids {least} to {most} do not fit into {self.dtype} of {self.prefix}.bin")
        if sizes.size and int(sizes.max()) > np.iinfo(np.int32).max:
            raise ValueError(f"a sequence of {int(sizes.max())} tokens is too long for {self.prefix}.idx")
        self._tokens.write(tokens.astype(self.dtype).tobytes())
        self._sizes.write(sizes.astype("<i4").tobytes())
        self.num_sequences += sizes.size
        self.num_tokens += tokens.size

    def _last_document_end(self) -> int:
        self._documents.seek(-8, os.SEEK_END)
        return int(np.frombuffer(self._documents.read(8), dtype="<i8")[0])

    def _write_starts(self, index: IO[bytes]) -> None:
        """The byte at which each sequence starts, summed in 64 bits from the spooled lengths."""
        self._sizes.seek(0)
        start = 0
        while chunk := self._sizes.read(4 * _ROWS_PER_WRITE):
            num_bytes = np.frombuffer(chunk, dtype="<i4").astype(np.int64) * self.dtype.itemsize
            ends = start + np.cumsum(num_bytes)
            index.write((ends - num_bytes).astype("<i8").tobytes())
            start = int(ends[-1])

    def _close_spools(self) -> None:
        self._sizes.close()
        self._documents.close()


def _temporary(path: Path) -> IO[bytes]:
    return open(temporary_path(path), "wb")


def _spool(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    source.seek(0)
    while chunk := source.read(8 * _ROWS_PER_WRITE):
        target.write(chunk)
