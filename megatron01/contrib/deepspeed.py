"""DeepSpeed's JSON configuration as a source of settings (``--deepspeed-config``), with an account of every field."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron01.config.fields import Settings
from megatron01.contrib.deepspeed_fields import ACCUMULATION, FIELDS, MICRO, TOTAL, Document, Outcome, Values, show
from megatron01.errors import UserError, nearest
from megatron01.parallel import LaunchEnvironment
from megatron01.utils.formatting import wrapped_columns

_STRICT_SECTIONS = ("optimizer", "optimizer.params", "scheduler", "scheduler.params", "fp16", "bf16", "data_types")
"""In these DeepSpeed refuses what it does not know, as here; elsewhere it says nothing."""
_SECTIONS = (*_STRICT_SECTIONS, "zero_optimization")
_OWNERS = {"optimizer.params": "optimizer.type", "scheduler.params": "scheduler.type"}

# Strings come first, so that what looks like a comment inside one stays.
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|(?://|#)[^\n]*', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


class DeepSpeedSource:
    """Reads the file, prints what becomes of it, once per job and to stderr, and hands over the settings.

    Args:
        replicas: from the values of flags to the number of replicas; the launched processes when None.
    """

    flag = "--deepspeed-config"
    help = "DeepSpeed's JSON configuration, translated; wins over --config files, and flags over it."

    def __init__(self, replicas: Callable[[Mapping[str, Any]], int] | None = None) -> None:
        self._replicas = replicas

    def read(
        self, path: str, settings: Settings[Any], from_files: Mapping[str, Any], from_flags: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The settings of ``from_files`` with what the file at ``path`` changes; see ``translate``."""
        content = read_json(path)
        environment = LaunchEnvironment.read(os.environ)
        if self._replicas is not None:
            replicas = self._replicas(from_flags)
        else:
            tensor_parallel = {**from_files, **from_flags}.get("distributed.tensor_model_parallel_size", 1)
            replicas = max(1, environment.world_size // max(1, tensor_parallel))
        translation = translate(content, settings, replicas=replicas, from_files=from_files, from_flags=from_flags)
        if environment.rank == 0:
            width = min(140, shutil.get_terminal_size(fallback=(120, 24)).columns)
            print(describe(path, translation, width), file=sys.stderr, flush=True)
        return translation.values


@dataclass(frozen=True)
class Row:
    """What became of one field.

    Attributes:
        field: its name, with its sections.
        value: as text; with a note if it is DeepSpeed's default.
        here: settings that it set, as text; empty if none.
        remark: what a user should know; may be empty.
        honoured: True if the run does what the field asks for.
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

    values: Values
    rows: list[Row]

    @property
    def not_honoured(self) -> list[str]:
        """Names of the fields that the run does not follow."""
        return [row.field for row in self.rows if not row.honoured]


def describe(path: str, translation: Translation, width: int) -> str:
    """The translation as a table, of at most ``width`` characters if they suffice, and what is not honoured."""
    if not translation.rows:
        return f"{path} sets nothing"
    rows = [("DeepSpeed", "value", "here", "remark")]
    for row in translation.rows:
        here = row.here or ("-" if row.honoured else "NOT HONOURED")
        rows.append((row.field, row.value, here, row.remark.replace("`", "")))
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    left = [names, min(values, 24), 32]
    table = wrapped_columns(rows, [*left, max(24, width - sum(left) - 2 * len(left))])
    missed = translation.not_honoured
    summary = f"not honoured: {', '.join(missed)}" if missed else "every field is honoured"
    return "\n".join([f"{path}, translated:", *table, summary])


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file; comments and trailing commas are allowed, as in DeepSpeed's reader.

    Raises:
        UserError: if the file is missing, unreadable or no JSON object, or gives a key twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = Path(path).parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        raise UserError(f"DeepSpeed config {path} does not exist{nearest(Path(path).name, names)}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"DeepSpeed config {path} cannot be read: {reason}") from None
    return parse_json(text, source=path)


def parse_json(text: str, *, source: str) -> dict[str, Any]:
    """The object that ``text`` holds; ``source`` names it in messages. Raises as ``read_json`` does."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise UserError(f"{source}: {twice[0]!r} is given twice in one object; keep one of them")
        return dict(pairs)

    def not_finite(name: str) -> NoReturn:
        raise UserError(f"{source}: {name} is no number that a setting can have; expected a finite one")

    def keep_strings(match: re.Match[str]) -> str:
        # and the line ends of comments, so that messages name the right line
        return match[0] if match[0].startswith('"') else "\n" * match[0].count("\n")

    plain = _TRAILING_COMMA.sub(keep_strings, _COMMENT.sub(keep_strings, text))
    try:
        content = json.loads(plain, object_pairs_hook=without_duplicates, parse_constant=not_finite)
    except json.JSONDecodeError as error:
        raise UserError(f"{source} line {error.lineno}: not valid JSON: {error.msg}") from None
    except UserError:
        raise
    except ValueError:
        raise UserError(f"{source}: a number has too many digits") from None
    except RecursionError:
        raise UserError(f"{source}: not valid JSON: nested too deeply") from None
    if not isinstance(content, dict):
        raise UserError(f"{source} holds no JSON object; expected {{...}} with DeepSpeed's fields")
    return content


def translate(
    content: Mapping[str, Any],
    settings: Settings[Any],
    *,
    replicas: int,
    from_files: Mapping[str, Any],
    from_flags: Mapping[str, Any],
) -> Translation:
    """Our settings for what a DeepSpeed configuration says.

    The order, weakest first: our defaults, DeepSpeed's defaults for the optimizer and the scheduler that the
    configuration chooses, the --config files, the configuration, flags.

    Args:
        replicas: that will run, for the batch sizes.
        from_files: values by key of the --config files.
        from_flags: values by key of flags, which are left to the caller to apply.

    Raises:
        UserError: for values of a wrong type, names that DeepSpeed would refuse, contradictions, and optimizers or
            schedulers that are not here.
    """
    flat = dict(_flatten(content))
    auto = [name for name, value in flat.items() if value == "auto"]
    for owner in _OWNERS.values():  # a type that is not here explains parameters that are not
        if owner in flat and owner not in auto:
            FIELDS[owner].outcome(FIELDS[owner].read(flat[owner]), Document(flat, auto, replicas, 0.0))
    given, other_rows = _check(flat)
    rate = _learning_rate(given, settings, from_files, from_flags)
    document = Document(given, auto, replicas, rate, {**from_files, **from_flags})
    _check_owners(given)
    outcomes: dict[str, Outcome] = {}
    for name, field in FIELDS.items():
        if name in given:
            outcomes[name] = field.outcome(given[name], document)
        elif field.default is not None and name not in flat and _owner_has(given, name):
            by_default = field.outcome(field.default, document)
            outcomes[name] = Outcome(suggestions=by_default.values, honoured=by_default.honoured)
    decided: Values = {}
    deciders: dict[str, str] = {}  # setting -> the field that set it last
    suggested: Values = {}
    for name, outcome in outcomes.items():
        decided |= outcome.values
        deciders |= dict.fromkeys(outcome.values, name)
        suggested |= outcome.suggestions
    stronger = {*from_files, *from_flags, *decided}
    suggested = {key: value for key, value in suggested.items() if key not in stronger}

    rows: list[Row] = []
    for name, outcome in outcomes.items():
        field, is_given = FIELDS[name], name in given
        ours = outcome.values | {key: suggested[key] for key in outcome.suggestions if key in suggested}
        defaults = {key: settings.by_key[key].default for key in ours}
        # of the defaults what changes something; what is turned off only where it is on by default
        ours = {key: value for key, value in ours.items() if value != defaults[key] or (is_given and value is not None)}
        if not is_given and not ours and outcome.honoured:
            continue
        remarks = [field.remark if outcome.remark is None else outcome.remark]
        remarks += [f"{deciders[key]} wins" for key, value in outcome.values.items() if decided[key] != value]
        remarks += _conflicts(outcome.values, from_files, from_flags)
        remark = "; ".join(dict.fromkeys(remark for remark in remarks if remark))
        value = _text(given[name]) if is_given else f"{_text(field.default)} (default)"
        rows.append(Row(name, value, _assignments(ours), remark, outcome.honoured))
    return Translation({**suggested, **from_files, **decided}, rows + other_rows)


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``section.name`` and value of every field but those that are null, which DeepSpeed takes as not given."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        if name == "bfloat16" and "bf16" not in section:  # its older name
            name = "bf16"
        if value is None:
            continue
        if name not in _SECTIONS:
            yield name, value
        elif isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        else:
            raise UserError(f"{name} is {show(value)}; expected an object of fields")


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
    accumulation = flat.get(ACCUMULATION, "auto")
    for name, value in flat.items():
        section, _, key = name.rpartition(".")
        if value == "auto" and name in (TOTAL, MICRO) and accumulation != "auto":
            rows.append(Row(name, "auto", "", f"follows from the other sizes and {ACCUMULATION} {accumulation}", True))
        elif value == "auto":
            rows.append(Row(name, "auto", "", "left for another program to fill in; give it here as a flag", False))
        elif name in FIELDS:
            given[name] = FIELDS[name].read(value)
        elif section in _STRICT_SECTIONS:
            known = [other.rpartition(".")[2] for other in FIELDS if other.rpartition(".")[0] == section]
            raise UserError(f"{name} is no field that DeepSpeed knows{nearest(key, known)}")
        elif section == "zero_optimization":
            unused = not flat.get("zero_optimization.stage")
            remark = "no effect at stage 0" if unused else "--shard-optimizer has no such choice"
            rows.append(Row(name, _text(value), "", remark, unused))
        else:
            close = difflib.get_close_matches(name, [known.split(".")[0] for known in FIELDS], n=1, cutoff=0.85)
            if close:
                raise UserError(f"{name} is no field that DeepSpeed knows; did you mean {close[0]!r}?")
            rows.append(Row(name, _text(value), "", "no field of DeepSpeed's", False))
    return given, rows


def _check_owners(given: Mapping[str, Any]) -> None:
    """Make sure that parameters come with a type of optimizer or scheduler, and with one that has them."""
    for name in given:
        section, _, key = name.rpartition(".")
        owner = _OWNERS.get(section)
        if owner is None:
            continue
        if owner not in given:
            raise UserError(f"{name} is given without {owner}; DeepSpeed would ignore it: give the type")
        if not FIELDS[name].belongs_to(given[owner]):
            fields = (field for other, field in FIELDS.items() if other.startswith(f"{section}."))
            others = [field.name.rpartition(".")[2] for field in fields if field.belongs_to(given[owner])]
            raise UserError(f"{name}: {given[owner]} has no such parameter{nearest(key, others) or '; remove it'}")


def _owner_has(given: Mapping[str, Any], name: str) -> bool:
    """True if the file chooses an optimizer or scheduler that has the field of this name."""
    owner = given.get(_OWNERS[name.rpartition(".")[0]])
    return owner is not None and FIELDS[name].belongs_to(owner)


def _conflicts(values: Values, from_files: Mapping[str, Any], from_flags: Mapping[str, Any]) -> list[str]:
    """What else says something about the same settings, and who wins."""
    remarks = []
    for key, value in values.items():
        label = key.rpartition(".")[2]
        if key in from_flags and from_flags[key] != value:
            remarks.append(f"the flag --{label.replace('_', '-')} {_text(from_flags[key])} wins")
        elif key in from_files and from_files[key] != value:
            remarks.append(f"wins over {label} {_text(from_files[key])} of --config")
    return remarks


def _assignments(values: Values) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    """A value for the table, where text needs no quotes."""
    return value if isinstance(value, str) else "none" if value is None else show(value)
