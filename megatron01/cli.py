"""The ``megatron01`` program and its commands, each of which is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron01.command_line import Command, dispatch, parse, run_as_program
from megatron01.stop_request import StopRequest


def _checkpoint(argv: Sequence[str], prog: str) -> None:
    from megatron01.checkpoint.command import checkpoint

    checkpoint(argv, prog)


def _data(argv: Sequence[str], prog: str) -> None:
    from megatron01.data.indexed.commands import data

    data(argv, prog)


def _preprocess(argv: Sequence[str], prog: str) -> None:
    from megatron01.data.preprocessing.preprocess import PreprocessConfig, preprocess

    config = parse(PreprocessConfig, argv, prog=prog, description="Turn text into the .bin/.idx pairs of training.")
    with StopRequest(None) as stop, stop.interrupting():
        preprocess(config)


def _schedule(argv: Sequence[str], prog: str) -> None:
    from megatron01.plan.command import schedule

    schedule(argv, prog)


def _train_tokenizer(argv: Sequence[str], prog: str) -> None:
    from megatron01.data.tokenization.training import TrainTokenizerConfig, train_tokenizer

    train_tokenizer(parse(TrainTokenizerConfig, argv, prog=prog, description="Make a vocabulary from text."))


def _version(argv: Sequence[str], prog: str) -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"megatron01 {version('megatron01')}")
    except PackageNotFoundError:
        print("megatron01 (not installed, run from a source folder)")


COMMANDS: dict[str, Command] = {
    "checkpoint": Command("List checkpoints, show what one holds, and verify that they are whole.", _checkpoint),
    "data": Command("Merge, inspect and verify token files.", _data),
    "preprocess": Command("Tokenize text into the .bin/.idx files that training reads.", _preprocess),
    "schedule": Command("Show when a run synchronizes and what each step sends, without training.", _schedule),
    "train-tokenizer": Command("Make a vocabulary from text.", _train_tokenizer),
    "version": Command("Print the version.", _version),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The ``megatron01`` program: runs a sub-command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    run_as_program(lambda: dispatch(COMMANDS, arguments, "megatron01"))
