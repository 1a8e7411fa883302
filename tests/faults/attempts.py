"""One attempt of a run: its ranks from launch to exit, their output and exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron01.config import BertPretrainConfig
from megatron01.parallel.program import run_as_program
from megatron01.pretraining import BERT, GPT
from megatron01.training import pretrain
from tests.distributed.harness import torchrun_variables
from tests.faults.hosts import NAMES, Hosts
from tests.faults.injection import Counts, Injection
from tests.faults.process_pool import Child, Order, ProcessPool, become
from tests.faults.settings import TIMEOUT_SECONDS, Setting

HANG_SECONDS = TIMEOUT_SECONDS + 21.0  # after the fault or the first rank's exit, until the others count as hung
LONGEST_SECONDS = 120.0  # of an attempt


@dataclass(frozen=True)
class Ended:
    """A rank that has exited.

    Attributes:
        status: as a shell would see it; negative for the signal that killed it.
        hung: killed because it did not exit in time.
        seconds: from the fault, or from the first rank's exit, to this one's.
    """

    status: int
    hung: bool
    seconds: float
    output: str
    errors: str

    @property
    def error_lines(self) -> list[str]:
        """The error lines."""
        return [line for line in self.errors.splitlines() if re.match(r"(\[rank \d+\] )?error: ", line)]

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.errors


@dataclass(frozen=True)
class Attempt:
    """An attempt that is over.

    Attributes:
        seconds: from its start to the exit of its last rank.
        fired: whether the fault was injected.
        again: the same command, started while this one was running.
    """

    ranks: list[Ended]
    seconds: float
    fired: bool
    again: Attempt | None = None

    @property
    def succeeded(self) -> bool:
        return all(rank.status == 0 and not rank.hung for rank in self.ranks)


def run_attempt(
    pool: ProcessPool,
    setting: Setting,
    config: Any,
    folder: Path,
    *,
    injections: Mapping[int, Sequence[Injection]] | None = None,
    hosts: Hosts | None = None,
    killed_after: float | None = None,
    stopped: Collection[int] = (),
    again_after: float | None = None,
    counts_to: Path | None = None,
) -> Attempt:
    """Start all ranks, wait for all of them, and read what they printed.

    Args:
        folder: for their output, ``rank0.out``, ``rank0.err`` and so on.
        injections: faults by rank.
        hosts: real hosts in place of simulated nodes.
        killed_after: SIGKILL to all ranks after so many seconds.
        stopped: ranks that a fault stops (SIGSTOP); they get SIGCONT when all others have exited.
        again_after: start the same command again after so many seconds.
        counts_to: file for the number of calls at each injection point, by rank (JSON).
    """
    fired = folder / "fired"
    work = [(config, (injections or {}).get(rank, ()), fired) for rank in range(setting.world_size)]
    arguments = [(*args, counts_to and f"{counts_to}.{rank}") for rank, args in enumerate(work)]
    children = start_ranks(pool, setting, folder, _pretrain, *arguments, hosts=hosts)
    if again_after is not None:
        later = (config, (), fired, None, again_after)
        children += start_ranks(pool, setting, folder / "again", _pretrain, later, hosts=hosts)
    began = time.monotonic()
    try:
        ends = _watch(pool, children, fired, killed_after, stopped)
    finally:
        for child in children:
            child.signal(signal.SIGKILL)
    assert pool.wait(children, 10.0)
    ranks = []
    for child, (ended, hung, since) in zip(children, ends, strict=True):
        assert child.status is not None
        texts = [path.read_text(errors="replace") for path in (child.order.output, child.order.errors)]
        ranks.append(Ended(child.status, hung, ended - since, *texts))
    seconds, size = max(ended for ended, _, _ in ends) - began, setting.world_size
    again = None if again_after is None else Attempt(ranks[size:], seconds, False)
    return Attempt(ranks[:size], seconds, fired.exists(), again)


def lose_launcher(pool: ProcessPool, setting: Setting, config: Any, folder: Path, seconds: float) -> Child:
    """Start all ranks by a launcher, in its process group, and kill the launcher after some seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = [entry | {"TORCHELASTIC_RUN_ID": "campaign"} for entry in rank_variables(setting, "127.0.0.1")]
    order = Order(_launch, (config, variables, folder), {}, folder / "launcher.out", folder / "launcher.err")
    launcher = pool.start(order)
    if not pool.wait([launcher], seconds):
        os.kill(launcher.pid, signal.SIGKILL)
        assert pool.wait([launcher], 10.0)
    return launcher


