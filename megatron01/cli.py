"""The ``megatron01`` program and its commands, which are imported lazily."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from megatron01 import __version__
from megatron01.config.command_line import Command, dispatch, parse
from megatron01.errors import UserError, nearest
from megatron01.parallel.program import run_as_program
from megatron01.utils.files import SHIPPED
from megatron01.utils.signals import StopRequest


def _find(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(f"megatron01.{module}"), name)


def _command(help: str, function: str, settings: str = "", *, interruptible: bool = False) -> Command:
    """A command whose function and settings are imported when it runs.

    Args:
        function: MODULE:NAME below this package; an integer that it returns is the exit status.
        settings: settings class that it takes, in the same form; without, it takes arguments and "megatron01 NAME".
        interruptible: signals raise ``Stopped`` in it.
    """

    def run(argv: Sequence[str], prog: str) -> int | None:
        given = (parse(_find(settings), argv, prog=prog, description=help),) if settings else (argv, prog)
        call = _find(function)
        with contextlib.ExitStack() as stack:
            if interruptible:
                stack.enter_context(stack.enter_context(StopRequest(None)).interrupting())
            result = call(*given)
        return result if isinstance(result, int) else None

    return Command(help, run)


def _of_folder(help: str, function: str) -> Command:
    """A command whose function takes a checkpoint folder; a run folder stands for the checkpoints of its run."""

    def run(argv: Sequence[str], prog: str) -> None:
        if list(argv) in (["-h"], ["--help"]):
            print(f"usage: {prog} FOLDER\n\n{help}")
            return
        if len(argv) != 1 or not argv[0] or argv[0].startswith("-"):
            raise UserError(f"{prog} takes one folder, but was given {' '.join(argv) or 'none'}")
        call = _find(function)  # imports torch, which takes seconds
        call(str(_find("convert.formats:checkpoints_of_run")(Path(argv[0])) or argv[0]))

    return Command(help, run)


_OF_CHECKPOINTS = {
    "list": _of_folder("The checkpoints in a folder, newest first.", "checkpoint.command:list_all"),
    "inspect": _of_folder(
        "What the newest checkpoint in a folder holds, or the one of an iter_... folder.", "checkpoint.command:inspect"
    ),
    "verify": _of_folder(
        "Read all files of a folder's checkpoints, or of one, and compare their hashes.", "checkpoint.command:verify"
    ),
}

_COMPLETION = {
    "bash": """\
