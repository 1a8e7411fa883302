"""Metrics of a run: one line for each logging interval, the meter that adds up its steps, and the traffic summary."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron01.utils.formatting import columns, format_bytes, format_count

if TYPE_CHECKING:  # at run time it would import torch
    from megatron01.monitor.run_directory import LastHeartbeat
    from megatron01.optim.report import CompressionReport, DeferredReport, StepReport

SYNC_LABELS = {"full": "full", "one_bit": "1-bit", "local": "local", "skipped": "skipped"}


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is reported every ``log_interval`` steps; the names are the keys of metrics.jsonl.

    None means "not measured" and is left out; a value that is not finite stays and is written as null.
    """

    iteration: int
    consumed_samples: int
    loss: float | None = None  # mean over the steps since the last line
    lr: float | None = None  # of the last step, as all that follow unless said otherwise
    grad_norm: float | None = None  # before clipping, of the mean gradient
    grad_norm_estimated: bool | None = None  # true where grad_norm is estimated from this replica's own gradient
    loss_scale: float | None = None
    tokens_per_second: float | None = None  # over all replicas, since the last line
    step_seconds: float | None = None  # mean since the last line
    sync_kind: str | None = None  # full, one_bit, local or skipped
    sync_interval: int | None = None  # steps between two synchronizations
    comm_bytes: int | None = None  # sent by this replica since the last line
    comm_bytes_between_nodes: int | None = None  # the part of it that left the node
    comm_rounds: int | None = None  # exchanges since the last line
    comm_bytes_total: int | None = None  # sent by this replica since the start, also in steps that were rolled back
    comm_rounds_total: int | None = None
    bits_per_parameter: float | None = None  # sent per parameter and step, mean over the run so far
    compression_error: float | None = None  # of the last 1-bit exchange measured: norm lost / quantized, worst bucket
    compression_errors: list[float] | None = None  # the same, bucket by bucket
    error_feedback_ratio: float | None = None  # norm of the error feedback over that of what was sent
    flops_per_second: float | None = None  # of the model, over all replicas, since the last line
    mfu: float | None = None  # the same as a share of the processors' peak
    memory_bytes: int | None = None  # peak of this process: on the GPU, if it has one
    training_seconds: float | None = None  # in steps since the start; without evaluations, checkpoints, interruptions
    local_compute_seconds: float | None = None  # of this replica since the last line: reading data, forward pass
    slowest_replica: float | None = None  # its local compute time since the last line, in units of the median replica's
    eval_loss: float | None = None
    lost_steps: int | None = None  # by the interruption before this attempt, in its first line
    restart_seconds: float | None = None  # from the last step of the attempt before to the end of this one's first
    losses: Mapping[str, float] = field(default_factory=dict)  # parts of the loss, by name

    def to_dict(self) -> dict[str, Any]:
        """Key -> value, without what was not measured; the named losses stand beside the other keys."""
        values = {key: value for key, value in vars(self).items() if key != "losses" and value is not None}
        assert not values.keys() & self.losses.keys(), f"a loss is called like a metric: {sorted(self.losses)}"
        return values | dict(self.losses)


