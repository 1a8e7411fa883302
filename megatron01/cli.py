"""The ``megatron01`` program and its commands, each of which is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron01.config.command_line import Command, dispatch, parse
from megatron01.parallel.program import run_as_program
from megatron01.utils.signals import StopRequest


def _checkpoint(argv: Sequence[str], prog: str) -> None:
    from megatron01.checkpoint.command import checkpoint

    checkpoint(argv, prog)


def _compare(argv: Sequence[str], prog: str) -> None:
    from megatron01.compare.command import compare

    compare(argv, prog)


def _convert(argv: Sequence[str], prog: str) -> None:
    from megatron01.convert.config import ConvertConfig

    config = parse(ConvertConfig, argv, prog=prog, description="Convert a model from one format into another.")
    from megatron01.convert.command import convert

    convert(config)


def _data(argv: Sequence[str], prog: str) -> None:
    from megatron01.data.indexed_tools import data

    data(argv, prog)


def _doctor(argv: Sequence[str], prog: str) -> None:
    from megatron01.doctor.config import DoctorConfig

    description = "Check the machines of a job and measure their network, alone or under srun, torchrun or mpirun."
    config = parse(DoctorConfig, argv, prog=prog, description=description)
    from megatron01.doctor.command import doctor

    raise SystemExit(doctor(config))


def _fill_mask(argv: Sequence[str], prog: str) -> None:
    from megatron01.evaluate.config import FillMaskConfig

    config = parse(FillMaskConfig, argv, prog=prog, description="Fill the masks of texts with a BERT.")
    from megatron01.evaluate.commands import fill_mask

    fill_mask(config)


def _generate(argv: Sequence[str], prog: str) -> None:
    from megatron01.evaluate.config import GenerateConfig

    config = parse(GenerateConfig, argv, prog=prog, description="Continue texts with a GPT-2.")
    from megatron01.evaluate.commands import generate

    generate(config)


def _glue(argv: Sequence[str], prog: str) -> None:
    from megatron01.finetune.config import GlueConfig

    config = parse(GlueConfig, argv, prog=prog, description="Fine-tune a BERT on the tasks of GLUE.")
    from megatron01.finetune.glue import glue

    with StopRequest(None) as stop, stop.interrupting():
        glue(config)


def _perplexity(argv: Sequence[str], prog: str) -> None:
    from megatron01.evaluate.config import PerplexityConfig

    config = parse(PerplexityConfig, argv, prog=prog, description="How well a GPT-2 predicts held-out text.")
    from megatron01.evaluate.commands import perplexity

    perplexity(config)


def _plan(argv: Sequence[str], prog: str) -> None:
    from megatron01.plan.command import plan

    plan(argv, prog)


def _preprocess(argv: Sequence[str], prog: str) -> None:
    from megatron01.data.preprocessing.config import PreprocessConfig
    from megatron01.data.preprocessing.preprocess import preprocess

    config = parse(PreprocessConfig, argv, prog=prog, description="Turn text into the .bin/.idx pairs of training.")
    with StopRequest(None) as stop, stop.interrupting():
        preprocess(config)


def _schedule(argv: Sequence[str], prog: str) -> None:
    from megatron01.plan.command import schedule

    schedule(argv, prog)


def _squad(argv: Sequence[str], prog: str) -> None:
    from megatron01.finetune.config import SquadConfig

    config = parse(SquadConfig, argv, prog=prog, description="Fine-tune a BERT on SQuAD 1.1.")
    from megatron01.finetune.squad import squad

    with StopRequest(None) as stop, stop.interrupting():
        squad(config)


def _train_tokenizer(argv: Sequence[str], prog: str) -> None:
    from megatron01.data.train_tokenizer import TrainTokenizerConfig, train_tokenizer

    train_tokenizer(parse(TrainTokenizerConfig, argv, prog=prog, description="Make a vocabulary from text."))


def _version(argv: Sequence[str], prog: str) -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"megatron01 {version('megatron01')}")
    except PackageNotFoundError:
        print("megatron01 (not installed, run from a source folder)")


def _watch(argv: Sequence[str], prog: str) -> None:
    from megatron01.compare.watch import watch

    watch(argv, prog)


COMMANDS: dict[str, Command] = {
    "checkpoint": Command("List checkpoints, show what one holds, and verify that they are whole.", _checkpoint),
    "compare": Command("Compare runs: losses over steps, tokens, time and bytes, and what they sent.", _compare),
    "convert": Command("Convert models to and from Hugging Face's format, and from Megatron-LM's.", _convert),
    "data": Command("Merge, inspect and verify token files.", _data),
    "doctor": Command("Check the machines of a job, and measure the network between them.", _doctor),
    "fill-mask": Command("Fill the masks of texts with a BERT.", _fill_mask),
    "generate": Command("Continue texts with a GPT-2.", _generate),
    "glue": Command("Fine-tune a BERT on the tasks of GLUE, and compare with published results.", _glue),
    "perplexity": Command("Measure how well a GPT-2 predicts held-out text.", _perplexity),
    "plan": Command("Forecast how long a run takes on a cluster, and which way to train is quickest.", _plan),
    "preprocess": Command("Tokenize text into the .bin/.idx files that training reads.", _preprocess),
    "schedule": Command("Show when a run synchronizes and what each step sends, without training.", _schedule),
    "squad": Command("Fine-tune a BERT on SQuAD 1.1.", _squad),
    "train-tokenizer": Command("Make a vocabulary from text.", _train_tokenizer),
    "version": Command("Print the version.", _version),
    "watch": Command("Follow a run in the terminal.", _watch),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The ``megatron01`` program: runs a sub-command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    run_as_program(lambda: dispatch(COMMANDS, arguments, "megatron01"))
