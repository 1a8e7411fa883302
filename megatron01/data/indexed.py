"""Token files: a flat ``.bin`` of token ids and an ``.idx`` that cuts it into sequences and documents; their origin.

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

The origin, ``{prefix}.json``, is written by preprocessing, joined by merging, and compared by training (the tokenizer)
and ``megatron01 data verify`` (everything). A pair of another program has none, which is no error. Its fields:

    tokenizer         type, file, vocab_size and fingerprint
    split_sentences   whether a sequence is a sentence or a document
    append_eod        whether documents end with the end-of-document token
    documents, sequences, tokens, unknown_tokens    counts
    left_out          documents of the input that could not be used, by reason
    content           checksums: ``tokens_crc32`` of .bin, ``layout_sha256`` of lengths and documents
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron01.data.tokenizers import Tokenizer
from megatron01.errors import UserError
from megatron01.utils import files

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
    """The file of tokens."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """The index file."""
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """Sequences of tokens in a memory-mapped ``.bin``/``.idx`` pair; nothing is copied and nothing is written.

    Raises UserError if a file of the pair is missing, of another format, cut short, or does not match the other.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        _check_pair_exists(self.prefix)
        self._index = _map_bytes(idx_path(prefix))
        dtype, num_sequences = _read_header(idx_path(prefix), self._index)
        starts_at = HEADER.size + 4 * num_sequences
        documents_at = starts_at + 8 * num_sequences
        self.sizes: NDArray[np.int32] = self._index[HEADER.size : starts_at].view("<i4")  # [S], tokens in each sequence
        self.starts: NDArray[np.int64] = self._index[starts_at:documents_at].view("<i8")  # [S], byte in ``.bin``
        # [D], document k holds sequences ``documents[k]`` to ``documents[k + 1] - 1``
        self.documents: NDArray[np.int64] = self._index[documents_at:].view("<i8")
        token_bytes = _map_bytes(bin_path(prefix))
        self._check(token_bytes.size, dtype.itemsize)
        self.tokens: NDArray[np.integer] = token_bytes.view(dtype)  # all of the file, flat, in its type

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.integer]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.integer]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.integer] | list[NDArray[np.integer]]:
        """The tokens of one sequence, or a list of those of several; read-only views into the file."""
        if isinstance(index, slice):
            return [self[sequence] for sequence in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        start = int(self.starts[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[index])]

    def __iter__(self) -> Iterator[NDArray[np.integer]]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)  # another process maps the files itself

    @property
    def dtype(self) -> np.dtype[np.integer]:
        return self.tokens.dtype

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.documents) - 1

    @cached_property
    def layout_fingerprint(self) -> str:
        """Hash of how the file is cut into sequences and documents; independent of path and time stamps."""
        digest = hashlib.sha256(self._index[: HEADER.size + 4 * len(self)].data)
        digest.update(self._index[self._index.size - 8 * len(self.documents) :].data)
        return digest.hexdigest()

    def _check(self, num_bytes: int, itemsize: int) -> None:
        """Check that lengths, pointers and documents agree with each other and with the ``num_bytes`` of ``.bin``."""
        index_file, token_file = idx_path(self.prefix), bin_path(self.prefix)
        expected_start = 0
        for first in range(0, len(self), _ROWS_PER_CHECK):
            sizes = self.sizes[first : first + _ROWS_PER_CHECK].astype(np.int64)
            starts = self.starts[first : first + _ROWS_PER_CHECK]
            ends = expected_start + np.cumsum(sizes * itemsize)
            expected = ends - sizes * itemsize
            is_wrong = (sizes < 0) | (starts != expected)
            if is_wrong.any():
                wrong = int(is_wrong.argmax())
                raise UserError(
                    f"{index_file} is damaged: sequence {first + wrong} has {sizes[wrong]} tokens and starts at byte"
                    f" {starts[wrong]}, expected 0 or more and byte {expected[wrong]}; copy or preprocess it again"
                )
            expected_start = int(ends[-1])
        documents = self.documents
        pieces = (documents[first : first + _ROWS_PER_CHECK + 1] for first in range(0, len(documents), _ROWS_PER_CHECK))
        is_rising = all((piece[1:] >= piece[:-1]).all() for piece in pieces)
        if documents[0] != 0 or documents[-1] != len(self) or not is_rising:
            raise UserError(
                f"{index_file} is damaged: its document index runs from {documents[0]} to {documents[-1]}, expected to"
                f" rise from 0 to {len(self)}; preprocess or copy the data again"
            )
        if num_bytes != expected_start:
            raise UserError(
                f"{token_file} has {num_bytes} bytes, but {index_file.name} describes {expected_start}: a copy"
                " was cut short or the files are of two different runs; copy or preprocess the pair again"
            )


