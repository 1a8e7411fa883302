"""Which blocks of a flat buffer one of several processes keeps, where none of them keeps the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron01.comm.error_places import ErrorPlace


@dataclass(frozen=True)
class OwnedBlocks:
    """The blocks that one of ``of`` processes keeps; together they keep every block once.

    Attributes:
        number: of this process among them.
        of: how many there are.
        total: blocks of the whole buffer.
        ranges: (first, last + 1) blocks of the whole buffer, ascending and not empty, in the order in which they lie in
            the process's own buffers.
    """

    number: int
    of: int
    total: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, total: int) -> OwnedBlocks:
        """All blocks, in one process's hands."""
        return cls(0, 1, total, ((0, total),))

    @property
    def num_blocks(self) -> int:
        """Blocks of the process's own buffers."""
        return sum(last - first for first, last in self.ranges)

    def common(self, other: OwnedBlocks) -> Iterator[tuple[int, int, int]]:
        """What both keep: the first block in the one's buffers, in the other's buffers, and the number of blocks."""
        mine, theirs = _placed(self.ranges), _placed(other.ranges)
        a, b = next(mine, None), next(theirs, None)
        while a is not None and b is not None:
            (first, last, place), (start, end, its_place) = a, b
            low, high = max(first, start), min(last, end)
            if high > low:
                yield place + low - first, its_place + low - start, high - low
            if last <= end:
                a = next(mine, None)
            else:
                b = next(theirs, None)

    def in_whole(self, place: ErrorPlace) -> ErrorPlace:
        """Where something that belongs to ranges of the process's own buffers belongs in the whole one.

        The mean is then over all processes, of which one in ``of`` keeps a block.
        """
        found = []
        for first, last in place.ranges:
            for start, end, own in _placed(self.ranges):
                low, high = max(first, own), min(last, own + end - start)
                if high > low:
                    found.append((start + low - own, start + high - own))
        return ErrorPlace(found, place.share * self.of)


def _placed(ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Each range, and the place of its first block in the process's own buffers."""
    place = 0
    for first, last in ranges:
        yield first, last, place
        place += last - first
