"""Datasets of samples, their blends, and the train, validation and test splits of a corpus.

Sample indices hold positions in token files. With another file of the same name they would silently yield wrong
samples, and a file that shrinks under its memory map kills the process (SIGBUS). So indices are keyed by the files'
content, and mapped files are checked for changes with every batch.

Legend: b samples of a batch, N samples of a dataset, D datasets of a blend.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.config import DataConfig
from megatron01.config.data import BlendEntry, parse_sources
from megatron01.data.index_cache import Arrays, cached_arrays, sampled_digest
from megatron01.data.indexed import IndexedDataset, bin_path, check_fingerprint, check_ids, idx_path
from megatron01.data.kernels import fill_blend_order
from megatron01.data.tokenizers import Tokenizer
from megatron01.errors import UserError
from megatron01.utils.files import allow_many_open_files


class TokenFiles(IndexedDataset):
    """A ``.bin``/``.idx`` pair that is held open and must not change while in use.

    A file written in place is detected. One that is replaced by renaming another over it does no harm: this process
    keeps reading the old one. Unpickled in another process, the object refuses files with other stamps. Raises
    UserError if the files are missing, damaged, or change meanwhile.

    Args:
        cache: folder of the sample index cache, which also keeps what takes a pass over the files.
        stamps: size in bytes and modification time (ns) required of .bin and .idx; by default the present ones.
    """

    def __init__(self, prefix: str, cache: Path, stamps: Sequence[tuple[int, int]] = ()) -> None:
        self.cache = cache
        self._paths = (bin_path(prefix), idx_path(prefix))
        self._descriptors: list[int] = []
        for path in self._paths:
            with suppress(OSError):  # IndexedDataset reports a missing file
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._stamps = stamps or [(now.st_size, now.st_mtime_ns) for now in map(os.fstat, self._descriptors)]
        super().__init__(prefix)
        tokens = sampled_digest(self.tokens)
        description = {
            "kind": "token-files",
            "files": self._stamps,
            "tokens": tokens,
            "sizes": sampled_digest(self.sizes),
            "documents": sampled_digest(self.documents),
        }
        described = cached_arrays(cache, description, self._describe)
        # sets the cached property, so that later reads of it do not hash the file either
        self.layout_fingerprint = described["layout"].tobytes().hex()
        # independent of path and time stamps, so that copies share it
        self.fingerprint = hashlib.sha256(f"{self.layout_fingerprint} {tokens}".encode()).hexdigest()
        self.least, self.most = described["ids"].tolist()  # smallest and largest token id; 0 without tokens
        self.check_unchanged()

    def __del__(self, close: Callable[[int], None] = os.close, suppress: type = suppress) -> None:
        for descriptor in self._descriptors:  # defaults: when Python ends, what this module has imported may be gone
            with suppress(OSError):
                close(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFiles, (self.prefix, self.cache, self._stamps)

    def check_unchanged(self) -> None:
        """Raises: UserError if size or modification time of an open file has changed, OSError if they cannot be known.

        Takes about a microsecond.
        """
        for path, descriptor, before in zip(self._paths, self._descriptors, self._stamps, strict=True):
            try:
                now = os.fstat(descriptor)
            except OSError as error:  # of a file server, say
                error.filename = str(path)
                raise
            if (now.st_size, now.st_mtime_ns) != before:
                raise UserError(
                    f"{path} was changed while it was in use (it had {before[0]} bytes and has {now.st_size}); put the"
                    " file back, or start again from the last checkpoint with the new one"
                )

    def damaged_index(self) -> UserError:
        """The error for a sample index that points outside of the file."""
        return UserError(f"the sample index of {self.prefix} is damaged; delete its folder in the cache")

    def _describe(self) -> Arrays:
        """What takes a pass over the files, seconds for 10^8 sequences: "layout", their hash; "ids", least and most."""
        ids = [self.tokens.min(), self.tokens.max()] if self.tokens.size else [0, 0]
        layout = np.frombuffer(bytes.fromhex(self.layout_fingerprint), dtype=np.uint8)
        return {"layout": layout, "ids": np.array(ids, dtype=np.int64)}


Samples = dict[str, NDArray[Any]]  # arrays by name, each [b, ...]: one row a sample


class SampleDataset(ABC):
    """A map-style dataset. A sample depends on its index alone, so an index is all the state that a resume needs."""

    collate: Callable[[Samples], Samples] = dict
    """Makes the model's input from a ``batch``, by default a copy; called in the loader's processes."""

    def __init__(self, token_files: Sequence[TokenFiles]) -> None:
        self.token_files = token_files  # those that samples are read from

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of text and sample order: equal for datasets whose sample i comes from the same tokens."""

    @abstractmethod
    def read(self, indices: NDArray[np.int64]) -> Samples:
        """The samples of ``indices``, int64[b] in [0, len), in the narrowest types that hold the values."""

    def batch(self, indices: range | NDArray[np.int64]) -> Samples:
        """As ``read``. Raises IndexError for an index outside of [0, len), UserError if a token file has changed."""
        numbers = np.asarray(indices, dtype=np.int64)
        outside = numbers[(numbers < 0) | (numbers >= len(self))]
        if outside.size:
            raise IndexError(f"sample {outside[0]} of {len(self)}")
        self.check_unchanged()
        samples = self.read(numbers)
        self.check_unchanged()
        return samples

    def check_unchanged(self) -> None:
        """Raises: UserError if a token file has changed since it was opened."""
        for files in self.token_files:
            files.check_unchanged()

    def __getitem__(self, index: int) -> Samples:
        """One sample; integers are int64, as in Megatron-LM. Raises: IndexError outside of [0, len)."""
        sample = self.batch(np.array([index]))
        return {name: rows[0].astype(np.int64) if rows.dtype.kind in "iu" else rows[0] for name, rows in sample.items()}