@dataclass
class Totals:
    """Steps and traffic of one replica; plain numbers, so that a checkpoint can hold them."""

    steps: int = 0
    comm_bytes: int = 0
    comm_bytes_between_nodes: int = 0
    comm_rounds: int = 0
    # sums over the steps, with their n replicas on N nodes, of what a ring all-reduce sends twice, by element:
    ring_shares: float = 0.0  # (n-1)/n
    ring_shares_between_nodes: float = 0.0  # (N-1)/N, divided by the processes of a node
    steps_by_kind: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Meter:
    """Accumulates steps into one ``Metrics`` per logging interval.

    Losses may be tensors: they are summed on their device and read only when a line is made, to avoid a host sync at
    every step. For the same reason the kind of a step, which a GPU may still have to compute, is read when the next one
    is counted. Time counts from construction, except inside ``paused``.
    """

    parameters: int  # of the model, counted once
    tokens_per_step: int  # over all replicas
    flops_per_token: int | None = None  # forward and backward operations of the whole model; None: not reported
    peak_flops: float | None = None  # of all processors of the job together; None: not known
    replicas: int = 1
    nodes: int = 1  # on which the replicas are
    clock: Callable[[], float] = time.perf_counter  # seconds

    def __post_init__(self) -> None:
        self._run = Totals()
        self._ring_share = (self.replicas - 1) / self.replicas
        self._ring_share_between_nodes = (self.nodes - 1) / self.replicas
        self._start_line()

    @property
    def run(self) -> Totals:
        """Totals of all steps since the first of the run."""
        kinds = dict(self._run.steps_by_kind)
        if self._last is not None:
            kinds[self._last.kind] = kinds.get(self._last.kind, 0) + 1
        return dataclasses.replace(self._run, steps_by_kind=kinds)

    @run.setter
    def run(self, totals: Totals) -> None:
        self._run = totals

    def _start_line(self) -> None:
        self._line = Totals()
        self._loss_sums: dict[str, Any] = {}
        self._last: StepReport | None = None  # of the line; its kind is not yet counted in ``_run``
        self._compression: CompressionReport | None = None
        self._steps_timed = 0
        self._started = self.clock()

    def add(self, report: StepReport, loss: Any, losses: Mapping[str, Any] | None = None) -> None:
        """Count one step; losses, numbers or detached scalar tensors, are the minimized one and its components."""
        self.add_traffic(report, steps=1)
        if self._last is not None:
            kinds, kind = self._run.steps_by_kind, self._last.kind
            kinds[kind] = kinds.get(kind, 0) + 1
        self._last = report
        for name, value in {"loss": loss, **(losses or {})}.items():
            self._loss_sums[name] = self._loss_sums[name] + value if name in self._loss_sums else value
        self._steps_timed += 1

    def add_traffic(self, report: StepReport | DeferredReport, *, steps: int = 0) -> None:
        """Count traffic and compression errors of ``steps`` steps, or since the last one, in the current line."""
        for totals in (self._run, self._line):
            totals.steps += steps
            totals.comm_bytes += report.bytes_sent
            totals.comm_bytes_between_nodes += report.bytes_between_nodes
            totals.comm_rounds += report.rounds
            totals.ring_shares += steps * self._ring_share
            totals.ring_shares_between_nodes += steps * self._ring_share_between_nodes
        self._compression = report.compression or self._compression

    @property
    def seconds(self) -> float:
        """Seconds since the last line, without pauses."""
        return self.clock() - self._started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time (an evaluation, a checkpoint) does not count as time of the steps."""
        before = self.clock()
        yield
        self._started += self.clock() - before

    def line(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        mean_over_replicas: Callable[[float], float] = float,
        eval_loss: float | None = None,
    ) -> Metrics:
        """The metrics of the steps since the last line; starts the next one.

        ``mean_over_replicas`` is applied to each mean loss of this replica; every replica must then make the line.
        """
        line, last, compression, timed = self._line, self._last, self._compression, self._steps_timed
        means = {name: mean_over_replicas(float(total) / line.steps) for name, total in self._loss_sums.items()}
        seconds = self.seconds
        tokens = timed * self.tokens_per_step / seconds if timed and seconds > 0 else None
        flops = None if tokens is None or self.flops_per_token is None else tokens * self.flops_per_token
        metrics = Metrics(
            iteration=iteration,
            consumed_samples=consumed_samples,
            loss=means.pop("loss", None),
            lr=None if last is None else last.lr,
            grad_norm=None if last is None else float(last.grad_norm),
            grad_norm_estimated=True if last is not None and last.grad_norm_estimated else None,
            loss_scale=None if last is None else float(last.loss_scale),
            tokens_per_second=tokens,
            step_seconds=seconds / timed if timed else None,
            sync_kind=None if last is None else last.kind,
            sync_interval=None if last is None else last.interval,
            comm_bytes=line.comm_bytes if line.steps else None,
            comm_bytes_between_nodes=line.comm_bytes_between_nodes if line.steps else None,
            comm_rounds=line.comm_rounds if line.steps else None,
            comm_bytes_total=self._run.comm_bytes if line.steps else None,
            comm_rounds_total=self._run.comm_rounds if line.steps else None,
            bits_per_parameter=8 * self._run.comm_bytes / (self.parameters * self._run.steps) if line.steps else None,
            compression_error=None if compression is None else max(compression.relative_errors),
            compression_errors=None if compression is None else list(compression.relative_errors),
            error_feedback_ratio=None if compression is None else compression.feedback_ratio,
            flops_per_second=flops,
            mfu=None if flops is None or self.peak_flops is None else flops / self.peak_flops,
            eval_loss=eval_loss,
            losses=means,
        )
        self._run = self.run
        self._start_line()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """JSON values: the run's totals and the current line, without its time."""
        sums = {name: float(total) for name, total in self._loss_sums.items()}
        seen = self._compression
        compression = None if seen is None else [list(seen.relative_errors), seen.feedback_ratio]
        return {"run": asdict(self.run), "line": asdict(self._line), "loss_sums": sums, "compression": compression}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict`` was taken; time counts from now."""
        self._start_line()
        self._run = Totals(**state["run"])
        self._line = Totals(**state["line"])
        if "ring_shares" not in state["run"]:  # of a version that did not count them
            self._run.ring_shares = self._run.steps * self._ring_share
            self._run.ring_shares_between_nodes = self._run.steps * self._ring_share_between_nodes
        self._loss_sums = dict(state["loss_sums"])
        if state["compression"] is not None:
            from megatron01.optim.report import CompressionReport

            errors, ratio = state["compression"]
            self._compression = CompressionReport(tuple(errors), ratio)


def adam_bytes(replicas: int, gradient_bytes: int) -> float:
    """Bytes that one replica sends per parameter and step in a ring all-reduce of all gradients: 2 (n-1)/n of them."""
    return 2 * (replicas - 1) / replicas * gradient_bytes


def beside_adam(sent: float, adam: float) -> str:
    """Traffic relative to what Adam would send, in words."""
    return f"{adam / sent:.1f} times less than Adam" if adam > sent else f"{sent / adam:.2f} times Adam's"


def describe_traffic(
    totals: Totals,
    *,
    replicas: int,
    parameters: int,
    gradient_bytes: int,
    nodes: int = 1,
    tensor_parallel_size: int = 1,
    tensor_parallel_bytes: int = 0,
    of: str = "replica",
) -> str:
    """A small table for the end of a run.

    Adam's part is a ring all-reduce of all gradients: 2 (n-1)/n of them at a step of n replicas. On several nodes of
    several replicas, "between nodes" is this process's part of what left its node, beside its part of a hierarchical
    all-reduce: 2 (N-1)/N of the gradients on N nodes, divided by the processes of a node.

    Args:
        replicas: of the last step, as ``nodes``.
        parameters: that one process holds, all of the model's without tensor parallelism.
        gradient_bytes: of one element of the gradient as Adam would send it (4 for fp32, 2 for 16 bit).
        tensor_parallel_size: processes that hold one replica together.
        tensor_parallel_bytes: that this process sent to the others of its replica since the start.
        of: what ``replicas`` counts; processes where those of a node are one replica.
    """
    by_kind = [
        f"{label} {totals.steps_by_kind[kind]:,}" for kind, label in SYNC_LABELS.items() if kind in totals.steps_by_kind
    ]
    rows = [("steps", f"{totals.steps:,} ({', '.join(by_kind)})" if by_kind else "0")]
    if replicas == 1 and not totals.comm_bytes:
        rows.append(("sent", "nothing: there is one replica"))
    else:
        rows.append(("rounds", f"{totals.comm_rounds:,}"))
        rows.append(("sent", format_bytes(totals.comm_bytes)))
    if totals.ring_shares:
        adam = 2 * gradient_bytes * parameters * totals.ring_shares
        rows.append(("Adam would send", f"{format_bytes(adam)} ({8 * gradient_bytes} bit gradients at every step)"))
        if totals.comm_bytes and totals.steps:
            rows.append(("ratio", beside_adam(totals.comm_bytes, adam)))
            bits = 8 * totals.comm_bytes / (parameters * totals.steps)
            rows.append(("bits", f"{bits:.4g} per parameter and step"))
        if 1 < nodes < replicas and (between := totals.comm_bytes_between_nodes):
            adam = 2 * gradient_bytes * parameters * totals.ring_shares_between_nodes
            rows.append(("between nodes", f"{format_bytes(between)}, {beside_adam(between, adam)}"))
    title = f"Traffic of one {of} ({replicas} in all, {format_count(parameters)} parameters)"
    if tensor_parallel_size > 1:
        title = (
            f"Traffic of one of {tensor_parallel_size} tensor-parallel ranks of a replica"
            f" ({replicas} replica(s) in all, {format_count(parameters)} parameters on this rank)"
        )
        rows.append(("tensor parallel", f"{format_bytes(tensor_parallel_bytes)} since this start, inside the node"))
    return "\n".join([title, *(f"  {row}" for row in columns(rows, left=2))])


@dataclass
class TrainingClock:
    """Total time of steps, lost and undone ones included; without evaluations and interruptions."""

    seconds: float = 0.0  # up to the last line
    iteration: int = 0  # of the last line
    since_line: float = 0.0  # seconds of the steps after it

    @classmethod
    def after(cls, metrics_file: Path, iteration: int, last: LastHeartbeat | None = None) -> TrainingClock:
        """The clock of a run that resumes at ``iteration``, with the time of its earlier attempts.

        It is in their lines, and in their ``last`` heartbeat, which may be of a step after the last line.
        """
        seconds = 0.0 if last is None or not iteration else last.training_seconds
        if iteration:
            with suppress(OSError), metrics_file.open("rb") as file:
                for line in file:
                    with suppress(ValueError, KeyError, TypeError, RecursionError, OverflowError):  # incomplete
                        seconds = max(seconds, float(json.loads(line)["training_seconds"]))
        return cls(seconds, iteration)

    def step_done(self, since_line: float) -> float:
        """The total after a step; ``since_line``: seconds of the steps since the last line, as ``Meter.seconds``."""
        self.since_line = since_line
        return self.seconds + since_line

    def add(self, metrics: Metrics) -> None:
        if metrics.step_seconds is not None:
            self.seconds += metrics.step_seconds * max(0, metrics.iteration - self.iteration)
        self.iteration, self.since_line = metrics.iteration, 0.0

    def restart_after(self, iteration: int) -> None:
        """The run rolls back to an iteration; the time of the undone steps still counts."""
        self.seconds += self.since_line
        self.iteration, self.since_line = iteration, 0.0
