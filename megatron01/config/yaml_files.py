"""Configuration files: YAML with the sections of the configuration class, read strictly.

The file is composed into nodes and never constructed into objects, so that every message can name the line, a key
given twice is noticed, and the declared types alone decide what a scalar means (see ``fields``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, TypeVar

import yaml

from megatron01.config.fields import Setting, Settings
from megatron01.errors import UserError, nearest
from megatron01.utils.files import SHIPPED, open_regular

ConfigT = TypeVar("ConfigT")

_NULL_TAG = "tag:yaml.org,2002:null"


def find_config(path: str | os.PathLike[str]) -> Path:
    """The file that ``--config`` means: ``path`` itself, else the shipped one of this name, as ``gpt2/117m``."""
    given = Path(path)
    if given.is_file():
        return given
    folder = SHIPPED / "configs"
    name = given.relative_to("configs") if given.parts[:1] == ("configs",) else given
    named = folder / name.parent / f"{name.name.removesuffix('.yaml')}.yaml"
    return named if named.is_file() else given


def shipped_configs() -> list[str]:
    """The names of the shipped configurations, as ``gpt2/117m``."""
    folder = SHIPPED / "configs"
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*/*.yaml"))


def load_yaml(path: str | os.PathLike[str], settings: Settings[Any]) -> dict[str, Any]:
    """The values that a file (see ``find_config``) sets, as key -> typed value (``{"optimizer.lr": 1e-4}``).

    Raises UserError if the file is missing, unreadable or no YAML, or if it holds an unknown section or key, a key
    twice, or a value of the wrong type.
    """
    return parse_yaml(read_config(path, "config file"), settings, source=str(path))


def read_config(path: str | os.PathLike[str], kind: str) -> str:
    """The text of the file that ``find_config`` finds. Raises UserError, with its ``kind``, if it cannot be read."""
    try:
        return find_config(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{kind} {path} does not exist{_nearest_file(Path(path))}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{kind} {path} cannot be read: {_reason(error)}") from None


def parse_yaml(text: str, settings: Settings[Any], *, source: str) -> dict[str, Any]:
    """The values that YAML text sets; ``source`` names it in messages. Raises as ``load_yaml`` does."""
    root = _read(lambda: yaml.compose(text, Loader=yaml.SafeLoader), source)
    values: dict[str, Any] = {}
    for key, node in _pairs(root, source, "the file"):
        if key in settings.section_help:
            for name, value_node in _pairs(node, source, f"section {key}"):
                setting = settings.find(key, name)
                if setting is None:
                    known = [setting.name for setting in settings.in_section(key)]
                    everywhere = [setting.name for setting in settings.by_key.values()]
                    hint = _elsewhere(name, settings) or nearest(name, known) or nearest(name, everywhere)
                    raise UserError(f"{_place(source, value_node)}: unknown setting {name!r} in section {key!r}{hint}")
                values[setting.key] = _value(value_node, setting, source)
        elif (setting := settings.find(None, key)) is not None:
            values[setting.key] = _value(node, setting, source)
        else:
            names = [*settings.section_help, *(setting.name for setting in settings.in_section(None))]
            hint = _elsewhere(key, settings) or nearest(key, names)
            raise UserError(f"{_place(source, node)}: unknown section {key!r}{hint}")
    return values


def _place(source: str, node: yaml.Node) -> str:
    return f"{source} line {node.start_mark.line + 1}"


def load_plain_yaml(path: Path) -> Any:
    """What a file holds that ``dump_yaml`` wrote: dicts, lists, and scalars as text.

    Raises UserError if it cannot be read, or is no YAML.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}") from None
    return parse_plain_yaml(text, source=str(path))


def parse_plain_yaml(text: str, *, source: str) -> Any:
    """The same for text; ``source`` names it in messages."""
    return _read(lambda: yaml.load(text, Loader=yaml.BaseLoader), source)


def flat_settings(content: Any) -> dict[str, str]:
    """``section.name`` -> value as text, of what ``load_plain_yaml`` gives; what is no section is left out."""
    sections = content.items() if isinstance(content, dict) else ()
    return {
        f"{section}.{name}": " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for section, values in sections
        if isinstance(values, dict)
        for name, value in values.items()
    }


def _read(read: Callable[[], Any], source: str) -> Any:
    try:
        return read()
    except RecursionError:
        raise UserError(f"{source}: not valid YAML: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source} line {mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise UserError(f"{place}: not valid YAML: {' '.join(problem.split())[:200]}") from None


def _reason(error: OSError | UnicodeDecodeError) -> str | None:
    return error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"


def config_from_yaml(text: str, config_class: type[ConfigT], *, source: str) -> ConfigT:
    """The configuration that ``dump_yaml`` wrote as ``text``. Raises as ``load_yaml`` does."""
    settings = Settings(config_class)
    return settings.build(parse_yaml(text, settings, source=source))


def dump_yaml(config: Any) -> str:
    """All settings of a configuration as YAML, in the order of declaration; ``load_yaml`` reads them back equal."""
    values = dataclasses.asdict(config)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Dumper(yaml.SafeDumper):
    """Takes paths as text and tuples as lists, each wherever it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(tuple, yaml.SafeDumper.represent_list)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def _pairs(node: yaml.Node | None, source: str, what: str) -> list[tuple[str, yaml.Node]]:
    """The entries of a mapping; nothing for an empty one, such as a section whose lines are all commented out."""
    if node is None or node.tag == _NULL_TAG:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{_place(source, node)}: {what} holds no 'name: value' pairs; expected settings below it")
    pairs: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{_place(source, key)}: a key is not a name; expected 'name: value'")
        if key.value in pairs:
            raise UserError(f"{_place(source, key)}: {key.value!r} is given twice in {what}; keep one of them")
        pairs[key.value] = value
    return list(pairs.items())


def _value(node: yaml.Node, setting: Setting, source: str) -> Any:
    place = f"{_place(source, node)}: {setting.key}"
    given: str | list[str] | None
    if isinstance(node, yaml.ScalarNode):
        is_null = node.tag == _NULL_TAG and (setting.optional or setting.type is not str)
        given = None if is_null else node.value
    elif isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        given = [item.value for item in node.value]
    else:
        raise UserError(f"{place} holds nested settings; expected {setting.expectation}")
    return setting.convert(given, place)


def _elsewhere(name: str, settings: Settings[Any]) -> str:
    for setting in settings.by_key.values():
        if setting.name == name and setting.section is not None:
            return f"; {name!r} belongs into section {setting.section!r}"
    return ""


def _nearest_file(path: Path) -> str:
    name = str(path).removeprefix("configs/").removesuffix(".yaml")
    if own := [config for config in shipped_configs() if config.startswith(f"{name}/")]:
        return f"; there are {', '.join(own)}"
    if hint := nearest(name, shipped_configs()):
        return hint
    try:
        neighbours = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return f"; the folder {path.parent} does not exist either" if not path.parent.exists() else ""
    shipped = "; megatron01 configs lists those that are shipped" if path.suffix in ("", ".yaml") else ""
    return nearest(path.name, neighbours) or shipped
