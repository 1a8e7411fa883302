"""The settings of the commands that use a trained model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron01.config import Precision
from megatron01.convert.config import LoadConfig
from megatron01.errors import require, require_positive


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(LoadConfig):
    """A model, and how it is run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: on the GPU if there is one."""
    dtype: Precision = "fp32"
    """Type of weights and arithmetic."""
    batch_size: int = 8
    """Sequences that are computed together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "batch_size")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    """Continue text with a GPT-2."""

    text: tuple[str, ...] | None = field(default=None, metadata={"aliases": ("prompt",)})
    """Texts to continue, each quoted."""
    input: Path | None = field(default=None, metadata={"aliases": ("prompt_file",)})
    """File with a text to continue in each line, or JSON lines with a key 'text' (.jsonl)."""
    interactive: bool = False
    """Read texts from standard input, line by line, and continue each at once."""
    output: Path | None = None
    """Write the results to this file as JSON lines, in place of printing them."""
    max_new_tokens: int = 50
    """Tokens to add at most; the model's positions are a limit too."""
    num_samples: int = 1
    """Continuations of each text."""
    greedy: bool = False
    """Always take the most likely token."""
    temperature: float = 1.0
    """Logits are divided by it: below 1 likely tokens get more likely."""
    top_k: int = 0
    """Draw from this many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the most likely tokens that make up this probability together."""
    seed: int = 1234
    """Seed of the random draws. Those of a text depend on nothing but it and the text's place among the texts."""
    stop_at_eod: bool = True
    """End a text where the model ends the document."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = [self.text is not None, self.input is not None, self.interactive]
        require(sum(sources) == 1, "expected one of --text, --input and --interactive")
        require(self.text is None or bool(self.text), "text is empty; expected one or more texts")
        require(
            not (self.interactive and self.output is not None),
            "output is given with interactive; leave one of them out",
        )
        require_positive(self, "max_new_tokens", "num_samples")
        require(
            self.temperature > 0, f"temperature is {self.temperature}; expected a positive number, or give --greedy"
        )
        require(self.top_k >= 0, f"top_k is {self.top_k}; expected 0 (off) or more")
        require(0 < self.top_p <= 1, f"top_p is {self.top_p}; expected a share in (0, 1]")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}; expected 0 to 2**63 - 1")
        if self.greedy:
            for name, idle in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("num_samples", 1)):
                require(
                    getattr(self, name) == idle, f"{name} is given with greedy, where it has no effect; leave one out"
                )


@dataclass(frozen=True, kw_only=True)
class FillMaskConfig(InferenceConfig):
    """Fill the [MASK] tokens of texts with a BERT."""

    text: tuple[str, ...] | None = field(default=None, metadata={"aliases": ("prompt",)})
    """Texts with [MASK] in them, each quoted; lines of standard input when not given."""
    top_k: int = 5
    """Proposals for each mask."""
    json: bool = False
    """Print JSON lines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "top_k")


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(InferenceConfig):
    """How well a GPT-2 predicts held-out text."""

    input: str = field(metadata={"aliases": ("data",)})
    """A file of text (packed or not; .jsonl: a document in each line, under the key 'text'), or the prefix of a
    .bin/.idx pair."""
    window: int | None = None
    """Tokens that the model sees at once; as many as it has positions when not given."""
    stride: int | None = None
    """Tokens by which the window moves: each is predicted from at least window - stride tokens before it. Half the
    window when not given."""
    max_tokens: int | None = None
    """Stop after about this many tokens."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "window", "stride", "max_tokens")
        require(
            self.window is None or self.stride is None or self.stride <= self.window,
            f"stride {self.stride} is above window {self.window}, so tokens would be left out; lower it",
        )
