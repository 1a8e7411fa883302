"""Encoding of chunks by several processes, in the order of the input."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess

from megatron01.data.preprocessing.corpus import CHUNK_BYTES, Chunk, Position
from megatron01.data.preprocessing.encoding import EncodedChunk, EncodingSettings, encode_chunk
from megatron01.errors import UserError
from megatron01.utils.signals import holding_signals_back

_CHUNKS_PER_WORKER = 4  # handed out in advance: keeps workers busy, bounds memory
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
    if workers == 1:
        with _single_threaded_tokenizer():
            for chunk in chunks:
                yield chunk.end, encode_chunk(settings, chunk)
        return
    # Fresh processes rather than forks: the caller may hold threads or a GPU.
    with (
        _single_threaded_tokenizer(),
        ProcessPoolExecutor(workers, mp_context=_WorkerContext(), initializer=_follow_parent) as pool,
    ):
        try:
            yield from _submit_in_order(pool, settings, chunks, workers)
        except BrokenProcessPool as error:
            raise UserError(
                f"one of {workers} preprocessing processes ended, perhaps for want of memory; use fewer workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _submit_in_order(
    pool: ProcessPoolExecutor, settings: EncodingSettings, chunks: Iterator[Chunk], workers: int
) -> Iterator[tuple[Position, EncodedChunk]]:
    pending: deque[tuple[Position, int, Future[EncodedChunk]]] = deque()
    num_bytes = 0
    most = _CHUNKS_PER_WORKER * workers
    for chunk in chunks:
        with holding_signals_back():  # submitting starts processes while there are too few
            future = pool.submit(encode_chunk, settings, chunk)
        pending.append((chunk.end, len(chunk.data), future))
        num_bytes += len(chunk.data)
        while len(pending) >= most or (num_bytes > 2 * most * CHUNK_BYTES and pending):  # long documents
            end, size, future = pending.popleft()
            num_bytes -= size
            yield end, future.result()
    for end, _, future in pending:
        yield end, future.result()


class _Worker(SpawnProcess):
    """A process that leaves signals to its parent; see ``holding_signals_back``."""

    def terminate(self) -> None:
        """Called by a pool that has lost another of its processes. SIGTERM would not end it."""
        self.kill()


class _WorkerContext(SpawnContext):
    Process = _Worker


def _follow_parent() -> None:
    """Let a worker end when its parent is gone, however that went."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


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
