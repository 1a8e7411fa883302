"""The kinds of faults: how each is drawn, and what the run must do then."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron01.checkpoint.manifest import TRACKER_NAME, iteration_folder
from tests.faults import frameworks
from tests.faults.hosts import Hosts
from tests.faults.injection import (
    WHEN,
    BreakCalls,
    DamageData,
    Delete,
    FillDisk,
    FlipReceived,
    FlipWeight,
    FreeDisk,
    Injection,
    JumpClock,
    Kill,
    KillLoader,
    Run,
    Signal,
    Stop,
)
from tests.faults.references import Reference
from tests.faults.settings import SAVED_EVERY, STEPS, Setting

START_UP = ("rendezvous", "choosing a checkpoint", "building the data", "loading the checkpoint")
SAVING = ("saving", "a flush to the disk", "a rename")
TRAINING = ("the backward pass", "an all-to-all", "an all-gather", "a step", "an evaluation", "writing a line")
EXCHANGES = ("an all-to-all", "an all-gather")
SYSTEM_CALLS = ("fsync", "rename", "replace", "open", "mkdir", "unlink", "rmdir", "listdir", "scandir", "stat")
DAY = 86400.0


@dataclass
class Stage:
    """What a fault is drawn from: random numbers, the run's setting, and its folders and hosts."""

    numbers: random.Random
    setting: Setting
    reference: Reference | None  # None where another framework trains
    folder: Path
    corpus: Path
    hosts: Hosts | None = None

    @property
    def saved(self) -> Path:
        return self.folder / "saved"

    def rank(self) -> int:
        return self.numbers.randrange(self.setting.world_size)

    def trigger(self, rank: int, places: tuple[str, ...], *, when: tuple[str, ...] = WHEN) -> dict[str, Any]:
        """An injection point that this rank reaches, and which call; runs that load a checkpoint reach START_UP."""
        calls = self.reference.calls[rank]
        place = self.numbers.choice([place for place in places if calls[place] or place in START_UP])
        return {
            "place": place,
            "call": self.numbers.randrange(max(1, calls[place])),
            "when": self.numbers.choice(when),
            "delay": self.numbers.uniform(0.0, 0.02),
        }


@dataclass
class Plan:
    """A fault, and what a run must do.

    Attributes:
        where: a label for the table.
        injections: by rank.
        ends: whether the surviving ranks must exit with an error; if not, the run must complete.
        dead: ranks that are killed.
        stopped: ranks that are stopped (SIGSTOP), and get SIGCONT when the others have exited.
        killed_after: seconds after which all ranks are killed.
        launcher_killed_after: seconds after which the launcher alone is killed, without its ranks; the next attempt
            starts at once.
        again_after: seconds after which the same command is started again, while the first one runs.
        is_asked_to_stop: the run is to stop early by itself, with a checkpoint of the step that it has reached.
        framework: whose loop trains in place of this project's.
        starts_from: iteration of the checkpoint that the run resumes from; None: a new run.
        before: what happens to files before the run starts.
        mend: what is repaired before the next attempt.
        must_say: what the run must print, during the run or at its end.
        same_bits: the run, or its next attempt, must end bit-identical to one without a fault.
        changes: settings that differ from the reference's.
        may_vanish: rounding may hide the fault, or it may come after the last use of what it damages: if the run is
            bit-identical to one without it, there was nothing to notice.
    """

    where: str
    injections: dict[int, list[Injection]] = field(default_factory=dict)
    ends: bool = True
    dead: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    killed_after: float | None = None
    launcher_killed_after: float | None = None
    again_after: float | None = None
    is_asked_to_stop: bool = False
    framework: str | None = None
    starts_from: int | None = None
    before: Callable[[], object] = lambda: None
    mend: Callable[[], object] = lambda: None
    must_say: str | None = None
    same_bits: bool = True
    changes: dict[str, object] = field(default_factory=dict)
    may_vanish: bool = False


def killed(stage: Stage) -> Plan:
    """SIGKILL to one rank."""
    rank, phase = stage.rank(), stage.numbers.choice(["training"] * 3 + ["saving"] * 2 + ["starting"])
    trigger = stage.trigger(rank, {"training": TRAINING, "saving": SAVING, "starting": START_UP}[phase])
    starts_from = SAVED_EVERY if phase == "starting" else None
    where = f"{trigger['when']} {trigger['place']}"
    return Plan(where, {rank: [Injection(Kill(), **trigger)]}, dead={rank}, starts_from=starts_from)


