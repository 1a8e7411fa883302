"""What is known of one of DeepSpeed's fields: its type, what it becomes here, and what a user should know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron01.contrib.deepspeed.values import ANYTHING, Expectation
from megatron01.errors import UserError

Ours = dict[str, Any]
"""Settings of this project by key, such as ``optimizer.lr``."""


class Document:
    """The fields of a configuration as flat names, and what else their meaning depends on.

    Args:
        given: ``optimizer.params.lr`` -> checked value, of what the file says.
        defaults: DeepSpeed's, for what it does not.
        left_open: names of the fields that are "auto", for another program to fill in.
        replicas: that will run.
        learning_rate: the peak rate that the run will have, for schedulers that multiply it.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        *,
        left_open: Collection[str],
        replicas: int,
        learning_rate: float,
    ) -> None:
        self.given = given
        self.left_open = left_open
        self.replicas = replicas
        self.learning_rate = learning_rate
        self._defaults = defaults

    @property
    def optimizer(self) -> str:
        """``optimizer.type`` in lower case, which is how DeepSpeed compares it; empty if none is given."""
        return str(self.given.get("optimizer.type", "")).lower()

    @property
    def scheduler(self) -> str:
        """``scheduler.type``; empty if none is given."""
        return str(self.given.get("scheduler.type", ""))

    def get(self, name: str) -> Any:
        """The value of a field, or DeepSpeed's default."""
        return self.given.get(name, self._defaults.get(name))


@dataclass(frozen=True)
class Outcome:
    """What a field's value becomes.

    Attributes:
        settings: ours that it sets.
        suggestions: ours that it sets unless a --config file or a flag does.
        honoured: whether the run does what the field asks for.
        remark: in place of the field's own.
    """

    settings: Ours = field(default_factory=dict)
    suggestions: Ours = field(default_factory=dict)
    honoured: bool = True
    remark: str | None = None


@dataclass(frozen=True)
class Field:
    """One of DeepSpeed's fields.

    Attributes:
        name: with its sections, as ``fp16.loss_scale``.
        expects: type of its value.
        here: what it becomes, in words, for the documentation.
        remark: what a user should know; may be empty.
        outcome: from the checked value and the whole configuration to what happens.
        default: DeepSpeed's, applied when the file chooses the optimizer or scheduler that has this field; or None.
        only: optimizers (in lower case) or schedulers that have this field; empty: all.
    """

    name: str
    expects: Expectation
    here: str
    remark: str
    outcome: Callable[[Any, Document], Outcome]
    default: Any = None
    only: tuple[str, ...] = ()


class FieldTable(dict[str, Field]):
    """Fields by name, in the order in which they are listed and take effect: later ones win."""

    def add(
        self,
        name: str,
        expects: Expectation,
        here: str,
        outcome: Callable[[Any, Document], Outcome],
        remark: str = "",
        *,
        default: Any = None,
        only: tuple[str, ...] = (),
    ) -> None:
        """Add a field."""
        assert name not in self, name
        self[name] = Field(name, expects, here, remark, outcome, default, only)

    def sets(
        self,
        name: str,
        expects: Expectation,
        here: str,
        settings: Callable[[Any, Document], Ours],
        remark: str = "",
        *,
        default: Any = None,
        only: tuple[str, ...] = (),
        brief: bool = False,
    ) -> None:
        """Add a field that becomes settings of ours; if ``brief``, its remark is for the documentation alone."""

        def outcome(value: Any, file: Document) -> Outcome:
            return Outcome(settings(value, file), remark="" if brief else None)

        self.add(name, expects, here, outcome, remark, default=default, only=only)

    def needless(self, name: str, expects: Expectation, remark: str, *, only: tuple[str, ...] = ()) -> None:
        """Add a field whose every value is fine: it has no effect in DeepSpeed, or needs none here."""
        self.add(name, expects, "nothing to set", lambda value, file: Outcome(), remark, only=only)

    def only_if(
        self, name: str, expects: Expectation, harmless: tuple[Any, ...], remark: str, *, only: tuple[str, ...] = ()
    ) -> None:
        """Add a field that is honoured when its value is one of ``harmless``, which is what happens here anyway."""

        def outcome(value: Any, file: Document) -> Outcome:
            return Outcome(remark="as here") if value in harmless else Outcome(honoured=False)

        values = " or ".join("true" if v is True else "false" if v is False else str(v) for v in harmless)
        self.add(name, expects, f"honoured if {values}" if harmless else "not honoured", outcome, remark, only=only)

    def refused(
        self, name: str, expects: Expectation, harmless: tuple[Any, ...], remark: str, *, only: tuple[str, ...] = ()
    ) -> None:
        """Add a field that DeepSpeed refuses, unless its value is one of ``harmless``."""

        def outcome(value: Any, file: Document) -> Outcome:
            if value not in harmless:
                raise UserError(f"{name} is given: {remark}")
            return Outcome(remark="as here")

        self.add(name, expects, "an error", outcome, remark, only=only)

    def section(self, name: str, remark: str) -> None:
        """Add a whole section that is not honoured, unless it says of itself that it is off."""

        def outcome(value: Any, file: Document) -> Outcome:
            off = value is False or value == {} or (isinstance(value, dict) and value.get("enabled") is False)
            return Outcome(remark="off, as here") if off else Outcome(honoured=False)

        self.add(name, ANYTHING, "not honoured", outcome, remark)
