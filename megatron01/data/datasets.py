"""Datasets of samples, their blends, and the train, validation and test splits of a corpus.

Indices say where in a token file a sample lies. Used with another file of the same name they would give text cut at
the wrong places, silently; a file that shrinks under a memory map even ends the process (SIGBUS). So indices are tied
to what the files hold, and the files that are mapped are looked at again with every batch.

Legend: b samples of a batch, N samples of a dataset, D datasets of a blend.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron01.config import DataConfig
from megatron01.config.data import Source, parse_sources
from megatron01.data.index_cache import Arrays, cache_folder, cached_arrays, sampled_digest
from megatron01.data.indexed import IndexedDataset, bin_path, check_fingerprint, check_ids, idx_path, read_origin
from megatron01.data.kernels import fill_blend_order
from megatron01.data.tokenizers import Tokenizer
from megatron01.errors import UserError


class _Stamp(NamedTuple):
    """Size and time of modification: they change when a file is written."""

    num_bytes: int
    modified: int  # ns


class TokenFiles:
    """An ``IndexedDataset`` and the open files behind it, which must stay as they are.

    A file that is *replaced*, by renaming another one to its name, does no harm to a process that has mapped it, and
    is not noticed there; one that is written in place is. Another process that receives this object opens the files
    by name and refuses others than those of the sender.

    Args:
        cache: folder of the sample indices, where what takes long to find out about a file is kept.

    Attributes:
        fingerprint: hash of how the file is cut into sequences and documents, and of samples of its tokens; it depends
            neither on the file's place nor on its time stamps, so that copies share it.

    Raises:
        UserError: if the files are missing, damaged, or change meanwhile.
    """

    def __init__(self, prefix: str, cache: Path) -> None:
        self._watched = _WatchedFiles([bin_path(prefix), idx_path(prefix)])
        self.indexed = IndexedDataset(prefix)
        self.fingerprint = self._fingerprint(cache)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Look whether the files are still what was opened; takes about a microsecond.

        Raises:
            UserError: if one was written or cut short, naming it.
        """
        self._watched.check()

    def _fingerprint(self, cache: Path) -> str:
        indexed = self.indexed
        tokens = sampled_digest(indexed.tokens)
        # Hashing the index file takes seconds for 10^8 sequences: it is done once for each file.
        description = {
            "kind": "layout",
            "files": [tuple(stamp) for stamp in self._watched.stamps],
            "tokens": tokens,
            "sizes": sampled_digest(indexed.sizes),
            "documents": sampled_digest(indexed.documents),
        }

        def build() -> dict[str, np.ndarray[Any, Any]]:
            return {"layout": np.frombuffer(bytes.fromhex(indexed.layout_fingerprint), dtype=np.uint8)}

        layout = cached_arrays(cache, description, build)["layout"].tobytes().hex()
        indexed.layout_fingerprint = layout  # others who ask for it need not hash the file either
        return hashlib.sha256(f"{layout} {tokens}".encode()).hexdigest()


class _WatchedFiles:
    """Files held open, with their size and time of change."""

    def __init__(self, paths: Sequence[Path], expected: Sequence[_Stamp] | None = None) -> None:
        self._paths = [Path(path) for path in paths]
        self._descriptors: list[int] = []
        for path in self._paths:
            try:
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:  # IndexedDataset says what is missing, in better words
                self._descriptors.append(-1)
        self.stamps = [_stamp(descriptor) for descriptor in self._descriptors] if expected is None else expected
        if expected is not None:
            self.check()

    def check(self) -> None:
        for path, descriptor, before in zip(self._paths, self._descriptors, self.stamps, strict=True):
            now = _stamp(descriptor)
            if now != before:
                raise UserError(
                    f"{path} was changed while it was in use (it had {before.num_bytes} bytes and has"
                    f" {now.num_bytes}); put the file back, or start again from the last checkpoint with the new one"
                )

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _WatchedFiles, (self._paths, self.stamps)


def _stamp(descriptor: int) -> _Stamp:
    if descriptor < 0:
        return _Stamp(0, 0)
    status = os.fstat(descriptor)
    return _Stamp(status.st_size, status.st_mtime_ns)


