"""The outcome of a run with a fault."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron01.checkpoint.manifest import check_contents, iteration_folder, read_metadata
from megatron01.errors import UserError
from tests.faults.attempts import Attempt
from tests.integration import tiny
from tests.integration.tiny import stored_state

COST_OF_RESTARTS = ("restart_seconds", "lost_steps")


@dataclass
class Outcome:
    """The outcome of a run with a fault.

    Attributes:
        fired: the fault was injected; one after a delay may come too late.
        noticed: every surviving rank exited with a nonzero status and at most one error line, and one line exists;
            or a run that was to continue printed the expected message. None if there was nothing to notice.
        recovered: the run, or its next attempt, ended bit-identical to a run without a fault.
        undetected: it succeeded with other bits.
        hung: a rank did not exit by itself.
        lost_checkpoints: checkpoints that were reported as saved and are no longer intact.
        noise: lines that a surviving rank printed besides its error (maximum over ranks).
        lost_steps: steps repeated by the next attempt.
        seconds: from the fault to the exit of the last surviving rank, if the run ended.
        problems: in words.
        messages: the ranks' error lines.
    """

    fired: bool = True
    noticed: bool | None = None
    recovered: bool = False
    undetected: bool = False
    hung: bool = False
    lost_checkpoints: int = 0
    noise: int = 0
    lost_steps: int = 0
    seconds: float | None = None
    problems: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def final_digest(saved: Path, iteration: int) -> str | None:
    """Hash of all of a run's last checkpoint: tensors of all replicas, counters, sums; None if it does not exist."""
    folder = iteration_folder(saved, iteration)
    try:
        metadata = json.loads((folder / "metadata.json").read_text())
        tensors = stored_state(folder)
    except (OSError, ValueError, UserError):
        return None
    del metadata["files"], metadata["content_hash"]
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    parsed = []
    for line in lines:
        try:
            parsed.append(json.loads(line))
        except ValueError:
            continue
    return parsed


def comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without times and other values that differ between runs with and without a fault."""
    return tiny.comparable(lines, leaving_out=COST_OF_RESTARTS)


def resumed_iteration(attempt: Attempt) -> int:
    """The iteration from which an attempt started."""
    found = re.search(r"^continuing after iteration (\d+)", attempt.ranks[0].output, re.MULTILINE)
    return int(found[1]) if found else 0


def lost_checkpoints(attempt: Attempt) -> list[str]:
    """Checkpoints that rank 0 reported as saved and that are no longer intact."""
    lost = []
    for path in re.findall(r"^saved (.*)$", attempt.ranks[0].output, re.MULTILINE):
        try:
            metadata = read_metadata(Path(path))
            check_contents(Path(path), metadata.files, metadata.files)
        except UserError as error:
            lost.append(str(error))
    return lost


def look_at_end(attempt: Attempt, dead: set[int], stopped: set[int], outcome: Outcome) -> None:
    """Check that all surviving ranks exited as they should: with a nonzero status and one error line.

    A stopped rank may succeed if it no longer needed the others.
    """
    living = [(number, rank) for number, rank in enumerate(attempt.ranks) if number not in dead]
    outcome.seconds = max((rank.seconds for _, rank in living), default=None)
    outcome.messages += [line for _, rank in living for line in rank.error_lines]
    outcome.noise = max((len(rank.errors.splitlines()) - len(rank.error_lines) for _, rank in living), default=0)
    problems = []
    for number, rank in living:
        if rank.hung:
            problems.append(f"rank {number} hung")
        elif rank.status == 0 and number not in stopped:
            problems.append(f"rank {number} ended with status 0")
        elif rank.status < 0:
            problems.append(f"rank {number} was killed by signal {-rank.status}")
        if len(rank.error_lines) > 1:
            problems.append(f"rank {number} printed {len(rank.error_lines)} errors")
        if rank.has_traceback:
            problems.append(f"rank {number} printed a traceback: {rank.errors.splitlines()[-1][:200]}")
    if living and not any(rank.error_lines for _, rank in living):
        problems.append("nobody said why")
    outcome.hung |= any(rank.hung for _, rank in living)
    outcome.noticed = not problems
    outcome.problems += problems
