"""BERT samples: consecutive sentences in two segments, with masked tokens and a sentence task.

Which sentences form a sample is drawn once for the whole run (``kernels.map_sentences``); everything else is drawn per
sample from ``RandomState((seed + index) mod 2**32)``. With the objective ``sop`` and the masking ``whole_word_ngram``
samples equal Megatron-LM's, bit for bit. The other choices are those of the original BERT.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron01.config import BertDataConfig
from megatron01.data import kernels
from megatron01.data.index_cache import Arrays, cache_folder, cached_arrays
from megatron01.data.indexed.dataset import IndexedDataset
from megatron01.data.splits import SampleCounts, Splits, build_parts, split_bounds
from megatron01.data.tokenization.tokenizer import BertTokenizer, Tokenizer
from megatron01.data.vocabulary import check_vocabulary
from megatron01.errors import UserError

NUM_SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]


class BertDataset:
    """Masked sentence pairs; sample i is a function of the seed and i alone.

    An instance is for one thread at a time (it reuses one random generator); processes each have their own.

    Args:
        indexed: the tokens, one sequence a sentence.
        mapping: (N, 3): first sentence, last sentence + 1 and target length of each sample.
        documents: int64[documents + 1], where each of this part's documents begins; for next-sentence pairs.
        tokenizer: special tokens and word boundaries.
        config: sequence length, objective and masking.
        seed: base of the samples' seeds.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        mapping: NDArray[np.integer],
        documents: NDArray[np.int64],
        *,
        tokenizer: BertTokenizer,
        config: BertDataConfig,
        seed: int,
    ) -> None:
        self._indexed = indexed
        self._mapping = mapping
        self._documents = documents
        self._tokenizer = tokenizer
        self._config = config
        self._seed = seed
        self._max_predictions = config.max_predictions_per_seq or sys.maxsize
        self._generator = kernels.new_generator()

    def __len__(self) -> int:
        return len(self._mapping)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Megatron's keys, all int64.

        text, types, labels (-1 where nothing is predicted), loss_mask, padding_mask (1 for real tokens): (s,);
        is_random (the pair is swapped, or its second segment of another document), truncated: ().
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        kernels.seed_generator(self._generator, (self._seed + index) % 2**32)
        first, last, target_length = self._mapping[index].tolist()
        segment_a, segment_b, is_random = self._draw_segments(first, last, target_length)
        tokenizer, config = self._tokenizer, self._config
        sample = np.empty((5, config.seq_length), dtype=np.int64)
        truncated = kernels.fill_sample(
            self._generator,
            segment_a,
            segment_b,
            target_length,
            config.mask_prob,
            self._max_predictions,
            config.masking == "whole_word_ngram",
            tokenizer.is_continuation,
            tokenizer.cls,
            tokenizer.sep,
            tokenizer.mask,
            tokenizer.pad,
            sample,
        )
        names = ("text", "types", "labels", "loss_mask", "padding_mask")
        return {
            **dict(zip(names, sample, strict=True)),
            "is_random": np.array(is_random, dtype=np.int64),
            "truncated": np.array(truncated, dtype=np.int64),
        }

    def _draw_segments(
        self, first: int, last: int, target_length: int
    ) -> tuple[NDArray[np.integer], NDArray[np.integer], bool]:
        """Tokens of the two segments, and whether they are not what follows what."""
        if self._config.objective == "none":
            return self._sentences(first, last), self._sentences(first, first), False
        pivot = first + 1
        if last - first >= 3:
            pivot += int(kernels.random_below(self._generator, last - first - 1))
        segment_a, segment_b = self._sentences(first, pivot), self._sentences(pivot, last)
        if kernels.random_unit(self._generator) >= 0.5:
            return segment_a, segment_b, False
        if self._config.objective == "sop":
            return segment_b, segment_a, True
        return segment_a, self._draw_other(first, target_length - len(segment_a)), True

    def _draw_other(self, sentence: int, length: int) -> NDArray[np.integer]:
        """Sentences of another document, from a random one on, until there are ``length`` tokens or it ends."""
        own = int(np.searchsorted(self._documents, sentence, side="right")) - 1
        first = last = 0
        while first == last:  # empty documents are drawn again
            document = int(kernels.random_below(self._generator, len(self._documents) - 2))
            document += document >= own
            first, last = self._documents[document : document + 2].tolist()
        first += int(kernels.random_below(self._generator, last - first))
        lengths = np.cumsum(self._indexed.sizes[first:last], dtype=np.int64)
        return self._sentences(first, min(last, first + 1 + int(np.searchsorted(lengths, length))))

    def _sentences(self, first: int, last: int) -> NDArray[np.integer]:
        """The tokens of consecutive sentences, a read-only view into the file."""
        if first == last:
            return self._indexed.tokens[:0]
        end = self._indexed.first_token(last - 1) + int(self._indexed.sizes[last - 1])
        return self._indexed.tokens[self._indexed.first_token(first) : end]


