"""Runs with injected faults: are they noticed, on which ranks, and is the resumed run bit-identical to one without?

    python -m tests.faults.campaign --faults 500 --seed 0 --results faults.jsonl

draws faults, injects each into a small run of its own, and prints a table. Each outcome is appended to the results
file; started again with the same file, a campaign continues where it was interrupted. Network and disk faults need
root, and Linux namespaces.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import shutil
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.hosts import remove_left_overs, why_not
from tests.faults import frameworks
from tests.faults.attempts import HANG_SECONDS, Attempt, lose_launcher, rest_of, run_attempt
from tests.faults.hosts import PREFIX, Hosts, know_names
from tests.faults.outcome import (
    Outcome,
    comparable,
    final_digest,
    look_at_end,
    lost_checkpoints,
    read_metrics,
    resumed_iteration,
)
from tests.faults.plans import KINDS, Kind, Plan, Stage
from tests.faults.process_pool import ProcessPool
from tests.faults.references import Reference, ReferenceFailed, reference
from tests.faults.settings import OPTIMIZERS, STEPS, Setting, draw_setting
from tests.faults.table import markdown
from tests.integration.tiny import make_corpus

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 0x40000
DISK_MEGABYTES = 8


class Laboratory:
    """Resources for fault injection: a process pool, a corpus, reference runs, and hosts if needed.

    Args:
        folder: for all files; expensive ones are reused.
        pool: the process pool.
        number: distinguishes sets of hosts of one process.
    """

    def __init__(self, folder: Path, pool: ProcessPool, number: int = 0) -> None:
        self.folder, self.pool, self.number = folder, pool, number
        self.corpus = folder / "corpus"
        self._resources = ExitStack()
        self._hosts: Hosts | None = None
        if not self.corpus.exists():
            make_corpus(self.corpus)

    @cached_property
    def framework_pool(self) -> ProcessPool:
        """A process pool that has imported other frameworks."""
        return self._resources.enter_context(ProcessPool(*frameworks.MODULES))

    @property
    def hosts(self) -> Hosts:
        """Two hosts, created on first use."""
        if self._hosts is None:
            self._hosts = self._resources.enter_context(Hosts(self.number))
        return self._hosts

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def reference(self, setting: Setting) -> Reference:
        """The run without a fault."""
        return reference(self.pool, setting, self.corpus, self.folder / "references")

    def try_fault(self, kind: Kind, numbers: random.Random, setting: Setting, folder: Path) -> tuple[Plan, Outcome]:
        """Draw a fault of a kind, inject it into a run, and restart the run if it ended."""
        folder.mkdir(parents=True)
        with ExitStack() as clean_up:
            clean_up.callback(shutil.rmtree, folder, ignore_errors=True)
            if kind.small_disk is not None:
                clean_up.enter_context(small_disk(folder / "disk"))
                (folder / "disk" / kind.small_disk).mkdir()
                (folder / kind.small_disk).symlink_to(folder / "disk" / kind.small_disk)
            if kind.mounts:
                clean_up.callback(unmount_below, folder)
            corpus = self.corpus
            if kind.own_corpus:
                corpus = folder / "corpus"
                shutil.copytree(self.corpus, corpus)
            if kind.of_framework:
                plan = kind.draw(Stage(numbers, setting, None, folder, corpus))
                return plan, frameworks.try_fault(self.framework_pool, plan, self.folder / "references", folder)
            hosts = self.hosts if kind.nodes is not None else None
            stage = Stage(numbers, setting, self.reference(setting), folder, corpus, hosts)
            plan = kind.draw(stage)
            if hosts is not None:
                clean_up.callback(hosts.mend)
            return plan, self._carry_out(plan, stage)

    def _carry_out(self, plan: Plan, stage: Stage) -> Outcome:
        outcome, folder, setting = Outcome(), stage.folder, stage.setting
        config = setting.config(stage.corpus, folder, **plan.changes)
        if plan.starts_from is not None:
            stage.reference.continue_from(plan.starts_from, folder)
        plan.before()
        if plan.launcher_killed_after is not None:
            self._restart_beside_orphans(plan, stage, config, outcome, plan.launcher_killed_after)
            return outcome
        attempt = run_attempt(
            self.pool,
            setting,
            config,
            folder / "first",
            injections=plan.injections,
            hosts=stage.hosts,
            killed_after=plan.killed_after,
            stopped=plan.stopped,
            again_after=plan.again_after,
        )
        outcome.fired = attempt.fired or not (plan.injections or plan.killed_after is not None)
        outcome.lost_checkpoints = len(lost_checkpoints(attempt))
        if attempt.again is not None:
            outcome.lost_checkpoints += len(lost_checkpoints(attempt.again))
        has_ended_early = plan.is_asked_to_stop and attempt.succeeded and final_digest(stage.saved, STEPS) is None
        must_end = plan.ends or (plan.is_asked_to_stop and not attempt.succeeded)  # before the first step
        if not has_ended_early and (attempt.succeeded or not (must_end and outcome.fired)):
            if attempt.again is not None:
                _compare(plan, stage, attempt.again, outcome)
            self._judge_one_life(plan, stage, attempt, outcome)
            return outcome
        if has_ended_early:
            outcome.noticed = all("stopped" in rank.output or not rank.output for rank in attempt.ranks)
        elif not (self._came_too_late(plan, attempt) and final_digest(stage.saved, STEPS) == stage.reference.digest):
            look_at_end(attempt, plan.dead, plan.stopped, outcome)
        if plan.must_say is not None and not any(plan.must_say in line for line in outcome.messages):
            outcome.noticed = False
            outcome.problems.append(f"nobody said {plan.must_say!r}")
        reached = max([line["iteration"] for line in read_metrics(folder / "run")], default=0)
        plan.mend()
        again = attempt.again or run_attempt(self.pool, setting, config, folder / "second", hosts=stage.hosts)
        outcome.lost_steps = max(0, reached - resumed_iteration(again)) if attempt.again is None else 0
        if has_ended_early and outcome.lost_steps:
            outcome.problems.append("steps were lost although the run ended by itself")
        _compare(plan, stage, again, outcome)
        return outcome

    @staticmethod
    def _came_too_late(plan: Plan, attempt: Attempt) -> bool:
        """Whether a rank was killed when the others no longer needed it."""
        living = [rank for number, rank in enumerate(attempt.ranks) if number not in plan.dead]
        return bool(plan.dead) and all(rank.status == 0 for rank in living)

    def _restart_beside_orphans(self, plan: Plan, stage: Stage, config: Any, outcome: Outcome, seconds: float) -> None:
        """Kill the launcher, and start the same command while its ranks still run."""
        folder = stage.folder / "first"
        launcher = lose_launcher(self.pool, stage.setting, config, folder, seconds)
        again = run_attempt(self.pool, stage.setting, config, stage.folder / "second")
        outcome.hung = rest_of(launcher, HANG_SECONDS)
        lines = "".join(path.read_text(errors="replace") for path in folder.glob("rank*.err"))
        outcome.fired = launcher.status != 0
        outcome.messages += lines.splitlines()
        outcome.noticed = not outcome.hung and "Traceback" not in lines
        if not outcome.noticed:
            outcome.problems.append("ranks without a launcher did not end, or not in one line")
        outcome.lost_checkpoints = len(lost_checkpoints(again))
        _compare(plan, stage, again, outcome)

    def _judge_one_life(self, plan: Plan, stage: Stage, attempt: Attempt, outcome: Outcome) -> None:
        """Set the outcome of a run that was to complete, or did although it need not have."""
        _compare(plan, stage, attempt, outcome)
        vanished = plan.may_vanish and outcome.recovered
        if plan.must_say is not None and outcome.fired and not vanished:
            said = any(plan.must_say in text for rank in attempt.ranks for text in (rank.output, rank.errors))
            outcome.noticed = said
            if not said:
                outcome.problems.append(f"nobody said {plan.must_say!r}")
        outcome.undetected = attempt.succeeded and not outcome.recovered


def _compare(plan: Plan, stage: Stage, attempt: Attempt, outcome: Outcome) -> None:
    """Check that an attempt completed, bit-identical and with the same metrics as a run without a fault."""
    if not attempt.succeeded:
        outcome.hung |= any(rank.hung for rank in attempt.ranks)
        lines = [line for rank in attempt.ranks for line in (rank.error_lines or rank.errors.splitlines()[-1:])]
        outcome.problems.append(f"the run did not end well: {[rank.status for rank in attempt.ranks]}, {lines}")
        return
    outcome.recovered = not plan.same_bits or final_digest(stage.saved, STEPS) == stage.reference.digest
    if not outcome.recovered:
        outcome.problems.append("other bits at the end")
    lines = comparable(read_metrics(stage.folder / "run"))
    expected = [line for line in stage.reference.lines if line["iteration"] in {line["iteration"] for line in lines}]
    if plan.is_asked_to_stop:  # an evaluation after the last step is left out then
        pairs = zip(lines, expected, strict=True)
        expected = [
            {key: value for key, value in line.items() if key in own or "eval" not in key} for own, line in pairs
        ]
    if plan.same_bits and lines != expected:
        outcome.recovered = False
        outcome.problems.append("other lines of metrics")


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A small file system (tmpfs), at ``folder``."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def unmount_below(folder: Path) -> None:
    """Unmount all file systems below a folder."""
    for line in Path("/proc/thread-self/mounts").read_text().splitlines():
        if line.split()[1].startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", line.split()[1]], check=True)


def hide_mounts() -> None:
    """Enter a private mount namespace, so that an interruption leaves no mounts behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "mounts cannot be hidden")


