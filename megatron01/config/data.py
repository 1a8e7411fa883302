"""The settings of text, tokens and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron01.config.fields import Below1, Bounded, NotNegative, Positive, UpTo1
from megatron01.errors import UserError, require


@dataclass(frozen=True)
class BlendEntry:
    """A .bin/.idx pair in a blend."""

    prefix: str  # path of the pair without extension
    weight: float | None  # share of the samples, relative to others; None where shares follow the number of tokens


def parse_sources(texts: Sequence[str], *, name: str) -> tuple[BlendEntry, ...]:
    """The pairs that the setting ``name`` lists: ``prefix ...``, or ``weight prefix ...`` in turn, as in Megatron-LM.

    Raises UserError if weights and prefixes do not alternate, a weight is not positive, or a prefix is empty.
    """
    if not any(texts):
        raise UserError(f"{name} is empty; expected the path of a .bin/.idx pair without extension")
    numbers = [_number(text) for text in texts]
    weights, prefixes = numbers[::2], texts[1::2]
    weighted = len(texts) % 2 == 0 and None not in weights
    sources = [*map(BlendEntry, prefixes, weights)] if weighted else [BlendEntry(prefix, None) for prefix in texts]
    for source in sources:
        if not source.prefix:
            raise UserError(f"{name} lists an empty path; expected paths of .bin/.idx pairs without extension")
        if source.weight is not None and not 0 < source.weight < math.inf:
            raise UserError(f"{name} gives {source.prefix} the weight {source.weight:g}; expected a positive number")
    if not math.isfinite(sum(source.weight or 0.0 for source in sources)):
        raise UserError(f"{name} has weights whose sum is not finite; give smaller ones")
    misplaced = next((text for text, number in zip(texts, numbers, strict=True) if number is not None), None)
    if misplaced is not None and not weighted and len(texts) > 1:
        raise UserError(
            f"{name} is {' '.join(texts)}: {misplaced} looks like a weight, but weights and prefixes do not alternate;"
            " expected prefixes alone or 0.3 prefixA 0.7 prefixB"
        )
    return tuple(sources)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


TokenizerType = Literal[
    "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer", "HuggingFaceTokenizer"
]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Bounded):
    """Text, tokenizer and sequence length."""

    data_path: tuple[str, ...] | None = None
    """Prefix of a .bin/.idx pair, without the extension; or several, each after its weight (0.3 a 0.7 b), or without
    weights, to be mixed by their numbers of tokens."""
    train_data_path: tuple[str, ...] | None = None
    """In place of data_path and split: pairs for training alone, written in the same way."""
    valid_data_path: tuple[str, ...] | None = None
    """With train_data_path: pairs for validation."""
    test_data_path: tuple[str, ...] | None = None
    """With train_data_path: pairs for the test after training."""
    split: str = "969,30,1"
    """Relative sizes of the training, validation and test splits of data_path."""
    seq_length: Positive[int] = 512
    """Tokens in one training sequence."""
    tokenizer_type: TokenizerType = "GPT2BPETokenizer"
    """How text was turned into tokens."""
    vocab_file: str = ""
    """vocab.txt for BertWordPiece..., vocab.json for GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt for GPT2BPETokenizer."""
    tokenizer_model: str | None = None
    """.model file for SentencePieceTokenizer; tokenizer.json, or a folder with one, for HuggingFaceTokenizer."""
    num_workers: NotNegative[int] = 1
    """Processes that prepare batches beside each replica; 0 prepares them in the training process."""
    data_cache_path: str | None = None
    """Folder for the sample indices; a folder named 'cache' beside the data when not given."""
    prepare_only: bool = False
    """Build the sample indices of all splits, show what they hold, and stop without training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            paths = getattr(self, name)
            assert not isinstance(paths, str), f"{name} is a tuple of texts"
            if paths is not None:
                parse_sources(paths, name=name)
        require(
            self.data_path is None or self.train_data_path is None,
            "data_path and train_data_path are both given; take one of them back, with --data-path none for instance",
        )
        for name in ("valid_data_path", "test_data_path"):
            require(
                getattr(self, name) is None or self.train_data_path is not None,
                f"{name} is given without train_data_path; give that in place of data_path",
            )
        self.split_weights()

    def split_weights(self) -> tuple[float, float, float]:
        """The three splits' shares, normalised to sum 1."""
        try:
            weights = [float(part) for part in self.split.split(",")]
        except ValueError:
            weights = []
        require(
            1 <= len(weights) <= 3 and all(w >= 0 for w in weights) and 0 < sum(weights) < math.inf,
            f"split is {self.split!r}; expected up to three finite numbers, none negative, not all 0, such as 969,30,1",
        )
        weights += [0.0] * (3 - len(weights))
        total = sum(weights)
        return weights[0] / total, weights[1] / total, weights[2] / total


@dataclass(frozen=True, kw_only=True)
class GPTDataConfig(DataConfig):
    """Text, tokenizer and sequence length for GPT-2."""

    reset_position_ids: bool = False
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens attend to tokens of their own document only."""
    eod_mask_loss: bool = False
    """Do not train on predicting what follows an end-of-document token."""
    pad_last_sequence: bool = False
    """Read held-out text from its beginning to its end, and fill the last sequence with end-of-document tokens that do
    not count in the loss, so that every token is predicted equally often."""


@dataclass(frozen=True, kw_only=True)
class BertDataConfig(DataConfig):
    """Text, tokenizer, objective and masking for BERT."""

    tokenizer_type: TokenizerType = "BertWordPieceLowerCase"
    objective: Literal["sop", "nsp", "none"] = "sop"
    """Sentence task beside masked tokens: sentence order (Megatron), next sentence (original BERT), or none."""
    masking: Literal["whole_word_ngram", "token"] = "whole_word_ngram"
    """Mask whole-word n-grams (Megatron) or single tokens (original BERT)."""
    mask_prob: UpTo1 = 0.15
    """Share of the tokens that is masked."""
    short_seq_prob: Below1 = 0.1
    """Share of the samples that aim at a shorter sequence."""
    max_predictions_per_seq: Positive[int] | None = None
    """Upper bound of masked tokens in a sequence (20 at length 128 and 80 at 512 in the original recipe)."""

    @property
    def masked_share(self) -> float:
        """Share of the tokens of a whole sequence that is masked, ``max_predictions_per_seq`` included."""
        most = self.max_predictions_per_seq
        return self.mask_prob if most is None else min(self.mask_prob, most / self.seq_length)
