"""The data of a run: which samples this replica takes next, and which it is evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

from megatron01.config import PretrainConfig
from megatron01.data import BatchLoader, SampleCounts, Splits, build_loader
from megatron01.data.splits import PARTS
from megatron01.distributed import ModelParts, ReplicaGroup
from megatron01.training.data_order import Progress, build_in_order
from megatron01.training.evaluation import Batch, on_device


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
