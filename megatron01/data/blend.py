"""Several datasets mixed by weight.

Which dataset gives which sample of the mixture is Megatron-LM's greedy choice: the one that lags behind its share the
most, and the first of them at a tie. After any number of samples each dataset has given its share to within a few
samples, so it makes no difference where a run stops.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.data.compilation import compiled
from megatron01.data.index_cache import Arrays
from megatron01.data.samples import SampleDataset, Samples

MARGIN = 1.005
"""Each dataset is asked for so much more than its share, as Megatron-LM does: it decides about epochs and so about the
order of samples."""

_MOST_DATASETS = 2**15  # numbered in int16, as in Megatron-LM


def normalized(weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights with the sum 1, rounded as Megatron-LM does."""
    values = np.array(weights, dtype=np.float64)
    return values / np.sum(values)


def blend_order(weights: Sequence[float], num_samples: int) -> Arrays:
    """Which sample of which dataset each sample of a mixture is.

    Args:
        weights: relative shares, positive.

    Returns:
        "dataset" int16[num_samples], "sample" int64[num_samples] (the datasets' samples in their order), and "drawn"
        int64[datasets], how many samples each gives.
    """
    assert 0 < len(weights) <= _MOST_DATASETS
    dataset = np.empty(num_samples, dtype=np.int16)
    sample = np.empty(num_samples, dtype=np.int64)
    drawn = np.zeros(len(weights), dtype=np.int64)
    _fill_order(normalized(weights), dataset, sample, drawn)
    return {"dataset": dataset, "sample": sample, "drawn": drawn}


def samples_to_ask_for(weights: Sequence[float], num_samples: int, drawn: NDArray[np.int64]) -> list[int]:
    """How many samples each dataset of a mixture must have at least."""
    asked = [math.ceil(math.ceil(num_samples * weight) * MARGIN) for weight in normalized(weights).tolist()]
    return [max(count, needed) for count, needed in zip(asked, drawn.tolist(), strict=True)]


@compiled
def _fill_order(
    weights: NDArray[np.float64],
    dataset: NDArray[np.int16],
    sample: NDArray[np.int64],
    drawn: NDArray[np.int64],
) -> None:
    for i in range(len(dataset)):
        scale = max(float(i), 1.0)
        chosen, largest = 0, weights[0] * scale - float(drawn[0])
        for k in range(1, len(weights)):
            lag = weights[k] * scale - float(drawn[k])
            if lag > largest:
                chosen, largest = k, lag
        dataset[i] = chosen
        sample[i] = drawn[chosen]
        drawn[chosen] += 1


class BlendedDataset(SampleDataset):
    """Samples of several datasets in the order of ``blend_order``.

    Args:
        datasets: all with samples of the same form.
        weights: their relative shares.
        order: from ``blend_order``; no dataset may be shorter than what is drawn from it.
    """

    def __init__(self, datasets: Sequence[SampleDataset], weights: Sequence[float], order: Arrays) -> None:
        drawn = order["drawn"].tolist()
        assert len(datasets) == len(weights) == len(drawn)
        assert all(len(dataset) >= count for dataset, count in zip(datasets, drawn, strict=True))
        self.datasets = list(datasets)
        self.weights = normalized(weights).tolist()
        self._dataset_of, self._sample_of = order["dataset"], order["sample"]

    def __len__(self) -> int:
        return len(self._dataset_of)

    @property
    def fingerprint(self) -> str:
        """Hash of what decides which sample comes when; a longer mixture begins like a shorter one and shares it."""
        parts = [dataset.fingerprint for dataset in self.datasets]
        return hashlib.sha256(repr((parts, self.weights)).encode()).hexdigest()

    def read(self, indices: NDArray[np.int64]) -> Samples:
        """As ``SampleDataset.read``; each dataset reads its samples of the batch together."""
        dataset_of, sample_of = self._dataset_of[indices], self._sample_of[indices]
        present = np.unique(dataset_of).tolist()
        if len(present) == 1:
            return self.datasets[present[0]].read(sample_of)
        batch: dict[str, NDArray[Any]] = {}
        for number in present:
            rows = np.flatnonzero(dataset_of == number)
            for name, values in self.datasets[number].read(sample_of[rows]).items():
                if name not in batch:
                    batch[name] = np.empty((len(indices), *values.shape[1:]), dtype=values.dtype)
                batch[name][rows] = values
        return batch

    def collate(self, samples: Samples) -> Samples:
        """As the datasets do, whose samples have the same form."""
        return self.datasets[0].collate(samples)

    def check_unchanged(self) -> None:
        """As ``SampleDataset.check_unchanged``, for all datasets."""
        for dataset in self.datasets:
            dataset.check_unchanged()
