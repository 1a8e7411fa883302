"""The replicas on slow hosts, which serve all runs, and their joint measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from replica_pool import ReplicaFailed, ReplicaPool
from rivals.entries import ALONE, BASELINE
from slow_network_hosts import CONGESTION_CONTROL, UNLIMITED, Hosts, bits_per_second, enter_host
from slow_network_run import Race, advise, race, transfer

TOLERANCE = 0.1
"""How far a link may be from its cap."""
_ATTEMPTS = 3
_WARM_UP_STEPS = 12
_PROFILE_STEPS = 12
_PROFILE_ATTEMPTS = 6
_PROFILE_TOLERANCE = 0.01


class Lab:
    """``replicas`` processes, each on its own host (not ``hosts``: on this machine's own network); a context manager.

    ``warm_up``: one run per contestant, of which some steps are taken first, so that compiling, loading and connecting
    are not measured. ``data``: folder of the prepared text.
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

    def __exit__(self, *_: object) -> None:
        self._pool.__exit__(None, None, None)
        self._stack.close()

    def measure(self, run: Race) -> dict[str, Any]:
        """Do a run (``slow_network_run.race``): bytes are means over replicas, the other results replica 0's.

        Adds ``link_bits``: bits of frames per second that a host could send just before. Raises ReplicaFailed if it
        failed; the replicas have been restarted.
        """
        link, results = self._run(race, run)
        counted = [name for name in results[0] if name.endswith("_bytes")]
        means = {name: mean(result[name] for result in results) for name in counted}
        return {**link, **results[0], **means, "resent": sum(result["resent"] for result in results)}

    def advise(self, run: Race) -> dict[str, Any]:
        """What ``--auto`` chooses for this model, length and rate (``slow_network_run.advise``); raises as above."""
        link, results = self._run(advise, run)
        assert all(result["chosen"] == results[0]["chosen"] for result in results)
        return {**link, **results[0]}

    def _run(self, work: Callable[[Race, str], Any], run: Race) -> tuple[dict[str, Any], list[Any]]:
        """The measured link rate and congestion control, and the results of ``work`` on each replica."""
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
        prepare = None if self._hosts is None else partial(enter_host, self._hosts.namespaces)
        self._pool = ReplicaPool(self._replicas, prepare)
        if self._hosts is not None:
            self._hosts.cap(UNLIMITED)
        for run in self._warm_up:
            self._pool.run(race, run, self._data)

    def _set_rate(self, rate: str) -> float:
        """Cap the links, and test them until data arrives at this rate, which a busy machine may not reach."""
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
    """The cap at which the exchange takes this share of the baseline's step time, and the share measured there.

    The time of the exchange is the difference to a step without one; ``run`` names the model.
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
        # the time of the exchange is proportional to 1 / cap
        cap *= max(step - alone, 0.1 * alone) / (alone * share / (1 - share))
    return best, best_share
