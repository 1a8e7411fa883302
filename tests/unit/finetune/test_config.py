from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron01.config.command_line import parse
from megatron01.config.commands import TASK_NAMES, GlueConfig, SquadConfig
from megatron01.errors import UserError
from megatron01.finetune.glue import TASKS

GLUE = ["--load", "m", "--data", "d", "--output", "o"]
SQUAD = ["--load", "m", "--train-file", "t", "--dev-file", "d", "--output", "o"]


def of(config_class, *arguments):
    return parse(config_class, arguments, prog="test", description="Test.")


def test_the_defaults_are_the_protocol_of_the_papers():
    config = of(GlueConfig, *GLUE)
    assert config.batch_sizes == (8, 16, 32)
    assert config.learning_rates == (1e-5, 3e-5, 5e-5, 8e-5)
    assert config.seeds == 10
    assert set(config.tasks) == set(TASKS) == set(TASK_NAMES)
    assert len(TASKS) == 9


def test_lists_and_files_from_flags():
    config = of(GlueConfig, *GLUE, "--tasks", "RTE", "SST-2", "--learning-rates", "1e-3", "--dropout", "none")
    assert (config.tasks, config.learning_rates, config.dropout) == (("RTE", "SST-2"), (1e-3,), None)
    assert of(SquadConfig, *SQUAD).train_file == Path("t")


def test_the_commands_of_the_documentation():
    text = (Path(__file__).resolve().parents[3] / "docs" / "finetuning.md").read_text().replace("\\\n", "")
    commands = [shlex.split(found) for found in re.findall(r'megatron01 ((?:glue|squad) --[^"\n]*)', text)]
    assert [command[0] for command in commands] == ["glue", "squad", "glue", "glue", "glue", "glue"]
    for name, *flags in commands:
        of({"glue": GlueConfig, "squad": SquadConfig}[name], *flags)


@pytest.mark.parametrize(
    ("config_class", "arguments", "message"),
    [
        (GlueConfig, GLUE[2:], "--load is not given"),
        (GlueConfig, [*GLUE, "--batch-sizes", "8", "0"], "batch_sizes holds 0; expected positive numbers"),
        (GlueConfig, [*GLUE, "--batch-sizes", "8", "8"], "batch_sizes holds a value twice"),
        (GlueConfig, [*GLUE, "--learning-rates=-1e-5"], "learning_rates holds -1e-05"),
        (GlueConfig, [*GLUE, "--learning-rates", "nan"], "is 'nan'; expected a list, each a number"),
        (GlueConfig, [*GLUE, "--seeds", "0"], "seeds is 0; expected a positive number"),
        (GlueConfig, [*GLUE, "--jobs", "0"], "jobs is 0; expected a positive number"),
        (GlueConfig, [*GLUE, "--epochs", "0"], "epochs is 0.0; expected a positive number"),
        (GlueConfig, [*GLUE, "--warmup-fraction", "1"], r"warmup_fraction is 1.0; expected a number in \[0, 1\)"),
        (GlueConfig, [*GLUE, "--weight-decay", "-1"], "weight_decay is -1.0; expected 0 or more"),
        (GlueConfig, [*GLUE, "--dropout", "1"], r"dropout is 1.0; expected a number in \[0, 1\)"),
        (GlueConfig, [*GLUE, "--tasks", "MNLI-m"], "did you mean 'MNLI'"),
        (GlueConfig, [*GLUE, "--tasks", "RTE", "RTE"], "tasks holds a task twice"),
        (GlueConfig, [*GLUE, "--max-length", "4"], "max_length is 4; expected 8 or more"),
        (GlueConfig, [*GLUE, "--report-only", "--submission"], "submission is given with report_only"),
        (GlueConfig, [*GLUE, "--report-only", "--save-models"], "save_models is given with report_only"),
        (GlueConfig, [*GLUE, "--mnli-model", "x", "--tasks", "CoLA"], "none of RTE, MRPC and STS-B is among the tasks"),
        (GlueConfig, [*GLUE, "--vocab-file", "x"], "give --tokenizer-type as well"),
        (SquadConfig, SQUAD[2:], "--load is not given"),
        (SquadConfig, [*SQUAD, "--doc-stride", "0"], "doc_stride is 0; expected a positive number"),
        (SquadConfig, [*SQUAD, "--max-length", "70"], "max_length is 70; expected 16 or more tokens beyond"),
    ],
)
def test_settings_that_cannot_be(config_class, arguments, message):
    with pytest.raises(UserError, match=message):
        of(config_class, *arguments)
