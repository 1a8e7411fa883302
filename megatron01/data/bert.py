"""BERT samples: consecutive sentences in two segments, with masked tokens and a sentence task.

Which sentences form a sample is drawn once for the whole run (``kernels.map_sentences``); everything else is drawn
per sample from ``RandomState((seed + index) mod 2**32)``. With the objective ``sop`` and the masking
``whole_word_ngram`` samples equal Megatron-LM's, bit for bit. ``nsp`` and ``token`` are the choices of the original
BERT (Devlin et al. 2019): the second segment is that of another document half of the time, segments are truncated to
the sequence, and round(mask_prob x length) single tokens are predicted, one at least and ``max_predictions_per_seq`` at
most.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron01.config import BertDataConfig
from megatron01.data import kernels
from megatron01.data.datasets import SampleCounts, SampleDataset, Samples, Share, SplitBuilder, Splits, TokenFiles
from megatron01.data.index_cache import Arrays, sampled_digest
from megatron01.data.tokenizers import MaskingTokens, Tokenizer
from megatron01.errors import UserError

NUM_SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]

_TASKS = {"none": kernels.NO_PAIRS, "sop": kernels.ORDER, "nsp": kernels.NEXT}
_UNBOUNDED = 2**31


def model_batch(samples: Samples) -> Samples:
    """Add to a batch of BERT samples the positions that determine the shapes of the model's computation.

    ``masked_positions`` int64[k]: positions to predict, in the batch flattened to b s positions. With padding,
    ``token_positions`` int64[t]: positions of real tokens, likewise; without, ``padding_mask`` is removed.
    """
    batch = {**samples, "masked_positions": np.flatnonzero(samples["labels"] >= 0)}
    if samples["padding_mask"].all():
        del batch["padding_mask"]
    else:
        batch["token_positions"] = np.flatnonzero(samples["padding_mask"])
    return batch


class BertDataset(SampleDataset):
    """Masked sentence pairs; sample i is a function of the seed and i alone.

    Samples have Megatron's keys: text, types, labels (-1 where nothing is predicted), loss_mask, padding_mask (1 for
    real tokens), each (s,); is_random (the pair is swapped, or its second segment of another document), truncated: ().
    ``batch`` gives them with a leading axis, text and labels in int32, the others in uint8.

    Args:
        mapping: (N, 3): first sentence, last sentence + 1 and target length of each sample.
        documents: int64[documents + 1], first sentence of each document of this split; for next-sentence pairs.
    """

    collate = staticmethod(model_batch)

    def __init__(
        self,
        files: TokenFiles,
        mapping: NDArray[np.integer],
        documents: NDArray[np.int64],
        *,
        tokens: MaskingTokens,
        config: BertDataConfig,
        seed: int,
    ) -> None:
        super().__init__([files])
        self._files = files
        self._mapping = mapping
        self._documents = documents
        self._config = config
        self._seed = seed
        self._masking = kernels.Masking(
            config.mask_prob,
            config.max_predictions_per_seq or _UNBOUNDED,
            config.masking == "whole_word_ngram",
            tokens.is_continuation,
            *(tokens.cls, tokens.sep, tokens.mask, tokens.pad),
        )

    def __len__(self) -> int:
        return len(self._mapping)

    @property
    def fingerprint(self) -> str:
        digests = [self._files.fingerprint, self._config.seq_length, sampled_digest(self._mapping)]
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def read(self, indices: NDArray[np.int64]) -> Samples:
        files = self._files
        shape = (len(indices), self._config.seq_length)
        rows = kernels.Rows(*(np.empty(shape, dtype) for dtype in (np.int32, np.uint8, np.int32, np.uint8, np.uint8)))
        is_random, truncated = np.empty(shape[0], dtype=np.uint8), np.empty(shape[0], dtype=np.uint8)
        is_sound = kernels.fill_samples(
            indices,
            self._seed,
            _TASKS[self._config.objective],
            self._mapping,
            self._documents,
            files.sizes,
            files.starts,
            files.tokens,
            self._masking,
            rows,
            is_random,
            truncated,
        )
        if not is_sound:
            raise files.damaged_index()
        return {**rows._asdict(), "is_random": is_random, "truncated": truncated}


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

    "epochs", int64[1], is the number of passes over the text. Samples are counted first, so memory holds only the
    mapping (12 bytes a sample).

    Args:
        documents: int64[documents + 1], where each document's sentences begin.
        sizes: int32[S], tokens in each sentence of the file.
        num_samples: minimum number of samples, rounded up to whole epochs.
    """
    short_ratio = int(min(1.0 / short_seq_prob + 0.5, 2**62)) if short_seq_prob > 0 else 0
    dtype = np.uint32 if len(sizes) < 2**32 else np.uint64
    arguments = (documents, sizes, num_samples, seq_length - NUM_SPECIAL_TOKENS, short_ratio, seed, min_sentences)
    count, epochs = kernels.map_sentences(*arguments, np.zeros((0, 3), dtype=dtype))
    mapping = np.zeros((count, 3), dtype=dtype)
    if count:
        kernels.map_sentences(*arguments, mapping)
        kernels.shuffle_rows(mapping, seed + 1)
    return {"mapping": mapping, "epochs": np.array([epochs])}