def killed_at_any_moment(stage: Stage) -> Plan:
    """SIGKILL to one rank, after a time."""
    rank, delay = stage.rank(), stage.numbers.uniform(0.0, stage.reference.seconds)
    return Plan("one rank", {rank: [Injection(Kill(), delay=delay)]}, dead={rank})


def all_killed(stage: Stage) -> Plan:
    """SIGKILL to all ranks at once, after a time, as by a power failure or a preempted node."""
    after = stage.numbers.uniform(0.0, stage.reference.seconds)
    return Plan("all ranks", killed_after=after, dead=set(range(stage.setting.world_size)))


def killed_while_replacing(stage: Stage) -> Plan:
    """A run that repeats steps whose checkpoint exists, but is not in the tracker file, is killed at a rename."""
    trigger = stage.trigger(0, ("a rename",))
    plan = Plan(f"{trigger['when']} a rename", {0: [Injection(Kill(), **trigger)]}, dead={0}, starts_from=10)
    plan.before = lambda: (stage.saved / TRACKER_NAME).write_text(str(SAVED_EVERY))
    return plan


def stopped_for_a_moment(stage: Stage) -> Plan:
    """SIGSTOP and, well within the time-out, SIGCONT."""
    rank = stage.rank()
    trigger = stage.trigger(rank, TRAINING + SAVING)
    stop = Stop(stage.numbers.uniform(0.5, 2.0))
    return Plan(f"{trigger['when']} {trigger['place']}", {rank: [Injection(stop, **trigger)]}, ends=False)


def stopped_for_good(stage: Stage) -> Plan:
    """SIGSTOP: the others report the rank as lost; after SIGCONT it exits too."""
    rank = stage.rank()
    trigger = stage.trigger(rank, TRAINING + SAVING)
    return Plan(f"{trigger['when']} {trigger['place']}", {rank: [Injection(Stop(None), **trigger)]}, stopped={rank})


def bit_on_the_wire(stage: Stage) -> Plan:
    """A bit flip in a received payload, header and checksum included."""
    rank = stage.rank()
    trigger = stage.trigger(rank, EXCHANGES, when=("after",))
    flip = FlipReceived(stage.numbers.randrange(1 << 30), stage.numbers.randrange(8))
    return Plan(str(trigger["place"]), {rank: [Injection(flip, **trigger)]}, must_say="checksum")


def bit_in_the_weights(stage: Stage) -> Plan:
    """A bit flip in the master weights or the second moment of one replica."""
    rank = stage.rank()
    trigger = stage.trigger(rank, ("a step",), when=("before", "after"))
    name = stage.numbers.choice("xv")
    flip = FlipWeight(name, stage.numbers.randrange(1 << 30), stage.numbers.randrange(32))
    injections = {rank: [Injection(flip, **trigger)]}
    return Plan(f"{trigger['when']} a step", injections, must_say="differs from replica", may_vanish=True)


def bit_in_the_newest_checkpoint(stage: Stage) -> Plan:
    """A bit flip in a file of the newest checkpoint, between two attempts."""
    plan = Plan("newest", ends=False, starts_from=10, must_say="checkpoint 10 is skipped")
    plan.before = lambda: _flip(stage, stage.saved, 10)
    return plan


def bit_in_all_checkpoints(stage: Stage) -> Plan:
    """A bit flip in each checkpoint, between two attempts; later the files are restored."""
    plan = Plan("all", starts_from=10, must_say="no intact checkpoint")
    undo: list[Callable[[], object]] = []
    plan.before = lambda: undo.extend(_flip(stage, stage.saved, number) for number in (5, 10))
    plan.mend = lambda: [step() for step in undo]
    return plan


def tracker_lost(stage: Stage) -> Plan:
    """The tracker file is deleted, or one of its bits is flipped."""
    tracker = stage.saved / TRACKER_NAME
    if stage.numbers.random() < 0.5:
        return Plan("deleted", ends=False, starts_from=10, before=tracker.unlink, must_say="taking the newest")
    return Plan("a bit", ends=False, starts_from=10, before=lambda: _flip_file(stage.numbers, tracker))