def _check_pair_exists(prefix: str) -> None:
    missing = [path for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if not missing:
        return
    if prefix.endswith((".bin", ".idx")) and os.path.isfile(prefix):
        raise UserError(f"{prefix} is one file of a pair; leave out the extension: {prefix[:-4]}")
    hint = "check the path" if len(missing) == 2 else "its partner exists: finish copying or preprocess the data again"
    raise UserError(f"no file {missing[0]}; expected the path of a .bin/.idx pair without extension; {hint}")


def _map_bytes(path: Path) -> NDArray[np.uint8]:
    """The file's bytes, memory-mapped and read-only (an empty file cannot be mapped)."""
    try:
        if path.stat().st_size == 0:
            return np.frombuffer(b"", dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        files.refuse_too_many_open_files(error, path)
        if error.errno == errno.ENODEV:  # of mmap; from None, as no later attempt succeeds
            raise UserError(
                f"{path} is on a file system that maps no files into memory (mounted with direct_io, say); copy the"
                " files to another"
            ) from None
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _read_header(path: Path, index: NDArray[np.uint8]) -> tuple[np.dtype[np.integer], int]:
    """Type of the tokens and number of sequences."""
    start = index[: HEADER.size].tobytes()
    if start.startswith(OLD_MAGIC):
        raise UserError(
            f"{path} is in the old TNTIDX format (dataset-impl lazy or cached), which is not read;"
            " preprocess the text again or convert it to the mmap format with the program that wrote it"
        )
    if not start.startswith(MAGIC) or len(start) < HEADER.size:
        raise UserError(
            f"{path} is not a Megatron index or is cut short: it has {index.size} bytes and starts with {start[:9]!r},"
            f" expected {HEADER.size} or more that start with {MAGIC!r}; copy it again"
        )
    _, version, code, num_sequences, document_index_length = HEADER.unpack(start)
    if version != VERSION:
        raise UserError(f"{path} is of version {version}; expected {VERSION}")
    if code not in TOKEN_DTYPES:
        kind = "floating-point values, not tokens" if code in (6, 7) else "an unknown type"
        raise UserError(f"{path} says that its tokens have type code {code}, {kind}; expected one of {[*TOKEN_DTYPES]}")
    if document_index_length == 0:
        raise UserError(f"{path} has an empty document index; expected at least the entry 0; preprocess the data again")
    expected = HEADER.size + 12 * num_sequences + 8 * document_index_length
    if num_sequences and index.size == expected + num_sequences:
        raise UserError(f"{path} carries a mode per sequence (multimodal data), which is not read; expected text only")
    if index.size != expected:
        advice = "copy or preprocess it again"
        raise UserError(f"{path} has {index.size} bytes, but its header describes {expected}; {advice}")
    return np.dtype(TOKEN_DTYPES[code]).newbyteorder("<"), num_sequences


_ROWS_PER_WRITE = 1 << 20


@dataclass
class BuilderState:
    """How much of a pair is written; plain numbers, for JSON."""

    num_sequences: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    checksum: int = 0  # CRC-32 of ``.bin`` so far


class IndexedDatasetBuilder:
    """Writes a ``.bin``/``.idx`` pair that appears under its name only when it is complete.

    Tokens, lengths and documents go to ``{prefix}.bin.partial``, ``.sizes.partial`` and ``.documents.partial``, so
    memory does not grow with the data. Use it as a context manager: an error inside removes these files, unless
    ``checkpoint`` was called; then they stay, and a builder with ``resume_from`` continues from the checkpoint. Raises
    UserError if the folder cannot be written, if another process is writing the same pair, if ``{prefix}.json`` is not
    the origin of an older pair, or if the files of ``resume_from`` are missing or hold less than it says. Writing
    raises it when the disk is full.

    Args:
        prefix: path of the pair without extension; its folder is created.
        dtype: type of the stored tokens, one of ``TOKEN_DTYPES``; see ``token_dtype``.
        resume_from: what an earlier builder's ``checkpoint`` returned. Whatever it wrote after that is dropped.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: type[np.integer] | np.dtype[np.integer],
        *,
        resume_from: BuilderState | None = None,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, stored in TOKEN_DTYPES.items() if np.dtype(stored) == self.dtype]
        if not codes:
            raise ValueError(f"tokens of type {np.dtype(dtype)} cannot be stored; expected one of {TOKEN_DTYPES}")
        self._code = codes[0]
        read_origin(self.prefix)  # refuses what is none, such as a corpus, as ``finalize`` removes an older origin
        self._keep_partial = resume_from is not None
        self.written = state = BuilderState() if resume_from is None else replace(resume_from)  # so far
        # int32, tokens in each sequence; token ids; int64, first sequence of each document and the end of the last.
        # The lock of the first file keeps other processes away; it is closed last.
        num_bytes = {
            "sizes": 4 * state.num_sequences,
            "bin": self.dtype.itemsize * state.num_tokens,
            "documents": 8 * (state.num_documents + 1),
        }
        self._files: dict[str, IO[bytes]] = {}
        with contextlib.ExitStack() as opened, self._writing():
            bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
            for name in num_bytes:
                self._files[name] = opened.enter_context(self._open(name, num_bytes[name]))
            opened.pop_all()  # ``suspend`` closes them from here on

    def add_sentence(self, tokens: ArrayLike) -> None:
        """Append one sequence of token ids, integers[n], to the current document."""
        values = np.asarray(tokens)
        self._add(values if values.size else values.astype(np.int64), np.array([values.size]), [])

    def end_document(self) -> None:
        """End the current document, which may hold no sequence."""
        self._add(np.empty(0, np.int64), np.empty(0, np.int64), [self.written.num_sequences])

    def add_documents(
        self, tokens: NDArray[np.integer], sizes: NDArray[np.integer], sentences: NDArray[np.integer]
    ) -> None:
        """Append many whole documents at once: all token ids, tokens in each sequence, sequences in each document."""
        assert sizes.sum() == tokens.size and sentences.sum() == sizes.size
        self._add(tokens, sizes, self.written.num_sequences + np.cumsum(sentences, dtype=np.int64))

    def checkpoint(self) -> BuilderState:
        """Flush everything added so far to disk; ``resume_from`` the result continues from here."""
        with self._writing():
            for file in self._files.values():
                files.flush_to_disk(file)
            if not self._keep_partial:
                files.sync_folder(bin_path(self.prefix).parent)
        self._keep_partial = True
        return replace(self.written)

    def finalize(self) -> None:
        """Write the index and rename both files to their final names; an open document is ended first.

        The origin of an older pair is removed.
        """
        sizes, documents = self._files["sizes"], self._files["documents"]
        with self._writing():
            documents.seek(-8, os.SEEK_END)
            if self.written.num_sequences != int.from_bytes(documents.read(8), "little"):
                self.end_document()
            with open(self._partial("idx"), "wb") as index:
                index.write(
                    HEADER.pack(MAGIC, VERSION, self._code, self.written.num_sequences, self.written.num_documents + 1)
                )
                sizes.seek(0)
                shutil.copyfileobj(sizes, index)
                self._write_starts(index)
                documents.seek(0)
                shutil.copyfileobj(documents, index)
                files.flush_to_disk(index)
            files.flush_to_disk(self._files["bin"])
            with files.writing(origin_path(self.prefix), "check what is there"):
                origin_path(self.prefix).unlink(missing_ok=True)
            # An old index is removed first, and the new one renamed last, so that no index ever describes other tokens.
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._partial("bin"), bin_path(self.prefix))
            os.replace(self._partial("idx"), idx_path(self.prefix))
            files.sync_folder(bin_path(self.prefix).parent)
        self.abort()  # removes the lengths and documents, which are in the index now

    def suspend(self) -> None:
        """Stop writing but keep the partial files, for a builder with ``resume_from``."""
        for file in reversed(self._files.values()):
            with contextlib.suppress(OSError):  # a full disk: checkpointed data was flushed before
                file.close()

    def abort(self) -> None:
        """Stop writing and remove the partial files; an older pair under the same name stays as it is."""
        if not self._files["sizes"].closed:  # else the lock is released, and the files may be another builder's
            for name in ("idx", *reversed(self._files)):
                self._partial(name).unlink(missing_ok=True)
        self.suspend()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finalize()
        finally:
            if self._keep_partial:
                self.suspend()
            else:
                self.abort()

    def _partial(self, name: str) -> Path:
        return Path(f"{self.prefix}.{name}.partial")

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return files.writing(f"{self.prefix}.bin", "check its folder and the space left there")

    def _open(self, name: str, num_bytes: int) -> IO[bytes]:
        """Open a partial file, truncated to ``num_bytes``; without a builder to resume it is new, with zeros."""
        path, is_new = self._partial(name), not self._keep_partial
        if name == "bin" and not is_new and not path.exists() and not idx_path(self.prefix).exists():
            with contextlib.suppress(FileNotFoundError):  # of a process that was killed between the two renamings
                os.replace(bin_path(self.prefix), path)
        try:
            file = files.open_locked(path, create=is_new)
        except FileNotFoundError as error:
            raise UserError(f"no file {error.filename}, which is needed to resume; start again") from error
        except BlockingIOError as error:
            raise UserError(
                f"another process is writing {self.prefix}.bin; wait until it has finished, or choose another output"
            ) from error
        present = os.fstat(file.fileno()).st_size
        if is_new:
            file.truncate(0)  # of a killed run; then extended by zeros, as the document index begins
        elif present < num_bytes:
            file.close()
            raise UserError(
                f"{path} has {present} bytes, but {num_bytes} were written before the interruption; delete the .partial"
                " files and start again"
            )
        file.truncate(num_bytes)
        file.seek(0, os.SEEK_END)
        return file

    def _add(self, tokens: NDArray[np.integer], sizes: NDArray[np.integer], ends: ArrayLike) -> None:
        """Append sequences, and end documents after ``ends`` sequences of the whole file."""
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens have shape {tokens.shape} and type {tokens.dtype}; expected a flat integer array")
        if tokens.size and tokens.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            least, most = int(tokens.min()), int(tokens.max())
            if least < limits.min or most > limits.max:
                raise ValueError(f"token ids {least} to {most} do not fit into {self.dtype} of {self.prefix}.bin")
        if sizes.size and int(sizes.max()) > np.iinfo(np.int32).max:
            raise ValueError(f"a sequence of {int(sizes.max())} tokens is too long for {self.prefix}.idx")
        stored = {
            "bin": np.ascontiguousarray(tokens, self.dtype),
            "sizes": np.ascontiguousarray(sizes, "<i4"),
            "documents": np.ascontiguousarray(ends, "<i8"),
        }
        with self._writing():
            for name, values in stored.items():
                self._files[name].write(values.data)
        self.written.checksum = zlib.crc32(stored["bin"].data, self.written.checksum)
        self.written.num_tokens += tokens.size
        self.written.num_sequences += sizes.size
        self.written.num_documents += stored["documents"].size

    def _write_starts(self, index: IO[bytes]) -> None:
        """Write the byte at which each sequence starts: the cumulative lengths, in int64."""
        self._files["sizes"].seek(0)
        start = 0
        while chunk := self._files["sizes"].read(4 * _ROWS_PER_WRITE):
            num_bytes = np.frombuffer(chunk, dtype="<i4").astype(np.int64) * self.dtype.itemsize
            ends = start + np.cumsum(num_bytes)
            index.write((ends - num_bytes).astype("<i8").tobytes())
            start = int(ends[-1])


Origin = dict[str, Any]

_MUST_AGREE = ("split_sentences", "append_eod")
_LARGEST_ORIGIN = 1 << 24  # bytes; a corpus may have the name of an origin, and not fit into memory
_ADDED_UP = ("documents", "sequences", "tokens", "unknown_tokens")


def origin_path(prefix: str) -> Path:
    """The JSON file with the origin of a pair."""
    return Path(f"{prefix}.json")


def read_origin(prefix: str) -> Origin | None:
    """The origin of a pair, None without a record. Raises UserError if the file is damaged, or no origin."""
    path = origin_path(prefix)
    if not path.is_file():
        return None
    advice = "move it, or delete it if it is a damaged record, or choose another name for the pair"
    if path.stat().st_size > _LARGEST_ORIGIN:
        raise UserError(f"{path} is too large for what is recorded about a pair of token files; {advice}")
    origin = files.read_json_object(path, expected=f"what is recorded about a pair of token files; {advice}")
    tokenizer = origin.get("tokenizer")
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("fingerprint"), str):
        raise UserError(f"{path} is damaged or something else (it has no fingerprint of a tokenizer); {advice}")
    left_out = origin.get("left_out", {})
    counts = [origin.get(name, 0) for name in _ADDED_UP]
    if not isinstance(left_out, dict) or any(type(count) is not int for count in (*counts, *left_out.values())):
        raise UserError(f"{path} is damaged (a count in it is not a whole number); {advice}")
    return origin


def write_origin(prefix: str, origin: Origin) -> None:
    """Atomic write of the origin file. Raises UserError if it cannot be written."""
    with files.writing(origin_path(prefix), "check its folder and the space left there"):
        files.write_atomically(origin_path(prefix), json.dumps(origin, indent=1, sort_keys=True) + "\n")


def describe_content(dataset: IndexedDataset, checksum: int) -> dict[str, str]:
    """The field ``content`` of an origin; ``checksum`` is the CRC-32 of ``.bin``."""
    return {"tokens_crc32": f"{checksum:08x}", "layout_sha256": dataset.layout_fingerprint}


def check_fingerprint(prefix: str, tokenizer: Tokenizer) -> None:
    """Raises: UserError if the origin of a pair names another tokenizer, or is damaged."""
    origin = read_origin(prefix)
    if origin is not None and origin["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        raise UserError(
            f"{prefix}.bin was made with another vocabulary or tokenizer_type than {tokenizer.name}"
            f" (see {origin_path(prefix).name}); give the one used or preprocess the text again"
        )


def check_ids(prefix: str, least: int, most: int, tokenizer: Tokenizer) -> None:
    """Raises: UserError if a tokenizer does not have the token ids ``least`` to ``most`` of a pair."""
    if least < 0 or most >= tokenizer.vocab_size:
        raise UserError(
            f"{prefix}.bin holds the token id {least if least < 0 else most}, but {tokenizer.name} has ids 0 to"
            f" {tokenizer.vocab_size - 1}; give the tokenizer with which the text was preprocessed"
        )


def merge(prefixes: Sequence[str], output_prefix: str) -> IndexedDataset:
    """Write one pair with the documents of all, in their order; memory does not grow with the data.

    The result has an origin if all of them have one. Raises UserError if a pair is damaged, the output exists, or they
    differ in the type of their tokens, their tokenizer or in what a sequence is.
    """
    if not prefixes:
        raise UserError("no input is given; expected the paths of .bin/.idx pairs without extension")
    for path in (bin_path(output_prefix), idx_path(output_prefix), origin_path(output_prefix)):
        if path.exists():
            raise UserError(f"{path} exists; choose another output_prefix, or delete it first if it is an older pair's")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    first = datasets[0]
    for dataset in datasets[1:]:
        if dataset.dtype != first.dtype:
            raise UserError(
                f"{dataset.prefix} has tokens of type {dataset.dtype}, but {first.prefix} of type {first.dtype};"
                " their vocabularies differ: preprocess one of them again with the other's"
            )
    origin = _common_origin(prefixes)
    with IndexedDatasetBuilder(output_prefix, first.dtype) as builder:
        for dataset in datasets:
            begin = 0  # token of the file
            for document in range(0, dataset.num_documents, _ROWS_PER_WRITE):
                documents = dataset.documents[document : document + _ROWS_PER_WRITE + 1]
                sizes = dataset.sizes[documents[0] : documents[-1]]
                end = begin + int(sizes.sum(dtype=np.int64))
                builder.add_documents(dataset.tokens[begin:end], sizes, np.diff(documents))
                begin = end
    merged = IndexedDataset(output_prefix)
    if origin is not None:
        write_origin(output_prefix, origin | {"content": describe_content(merged, builder.written.checksum)})
    return merged


def _common_origin(prefixes: Sequence[str]) -> Origin | None:
    origins = [(prefix, read_origin(prefix)) for prefix in prefixes]
    known = [(prefix, origin) for prefix, origin in origins if origin is not None]
    for prefix, origin in known[1:]:
        first_prefix, first = known[0]
        if origin["tokenizer"]["fingerprint"] != first["tokenizer"]["fingerprint"]:
            raise UserError(
                f"{prefix} was made with another tokenizer than {first_prefix} (see {origin_path(prefix).name} and"
                f" {origin_path(first_prefix).name}); preprocess one of them again with the other's"
            )
        for name in _MUST_AGREE:
            if origin.get(name) != first.get(name):
                raise UserError(
                    f"{prefix} was made with {name} {origin.get(name)}, but {first_prefix} with {first.get(name)};"
                    " preprocess one of them again"
                )
    if len(known) < len(origins):
        return None
    records = [origin for _, origin in known]
    merged: Origin = {"tokenizer": records[0]["tokenizer"]}
    merged |= {name: records[0][name] for name in _MUST_AGREE if name in records[0]}
    merged |= {name: sum(record[name] for record in records) for name in _ADDED_UP if all(name in r for r in records)}
    left_out = sum((Counter(record.get("left_out", {})) for record in records), Counter[str]())
    return merged | {"left_out": dict(left_out), "merged_from": [Path(os.fspath(prefix)).name for prefix in prefixes]}
