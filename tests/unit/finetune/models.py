"""Small models with random weights, as folders in transformers' format."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatron01.convert.huggingface import write_hf_folder
from megatron01.convert.portable import PortableModel
from megatron01.data import build_tokenizer
from megatron01.data.tokenizers import TokenizerFiles
from megatron01.models import Bert
from tests.integration.tiny import bert_config


def write_model(folder: Path, corpus: Path, *, seed: int = 0, **shape: Any) -> Path:
    """A BERT with the vocabulary of ``tiny`` and 32 positions."""
    files = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(corpus / "vocab.txt"))
    tokenizer = build_tokenizer(files)
    config = dataclasses.replace(bert_config(corpus).model, norm_placement="post", **shape)
    torch.manual_seed(seed)
    model = Bert(config, tokenizer.vocab_size, binary_head=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    portable = PortableModel(
        source="test", config=config, vocab_size=tokenizer.vocab_size, weights=model.state_dict(), tokenizer=files
    )
    write_hf_folder(portable, folder, dtype="fp32")
    return folder
