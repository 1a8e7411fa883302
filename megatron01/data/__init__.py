"""Text to batches: token files, tokenizers, preprocessing, GPT-2 and BERT samples, loader.

Names are imported when they are first used: a preprocessing process needs neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron01.data.bert import BertDataset as BertDataset
    from megatron01.data.bert import build_bert_datasets as build_bert_datasets
    from megatron01.data.datasets import SampleCounts as SampleCounts
    from megatron01.data.datasets import Splits as Splits
    from megatron01.data.gpt import GPTDataset as GPTDataset
    from megatron01.data.gpt import build_gpt_datasets as build_gpt_datasets
    from megatron01.data.indexed import IndexedDataset as IndexedDataset
    from megatron01.data.indexed import IndexedDatasetBuilder as IndexedDatasetBuilder
    from megatron01.data.indexed import token_dtype as token_dtype
    from megatron01.data.loader import BatchLoader as BatchLoader
    from megatron01.data.tokenizers import Tokenizer as Tokenizer
    from megatron01.data.tokenizers import build_tokenizer as build_tokenizer

_NAMES = {
    "bert": ("BertDataset", "build_bert_datasets"),
    "datasets": ("SampleCounts", "Splits"),
    "gpt": ("GPTDataset", "build_gpt_datasets"),
    "indexed": ("IndexedDataset", "IndexedDatasetBuilder", "token_dtype"),
    "loader": ("BatchLoader",),
    "tokenizers": ("Tokenizer", "build_tokenizer"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
