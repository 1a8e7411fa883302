"""Data loader of one replica, in the order of Megatron-LM's "single" loader, which resumes from one integer."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from megatron01.data.datasets import SampleDataset, Samples
from megatron01.errors import FaultError, UserError, is_fault
from megatron01.utils.signals import is_main_thread, leave_signals_to_parent

_BATCHES_PER_WORKER = 4  # prepared in advance


class SampleSource(Protocol):
    """Samples by index; a ``SampleDataset`` is read in whole batches."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, NDArray[Any]]: ...


def _read_batch(source: SampleSource, segments: NDArray[np.int64], size: int, start: int) -> Samples | Exception:
    """A batch: the ``size`` samples from position ``start`` of the consumption order on.

    Errors are returned, to be raised by the receiving process. ``segments``: int64[segments, 2], see ``BatchLoader``.
    """
    firsts, lasts = segments.T
    ends = np.cumsum(lasts - firsts)  # positions at which the segments end
    positions = start + np.arange(size)
    indices = positions + (lasts - ends)[np.searchsorted(ends, positions, side="right")]
    try:
        if isinstance(source, SampleDataset):
            return source.collate(source.batch(indices))
        return _stacked(source, [source[index] for index in indices.tolist()], int(indices[0]))
    except Exception as error:  # any: a dataset may be the user's own
        where = f"samples {indices[0]} to {indices[-1]}"
        if is_fault(error):
            return FaultError(f"{where}: {error}")
        if isinstance(error, UserError):
            return UserError(f"{where}: {error}")
        return RuntimeError(f"{where}: {type(error).__name__}: {error}\n{traceback.format_exc()}")


def _stacked(source: SampleSource, samples: Sequence[Mapping[str, Any]], first: int) -> Samples:
    """A batch of the samples of a user's dataset, from number ``first`` on. Raises UserError if they cannot be one."""
    dataset = type(source).__name__
    if not isinstance(samples[0], Mapping):
        raise UserError(
            f"{dataset}[{first}] is a {type(samples[0]).__name__}; expected a dict of arrays or tensors by name"
        )
    batch = {}
    for name in samples[0]:
        try:
            batch[name] = np.stack([sample[name] for sample in samples])
            torch.from_numpy(batch[name])  # refuses what are no numbers
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{name!r} of {dataset} cannot be stacked ({error}); expected numbers, arrays or tensors of one shape"
                " in every sample"
            ) from error
    return batch


class BatchLoader:
    """The batches of one replica, from ``consumed_samples`` on to the end of the dataset; may be iterated again.

    Of each block of micro-batch size mb x replicas samples, replica r takes those at [r mb, (r + 1) mb); an incomplete
    last block is dropped. ``len`` is the number of batches. An error in a worker process is raised once in the
    iterating one, with its traceback; so is the death of a worker process, as a FaultError. Raises UserError if not a
    single batch is left.

    Args:
        consumed_samples: samples that all replicas together have used; all the state that a resume needs.
        replica: this replica's number, in [0, num_replicas).
        num_workers: processes that prepare batches; 0 prepares them in the calling process.
        segments: ranges of samples, first and last + 1, in the order in which they are taken; by default all in order.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        replica: int,
        num_replicas: int,
        num_workers: int,
        segments: Sequence[tuple[int, int]] = (),
    ) -> None:
        assert 0 <= replica < num_replicas and consumed_samples >= 0 and micro_batch_size > 0
        ranges = np.array(segments or [(0, len(dataset))], dtype=np.int64)
        num_samples = int(np.diff(ranges).sum())
        block = micro_batch_size * num_replicas
        first, num_blocks = consumed_samples + replica * micro_batch_size, (num_samples - consumed_samples) // block
        self._starts = range(first, first + num_blocks * block, block)  # positions in consumption order
        if not self._starts:
            raise UserError(
                f"no samples are left: {consumed_samples} of {len(dataset)} are consumed and a step over all replicas"
                f" takes {block}; ask for more samples or stop earlier"
            )
        self._source = dataset
        self._pins = torch.cuda.is_available()  # so that copies to the GPU need not be waited for
        self._workers: list[BaseProcess] = []
        positions: Any = range(num_samples)
        self._loader: DataLoader[Samples | Exception] = DataLoader(
            positions,
            sampler=self._starts,
            batch_size=None,  # an element of the sampler stands for a batch
            # makes arrays, which are copied through a pipe: shared memory is slower
            collate_fn=partial(_read_batch, dataset, ranges, micro_batch_size),
            num_workers=num_workers,
            prefetch_factor=_BATCHES_PER_WORKER if num_workers else None,
            persistent_workers=num_workers > 0,
            multiprocessing_context="fork" if num_workers else None,  # indices of gigabytes are shared, not copied
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # so that iter() draws no seed from the global one (dropout's)
        )

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        batches = self._start()
        while True:
            try:
                with self._deaths_raised():
                    batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                if isinstance(self._source, SampleDataset):
                    self._source.check_unchanged()  # reading beyond the end of a file that shrank kills a process
                raise FaultError(
                    f"a process that prepares batches ended unexpectedly ({str(error).splitlines()[0]}); it may have"
                    " run out of memory or of /dev/shm; try a smaller num_workers"
                ) from error
            if isinstance(batch, Exception):
                try:
                    raise batch
                finally:
                    del batch  # else it holds itself by its traceback, and with it the worker processes
            tensors = {}
            for name, values in batch.items():
                tensor = torch.from_numpy(values)
                tensors[name] = tensor.pin_memory() if self._pins else tensor
            yield tensors

    def _start(self) -> Iterator[Samples | Exception]:
        before = multiprocessing.active_children()
        handler = signal.getsignal(signal.SIGCHLD)
        batches = iter(self._loader)
        if is_main_thread():
            signal.signal(signal.SIGCHLD, handler)
        started = [child for child in multiprocessing.active_children() if child not in before]
        if started:
            if not self._workers:
                atexit.register(_end_workers, self._workers)
            self._workers += started
        return batches

    @contextmanager
    def _deaths_raised(self) -> Iterator[None]:
        """Raise the death of a worker process inside this context only.

        torch's SIGCHLD handler raises it anywhere; inside a collective that would leave all other ranks waiting.
        """
        if not self._workers or not is_main_thread():
            yield
            return
        handler = signal.signal(signal.SIGCHLD, self._raise_deaths)
        try:
            self._raise_deaths()
            yield
        finally:
            signal.signal(signal.SIGCHLD, handler)

    def _raise_deaths(self, *_: object) -> None:
        for worker in self._workers:
            if worker.exitcode:
                raise RuntimeError(f"DataLoader worker {worker.pid} ended with status {worker.exitcode}")


def _start_worker(worker: int) -> None:
    """Set up a worker process: one thread, as replicas share a machine's cores, and the first stop signal ignored.

    Launchers and Ctrl-C signal whole process groups. The parent then finishes its step, for which it needs batches, and
    saves a checkpoint; so a worker continues after the first signal and ends at a later one.
    """
    torch.set_num_threads(1)
    leave_signals_to_parent()


def _end_workers(workers: Sequence[BaseProcess]) -> None:
    """Kill the workers of a loader that is still in use when the process exits, after an error for instance.

    multiprocessing's exit handler, which runs after this, sends SIGTERM, which workers ignore, and waits forever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler reports each killed worker as an error
    for worker in workers:
        worker.kill()
