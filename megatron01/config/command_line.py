"""Command lines: settings from YAML files and flat flags, sub-commands, and one-line errors.

Nothing here imports torch, so that ``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeVar, get_args, get_origin

from megatron01.config.fields import Setting, Settings
from megatron01.config.yaml_files import dump_yaml, find_config, load_yaml
from megatron01.errors import UserError, nearest

ConfigT = TypeVar("ConfigT")


class OtherFiles(Protocol):
    """Reads settings files of another program, such as DeepSpeed, which have a flag of their own.

    Attributes:
        flag, help: of these files.
    """

    flag: str
    help: str

    def read(
        self, path: str, settings: Settings[Any], from_files: Mapping[str, Any], from_flags: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The settings of ``from_files`` with what the file at ``path`` changes. Raises UserError if it cannot."""


def parse(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    other_files: OtherFiles | None = None,
    arguments: list[str] | None = None,
    check: Callable[[ConfigT], object] = lambda config: None,
) -> ConfigT:
    """The configuration that a command line asks for.

    Defaults are overridden by the ``--config`` files in their order, key by key, these by the ``other_files`` file, and
    these by flags. The result is checked as a whole, so a flag may mend what would contradict in a file alone.
    ``--help`` (with the --config files' values as defaults) and ``--print-config`` print and raise SystemExit(0).
    Raises UserError for an unknown flag, setting or section, a wrong value, or a file that cannot be read.

    ``config_class`` is a dataclass, of sections or flat; its field docstrings are the help. What is neither a flag nor
    a value of one is an error, or is added to ``arguments`` if it is given. ``check`` sees the result before it is
    printed or returned, and raises UserError where it does not fit what the settings do not tell.
    """
    try:
        settings = Settings(config_class)
        given, unknown = _build_parser(settings, {}, prog, description, other_files).parse_known_args(argv)
        if arguments is not None:
            arguments += [word for word in unknown if not word.startswith("-")]
            unknown = [word for word in unknown if word.startswith("-")]
        if unknown:
            raise UserError(_describe_unknown(unknown, settings, prog, other_files))
        values: dict[str, Any] = {}
        for path in given.config:
            values.update(load_yaml(path, settings))
        if given.help:
            print(_build_parser(settings, values, prog, description, other_files).format_help(), end="")
            raise SystemExit(0)
        flags: dict[str, Any] = {}
        for key, setting in settings.by_key.items():
            if hasattr(given, key):
                text = getattr(given, key)
                flags[key] = text if isinstance(text, bool) else setting.convert(text, setting.flag)
        if other_files and hasattr(given, other_files.flag):
            values = other_files.read(getattr(given, other_files.flag), settings, values, flags)
        config = settings.build(values | flags)
        check(config)
        if given.print_config:
            print(dump_yaml(config), end="")
            raise SystemExit(0)
        return config
    except UserError as error:
        error.scope = "node"  # every process of this machine reads the same flags and files
        raise


class _Parser(argparse.ArgumentParser):
    expectations: Mapping[str, str] = {}  # of the values of flags, in words

    def error(self, message: str) -> NoReturn:
        flag, _, problem = message.removeprefix("argument ").partition(": ")
        name = flag.split("/")[0]
        if problem.startswith("expected"):
            expected = self.expectations.get(name, "one")
            raise UserError(
                f"{name} has no value; expected {expected} after the flag, or {name}=VALUE if it begins with '-'"
            )
        if problem.startswith("ignored explicit argument"):
            hint = f" or {flag.split('/')[1]}" if "/" in flag else ""
            raise UserError(f"{name} takes no value; write {name}{hint} alone")
        raise UserError(message)


