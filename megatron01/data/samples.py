"""What datasets of samples have in common: samples by index, one at a time or many at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Samples = dict[str, NDArray[Any]]
"""Arrays by name, one row a sample."""


class SampleDataset(ABC):
    """Samples that are functions of their index alone: nothing else needs to be remembered to go on from one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of what decides which text comes when: equal for datasets whose sample i is cut from the same place."""

    @abstractmethod
    def read(self, indices: NDArray[np.int64]) -> Samples:
        """The samples of ``indices`` (b,), as the loader sends them: in the narrowest types that hold the values.

        Args:
            indices: in [0, len).

        Raises:
            UserError: if a file has changed since it was opened.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Look whether the files behind the samples are still what was opened.

        Raises:
            UserError: if not, naming the file.
        """

    def batch(self, indices: range | NDArray[np.int64]) -> Samples:
        """The samples of ``indices``, which must exist; see ``read``.

        Raises:
            IndexError: if one does not exist.
        """
        numbers = np.asarray(indices, dtype=np.int64)
        outside = numbers[(numbers < 0) | (numbers >= len(self))]
        if outside.size:
            raise IndexError(f"sample {outside[0]} of {len(self)}")
        return self.read(numbers)

    def collate(self, samples: Samples) -> Samples:
        """What a model is given of the samples of a ``batch``: here they are all of it.

        Called where batches are prepared, on the host, so that what a model does can depend on contents without
        waiting for a device.
        """
        return samples

    def __getitem__(self, index: int) -> Samples:
        """One sample; integers are int64, as in Megatron-LM.

        Raises:
            IndexError: if it does not exist.
        """
        sample = self.batch(np.array([index]))
        return {name: rows[0].astype(np.int64) if rows.dtype.kind in "iu" else rows[0] for name, rows in sample.items()}
