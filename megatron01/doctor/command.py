"""``megatron01 doctor``, run as one process, or as all ranks of a job under its launcher."""

from __future__ import annotations

import datetime
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron01.config import DistributedConfig
from megatron01.config.commands import DoctorConfig
from megatron01.doctor.diagnosis import (
    Examination,
    clock_problems,
    describe_machines,
    describe_network,
    diagnose,
    examine,
    link_problems,
)
from megatron01.doctor.network import NetworkReport, measure_network
from megatron01.errors import EXIT_USER_ERROR, UserError
from megatron01.parallel import LaunchEnvironment, initialize, lost_replica, mpi
from megatron01.parallel.process_groups import format_ranks
from megatron01.parallel.rendezvous import RankInfo, check_ranks, decided_by_rank_0, open_store, require_shared
from megatron01.utils.files import exists
from megatron01.utils.formatting import one_line, painter

_SHARED_TIMEOUT = 30.0


class Doctor:
    """One run of the command on one rank; ``phase`` names the current activity, for the error if it hangs."""

    def __init__(self, config: DoctorConfig, environment: LaunchEnvironment) -> None:
        self.config, self.environment = config, environment
        self.phase = "looking at the machine"
        self._timeout = datetime.timedelta(seconds=config.timeout_seconds)

    def run(self) -> int:
        """Run all checks and print the results on rank 0. Returns the exit status: 0, or 2 if there is a problem."""
        with self._ended_in_time():
            own = examine(self.environment, self.config.shared_folder)
            if self.environment.world_size == 1:
                problems = diagnose([own], self.config).problems + _folder_problems(self.config.shared_folder)
                _print([*describe_machines([own], self.environment.launcher)], problems)
                return EXIT_USER_ERROR if problems else 0
            try:
                return self._run_together(own)
            except UserError as error:  # also a FaultError: as a finding it exits with 2, not 74
                raise UserError(str(error), scope=error.scope) from None
            except dist.DistError as error:
                raise UserError(
                    f"lost another process while {self.phase}; its own output says why ({one_line(error, 200)})"
                ) from error

    def _run_together(self, own: Examination) -> int:
        self.phase = f"waiting for the other processes at {self.environment.rendezvous_endpoint}"
        communicator = mpi.connect(self.environment) if self.config.comm_backend == "mpi" else None
        store = open_store(self.environment, communicator, self._timeout)
        board = dist.PrefixStore("doctor", store)
        decided = partial(decided_by_rank_0, board, self.environment, timeout=self._timeout)
        check_ranks(board, self.environment, RankInfo(own.node, "", {}, {}), self._timeout, needs_gpus=False)
        can_connect = decided("seen", asdict(own), self._diagnose)
        problem, report = self._measure(store) if can_connect else ("", None)
        self.phase = "waiting for what the others found"
        num_problems = decided("outcome", problem, partial(self._report, report))
        return EXIT_USER_ERROR if num_problems else 0

    def _diagnose(self, found: dict[int, dict[str, Any]]) -> bool:
        """Diagnose all machines from the examination of each rank; True if they can be connected."""
        if missing := [rank for rank in range(self.environment.world_size) if rank not in found]:
            raise dist.DistStoreError(f"no answer from {format_ranks(missing)}")
        self._seen = [Examination(**found[rank]) for rank in sorted(found)]
        self._diagnosis = diagnose(self._seen, self.config)
        return not self._diagnosis.blocking

    def _measure(self, store: dist.Store) -> tuple[str, NetworkReport | None]:
        """Open process groups and measure the network; returns a problem, or an empty text, and the measurements."""
        config = self.config
        settings = DistributedConfig(
            distributed_backend=config.distributed_backend,
            comm_backend=config.comm_backend,
            distributed_timeout_minutes=config.timeout_seconds / 60,
            hierarchical="off",
            check_payloads=False,
        )
        problem, report = "", None
        try:
            self.phase = "connecting the processes"
            with initialize(self.environment, settings, store=store) as group:
                self.phase = f"looking for the same folder everywhere ({config.shared_folder})"
                try:
                    timeout = min(_SHARED_TIMEOUT, config.timeout_seconds / 2)
                    require_shared(config.shared_folder, group, timeout=timeout)
                except UserError as error:
                    problem = str(error)
                self.phase = "measuring the network"
                report = measure_network(group, settings, int(config.megabytes * 1e6))
        except UserError as error:
            problem = str(error)
        except RuntimeError as error:
            if (reason := lost_replica(error)) is None:
                raise
            problem = f"{self.environment.node_name} lost another process while {self.phase} ({reason})"
        return problem, report

    def _report(self, report: NetworkReport | None, found: dict[int, str]) -> int:
        """Print machines, measurements and the problems ``found``, "" if none, by rank; returns their number."""
        nodes, hosts = [one.node for one in self._seen], [one.host for one in self._seen]
        lines = describe_machines(self._seen, self.environment.launcher)
        problems = self._diagnosis.problems
        if silent := [rank for rank in range(self.environment.world_size) if rank not in found]:
            names = ", ".join(dict.fromkeys(nodes[rank] for rank in silent))
            problems.append(
                f"no answer any more from {format_ranks(silent)} ({names}), while the network was looked at; see"
                " whether it is still there, and what its own output says"
            )
        problems += [problem for problem in dict.fromkeys(found.values()) if problem and problem not in problems]
        if report is not None:
            links = [  # within a host, as where a launcher takes it for several nodes, processors set the rate
                (nodes[sender], nodes[receiver], rate)
                for sender, receiver, rate in report.links
                if hosts[sender] != hosts[receiver]
            ]
            problems += link_problems(links, report.link_bytes)
            problems += clock_problems([(nodes[rank], offset, uncertain) for rank, offset, uncertain in report.clocks])
            lines += ["", *describe_network(report, nodes)]
        else:
            lines += ["", "the network was not measured"]
        _print(lines, problems)
        return len(problems)

    @contextmanager
    def _ended_in_time(self) -> Iterator[None]:
        """Watchdog that ends this process after three time-outs, as a hanging file system or driver obeys none."""

        def end() -> None:
            line = f"error: {self.environment.node_name} hangs while {self.phase}; look there, and start again"
            print(line, file=sys.stderr, flush=True)
            os._exit(EXIT_USER_ERROR)

        watch = threading.Timer(3 * self.config.timeout_seconds, end)
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()


def _folder_problems(folder: Path) -> list[str]:
    """Why a run could not write to the folder, for a single process; several check it by ``require_shared``.

    A folder that cannot be looked at is a problem that ``diagnose`` names.
    """
    try:
        is_there, is_folder = exists(folder), folder.is_dir()
    except OSError:
        return []
    if is_there and not is_folder:
        return [f"--shared-folder {folder} is a file; give the folder that the run has"]
    if not is_there:
        return [f"--shared-folder {folder} is not there; make it (mkdir -p {folder}), or give the one that the run has"]
    if not os.access(folder, os.W_OK):
        return [f"--shared-folder {folder} cannot be written by this user; see its permissions, or give another one"]
    return []


def _print(lines: list[str], problems: list[str]) -> None:
    print("\n".join(lines), flush=True)
    for problem in problems:
        print(f"{painter(sys.stderr)('error:', 'red')} {problem}", file=sys.stderr)
    sys.stderr.flush()
    if not problems:
        print(painter(sys.stdout)("no problem found", "green"), flush=True)


def doctor(config: DoctorConfig) -> int:
    """Run the checks; returns the exit status, 2 if there is a problem. Raises UserError if the rendezvous fails."""
    return Doctor(config, LaunchEnvironment.read(os.environ)).run()