def rest_of(launcher: Child, seconds: float) -> bool:
    """Whether ranks of a launcher still run after a time; they are killed then."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            os.killpg(launcher.pid, 0)
            time.sleep(0.05)
        os.killpg(launcher.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def start_ranks(
    pool: ProcessPool,
    setting: Setting,
    folder: Path,
    work: Callable[..., object],
    *arguments: tuple[Any, ...],
    hosts: Hosts | None = None,
) -> list[Child]:
    """Start all ranks of a run.

    Args:
        folder: for their output; made if it does not exist.
        work: the function that each rank runs.
        arguments: its arguments, for all ranks or for each.
        hosts: real hosts in place of simulated nodes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variables = rank_variables(setting, "127.0.0.1" if hosts is None else hosts.address(0))
    children = []
    for rank in range(setting.world_size):
        order = Order(
            work,
            arguments[rank % len(arguments)],
            variables[rank] | ({} if hosts is None else {"GLOO_SOCKET_IFNAME": "eth0"}),
            folder / f"rank{rank}.out",
            folder / f"rank{rank}.err",
            None if hosts is None else hosts.namespaces[rank // setting.per_node],
            NAMES[rank // setting.per_node],
        )
        children.append(pool.start(order))
    return children


def _watch(
    pool: ProcessPool, children: list[Child], fired: Path, killed_after: float | None, stopped: Collection[int]
) -> list[tuple[float, bool, float]]:
    """For each rank: time of its exit, whether it hung, and the time from which it was expected to exit."""
    began = time.monotonic()
    alarm: float | None = None  # time of the fault or of the first rank's exit
    ends: dict[int, tuple[float, bool, float]] = {}
    waits_for_stopped = False
    while len(ends) < len(children):
        if killed_after is not None and time.monotonic() > began + killed_after:
            killed_after = None
            fired.touch()
            for child in children:
                child.signal(signal.SIGKILL)
        pool.wait(children, 0.1)
        now = time.monotonic()
        for rank, child in enumerate(children):
            if child.status is not None and rank not in ends:
                alarm = now if alarm is None else alarm
                ends[rank] = (now, False, alarm)
        if alarm is None and fired.exists():
            alarm = now
        if stopped and not waits_for_stopped and len(ends) == len(children) - len(stopped):
            waits_for_stopped, alarm = True, now
            for rank in stopped:
                children[rank].signal(signal.SIGCONT)
        if (alarm is not None and now > alarm + HANG_SECONDS) or now > began + LONGEST_SECONDS:
            for rank in range(len(children)):
                if rank not in ends and (waits_for_stopped or rank not in stopped):
                    ends[rank] = (now, True, began if alarm is None else alarm)
                    children[rank].signal(signal.SIGKILL)
    return [ends[rank] for rank in range(len(children))]


def _launch(config: Any, variables: Sequence[Mapping[str, str]], folder: Path) -> None:
    """The launcher: starts all ranks, and waits for them."""
    ranks = []
    for rank, environment in enumerate(variables):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            become(folder / f"rank{rank}.out", folder / f"rank{rank}.err", environment)
            return _pretrain(config, (), folder / "fired", None)
    for pid in ranks:
        os.waitpid(pid, 0)
    os._exit(0)


def _pretrain(
    config: Any, injections: Sequence[Injection], fired: Path, counts_to: str | None, delay: float = 0.0
) -> None:
    """A rank: the program, with its injections armed."""
    time.sleep(delay)
    counts = Counts()
    if counts_to is not None:
        counts.arm()
    for injection in injections:
        injection.arm(fired)
    script = BERT if isinstance(config, BertPretrainConfig) else GPT

    def main() -> int:
        try:
            return pretrain(config, script.build_datasets, script.build_model, script.forward_step)
        finally:
            if counts_to is not None:
                Path(counts_to).write_text(json.dumps(counts.calls))

    run_as_program(main)


def rank_variables(setting: Setting, address: str) -> list[dict[str, str]]:
    """The environment variables that a launcher sets, for each rank."""
    return [
        variables | {"MASTER_ADDR": address} for variables in torchrun_variables(setting.world_size, setting.per_node)
    ]
