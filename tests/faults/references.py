"""Reference runs without faults, one per setting, with which faulty runs are compared and from which they start."""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron01.checkpoint.manifest import TRACKER_NAME, iteration_folder
from tests.faults.attempts import run_attempt
from tests.faults.outcome import comparable, final_digest, read_metrics
from tests.faults.process_pool import ProcessPool
from tests.faults.settings import SAVED_EVERY, STEPS, Setting


class ReferenceFailed(RuntimeError):
    """A reference run failed."""


@dataclass(frozen=True)
class Reference:
    """A run without a fault.

    Attributes:
        folder: with ``saved`` and ``run``.
        digest: of its last checkpoint.
        lines: of its metrics, without times.
        calls: at every injection point, by rank.
        seconds: duration.
    """

    folder: str
    digest: str
    lines: list[dict[str, Any]]
    calls: list[dict[str, int]]
    seconds: float

    def continue_from(self, iteration: int, folder: Path) -> None:
        """Copy into ``folder`` the checkpoints and metrics of a run that ended after ``iteration``."""
        source = Path(self.folder)
        for number in range(SAVED_EVERY, iteration + 1, SAVED_EVERY):
            shutil.copytree(iteration_folder(source / "saved", number), iteration_folder(folder / "saved", number))
        (folder / "saved" / TRACKER_NAME).write_text(str(iteration))
        (folder / "run").mkdir(exist_ok=True)
        lines = (source / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "run" / "metrics.jsonl").write_text("".join(lines[: iteration + 1]))


def reference(pool: ProcessPool, setting: Setting, corpus: Path, folder: Path) -> Reference:
    """The run without a fault, made at the first call and cached in ``folder``; its saves are synchronous."""
    setting = replace(setting, async_save=False)
    place = folder / str(setting).replace(" ", "-")
    file = place / "reference.json"
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # jobs of one campaign share their references
        if not file.exists():
            file.write_text(json.dumps(asdict(_make(pool, setting, corpus, place))))
    return Reference(**json.loads(file.read_text()))


def _make(pool: ProcessPool, setting: Setting, corpus: Path, place: Path) -> Reference:
    for left_over in ("saved", "run"):
        shutil.rmtree(place / left_over, ignore_errors=True)
    attempt = run_attempt(pool, setting, setting.config(corpus, place), place, counts_to=place / "calls")
    if not attempt.succeeded:
        raise ReferenceFailed(f"the run without a fault failed: {attempt}")
    digest = final_digest(place / "saved", STEPS)
    assert digest is not None
    calls = [json.loads(Path(f"{place}/calls.{rank}").read_text()) for rank in range(setting.world_size)]
    return Reference(str(place), digest, comparable(read_metrics(place / "run")), calls, attempt.seconds)