def disk_full_while_saving(stage: Stage) -> Plan:
    """The checkpoints' file system is full, for a while or until the end of the run."""
    ballast, left = stage.folder / "disk" / "ballast", stage.numbers.choice([0, 1, 4, 16, 64, 128]) * 1024
    step = stage.numbers.randrange(1, STEPS)
    fill = Injection(FillDisk(ballast, left), "a step", step)
    if step <= 7 and stage.numbers.random() < 0.5:
        free = Injection(FreeDisk(ballast), "a step", 12)
        return Plan("for a while", {0: [fill, free]}, ends=False, must_say="WARNING: no checkpoint")
    plan = Plan("for good", {0: [fill]}, mend=FreeDisk(ballast), must_say="cannot be written")
    plan.may_vanish = True  # the space left may suffice for the remaining checkpoints
    return plan


def disk_full_while_logging(stage: Stage) -> Plan:
    """The metrics' file system is full; checkpoints are on another."""
    ballast = stage.folder / "disk" / "ballast"
    fill = Injection(FillDisk(ballast, 0), "a step", stage.numbers.randrange(1, 6))
    return Plan("metrics", {0: [fill]}, ends=False, must_say="WARNING")


def data_file_changed(stage: Stage) -> Plan:
    """A token file changes while the run reads it, or before the next start."""
    how = stage.numbers.choice(["vanishes", "is cut short", "is written over", "is replaced"])
    suffix = stage.numbers.choice([".bin", ".bin", ".idx"])
    path = stage.corpus / f"{stage.setting.model}{suffix}"
    content = path.read_bytes()
    damage = DamageData(path, how)
    changes: dict[str, object] = {"num_workers": stage.numbers.choice([0, 1])}

    def mend() -> None:
        path.write_bytes(content)

    if stage.numbers.random() < 0.5:
        rank = stage.rank()
        trigger = stage.trigger(rank, ("a step", "an evaluation"))
        harmless = how in ("vanishes", "is replaced")  # mapped files stay readable
        injections = {rank: [Injection(damage, **trigger)]}
        said = None if harmless else path.name
        where = f"{how} in training"
        return Plan(where, injections, not harmless, mend=mend, must_say=said, changes=changes, may_vanish=True)
    plan = Plan(
        f"{how} between attempts", starts_from=10, before=damage, mend=mend, must_say=path.name, changes=changes
    )
    if suffix == ".bin" and how in ("is written over", "is replaced"):  # another text, with the same lengths
        plan.ends, plan.same_bits, plan.must_say = False, False, "the order of the training samples"
    return plan


def disk_breaks(stage: Stage) -> Plan:
    """EIO from a system call in one rank, on any file of the run: once, or from then on."""
    rank, name = stage.rank(), stage.numbers.choice(SYSTEM_CALLS)
    rank = rank if name in ("fsync", "open", "stat", "mkdir") else 0  # only rank 0 uses the others on the run's files
    is_for_good = stage.numbers.random() < 0.5
    step = stage.numbers.randrange(1, STEPS - 1)
    broken = Injection(BreakCalls(name, is_for_good, stage.folder), "a step", step)
    often = "for good" if is_for_good else "once"
    return Plan(f"{name} {often}", {rank: [broken]}, must_say="Input/output error", may_vanish=True)


def run_folder_deleted(stage: Stage) -> Plan:
    """The metrics folder is deleted during the run: lines of metrics are lost, but training is bit-identical."""
    delete = Injection(Delete(stage.folder / "run"), "a step", stage.numbers.randrange(1, STEPS - 1))
    return Plan("metrics", {0: [delete]}, may_vanish=True)


def owned_by_the_dead(stage: Stage) -> Plan:
    """At the start there is the owner file of a dead process, and leftovers of every kind."""

    def before() -> None:
        entry = {"host": "gone", "pid": 2**22 - 1, "since": "2026", "boot": "other", "token": "x"}
        content = stage.numbers.choice([json.dumps(entry), "", "{", "[]"])
        (stage.saved / "owner.json").write_text(content)
        os.utime(stage.saved / "owner.json", (0, 0))
        for kind in ("incomplete", "removed", "replaced"):
            left = stage.saved / f"iter_{stage.numbers.choice([3, 5, 10, 14]):07d}.{kind}"
            if kind != "replaced":
                left.mkdir(exist_ok=True)
                (left / "half").write_text("half")

    return Plan("owner and left-overs", ends=False, starts_from=10, before=before)


