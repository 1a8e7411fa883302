"""Text to batches: token files, tokenizers, preprocessing, GPT-2 and BERT samples, loader.

Names are imported when they are first used: a preprocessing process needs neither torch nor numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron01.utils import on_first_use

if TYPE_CHECKING:
    from megatron01.data.bert import BertDataset, build_bert_datasets
    from megatron01.data.datasets import SampleCounts, Splits
    from megatron01.data.gpt import GPTDataset, build_gpt_datasets
    from megatron01.data.indexed import IndexedDataset, IndexedDatasetBuilder, token_dtype
    from megatron01.data.loader import BatchLoader
    from megatron01.data.tokenizers import Tokenizer, build_tokenizer

_NAMES = {
    "data.bert": ("BertDataset", "build_bert_datasets"),
    "data.datasets": ("SampleCounts", "Splits"),
    "data.gpt": ("GPTDataset", "build_gpt_datasets"),
    "data.indexed": ("IndexedDataset", "IndexedDatasetBuilder", "token_dtype"),
    "data.loader": ("BatchLoader",),
    "data.tokenizers": ("Tokenizer", "build_tokenizer"),
}
__getattr__ = on_first_use(__name__, _NAMES)
