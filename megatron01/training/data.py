"""Data of a run: datasets, the order of its training samples over all starts, and batches of this rank.

Training samples are consumed in one order, so that one number (consumed samples) says where to continue. The order
follows from the text, the sequence length, the seed and the number of samples. If a later start changes it (longer
sequences in BERT's second phase, a longer run, other text), the new order is taken from its beginning, and the
checkpoint records at how many consumed samples that was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron01.checkpoint.manifest import existing_folder, read_metadata
from megatron01.checkpoint.storage import damage_named
from megatron01.config import PretrainConfig, TrainingConfig
from megatron01.data import BatchLoader
from megatron01.data.datasets import SPLITS, SampleCounts, Splits
from megatron01.errors import require
from megatron01.parallel import ReplicaGroup, TensorParallelRanks
from megatron01.training.step import Batch, on_device


@dataclass(frozen=True)
class DataOrder:
    """An order of training samples and when a run began to follow it."""

    fingerprint: str  # of the training data; empty for datasets that have none
    first_sample: int  # samples that the run had consumed when it took the first one of this order
    segments: Sequence[tuple[int, int]] = ()  # first and last + 1, in consumption order, if some were deferred

    def ranges(self, num_samples: int) -> list[tuple[int, int]]:
        """All samples of training data that holds ``num_samples`` now, in consumption order."""
        known = max((last for _, last in self.segments), default=0)
        ranges = [(first, min(last, num_samples)) for first, last in self.segments if first < num_samples]
        return [*ranges, (known, num_samples)] if known < num_samples else ranges

    def deferring(self, consumed: int, skipped: int, num_samples: int) -> DataOrder:
        """The order with the ``skipped`` samples after the first ``consumed`` deferred to the end."""
        first, segments = consumed - self.first_sample, self.ranges(num_samples)
        now, later = _cut(segments, 0, first), _cut(segments, first, first + skipped)
        return dataclasses.replace(self, segments=[*now, *_cut(segments, first + skipped, num_samples), *later])


def _cut(segments: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The part of ``segments`` between two positions of the order."""
    found, position = [], 0
    for start, end in segments:
        overlap = (max(start, start + first - position), min(end, start + last - position))
        if overlap[0] < overlap[1]:
            found.append(overlap)
        position += end - start
    return found


@dataclass(frozen=True)
class SavedProgress:
    """Progress of a run: completed steps, consumed samples, and the order that the latter were taken from."""

    iteration: int = 0
    consumed_samples: int = 0
    order: DataOrder | None = None


def saved_progress(start: tuple[Path, int] | None, group: ReplicaGroup | None = None) -> SavedProgress:
    """Progress recorded in a checkpoint (folder and iteration); the beginning, if ``start`` is None.

    Raises UserError if the checkpoint is damaged. ``group``: the ranks that all ask for it.
    """
    if start is None:
        return SavedProgress()
    checkpoint = existing_folder(*start)
    metadata = read_metadata(checkpoint, group)
    saved = metadata.replicas[0].get("data_order")  # None with weights alone
    with damage_named(checkpoint, "samples"):
        order = None if saved is None else DataOrder(**saved)
    return SavedProgress(metadata.iteration, metadata.consumed_samples, order)


def build_in_order(
    build: Callable[[SampleCounts], Splits],
    progress: SavedProgress,
    training: TrainingConfig,
    global_batch_size: int,
) -> tuple[Splits, DataOrder]:
    """The datasets of the rest of a run, which ``build`` makes, and the order in which training goes through them."""
    held_out = training.eval_iters * global_batch_size
    remaining = max(0, training.train_iters - progress.iteration) * global_batch_size
    first_sample = progress.order.first_sample if progress.order else 0
    wanted = progress.consumed_samples - first_sample + remaining
    datasets = build(SampleCounts(max(wanted, global_batch_size), held_out, held_out))
    fingerprint = _fingerprint(datasets.train)
    if progress.order is None:
        return datasets, DataOrder(fingerprint, first_sample)
    if progress.order.fingerprint == fingerprint:
        return datasets, progress.order
    datasets = build(SampleCounts(max(remaining, global_batch_size), held_out, held_out))
    return datasets, DataOrder(_fingerprint(datasets.train), progress.consumed_samples)