BLEND_MARGIN = 1.005
"""Factor on the samples that each dataset of a blend is built for, as in Megatron-LM; it affects the number of epochs,
and so the order of samples."""

_MOST_DATASETS = 2**15  # numbered in int16, as in Megatron-LM


def normalized(weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights scaled to sum 1, float64[D], with Megatron-LM's rounding."""
    values = np.array(weights, dtype=np.float64)
    return values / np.sum(values)


def blend_order(weights: Sequence[float], num_samples: int) -> Arrays:
    """Source dataset and sample of each sample of a blend: Megatron-LM's greedy choice (``fill_blend_order``).

    After any number of samples, each dataset's count is within a few samples of its share, of the D positive weights.
    "dataset" is int16[num_samples]; "sample" int64[num_samples], consecutive within each dataset; "drawn" int64[D].
    """
    assert 0 < len(weights) <= _MOST_DATASETS
    dataset = np.empty(num_samples, dtype=np.int16)
    sample = np.empty(num_samples, dtype=np.int64)
    drawn = np.zeros(len(weights), dtype=np.int64)
    fill_blend_order(normalized(weights), dataset, sample, drawn)
    return {"dataset": dataset, "sample": sample, "drawn": drawn}


def samples_per_dataset(weights: Sequence[float], num_samples: int, drawn: NDArray[np.int64]) -> list[int]:
    """Minimum samples to build each dataset of a blend for; ``drawn``: int64[D], from ``blend_order``."""
    shares = [math.ceil(math.ceil(num_samples * weight) * BLEND_MARGIN) for weight in normalized(weights).tolist()]
    return [max(count, needed) for count, needed in zip(shares, drawn.tolist(), strict=True)]


class BlendedDataset(SampleDataset):
    """Samples of several datasets of one kind, in the ``order`` that ``blend_order`` returns.

    No dataset may be shorter than what is drawn from it.
    """

    def __init__(self, datasets: Sequence[SampleDataset], weights: Sequence[float], order: Arrays) -> None:
        drawn = order["drawn"].tolist()
        assert len(datasets) == len(weights) == len(drawn)
        assert all(len(dataset) >= count for dataset, count in zip(datasets, drawn, strict=True))
        super().__init__(list(dict.fromkeys(files for dataset in datasets for files in dataset.token_files)))
        self.datasets = list(datasets)
        self.collate = datasets[0].collate
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
        batch: dict[str, NDArray[Any]] = {}
        for number in np.unique(dataset_of).tolist():
            rows = np.flatnonzero(dataset_of == number)
            for name, values in self.datasets[number].read(sample_of[rows]).items():
                if name not in batch:
                    batch[name] = np.empty((len(indices), *values.shape[1:]), dtype=values.dtype)
                batch[name][rows] = values
        return batch


SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class SampleCounts:
    """Number of samples that a run takes from each split; a split with 0 is not built."""

    train: int
    valid: int = 0
    test: int = 0


@dataclass(frozen=True)
class SplitSource:
    """What one pair of token files contributes to a split: documents and tokens, and the samples taken from them."""

    split: str
    prefix: str
    num_documents: int
    num_tokens: int
    num_samples: int
    num_epochs: float  # passes over this text that the samples amount to


@dataclass(frozen=True)
class Splits:
    """A dataset per split, which may be of a user's class; None where none is wanted, or no usable text is left."""

    train: Any
    valid: Any
    test: Any
    sources: tuple[SplitSource, ...] = ()
    """The token files of each split, if known."""
    notes: tuple[str, ...] = ()
    """Messages for the user: splits and files that were left out."""


def split_bounds(shares: Sequence[float], num_items: int) -> list[tuple[int, int]]:
    """First and last + 1 item of each split, rounded as in Megatron-LM's current releases; ``shares`` have sum 1."""
    bounds = [round(share * num_items) for share in itertools.accumulate(shares, initial=0.0)]
    bounds[-1] = num_items  # the shares' sum is 1 only up to rounding
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class Share:
    """The part of a pair of token files that belongs to a split."""

    files: TokenFiles
    documents: tuple[int, int]  # first and last + 1
    sequences: tuple[int, int]  # likewise, those that hold these documents
    num_tokens: int
    weight: float  # share of the samples in a blend, relative to other pairs'


class SplitBuilder(ABC):
    """Builds the splits of a corpus as datasets of one kind of samples; every file is opened once."""

    sequences_are_documents: bool  # splits are cut between sequences (GPT-2), not documents of the file (BERT)
    required_text: str  # minimum text of a split, for messages

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, seed: int) -> None:
        allow_many_open_files()
        self.notes: list[str] = []
        self._data = data
        self._seed = seed
        self._tokenizer = tokenizer
        self._opened: dict[str, TokenFiles] = {}
        self._split_sources: list[SplitSource] = []

    @abstractmethod
    def check(self, files: TokenFiles) -> None:
        """Raises: UserError for files that cannot hold this kind of samples."""

    @abstractmethod
    def build(self, share: Share, split: str, num_samples: int) -> tuple[SampleDataset, float] | None:
        """At least ``num_samples`` samples, and the number in a pass over the text; None if the text is not usable."""

    def cached_index(self, kind: str, share: Share, build: Callable[..., Arrays], **parameters: Any) -> Arrays:
        """The sample index of a share: from the cache, or made by ``build(**parameters)`` and stored there."""
        description = {"kind": kind, "files": share.files.fingerprint, "bounds": share.documents, **parameters}
        return cached_arrays(share.files.cache, description, partial(build, **parameters))

    def build_splits(self, counts: SampleCounts) -> Splits:
        """Build every split of which samples are wanted.

        Raises UserError if there is no text to train on, or a pair is missing, damaged, or of another kind.
        """
        datasets = {split: self._build_split(split, getattr(counts, split)) for split in SPLITS}
        return Splits(**datasets, sources=tuple(self._split_sources), notes=tuple(dict.fromkeys(self.notes)))

    def _build_split(self, split: str, num_samples: int) -> SampleDataset | None:
        if not num_samples:
            return None
        shares = self._shares(split)
        if not shares:
            self.notes.append(f"{split}_data_path is not given: there is no {split} split")
        shares = self._usable(shares, [share.num_tokens > 0 for share in shares], split)
        while shares:
            weights = [share.weight for share in shares]
            order: Arrays = {}
            drawn = wanted = [num_samples]
            if len(shares) > 1:
                shown = normalized(weights).tolist()
                description = {"kind": f"blend-{split}", "weights": shown, "num_samples": num_samples}
                order = cached_arrays(shares[0].files.cache, description, partial(blend_order, weights, num_samples))
                drawn, wanted = order["drawn"].tolist(), samples_per_dataset(weights, num_samples, order["drawn"])
            found = [self.build(share, split, count) for share, count in zip(shares, wanted, strict=True)]
            built = [usable for usable in found if usable is not None]
            if len(built) == len(shares):
                for share, (dataset, per_epoch), count in zip(shares, built, drawn, strict=True):
                    dataset.batch(range(1))  # compiles the kernels once, before worker processes each would
                    first, last = share.documents
                    epochs = count / per_epoch
                    source = SplitSource(split, share.files.prefix, last - first, share.num_tokens, count, epochs)
                    self._split_sources.append(source)
                datasets = [dataset for dataset, _ in built]
                return BlendedDataset(datasets, weights, order) if len(datasets) > 1 else datasets[0]
            shares = self._usable(shares, [usable is not None for usable in found], split)
        return None

    def _usable(self, shares: Sequence[Share], is_usable: Sequence[bool], split: str) -> list[Share]:
        """The usable shares of a split. Others are noted; in the training split they raise UserError."""
        consequence = "the others fill its share" if any(is_usable) else "it is not evaluated"
        for share, usable in zip(shares, is_usable, strict=True):
            if usable:
                continue
            first, last = share.documents
            cut = "" if self._data.train_data_path is not None else f", split {self._data.split}"
            reason = f"the {split} split of {share.files.prefix} (documents {first} to {last}{cut}) has no usable text"
            if split == "train":
                advice = f"give more text or change {'split' if cut else 'train_data_path'}"
                raise UserError(f"{reason}; expected {self.required_text} or more; {advice}")
            self.notes.append(f"{reason}: {consequence}")
        return list(itertools.compress(shares, is_usable))

    def _shares(self, split: str) -> list[Share]:
        name = "data_path" if self._data.train_data_path is None else f"{split}_data_path"
        texts = getattr(self._data, name)
        if texts is None and name == "data_path":
            raise UserError(f"{name} is not given; expected the path of a .bin/.idx pair without extension")
        return [self._share(source, split) for source in parse_sources(texts, name=name)] if texts else []

    def _share(self, source: BlendEntry, split: str) -> Share:
        files = self._open(source.prefix)
        count = len(files) if self.sequences_are_documents else files.num_documents
        documents = 0, count
        if self._data.train_data_path is None:
            documents = split_bounds(self._data.split_weights(), count)[SPLITS.index(split)]
        first, last = documents if self.sequences_are_documents else files.documents[list(documents)].tolist()
        num_tokens = int(files.sizes[first:last].sum())
        return Share(files, documents, (first, last), num_tokens, source.weight or float(num_tokens))

    def _open(self, prefix: str) -> TokenFiles:
        if prefix not in self._opened:
            check_fingerprint(prefix, self._tokenizer)  # before the files are read for long
            files = TokenFiles(prefix, Path(self._data.data_cache_path or Path(prefix).parent / "cache"))
            check_ids(prefix, files.least, files.most, self._tokenizer)
            self.check(files)
            self._opened[prefix] = files
        return self._opened[prefix]
