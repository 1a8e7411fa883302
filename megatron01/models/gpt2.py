"""GPT-2: a causal pre-norm transformer whose decoder shares the word embeddings (Radford et al. 2019).

Legend: b sequences, s positions, h hidden size, v ids of the tokenizer, V ids after padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron01.config import GPTModelConfig
from megatron01.models.base import InitializedModel, padded_vocab_size, transformer_flops_per_token
from megatron01.models.cross_entropy import VocabularyLoss
from megatron01.models.layers import Embedding, KeyValueCache, Transformer, causal_mask_within_documents


class GPT2(InitializedModel):
    """GPT-2 for pretraining; computes what transformers' ``GPT2LMHeadModel`` computes from the same weights.

    Parameters are fp32 on the default device; ``.to(dtype)`` gives a bf16 or fp16 model.

    Args:
        vocab_size: ids of the tokenizer; the embedding is padded as ``config.make_vocab_size_divisible_by`` says.
        seed: of the initial weights, which depend on nothing else. The global random state is not used.
    """

    config: GPTModelConfig

    def __init__(self, config: GPTModelConfig, vocab_size: int, *, seed: int = 1234) -> None:
        super().__init__(config, vocab_size)
        num_rows = padded_vocab_size(vocab_size, config.make_vocab_size_divisible_by)
        with torch.device("meta"):  # no memory and no random numbers before the real initialization
            self.embedding = Embedding(config, num_rows=num_rows)
            self.transformer = Transformer(config, causal=True, gelu="tanh", norm_placement="pre")
            self.token_loss = VocabularyLoss(vocab_size)
        self.allocate(seed)

    def _hidden(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = self.embedding(tokens, position_ids)  # (b, s, h)
        mask = None if document_ids is None else causal_mask_within_documents(document_ids, hidden.dtype)
        output: torch.Tensor = self.transformer(hidden, mask)  # (b, s, h)
        return output

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:  # (..., h) -> (..., v)
        return F.linear(hidden, self.embedding.word_embeddings.weight)[..., : self.vocab_size]

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Next-token logits. Raises UserError if s is above ``max_position_embeddings``.

        Args:
            tokens: (b, s) int32 or int64.
            position_ids: (b, s) int32 or int64, for positions that restart within a sequence; 0 .. s - 1 when not
                given. (As in Megatron-LM, tokens still attend across a restart.)
            document_ids: (b, s) integers: tokens attend to those with the same number only; to all earlier ones when
                not given.

        Returns:
            (b, s, v) in the parameters' type: a view that leaves out the padding of the vocabulary.
        """
        return self._logits(self._hidden(tokens, position_ids, document_ids))

    def next_token_logits(self, tokens: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """Logits, (b, v), of the token after ``tokens``, (b, s) integers, which are appended to ``cache``."""
        num_new, num_positions = tokens.shape[1], self.config.max_position_embeddings
        hidden = self.embedding(tokens, cache.position_ids(num_new, num_positions))  # (b, s, h)
        hidden = self.transformer(hidden, cache.mask(num_new, hidden.dtype), cache)
        cache.length += num_new
        return self._logits(hidden[:, -1])

    def loss(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mean cross entropy of ``labels`` over ``loss_mask``, in nats, an fp32 scalar; 0 if the mask selects nothing.

        Raises UserError if s is above ``max_position_embeddings``.

        Args:
            tokens, position_ids, document_ids: (b, s) integers, as of ``forward``.
            labels: (b, s) integers in [0, v).
            loss_mask: (b, s) integers, 1 where a token counts.
        """
        hidden = self._hidden(tokens, position_ids, document_ids)  # (b, s, h)
        output: torch.Tensor = self.token_loss(hidden, self.embedding.word_embeddings.weight, labels, loss_mask)
        return output

    def flops_per_token(self, seq_length: int) -> int:
        """Forward and backward operations for one token: 3 x (layers x (8 h^2 + 4 h f + 4 s h) + 2 h V)."""
        decoder = 2 * self.config.hidden_size * self.embedding.word_embeddings.num_embeddings
        return 3 * (transformer_flops_per_token(self.config, seq_length) + decoder)
