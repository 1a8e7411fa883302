"""``Exchange``: interface of the optimizer's all-reduces, flat or hierarchical, in one bit or full precision."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from megatron01.comm.payload import CompressionNorms, ErrorPlace, Packed, Status


class Exchange(ABC):
    """The mean of a flat buffer over the replicas, bucket by bucket, so that communication and computation overlap.

    One exchange is::

        exchange.begin(key)
        for bucket, (first, last) in enumerate(exchange.buckets):
            exchange.compress(bucket, first, last, value)     # or in several ranges
            exchange.send(bucket, status)
        worst = exchange.reduce(stop_on_overflow=...)
        if worst does not call it off:                        # else errors are unchanged, value is undefined
            results, value = exchange.receive(value)

    All replicas call the same methods in the same order. ``value`` ([num_elements], fp32 or bf16 as the exchange was
    built for) is the same buffer in all calls of an exchange.

    Attributes:
        buckets: (first, last + 1) block of each bucket, in the order of the buffer. Their number changes no bit of the
            result.
    """

    buckets: list[tuple[int, int]]

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    @abstractmethod
    def begin(self, key: int = 0, *, watch: bool = False) -> None:
        """Start an exchange. ``key`` (64 bits, the same on all replicas) seeds its random draws, if it makes any.

        ``watch`` makes ``compression`` measure the quantization error.
        """

    @abstractmethod
    def compress(self, bucket: int, first: int, last: int, value: torch.Tensor) -> None:
        """Add the error of earlier exchanges to the blocks [first, last) of ``bucket`` and pack them.

        ``value`` becomes the new error there. Disjoint ranges of a bucket may come in any order.
        """

    @abstractmethod
    def send(self, bucket: int, status: Status | torch.Tensor) -> None:
        """Send a bucket, all of whose blocks are compressed, to the servers.

        ``status`` may still be on the device (fp32[]).
        """

    @abstractmethod
    def reduce(self, stop_on_overflow: bool) -> Status:
        """Wait for all buckets, reduce them as a server, and start to send the means back.

        Returns the most severe status of all replicas, the same on each. If that is OVERFLOW or more severe and
        ``stop_on_overflow`` is set, nothing has been reduced: the errors are unchanged, bit for bit.

        Raises:
            DamagedPayload: on a replica that has received other bytes than were sent; the errors have not changed.
        """

    @abstractmethod
    def receive(self, value: torch.Tensor) -> tuple[list[Packed] | None, torch.Tensor]:
        """Wait for the results, keep ``value``, which holds the new error, and return a buffer to use in its place.

        Returns:
            The results by bucket, to be decoded before the next ``begin``, and the buffer, whose content is stale. None
            and ``value``, where that holds the mean.

        Raises:
            DamagedPayload: if a result is damaged and checks are not late; the errors have not been swapped.
        """

    @abstractmethod
    def all_reduce(self, value: torch.Tensor, key: int = 0) -> None:
        """Replace ``value`` (fp32[num_elements]) by its mean over the replicas, the same bits on each."""

    # Error buffers; a lossless exchange has none.

    def state(self) -> dict[str, torch.Tensor]:
        """The error buffers by name. They may be written to between two exchanges, and are swapped in one."""
        return {}

    def error_places(self) -> dict[str, ErrorPlace]:
        """For each error buffer in ``state`` its place in the flat buffer."""
        return {}

    def set_errors(self, mean: torch.Tensor) -> None:
        """Set errors whose mean over the replicas is ``mean`` (fp32[num_elements], the same on all of them)."""
        assert not mean.any(), "there is no place for errors"

    def compression(self) -> list[CompressionNorms]:
        """Norms of the quantization error of a watched exchange, by bucket, after ``receive``. Empty if lossless."""
        return []
