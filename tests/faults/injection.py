"""Fault injection into one replica of a run, at a chosen call of a chosen function."""

from __future__ import annotations

import builtins
import ctypes
import errno
import functools
import io
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron01.checkpoint import save as checkpoint_save
from megatron01.comm.transport import TorchTransport
from megatron01.monitor.writers import Recorder
from megatron01.parallel import peer_watch
from megatron01.training import data as training_data
from megatron01.training import trainer

# Injection points, which a replica calls repeatedly, or once at its start: owner and name of the function.
PLACES: dict[str, list[tuple[Any, str]]] = {
    "rendezvous": [(dist, "init_process_group")],
    "choosing a checkpoint": [(trainer, "choose_start")],
    "building the data": [(training_data, "build_in_order")],
    "loading the checkpoint": [(trainer.Trainer, "load")],
    "the backward pass": [(torch.autograd, "backward")],
    "an all-to-all": [(TorchTransport, "all_to_all")],
    "an all-gather": [(TorchTransport, "all_gather")],
    "a step": [(trainer.Trainer, "train_step")],
    "an evaluation": [(trainer.Trainer, "evaluate")],
    "writing a line": [(Recorder, "write")],
    "saving": [(checkpoint_save, "save_checkpoint")],
    "a flush to the disk": [(os, "fsync")],
    "a rename": [(os, "rename"), (os, "replace")],
}
WHEN = ("before", "inside", "after")


class Action(Protocol):
    """A fault; called with the arguments of the call at the injection point."""

    def __call__(self, *args: Any) -> None: ...


@dataclass(frozen=True)
class Kill:
    """SIGKILL to this process."""

    def __call__(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Stop:
    """SIGSTOP to this process; SIGCONT after some seconds, or never."""

    seconds: float | None

    def __call__(self, *_: Any) -> None:
        if self.seconds is not None:
            _run_later(self.seconds, ["kill", "-CONT", str(os.getpid())])
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Hang:
    """The thread blocks in a system call for ever, as on a lost file server; other threads continue."""

    def __call__(self, *_: Any) -> None:
        while True:
            ctypes.CDLL(None).sleep(3600)


@dataclass(frozen=True)
class Signal:
    """A signal to this process that asks it to stop early, as a scheduler or a user sends it."""

    number: signal.Signals

    def __call__(self, *_: Any) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True)
class KillLoader:
    """SIGKILL to this replica's data loader processes."""

    def __call__(self, *_: Any) -> None:
        import multiprocessing

        for child in multiprocessing.active_children():
            child.kill()


@dataclass(frozen=True)
class Run:
    """A command; and another one some seconds later, or never."""

    command: list[str]
    later: list[str] | None = None
    seconds: float = 0.0

    def __call__(self, *_: Any) -> None:
        if self.later is not None:
            _run_later(self.seconds, self.later)
        subprocess.run(self.command, check=True)


@dataclass(frozen=True)
class JumpClock:
    """This process's wall clock jumps by some seconds."""

    seconds: float

    def __call__(self, *_: Any) -> None:
        now, now_ns, ahead = time.time, time.time_ns, self.seconds
        time.time = lambda: now() + ahead
        time.time_ns = lambda: now_ns() + int(ahead * 1e9)


@dataclass(frozen=True)
class FillDisk:
    """A file fills a file system but for some bytes; ``FreeDisk`` deletes it."""

    file: Path
    left: int

    def __call__(self, *_: Any) -> None:
        status = os.statvfs(self.file.parent)
        with open(self.file, "wb") as file, suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - self.left))


@dataclass(frozen=True)
class FreeDisk:
    """Undoes ``FillDisk``."""

    file: Path

    def __call__(self, *_: Any) -> None:
        self.file.unlink(missing_ok=True)


