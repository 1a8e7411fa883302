"""Buckets that are sent during the backward pass: the GPU stream of each, with mocked streams."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from megatron01.optim import ZeroOneAdam, flat_parameters
from megatron01.optim.flat_parameters import FlatParameters, NamedParameter
from megatron01.optim.overlap import EarlyStart, Opened


class Stream:
    """Records which stream waits for which, and which work begins on it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def wait_stream(self, other: Stream) -> None:
        self._events.append(f"{self._name} waits for {other._name}")


def test_buckets_go_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EarlyStart, "_unused", weakref.WeakSet())  # of other tests
    events: list[str] = []
    current = [Stream("backward", events)]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setitem(flat_parameters._COPIED_TOGETHER, "cpu", 1 << 20)
    model = nn.Sequential(nn.Linear(32, 1), nn.Linear(1, 32))
    flat = FlatParameters([NamedParameter(name, p, 0) for name, p in model.named_parameters()], 32)
    early = EarlyStart(flat)
    monkeypatch.setattr(early, "_stream", Stream("exchange", events))
    buckets = [(0, 2), (2, flat.blocks.num_blocks)]

    def send(bucket: int) -> None:
        events.append(f"{bucket} on {current[-1]._name}")
        # copied before, on the stream that made them: else their memory would be used anew while it is read on another
        assert all(flat.tensors[i].grad is flat.gradient(i) for i in flat.parameters_in(buckets[bucket]))

    early.attach(model, lambda: Opened(buckets, send))
    model(torch.ones(1, 32)).sum().backward()
    early.join()
    sends = ["exchange waits for backward", "1 on exchange", "exchange waits for backward", "0 on exchange"]
    assert events == [*sends, "backward waits for exchange"]
    assert len(current) == 1


def test_contexts_in_which_nothing_is_sent_may_be_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EarlyStart, "_unused", weakref.WeakSet())  # of other tests
    model = nn.Linear(32, 1)
    flat = FlatParameters([NamedParameter(name, p, 0) for name, p in model.named_parameters()], 32)
    early, sent = EarlyStart(flat), list[int]()
    early.attach(model, lambda: Opened([(0, flat.blocks.num_blocks)], sent.append))
    with early.paused():
        with early.paused():
            model(torch.ones(1, 32)).sum().backward()
        model(torch.ones(1, 32)).sum().backward()
        assert sent == []
    model(torch.ones(1, 32)).sum().backward()
    assert sent == [0]


def test_state_is_read_once_the_checks_of_buckets_sent_early_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = ZeroOneAdam([nn.Parameter(torch.ones(32))], 0.1)
    found = torch.ones(1, dtype=torch.int32)  # which the stream of their exchange has yet to set to 0
    optimizer._topology.world.unread_checks.append(found)
    monkeypatch.setattr(optimizer._early, "join", found.zero_)
    optimizer.master_parameters()
