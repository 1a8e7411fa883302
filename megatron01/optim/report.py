"""Reports of optimizer steps, and the exception for a run that has diverged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, SupportsFloat

StepKind = Literal["full", "one_bit", "local", "skipped"]


@dataclass(frozen=True)
class CompressionReport:
    """Quantization error of one exchange on this replica.

    Attributes:
        relative_errors: for each bucket, norm of what quantization lost over the norm of what was quantized; of random
            bits over the root of the sum of squares of the bits and of what they lost.
        feedback_ratio: norm of the worker error over that of what this replica sent. Both are of its own steps, so that
            it does not depend on the number of replicas, whose mean is smaller the more of them there are.
    """

    relative_errors: tuple[float, ...]
    feedback_ratio: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Report of one optimizer step of this replica.

    On a GPU, the first read of ``kind`` or ``grad_norm`` of a local step is a host sync.

    Attributes:
        step: the step's number, 0 for the first.
        planned_kind: what was to be done: full (gradients are averaged), one_bit (accumulated steps are exchanged) or
            local (nothing is).
        called_off: whether the step is known not to have used this replica's gradient.
        norm: as ``grad_norm``; may be deferred.
        grad_norm_estimated: True if ``grad_norm`` is an estimate of the mean gradient's.
        interval: steps between two synchronizations that the policy asks for around this step.
        lr: learning rate.
        bytes_sent: bytes this replica handed to collectives for other replicas.
        bytes_between_nodes: the part of it that left this node, where the nodes are known.
        rounds: exchanges made (a step may make two, or none).
        synchronized: whether the master weights moved (for Adam on a GPU: unless ``kind`` is skipped).
        compression: quantization error of a 1-bit exchange, if this step measured it.
        loss_scale: loss scale of the gradient; 1 without fp16.
    """

    step: int
    planned_kind: StepKind
    called_off: bool
    norm: SupportsFloat
    interval: int
    lr: float
    bytes_sent: int
    bytes_between_nodes: int = 0
    rounds: int
    synchronized: bool
    loss_scale: float = 1.0
    grad_norm_estimated: bool = False
    compression: CompressionReport | None = None

    @property
    def grad_norm(self) -> float:
        """Norm before clipping of the mean gradient over the replicas: exact at a full step, else an estimate.

        Rank-local where there is no estimate (``clip_by`` "local"). Not finite if an element of the gradient is not.
        """
        return float(self.norm)

    @property
    def kind(self) -> StepKind:
        """The planned kind, or skipped if the gradient was not used, as this replica's or another's was not finite."""
        return self.planned_kind if not self.called_off and math.isfinite(self.grad_norm) else "skipped"


@dataclass(frozen=True, kw_only=True)
class DeferredReport:
    """What has happened since the last step's report: a delayed exchange that was pending then has been received.

    The fields are those of ``StepReport``.
    """

    bytes_sent: int = 0
    bytes_between_nodes: int = 0
    rounds: int = 0
    compression: CompressionReport | None = None


class TrainingDiverged(RuntimeError):
    """Gradients were not finite for too many steps in a row; raised on all replicas after the same step.

    Attributes:
        is_here: whether they were on this replica.
        skipped_steps: that this replica has skipped in a row.
    """

    def __init__(self, message: str, *, is_here: bool, skipped_steps: int) -> None:
        super().__init__(message)
        self.is_here, self.skipped_steps = is_here, skipped_steps
