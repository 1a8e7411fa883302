"""GPT-2 samples: documents in shuffled order, one after the other, cut into sequences.

Three arrays say which tokens make up a sample, as in Megatron-LM (and equal to its for the same seed):

    document index  int32[documents x epochs]   documents in the order in which they are read
    sample index    int32[N + 1, 2]             where sample k begins: (position in the document index, token offset)
    shuffle index   uint32[N]                   order in which samples are used

A sample spans sequence length + 1 tokens, so that consecutive ones share one token.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron01.config import GPTDataConfig
from megatron01.data.index_cache import Arrays, cache_folder, cached_arrays
from megatron01.data.indexed.dataset import IndexedDataset
from megatron01.data.splits import SampleCounts, Splits, build_parts, split_bounds
from megatron01.data.tokenization.tokenizer import GPT2Tokenizer, Tokenizer
from megatron01.data.vocabulary import check_vocabulary
from megatron01.errors import UserError


class GPTDataset:
    """Samples of ``seq_length`` tokens and the tokens that follow them; sample i is a function of the index alone.

    Args:
        indexed: the tokens.
        index: arrays "document", "sample" and "shuffle" from ``build_gpt_index``.
        config: sequence length, resetting of positions and masking at document ends.
        eod: id of the end-of-document token.
    """

    def __init__(self, indexed: IndexedDataset, index: Arrays, config: GPTDataConfig, *, eod: int) -> None:
        self._indexed = indexed
        self._documents, self._samples, self._order = index["document"], index["sample"], index["shuffle"]
        self._config = config
        self._eod = eod

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.generic]]:
        """tokens, labels, position_ids: int64[s]; loss_mask: float32[s]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        text = self._read(int(self._order[index]))  # (s + 1,)
        tokens = text[:-1]
        length = len(tokens)
        loss_mask = np.ones(length, dtype=np.float32)
        position_ids = np.arange(length, dtype=np.int64)
        if self._config.eod_mask_loss:
            loss_mask[tokens == self._eod] = 0.0
        if self._config.reset_position_ids:
            document_starts = np.where(np.r_[False, tokens[:-1] == self._eod], position_ids, 0)
            position_ids = position_ids - np.maximum.accumulate(document_starts)
        return {"tokens": tokens, "labels": text[1:], "loss_mask": loss_mask, "position_ids": position_ids}

    def _read(self, sample: int) -> NDArray[np.int64]:
        """The sequence length + 1 tokens of a sample, before shuffling."""
        (first, offset), (last, end) = self._samples[sample].tolist(), self._samples[sample + 1].tolist()
        documents = self._documents[first : last + 1].tolist()
        if first == last:
            pieces = [self._indexed.read(documents[0], offset, end - offset + 1)]
        else:
            pieces = [self._indexed.read(documents[0], offset)]
            pieces += [self._indexed.read(document) for document in documents[1:-1]]
            pieces.append(self._indexed.read(documents[-1], 0, end + 1))
        return np.concatenate(pieces, dtype=np.int64, casting="same_kind")


def build_gpt_index(
    sizes: NDArray[np.int32], first: int, last: int, *, num_samples: int, seq_length: int, seed: int
) -> Arrays:
    """Document, sample and shuffle index of the documents [first, last), enough for ``num_samples`` samples.

    Random draws, in this order, from ``RandomState(seed)``: the documents (the last epoch on its own if it is mostly
    unused), then the samples (likewise).

    Args:
        sizes: int32[S], tokens in each document of the file.

    Returns:
        The three arrays; no samples at all if the documents hold no token.
    """
    lengths = np.array(sizes[first:last])
    tokens_per_epoch = int(lengths.sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        empty = np.zeros(0, dtype=np.int32)
        return {"document": empty, "sample": np.zeros((1, 2), dtype=np.int32), "shuffle": empty.astype(np.uint32)}
    num_epochs = -(-(num_samples * seq_length + 1) // tokens_per_epoch)  # least with num_in_epochs >= num_samples

    def num_in_epochs(epochs: int) -> int:
        return (epochs * tokens_per_epoch - 1) // seq_length

    num_total = num_in_epochs(num_epochs)
    num_before_last = num_in_epochs(num_epochs - 1) if num_epochs > 1 else 0
    separate_last = num_epochs > 1 and num_samples - num_before_last < int(0.80 * num_in_epochs(1))

    random = np.random.RandomState(seed)
    epochs_shuffled_together = [num_epochs - 1, 1] if separate_last else [num_epochs]
    documents = np.concatenate(
        [
            _shuffled(np.tile(np.arange(first, last, dtype=np.int32), epochs), random)
            for epochs in epochs_shuffled_together
        ]
    )
    samples = _sample_index(lengths[documents - first], num_total, seq_length)
    order_dtype = np.uint32 if num_total < 2**32 - 2 else np.int64
    bounds = [0, num_before_last, num_total] if separate_last else [0, num_total]
    order = np.concatenate(
        [_shuffled(np.arange(start, stop, dtype=order_dtype), random) for start, stop in pairwise(bounds)]
    )
    return {"document": documents, "sample": samples, "shuffle": order}


def _shuffled(values: NDArray[np.integer], random: np.random.RandomState) -> NDArray[np.integer]:
    random.shuffle(values)
    return values


def _sample_index(lengths: NDArray[np.int32], num_samples: int, seq_length: int) -> NDArray[np.integer]:
    """(position, offset) of token k x seq_length of the stream of documents, for k = 0 to num_samples."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts_of_samples = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, starts_of_samples, side="right")
    offsets = starts_of_samples - (ends[positions] - lengths[positions])
    # As Megatron-LM does, the first sample begins with the first document even if that one is empty.
    positions[0] = 0
    largest = max(int(positions[-1]), int(lengths.max()))
    return np.stack([positions, offsets], axis=1).astype(np.int32 if largest < 2**31 else np.int64)


def build_gpt_datasets(
    data: GPTDataConfig, tokenizer: Tokenizer, counts: SampleCounts, seed: int
) -> Splits[GPTDataset]:
    """The parts of a file of tokens as GPT-2 samples; indices come from the cache or are built and stored there.

    Raises:
        UserError: if the files are damaged or of another vocabulary, or if there is no text to train on.
    """
    if not isinstance(tokenizer, GPT2Tokenizer):
        raise UserError(f"tokenizer_type {data.tokenizer_type} has no end-of-document token; use GPT2BPETokenizer")
    eod = tokenizer.eod
    indexed = IndexedDataset(data.data_path)
    cache = cache_folder(data.data_cache_path, data.data_path)
    check_vocabulary(indexed, tokenizer, cache)

    def build_part(name: str, bounds: tuple[int, int], num_samples: int) -> GPTDataset | None:
        parameters = {"num_samples": num_samples, "seq_length": data.seq_length, "seed": seed}
        description = {"kind": f"gpt-{name}", "layout": indexed.layout_fingerprint, "bounds": bounds, **parameters}
        index = cached_arrays(cache, description, lambda: build_gpt_index(indexed.sizes, *bounds, **parameters))
        return GPTDataset(indexed, index, data, eod=eod) if len(index["shuffle"]) else None

    bounds = split_bounds(data.split_weights(), len(indexed))
    return build_parts(build_part, prefix=data.data_path, split=data.split, bounds=bounds, counts=counts)
