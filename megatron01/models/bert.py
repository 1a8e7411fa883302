"""BERT: a bidirectional transformer with a masked-token head and an optional sentence-pair head (Devlin et al. 2019).

Two forms: ``norm_placement="post"`` is the original (norm after the embeddings and after each residual sum) and
computes what transformers' ``BertForPreTraining`` computes; ``"pre"`` is Megatron-LM's (norm before each sublayer, one
final norm, none after the embeddings) and equals ``MegatronBertForPreTraining``.

Legend: b sequences, s positions, h hidden size, k masked positions and t tokens (not padding) of the batch, v ids of
the tokenizer, V ids after padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron01.config import BertModelConfig
from megatron01.models.base import InitializedModel, padded_vocab_size, transformer_flops_per_token
from megatron01.models.cross_entropy import VocabularyLoss
from megatron01.models.layers import Embedding, TokenRows, Transformer, key_mask_from_padding, layer_norm

NUM_TOKENTYPES = 2


class BertOutput(NamedTuple):
    """Hidden states and logits of a batch, in the parameters' type."""

    hidden: torch.Tensor
    """(b, s, h): the encoder's last hidden states."""
    lm_logits: torch.Tensor
    """(b, s, v)."""
    sentence_logits: torch.Tensor | None
    """(b, 2), or None without a sentence-pair head."""


