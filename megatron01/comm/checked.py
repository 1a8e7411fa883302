"""A transport whose rows carry checksums, so that what arrives is what was sent or the job ends."""

from __future__ import annotations

import torch

from megatron01.comm.checksum import broken_rows, seal
from megatron01.comm.transport import Transport, Work


class DamagedPayload(RuntimeError):
    """Bytes that arrived are not those that were sent."""


class CheckedTransport:
    """``Transport`` by another one. Rows must begin with a header (``megatron01.comm.payload``).

    The processor reads every byte once more on each side, a small share of what making and using them takes.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, value: int) -> None:
        self._transport.bytes_sent = value

    @property
    def rounds(self) -> int:
        return self._transport.rounds

    @rounds.setter
    def rounds(self, value: int) -> None:
        self._transport.rounds = value

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        if self.size == 1:
            return self._transport.all_to_all(received, sent)
        seal(sent.view(self.size, -1))
        return self._checked(self._transport.all_to_all(received, sent), received)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        if self.size == 1:
            return self._transport.all_gather(received, sent)
        seal(sent.view(1, -1))
        return self._checked(self._transport.all_gather(received, sent), received)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._transport.broadcast(tensor)

    def count_round(self) -> None:
        self._transport.count_round()

    def _checked(self, work: Work, received: torch.Tensor) -> Work:
        return _CheckedWork(work, received.view(self.size, -1), self.rank)


class _CheckedWork:
    """A collective under way, whose rows are compared with their checksums when they are there."""

    def __init__(self, work: Work, received: torch.Tensor, rank: int) -> None:
        self._work = work
        self._received = received
        self._rank = rank

    def wait(self) -> None:
        """Wait and compare the rows. Called once.

        Raises:
            DamagedPayload: if a row is not what its sender sent.
        """
        self._work.wait()
        broken = broken_rows(self._received)
        if broken:
            raise DamagedPayload(
                f"what replica {self._rank} received from replicas {broken} (numbers within their exchange) is damaged:"
                " its checksum does not fit; check the memory and the network of these machines, and resume from the"
                " last checkpoint"
            )