def draw(numbers: random.Random, *, as_root: bool) -> tuple[str, Setting]:
    """A random kind of fault, and a setting to which it applies."""
    possible = {name: kind for name, kind in KINDS.items() if as_root or not kind.needs_root}
    (name,) = numbers.choices(list(possible), [kind.weight for kind in possible.values()])
    setting = draw_setting(numbers, nodes=KINDS[name].nodes)
    if KINDS[name].exchanges_bytes and setting.optimizer == "adam":
        setting = replace(setting, optimizer=numbers.choice([other for other in OPTIMIZERS if other != "adam"]))
    return name, setting


def main() -> None:
    parser = argparse.ArgumentParser(description="Put faults into runs and see what becomes of them.")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=sorted(KINDS), help="this kind only")
    parser.add_argument("--results", type=Path, help="JSON lines; a campaign whose file is there goes on")
    parser.add_argument("--folder", type=Path, help="for the runs; a temporary one if not given")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    arguments = parser.parse_args()
    as_root = why_not() is None
    if not as_root:
        print(f"without root: no {', no '.join(name for name, kind in KINDS.items() if kind.needs_root)}")
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if as_root:
            remove_left_overs(PREFIX)
            hide_mounts()
            know_names(folder)
        results = arguments.results or Path(temporary) / "results.jsonl"
        rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        done = {row["number"] for row in rows}
        to_do = iter([number for number in range(arguments.faults) if number not in done])
        lock = threading.Lock()

        def work(job: int) -> None:
            with ProcessPool() as pool, Laboratory(folder, pool, job) as laboratory:
                while True:
                    with lock:
                        number = next(to_do, None)
                    if number is None:
                        return
                    row = one(laboratory, number, arguments.seed, arguments.kind, as_root=as_root)
                    with lock, open(results, "a") as file:
                        rows.append(row)
                        file.write(json.dumps(row) + "\n")
                    if row["problems"] or not row["recovered"]:
                        print(json.dumps(row), flush=True)

        if not (folder / "corpus").exists():
            make_corpus(folder / "corpus")
        jobs = [threading.Thread(target=work, args=(job,)) for job in range(arguments.jobs)]
        for thread in jobs:
            thread.start()
        for thread in jobs:
            thread.join()
    print(markdown(rows))


def one(laboratory: Laboratory, number: int, seed: int, only: str | None, *, as_root: bool) -> dict[str, Any]:
    """A table row for the ``number``-th fault of a campaign, which is drawn again until it fires."""
    for attempt in range(10):
        numbers = random.Random(f"{seed}/{number}/{attempt}")
        name, setting = draw(numbers, as_root=as_root)
        while only is not None and name != only:
            name, setting = draw(numbers, as_root=as_root)
        began = time.monotonic()
        row = {"number": number, "attempt": attempt, "kind": name, "setting": str(setting)}
        try:
            folder = laboratory.folder / f"{number}-{attempt}"
            plan, outcome = laboratory.try_fault(KINDS[name], numbers, setting, folder)
        except ReferenceFailed:
            raise
        except Exception:
            failed = Outcome(problems=[f"the test itself failed: {traceback.format_exc()}"])
            return row | {"where": "?"} | asdict(failed)
        if outcome.fired or outcome.problems:
            break
    return row | {"where": plan.where} | asdict(outcome) | {"took": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    main()