class MaskedTokenHead(nn.Module):
    """Dense, GELU and norm; then the word embeddings as decoder, with a bias per id."""

    def __init__(self, config: BertModelConfig, *, num_rows: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = layer_norm(config)
        self.bias = nn.Parameter(torch.empty(num_rows))

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        """The decoder's input: (..., h) -> (..., h)."""
        output: torch.Tensor = self.norm(F.gelu(self.dense(hidden)))
        return output

    def forward(self, hidden: torch.Tensor, word_embeddings: torch.Tensor) -> torch.Tensor:
        """Logits: hidden (..., h), word_embeddings (V, h) -> (..., V)."""
        return F.linear(self.transform(hidden), word_embeddings, self.bias)


class Pooler(nn.Module):
    """tanh of a projection of the first position ([CLS])."""

    def __init__(self, config: BertModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(b, s, h) -> (b, h)."""
        return torch.tanh(self.dense(hidden[:, 0]))


class Bert(InitializedModel):
    """BERT for pretraining. Parameters are fp32 on the default device; ``.to(dtype)`` gives a bf16 or fp16 model.

    Args:
        vocab_size: ids of the tokenizer; the embedding is padded as ``config.make_vocab_size_divisible_by`` says.
        binary_head: add the pooler and the sentence-pair head (ordered, or swapped or random).
        masked_share: share of the tokens that are predicted, for ``flops_per_token``.
        seed: of the initial weights, which depend on nothing else. The global random state is not used.
    """

    config: BertModelConfig
    leaves_out_padding = True
    """True if ``token_positions``, where given, are used to leave out padding."""

    def __init__(
        self,
        config: BertModelConfig,
        vocab_size: int,
        *,
        binary_head: bool,
        masked_share: float = 0.15,
        seed: int = 1234,
    ) -> None:
        super().__init__(config, vocab_size)
        self.masked_share = masked_share
        num_rows = padded_vocab_size(vocab_size, config.make_vocab_size_divisible_by)
        placement = config.norm_placement
        with torch.device("meta"):  # no memory and no random numbers before the real initialization
            self.embedding = Embedding(
                config, num_rows=num_rows, num_tokentypes=NUM_TOKENTYPES, with_norm=placement == "post"
            )
            self.transformer = Transformer(config, causal=False, gelu="none", norm_placement=placement)
            self.lm_head = MaskedTokenHead(config, num_rows=num_rows)
            self.pooler = Pooler(config) if binary_head else None
            self.binary_head = nn.Linear(config.hidden_size, 2) if binary_head else None
            self.token_loss = VocabularyLoss(vocab_size)
        self.allocate(seed)

    def encode(
        self,
        text: torch.Tensor,
        types: torch.Tensor,
        padding_mask: torch.Tensor | None,
        token_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last hidden states, (b, s, h). Raises UserError if s is above ``max_position_embeddings``.

        Args:
            text, types: ids and token types, (b, s) integers.
            padding_mask: (b, s) integers, 1 = token; None where there is no padding.
            token_positions: (t,) int64, where the mask is 1 in the batch laid out as one row. If it is given, norms and
                linear layers leave out the padding, whose hidden states are then 0.
        """
        hidden = self.embedding(text, types=types.int())
        mask = None if padding_mask is None else key_mask_from_padding(padding_mask, hidden.dtype)
        if token_positions is None or not self.leaves_out_padding or torch.compiler.is_compiling():
            output: torch.Tensor = self.transformer(hidden, mask)
            return output
        rows = TokenRows(token_positions, (text.shape[0], text.shape[1]))
        return rows.spread(self.transformer(rows.pick(hidden), mask, rows=rows))

    def _sentence_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if self.pooler is None or self.binary_head is None:
            return None
        output: torch.Tensor | None = self.binary_head(self.pooler(hidden))  # (b, 2)
        return output

    def forward(self, text: torch.Tensor, types: torch.Tensor, padding_mask: torch.Tensor) -> BertOutput:
        """Hidden states and the logits of both heads at every position; arguments are those of ``encode``.

        Raises UserError if s is above ``max_position_embeddings``.
        """
        hidden = self.encode(text, types, padding_mask)
        lm_logits = self.lm_head(hidden, self.embedding.word_embeddings.weight)[..., : self.vocab_size]
        return BertOutput(hidden, lm_logits, self._sentence_logits(hidden))

    def loss(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The pretraining losses of a batch, in nats, as fp32 scalars.

        Args:
            batch: Megatron's keys, of any integer type that holds them: ``text, types, padding_mask, labels`` (-1 = not
                masked) and ``loss_mask``, each (b, s), and with a sentence-pair head ``is_random``, (b,). Where there
                is no padding, ``padding_mask`` may be missing. ``masked_positions`` (k,) and ``token_positions`` (t,),
                derived from these by ``BertDataset.collate``, are optional and save time. Other keys are not read.

        Returns:
            ``lm_loss``: mean over the masked tokens, and 0, with its graph, where none is masked. With a sentence-pair
            head also ``sentence_loss``: mean over the sequences.
        """
        # Only the masked positions (15 %) go through the head and the vocabulary. Their number depends on the data: if
        # it is not given the host waits here for the device, before the encoder's work is queued.
        positions = batch.get("masked_positions")  # (k,)
        if positions is None:
            positions = (batch["labels"].flatten() >= 0).nonzero()[:, 0]
        labels, mask = (batch[name].flatten()[positions] for name in ("labels", "loss_mask"))  # each (k,)
        hidden = self.encode(
            batch["text"], batch["types"], batch.get("padding_mask"), batch.get("token_positions")
        )  # (b, s, h)
        masked = hidden.flatten(0, 1).index_select(0, positions)  # (k, h)
        weight, bias = self.embedding.word_embeddings.weight, self.lm_head.bias
        result = {"lm_loss": self.token_loss(self.lm_head.transform(masked), weight, labels, mask, bias)}
        sentence_logits = self._sentence_logits(hidden)
        if sentence_logits is not None:
            result["sentence_loss"] = F.cross_entropy(sentence_logits.float(), batch["is_random"].long())
        return result

    def flops_per_token(self, seq_length: int) -> int:
        """Forward and backward operations for one token.

        3 x (layers x (8 h^2 + 4 h f + 4 s h) + masked_share x (2 h^2 + 2 h V)), the last term being the masked-token
        head at the share of positions that it sees. Pooler and sentence-pair head (one position a sequence) are left
        out.
        """
        hidden = self.config.hidden_size
        head = self.masked_share * (2 * hidden**2 + 2 * hidden * self.embedding.word_embeddings.num_embeddings)
        return 3 * (transformer_flops_per_token(self.config, seq_length) + round(head))