def _build_parser(
    settings: Settings[Any], values: dict[str, Any], prog: str, description: str, other_files: OtherFiles | None
) -> _Parser:
    """Flags that store text under the settings' keys if given; ``values`` are the defaults that the help shows."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--config FILE ...] [flags]",
        description=f"{description} Settings come from the defaults below, then --config files, then flags.",
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=34, width=min(120, shutil.get_terminal_size().columns) - 2
        ),
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="store_true", help="Show this help and exit.")
    general.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML file with settings; may be repeated, later files win key by key.",
    )
    if other_files:
        flag = other_files.flag
        general.add_argument(flag, metavar="FILE", dest=flag, default=argparse.SUPPRESS, help=other_files.help)
    general.add_argument("--print-config", action="store_true", help="Print the resulting settings as YAML and exit.")
    groups = {section: parser.add_argument_group(section, text) for section, text in settings.section_help.items()}
    for setting in settings.by_key.values():
        group = groups.get(setting.section or "", general)
        _add_flag(group, setting, values.get(setting.key, setting.default))
    parser.expectations = {setting.flag: setting.expectation for setting in settings.by_key.values()}
    return parser


def _add_flag(group: argparse._ArgumentGroup, setting: Setting, default: Any) -> None:
    shown = "required" if default is MISSING else "" if default in (None, "") else f"default: {_show(default)}"
    text = (setting.help + (f" ({shown})" if shown else "")).replace("%", "%%")
    options: dict[str, Any] = {"dest": setting.key, "default": argparse.SUPPRESS, "help": text}
    if setting.type is bool:
        options |= {"action": argparse.BooleanOptionalAction}
    elif setting.is_list:
        options |= {"nargs": "+", "metavar": _metavar(get_args(setting.type)[0])}
        if setting.section is None and setting.default in (MISSING, None):
            options["action"] = "extend"  # what a command works on adds up; settings override
    else:
        options |= {"metavar": _metavar(setting.type)}
    group.add_argument(setting.flag, **options)
    if setting.aliases:
        group.add_argument(*setting.aliases, **(options | {"help": argparse.SUPPRESS}))


def _metavar(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return "{" + ",".join(map(str, get_args(wanted))) + "}"
    result: str = {str: "TEXT", Path: "PATH"}.get(wanted, wanted.__name__.upper())
    return result


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _describe_unknown(
    arguments: Sequence[str], settings: Settings[Any], prog: str, other_files: OtherFiles | None
) -> str:
    """What is wrong with ``arguments``, of which nothing is known: all flags among them, or a first that is none."""
    argument = arguments[0]
    if not argument.startswith("-"):
        if (found := find_config(argument)).is_file() and found.suffix in (".yaml", ".yml"):
            return f"unexpected argument {argument!r}; a configuration is given as --config {argument}"
        if argument.lower() in ("true", "false"):
            return f"unexpected argument {argument!r}; a setting is turned on as --NAME and off as --no-NAME"
        return f"unexpected argument {argument!r}; settings are given as flags, see {prog} --help"
    flags = ["--config", "--print-config", "--help", *([other_files.flag] if other_files else [])]
    for setting in settings.by_key.values():
        flags += [setting.flag, f"--no-{setting.flag[2:]}"] if setting.type is bool else [setting.flag]
    choices = {setting.flag: get_args(setting.type) for setting in settings.by_key.values()}
    # the values of unknown flags are unknown words, too, and may be negative numbers
    unknown = [word.split("=", 1)[0] for word in arguments if re.match("-[^0-9.]", word)]
    hints = {flag: _hint(flag, flags, choices) for flag in unknown or [argument]}
    if len(hints) == 1:
        ((flag, hint),) = hints.items()
        return f"unknown flag {flag}; {hint or f'see {prog} --help'}"
    return f"unknown flags {', '.join(flag + f' ({hint})' * bool(hint) for flag, hint in hints.items())}"


_SAME_THING = (
    "input data data-path train-data-path text text-file prompt prompt-file file files corpus dataset dataset-dir"
    " train-file data-dir glue-dir source in",
    "output output-prefix output-dir output-file out out-dir save save-dir save-path dest destination",
    "load pretrained-checkpoint model model-path model-name-or-path checkpoint checkpoint-dir checkpoint-path ckpt"
    " resume restore pretrained run run-dir",
    "run-dir log-dir logdir logging-dir log-path tensorboard-dir wandb-save-dir",
    "pretrained-checkpoint finetune load-optim load-rng",
    "train-iters max-steps num-steps total-steps steps iterations iters max-iters num-train-steps train-samples",
    "epochs num-epochs num-train-epochs",
    "micro-batch-size batch-size batch per-device-train-batch-size per-gpu-batch-size train-micro-batch-size-per-gpu bs"
    " eval-batch-size batch-sizes",
    "global-batch-size train-batch-size total-batch-size gradient-accumulation-steps accumulation-steps",
    "lr learning-rate learning-rates peak-lr max-lr",
    "lr-warmup-iters warmup-steps num-warmup-steps warmup-iters warmup lr-warmup-fraction warmup-ratio warmup-fraction"
    " lr-warmup-samples",
    "lr-decay-iters lr-decay-samples",
    "lr-decay-style lr-scheduler lr-scheduler-type scheduler lr-schedule schedule",
    "clip-grad max-grad-norm gradient-clipping grad-clip clip grad-norm",
    "adam-beta1 beta1 betas",
    "adam-beta2 beta2",
    "adam-eps eps epsilon adam-epsilon",
    "weight-decay wd start-weight-decay end-weight-decay",
    "layernorm-epsilon norm-epsilon layer-norm-epsilon",
    "seq-length sequence-length seq-len max-length max-seq-length context-length n-ctx encoder-seq-length",
    "num-layers layers n-layer num-hidden-layers depth encoder-num-layers",
    "hidden-size n-embd d-model embed-dim width dim",
    "num-attention-heads heads n-head num-heads",
    "hidden-dropout dropout resid-pdrop",
    "precision dtype fp16 bf16 fp32 half amp mixed-precision",
    "tokenizer-type tokenizer tokenizer-name tokenizer-name-or-path tokenizer-model vocab-file",
    "vocab-file vocab vocabulary vocab-path",
    "merge-file merges merges-file",
    "replicas world-size num-gpus gpus num-replicas nproc-per-node dp data-parallel-size nodes processes-per-node"
    " processes gpus-per-node",
    "workers num-workers jobs num-proc processes threads dataloader-num-workers",
    "tensor-model-parallel-size model-parallel-size tp tp-size tensor-parallel-size tensor-parallel",
    "save-interval save-steps checkpoint-interval checkpoint-every save-every",
    "keep-every save-retain-interval",
    "log-interval logging-steps log-every log-steps steps-per-print tensorboard-log-interval",
    "eval-interval eval-steps eval-every validate-every",
    "keep-last save-total-limit keep-checkpoints max-checkpoints",
    "max-new-tokens max-tokens length num-tokens tokens max-length",
    "num-samples num-return-sequences samples n",
    "seed random-seed seeds",
    "device cuda cpu gpu use-cpu no-cuda",
    "tasks task task-name",
    "append-eod add-eos append-eos eod eos",
    "json json-output as-json format",
    "shared-folder folder shared directory dir",
    "recompute-activations gradient-checkpointing activation-checkpointing checkpoint-activations"
    " recompute-granularity recompute-method recompute-num-layers",
    "accumulate-grads-in-fp32 accumulate-allreduce-grads-in-fp32",
    "gradient-wire-dtype grad-reduce-in-bf16",
    "overlap-exchange overlap-grad-reduce",
    "bucket-elements ddp-bucket-size bucket-cap-mb",
    "deepspeed-config deepspeed",
    "shard-optimizer use-distributed-optimizer zero zero-stage",
    "objective bert-no-binary-head",
    "variance-freeze-step var-freeze-step",
    "max-sync-interval local-step-clipper",
    "torch-compile compile",
    "wandb-project wandb project report-to",
    "wandb-name wandb-exp-name run-name",
)
"""Names that programs give to the same thing, ours among them: those on one line hint at each other."""


_LEFT_OUT = {
    "leave it out, there is no such setting here": (
        "attention-backend use-flash-attn transformer-impl use-mcore-models use-legacy-models masked-softmax-fusion"
        " bias-gelu-fusion bias-dropout-fusion gradient-accumulation-fusion cross-entropy-loss-fusion"
        " apply-query-key-layer-scaling query-key-layer-scaling attention-softmax-in-fp32 use-cpu-initialization"
        " ddp-impl overlap-param-gather ddp-average-in-collective align-grad-reduce local-rank lazy-mpu-init"
        " async-tensor-model-parallel-allreduce te-rng-tracker check-for-nan-in-loss-and-grad manual-gc"
        " manual-gc-interval empty-unused-memory-level exit-signal-handler"
        " ckpt-format use-dist-ckpt dist-ckpt-format auto-detect-ckpt-format ckpt-fully-parallel-save"
        " ckpt-fully-parallel-load ckpt-assume-constant-structure use-checkpoint-args override-opt-param-scheduler"
        " use-checkpoint-opt-param-scheduler save-optim save-rng weight-decay-incr-style vocab-size mmap-warmup"
        " data-impl num-dataset-builder-threads create-attention-mask-in-dataloader log-throughput timing-log-level"
        " log-params-norm log-timers-to-tensorboard log-memory-to-tensorboard log-validation-ppl-to-tensorboard"
        " tensorboard-queue-size"
    ),
    "leave it out, models here are GPT-2 and BERT as published": (
        "swiglu squared-relu openai-gelu disable-bias-linear position-embedding-type use-rotary-position-embeddings"
        " rotary-percent rotary-base untie-embeddings-and-output-weights normalization apply-layernorm-1p"
        " group-query-attention num-query-groups kv-channels num-experts fp8-format fp32-residual-connection spec"
    ),
    "leave it out, a model is divided by --tensor-model-parallel-size alone": (
        "pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage context-parallel-size"
        " expert-model-parallel-size expert-tensor-parallel-size"
    ),
}
"""Flags of Megatron-LM that have nothing to set here, by what is to be said of them."""


def _hint(flag: str, flags: Sequence[str], choices: Mapping[str, tuple[Any, ...]]) -> str:
    """A hint to the flags of this command that mean what ``flag`` means elsewhere; empty if there is none.

    ``choices``: values of those flags that take one of a few; ``--fp16`` is such a value of another flag.
    """
    name = flag.removeprefix("--").removeprefix("no-").replace("_", "-").lower()
    if f"--{name}" in flags:
        return f"did you mean '--{name}'?"
    groups = [group.split() for group in _SAME_THING]
    found = [f"--{other}" for group in groups if name in group for other in group if f"--{other}" in flags]
    found = [f"{other} {name}" if name in choices.get(other, ()) else other for other in found]
    if found:
        return f"here it is {' or '.join(list(dict.fromkeys(found))[:2])}"
    if "--tensor-model-parallel-size" in flags:  # this trains a model
        for reason, names in _LEFT_OUT.items():
            if name in names.split():
                return reason
    return nearest(flag, flags, cutoff=0.7).removeprefix("; ")  # the dashes and "no-" are alike in all


@dataclass(frozen=True)
class Command:
    """A sub-command of the ``megatron01`` program."""

    help: str
    run: Callable[[Sequence[str], str], int | None]
    """From the arguments after its name, and "megatron01 NAME", to the exit status; None is 0."""


def dispatch(
    commands: Mapping[str, Command], argv: Sequence[str], prog: str, *, arguments: str = "[flags]"
) -> int | None:
    """Run the one of ``commands`` that the first argument names, or list them; returns the exit status.

    Raises UserError if there is no such command, and what the command raises.
    """
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, commands))
        lines = [f"  {name:<{width}}  {command.help}" for name, command in commands.items() if command.help]
        print("\n".join([f"usage: {prog} COMMAND {arguments}", "", *lines, "", f"{prog} COMMAND --help tells more."]))
        return None
    name = argv[0]
    if name not in commands:
        raise UserError(f"unknown command {name!r}{nearest(name, commands) or f'; see {prog} --help'}")
    return commands[name].run(argv[1:], f"{prog} {name}")
