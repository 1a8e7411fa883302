"""The settings of ``megatron01 convert``, and those that choose a tokenizer for any command that loads a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megatron01.config import Precision, TokenizerType
from megatron01.errors import UserError, require_positive

if TYPE_CHECKING:
    from megatron01.convert.portable import TokenizerFiles


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """A model, and its tokenizer where that is not with it."""

    load: str
    """Folder of the model: a checkpoint, a folder of them, a run's (--run-dir), one of Hugging Face, or one of
    Megatron-LM."""
    tokenizer_type: TokenizerType | None = None
    """In place of the model's own tokenizer, with the files below; not needed where those are found."""
    vocab_file: str = ""
    """vocab.txt for BertWordPiece..., vocab.json for GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt for GPT2BPETokenizer."""
    tokenizer_model: str | None = None
    """.model file for SentencePieceTokenizer; tokenizer.json, or a folder with one, for HuggingFaceTokenizer."""

    def __post_init__(self) -> None:
        if self.tokenizer_type is None and (self.vocab_file or self.merge_file or self.tokenizer_model):
            raise UserError(
                "files of a tokenizer are given, but not its type; give --tokenizer-type as well, such as"
                " GPT2BPETokenizer"
            )

    def tokenizer_files(self) -> TokenizerFiles | None:
        """The tokenizer that is given; None to use the model's own."""
        from megatron01.convert.portable import TokenizerFiles

        return None if self.tokenizer_type is None else TokenizerFiles.of(self)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(LoadConfig):
    """Convert a model between formats."""

    output: str = field(metadata={"aliases": ("save",)})
    """Folder to write; it must not exist, or see overwrite."""
    to: Literal["auto", "huggingface", "megatron01"] = "auto"
    """Format to write; auto: huggingface for a checkpoint of megatron01, megatron01 for anything else."""
    dtype: Precision = "fp32"
    """huggingface: type of the weights in the files."""
    max_shard_gigabytes: float = 2.0
    """huggingface: larger models are spread over files of at most this size; so much memory is needed beside the
    model."""
    overwrite: bool = False
    """Replace what an earlier conversion wrote to the same folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "max_shard_gigabytes")
        if not self.output:
            raise UserError("output is empty; expected a folder")
