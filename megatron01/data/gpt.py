"""GPT-2 samples: documents in shuffled order, one after the other, cut into sequences.

Three arrays define the samples, as in Megatron-LM (and equal to its for the same seed):

    document index  int32[documents x epochs]   documents in the order in which they are read
    sample index    int32[N + 1, 2]             where sample k begins: (position in the document index, token offset)
    shuffle index   uint32[N]                   order in which samples are used

A sample spans sequence length + 1 tokens, so that consecutive ones share one token.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron01.config import GPTDataConfig
from megatron01.data.datasets import SampleCounts, SampleDataset, Samples, Share, SplitBuilder, Splits, TokenFiles
from megatron01.data.index_cache import Arrays, sampled_digest
from megatron01.data.indexed import read_origin
from megatron01.data.kernels import locate_samples, read_samples
from megatron01.data.tokenizers import Tokenizer
from megatron01.errors import UserError

_SEPARATE_BELOW = 0.80  # share of an epoch: a last epoch of which less is used is shuffled separately


class GPTDataset(SampleDataset):
    """Samples of ``seq_length`` tokens and the tokens that follow them; sample i is a function of the index alone.

    ``batch`` gives int32[b, s] tokens, labels, position_ids and, with ``reset_attention_mask``, document_ids; and
    uint8[b, s] loss_mask.

    ``index`` is from ``build_gpt_index``, or if ``padded`` from ``build_padded_gpt_index``.
    """

    def __init__(self, files: TokenFiles, index: Arrays, config: GPTDataConfig, *, eod: int, padded: bool) -> None:
        super().__init__([files])
        self._files = files
        self._documents, self._samples, self._order = index["document"], index["sample"], index["shuffle"]
        self._config = config
        self._eod = eod
        self._padding = eod if padded else -1

    def __len__(self) -> int:
        return len(self._order)

    @property
    def fingerprint(self) -> str:
        arrays = [sampled_digest(array) for array in (self._documents, self._samples, self._order)]
        digests = [self._files.fingerprint, self._config.seq_length, arrays]
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def read(self, indices: NDArray[np.int64]) -> Samples:
        config, files = self._config, self._files
        shape = (len(indices), config.seq_length)
        text, lengths = np.empty((shape[0], shape[1] + 1), dtype=np.int32), np.empty(shape[0], dtype=np.int32)
        index = (self._order[indices], self._documents, self._samples)
        if not read_samples(*index, files.sizes, files.starts, files.tokens, self._padding, text, lengths):
            raise files.damaged_index()
        tokens = np.ascontiguousarray(text[:, :-1])
        positions = np.arange(shape[1], dtype=np.int32)
        counts = positions < lengths[:, None] - 1  # where the token to predict is not padding
        if config.eod_mask_loss:
            counts &= tokens != self._eod
        samples: Samples = {
            "tokens": tokens,
            "labels": np.ascontiguousarray(text[:, 1:]),
            "loss_mask": counts.view(np.uint8),
            "position_ids": np.tile(positions, (shape[0], 1)),
        }
        if config.reset_position_ids or config.reset_attention_mask:
            begins = np.zeros(shape, dtype=np.bool_)  # where documents after the sample's first begin
            begins[:, 1:] = tokens[:, :-1] == self._eod
            if config.reset_position_ids:
                samples["position_ids"] = positions - np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
            if config.reset_attention_mask:
                samples["document_ids"] = np.cumsum(begins, axis=1, dtype=np.int32)
        return samples


def build_gpt_index(
    sizes: NDArray[np.int32], first: int, last: int, *, num_samples: int, seq_length: int, seed: int
) -> Arrays:
    """The three arrays for the documents [first, last), which must hold tokens, for at least ``num_samples`` samples.

    ``RandomState(seed)`` shuffles the documents, then the samples, each with the last epoch apart if it is mostly
    unused. Memory: the three arrays (12 bytes a sample, 4 a document and epoch), and 4 bytes a document of one epoch.
    ``sizes``: int32[S], tokens in each document of the file.
    """
    tokens_per_epoch = int(sizes[first:last].sum())
    num_epochs = -(-(num_samples * seq_length + 1) // tokens_per_epoch)  # least with num_in_epochs >= num_samples

    def num_in_epochs(epochs: int) -> int:
        return (epochs * tokens_per_epoch - 1) // seq_length

    num_total = num_in_epochs(num_epochs)
    num_before_last = num_in_epochs(num_epochs - 1) if num_epochs > 1 else 0
    separate_last = num_epochs > 1 and num_samples - num_before_last < int(_SEPARATE_BELOW * num_in_epochs(1))

    random = np.random.RandomState(seed)
    number_type: type[np.integer] = np.int32 if last < 2**31 else np.int64
    documents = np.tile(np.arange(first, last, dtype=number_type), num_epochs)
    _shuffle_apart(documents, (num_epochs - 1) * (last - first) if separate_last else 0, random)

    place_type: type[np.integer] = np.int32 if len(documents) < 2**31 else np.int64
    samples = np.empty((num_total + 1, 2), dtype=place_type)
    locate_samples(documents, sizes, seq_length, samples)

    order_type: type[np.integer] = np.uint32 if num_total < 2**32 - 2 else np.int64
    order = np.arange(num_total, dtype=order_type)
    _shuffle_apart(order, num_before_last if separate_last else 0, random)
    return {"document": documents, "sample": samples, "shuffle": order}


def build_padded_gpt_index(
    sizes: NDArray[np.int32], first: int, last: int, *, num_samples: int, seq_length: int
) -> Arrays:
    """Index over the documents [first, last) in file order, without shuffling; further passes repeat the samples.

    The last sample of each pass may be short: every token but the first is predicted once in a pass. Arrays as from
    ``build_gpt_index``; no samples if there are fewer than two tokens.
    """
    per_pass = -(-(int(sizes[first:last].sum()) - 1) // seq_length)
    documents = np.arange(first, last, dtype=np.int64)
    samples = np.zeros((per_pass, 2), dtype=np.int64)
    if per_pass:
        locate_samples(documents, sizes, seq_length, samples)
    order = np.arange(num_samples if per_pass else 0, dtype=np.int64) % max(per_pass, 1)
    return {"document": documents, "sample": samples, "shuffle": order}


def _shuffle_apart(values: NDArray[np.integer], num_first: int, random: np.random.RandomState) -> None:
    """Shuffle the first ``num_first`` values among themselves and the others among themselves, in place."""
    random.shuffle(values[:num_first])
    random.shuffle(values[num_first:])


class _GPTSplits(SplitBuilder):
    """Builds the splits of GPT-2's data; a document is a sequence of the file."""

    sequences_are_documents = True
    required_text = "one token"
    _data: GPTDataConfig

    def check(self, files: TokenFiles) -> None:
        """Accept any text; note split sentences, and settings that need end-of-document tokens where there are none."""
        if len(files) > files.num_documents:
            self.notes.append(
                f"{files.prefix} has {len(files)} sequences in {files.num_documents} documents: its sentences are taken"
                " as documents and shuffled; for GPT-2, preprocess the text without split_sentences"
            )
        origin = read_origin(files.prefix)
        if origin is None or origin.get("append_eod") is not False:
            return
        for name in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"):
            if getattr(self._data, name):
                lacking = f"{files.prefix}, whose text was preprocessed without append_eod"
                self.notes.append(f"{name} has no effect on {lacking}")

    def build(self, share: Share, split: str, num_samples: int) -> tuple[GPTDataset, float] | None:
        files, seq_length, eod = share.files, self._data.seq_length, self._tokenizer.eod
        assert eod is not None
        parameters = {"num_samples": num_samples, "seq_length": seq_length}
        padded = self._data.pad_last_sequence and split != "train"
        if padded:
            build = partial(build_padded_gpt_index, files.sizes, *share.sequences)
            index = self.cached_index(f"gpt-padded-{split}", share, build, **parameters)
            per_epoch: float = len(index["sample"])
        else:
            build = partial(build_gpt_index, files.sizes, *share.sequences)
            index = self.cached_index(f"gpt-{split}", share, build, **parameters, seed=self._seed)
            per_epoch = share.num_tokens / seq_length
        if not len(index["shuffle"]):
            return None
        return GPTDataset(files, index, self._data, eod=eod, padded=padded), per_epoch


def build_gpt_datasets(data: GPTDataConfig, tokenizer: Tokenizer, counts: SampleCounts, seed: int) -> Splits:
    """The splits of the data as GPT-2 samples; indices come from the cache or are built and stored there.

    Raises UserError if the files are damaged or of another vocabulary, or if there is no text to train on.
    """
    if tokenizer.eod is None:
        raise UserError(
            f"{tokenizer.name} ({data.tokenizer_type}) has no end-of-document token; use GPT2BPETokenizer or another"
            " tokenizer that has one"
        )
    return _GPTSplits(data, tokenizer, seed).build_splits(counts)
