"""The sizes of a model's parameters, without the memory for them."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron01.config import BertPretrainConfig, GPTPretrainConfig, PretrainConfig, TokenizerType
from megatron01.data import build_tokenizer
from megatron01.models import GPT2, Bert
from megatron01.tensor_parallel import part_shapes

_USUAL_VOCABULARY: dict[TokenizerType, int] = {
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "GPT2BPETokenizer": 50257,
    "SentencePieceTokenizer": 32000,
    "HuggingFaceTokenizer": 50257,
}
_OF_A_MODEL_FILE: tuple[TokenizerType, ...] = ("SentencePieceTokenizer", "HuggingFaceTokenizer")


def parameter_sizes(config: PretrainConfig) -> tuple[tuple[int, ...], str | None]:
    """Elements of each parameter tensor of the configured model, or of a part, where replicas have several.

    Without the vocabulary's file, the vocabulary is taken to be the usual one of its kind; the second value says so.

    Raises:
        UserError: if the vocabulary's file is there and is none.
    """
    model, note = model_without_memory(config)
    num_parts = config.distributed.tensor_model_parallel_size
    if num_parts > 1:
        of_a_part = f"all figures are those of one process, which holds one of {num_parts} parts of the model"
        note = of_a_part if note is None else f"{note}; {of_a_part}"
    return tuple(shape.numel() for shape in part_shapes(model, num_parts).values()), note


def model_without_memory(config: PretrainConfig) -> tuple[GPT2 | Bert, str | None]:
    """The configured model on the meta device, and what was assumed of its vocabulary, if something was.

    Raises:
        UserError: if the vocabulary's file is there and is none.
    """
    data, note = config.data, None
    files = [file for file in (data.vocab_file, data.merge_file, data.tokenizer_model) if file]
    missing = [file for file in files if not Path(file).exists()]
    if files and not missing:
        vocab_size = build_tokenizer(data).vocab_size
    else:
        vocab_size = _USUAL_VOCABULARY[data.tokenizer_type]
        setting = "tokenizer_model" if data.tokenizer_type in _OF_A_MODEL_FILE else "vocab_file"
        reason = f"{missing[0]} does not exist here" if missing else f"no {setting} is given"
        note = f"{reason}; taking the usual vocabulary of {vocab_size:,} entries"
    with torch.device("meta"):
        if isinstance(config, BertPretrainConfig):
            return Bert(config.model, vocab_size, binary_head=config.data.objective != "none"), note
        assert isinstance(config, GPTPretrainConfig)
        return GPT2(config.model, vocab_size), note
