"""All-to-all and all-gather of rows on the host, one peer after the other, for links that are slower than software.

gloo's own all-to-all starts to send to every peer before that peer has posted its receive. Both use one connection, so
on a slow link the answer waits behind the data, and two peers send one after the other what they could send at once: up
to twice the time. Here all receives are posted before anything is sent, and in round k rank r sends to rank r + k while
it receives from rank r - k: at any time each link carries one row in each direction, and no receiver has several
senders. Small rows on fast links cost more this way, as Python starts each message. ``link_rate`` measures where that
matters, once for each group.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

_SMALLEST, _LARGEST = 1 << 15, 1 << 21  # bytes of the messages that are timed
_LONG_ENOUGH = 0.02  # seconds of a message beyond which the link's rate is known well
_REPETITIONS = 5  # the quickest counts: the others may have waited for a busy processor

# tags of messages over a group; those of the caller are small, 0 by default
_TAG_OF_TIMED = (1 << 16) - 1
_FIRST_TAG, _NUM_TAGS = 1 << 16, 1 << 16


class PairwiseRounds:
    """All-to-all and all-gather over a group of more than one process, for tensors on the host.

    All processes call them in the same order, also if several objects share a group. They progress in the background
    while the caller computes.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group = process_group
        self._rank, self._size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._links = _links_of(process_group)

    def start(self, received: torch.Tensor, sent: torch.Tensor) -> _Batch:
        """Row i of ``received`` (uint8[size, row_bytes]) comes from process i; row j of ``sent``, or its only row, goes
        to process j."""
        places, rank, size = received.view(self._size, -1), self._rank, self._size
        rows = sent.view(-1, places.size(1)).expand(size, -1)
        tag = self._links.next_tag()
        receiving = []
        for step in range(1, size):
            source = (rank - step) % size
            receiving.append(_started(dist.irecv(places[source], group=self._group, group_src=source, tag=tag)))
        peers = [(rank + step) % size for step in range(1, size)]
        batch = _Batch(self._group, receiving, [rows[peer] for peer in peers], peers, tag)
        if len(peers) == 1:
            batch.send_next()
            batch.finished.set()
        else:
            self._links.hand_over(batch)
        places[rank].copy_(rows[rank])
        return batch


def link_rate(process_group: dist.ProcessGroup | None) -> float:
    """Bytes per second of a message to the next rank while one from the previous rank arrives.

    Collective; returns the slowest rank's rate on all. The first call for a group measures: it takes some milliseconds,
    or the time of a few messages of 32 KB where that is longer.
    """
    links = _links_of(process_group)
    if links.rate is None:
        links.rate = _measured_rate(process_group)
    return links.rate


def _measured_rate(process_group: dist.ProcessGroup | None) -> float:
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    following, preceding = (rank + 1) % size, (rank - 1) % size
    num_bytes = _SMALLEST
    while True:
        place, row = torch.empty(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
        times = []
        for _ in range(_REPETITIONS):
            start = time.perf_counter()
            receiving = _started(dist.irecv(place, group=process_group, group_src=preceding, tag=_TAG_OF_TIMED))
            dist.send(row, group=process_group, group_dst=following, tag=_TAG_OF_TIMED)
            receiving.wait()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(min(times), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=process_group)
        seconds = float(slowest)
        if seconds > _LONG_ENOUGH or num_bytes >= _LARGEST:
            return num_bytes / seconds
        num_bytes *= 4


@dataclass
class _Batch:
    """``Work`` of one collective: the rows that it receives, and those that it sends, in this order.

    Attributes:
        finished: set when no more rows are to be started, or one could not be sent (see ``error``).
    """

    group: dist.ProcessGroup | None
    receiving: list[dist.Work]
    rows: Sequence[torch.Tensor]
    peers: Sequence[int]
    tag: int
    finished: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    last: dist.Work | None = None

    def send_next(self, number: int = 0) -> None:
        """Start to send a row."""
        row, peer = self.rows[number], self.peers[number]
        self.last = _started(dist.isend(row, group=self.group, group_dst=peer, tag=self.tag))

    def send_all(self) -> None:
        """Send each row when the one before has left."""
        try:
            for number in range(len(self.rows)):
                self.send_next(number)
                self.wait_for_last()
        except BaseException as error:
            self.error = error
        self.finished.set()

    def wait_for_last(self) -> None:
        if self.last is not None:
            self.last.wait()
            self.last = None

    def wait(self) -> None:
        # wait for the last to arrive first: the others are then complete, and this thread sleeps only once
        while self.receiving:
            self.receiving.pop().wait()
        self.finished.wait()
        if self.error is not None:
            raise self.error
        self.wait_for_last()


class _Links:
    """What all ``PairwiseRounds`` of one group share: message tags and the thread that sends.

    The thread ends when this object is garbage-collected.

    Attributes:
        rate: bytes per second (see ``link_rate``), the same on all processes; None until measured.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self._calls = 0
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._has_thread = False

    def next_tag(self) -> int:
        """The tag of the next collective: the same on all processes, as they call in the same order."""
        tag, self._calls = _FIRST_TAG + self._calls % _NUM_TAGS, self._calls + 1
        return tag

    def hand_over(self, batch: _Batch) -> None:
        """Queue a batch for the sender thread, which sends rows one after the other."""
        if not self._has_thread:
            self._has_thread = True
            thread = threading.Thread(target=_send, args=(self._batches,), name="megatron01-rounds", daemon=True)
            thread.start()
            weakref.finalize(self, self._batches.put, None)
        self._batches.put(batch)


# A tag may be used once at a time, and several optimizers may share a group, with a transport each. A process group
# takes no further attributes, so its links are kept here for as long as it lives.
_links: weakref.WeakKeyDictionary[dist.ProcessGroup, _Links] = weakref.WeakKeyDictionary()


def _links_of(process_group: dist.ProcessGroup | None) -> _Links:
    """The one object of a group. It holds no reference to the group, which that would keep alive."""
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None, "torch.distributed is not initialized"
    return _links.setdefault(group, _Links())


def _send(batches: queue.SimpleQueue[_Batch | None]) -> None:
    """Main loop of the sender thread; ends at None."""
    while (batch := batches.get()) is not None:
        batch.send_all()
        del batch  # releases the rows


def _started(work: Any) -> dist.Work:
    assert work is not None, "this process is no member of the group"
    return work  # type: ignore[no-any-return]
