"""The command ``megatron01 data``: merge, inspect and verify token files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron01.command_line import Command, dispatch, parse
from megatron01.config import TokenizerType
from megatron01.errors import UserError

ConfigT = TypeVar("ConfigT")

_EXTENSIONS = (".bin", ".idx", ".json")


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Make one pair of token files out of several."""

    input: tuple[str, ...]
    """Paths of .bin/.idx pairs without extension, in the order in which their documents are to follow each other."""
    output_prefix: str
    """Path of the new pair without extension."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show what token files hold."""

    input: tuple[str, ...]
    """Paths of .bin/.idx pairs; their extensions may stay, so that patterns such as data/*.idx do."""
    documents: int = 3
    """How many of the first documents are shown."""
    tokens: int = 64
    """How many tokens of each of them are shown."""
    tokenizer_type: TokenizerType | None = None
    """The tokenizer with which the files were made, to show text instead of token ids."""
    vocab_file: str = ""
    """vocab.txt for BertWordPiece..., vocab.json for GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt for GPT2BPETokenizer."""
    tokenizer_model: str | None = None
    """.model file for SentencePieceTokenizer; tokenizer.json, or a folder with one, for HuggingFaceTokenizer."""

    def __post_init__(self) -> None:
        for name in ("documents", "tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if self.tokenizer_type is None and (self.vocab_file or self.merge_file or self.tokenizer_model):
            raise UserError("a vocabulary is given without tokenizer_type; give both or neither")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check token files to the last byte."""

    input: tuple[str, ...]
    """Paths of .bin/.idx pairs; their extensions may stay, so that patterns such as data/*.idx do."""


def data(argv: Sequence[str], prog: str) -> None:
    """``megatron01 data``: runs a sub-command.

    Raises:
        UserError: for an unknown sub-command or what the sub-command raises.
    """
    dispatch(_COMMANDS, argv, prog, arguments="PREFIX ... [flags]")


def _parse(config_class: type[ConfigT], argv: Sequence[str], prog: str, description: str) -> ConfigT:
    """As ``parse``, but paths may stand first, without ``--input``."""
    first_flag = next((index for index, argument in enumerate(argv) if argument.startswith("-")), len(argv))
    paths, flags = list(argv[:first_flag]), list(argv[first_flag:])
    if paths:
        flags = ["--input", *paths, *flags]
    return parse(
        config_class, flags, prog=prog, description=f"{description} Their paths may stand first, without --input."
    )


def _without_extensions(paths: Sequence[str]) -> list[str]:
    """The pairs to which these files belong, each once; what is no file is the path of a pair already."""
    pairs = (path.rpartition(".")[0] if path.endswith(_EXTENSIONS) and Path(path).is_file() else path for path in paths)
    return list(dict.fromkeys(pairs))


def _merge(argv: Sequence[str], prog: str) -> None:
    from megatron01.data.indexed.merge import merge
    from megatron01.data.indexed.origin import origin_path

    config = _parse(MergeConfig, argv, prog, "Make one pair of token files out of several.")
    merged = merge(config.input, config.output_prefix)
    print(
        f"{merged.prefix}: {merged.num_documents:,} documents, {len(merged):,} sequences, {merged.tokens.size:,} tokens"
    )
    if not origin_path(merged.prefix).is_file():
        print("note: no record of the tokenizer was kept, for at least one of the files has none")


def _inspect(argv: Sequence[str], prog: str) -> None:
    from megatron01.data.indexed.inspection import inspect
    from megatron01.data.tokenization.build import build_tokenizer

    config = _parse(InspectConfig, argv, prog, "Show what token files hold.")
    prefixes = _without_extensions(config.input)
    tokenizer = build_tokenizer(config) if config.tokenizer_type is not None else None  # type: ignore[arg-type]
    for prefix in prefixes:
        print("\n".join(inspect(prefix, tokenizer=tokenizer, documents=config.documents, tokens=config.tokens)))


def _verify(argv: Sequence[str], prog: str) -> None:
    from megatron01.data.indexed.inspection import verify

    config = _parse(VerifyConfig, argv, prog, "Check token files to the last byte.")
    prefixes = _without_extensions(config.input)
    wrong = []
    for prefix in prefixes:
        try:
            lines = verify(prefix)
        except UserError as error:
            if len(prefixes) == 1:
                raise
            wrong.append(prefix)
            lines = [f"error: {error}"]
        print("\n".join([f"{prefix}:", *(f"  {line}" for line in lines)]), flush=True)
    if wrong:
        raise UserError(f"{len(wrong)} of {len(prefixes)} pairs are not sound: {', '.join(wrong)}")


_COMMANDS: dict[str, Command] = {
    "inspect": Command("Show counts, lengths and the first documents of token files.", _inspect),
    "merge": Command("Make one pair of token files out of several.", _merge),
    "verify": Command("Check token files to the last byte, also against what was noted about them.", _verify),
}
