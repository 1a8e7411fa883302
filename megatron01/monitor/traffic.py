"""The closing account: what one replica sent, and what it would have sent with Adam."""

from __future__ import annotations

from megatron01.monitor.meter import Totals
from megatron01.monitor.metrics import SYNC_LABELS
from megatron01.units import format_bytes, format_count


def adam_bytes_per_step(*, replicas: int, parameters: int, gradient_bytes: int) -> float:
    """Bytes that one replica sends in a ring all-reduce of all gradients: 2 (n-1)/n of their size."""
    return 2 * (replicas - 1) / replicas * parameters * gradient_bytes


def describe_traffic(
    totals: Totals,
    *,
    replicas: int,
    parameters: int,
    gradient_bytes: int,
    parts: int = 1,
    bytes_between_parts: int = 0,
) -> str:
    """A small table for the end of a run.

    Args:
        parameters: that one process holds, all of the model's without tensor parallelism.
        parts: processes that hold one replica together.
        bytes_between_parts: that this process sent to the others of its replica since the start; no part of
            ``totals``, which are about what replicas send each other.
        gradient_bytes: of one element of the gradient as Adam would send it (4 for fp32, 2 for 16 bit).
    """
    by_kind = [
        f"{label} {totals.steps_by_kind[kind]:,}" for kind, label in SYNC_LABELS.items() if kind in totals.steps_by_kind
    ]
    rows = [("steps", f"{totals.steps:,} ({', '.join(by_kind)})" if by_kind else "0")]
    if replicas == 1:
        rows.append(("sent", "nothing: there is one replica, so nobody to send to"))
    else:
        adam = totals.steps * adam_bytes_per_step(
            replicas=replicas, parameters=parameters, gradient_bytes=gradient_bytes
        )
        rows.append(("rounds", f"{totals.comm_rounds:,}"))
        rows.append(("sent", format_bytes(totals.comm_bytes)))
        rows.append(("Adam would send", f"{format_bytes(adam)} ({8 * gradient_bytes} bit gradients at every step)"))
        if totals.comm_bytes and totals.steps:
            rows.append(("ratio", f"{adam / totals.comm_bytes:.1f} times less than Adam"))
            bits = 8 * totals.comm_bytes / (parameters * totals.steps)
            rows.append(("bits", f"{bits:.4g} per parameter and step"))
    title = f"Traffic of one replica ({replicas} in all, {format_count(parameters)} parameters)"
    if parts > 1:
        title = (
            f"Traffic of one process with one of {parts} parts of a replica ({replicas} replica(s) in all, "
            f"{format_count(parameters)} parameters in this part)"
        )
        rows.append(("between parts", f"{format_bytes(bytes_between_parts)} since this start, inside the node"))
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])
