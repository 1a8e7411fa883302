"""A trained model, ready to be used, from a folder of any known format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron01.config import Precision
from megatron01.convert.formats import read_model
from megatron01.convert.portable import TokenizerFiles, refuse_non_finite
from megatron01.data.tokenizers import Tokenizer
from megatron01.errors import UserError
from megatron01.models.bert import Bert
from megatron01.models.gpt2 import GPT2
from megatron01.utils.precision import DTYPES, require_support


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode (no dropout) on its device, and its tokenizer.

    Attributes:
        model: the model.
        tokenizer: with which it was trained.
        device: where it is.
        source: the folder, for messages.
        notes: what the user should know about it; each a sentence.
    """

    model: GPT2 | Bert
    tokenizer: Tokenizer
    device: torch.device
    source: str
    notes: tuple[str, ...]

    def gpt2(self) -> GPT2:
        """The model, if it is a GPT-2; UserError if it is not."""
        if not isinstance(self.model, GPT2):
            raise UserError(f"{self.source} is a BERT; expected a GPT-2 (for a BERT there is megatron01 fill-mask)")
        return self.model

    def bert(self) -> Bert:
        """The model, if it is a BERT; UserError if it is not."""
        if not isinstance(self.model, Bert):
            raise UserError(f"{self.source} is a GPT-2; expected a BERT (for a GPT-2 there is megatron01 generate)")
        return self.model


def load_model(
    load: str,
    tokenizer: TokenizerFiles | None = None,
    *,
    dtype: Precision = "fp32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> LoadedModel:
    """The model of a folder, whoever wrote it: with the synchronized weights, where it is a checkpoint of ours.

    Args:
        load: as for ``read_model``.
        tokenizer: in place of the one that belongs to it.
        dtype: of its weights.
        device: auto takes the GPU if there is one.

    Raises:
        UserError: if it cannot be read or used, or the device is not there or has no bf16.
    """
    chosen = _device(device, dtype)
    portable = read_model(load, tokenizer)
    refuse_non_finite(portable.weights, portable.source)
    built = portable.built_tokenizer()
    model = portable.build().to(chosen, DTYPES[dtype]).eval()
    return LoadedModel(model=model, tokenizer=built, device=chosen, source=portable.source, notes=portable.notes)


def _device(device: Literal["auto", "cpu", "cuda"], dtype: Precision) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU; give --device cpu")
    chosen = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    require_support(dtype, chosen, setting="dtype")
    return chosen
