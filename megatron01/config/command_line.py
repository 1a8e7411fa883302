"""Command lines: settings from YAML files and flat flags, sub-commands, and one-line errors.

Nothing here imports torch, so that ``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeVar, get_args, get_origin

from megatron01.config.fields import Setting, Settings
from megatron01.config.yaml_files import dump_yaml, load_yaml
from megatron01.errors import UserError, nearest

ConfigT = TypeVar("ConfigT")


class SettingsSource(Protocol):
    """Files of another kind that settings can come from: they win over ``--config`` files, and flags over them."""

    @property
    def flag(self) -> str: ...
    @property
    def help(self) -> str: ...
    def read(
        self, path: str, settings: Settings[Any], from_files: Mapping[str, Any], from_flags: Mapping[str, Any]
    ) -> dict[str, Any]:
        """``from_files`` (key -> value, of the --config files) with what the file at ``path`` changes.

        Raises:
            UserError: if the file cannot be read or says what cannot be done.
        """


def parse(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    sources: Sequence[SettingsSource] = (),
) -> ConfigT:
    """The configuration that a command line asks for.

    Defaults are overridden by the ``--config`` files in their order, key by key, these by files of ``sources``, and
    these by flags. The result is checked as a whole, so a flag may mend what would contradict in a file alone.
    ``--help`` (with the --config files' values as defaults) and ``--print-config`` print and raise SystemExit(0).

    Args:
        config_class: a dataclass, of sections or flat; its field docstrings are the help.
        argv: without the program's name.
        sources: other kinds of files, each with a flag of its own.

    Raises:
        UserError: for an unknown flag, setting or section, a wrong value, or a file that cannot be read.
    """
    try:
        return _parse(config_class, argv, prog, description, sources)
    except UserError as error:
        error.scope = "node"  # every process of this machine reads the same flags and files
        raise


def _parse(
    config_class: type[ConfigT], argv: Sequence[str], prog: str, description: str, sources: Sequence[SettingsSource]
) -> ConfigT:
    settings = Settings(config_class)
    given, unknown = _build_parser(settings, {}, prog, description, sources).parse_known_args(argv)
    if unknown:
        raise UserError(_describe_unknown(unknown[0], settings, prog, sources))
    values: dict[str, Any] = {}
    for path in given.config:
        values.update(load_yaml(path, settings))
    if given.help:
        print(_build_parser(settings, values, prog, description, sources).format_help(), end="")
        raise SystemExit(0)
    flags: dict[str, Any] = {}
    for key, setting in settings.by_key.items():
        if hasattr(given, key):
            text = getattr(given, key)
            flags[key] = text if isinstance(text, bool) else setting.convert(text, setting.flag)
    for source in sources:
        if hasattr(given, source.flag):
            values = source.read(getattr(given, source.flag), settings, values, flags)
    config = settings.build(values | flags)
    if given.print_config:
        print(dump_yaml(config), end="")
        raise SystemExit(0)
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flag, _, problem = message.removeprefix("argument ").partition(": ")
        name = flag.split("/")[0]
        if problem.startswith("expected"):
            raise UserError(f"{name} has no value; write it after the flag, or as {name}=VALUE if it begins with '-'")
        if problem.startswith("ignored explicit argument"):
            hint = f" or {flag.split('/')[1]}" if "/" in flag else ""
            raise UserError(f"{name} takes no value; write {name}{hint} alone")
        raise UserError(message)


def _build_parser(
    settings: Settings[Any],
    values: dict[str, Any],
    prog: str,
    description: str,
    sources: Sequence[SettingsSource],
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
    for source in sources:
        general.add_argument(source.flag, metavar="FILE", dest=source.flag, default=argparse.SUPPRESS, help=source.help)
    general.add_argument("--print-config", action="store_true", help="Print the resulting settings as YAML and exit.")
    for setting in settings.in_section(None):
        _add_flag(general, setting, values.get(setting.key, setting.default))
    for section, text in settings.section_help.items():
        group = parser.add_argument_group(section, text)
        for setting in settings.in_section(section):
            _add_flag(group, setting, values.get(setting.key, setting.default))
    return parser


def _add_flag(group: argparse._ArgumentGroup, setting: Setting, default: Any) -> None:
    shown = "required" if default is MISSING else "" if default in (None, "") else f"default: {_show(default)}"
    text = (setting.help + (f" ({shown})" if shown else "")).replace("%", "%%")
    options: dict[str, Any] = {"dest": setting.key, "default": argparse.SUPPRESS, "help": text}
    if setting.type is bool:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **options)
    elif setting.is_list:
        group.add_argument(setting.flag, nargs="+", metavar=_metavar(get_args(setting.type)[0]), **options)
    else:
        group.add_argument(setting.flag, metavar=_metavar(setting.type), **options)


def _metavar(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return "{" + ",".join(map(str, get_args(wanted))) + "}"
    result: str = {str: "TEXT", Path: "PATH"}.get(wanted, wanted.__name__.upper())
    return result


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _describe_unknown(argument: str, settings: Settings[Any], prog: str, sources: Sequence[SettingsSource]) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}; settings are given as flags, see {prog} --help"
    flag = argument.split("=", 1)[0]
    flags = ["--config", "--print-config", "--help", *(source.flag for source in sources)]
    for setting in settings.by_key.values():
        flags += [setting.flag, f"--no-{setting.flag[2:]}"] if setting.type is bool else [setting.flag]
    return f"unknown flag {flag}{nearest(flag, flags) or f'; see {prog} --help'}"


@dataclass(frozen=True)
class Command:
    """A sub-command of the ``megatron01`` program."""

    help: str
    run: Callable[[Sequence[str], str], None]  # (arguments after its name, "megatron01 NAME")


def dispatch(commands: Mapping[str, Command], argv: Sequence[str], prog: str, *, arguments: str = "[flags]") -> None:
    """Run the one of ``commands`` that the first argument names, or list them.

    Args:
        arguments: what they take, for the list.

    Raises:
        UserError: if there is no such command, and what the command raises.
    """
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, commands))
        lines = [f"  {name:<{width}}  {command.help}" for name, command in commands.items()]
        print("\n".join([f"usage: {prog} COMMAND {arguments}", "", *lines, "", f"{prog} COMMAND --help tells more."]))
        return
    name = argv[0]
    if name not in commands:
        raise UserError(f"unknown command {name!r}{nearest(name, commands) or f'; see {prog} --help'}")
    commands[name].run(argv[1:], f"{prog} {name}")