def _fingerprint(dataset: Any) -> str:
    return getattr(dataset, "fingerprint", "")


class RunData:
    """The datasets of a run: training, validation and test, and the order in which training goes through them."""

    def __init__(
        self,
        config: PretrainConfig,
        group: ReplicaGroup,
        tp_ranks: TensorParallelRanks,
        progress: SavedProgress,
        build: Callable[[SampleCounts], Splits],
    ) -> None:
        """``build``: sample counts -> datasets.

        Raises UserError if the datasets, which may be a user's own, hold fewer samples than the run takes.
        """
        training = config.training
        self._batch_size = training.resolved_global_batch_size(tp_ranks.num_replicas)
        self._config, self._device, self._tp_ranks, self._build = config, group.device, tp_ranks, build
        self._build_rest(progress)
        smallest = training.micro_batch_size * tp_ranks.num_replicas
        for split in ("valid", "test"):
            held_out = getattr(self.datasets, split)
            if held_out is not None and training.eval_iters > 0:
                require(
                    len(held_out) >= smallest,
                    f"the {split} data holds {len(held_out)} samples, but an evaluation takes {smallest} at least, a"
                    " micro-batch for each replica; give more data, or set eval_iters to 0",
                )

    def _build_rest(self, progress: SavedProgress) -> None:
        """Build the datasets of the rest of the run. Raises UserError if the training data is too short."""
        training = self._config.training
        self.datasets, self.order = build_in_order(self._build, progress, training, self._batch_size)
        wanted = self._wanted(progress.iteration, progress.consumed_samples)
        require(
            progress.iteration >= training.train_iters or self._num_samples() >= wanted,
            f"the training data holds {self._num_samples()} samples, but {training.train_iters} steps of"
            f" {self._batch_size} take {wanted}; give more data, or lower train_iters or global_batch_size",
        )

    def _wanted(self, iteration: int, consumed_samples: int) -> int:
        """Samples of the present order that the run takes in all, if it goes on after ``iteration``."""
        steps = self._config.training.train_iters - iteration
        return consumed_samples - self.order.first_sample + steps * self._batch_size

    def training_batches(self, consumed_samples: int) -> Iterator[Batch]:
        """This replica's batches after ``consumed_samples`` of the run."""
        loader = self._loader(
            self.datasets.train,
            consumed_samples - self.order.first_sample,
            num_workers=self._config.data.num_workers,
            segments=self.order.ranges(self._num_samples()),
        )
        return on_device(loader, self._device)

    def held_out_batches(self, dataset: Sized) -> BatchLoader:
        """This replica's batches of held-out text, from the first on."""
        return self._loader(dataset, 0, num_workers=0)

    def defer(self, iteration: int, consumed_samples: int, skipped: int) -> None:
        """Leave the ``skipped`` samples after ``iteration`` and ``consumed_samples`` of the run to the end of training.

        Training data that is too short then, as some steps were taken with a smaller batch size, is built anew.
        """
        self.order = self.order.deferring(consumed_samples, skipped, self._num_samples())
        if self._num_samples() < self._wanted(iteration, consumed_samples):
            self._build_rest(SavedProgress(iteration, consumed_samples, self.order))

    def fingerprints(self) -> dict[str, str]:
        """What must be equal on all ranks, by name."""
        splits = {split: getattr(self.datasets, split) for split in SPLITS}
        return {
            "the number of samples": str({split: data and len(data) for split, data in splits.items()}),
            "the text of the samples": str({split: _fingerprint(data)[:12] for split, data in splits.items()}),
        }

    def _num_samples(self) -> int:
        return 0 if self.datasets.train is None else len(self.datasets.train)

    def _loader(
        self, dataset: Any, consumed_samples: int, *, num_workers: int, segments: Sequence[tuple[int, int]] = ()
    ) -> BatchLoader:
        return BatchLoader(
            dataset,
            consumed_samples=consumed_samples,
            micro_batch_size=self._config.training.micro_batch_size,
            replica=self._tp_ranks.replica,
            num_replicas=self._tp_ranks.num_replicas,
            num_workers=num_workers,
            segments=segments,
        )
