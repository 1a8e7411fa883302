"""From a DeepSpeed configuration to settings, with an account of every field."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron01.config.fields import Settings
from megatron01.contrib.deepspeed.schema import Document, Field, Ours
from megatron01.contrib.deepspeed.table import FIELDS
from megatron01.contrib.deepspeed.values import show
from megatron01.errors import UserError, nearest

STRICT_SECTIONS = ("optimizer", "optimizer.params", "scheduler", "scheduler.params", "fp16", "bf16", "data_types")
"""In these DeepSpeed refuses what it does not know, as here; elsewhere it says nothing."""
_SECTIONS = (*STRICT_SECTIONS, "zero_optimization")
_OWNERS = {"optimizer.params": "optimizer.type", "scheduler.params": "scheduler.type"}


@dataclass(frozen=True)
class Row:
    """What became of one field.

    Attributes:
        field: its name, with its sections.
        value: as text; with a note if it is DeepSpeed's default.
        here: settings that it set, as text; empty if none.
        remark: what a user should know; may be empty.
        honoured: whether the run does what the field asks for.
    """

    field: str
    value: str
    here: str
    remark: str
    honoured: bool


@dataclass(frozen=True)
class Translation:
    """What a configuration becomes.

    Attributes:
        values: settings by key: those of the --config files, with what the configuration changes.
        rows: field by field, in the order of the documentation.
    """

    values: dict[str, Any]
    rows: list[Row]

    @property
    def not_honoured(self) -> list[str]:
        """Names of the fields that the run does not follow."""
        return [row.field for row in self.rows if not row.honoured]


def translate(
    content: Mapping[str, Any],
    settings: Settings[Any],
    *,
    replicas: int,
    from_files: Mapping[str, Any] | None = None,
    from_flags: Mapping[str, Any] | None = None,
) -> Translation:
    """Our settings for what a DeepSpeed configuration says.

    The order, weakest first: our defaults, DeepSpeed's defaults for the optimizer and the scheduler that the
    configuration chooses, the --config files, the configuration, flags.

    Args:
        content: the configuration, as read from JSON.
        settings: the settings that there are.
        replicas: that will run, for the batch sizes.
        from_files: values by key of the --config files.
        from_flags: values by key of flags, which are left to the caller to apply.

    Raises:
        UserError: for values of a wrong type, names that DeepSpeed would refuse, contradictions, and optimizers or
            schedulers that are not here.
    """
    from_files, from_flags = dict(from_files or {}), dict(from_flags or {})
    flat = dict(_flatten(content))
    left_open = [name for name, value in flat.items() if value == "auto"]
    for owner in _OWNERS.values():  # a type that is not here explains parameters that are not
        if owner in flat and owner not in left_open:
            kind = FIELDS[owner].expects.read(owner, flat[owner])
            FIELDS[owner].outcome(kind, Document(flat, {}, left_open=left_open, replicas=replicas, learning_rate=0.0))
    given, other_rows = _check(flat)
    document = Document(
        given,
        {name: field.default for name, field in FIELDS.items() if field.default is not None},
        left_open=left_open,
        replicas=replicas,
        learning_rate=_learning_rate(given, settings, from_files, from_flags),
    )
    _check_owners(document)
    outcomes = {name: field.outcome(given[name], document) for name, field in FIELDS.items() if name in given}
    by_default = {
        name: field.outcome(field.default, document)
        for name, field in FIELDS.items()
        if _default_applies(field, document)
    }
    decided: Ours = {}
    deciders: dict[str, str] = {}  # our key -> the field that set it last
    suggested: Ours = {}
    for outcome in by_default.values():
        suggested |= outcome.settings
    for name, outcome in outcomes.items():
        decided |= outcome.settings
        deciders |= dict.fromkeys(outcome.settings, name)
        suggested |= outcome.suggestions
    stronger = from_files | from_flags | decided
    suggested = {key: value for key, value in suggested.items() if key not in stronger}

    rows: list[Row] = []
    for name, field in FIELDS.items():
        if name in outcomes:
            outcome = outcomes[name]
            ours = outcome.settings | {key: suggested[key] for key in outcome.suggestions if key in suggested}
            # what is turned off is shown only where it is on by default
            shown = {
                key: value
                for key, value in ours.items()
                if value is not None or settings.by_key[key].default is not None
            }
            remarks = [field.remark if outcome.remark is None else outcome.remark]
            remarks += [f"{deciders[key]} wins" for key, value in outcome.settings.items() if decided[key] != value]
            remarks += _conflicts(outcome.settings, from_files, from_flags)
            rows.append(Row(name, _value(given[name]), _words(shown), _join(remarks), outcome.honoured))
        elif name in by_default:
            outcome = by_default[name]
            changed = {
                key: value
                for key, value in outcome.settings.items()
                if suggested.get(key) == value != settings.by_key[key].default
            }
            if changed or not outcome.honoured:
                value = f"{_value(field.default)} (default)"
                rows.append(Row(name, value, _words(changed), field.remark, outcome.honoured))
    return Translation(suggested | from_files | decided, rows + other_rows)


def _learning_rate(
    given: Mapping[str, Any], settings: Settings[Any], from_files: Mapping[str, Any], from_flags: Mapping[str, Any]
) -> float:
    """The peak rate, when no scheduler of the file sets it."""
    key = "optimizer.lr"
    for values, name in ((from_flags, key), (given, "optimizer.params.lr"), (from_files, key)):
        if name in values:
            return float(values[name])
    return float(FIELDS["optimizer.params.lr"].default if "optimizer.type" in given else settings.by_key[key].default)


def _check(flat: Mapping[str, Any]) -> tuple[dict[str, Any], list[Row]]:
    """The checked values of known fields; rows for what is unknown, or left to be filled in."""
    given: dict[str, Any] = {}
    rows: list[Row] = []
    for name, value in flat.items():
        section, _, key = name.rpartition(".")
        if value is None:
            continue  # DeepSpeed's None: as if it were not there
        if value == "auto":
            rows.append(Row(name, "auto", "", "left for another program to fill in; give it here as a flag", False))
        elif name in FIELDS:
            given[name] = FIELDS[name].expects.read(name, value)
        elif section in STRICT_SECTIONS:
            known = [other.rpartition(".")[2] for other in FIELDS if other.rpartition(".")[0] == section]
            raise UserError(f"{name} is no field that DeepSpeed knows{nearest(key, known)}")
        elif section == "zero_optimization":
            unused = not flat.get("zero_optimization.stage")
            remark = "no effect at stage 0" if unused else "--shard-optimizer has no such choice"
            rows.append(Row(name, _value(value), "", remark, unused))
        else:
            close = difflib.get_close_matches(name, [known.split(".")[0] for known in FIELDS], n=1, cutoff=0.85)
            if close:
                raise UserError(f"{name} is no field that DeepSpeed knows; did you mean {close[0]!r}?")
            rows.append(Row(name, _value(value), "", "no field of DeepSpeed's", False))
    return given, rows


def _flatten(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``section.name`` and value of every field; the older name of bf16 is replaced."""
    if "bfloat16" in content:
        content = {("bf16" if key == "bfloat16" and "bf16" not in content else key): v for key, v in content.items()}
    for name, value in content.items():
        yield from _flatten_section(name, value)