def left_over_that_stays(stage: Stage) -> Plan:
    """A leftover of an earlier save that cannot be deleted, because a file system is mounted in it."""
    kind = stage.numbers.choice(["incomplete", "removed"])
    left = stage.saved / f"iter_{stage.numbers.choice([3, 5, 10]):07d}.{kind}"

    def before() -> None:
        (left / "held").mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(left / "held")], check=True)

    return Plan(
        kind, ends=False, starts_from=stage.numbers.choice([None, 5]), before=before, must_say="cannot be deleted"
    )


def asked_to_stop(stage: Stage) -> Plan:
    """A signal to stop early, to one rank or to all, between two saves or during one."""
    number = stage.numbers.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    rank = stage.rank()
    injection = Injection(Signal(number), **stage.trigger(rank, TRAINING + SAVING))
    where = f"{number.name}, {injection.place}"
    return Plan(where, {rank: [injection]}, ends=False, is_asked_to_stop=True, dead={rank})


def started_twice(stage: Stage) -> Plan:
    """The same command is started again while the first runs; in some cases a rank of the first is killed."""
    plan = killed(stage) if stage.numbers.random() < 0.5 else Plan("", ends=False)
    plan.where = "the first ends well" if not plan.dead else "a rank of the first is killed"
    plan.again_after = stage.numbers.uniform(0.0, stage.reference.seconds)
    return plan


def launcher_killed(stage: Stage) -> Plan:
    """SIGKILL to the launcher alone; the same command starts again while its ranks still run."""
    return Plan("at any moment", launcher_killed_after=stage.numbers.uniform(0.0, stage.reference.seconds))


def in_a_framework(stage: Stage) -> Plan:
    """A rank of a framework's run is killed, or a bit of a replica's state in its newest checkpoint is flipped."""
    name, rank = stage.numbers.choice(sorted(frameworks.LOOPS)), stage.numbers.randrange(2)
    how = stage.numbers.choice(["killed", "killed while saving", "a bit"])
    plan = Plan(f"{name}: {how}", framework=name)
    if how == "a bit":
        plan.before = lambda: _flip_file(
            stage.numbers, frameworks.newest(stage.folder) / (frameworks.STATE[name] % rank)
        )
    else:
        places = ("an all-to-all", "the backward pass") if how == "killed" else ("a rename",)
        place, when = stage.numbers.choice(places), stage.numbers.choice(WHEN)
        call = stage.numbers.randrange(4 if place == "a rename" else frameworks.STEPS)
        plan.dead = {rank}
        plan.injections = {rank: [Injection(Kill(), place, call, when, stage.numbers.uniform(0.0, 0.02))]}
    return plan


def clock_jumped(stage: Stage) -> Plan:
    """The wall clock of one rank jumps by days."""
    rank = stage.rank()
    days = stage.numbers.choice([-1000.0, -1.0, 1.0, 400.0])
    trigger = stage.trigger(rank, TRAINING + SAVING)
    where = "forwards" if days > 0 else "backwards"
    return Plan(where, {rank: [Injection(JumpClock(days * DAY), **trigger)]}, ends=False)


def loader_killed(stage: Stage) -> Plan:
    """SIGKILL to a data loader process, as by the kernel's out-of-memory killer."""
    rank = stage.rank()
    trigger = stage.trigger(rank, ("a step",))
    trigger["call"] = stage.numbers.randrange(1, STEPS - 5)  # while the loader is at work
    injection = Injection(KillLoader(), **trigger)
    return Plan(str(trigger["when"]), {rank: [injection]}, must_say="prepares batches", changes={"num_workers": 1})


def link_cut(stage: Stage) -> Plan:
    """The link of a host is cut, for good."""
    assert stage.hosts is not None
    rank, host = stage.rank(), stage.numbers.randrange(2)
    trigger = stage.trigger(rank, TRAINING + SAVING)
    cut = Run(stage.hosts.cut(host))
    return Plan("for good", {rank: [Injection(cut, **trigger)]}, mend=stage.hosts.mend)