def build_bert_mapping(
    documents: NDArray[np.int64],
    sizes: NDArray[np.int32],
    *,
    num_samples: int,
    seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_sentences: int,
) -> Arrays:
    """The sentences of each sample, shuffled: "mapping", (N, 3) of first sentence, last sentence + 1, target length.

    Args:
        documents: int64[documents + 1], where each document's sentences begin.
        sizes: int32[S], tokens in each sentence of the file.
        num_samples: the fewest samples; whole epochs are made.
    """
    documents, sizes = np.array(documents), np.array(sizes)  # in the file they may lie unaligned
    short_ratio = int(np.floor(1.0 / short_seq_prob + 0.5)) if short_seq_prob > 0 else 0
    dtype = np.uint32 if len(sizes) < 2**32 else np.uint64
    arguments = (documents, sizes, num_samples, seq_length - NUM_SPECIAL_TOKENS, short_ratio, seed, min_sentences)
    count = kernels.map_sentences(*arguments, np.zeros((0, 3), dtype=dtype))
    mapping = np.zeros((count, 3), dtype=dtype)
    if count:
        kernels.map_sentences(*arguments, mapping)
        kernels.shuffle_rows(mapping, seed + 1)
    return {"mapping": mapping}


def build_bert_datasets(
    data: BertDataConfig, tokenizer: Tokenizer, counts: SampleCounts, seed: int
) -> Splits[BertDataset]:
    """The parts of a file of sentences as BERT samples; mappings come from the cache or are built and stored there.

    Raises:
        UserError: if the files are damaged, of another vocabulary or not split into sentences, or if there is no text
            to train on.
    """
    if not isinstance(tokenizer, BertTokenizer):
        raise UserError(f"tokenizer_type {data.tokenizer_type} has no [MASK]; use BertWordPieceLowerCase or ...Case")
    special = tokenizer
    if data.seq_length < NUM_SPECIAL_TOKENS + 2:
        raise UserError(f"seq_length is {data.seq_length}; expected {NUM_SPECIAL_TOKENS + 2} or more for BERT")
    indexed = IndexedDataset(data.data_path)
    cache = cache_folder(data.data_cache_path, data.data_path)
    check_vocabulary(indexed, tokenizer, cache)
    min_sentences = 1 if data.objective == "none" else 2
    if min_sentences > 1 and len(indexed) <= indexed.num_documents:
        raise UserError(
            f"{data.data_path} has {len(indexed)} sequences in {indexed.num_documents} documents, so no pairs of"
            " sentences; preprocess the text with split_sentences or set objective to none"
        )

    def build_part(name: str, bounds: tuple[int, int], num_samples: int) -> BertDataset | None:
        documents = np.array(indexed.documents[bounds[0] : bounds[1] + 1])
        if data.objective == "nsp" and np.count_nonzero(np.diff(documents)) < 2:
            return None  # there is no other document from which to draw
        parameters: dict[str, Any] = {
            "num_samples": num_samples,
            "seq_length": data.seq_length,
            "short_seq_prob": data.short_seq_prob,
            "seed": seed,
            "min_sentences": min_sentences,
        }
        description = {"kind": f"bert-{name}", "layout": indexed.layout_fingerprint, "bounds": bounds, **parameters}
        index = cached_arrays(cache, description, lambda: build_bert_mapping(documents, indexed.sizes, **parameters))
        if len(index["mapping"]) == 0:
            return None
        return BertDataset(indexed, index["mapping"], documents, tokenizer=special, config=data, seed=seed)

    bounds = split_bounds(data.split_weights(), indexed.num_documents)
    return build_parts(build_part, prefix=data.data_path, split=data.split, bounds=bounds, counts=counts)
