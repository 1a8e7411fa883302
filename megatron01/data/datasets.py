"""From the settings to the training, validation and test part of the data, each one dataset or a mixture of several."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron01.config import DataConfig
from megatron01.config.data import Source, parse_sources
from megatron01.data.index_cache import Arrays, cache_folder, cached_arrays
from megatron01.data.kernels import fill_blend_order
from megatron01.data.token_files import TokenFiles, check_vocabulary
from megatron01.data.tokenizers import Tokenizer
from megatron01.errors import UserError

# What datasets of samples have in common: samples by index, one at a time or many at once.


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


# Several datasets mixed by weight.
#
# Which dataset gives which sample of the mixture is Megatron-LM's greedy choice: the one that lags behind its share
# the most, and the first of them at a tie. After any number of samples each dataset has given its share to within a
# few samples, so it makes no difference where a run stops.


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
    fill_blend_order(normalized(weights), dataset, sample, drawn)
    return {"dataset": dataset, "sample": sample, "drawn": drawn}


def samples_to_ask_for(weights: Sequence[float], num_samples: int, drawn: NDArray[np.int64]) -> list[int]:
    """How many samples each dataset of a mixture must have at least."""
    asked = [math.ceil(math.ceil(num_samples * weight) * MARGIN) for weight in normalized(weights).tolist()]
    return [max(count, needed) for count, needed in zip(asked, drawn.tolist(), strict=True)]


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


# How a corpus is divided into a training, a validation and a test part.


T = TypeVar("T")

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class SampleCounts:
    """Samples that a run will take from each part; a part of which none are wanted is not built."""

    train: int
    valid: int = 0
    test: int = 0


@dataclass(frozen=True)
class Ingredient:
    """What a file gives to a part.

    Attributes:
        part: "train", "valid" or "test".
        prefix: the file.
        num_documents, num_tokens: of the file, in this part.
        num_samples: how many the run takes from it.
        num_passes: how often it thereby reads the text.
    """

    part: str
    prefix: str
    num_documents: int
    num_tokens: int
    num_samples: int
    num_passes: float


@dataclass(frozen=True)
class Splits(Generic[T]):
    """One thing per part; None where no samples were asked for or the part holds no usable text."""

    train: T | None
    valid: T | None
    test: T | None
    ingredients: tuple[Ingredient, ...] = ()
    """Where they come from, if that is known."""
    notes: tuple[str, ...] = ()
    """What people should know: parts and files that were left out."""


def split_bounds(shares: Sequence[float], num_items: int) -> list[tuple[int, int]]:
    """First and last + 1 item of each part; the rounding is that of Megatron-LM's current releases.

    Args:
        shares: relative sizes of the parts, sum 1.
        num_items: documents (BERT) or sequences (GPT) in the file.
    """
    bounds = [round(share * num_items) for share in accumulate(shares, initial=0.0)]
    bounds[-1] = num_items  # the shares' sum is 1 only up to rounding
    return list(pairwise(bounds))


Bounds = tuple[int, int]


class PartBuilder(ABC):
    """Makes datasets of one kind of samples out of token files; every file is opened once.

    Args:
        data: the settings.
        tokenizer: the vocabulary that the files must have been made with.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._opened: dict[str, TokenFiles] = {}
        self._ingredients: list[Ingredient] = []
        self._notes: list[str] = []

    @property
    @abstractmethod
    def least_text(self) -> str:
        """What a part must hold at least, for messages."""

    @abstractmethod
    def num_items(self, files: TokenFiles) -> int:
        """What the split divides: documents (BERT) or sequences (GPT)."""

    @abstractmethod
    def num_tokens(self, files: TokenFiles, bounds: Bounds) -> int:
        """Tokens in a part."""

    @abstractmethod
    def num_samples_in_a_pass(self, dataset: Any, files: TokenFiles, bounds: Bounds) -> float:
        """Samples that one pass over the text of a part gives, for the dataset that ``build`` made of it."""

    @abstractmethod
    def build(self, files: TokenFiles, part: str, bounds: Bounds, num_samples: int) -> SampleDataset | None:
        """At least ``num_samples`` samples of the items in ``bounds``; None if there is no usable text among them."""

    @abstractmethod
    def check(self, files: TokenFiles) -> None:
        """Refuse a file that cannot hold this kind of samples, with a UserError."""

    def note(self, text: str) -> None:
        """Add to what people should know about the parts, see ``Splits.notes``."""
        self._notes.append(text)

    def cache(self, prefix: str) -> Path:
        """Where the indices of a file go."""
        return cache_folder(self._data.data_cache_path, prefix)

    def open(self, prefix: str) -> TokenFiles:
        """A pair of files, checked.

        Raises:
            UserError: if it is missing, damaged, of another vocabulary, or cannot hold this kind of samples.
        """
        if prefix not in self._opened:
            cache = self.cache(prefix)
            files = TokenFiles(prefix, cache)
            check_vocabulary(files.indexed, self._tokenizer, cache)
            self.check(files)
            self._opened[prefix] = files
        return self._opened[prefix]

    def build_parts(self, counts: SampleCounts) -> Splits[Any]:
        """Every part of which samples are wanted.

        Raises:
            UserError: if there is no text to train on, or what ``open`` raises.
        """
        self._ingredients.clear()
        self._notes.clear()
        datasets = {part: self._build_part(part, getattr(counts, part)) for part in PARTS}
        return Splits(**datasets, ingredients=tuple(self._ingredients), notes=tuple(self._notes))

    def _build_part(self, part: str, num_samples: int) -> SampleDataset | None:
        sources = self._sources(part) if num_samples else ()
        if num_samples and not sources:
            self.note(f"{part}_data_path is not given: there is no {part} part")
        while len(sources) > 1:
            blend, empty = self._blend(sources, part, num_samples)
            if blend is not None:
                return blend
            for source in empty:
                self._refuse_or_leave_out(source, part, "the others fill its share")
            sources = tuple(source for source in sources if source not in empty)
        if not sources:
            return None
        dataset = self._build_source(sources[0], part, num_samples)
        if dataset is None:
            self._refuse_or_leave_out(sources[0], part, "it is not evaluated")
        else:
            self._note(sources[0], part, dataset, num_samples)
        return dataset

    def _blend(
        self, sources: Sequence[Source], part: str, num_samples: int
    ) -> tuple[BlendedDataset | None, list[Source]]:
        """The mixture, or None and those of the sources that hold no text for it."""
        weights = self._weights(sources, part)
        empty = [source for source, weight in zip(sources, weights, strict=True) if not weight]
        if empty:
            return None, empty
        description = {"kind": f"blend-{part}", "weights": normalized(weights).tolist(), "num_samples": num_samples}
        cache = self.cache(sources[0].prefix)
        order = cached_arrays(cache, description, partial(blend_order, weights, num_samples))
        asked = samples_to_ask_for(weights, num_samples, order["drawn"])
        found = [self._build_source(source, part, count) for source, count in zip(sources, asked, strict=True)]
        datasets = [dataset for dataset in found if dataset is not None]
        if len(datasets) < len(sources):
            return None, [source for source, dataset in zip(sources, found, strict=True) if dataset is None]
        for source, dataset, drawn in zip(sources, datasets, order["drawn"].tolist(), strict=True):
            self._note(source, part, dataset, drawn)
        return BlendedDataset(datasets, weights, order), []

    def _weights(self, sources: Sequence[Source], part: str) -> list[float]:
        given = [source.weight for source in sources]
        if None not in given:
            return [float(weight) for weight in given if weight is not None]
        tokens = [self.num_tokens(self.open(source.prefix), self._bounds(source, part)) for source in sources]
        return [float(count) for count in tokens]

    def _build_source(self, source: Source, part: str, num_samples: int) -> SampleDataset | None:
        bounds = self._bounds(source, part)
        if bounds[0] == bounds[1]:
            return None
        dataset = self.build(self.open(source.prefix), part, bounds, num_samples)
        if dataset is not None:
            dataset.batch(range(1))  # compiles the loops once, before there are processes that each would
        return dataset

    def _sources(self, part: str) -> tuple[Source, ...]:
        data = self._data
        if data.train_data_path is not None:
            name = f"{part}_data_path"
            texts = getattr(data, name)
        else:
            name, texts = "data_path", data.data_path
            if texts is None:
                raise UserError(f"{name} is not given; expected the path of a .bin/.idx pair without extension")
        return () if texts is None else parse_sources(texts, name=name)

    def _bounds(self, source: Source, part: str) -> Bounds:
        num_items = self.num_items(self.open(source.prefix))
        if self._data.train_data_path is not None:
            return 0, num_items
        return split_bounds(self._data.split_weights(), num_items)[PARTS.index(part)]

    def _note(self, source: Source, part: str, dataset: SampleDataset, num_samples: int) -> None:
        files, bounds = self.open(source.prefix), self._bounds(source, part)
        passes = num_samples / self.num_samples_in_a_pass(dataset, files, bounds)
        tokens = self.num_tokens(files, bounds)
        self._ingredients.append(Ingredient(part, source.prefix, bounds[1] - bounds[0], tokens, num_samples, passes))

    def _refuse_or_leave_out(self, source: Source, part: str, consequence: str) -> None:
        first, last = self._bounds(source, part)
        split = "" if self._data.train_data_path is not None else f", split {self._data.split}"
        reason = f"the {part} part of {source.prefix} (documents {first} to {last}{split}) has no usable text"
        if part == "train":
            advice = f"give more text or change {'split' if split else 'train_data_path'}"
            raise UserError(f"{reason}; expected {self.least_text} or more; {advice}")
        self.note(f"{reason}: {consequence}")


def count_tokens(sizes: np.ndarray[Any, Any]) -> int:
    """Sum of lengths, which may exceed the type of each."""
    return int(sizes.sum(dtype=np.int64))