def link_cut_for_a_moment(stage: Stage) -> Plan:
    """The link of a host is cut and, well within the time-out, restored."""
    assert stage.hosts is not None
    rank, host = stage.rank(), stage.numbers.randrange(2)
    trigger = stage.trigger(rank, TRAINING + SAVING)
    cut = Run(stage.hosts.cut(host), stage.hosts.plug_in(host), stage.numbers.uniform(0.3, 1.5))
    return Plan("for a moment", {rank: [Injection(cut, **trigger)]}, ends=False, mend=stage.hosts.mend)


def link_slow(stage: Stage) -> Plan:
    """The rate of a host is limited, so that an exchange takes a second instead of a millisecond."""
    assert stage.hosts is not None
    rank, host = stage.rank(), stage.numbers.randrange(2)
    trigger = stage.trigger(rank, TRAINING + SAVING)
    slow = Run(stage.hosts.slow_down(host, stage.numbers.choice([500, 2000])))
    return Plan("slow", {rank: [Injection(slow, **trigger)]}, ends=False, mend=stage.hosts.mend)


def _flip(stage: Stage, saved: Path, iteration: int) -> Callable[[], object]:
    files = sorted(iteration_folder(saved, iteration).iterdir())
    return _flip_file(stage.numbers, stage.numbers.choice(files))


def _flip_file(numbers: random.Random, path: Path) -> Callable[[], object]:
    """Flip one bit; returns a function that restores the file."""
    before = path.read_bytes()
    content = bytearray(before)
    content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    path.write_bytes(content)
    return lambda: path.write_bytes(before)


@dataclass(frozen=True)
class Kind:
    """A kind of fault: how often it is drawn, and what it needs."""

    weight: int
    draw: Callable[[Stage], Plan]
    nodes: int | None = None  # simulated hosts, one for each node
    small_disk: str | None = None  # the folder ("saved" or "run") on a small file system
    of_framework: bool = False  # another framework trains
    mounts: bool = False  # mounts file systems below the run's folder
    own_corpus: bool = False
    exchanges_bytes: bool = False  # not for adam, whose gradients DistributedDataParallel sends

    @property
    def needs_root(self) -> bool:
        return self.nodes is not None or self.small_disk is not None or self.mounts


KINDS = {
    "rank killed": Kind(30, killed),
    "rank killed at any moment": Kind(8, killed_at_any_moment),
    "all ranks killed": Kind(6, all_killed),
    "killed while a checkpoint is replaced": Kind(3, killed_while_replacing),
    "rank stopped for a moment": Kind(7, stopped_for_a_moment),
    "rank stopped for good": Kind(7, stopped_for_good),
    "bit on the wire": Kind(6, bit_on_the_wire, exchanges_bytes=True),
    "bit in the weights": Kind(5, bit_in_the_weights),
    "bit in a checkpoint": Kind(7, bit_in_the_newest_checkpoint),
    "bit in every checkpoint": Kind(3, bit_in_all_checkpoints),
    "tracker file": Kind(4, tracker_lost),
    "disk full while saving": Kind(6, disk_full_while_saving, small_disk="saved"),
    "disk full while logging": Kind(3, disk_full_while_logging, small_disk="run"),
    "data file": Kind(10, data_file_changed, own_corpus=True),
    "disk breaks": Kind(10, disk_breaks),
    "run folder deleted": Kind(3, run_folder_deleted),
    "dead owner and left-overs": Kind(4, owned_by_the_dead),
    "left-over that cannot be deleted": Kind(4, left_over_that_stays, mounts=True),
    "asked to stop": Kind(10, asked_to_stop),
    "started twice": Kind(6, started_twice),
    "launcher killed": Kind(6, launcher_killed),
    "in a framework's loop": Kind(8, in_a_framework, of_framework=True),
    "clock jumps": Kind(5, clock_jumped),
    "loader process killed": Kind(2, loader_killed),
    "link cut": Kind(4, link_cut, nodes=2),
    "link cut for a moment": Kind(4, link_cut_for_a_moment, nodes=2),
    "link slow": Kind(3, link_slow, nodes=2),
}
