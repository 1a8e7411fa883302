"""The data of a run: which samples this replica takes next, and which it is evaluated on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron01.checkpoint.manifest import damage_named, existing_folder, read_metadata
from megatron01.config import PretrainConfig
from megatron01.data import BatchLoader, build_loader
from megatron01.data.datasets import PARTS, SampleCounts, Splits
from megatron01.parallel import ModelParts, ReplicaGroup
from megatron01.training.evaluation import Batch, on_device

# Which training sample belongs to which step, over all the starts of a run.
#
# A run takes the samples of its training data one after the other, so that one number says where it goes on. The order
# of the samples is drawn from the text, the sequence length, the seed and the number of samples asked for. If a later
# start changes it (the second phase of BERT's recipe, with longer sequences; a longer run; other text), the number no
# longer means anything: the new order is then taken from its beginning, and the checkpoint remembers where that was.


CHANGED = "the order of the training samples, which are now taken from the first on"


@dataclass(frozen=True)
class DataOrder:
    """An order of training samples and when a run began to follow it.

    Attributes:
        fingerprint: of the training data; empty for datasets that have none.
        first_sample: samples that the run had consumed when it took the first one of this order.
        segments: ranges of samples, first and last + 1, in the order of taking, where some were put off; else empty.
    """

    fingerprint: str
    first_sample: int
    segments: Sequence[tuple[int, int]] = ()

    def ranges(self, num_samples: int) -> list[tuple[int, int]]:
        """All samples of training data that holds ``num_samples`` now, in the order of taking."""
        known = max((last for _, last in self.segments), default=0)
        ranges = [(first, min(last, num_samples)) for first, last in self.segments if first < num_samples]
        return [*ranges, (known, num_samples)] if known < num_samples else ranges

    def putting_off(self, consumed: int, skipped: int, num_samples: int) -> DataOrder:
        """The order in which what comes after ``consumed`` samples of the run is put off to the very end.

        Args:
            consumed: samples that the run has consumed.
            skipped: how many of those that come next are put off.
            num_samples: of the training data.
        """
        first, segments = consumed - self.first_sample, self.ranges(num_samples)
        now, later = _cut(segments, 0, first), _cut(segments, first, first + skipped)
        return dataclasses.replace(self, segments=[*now, *_cut(segments, first + skipped, num_samples), *later])


def _cut(segments: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The part of ``segments`` between two places in the order of taking."""
    parts, place = [], 0
    for start, end in segments:
        part = (max(start, start + first - place), min(end, start + last - place))
        if part[0] < part[1]:
            parts.append(part)
        place += end - start
    return parts


@dataclass(frozen=True)
class Progress:
    """How far a run is: completed steps, consumed samples, and the order that the latter were taken from."""

    iteration: int = 0
    consumed_samples: int = 0
    order: DataOrder | None = None


def saved_progress(start: tuple[Path, int] | None) -> Progress:
    """What a checkpoint (folder and iteration) says; the beginning, if there is none.

    Raises:
        UserError: if the checkpoint is damaged.
    """
    if start is None:
        return Progress()
    checkpoint = existing_folder(*start)
    metadata = read_metadata(checkpoint)
    saved = metadata.replicas[0].get("data_order")
    if saved is None:
        return Progress(metadata.iteration, metadata.consumed_samples)
    with damage_named(checkpoint, "samples"):
        order = DataOrder(**saved)
        _require_plausible(order, metadata.consumed_samples)
    return Progress(metadata.iteration, metadata.consumed_samples, order)


def _require_plausible(order: DataOrder, consumed_samples: int) -> None:
    """ValueError or TypeError if no run can have had this order."""
    numbers = [order.first_sample, *(number for segment in order.segments for number in segment)]
    if not isinstance(order.fingerprint, str) or any(type(number) is not int for number in numbers):
        raise TypeError("text in place of numbers, or the reverse")
    rising = all(0 <= first < last < 2**63 for first, last in order.segments)
    if not 0 <= order.first_sample <= consumed_samples or not rising:
        raise ValueError("samples before the first or after the last")


def build_in_order(
    build: Callable[[SampleCounts], Splits[Any]],
    progress: Progress,
    *,
    train_iters: int,
    global_batch_size: int,
    eval_iters: int,
) -> tuple[Splits[Any], DataOrder]:
    """The datasets of the rest of a run, and the order in which training goes through them.

    Args:
        build: from the numbers of samples wanted to the datasets.
    """
    held_out = eval_iters * global_batch_size
    remaining = max(0, train_iters - progress.iteration) * global_batch_size
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
    """The datasets of a run, and the order in which training goes through them.

    Attributes:
        datasets: training, validation and test.
        order: of the training samples.
    """

    def __init__(
        self,
        config: PretrainConfig,
        group: ReplicaGroup,
        parts: ModelParts,
        progress: Progress,
        build: Callable[[SampleCounts], Splits[Any]],
    ) -> None:
        """``build`` makes the datasets of the numbers of samples wanted."""
        training = config.training
        self._config, self._device, self._parts = config, group.device, parts
        self.datasets, self.order = build_in_order(
            build,
            progress,
            train_iters=training.train_iters,
            global_batch_size=training.resolved_global_batch_size(parts.num_replicas),
            eval_iters=training.eval_iters,
        )

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

    def put_off(self, consumed_samples: int, skipped: int) -> None:
        """Leave the ``skipped`` samples after ``consumed_samples`` of the run to the end of training."""
        self.order = self.order.putting_off(consumed_samples, skipped, self._num_samples())

    def facts(self) -> dict[str, str]:
        """What must be the same on all replicas, by name."""
        parts = {part: getattr(self.datasets, part) for part in PARTS}
        return {
            "the number of samples": str({part: dataset and len(dataset) for part, dataset in parts.items()}),
            "the text of the samples": str({p: getattr(data, "fingerprint", "")[:12] for p, data in parts.items()}),
        }

    def _num_samples(self) -> int:
        return 0 if self.datasets.train is None else len(self.datasets.train)

    def _loader(
        self, dataset: Any, consumed_samples: int, *, num_workers: int, segments: Sequence[tuple[int, int]] = ()
    ) -> BatchLoader:
        return build_loader(
            dataset,
            consumed_samples=consumed_samples,
            micro_batch_size=self._config.training.micro_batch_size,
            replica=self._parts.replica,
            num_replicas=self._parts.num_replicas,
            num_workers=num_workers,
            segments=segments,
        )
