"""Where sentences of a text begin, by its tokens alone: the same however it was chunked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence


class Sentences:
    """Sentences of one growing text.

    A sentence ends with a token of `ends` if it has `shortest` tokens by then, and with its
    `longest`-th token whatever that is. The last one is open.
    """

    __slots__ = ("_ends", "_longest", "_shortest", "scanned", "starts")

    def __init__(self, ends: Collection[int], shortest: int, longest: int) -> None:
        self.starts = [0]
        self.scanned = 0
        self._ends, self._shortest, self._longest = ends, shortest, longest

    @property
    def num_closed(self) -> int:
        return len(self.starts) - 1

    def extend(self, tokens: Sequence[int], stop: int) -> None:
        """Read on to position `stop`."""
        for position in range(self.scanned, stop):
            size = position + 1 - self.starts[-1]
            ends = tokens[position] in self._ends and size >= self._shortest
            if ends or size >= self._longest:
                self.starts.append(position + 1)
        self.scanned = max(self.scanned, stop)

    def at(self, position: int) -> int:
        """Index of the sentence that holds a position that was read."""
        return bisect_right(self.starts, position) - 1
