"""Host state of one group's rows: lengths, page tables, reference counts, the free stack.

All numpy, all vectorised over rows: 320 requests x 192 rows are one array operation each. Requests
are addressed by a slot s < S_cap that the manager hands out; R rows each.

    lens   int32 [S_cap, R]          tokens in a row
    sealed int32 [S_cap, R]          leading full pages that were reported already
    table  int32 [S_cap, R, W_cap]   bundle ids; entries past a row's pages are stale, but in range
    ref    int32 [N]                 owners of a bundle; bundle 0 is trash: never owned, never free
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Index = NDArray[np.int64]

TRASH = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a step would take from one group, computed before anything is changed.

    slots [S]; new, have, need [S, R]: lengths to be, pages held, pages to add. copy_*: [M] rows
    whose open page is shared and must be copied before it is written.
    """

    slots: Index
    new: Ints
    have: Ints
    need: Ints
    copy_slot: Index
    copy_row: Index
    copy_page: Ints

    @property
    def pages(self) -> int:
        return int(self.need.sum()) + self.copy_page.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a committed draft changed: copies to make, and table entries (flat index, bundle)."""

    src: Ints
    dst: Ints
    flat: Index
    pages: Ints
    num_new: int

    @property
    def new_pages(self) -> Ints:
        """Bundles that were empty until now (copies of open pages are not)."""
        return self.pages[self.pages.size - self.num_new :]


class RowTable:
    """Rows of all requests of one group. Tables grow by doubling with the pages in use."""

    def __init__(self, rows: int, page_size: int, num_pages: int) -> None:
        self.rows, self.page_size, self.num_pages = rows, page_size, num_pages
        self.lens: Ints = np.zeros((0, rows), np.int32)
        self.sealed: Ints = np.zeros((0, rows), np.int32)
        self.table: Ints = np.zeros((0, rows, 1), np.int32)
        self.ref: Ints = np.zeros(num_pages + 1, np.int32)
        self.free: Ints = np.arange(num_pages, 0, -1, dtype=np.int32)  # a stack, low ids on top
        self.num_free = num_pages
        self.num_refs = 0  # > pages in use exactly when some page is shared

    @property
    def any_shared(self) -> bool:
        return self.num_refs > self.num_pages - self.num_free

    def held(self, lens: Ints) -> Ints:
        """Pages that rows of these lengths hold."""
        return -(-lens // np.int32(self.page_size))

    # ── capacity of the host arrays ──────────────────────────────────────────────────────────────

    def grow_slots(self, capacity: int) -> None:
        more = capacity - self.lens.shape[0]
        if more > 0:
            pad = ((0, more), (0, 0))
            self.lens, self.sealed = np.pad(self.lens, pad), np.pad(self.sealed, pad)
            self.table = np.pad(self.table, (*pad, (0, 0)))

    def fit_width(self, used: int) -> bool:
        """Double or halve W_cap to fit `used` pages; True if the table was replaced."""
        width = self.table.shape[2]
        target = width
        while target < used:
            target *= 2
        while target > 4 * max(used, 1):
            target //= 2
        if target == width:
            return False
        fresh = np.zeros((*self.table.shape[:2], target), np.int32)
        keep = min(width, target)
        fresh[:, :, :keep] = self.table[:, :, :keep]
        self.table = fresh
        return True

    def max_held(self) -> int:
        return -(-int(self.lens.max(initial=0)) // self.page_size)

    # ── the page pool ────────────────────────────────────────────────────────────────────────────

    def take(self, count: int) -> Ints:
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} are free"
        self.num_free -= count
        pages = self.free[self.num_free : self.num_free + count][::-1].copy()
        self.ref[pages] = 1
        self.num_refs += count
        return pages

    def drop(self, pages: Ints) -> Ints:
        """Give up one reference to each listed page; returns those that came free."""
        shared = self.any_shared
        self.num_refs -= pages.size
        if shared:
            np.subtract.at(self.ref, pages, 1)
            freed = np.unique(pages[self.ref[pages] == 0])
        else:  # every page has one owner, so none is listed twice
            self.ref[pages] = 0
            freed = pages
        self.free[self.num_free : self.num_free + freed.size] = freed[::-1]
        self.num_free += freed.size
        return freed

    def must_copy(self, pages: Ints) -> NDArray[np.bool_]:
        """Which of these writers must copy their page first.

        All writers of a page that somebody else only reads; all but one when every owner writes.
        """
        if not self.any_shared:
            return np.zeros(pages.size, np.bool_)
        unique, first, counts = np.unique(pages, return_index=True, return_counts=True)
        copy = self.ref[pages] > 1
        copy[first[counts == self.ref[unique]]] = False
        return np.asarray(copy, np.bool_)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def draft(self, slots: Index, tokens: Ints) -> Draft:
        """Pages that `tokens` [S] more tokens per row would need. Changes nothing."""
        old = self.lens[slots]  # [S, R]
        new = old + tokens[:, None]
        have = self.held(old)
        need = self.held(new) - have
        s = r = np.zeros(0, np.int64)
        page = np.zeros(0, np.int32)
        if self.any_shared:
            s, r = np.nonzero((old % self.page_size > 0) & (tokens > 0)[:, None])
            page = self.table[slots[s], r, have[s, r] - 1]
            copy = self.must_copy(page)
            s, r, page = s[copy], r[copy], page[copy]
        return Draft(
            slots=slots, new=new, have=have, need=need, copy_slot=s, copy_row=r, copy_page=page
        )

    def commit(self, d: Draft) -> Delta:
        """Take the draft's pages. The table must be wide enough (`fit_width`) already."""
        width = self.table.shape[2]
        fresh = self.take(d.pages)
        dst, rest = fresh[: d.copy_page.size], fresh[d.copy_page.size :]
        counts = d.need.ravel()
        grown = np.flatnonzero(counts)
        counts, base = counts[grown], d.have.ravel()[grown]
        row = np.repeat(grown, counts)
        ends = np.cumsum(counts)
        col = np.arange(rest.size) - np.repeat(ends - counts - base, counts)
        at = (d.slots[row // self.rows] * self.rows + row % self.rows) * width + col
        open_col = d.have[d.copy_slot, d.copy_row] - 1
        open_at = (d.slots[d.copy_slot] * self.rows + d.copy_row) * width + open_col
        flat = np.concatenate([open_at, at]).astype(np.int64)
        self.table.reshape(-1)[flat] = fresh
        freed = self.drop(d.copy_page)
        assert freed.size == 0, "a shared page came free while it was copied"
        self.lens[d.slots] = d.new
        return Delta(src=d.copy_page, dst=dst, flat=flat, pages=fresh, num_new=rest.size)

    # ── whole requests ───────────────────────────────────────────────────────────────────────────

    def pages_of(self, slot: int, first: Ints | None = None) -> Ints:
        """Pages of a request's rows, from column `first` [R] (default 0) on."""
        have = self.held(self.lens[slot])
        cols = np.arange(int(have.max(initial=0)), dtype=np.int32)
        live = cols < have[:, None]
        if first is not None:
            live &= cols >= first[:, None]
        return np.asarray(self.table[slot, :, : cols.size][live])

    def fork(self, source: int, slot: int) -> None:
        pages = self.pages_of(source)
        self.lens[slot], self.sealed[slot] = self.lens[source], self.sealed[source]
        self.table[slot] = self.table[source]
        self.ref[pages] += 1
        self.num_refs += pages.size

    def truncate(self, slot: int, tokens: int) -> Ints:
        """Remove the newest tokens of every row; returns the pages that came free."""
        new = self.lens[slot] - np.int32(tokens)
        assert (new >= 0).all(), (
            f"cannot remove {tokens} tokens from rows of {int(self.lens[slot].min())}"
        )
        freed = self.drop(self.pages_of(slot, self.held(new)))
        self.lens[slot] = new
        self.sealed[slot] = np.minimum(self.sealed[slot], new // self.page_size)
        return freed

    def release(self, slot: int) -> Ints:
        freed = self.drop(self.pages_of(slot))
        self.lens[slot] = 0
        self.sealed[slot] = 0
        return freed

    # ── sealing ──────────────────────────────────────────────────────────────────────────────────

    def newly_full(self, slots: Index, *, list_pages: bool) -> tuple[Index, Ints]:
        """Mark full pages as sealed; (row of the request, page) of those not reported before."""
        full = self.lens[slots] // np.int32(self.page_size)
        done = self.sealed[slots]
        self.sealed[slots] = full
        if not list_pages:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        counts = np.maximum(full - done, 0).ravel()
        grown = np.flatnonzero(counts)
        counts = counts[grown]
        row = np.repeat(grown, counts)
        first = done.ravel()[grown] - (np.cumsum(counts) - counts)
        col = np.arange(row.size) + np.repeat(first, counts)
        pages = self.table[slots[row // self.rows], row % self.rows, col]
        rows = row % self.rows
        # shared pages are full in several requests at once: report each once per row
        _, once = np.unique(rows * (self.num_pages + 1) + pages, return_index=True)
        return rows[once], pages[once]

    # ── invariants ───────────────────────────────────────────────────────────────────────────────

    def check(self, slots: list[int]) -> None:
        """Conservation and ownership. Raises AssertionError that says what broke."""
        idle = np.ones(self.lens.shape[0], np.bool_)
        idle[slots] = False
        assert not self.lens[idle].any(), "a released request still has rows"
        lens, sealed = self.lens[slots], self.sealed[slots]
        assert (lens >= 0).all(), "a row has a negative length"
        assert (sealed <= lens // self.page_size).all(), "an open page counts as sealed"
        have = self.held(lens)
        assert int(have.max(initial=0)) <= self.table.shape[2], "a row is wider than its table"
        live = np.arange(self.table.shape[2]) < have[:, :, None]
        pages = self.table[slots][live]
        assert ((pages > TRASH) & (pages <= self.num_pages)).all(), (
            "a row holds a page out of range"
        )
        count = np.bincount(pages, minlength=self.num_pages + 1)
        wrong = np.flatnonzero(count != self.ref)
        assert wrong.size == 0, (
            f"page {wrong[:1]} has {self.ref[wrong[:1]]} references, {count[wrong[:1]]} owners"
        )
        assert self.num_refs == pages.size, f"{self.num_refs} references for {pages.size} entries"
        free = np.sort(self.free[: self.num_free])
        unowned = np.flatnonzero(self.ref[1:] == 0) + 1
        assert np.array_equal(free, unowned), (
            f"{free.size} pages are free, {unowned.size} are owned by nobody"
        )