@dataclass(frozen=True)
class BreakCalls:
    """A system call on files below a folder fails in this process, once or from now on, as on a broken disk."""

    name: str
    is_for_good: bool
    below: Path

    def __call__(self, *_: Any) -> None:
        is_over = threading.Event()

        def broken(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            is_open_file = self.name == "fsync"
            is_ours = is_open_file or any(str(path).startswith(str(self.below)) for path in args[:1])
            if is_over.is_set() or not is_ours:
                return original(*args, **kwargs)
            if not self.is_for_good:
                is_over.set()
            raise OSError(errno.EIO, "Input/output error", None if is_open_file else str(args[0]))

        # os.open, io.open and builtins.open; the last two are one function
        for owner in (os, io, builtins) if self.name == "open" else (os,):
            setattr(owner, self.name, functools.partial(broken, getattr(owner, self.name)))


@dataclass(frozen=True)
class Delete:
    """A folder is deleted."""

    folder: Path

    def __call__(self, *_: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class DamageData:
    """A token file is deleted, truncated, overwritten in place, or replaced by another of the same size."""

    file: Path
    how: str

    def __call__(self, *_: Any) -> None:
        content = self.file.read_bytes()
        backwards = b"".join(reversed([content[at : at + 2] for at in range(0, len(content), 2)]))  # tokens of 2 bytes
        if self.how == "vanishes":
            self.file.unlink()
        elif self.how == "is cut short":
            os.truncate(self.file, len(content) // 3)
        elif self.how == "is written over":
            with open(self.file, "r+b") as file:
                file.write(backwards)
        else:
            other = self.file.with_suffix(".new")
            other.write_bytes(backwards)
            os.replace(other, self.file)


@dataclass(frozen=True)
class FlipWeight:
    """Flips a bit of this replica's master weights or second moment; at "a step"."""

    name: str
    element: int
    bit: int

    def __call__(self, trainer: Any, *_: Any) -> None:
        optimizer = trainer.optimizer
        own = getattr(optimizer, "_local", None)  # replicated_state() is a collective
        state = optimizer.replicated_state() if own is None else {"x": own.x, "v": own.v if own.v.numel() else own.x}
        words = state.get(self.name, next(iter(state.values()))).view(-1).view(torch.int32)  # two elements each if bf16
        words[self.element % words.numel()] ^= _signed(1 << self.bit)


@dataclass(frozen=True)
class FlipReceived:
    """Flips a bit of the received payload; at "an all-to-all" or "an all-gather", after it."""

    position: int
    bit: int

    def __call__(self, received: torch.Tensor) -> None:
        content = received.view(-1).view(torch.uint8)
        content[self.position % content.numel()] ^= 1 << self.bit


@dataclass(frozen=True)
class Injection:
    """One action, at the ``call``-th call (from 0) of a place: before it, inside (after a delay in seconds), or after.

    Without a place, the delay counts from the start of the process. "After" a collective is after its ``wait``.
    """

    action: Any
    place: str | None = None
    call: int = 0
    when: str = "before"
    delay: float = 0.0

    def arm(self, fired: Path) -> None:
        """Install it in this process; it creates the file ``fired`` when it happens."""

        def act(*args: Any) -> None:
            fired.touch()
            self.action(*args)

        if self.place is None:
            _after(self.delay, act)
            return
        calls = itertools.count()
        for owner, name in PLACES[self.place]:
            setattr(owner, name, self._wrapped(getattr(owner, name), calls, act))

    def _wrapped(self, function: Callable[..., Any], calls: Iterator[int], act: Action) -> Callable[..., Any]:
        def at_call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) != self.call:
                return function(*args, **kwargs)
            if self.when == "before":
                act(*args)
            elif self.when == "inside":
                _after(self.delay, lambda: act(*args))
            result = function(*args, **kwargs)
            if self.when == "after":
                if self.place in ("an all-to-all", "an all-gather"):
                    return _Arriving(result, lambda: act(args[1]))
                act(*args)
            return result

        return at_call


@dataclass(frozen=True)
class WaitWithoutEnd:
    """Payload collectives do not fail when a peer is lost, but block for ever, as NCCL's do."""

    def arm(self, fired: Path) -> None:
        """Install it in this process, which then treats gloo like NCCL; ``fired`` is not created."""
        peer_watch.waits_without_end = lambda backend: True
        TorchTransport._start = self._wrapped(TorchTransport._start)  # type: ignore[method-assign]

    def _wrapped(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any) -> Any:
            try:
                return _Endless(start(*args))
            except RuntimeError:
                return Hang()()

        return started


@dataclass
class Counts:
    """Counts the calls at every injection point in this process."""

    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))

    def arm(self) -> None:
        """Start to count."""
        for place, functions in PLACES.items():
            for owner, name in functions:
                setattr(owner, name, self._counted(place, getattr(owner, name)))

    def _counted(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[place] += 1
            return function(*args, **kwargs)

        return counted


class _Endless:
    """A collective in flight whose ``wait`` blocks for ever where it would fail."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError:
            Hang()()


class _Arriving:
    """A collective in flight, with an action after its ``wait``."""

    def __init__(self, work: Any, action: Callable[[], None]) -> None:
        self._work, self._action = work, action

    def wait(self) -> None:
        self._work.wait()
        self._action()


def _after(seconds: float, action: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def _run_later(seconds: float, command: list[str]) -> None:
    subprocess.Popen(["sh", "-c", f'sleep {seconds}; exec "$@"', "sh", *command], start_new_session=True)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
