"""Format-independent model: settings, weights by megatron01's names, and tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron01.checkpoint.manifest import first_difference
from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.data.tokenizers import Tokenizer, TokenizerFiles
from megatron01.errors import UserError
from megatron01.models.base import WORD_EMBEDDINGS, padded_vocab_size
from megatron01.models.bert import Bert
from megatron01.models.gpt2 import GPT2
from megatron01.utils.precision import dtype_name, is_finite

VOCABULARY_TENSORS = (WORD_EMBEDDINGS, "lm_head.bias")  # the weights with one row for each id of the vocabulary

GIVE_ONE = "give --tokenizer-type and its files (--vocab-file, --merge-file, --tokenizer-model)"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of weights that are read

_MOST_PADDING = 1024  # rows: Megatron-LM pads to a multiple of 128 times the tensor-parallel size


@dataclass(frozen=True, kw_only=True)
class PortableModel:
    """A BERT or GPT-2 read from any format."""

    source: str  # the folder or file, for messages
    config: GPTModelConfig | BertModelConfig
    vocab_size: int  # ids of the vocabulary; ``weights`` may have more rows
    weights: Mapping[str, Tensor]  # parameters by megatron01's names, on the CPU, fp32, bf16 or fp16
    tokenizer: TokenizerFiles | None  # None if the source has none
    notes: tuple[str, ...] = ()  # warnings for the user; each a sentence

    @property
    def architecture(self) -> str:
        """``BERT`` or ``GPT-2``."""
        return "BERT" if isinstance(self.config, BertModelConfig) else "GPT-2"

    @property
    def has_binary_head(self) -> bool:
        """True if a BERT has the pooler and the head for sentence pairs."""
        return "binary_head.weight" in self.weights

    @property
    def num_parameters(self) -> int:
        """Number of parameters, without vocabulary padding."""
        return sum(
            self.vocab_size * tensor[0].numel() if name in VOCABULARY_TENSORS else tensor.numel()
            for name, tensor in self.weights.items()
        )

    def built_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UserError if there is none, or its files cannot be read."""
        if self.tokenizer is None:
            raise UserError(f"{self.source} holds no tokenizer; {GIVE_ONE}")
        return self.tokenizer.built

    def for_tokenizer(self, tokenizer: Tokenizer) -> PortableModel:
        """The same model with the tokenizer's vocabulary size; embedding rows beyond it are padding.

        Raises UserError if the model has fewer rows, or too many more to be padding.
        """
        most = max(_MOST_PADDING, self.config.make_vocab_size_divisible_by)
        if not 0 <= self.vocab_size - tokenizer.vocab_size < most:
            raise UserError(
                f"{tokenizer.name} has {tokenizer.vocab_size} ids and the model in {self.source} has rows for"
                f" {self.vocab_size}; give the tokenizer with which the model was trained"
            )
        return replace(self, vocab_size=tokenizer.vocab_size)

    def padded_weights(self, num_rows: int | None = None) -> dict[str, Tensor]:
        """The weights with the vocabulary padded with zeros to ``num_rows`` rows; by default as the settings say."""
        if num_rows is None:
            num_rows = padded_vocab_size(self.vocab_size, self.config.make_vocab_size_divisible_by)
        return {
            name: with_rows(tensor, self.vocab_size, num_rows) if name in VOCABULARY_TENSORS else tensor
            for name, tensor in self.weights.items()
        }

    def without_weights(self) -> GPT2 | Bert:
        """A model of this shape on the meta device; checks the weights' names and shapes.

        Raises UserError if one of ``weights`` is missing, unexpected or of another shape.
        """
        layers = self.config.num_layers
        if layers > len(self.weights):  # before so many are built
            raise UserError(f"{self.source} says num_layers {layers}, but holds {len(self.weights)} tensors")
        with torch.device("meta"):
            model = new_model(self.config, self.vocab_size, binary_head=self.has_binary_head)
        num_rows = vocabulary_rows(self.weights)
        expected = {
            name: (num_rows, *parameter.shape[1:]) if name in VOCABULARY_TENSORS else parameter.shape
            for name, parameter in model.named_parameters()
        }
        check_shapes(self.weights, expected, self.source)
        return model

    def build(self) -> GPT2 | Bert:
        """A model with these weights, in fp32 on the CPU. Raises as ``without_weights`` does."""
        model = self.without_weights()
        weights = {name: tensor.float() for name, tensor in self.padded_weights().items()}
        model.load_state_dict(weights, strict=True, assign=True)
        return model


def vocabulary_rows(weights: Mapping[str, Tensor]) -> int:
    """Number of word embeddings, padding included; 0 if there are none."""
    return weights[WORD_EMBEDDINGS].shape[0] if WORD_EMBEDDINGS in weights else 0


def new_model(config: GPTModelConfig | BertModelConfig, vocab_size: int, *, binary_head: bool) -> GPT2 | Bert:
    """A new GPT-2 or BERT, by the class of its settings, on the default device."""
    if isinstance(config, BertModelConfig):
        return Bert(config, vocab_size, binary_head=binary_head)
    return GPT2(config, vocab_size)


def check_shapes(weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Check names and shapes of tensors. Raises UserError naming the first that is missing, unexpected or differs."""
    if difference := first_difference({name: tuple(tensor.shape) for name, tensor in weights.items()}, expected):
        raise UserError(f"{source} is of another model: {difference}")


_Config = TypeVar("_Config", GPTModelConfig, BertModelConfig)


def config_from(source: str, kind: type[_Config], **settings: Any) -> _Config:
    """A model's settings as ``source`` has them. Raises UserError, which names it, if one is out of range."""
    try:
        return kind(**settings)
    except UserError as error:
        raise UserError(f"{error}, in {source}") from error


def require_plain(name: str, tensor: Tensor, source: str) -> None:
    """Raises UserError if a weight is no dense tensor of floats: integers, say, lack the scales they go with."""
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    if not is_dense or tensor.dtype not in _DTYPES:
        raise UserError(
            f"{name} in {source} is {dtype_name(tensor.dtype)} ({tensor.layout} on {tensor.device.type}); expected a"
            " dense tensor of fp32, bf16, fp16 or fp64, so convert quantized or distributed weights to that first"
        )


def non_finite(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of NaN and infinite elements of each tensor that has any."""
    return {name: int((~tensor.isfinite()).sum()) for name, tensor in weights.items() if not is_finite(tensor)}


def refuse_non_finite(weights: Mapping[str, Tensor], source: str) -> None:
    """Raises UserError naming the first tensor with NaN or infinite elements."""
    for name, count in non_finite(weights).items():
        raise UserError(
            f"{source} holds {count} NaN or infinite elements in {name}; it cannot be used; take an earlier checkpoint"
        )


def with_rows(tensor: Tensor, vocab_size: int, num_rows: int) -> Tensor:
    """The first ``vocab_size`` rows of a tensor [rows, ...] of any dtype, zero-padded to [num_rows, ...]."""
    if tensor.shape[0] == num_rows == vocab_size:
        return tensor
    padded = tensor.new_zeros(num_rows, *tensor.shape[1:])
    padded[:vocab_size] = tensor[:vocab_size]
    return padded
