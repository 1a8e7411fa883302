"""Text to batches: token files, tokenizers, preprocessing, GPT-2 and BERT samples, loader.

Names are imported when they are first used: a preprocessing process needs neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron01.data.bert import BertDataset, build_bert_datasets
    from megatron01.data.datasets import SampleCounts, Splits
    from megatron01.data.gpt import GPTDataset, build_gpt_datasets
    from megatron01.data.indexed import IndexedDataset, IndexedDatasetBuilder, token_dtype
    from megatron01.data.loader import BatchLoader
    from megatron01.data.tokenizers import Tokenizer, build_tokenizer

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
