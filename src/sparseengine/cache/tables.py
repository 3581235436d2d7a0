"""Page tables of all requests of one group, packed: memory follows the pages in use.

A request owns a segment of one int32 arena: R rows, each `width` entries wide (a power of two).

    arena  [ request 0: R x 8 | request 2: R x 128 ............. | request 1: R x 8 |   free   ]
             ^ base[0]          ^ base[2]                           ^ base[1]         ^ used

A 128k prompt beside short requests therefore costs its own table only, and a row that eviction has
shortened gets a narrower one. Segments are taken from the end; when it is reached, the live ones
are packed into a new arena of twice their size, so that the cost per entry is constant.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Index = NDArray[np.int64]

_SPARE = 2  # arena size over live entries after packing
_LOOSE = 4  # a segment or arena this many times wider than needed is cut back
_MIN_ENTRIES = 1024


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class PageTables:
    """Host tables, and a note of what a device copy of the arena has not seen yet."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.arena: Ints = np.zeros(1, np.int32)
        self.base: Index = np.zeros(0, np.int64)
        self.width: Index = np.zeros(0, np.int64)
        self._used = 0
        self._replaced = True
        self._stale: list[tuple[int, int]] = []

    def grow_slots(self, capacity: int) -> None:
        more = capacity - self.base.size
        self.base, self.width = np.pad(self.base, (0, more)), np.pad(self.width, (0, more))

    # ── reading and writing entries ──────────────────────────────────────────────────────────────

    def at(self, slots: Index, rows: Index, cols: Index | Ints) -> Index:
        """Flat arena index of entries; the arguments broadcast."""
        return np.asarray(self.base[slots] + rows * self.width[slots] + cols, np.int64)

    def block(self, slots: Index, rows: Index, width: int) -> Ints:
        """The first `width` columns of rows, [M, width]; past a table's own width, its last."""
        cols = np.minimum(np.arange(width), np.maximum(self.width[slots] - 1, 0)[:, None])
        return np.asarray(self.arena[self.at(slots[:, None], rows[:, None], cols)])

    def touch(self, slots: Iterable[int]) -> None:
        """Note that whole segments were rewritten."""
        for slot in slots:
            lo = int(self.base[slot])
            self._stale.append((lo, lo + self.rows * int(self.width[slot])))

    def take_stale(self) -> tuple[bool, list[tuple[int, int]]]:
        """(the arena is a new one, else ranges that changed) since the last call."""
        out = self._replaced, self._stale
        self._replaced, self._stale = False, []
        return out

    # ── widths ───────────────────────────────────────────────────────────────────────────────────

    def fit(self, slots: Index, used: Index | Ints) -> None:
        """Make the tables of `slots` at least `used` [S] columns wide."""
        narrow = np.flatnonzero(self.width[slots] < used)
        if narrow.size == 0:
            return
        wanted = {int(slots[i]): _power_of_two(int(used[i])) for i in narrow}
        need = self.rows * sum(wanted.values())
        if self._used + need > self.arena.size:
            self._pack(wanted)
            return
        for slot, width in wanted.items():
            at, self._used = self._used, self._used + self.rows * width
            self._move(self.arena, slot, at, width)
            self.touch([slot])

    def shrink(self, slot: int, used: int) -> None:
        """Cut a table back to what it needs, when that is much less than it has."""
        if self.width[slot] >= _LOOSE * max(used, 1):
            self._move(self.arena, slot, int(self.base[slot]), _power_of_two(used))
            self.touch([slot])
            self._pack_if_loose()

    def loose(self, slots: Index, used: Index | Ints) -> Index:
        """Those of `slots` that `shrink` to `used` [S] columns would cut back."""
        return slots[self.width[slots] >= _LOOSE * np.maximum(used, 1)]

    def shift(self, slot: int, count: int, used: int) -> Ints:
        """Move columns count..used of every row to the front; returns the entries before them."""
        segment = self._segment(slot)
        gone = segment[:, :count].flatten()
        segment[:, : used - count] = segment[:, count:used]
        self.touch([slot])
        return gone

    def drop(self, slot: int) -> None:
        self.base[slot] = self.width[slot] = 0
        self._pack_if_loose()

    def copy(self, source: int, slot: int) -> None:
        width = int(self.width[source])
        if width:
            self.fit(np.array([slot]), np.array([width]))
            self._segment(slot)[:] = self._segment(source)

    def put(self, slot: int, pages: Ints) -> None:
        """Write the first columns [R, W] of a request's table."""
        self.fit(np.array([slot]), np.array([pages.shape[1]]))
        self._segment(slot)[:, : pages.shape[1]] = pages
        self.touch([slot])

    def _segment(self, slot: int) -> Ints:
        lo, width = int(self.base[slot]), int(self.width[slot])
        return self.arena[lo : lo + self.rows * width].reshape(self.rows, width)

    def _move(self, to: Ints, slot: int, at: int, width: int) -> None:
        """Lay a request's table out anew at `at` in arena `to` with another width."""
        keep = min(int(self.width[slot]), width)
        old = self._segment(slot)[:, :keep].copy()
        fresh = to[at : at + self.rows * width].reshape(self.rows, width)
        fresh[:, :keep] = old
        fresh[:, keep:] = 0
        self.base[slot], self.width[slot] = at, width

    def _pack_if_loose(self) -> None:
        live = self.rows * int(self.width.sum())
        if self.arena.size > max(_LOOSE * _SPARE * live, _MIN_ENTRIES):
            self._pack({})

    def _pack(self, wanted: dict[int, int]) -> None:
        """Move every live table, at its wanted or present width, into a new arena."""
        widths = {int(s): int(self.width[s]) for s in np.flatnonzero(self.width)} | wanted
        total = self.rows * sum(widths.values())
        fresh = np.zeros(max(_SPARE * total, 1), np.int32)
        at = 0
        for slot, width in widths.items():
            self._move(fresh, slot, at, width)
            at += self.rows * width
        self.arena, self._used = fresh, at
        self._replaced, self._stale = True, []