_megatron01() {
    local IFS=$'\\n' word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=($(compgen -W "$(megatron01 complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "$word"))
}
complete -o default -o bashdefault -F _megatron01 megatron01
""",
    "fish": """\
complete -c megatron01 -a '(megatron01 complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
_COMPLETION["zsh"] = "autoload -U +X bashcompinit && bashcompinit\n" + _COMPLETION["bash"]


def _completion(argv: Sequence[str], prog: str) -> None:
    if len(argv) != 1 or argv[0] not in _COMPLETION:
        shells = "|".join(sorted(_COMPLETION))
        print(f"usage: {prog} {shells}\n\nPrints what the shell needs, for its start-up file:")
        print(f'  eval "$({prog} bash)"          in ~/.bashrc; zsh in ~/.zshrc likewise')
        print(f"  {prog} fish | source           in ~/.config/fish/config.fish")
        if list(argv) not in ([], ["-h"], ["--help"]):
            raise UserError(f"{prog} takes one of {', '.join(sorted(_COMPLETION))}, but was given {' '.join(argv)}")
        return
    print(_COMPLETION[argv[0]], end="")


def _complete(argv: Sequence[str], prog: str) -> None:
    """Prints completions of the last word: commands, flags, and the choices of the flag before it."""
    from megatron01.config.yaml_files import shipped_configs

    *before, word = argv or [""]
    if before[-1:] == ["--config"]:
        print("\n".join(shipped_configs()))
        return
    if before[:1] == ["help"]:
        before = before[1:]
    if not before:
        print("\n".join([*(name for name in COMMANDS if name != "complete"), "help", "--version"]))
        return
    shown = _help_of(before)
    choices = re.findall(rf"^ +(?:-\w, )?{re.escape(before[-1])} \{{(.*?)\}}", shown, re.MULTILINE)
    if choices:
        print("\n".join(choices[0].split(",")))
    elif word.startswith("-"):
        flags = re.findall(r"^ +(?:-\w, )?(--[\w-]+)(?:, (--no-[\w-]+))?", shown, re.MULTILINE)
        print("\n".join(flag for pair in flags for flag in pair if flag))
    else:
        print("\n".join(re.findall(r"^  ([a-z][\w-]*)  ", shown, re.MULTILINE)))


def _help_of(words: Sequence[str]) -> str:
    """The --help text of the command that the first words name, or of its sub-command."""
    command = COMMANDS.get(words[0])
    if command is None:
        return ""
    for arguments in ([words[1]] if len(words) > 1 and not words[1].startswith("-") else [], []):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit, UserError):
            command.run([*arguments, "--help"], f"megatron01 {words[0]}")
        if output.getvalue():
            return output.getvalue()
    return ""


def _configs(argv: Sequence[str], prog: str) -> None:
    from megatron01.config.yaml_files import read_config, shipped_configs

    if list(argv) in (["-h"], ["--help"]):
        print(f"usage: {prog} [NAME]\n\nLists the configurations that --config finds by name, or prints one.")
        return
    if len(argv) > 1:
        raise UserError(f"{prog} takes one name, but was given {' '.join(argv)}")
    if argv:
        print(read_config(argv[0], "configuration"), end="")
        return
    names = shipped_configs()
    for name in names:
        title = read_config(name, "configuration").partition("\n")[0].removeprefix("# ")
        print(f"{name:<{max(map(len, names))}}  {title}")


_LAUNCHERS = {
    "torchrun": "torchrun.sh",
    "mpirun": "mpirun.sh",
    "slurm": "slurm/submit.sh",
    "slurm-recipe": "slurm/recipe.sh",
    "slurm-compare": "slurm/compare.sh",
    "quickstart": "quickstart.sh",
}


def _launch(argv: Sequence[str], prog: str) -> None:
    """Replaces this process by the launch script (exec), with this interpreter's folder first in PATH."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {prog} LAUNCHER [--dry-run] ...\n\nRuns a launch script; its --help tells more:\n")
        print("\n".join(f"  {name:<13}  {SHIPPED / 'launch' / script}" for name, script in _LAUNCHERS.items()))
        return
    if argv[0] not in _LAUNCHERS:
        raise UserError(f"there is no launcher {argv[0]!r}{nearest(argv[0], _LAUNCHERS) or f'; {prog} lists them'}")
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {"PYTHON": sys.executable} | os.environ | {"PATH": path}
    os.execvpe("bash", ["bash", str(SHIPPED / "launch" / _LAUNCHERS[argv[0]]), *argv[1:]], environment)


COMMANDS: dict[str, Command] = {
    "checkpoint": Command(
        "List checkpoints, show what one holds, and verify that they are whole.",
        lambda argv, prog: dispatch(_OF_CHECKPOINTS, argv, prog, arguments="FOLDER"),
    ),
    "compare": _command(
        "Compare runs: losses over steps, tokens, time and bytes, and what they sent.", "compare.command:compare"
    ),
    "complete": Command("", _complete),  # for the scripts of ``completion``; not listed
    "completion": Command("Print a script that completes commands and flags in bash, zsh or fish.", _completion),
    "configs": Command("List the shipped configurations, or print one.", _configs),
    "convert": _command(
        "Convert models to and from Hugging Face's format, and from Megatron-LM's.",
        "convert.formats:convert",
        "config.commands:ConvertConfig",
    ),
    "data": _command("Merge, inspect and verify token files; make those of the shipped corpus.", "data.commands:data"),
    "doctor": _command(
        "Check the machines of a job and measure their network, alone or under srun, torchrun or mpirun.",
        "doctor.command:doctor",
        "config.commands:DoctorConfig",
    ),
    "fill-mask": _command(
        "Fill the masks of texts with a BERT.", "evaluate.commands:fill_mask", "config.commands:FillMaskConfig"
    ),
    "generate": _command(
        "Continue texts with a GPT-2.", "evaluate.commands:generate", "config.commands:GenerateConfig"
    ),
    "glue": _command(
        "Fine-tune a BERT on the tasks of GLUE, and compare with published results.",
        "finetune.glue:glue",
        "config.commands:GlueConfig",
        interruptible=True,
    ),
    "launch": Command("Run a launch script: torchrun, mpirun, SLURM, the quick start.", _launch),
    "perplexity": _command(
        "Measure how well a GPT-2 predicts held-out text.",
        "evaluate.commands:perplexity",
        "config.commands:PerplexityConfig",
    ),
    "plan": _command(
        "Forecast how long a run takes on a cluster, and which way to train is quickest.", "plan.command:plan"
    ),
    "preprocess": _command(
        "Tokenize text into the .bin/.idx files that training reads.",
        "data.preprocessing.preprocess:preprocess",
        "config.commands:PreprocessConfig",
        interruptible=True,
    ),
    "pretrain": _command(
        "Pretrain a GPT-2 or a BERT; as one process, or under torchrun, srun or mpirun.", "pretraining:pretrain_command"
    ),
    "schedule": _command(
        "Show when a run synchronizes and what each step sends, without training.", "plan.command:schedule"
    ),
    "squad": _command(
        "Fine-tune a BERT on SQuAD 1.1.", "finetune.squad:squad", "config.commands:SquadConfig", interruptible=True
    ),
    "train-tokenizer": _command(
        "Make a vocabulary from text.",
        "data.train_tokenizer:train_tokenizer",
        "config.commands:TrainTokenizerConfig",
    ),
    "version": Command("Print the version.", lambda argv, prog: print(f"megatron01 {__version__}")),
    "watch": _command("Follow a run in the terminal.", "compare.watch:watch"),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The ``megatron01`` program: runs a sub-command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--version"], ["-V"]):
        arguments[0] = "version"
    elif arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    run_as_program(lambda: dispatch(COMMANDS, arguments, "megatron01"))
