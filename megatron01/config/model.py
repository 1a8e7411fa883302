"""The settings of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron01.errors import require, require_positive, require_probability

Recomputation = Literal["none", "full", "selective"]
FusedKernels = Literal["torch", "apex", "auto"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the transformer."""

    num_layers: int = 12
    """Number of transformer layers."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_attention_heads: int = 12
    """Attention heads; must divide the hidden size."""
    ffn_hidden_size: int | None = None
    """Width of the MLP's hidden layer; 4 x hidden size when not given."""
    max_position_embeddings: int = 1024
    """Rows of the learned position table; at least the sequence length."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance inside every layer norm."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; output projections use std / sqrt(2 x layers)."""
    hidden_dropout: float = 0.1
    """Dropout on embeddings and on the output of attention and MLP."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this."""
    recompute_activations: Recomputation = field(
        default="none",
        metadata={
            "former": {"true": "full", "yes": "full", "on": "full", "false": "none", "no": "none", "off": "none"}
        },
    )
    """What the backward pass computes again instead of finding it stored: full: layers, from their inputs; selective:
    norms, GELU, and attention scores where they would be stored."""
    torch_compile: bool | None = None
    """Compile each transformer layer with torch.compile; when not given, on GPUs that Triton's kernels serve, without
    tensor parallelism and --deterministic."""
    fused_layernorm: FusedKernels = "torch"
    """Layer norms of torch, or the fused ones of NVIDIA's apex; auto: apex where it works."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "max_position_embeddings",
            "layernorm_epsilon",
            "init_method_std",
            "make_vocab_size_divisible_by",
        )
        require_probability(self, "hidden_dropout", "attention_dropout")
        require(
            self.hidden_size % self.num_attention_heads == 0,
            f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}",
        )

    @property
    def feed_forward_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size


@dataclass(frozen=True, kw_only=True)
class GPTModelConfig(ModelConfig):
    """Shape of the GPT-2 transformer."""


@dataclass(frozen=True, kw_only=True)
class BertModelConfig(ModelConfig):
    """Shape of the BERT encoder."""

    max_position_embeddings: int = 512
    """Rows of the learned position table; at least the sequence length."""
    layernorm_epsilon: float = 1e-12
    """Added to the variance inside every layer norm."""
    norm_placement: Literal["post", "pre"] = "post"
    """Layer norm after each residual sum (original BERT) or before each sublayer (Megatron's BERT)."""
