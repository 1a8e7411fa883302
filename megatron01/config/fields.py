"""What a configuration class consists of: its settings, their types, defaults and help, and how to build one.

Flags and YAML files both hand over text; the declared type of a setting alone decides what the text means. So
``1e-4`` is a number and ``no`` may be a name, whatever YAML 1.1 makes of them, and both sources report mistakes in the
same words.

Why not tyro: it would replace the 75 lines in ``command_line`` that hand settings to argparse, but nothing here; it
reports a mistake as a box of several lines, and reads neither ``1e6`` as a whole number nor ``none``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron01.errors import UserError, nearest, require

ConfigT = TypeVar("ConfigT")
NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True)
class Bounds:
    """The values that a setting may take, in the annotation of its type: ``Annotated[int, Bounds(...)]``."""

    allow: Callable[[Any], bool]
    expected: str
    """In words, for the message."""


Positive = Annotated[NumberT, Bounds(lambda value: value > 0, "a positive number")]
NotNegative = Annotated[NumberT, Bounds(lambda value: value >= 0, "0 or more")]
ZeroIsOff = Annotated[NumberT, Bounds(lambda value: value >= 0, "0 (off) or more")]
Below1 = Annotated[float, Bounds(lambda value: 0 <= value < 1, "a number in [0, 1)")]
UpTo1 = Annotated[float, Bounds(lambda value: 0 < value <= 1, "a number in (0, 1]")]
Folder = Annotated[str, Bounds(bool, "a folder")]


class Bounded:
    """Base class of configuration classes that checks their values against ``Bounds``; None is always allowed."""

    def __post_init__(self) -> None:
        """Raises UserError for a value out of bounds."""
        own_class: Any = type(self)
        for name, bounds in _bounds(own_class).items():
            value = getattr(self, name)
            shown = "empty" if value == "" else value
            require(value is None or bounds.allow(value), f"{name} is {shown}; expected {bounds.expected}")


_hints = functools.cache(get_type_hints)


@functools.cache
def _bounds(config_class: type) -> dict[str, Bounds]:
    return {
        name: bounds
        for name, hint in get_type_hints(config_class, include_extras=True).items()
        for part in (hint, *get_args(hint))  # the type itself, or what is beside None
        for bounds in getattr(part, "__metadata__", ())
        if isinstance(bounds, Bounds)
    }


_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_NONE = ("none", "null")


@dataclass(frozen=True)
class Setting:
    """One value that a user can set."""

    section: str | None  # None: a field of the configuration class itself
    name: str
    type: Any  # without "| None"
    optional: bool
    default: Any  # dataclasses.MISSING if the user must give it
    help: str
    metadata: Mapping[str, Any]
    """"aliases": other names of the setting; "names": texts without a dot; "expected": what a value has to be, in
    words; "implies": values by key that take the place of other defaults if it is true."""

    @property
    def key(self) -> str:
        return self.name if self.section is None else f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def aliases(self) -> list[str]:
        """Flags that are understood in place of ``flag``, and not shown."""
        return ["--" + name.replace("_", "-") for name in self.metadata.get("aliases", ())]

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) in (tuple, list)

    @property
    def expectation(self) -> str:
        """What a value has to be, in words."""
        element = get_args(self.type)[0] if self.is_list else self.type
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
        expected = (
            "one of " + ", ".join(map(str, get_args(element)))
            if get_origin(element) is Literal
            else self.metadata.get("expected", words[element])
        )
        return f"a list, each {expected}" if self.is_list else expected

    def convert(self, given: str | Sequence[str] | None, where: str) -> Any:
        """The value that ``given`` stands for. Raises UserError if it has not the type of this setting.

        Args:
            given: text, a list of texts, or None for YAML's null.
            where: the flag, or the file, line and key, for the message.
        """
        single = given[0] if self.is_list and isinstance(given, (list, tuple)) and len(given) == 1 else given
        if given is None or (self.optional and isinstance(single, str) and single.lower() in _NONE):
            if self.optional:
                return None
            raise UserError(f"{where} is empty; expected {self.expectation}")
        if self.is_list:
            texts = [given] if isinstance(given, str) else given
            return get_origin(self.type)(self._scalar(text, get_args(self.type)[0], where) for text in texts)
        if not isinstance(given, str):
            raise UserError(f"{where} is a list; expected {self.expectation}")
        return self._scalar(given, self.type, where)

    def _scalar(self, text: str, wanted: Any, where: str) -> Any:
        problem = f"{where} is {text!r}; expected {self.expectation}"
        if get_origin(wanted) is Literal:
            for choice in get_args(wanted):
                if text == str(choice):
                    return choice
            raise UserError(problem + nearest(text, map(str, get_args(wanted))))
        if wanted is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            raise UserError(problem)
        if wanted in (int, float):
            return _number(text, wanted, problem)
        names = self.metadata.get("names", ())
        if names and text not in names and "." not in text:
            raise UserError(problem + nearest(text, names))
        if "\0" in text or (wanted is Path and not text):  # no path has it, nor an argument of a program; none is empty
            raise UserError(problem)
        return wanted(text)


def _number(text: str, wanted: type[int] | type[float], problem: str) -> int | float:
    value: float = math.nan
    for kind in (wanted, float):  # 1e6 is a whole number too
        with suppress(ValueError):
            value = kind(text)
            break
    is_valid = -(2**63) <= value < 2**63 and value == int(value) if wanted is int else math.isfinite(value)
    if not is_valid:
        raise UserError(problem)
    return wanted(value)


class Settings(Generic[ConfigT]):
    """All settings of a configuration class: a dataclass of sections (dataclasses themselves), of values, or of both.

    Names must be unique over all sections, because flags carry no section.
    """

    def __init__(self, config_class: type[ConfigT]) -> None:
        self.config_class = config_class
        self.by_key: dict[str, Setting] = {}  # "optimizer.lr" -> setting, in the order of declaration
        self.section_help: dict[str, str] = {}
        self._default_sections: dict[str, Any] = {}
        hints = get_type_hints(config_class)
        for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if not dataclasses.is_dataclass(hints[field.name]):
                self._add(None, field, config_class, default)
                continue
            assert default is not MISSING, f"section {field.name} of {config_class.__name__} has no default"
            self.section_help[field.name] = _one_line(type(default).__doc__)
            self._default_sections[field.name] = default
            for inner in dataclasses.fields(default):
                self._add(field.name, inner, type(default), getattr(default, inner.name))

    def _add(self, section: str | None, field: dataclasses.Field[Any], owner: type, default: Any) -> None:
        assert all(known.name != field.name for known in self.by_key.values()), f"two settings are called {field.name}"
        wanted, optional = _without_none(_hints(owner)[field.name])
        text = field_docstrings(owner).get(field.name, "")
        setting = Setting(section, field.name, wanted, optional, default, text, field.metadata)
        self.by_key[setting.key] = setting

    def in_section(self, section: str | None) -> list[Setting]:
        return [setting for setting in self.by_key.values() if setting.section == section]

    def find(self, section: str | None, name: str) -> Setting | None:
        """The setting of a section that has this name or alias."""
        flag = "--" + name.replace("_", "-")
        own = self.in_section(section)
        return next((setting for setting in own if setting.name == name or flag in setting.aliases), None)

    def build(self, values: Mapping[str, Any]) -> ConfigT:
        """The configuration with the defaults replaced by ``values`` (key -> value), checked as a whole.

        Raises UserError if a setting without default is not given, or what the configuration classes raise.
        """
        for setting in self.by_key.values():
            if values.get(setting.key) is True:
                values = {**setting.metadata.get("implies", {}), **values}
            if setting.default is MISSING and setting.key not in values:
                raise UserError(f"{setting.flag} is not given; expected {setting.expectation} ({setting.help})")
        arguments = {setting.name: values[setting.key] for setting in self.in_section(None) if setting.key in values}
        for section, default in self._default_sections.items():
            own = self.in_section(section)
            changes = {setting.name: values[setting.key] for setting in own if setting.key in values}
            arguments[section] = dataclasses.replace(default, **changes)
        return self.config_class(**arguments)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        assert len(kinds) == 1, f"{hint}: a setting has one type, or one type and None"
        return kinds[0], True
    return hint, False


@functools.cache
def field_docstrings(config_class: type) -> dict[str, str]:
    """The string below each field of a dataclass and of its bases, by field name; the subclass's words win."""
    texts: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        body = _class_bodies(base.__module__).get(base.__name__, [])
        for statement, following in itertools.pairwise(body):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                texts[statement.target.id] = _one_line(following.value.value)
    return texts


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # a built-in module, or one without source: no help texts
        return {}
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
