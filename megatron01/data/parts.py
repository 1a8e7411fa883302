"""From the settings to the training, validation and test part of the data, each one dataset or a mixture of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron01.config import DataConfig
from megatron01.data.blend import BlendedDataset, blend_order, normalized, samples_to_ask_for
from megatron01.data.index_cache import cache_folder, cached_arrays
from megatron01.data.samples import SampleDataset
from megatron01.data.sources import Source, parse_sources
from megatron01.data.splits import PARTS, Ingredient, SampleCounts, Splits, split_bounds
from megatron01.data.token_files import TokenFiles
from megatron01.data.tokenization.tokenizer import Tokenizer
from megatron01.data.vocabulary import check_vocabulary
from megatron01.errors import UserError

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
