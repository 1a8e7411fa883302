"""``megatron01 doctor``, run as one process, or as all ranks of a job under its launcher."""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megatron01.config import DistributedConfig
from megatron01.config.commands import DoctorConfig
from megatron01.doctor.diagnosis import (
    Diagnosis,
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
from megatron01.parallel.rendezvous import RankInfo, check_ranks, open_store, require_shared
from megatron01.utils.formatting import painter

_SHARED_TIMEOUT = 30.0
_GRACE = datetime.timedelta(seconds=15)


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
                problems = diagnose([own], self.config).problems + _port_problems(self.environment)
                problems += _folder_problems(self.config.shared_folder)
                _print([*describe_machines([own], self.environment.launcher)], problems)
                return EXIT_USER_ERROR if problems else 0
            try:
                return self._run_together(own)
            except UserError as error:  # also a FaultError: as a finding it exits with 2, not 74
                raise UserError(str(error), scope=error.scope) from None
            except dist.DistError as error:
                reason = " ".join(str(error).split())[:200]
                raise UserError(
                    f"lost another process while {self.phase}; its own output says why ({reason})"
                ) from error

    def _run_together(self, own: Examination) -> int:
        rank, world_size = self.environment.rank, self.environment.world_size
        self.phase = f"waiting for the other processes at {self.environment.rendezvous_endpoint}"
        communicator = mpi.connect(self.environment) if self.config.comm_backend == "mpi" else None
        store = open_store(self.environment, communicator, self._timeout)
        board = dist.PrefixStore("doctor", store)
        check_ranks(board, self.environment, RankInfo(own.node, "", {}, {}), self._timeout, needs_gpus=False)
        board.set(f"seen/{rank}", json.dumps(asdict(own)))
        seen: list[Examination] = []
        diagnosis = Diagnosis([], False)
        if rank == 0:
            seen = [Examination(**json.loads(board.get(f"seen/{peer}"))) for peer in range(world_size)]
            diagnosis = diagnose(seen, self.config)
            board.set("can_connect", "no" if diagnosis.blocking else "yes")
        problem, report = self._measure(store) if board.get("can_connect") == b"yes" else ("", None)
        board.set(f"outcome/{rank}", json.dumps(problem))
        self.phase = "waiting for what the others found"
        if rank == 0:
            ranks = range(world_size)
            with suppress(dist.DistStoreError):
                board.wait([f"outcome/{peer}" for peer in ranks], self._timeout)
            present = [peer for peer in ranks if board.check([f"outcome/{peer}"])]
            found = [json.loads(board.get(f"outcome/{peer}")) for peer in present]
            problems = self._report(seen, diagnosis, found, sorted(set(ranks) - set(present)), report)
            board.set("problems", str(len(problems)))
            with suppress(dist.DistStoreError):  # rank 0 serves the store: all must read the result before it exits
                board.wait([f"informed/{peer}/problems" for peer in present[1:]], _GRACE)
            return EXIT_USER_ERROR if problems else 0
        board.wait(["problems"], self._timeout + _GRACE)
        status = EXIT_USER_ERROR if int(board.get("problems")) else 0
        board.set(f"informed/{rank}/problems", "")
        return status

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
                report = measure_network(group, settings, int(config.megabytes * 1e6), self._timeout)
        except UserError as error:
            problem = str(error)
        except RuntimeError as error:
            if (reason := lost_replica(error)) is None:
                raise
            problem = f"{self.environment.node_name} lost another process while {self.phase} ({reason})"
        return problem, report

    def _report(
        self,
        seen: list[Examination],
        diagnosis: Diagnosis,
        found: list[str],
        silent: list[int],
        report: NetworkReport | None,
    ) -> list[str]:
        """Print machines, measurements and problems; returns the problems.

        Args:
            found: problem of each rank that answers, or an empty text.
            silent: ranks that do not answer.
        """
        nodes = [one.node for one in seen]
        lines = describe_machines(seen, self.environment.launcher)
        problems = diagnosis.problems
        if silent:
            names = ", ".join(dict.fromkeys(nodes[rank] for rank in silent))
            problems.append(
                f"no answer any more from {format_ranks(silent)} ({names}), while the network was looked at; see"
                " whether it is still there, and what its own output says"
            )
        problems += [problem for problem in dict.fromkeys(found) if problem and problem not in problems]
        if report is not None:
            links = [(nodes[sender], nodes[receiver], rate) for sender, receiver, rate in report.links]
            problems += link_problems(links, report.link_bytes)
            problems += clock_problems([(nodes[rank], offset, uncertain) for rank, offset, uncertain in report.clocks])
            lines += ["", *describe_network(report, nodes)]
        else:
            lines += ["", "the network was not measured"]
        _print(lines, problems)
        return problems

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


def _port_problems(environment: LaunchEnvironment) -> list[str]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", environment.master_port))
        except OSError as error:
            return [
                f"port {environment.master_port} cannot be used on {environment.node_name} ({error.strerror}); give"
                " another MASTER_PORT"
            ]
    return []


def _folder_problems(folder: Path) -> list[str]:
    """Why a run could not write to the folder, for a single process; several check it by ``require_shared``."""
    if not folder.is_dir():
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
