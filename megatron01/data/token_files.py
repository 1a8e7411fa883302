"""A pair of token files as training uses it: checked once, recognized again, and watched while it is read.

Indices say where in a file a sample lies. Used with another file of the same name they would give text cut at the wrong
places, silently; a file that shrinks under a memory map even ends the process (SIGBUS). So indices are tied to what the
files hold, and the files that are mapped are looked at again with every batch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron01.data.index_cache import cached_arrays, sampled_digest
from megatron01.data.indexed_builder import check_fingerprint, read_origin
from megatron01.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megatron01.data.tokenizers import Tokenizer
from megatron01.errors import UserError


class _Stamp(NamedTuple):
    """Size and time of modification: they change when a file is written."""

    num_bytes: int
    modified: int  # ns


class TokenFiles:
    """An ``IndexedDataset`` and the open files behind it, which must stay as they are.

    A file that is *replaced*, by renaming another one to its name, does no harm to a process that has mapped it, and
    is not noticed there; one that is written in place is. Another process that receives this object opens the files
    by name and refuses others than those of the sender.

    Args:
        prefix: path of the pair without extension.
        cache: folder of the sample indices, where what takes long to find out about a file is kept.

    Attributes:
        indexed: the tokens.
        fingerprint: hash of how the file is cut into sequences and documents, and of samples of its tokens; it depends
            neither on the file's place nor on its time stamps, so that copies share it.

    Raises:
        UserError: if the files are missing, damaged, or change meanwhile.
    """

    def __init__(self, prefix: str, cache: Path) -> None:
        self._watched = _WatchedFiles([bin_path(prefix), idx_path(prefix)])
        self.indexed = IndexedDataset(prefix)
        self.fingerprint = self._fingerprint(cache)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Look whether the files are still what was opened; takes about a microsecond.

        Raises:
            UserError: if one was written or cut short, naming it.
        """
        self._watched.check()

    def _fingerprint(self, cache: Path) -> str:
        indexed = self.indexed
        tokens = sampled_digest(indexed.tokens)
        # Hashing the index file takes seconds for 10^8 sequences: it is done once for each file.
        description = {
            "kind": "layout",
            "files": [tuple(stamp) for stamp in self._watched.stamps],
            "tokens": tokens,
            "sizes": sampled_digest(indexed.sizes),
            "documents": sampled_digest(indexed.documents),
        }

        def build() -> dict[str, np.ndarray[Any, Any]]:
            return {"layout": np.frombuffer(bytes.fromhex(indexed.layout_fingerprint), dtype=np.uint8)}

        layout = cached_arrays(cache, description, build)["layout"].tobytes().hex()
        indexed.layout_fingerprint = layout  # others who ask for it need not hash the file either
        return hashlib.sha256(f"{layout} {tokens}".encode()).hexdigest()


class _WatchedFiles:
    """Files held open, with their size and time of change."""

    def __init__(self, paths: Sequence[Path], expected: Sequence[_Stamp] | None = None) -> None:
        self._paths = [Path(path) for path in paths]
        self._descriptors: list[int] = []
        for path in self._paths:
            try:
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:  # IndexedDataset says what is missing, in better words
                self._descriptors.append(-1)
        self.stamps = [_stamp(descriptor) for descriptor in self._descriptors] if expected is None else expected
        if expected is not None:
            self.check()

    def check(self) -> None:
        for path, descriptor, before in zip(self._paths, self._descriptors, self.stamps, strict=True):
            now = _stamp(descriptor)
            if now != before:
                raise UserError(
                    f"{path} was changed while it was in use (it had {before.num_bytes} bytes and has"
                    f" {now.num_bytes}); put the file back, or start again from the last checkpoint with the new one"
                )

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _WatchedFiles, (self._paths, self.stamps)


def _stamp(descriptor: int) -> _Stamp:
    if descriptor < 0:
        return _Stamp(0, 0)
    status = os.fstat(descriptor)
    return _Stamp(status.st_size, status.st_mtime_ns)


def check_vocabulary(dataset: IndexedDataset, tokenizer: Tokenizer, cache: Path) -> None:
    """Check that a file holds only tokens of a vocabulary, and was made with it where its maker is on record.

    The largest token id is found by one pass over the ``.bin`` file and kept in the cache.

    Raises:
        UserError: if the file needs another vocabulary.
    """
    origin = read_origin(dataset.prefix)
    if origin is not None:
        check_fingerprint(dataset.prefix, origin, tokenizer)
    status = bin_path(dataset.prefix).stat()
    description = {
        "kind": "token-range",
        "layout": dataset.layout_fingerprint,
        "bytes": status.st_size,
        "modified": status.st_mtime_ns,
    }
    least, most = (int(value) for value in cached_arrays(cache, description, lambda: _token_range(dataset))["range"])
    if least < 0 or most >= tokenizer.vocab_size:
        wrong = least if least < 0 else most
        raise UserError(
            f"{dataset.prefix}.bin holds the token id {wrong}, but {tokenizer.name} has ids 0 to"
            f" {tokenizer.vocab_size - 1}; give the tokenizer with which the text was preprocessed"
        )


def _token_range(dataset: IndexedDataset) -> dict[str, np.ndarray]:
    tokens = dataset.tokens
    limits = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    return {"range": np.array(limits, dtype=np.int64)}
