"""Text to batches: token files, tokenizers, preprocessing, GPT-2 and BERT samples, loader.

Names are imported when they are first used: a preprocessing process needs neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron01.data.bert import BertDataset, build_bert_datasets
    from megatron01.data.datasets import SampleCounts, Splits, check_vocabulary
    from megatron01.data.gpt import GPTDataset, build_gpt_datasets
    from megatron01.data.indexed import IndexedDataset, IndexedDatasetBuilder, token_dtype
    from megatron01.data.loader import BatchLoader, build_loader
    from megatron01.data.preprocessing.config import PreprocessConfig
    from megatron01.data.preprocessing.preprocess import PreprocessSummary
    from megatron01.data.tokenizers import MaskingTokens, Tokenizer, build_tokenizer

_MODULE_OF = {
    "BatchLoader": "loader",
    "BertDataset": "bert",
    "GPTDataset": "gpt",
    "IndexedDataset": "indexed",
    "IndexedDatasetBuilder": "indexed",
    "MaskingTokens": "tokenizers",
    "PreprocessConfig": "preprocessing.config",
    "PreprocessSummary": "preprocessing.preprocess",
    "SampleCounts": "datasets",
    "Splits": "datasets",
    "Tokenizer": "tokenizers",
    "build_bert_datasets": "bert",
    "build_gpt_datasets": "gpt",
    "build_loader": "loader",
    "build_tokenizer": "tokenizers",
    "check_vocabulary": "datasets",
    "token_dtype": "indexed",
}

__all__ = [
    "BatchLoader",
    "BertDataset",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "MaskingTokens",
    "PreprocessConfig",
    "PreprocessSummary",
    "SampleCounts",
    "Splits",
    "Tokenizer",
    "build_bert_datasets",
    "build_gpt_datasets",
    "build_loader",
    "build_tokenizer",
    "check_vocabulary",
    "token_dtype",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
