"""Fuzzing rounds, each within limits of time and memory, and their results."""

from __future__ import annotations

import random
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.fuzz.checkpoints import Checkpoints
from tests.fuzz.damage import remove
from tests.fuzz.settings_files import SettingsFiles
from tests.fuzz.token_files import TokenFiles

SECONDS_PER_ROUND = 60
MEMORY_BESIDE = 1536 * 2**20  # bytes of address space that rounds may use in addition to the process's own at the start
LONGEST_MESSAGE = 2000


class Target(Protocol):
    """Files and what reads them."""

    name: str

    @staticmethod
    def prepare(folder: Path) -> None: ...
    def __init__(self, folder: Path) -> None: ...
    def round(self, numbers: random.Random, folder: Path, victim: Path) -> tuple[str, str | None]: ...
    def close(self) -> None: ...


TARGETS: dict[str, type[Target]] = {target.name: target for target in (Checkpoints, TokenFiles, SettingsFiles)}


@dataclass
class Outcome:
    """The results of some rounds.

    Attributes:
        refused: rounds that ended in an error of one line, by kind of damage.
        harmless: those that ended well.
        failures: for each other round its number, the damage if known, and what happened.
        slowest: seconds of the longest round.
    """

    refused: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0


def run_rounds(rank: int, world_size: int, name: str, prepared: Path, seed: int, numbers_of_rounds: range) -> Outcome:
    """Rounds of one target, each of which depends on ``seed`` and its number alone. Changes limits of the process."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        target = TARGETS[name](prepared)
        victim = Path(temporary) / "made by a payload"
        limit = _bytes_of_address_space() + MEMORY_BESIDE
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        for number in numbers_of_rounds:
            folder = Path(temporary) / "round"
            folder.mkdir()
            began = time.monotonic()
            kind, message, problem = "?", None, None
            try:
                with _within(SECONDS_PER_ROUND):
                    kind, message = target.round(random.Random(f"{name} {seed} {number}"), folder, victim)
            except BaseException:
                problem = traceback.format_exc()
            outcome.slowest = max(outcome.slowest, time.monotonic() - began)
            if message is not None and ("\n" in message or len(message) > LONGEST_MESSAGE):
                problem = f"not a line of {LONGEST_MESSAGE} characters at most: {message[:500]!r}"
            if victim.exists():
                problem = "a payload was executed"
                victim.rmdir()
            if problem is not None:
                outcome.failures.append(f"{name} {seed} {number}, {kind}: {problem[-2000:]}")
            else:
                (outcome.harmless if message is None else outcome.refused)[kind] += 1
            remove(folder)
        target.close()
    return outcome


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    def too_late(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _bytes_of_address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
