"""Replicas on slow hosts that stay for all runs, what they measure together, and the file that keeps it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import Any

from convergence_table import read_records
from replica_pool import ReplicaFailed, ReplicaPool
from rivals.entries import ALONE, BASELINE
from slow_network_advice import advise
from slow_network_hosts import CONGESTION_CONTROL, UNLIMITED, Hosts, bits_per_second
from slow_network_run import Race, race, transfer

TOLERANCE = 0.1
"""How far a link may be from its cap."""
_ATTEMPTS = 3
_WARM_UP_STEPS = 12
_PROFILE_STEPS = 12
_PROFILE_ATTEMPTS = 6
_PROFILE_TOLERANCE = 0.01


class Lab:
    """``replicas`` processes, each on a host of its own; a context manager.

    Args:
        data: folder of the prepared text.
        warm_up: a run of each contestant that is to come. They take some steps before anything is measured, so that
            what is compiled, loaded and connected when it is first used is there.
        hosts: otherwise the processes are on this machine's own network.
    """

    def __init__(self, replicas: int, data: Path, warm_up: list[Race], *, hosts: bool) -> None:
        self._replicas = replicas
        self._data = str(data)
        self._warm_up = [dataclasses.replace(run, steps=_WARM_UP_STEPS, evaluations=0) for run in warm_up]
        self._stack = ExitStack()
        self._hosts = self._stack.enter_context(Hosts(replicas)) if hosts else None
        self._pool = ReplicaPool(0)

    def __enter__(self) -> Lab:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(None, None, None)
        self._stack.close()

    def measure(self, run: Race) -> dict[str, Any]:
        """What a run gives, as ``slow_network_run.race`` says: bytes are the mean over replicas, the rest replica 0's.

        With ``link_bits``: frames per second, in bits, that a host could send just before.

        Raises:
            ReplicaFailed: it failed; the replicas have been started anew.
        """
        link, results = self._run(race, run)
        counted = [name for name in results[0] if name.endswith("_bytes")]
        means = {name: mean(result[name] for result in results) for name in counted}
        return {**link, **results[0], **means, "resent": sum(result["resent"] for result in results)}

    def advise(self, run: Race) -> dict[str, Any]:
        """What ``--auto`` chooses for this model, length and rate: see ``slow_network_advice``.

        Raises:
            ReplicaFailed: as ``measure``.
        """
        link, results = self._run(advise, run)
        assert all(result["chosen"] == results[0]["chosen"] for result in results)
        return {**link, **results[0]}

    def _run(self, work: Callable[[Race, str], Any], run: Race) -> tuple[dict[str, Any], list[Any]]:
        """What is known of the links at the run's rate, and what ``work`` gives on each replica."""
        try:
            link: dict[str, Any] = {}
            if self._hosts is not None:
                link = {"link_bits": self._set_rate(run.rate), "congestion_control": CONGESTION_CONTROL}
            return link, self._pool.run(work, run, self._data)
        except ReplicaFailed:
            self._pool.__exit__(None, None, None)
            self._start()
            raise

    def _start(self) -> None:
        self._pool = ReplicaPool(self._replicas, None if self._hosts is None else self._hosts.enter)
        if self._hosts is not None:
            self._hosts.cap(UNLIMITED)
        for run in self._warm_up:
            self._pool.run(race, run, self._data)

    def _set_rate(self, rate: str) -> float:
        """Cap the links, and send something over them until it arrives at this rate, which a busy machine may not."""
        assert self._hosts is not None
        self._hosts.cap(rate)
        wanted = bits_per_second(rate)
        measured = []
        for _ in range(_ATTEMPTS):
            measured.append(mean(self._pool.run(transfer, rate)))
            if wanted is None:
                return measured[-1]
            if abs(measured[-1] / wanted - 1) <= TOLERANCE:
                return measured[-1]
        return min(measured, key=lambda bits: abs(bits - wanted))


def find_profile(lab: Lab, run: Race, share: float) -> tuple[str, float]:
    """The cap at which the baseline exchanges for this share of a step, and the share that was measured there.

    Exchanging is what a step takes beyond one without any exchange; ``run`` says of which model.
    """
    short = dataclasses.replace(run, steps=_PROFILE_STEPS, evaluations=0)

    def seconds(contestant: str, rate: str) -> tuple[float, float]:
        result = lab.measure(dataclasses.replace(short, contestant=contestant, rate=rate))
        (_, a_step), *_ = result["kinds"].values()
        return a_step, 8 * result["frame_bytes"] / _PROFILE_STEPS

    rate = UNLIMITED
    alone, _ = seconds(ALONE, rate)
    _, bits = seconds(BASELINE, rate)
    cap = bits / (alone * share / (1 - share))
    best, best_share = rate, 0.0
    for _ in range(_PROFILE_ATTEMPTS):
        rate = f"{cap / 1e6:.3g}mbit"
        alone, _ = seconds(ALONE, rate)
        step, _ = seconds(BASELINE, rate)
        measured = 1 - alone / step
        if abs(measured - share) < abs(best_share - share):
            best, best_share = rate, measured
        if abs(measured - share) <= _PROFILE_TOLERANCE:
            break
        # what is exchanged takes a time that goes with 1 / cap
        cap *= max(step - alone, 0.1 * alone) / (alone * share / (1 - share))
    return best, best_share


class Records:
    """A file of JSON lines, one for each run or profile that was measured."""

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        """``common``: what every line of this session holds."""
        self._path = path
        self._common = common
        self.lines = read_records(path)

    def find(self, key: str, value: Any) -> dict[str, Any] | None:
        """The line whose ``key`` is ``value``."""
        return next((line for line in self.lines if line.get(key) == value), None)

    def add(self, line: dict[str, Any]) -> dict[str, Any]:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        # as it will be read again
        line = json.loads(json.dumps({**line, "date": date, "load": os.getloadavg()[0], **self._common}))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        return line
