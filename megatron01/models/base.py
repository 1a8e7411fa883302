"""Shared by both models: initial weights, rows of the vocabulary, and operations per token.

Initial weights are as in Megatron-LM, the same on every replica, device and parameter type. Matrices and embeddings:
N(0, std). The two projections that write into the residual stream (attention output and MLP down):
N(0, std / sqrt(2 x layers)), so that the stream's variance does not grow with the depth (Radford et al. 2019). Biases:
0. Layer norms: weight 1, bias 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from megatron01.config import ModelConfig

RESIDUAL_PROJECTIONS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"

Place = Callable[[str, torch.Tensor, torch.Tensor], None]
"""Puts drawn values into a parameter of the given name: (name, parameter, values of the whole parameter)."""


def place_whole(name: str, parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Copy the values to the parameter's first rows; the other rows are padding, and set to 0."""
    parameter[: len(values)].copy_(values)
    parameter[len(values) :].zero_()


class InitializedModel(nn.Module):
    """A model whose modules are built on the meta device, then get memory and their weights with ``allocate``."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size  # ids of the tokenizer, without padding

    def allocate(self, seed: int) -> None:
        """Take memory on the default device and draw all weights from the seed."""
        self._seed = seed
        self._whole_shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        device = torch.empty(0).device  # torch 2.6: not get_default_device(), which is blind to "with torch.device"
        if device.type != "meta":  # nothing to take, and torch would load its compiler's shapes for it
            self.to_empty(device=device)
        self.initialize()

    @torch.no_grad()
    def initialize(self, place: Place = place_whole) -> None:
        """Draw every parameter anew from the seed, in the order of ``named_parameters``.

        Numbers are drawn in fp32 on the CPU, and then cast and copied, so neither the parameters' type nor their device
        changes them. Word embeddings are drawn for the ``vocab_size`` real ids only, the padding rows are zero: the
        amount of padding changes no other weight. Parameters on the meta device are left alone.

        Args:
            place: stores the values drawn for a whole parameter; with tensor parallelism it keeps this rank's shard of
                them. One parameter at a time is held whole.
        """
        generator = torch.Generator().manual_seed(self._seed)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:  # the weight of a norm
                parameter.fill_(1.0)
            else:
                num_rows, num_columns = self._whole_shapes[name]
                if name == WORD_EMBEDDINGS:
                    num_rows = self.vocab_size
                std = self.config.init_method_std
                if name.endswith(RESIDUAL_PROJECTIONS):
                    std /= math.sqrt(2 * self.config.num_layers)
                values = torch.empty(num_rows, num_columns, dtype=torch.float32, device="cpu")
                place(name, parameter, values.normal_(0.0, std, generator=generator))


def transformer_flops_per_token(config: ModelConfig, seq_length: int) -> int:
    """Forward operations of the layers for one token, for MFU: layers x (8 h^2 + 4 h f + 4 s h).

    A multiply-add counts as two; the backward pass is two forward passes. Norms, activations, softmax and embedding
    look-ups are not counted, nor is the second forward pass of recomputed layers.

    8 h^2: fused q, k, v and the output projection; 4 h f: the MLP; 4 s h: scores and the weighted sum of values over
    all s positions. A causal model needs half of that last term; it is counted in full, as in Megatron-LM and PaLM.
    """
    hidden = config.hidden_size
    return config.num_layers * (8 * hidden**2 + 4 * hidden * config.feed_forward_size + 4 * seq_length * hidden)


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """The smallest multiple of ``divisible_by`` that is not below ``vocab_size``.

    Megatron's rule: GPT-2's 50257 ids become 50304 rows and bert-base-uncased's 30522 become 30592 at 128.

    The rows above the tokenizer's size are never looked up, take no part in any softmax, get a zero gradient and start
    as zeros: a padded and an unpadded model are the same function (``models.cross_entropy``). Megatron-LM lets the
    padding take part in the softmax, which shifts its loss a little, so that export changes the model.
    """
    return -(-vocab_size // divisible_by) * divisible_by