def check_vocabulary(dataset: IndexedDataset, tokenizer: Tokenizer, cache: Path) -> None:
    """Check that a file holds only tokens of a vocabulary, and was made with it where its maker is on record.

    The largest token id is found by one pass over the ``.bin`` file and kept in the cache.

    Raises:
        UserError: if the file needs another vocabulary.
    """
    origin = read_origin(dataset.prefix)
    if origin is not None:
        check_fingerprint(dataset.prefix, origin, tokenizer)
    status = bin_path(dataset.prefix).stat()
    description = {
        "kind": "token-range",
        "layout": dataset.layout_fingerprint,
        "bytes": status.st_size,
        "modified": status.st_mtime_ns,
    }

    def token_range() -> Arrays:
        tokens = dataset.tokens
        return {"range": np.array([tokens.min(), tokens.max()] if tokens.size else [0, 0], dtype=np.int64)}

    least, most = cached_arrays(cache, description, token_range)["range"].tolist()
    check_ids(dataset.prefix, least, most, tokenizer)


Samples = dict[str, NDArray[Any]]
"""Arrays by name, each [b, ...]: one row a sample."""


class SampleDataset(ABC):
    """A map from index to sample. A sample depends on its index alone, so an index is all the state of a resume."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the order of the text: equal for datasets whose sample i is cut from the same place."""

    @abstractmethod
    def read(self, indices: NDArray[np.int64]) -> Samples:
        """The samples of ``indices``, int64[b] in [0, len), in the narrowest types that hold the values.

        Raises:
            UserError: if a file has changed since it was opened.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raises: UserError if a file behind the samples is not what was opened any more."""

    def batch(self, indices: range | NDArray[np.int64]) -> Samples:
        """As ``read``. Raises: IndexError for an index outside of [0, len)."""
        numbers = np.asarray(indices, dtype=np.int64)
        outside = numbers[(numbers < 0) | (numbers >= len(self))]
        if outside.size:
            raise IndexError(f"sample {outside[0]} of {len(self)}")
        return self.read(numbers)

    def collate(self, samples: Samples) -> Samples:
        """The model's input made of a ``batch``, by default the same arrays.

        Called in the loader's processes, so that shapes may depend on contents without a host sync.
        """
        return samples

    def __getitem__(self, index: int) -> Samples:
        """One sample; integers are int64, as in Megatron-LM. Raises: IndexError outside of [0, len)."""
        sample = self.batch(np.array([index]))
        return {name: rows[0].astype(np.int64) if rows.dtype.kind in "iu" else rows[0] for name, rows in sample.items()}


BLEND_MARGIN = 1.005
"""Each dataset of a blend is built for so much more than its share, as in Megatron-LM: it decides on the epochs, and so
on the order of samples."""

_MOST_DATASETS = 2**15  # numbered in int16, as in Megatron-LM