class _BertSplits(SplitBuilder):
    """Builds the splits of BERT's data; a document is a range of sentences, each a sequence of the file."""

    sequences_are_documents = False
    _data: BertDataConfig

    def __init__(self, data: BertDataConfig, tokenizer: Tokenizer, tokens: MaskingTokens, seed: int) -> None:
        super().__init__(data, tokenizer, seed)
        self._tokens = tokens
        self._min_sentences = 1 if data.objective == "none" else 2
        self.required_text = {
            "none": "one document without an overlong sentence",
            "sop": "one document of two sentences, none overlong",
            "nsp": "two documents, one of them of two sentences, none overlong,",
        }[data.objective]

    def check(self, files: TokenFiles) -> None:
        has_pairs = len(files) > files.num_documents or (np.diff(files.documents) > 1).any()  # beside empty documents
        if self._min_sentences > 1 and not has_pairs:
            raise UserError(
                f"{files.prefix} has {len(files)} sequences in {files.num_documents} documents, so no pairs of"
                " sentences; preprocess the text with split_sentences or set objective to none"
            )

    def build(self, share: Share, split: str, num_samples: int) -> tuple[BertDataset, float] | None:
        data, files = self._data, share.files
        documents = files.documents[share.documents[0] : share.documents[1] + 1]
        if data.objective == "nsp" and np.count_nonzero(np.diff(documents)) < 2:
            return None  # there is no other document from which to draw
        index = self.cached_index(
            f"bert-{split}",
            share,
            partial(build_bert_mapping, documents, files.sizes),
            num_samples=num_samples,
            seq_length=data.seq_length,
            short_seq_prob=data.short_seq_prob,
            seed=self._seed,
            min_sentences=self._min_sentences,
        )
        mapping = index["mapping"]
        if not len(mapping):
            return None
        first, last = share.sequences
        long = first + np.flatnonzero(files.sizes[first:last] > kernels.LONG_SENTENCE)
        owners = np.unique(np.searchsorted(documents, long, side="right") - 1)
        if left_out := np.count_nonzero(np.diff(documents)[owners] > 1):
            self.notes.append(
                f"{left_out} of {len(documents) - 1} documents in the {split} split of {files.prefix} have a sentence"
                f" of more than {kernels.LONG_SENTENCE} tokens and are left out; cut such sentences into shorter ones"
            )
        dataset = BertDataset(files, mapping, documents, tokens=self._tokens, config=data, seed=self._seed)
        return dataset, len(mapping) / int(index["epochs"][0])


def build_bert_datasets(data: BertDataConfig, tokenizer: Tokenizer, counts: SampleCounts, seed: int) -> Splits:
    """The splits of the data as BERT samples; mappings come from the cache or are built and stored there.

    Raises UserError if the files are damaged, of another vocabulary or not split into sentences, or if there is no text
    to train on.
    """
    tokens = tokenizer.masking
    if tokens is None:
        raise UserError(
            f"{tokenizer.name} lacks the tokens [CLS], [SEP], [MASK] and [PAD], or word-boundary marks; use a tokenizer"
            " made for BERT"
        )
    num_tokens = data.seq_length - NUM_SPECIAL_TOKENS
    if num_tokens < 2:
        raise UserError(f"seq_length is {data.seq_length}; expected {NUM_SPECIAL_TOKENS + 2} or more for BERT")
    if data.masking == "whole_word_ngram" and data.mask_prob * num_tokens < 1:
        raise UserError(
            f"mask_prob {data.mask_prob} of seq_length {data.seq_length} is less than one token, so that none would be"
            " masked; raise one of them, or set masking to token"
        )
    return _BertSplits(data, tokenizer, tokens, seed).build_splits(counts)