def _flatten_section(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if name not in _SECTIONS:
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten_section(f"{name}.{key}", inner)
    elif value is not None:
        raise UserError(f"{name} is {show(value)}; expected an object of fields")


def _check_owners(document: Document) -> None:
    """Parameters belong to a type of optimizer or scheduler, and to one that has them."""
    for name in document.given:
        section, _, key = name.rpartition(".")
        if section not in _OWNERS:
            continue
        owner = _OWNERS[section]
        if owner not in document.given:
            raise UserError(f"{name} is given without {owner}; DeepSpeed would ignore it: give the type")
        kind = document.given[owner]
        if not _has(kind, FIELDS[name]):
            others = [
                other.rpartition(".")[2]
                for other, field in FIELDS.items()
                if other.startswith(f"{section}.") and _has(kind, field)
            ]
            raise UserError(f"{name}: {kind} has no such parameter{nearest(key, others) or '; remove it'}")


def _has(kind: str, field: Field) -> bool:
    """Whether a type of optimizer or scheduler has a parameter."""
    return not field.only or kind in field.only or kind.lower() in field.only


def _default_applies(field: Field, document: Document) -> bool:
    if field.default is None or field.name in document.given or field.name in document.left_open:
        return False
    kind = document.given.get(_OWNERS[field.name.rpartition(".")[0]])
    return kind is not None and _has(kind, field)


def _conflicts(set_here: Ours, from_files: Mapping[str, Any], from_flags: Mapping[str, Any]) -> list[str]:
    """What else says something about the same settings, and who wins."""
    remarks = []
    for key, value in set_here.items():
        label = key.rpartition(".")[2]
        if key in from_flags and from_flags[key] != value:
            remarks.append(f"the flag --{label.replace('_', '-')} {_value(from_flags[key])} wins")
        elif key in from_files and from_files[key] != value:
            remarks.append(f"wins over {label} {_value(from_files[key])} of --config")
    return remarks


def _words(values: Ours) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    """A value for the table, where text needs no quotes."""
    return value if isinstance(value, str) else "none" if value is None else show(value)


def _join(remarks: list[str]) -> str:
    return "; ".join(dict.fromkeys(remark for remark in remarks if remark))
