"""Faults put into one replica of a run, at a chosen call of a chosen part of the program."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import megatron01.checkpoint.save as saving
import megatron01.training.trainer as training
from megatron01.comm.transport import TorchTransport


class Place:
    """A function that a replica calls again and again: the owner and the name of it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name

    def before_call(self, number: int, action: Callable[..., None]) -> None:
        """Call ``action`` with the arguments right before the ``number``-th call, counted from 0."""
        function, calls = getattr(self.owner, self.name), iter(range(1 << 30))

        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                action(*args, **kwargs)
            return function(*args, **kwargs)

        setattr(self.owner, self.name, counted)


PLACES = {
    "in the backward pass": Place(torch.autograd, "backward"),
    "before an all-to-all": Place(TorchTransport, "all_to_all"),
    "before an all-gather": Place(TorchTransport, "all_gather"),
    "in the optimizer": Place(training.Trainer, "train_step"),
    "before tensors are saved": Place(saving, "_write_tensors"),
    "before a checkpoint gets its name": Place(saving, "publish"),
    "before the tracker file": Place(saving, "write_tracker"),
}


@dataclass(frozen=True)
class Fault:
    """What happens, where, at which call and on which replica.

    kinds: "killed" (SIGKILL), "stopped" (SIGSTOP: it hangs), "bit on the wire" and "bit in the weights" (flipped).
    """

    kind: str
    place: str
    call: int
    rank: int

    def inject(self) -> None:
        """Arm the fault in this process."""
        actions = {
            "killed": lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL),
            "stopped": lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP),
        }
        if self.kind == "bit on the wire":
            _flip_received(self.call)
        elif self.kind == "bit in the weights":
            Place(training.Trainer, "train_step").before_call(self.call, _flip_weight)
        else:
            PLACES[self.place].before_call(self.call, actions[self.kind])


def _flip_weight(trainer: Any, *_: Any) -> None:
    next(iter(trainer.optimizer.consensus_state().values())).view(torch.int32)[5] ^= 1 << 20


def _flip_received(call: int) -> None:
    """The ``call``-th all-to-all of this process brings a row with one bit that was not sent."""
    all_to_all, calls = TorchTransport.all_to_all, iter(range(1 << 30))

    class Flipping:
        def __init__(self, work: Any, received: torch.Tensor) -> None:
            self.work, self.received = work, received

        def wait(self) -> None:
            self.work.wait()
            self.received[-1, -5] ^= 4

    def flipping(self: Any, received: torch.Tensor, sent: torch.Tensor) -> Any:
        work = all_to_all(self, received, sent)
        return Flipping(work, received) if next(calls) == call else work

    TorchTransport.all_to_all = flipping  # type: ignore[method-assign]