def normalized(weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights with the sum 1, rounded as Megatron-LM does."""
    values = np.array(weights, dtype=np.float64)
    return values / np.sum(values)


def blend_order(weights: Sequence[float], num_samples: int) -> Arrays:
    """The dataset and sample that each sample of a blend is: Megatron-LM's greedy choice (``fill_blend_order``).

    After any number of samples each dataset has given its share to within a few samples, wherever a run stops.

    Args:
        weights: D relative shares, positive.

    Returns:
        "dataset" int16[num_samples], "sample" int64[num_samples] (each dataset's in order), "drawn" int64[D], the
        samples of each.
    """
    assert 0 < len(weights) <= _MOST_DATASETS
    dataset = np.empty(num_samples, dtype=np.int16)
    sample = np.empty(num_samples, dtype=np.int64)
    drawn = np.zeros(len(weights), dtype=np.int64)
    fill_blend_order(normalized(weights), dataset, sample, drawn)
    return {"dataset": dataset, "sample": sample, "drawn": drawn}


def samples_per_dataset(weights: Sequence[float], num_samples: int, drawn: NDArray[np.int64]) -> list[int]:
    """The fewest samples that each dataset of a blend must have."""
    shares = [math.ceil(math.ceil(num_samples * weight) * BLEND_MARGIN) for weight in normalized(weights).tolist()]
    return [max(count, needed) for count, needed in zip(shares, drawn.tolist(), strict=True)]


class BlendedDataset(SampleDataset):
    """Samples of several datasets in the order of ``blend_order``.

    Args:
        datasets: all with samples of the same form.
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
        """As ``SampleDataset.fingerprint``; a longer blend begins like a shorter one and shares it."""
        fingerprints = [dataset.fingerprint for dataset in self.datasets]
        return hashlib.sha256(repr((fingerprints, self.weights)).encode()).hexdigest()

    def read(self, indices: NDArray[np.int64]) -> Samples:
        dataset_of, sample_of = self._dataset_of[indices], self._sample_of[indices]
        present = np.unique(dataset_of).tolist()
        if len(present) == 1:
            result: Samples = self.datasets[present[0]].read(sample_of)
            return result
        batch: dict[str, NDArray[Any]] = {}
        for number in present:
            rows = np.flatnonzero(dataset_of == number)
            for name, values in self.datasets[number].read(sample_of[rows]).items():
                if name not in batch:
                    batch[name] = np.empty((len(indices), *values.shape[1:]), dtype=values.dtype)
                batch[name][rows] = values
        return batch

    def collate(self, samples: Samples) -> Samples:
        return self.datasets[0].collate(samples)

    def check_unchanged(self) -> None:
        for dataset in self.datasets:
            dataset.check_unchanged()


T = TypeVar("T")

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class SampleCounts:
    """Samples that a run takes from each split; a split of which it takes none is not built."""

    train: int
    valid: int = 0
    test: int = 0


@dataclass(frozen=True)
class SplitSource:
    """The share of a pair of token files in a split.

    Attributes:
        num_documents, num_tokens: those of the pair that are in the split.
        num_samples: samples that the run takes from it.
        num_epochs: passes over the text that these make up.
    """

    split: str
    prefix: str
    num_documents: int
    num_tokens: int
    num_samples: int
    num_epochs: float


@dataclass(frozen=True)
class Splits(Generic[T]):
    """One object a split; None where no samples are wanted or the split holds no usable text."""

    train: T | None
    valid: T | None
    test: T | None
    sources: tuple[SplitSource, ...] = ()
    """The token files of each split, if known."""
    notes: tuple[str, ...] = ()
    """Messages for the user: splits and files that were left out."""


def split_bounds(shares: Sequence[float], num_items: int) -> list[tuple[int, int]]:
    """First and last + 1 item of each split, rounded as in Megatron-LM's current releases.

    Args:
        shares: of the splits, sum 1.
        num_items: documents (BERT) or sequences (GPT) in the file.
    """
    bounds = [round(share * num_items) for share in accumulate(shares, initial=0.0)]
    bounds[-1] = num_items  # the shares' sum is 1 only up to rounding
    return list(pairwise(bounds))


Bounds = tuple[int, int]


class SplitBuilder(ABC):
    """Builds the splits of a corpus as datasets of one kind of samples; every file is opened once.

    Args:
        tokenizer: the vocabulary that the files must have been made with.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._opened: dict[str, TokenFiles] = {}
        self._split_sources: list[SplitSource] = []
        self._notes: list[str] = []

    @property
    @abstractmethod
    def required_text(self) -> str:
        """The least text of a split, for messages."""

    @abstractmethod
    def num_items(self, files: TokenFiles) -> int:
        """Documents (BERT) or sequences (GPT), between which splits are cut."""

    @abstractmethod
    def num_tokens(self, files: TokenFiles, bounds: Bounds) -> int:
        """Tokens of the items in ``bounds``."""

    @abstractmethod
    def samples_per_epoch(self, dataset: Any, files: TokenFiles, bounds: Bounds) -> float:
        """Samples in one pass over the items in ``bounds``, of the ``dataset`` that ``build`` made of them."""

    @abstractmethod
    def build(self, files: TokenFiles, split: str, bounds: Bounds, num_samples: int) -> SampleDataset | None:
        """``num_samples`` samples or more of the items in ``bounds``; None if these hold no usable text."""

    @abstractmethod
    def check(self, files: TokenFiles) -> None:
        """Raises: UserError for files that cannot hold this kind of samples."""

    def note(self, text: str) -> None:
        """Add to ``Splits.notes``."""
        self._notes.append(text)

    def cache(self, prefix: str) -> Path:
        """Folder of the sample indices of a file."""
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

    def build_splits(self, counts: SampleCounts) -> Splits[Any]:
        """Every split of which samples are wanted.

        Raises:
            UserError: if there is no text to train on, or what ``open`` raises.
        """
        self._split_sources.clear()
        self._notes.clear()
        datasets = {split: self._build_split(split, getattr(counts, split)) for split in SPLITS}
        return Splits(**datasets, sources=tuple(self._split_sources), notes=tuple(self._notes))

    def _build_split(self, split: str, num_samples: int) -> SampleDataset | None:
        sources = self._sources(split) if num_samples else ()
        if num_samples and not sources:
            self.note(f"{split}_data_path is not given: there is no {split} split")
        while len(sources) > 1:
            blend, empty = self._blend(sources, split, num_samples)
            if blend is not None:
                return blend
            for source in empty:
                self._refuse_or_leave_out(source, split, "the others fill its share")
            sources = tuple(source for source in sources if source not in empty)
        if not sources:
            return None
        dataset = self._build_source(sources[0], split, num_samples)
        if dataset is None:
            self._refuse_or_leave_out(sources[0], split, "it is not evaluated")
        else:
            self._note(sources[0], split, dataset, num_samples)
        return dataset

    def _blend(
        self, sources: Sequence[Source], split: str, num_samples: int
    ) -> tuple[BlendedDataset | None, list[Source]]:
        """The blend; or None, and the sources that hold no text for it."""
        weights = self._weights(sources, split)
        empty = [source for source, weight in zip(sources, weights, strict=True) if not weight]
        if empty:
            return None, empty
        description = {"kind": f"blend-{split}", "weights": normalized(weights).tolist(), "num_samples": num_samples}
        cache = self.cache(sources[0].prefix)
        order = cached_arrays(cache, description, partial(blend_order, weights, num_samples))
        requested = samples_per_dataset(weights, num_samples, order["drawn"])
        found = [self._build_source(source, split, count) for source, count in zip(sources, requested, strict=True)]
        datasets = [dataset for dataset in found if dataset is not None]
        if len(datasets) < len(sources):
            return None, [source for source, dataset in zip(sources, found, strict=True) if dataset is None]
        for source, dataset, drawn in zip(sources, datasets, order["drawn"].tolist(), strict=True):
            self._note(source, split, dataset, drawn)
        return BlendedDataset(datasets, weights, order), []

    def _weights(self, sources: Sequence[Source], split: str) -> list[float]:
        given = [source.weight for source in sources]
        if None not in given:
            return [float(weight) for weight in given if weight is not None]
        tokens = [self.num_tokens(self.open(source.prefix), self._bounds(source, split)) for source in sources]
        return [float(count) for count in tokens]

    def _build_source(self, source: Source, split: str, num_samples: int) -> SampleDataset | None:
        bounds = self._bounds(source, split)
        if bounds[0] == bounds[1]:
            return None
        dataset = self.build(self.open(source.prefix), split, bounds, num_samples)
        if dataset is not None:
            dataset.batch(range(1))  # compiles the loops once, before there are processes that each would
        return dataset

    def _sources(self, split: str) -> tuple[Source, ...]:
        data = self._data
        if data.train_data_path is not None:
            name = f"{split}_data_path"
            texts = getattr(data, name)
        else:
            name, texts = "data_path", data.data_path
            if texts is None:
                raise UserError(f"{name} is not given; expected the path of a .bin/.idx pair without extension")
        return () if texts is None else parse_sources(texts, name=name)

    def _bounds(self, source: Source, split: str) -> Bounds:
        num_items = self.num_items(self.open(source.prefix))
        if self._data.train_data_path is not None:
            return 0, num_items
        return split_bounds(self._data.split_weights(), num_items)[SPLITS.index(split)]

    def _note(self, source: Source, split: str, dataset: SampleDataset, num_samples: int) -> None:
        files, bounds = self.open(source.prefix), self._bounds(source, split)
        epochs = num_samples / self.samples_per_epoch(dataset, files, bounds)
        tokens = self.num_tokens(files, bounds)
        self._split_sources.append(
            SplitSource(split, source.prefix, bounds[1] - bounds[0], tokens, num_samples, epochs)
        )

    def _refuse_or_leave_out(self, source: Source, split: str, consequence: str) -> None:
        first, last = self._bounds(source, split)
        cut = "" if self._data.train_data_path is not None else f", split {self._data.split}"
        reason = f"the {split} split of {source.prefix} (documents {first} to {last}{cut}) has no usable text"
        if split == "train":
            advice = f"give more text or change {'split' if cut else 'train_data_path'}"
            raise UserError(f"{reason}; expected {self.required_text} or more; {advice}")
        self.note(f"{reason}: {consequence}")


def count_tokens(sizes: np.ndarray[Any, Any]) -> int:
    """Sum of lengths, which may exceed the type of each."""
    return int(sizes.sum(dtype=np.int64))
