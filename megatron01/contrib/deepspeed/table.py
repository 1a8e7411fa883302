"""All of DeepSpeed's fields, and the documentation made from them."""

from __future__ import annotations

from megatron01.contrib.deepspeed.optimizer_fields import SCHEDULERS, optimizer_fields, scheduler_fields
from megatron01.contrib.deepspeed.run_fields import batch_fields, gradient_fields, other_fields, precision_fields
from megatron01.contrib.deepspeed.schema import FieldTable
from megatron01.contrib.deepspeed.values import show

FIELDS = FieldTable()
for _add_fields in (batch_fields, optimizer_fields, scheduler_fields, precision_fields, gradient_fields, other_fields):
    _add_fields(FIELDS)

_NAMES = {"zerooneadam": "ZeroOneAdam", "onebitadam": "OneBitAdam", "adam": "Adam", "adamw": "AdamW"}


def documentation() -> str:
    """The fields as a Markdown table."""
    lines = ["| DeepSpeed | Default | Here | Remark |", "|---|---|---|---|"]
    for field in FIELDS.values():
        owners = [_NAMES.get(name, name) for name in field.only if set(field.only) != set(SCHEDULERS)]
        remark = "; ".join(part for part in ("only " + ", ".join(owners) if owners else "", field.remark) if part)
        default = "" if field.default is None else show(field.default)
        lines.append(f"| `{field.name}` | {default} | {field.here} | {remark} |")
    return "\n".join(lines)
