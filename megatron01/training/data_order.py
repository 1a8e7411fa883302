"""Which training sample belongs to which step, over all the starts of a run.

A run takes the samples of its training data one after the other, so that one number says where it goes on. The order of
the samples is drawn from the text, the sequence length, the seed and the number of samples asked for. If a later start
changes it (the second phase of BERT's recipe, with longer sequences; a longer run; other text), the number no longer
means anything: the new order is then taken from its beginning, and the checkpoint remembers where that was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron01.checkpoint.layout import existing_folder
from megatron01.checkpoint.metadata import read_metadata
from megatron01.data.splits import SampleCounts, Splits

CHANGED = "the order of the training samples, which are now taken from the first on"


@dataclass(frozen=True)
class DataOrder:
    """An order of training samples and when a run began to follow it.

    Attributes:
        fingerprint: of the training data; empty for datasets that have none.
        first_sample: samples that the run had consumed when it took the first one of this order.
    """

    fingerprint: str
    first_sample: int


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
    metadata = read_metadata(existing_folder(*start))
    saved = metadata.replicas[0].get("data_order")
    return Progress(metadata.iteration, metadata.consumed_samples, None if saved is None else DataOrder(**saved))


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
    order = DataOrder(_fingerprint(datasets.train), first_sample)
    if progress.order is None or progress.order.fingerprint == order.fingerprint:
        return datasets, order
    datasets = build(SampleCounts(max(remaining, global_batch_size), held_out, held_out))
    return datasets, DataOrder(_fingerprint(datasets.train), progress.consumed_samples)


def _fingerprint(dataset: Any) -> str:
    return getattr(dataset, "fingerprint", "")
