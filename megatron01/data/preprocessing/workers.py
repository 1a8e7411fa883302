"""Encoding of chunks by several processes, in the order of the input."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from megatron01.data.preprocessing.corpus import CHUNK_BYTES, Chunk, Position
from megatron01.data.preprocessing.encoding import EncodedChunk, EncodingSettings, encode_chunk
from megatron01.errors import UserError
from megatron01.utils.process_pool import ProcessPool, WorkerDied

_CHUNKS_PER_WORKER = 4  # submitted in advance: keeps workers busy, bounds memory
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # read by the tokenizers library at each call


def encode_in_order(
    settings: EncodingSettings, chunks: Iterator[Chunk], workers: int
) -> Generator[tuple[Position, EncodedChunk], None, None]:
    """The encoded chunks in the order of the input, whatever the number of processes, with the end of each.

    Args:
        workers: processes; 1 works in this one.

    Raises:
        UserError: if a process dies.
    """
    with _single_threaded_tokenizer():
        if workers == 1:
            for chunk in chunks:
                yield chunk.end, encode_chunk(settings, chunk)
            return
        try:
            with ProcessPool(_open_encoder, [(settings,)] * workers, tasks_ahead=_CHUNKS_PER_WORKER) as pool:
                yield from _encode_with(pool, chunks, _CHUNKS_PER_WORKER * workers)
        except WorkerDied as error:
            raise UserError(
                f"one of {workers} preprocessing processes ended with status {error.status}, perhaps for want of"
                " memory; use fewer workers"
            ) from error


def _encode_with(pool: ProcessPool, chunks: Iterator[Chunk], most: int) -> Iterator[tuple[Position, EncodedChunk]]:
    """As ``encode_in_order``, with no more than ``most`` chunks, fewer of long documents, held at a time."""
    pending: deque[tuple[int, Position, int]] = deque()  # number, end and bytes of chunks, in the order of the input
    encoded: dict[int, EncodedChunk] = {}
    num_bytes = 0

    def first() -> tuple[Position, EncodedChunk]:
        number, end, size = pending.popleft()
        nonlocal num_bytes
        num_bytes -= size
        while number not in encoded:
            done, result = pool.receive()
            encoded[done] = result
        return end, encoded.pop(number)

    for chunk in chunks:
        pending.append((pool.submit(chunk), chunk.end, len(chunk.data)))
        num_bytes += len(chunk.data)
        while pending and (len(pending) >= most or num_bytes > 2 * most * CHUNK_BYTES):
            yield first()
    while pending:
        yield first()


def _open_encoder(settings: EncodingSettings) -> Callable[[Chunk, Any], EncodedChunk]:
    return lambda chunk, report: encode_chunk(settings, chunk)


@contextmanager
def _single_threaded_tokenizer() -> Iterator[None]:
    """Keep the tokenizers library to one thread, here and in processes started inside: ``workers`` says how many."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before
