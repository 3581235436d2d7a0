"""Host state of one group's rows: lengths, page tables, reference counts, the free stack.

All numpy, all vectorised over rows: 320 requests x 192 rows are one array operation each. Requests
are addressed by a slot s < S_cap that the manager hands out; R rows each.

    lens   int32 [S_cap, R]          tokens in a row
    sealed int32 [S_cap, R]          leading full pages that were reported already
    tables PageTables                bundle ids; entries past a row's pages are stale, but in range

Bundles come from a pool, which groups of equal geometry share. Rows of a WINDOW group get shorter
at the front, too: all rows of a request alike, by whole pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparseengine.cache.pool import PagePool
from sparseengine.cache.tables import Index, Ints, PageTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a step would take from one group, computed before anything is changed.

    slots [S]; new, have, need [S, R]: lengths to be, pages held, pages to add. copy_*: [M] shared
    pages that must be copied before they are written: open ones, and all pages of `rewriters`.
    """

    slots: Index
    new: Ints
    have: Ints
    need: Ints
    copy_slot: Index
    copy_row: Index
    copy_col: Index
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
    """Rows of all requests of one group.

    rewriters: requests whose side slots were written after their step: they own all their pages.
    copying: requests that get pages of their own in their next step, once.
    """

    def __init__(self, rows: int, pool: PagePool) -> None:
        self.rows, self.page_size, self.pool = rows, pool.page_size, pool
        self.lens: Ints = np.zeros((0, rows), np.int32)
        self.sealed: Ints = np.zeros((0, rows), np.int32)
        self.tables = PageTables(rows)
        self.rewriters: set[int] = set()
        self.copying: set[int] = set()

    def held(self, lens: Ints) -> Ints:
        """Pages that rows of these lengths hold."""
        return -(-lens // np.int32(self.page_size))

    def grow_slots(self, capacity: int) -> None:
        pad = ((0, capacity - self.lens.shape[0]), (0, 0))
        self.lens, self.sealed = np.pad(self.lens, pad), np.pad(self.sealed, pad)
        self.tables.grow_slots(capacity)

    def trim(self, slot: int) -> None:
        """Give back table width that a request does not use any more."""
        self.tables.shrink(slot, int(self.held(self.lens[slot]).max(initial=0)))

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def draft(self, slots: Index, tokens: Ints) -> Draft:
        """Pages that `tokens` [S] more tokens per row would need. Changes nothing."""
        old = self.lens[slots]  # [S, R]
        new = old + tokens[:, None]
        have = self.held(old)
        need = self.held(new) - have
        s = r = col = np.zeros(0, np.int64)
        page = np.zeros(0, np.int32)
        if self.pool.any_shared:
            first = old // self.page_size  # the first page that is written: the open one
            owners = self.rewriters | self.copying
            if owners:
                first[[int(slot) in owners for slot in slots]] = 0
            count = np.where((tokens > 0)[:, None], have - first, 0).ravel()
            row = np.repeat(np.arange(count.size), count)
            col = np.arange(row.size) - np.repeat(np.cumsum(count) - count - first.ravel(), count)
            s, r = row // self.rows, row % self.rows
            page = self.tables.arena[self.tables.at(slots[s], r, col)]
            copy = self.pool.must_copy(page)
            s, r, col, page = s[copy], r[copy], col[copy], page[copy]
        return Draft(
            slots=slots,
            new=new,
            have=have,
            need=need,
            copy_slot=s,
            copy_row=r,
            copy_col=col,
            copy_page=page,
        )

    def commit(self, d: Draft) -> Delta:
        """Take the draft's pages and enter them into the tables."""
        self.tables.fit(d.slots, (d.have + d.need).max(1, initial=0))
        fresh = self.pool.take(d.pages)
        dst, rest = fresh[: d.copy_page.size], fresh[d.copy_page.size :]
        counts = d.need.ravel()
        grown = np.flatnonzero(counts)
        counts, base = counts[grown], d.have.ravel()[grown]
        row = np.repeat(grown, counts)
        ends = np.cumsum(counts)
        col = np.arange(rest.size) - np.repeat(ends - counts - base, counts)
        at = self.tables.at(d.slots[row // self.rows], row % self.rows, col)
        copy_at = self.tables.at(d.slots[d.copy_slot], d.copy_row, d.copy_col)
        flat = np.concatenate([copy_at, at])
        self.tables.arena[flat] = fresh
        freed = self.pool.drop(d.copy_page)
        assert freed.size == 0, "a shared page came free while it was copied"
        self.lens[d.slots] = d.new
        self.copying.difference_update(d.slots.tolist())
        return Delta(src=d.copy_page, dst=dst, flat=flat, pages=fresh, num_new=rest.size)

    # ── whole requests ───────────────────────────────────────────────────────────────────────────

    def pages_of(self, slot: int, first: Ints | None = None) -> Ints:
        """Pages of a request's rows, from column `first` [R] (default 0) on."""
        have = self.held(self.lens[slot])
        cols = np.arange(int(have.max(initial=0)), dtype=np.int32)
        live = cols < have[:, None]
        if first is not None:
            live &= cols >= first[:, None]
        row, col = np.nonzero(live)
        return np.asarray(self.tables.arena[self.tables.at(np.full_like(row, slot), row, col)])

    def fork(self, source: int, slot: int) -> None:
        pages = self.pages_of(source)
        self.lens[slot], self.sealed[slot] = self.lens[source], self.sealed[source]
        self.tables.copy(source, slot)
        self.pool.share(pages)
        if source in self.rewriters:
            self.rewriters.add(slot)
        if source in self.copying:
            self.copying.add(slot)

    def first_pages(self, slot: int, lens: Ints) -> Ints:
        """Pages [R, W] of the first `lens` [R] slots of a request's rows; anything behind them."""
        rows, cols = np.arange(self.rows), np.arange(int(self.held(lens).max(initial=0)))
        at = self.tables.at(np.full((self.rows, 1), slot), rows[:, None], cols)
        return np.asarray(self.tables.arena[at])

    def adopt(self, slot: int, pages: Ints, lens: Ints, *, copies: bool) -> None:
        """Let an empty request own the pages [R, W] of `lens` [R] slots, too.

        They count as not reported yet: whoever summarises them now need not have been there before.
        """
        held = self.held(lens)
        pages = pages[:, : int(held.max(initial=0))]
        self.tables.put(slot, pages)
        self.pool.share(pages[np.arange(pages.shape[1]) < held[:, None]])
        self.lens[slot] = lens
        if copies:
            self.copying.add(slot)

    def truncate(self, slot: int, tokens: int) -> Ints:
        """Remove the newest tokens of every row; returns the pages that came free."""
        new = self.lens[slot] - np.int32(tokens)
        assert (new >= 0).all(), (
            f"cannot remove {tokens} tokens from rows of {int(self.lens[slot].min())}"
        )
        freed = self.pool.drop(self.pages_of(slot, self.held(new)))
        self.lens[slot] = new
        self.sealed[slot] = np.minimum(self.sealed[slot], new // self.page_size)
        self.trim(slot)
        return freed

    def drop_leading(self, slots: Index, keep: int, step: int) -> Ints:
        """Cut rows at the front, down to `keep` tokens or up to `step` - 1 more; pages dropped.

        step: tokens, whole pages; rows get shorter by multiples of it. All rows of a request must
        have one length. Returns the pages that came free.
        """
        lens = self.lens[slots, 0]
        count = np.maximum(lens - keep, 0) // step * (step // self.page_size)  # pages [S]
        long = np.flatnonzero(count)
        if long.size == 0:
            return np.zeros(0, np.int32)
        held = self.held(lens)
        gone = [
            self.tables.shift(int(slots[i]), int(count[i]), int(held[i])) for i in long.tolist()
        ]
        at, count = slots[long], count[long, None]
        self.lens[at] -= count * np.int32(self.page_size)
        self.sealed[at] = np.maximum(self.sealed[at] - count, 0)
        wide = self.tables.loose(at, self.held(self.lens[at, 0]))
        for slot in wide.tolist():
            self.trim(slot)
        return self.pool.drop(np.concatenate(gone))

    def release(self, slot: int) -> Ints:
        freed = self.pool.drop(self.pages_of(slot))
        self.rewriters.discard(slot)
        self.copying.discard(slot)
        self.lens[slot] = 0
        self.sealed[slot] = 0
        self.tables.drop(slot)
        return freed

    # ── sealing ──────────────────────────────────────────────────────────────────────────────────

    def newly_full(self, slots: Index, *, list_pages: bool) -> tuple[Ints, Index]:
        """Mark full pages as sealed; those not reported before, each once, and their rows."""
        full = self.lens[slots] // np.int32(self.page_size)
        done = self.sealed[slots]
        self.sealed[slots] = full
        if not list_pages:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        counts = np.maximum(full - done, 0).ravel()
        grown = np.flatnonzero(counts)
        counts = counts[grown]
        row = np.repeat(grown, counts)
        first = done.ravel()[grown] - (np.cumsum(counts) - counts)
        col = np.arange(row.size) + np.repeat(first, counts)
        rows = row % self.rows
        pages = self.tables.arena[self.tables.at(slots[row // self.rows], rows, col)]
        if not self.pool.any_shared:
            return np.asarray(pages, np.int32), rows
        # shared pages are full in several requests at once, in the same row of each
        pages, first = np.unique(pages, return_index=True)
        return pages, rows[first]

    def live_entries(self, slots: list[int]) -> Index:
        """Flat index of every table entry in use of some requests."""
        chosen = np.array(slots, np.int64)
        counts = self.held(self.lens[chosen]).ravel()
        row = np.repeat(np.arange(counts.size), counts)
        col = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.tables.at(chosen[row // self.rows], row % self.rows, col)

    # ── invariants ───────────────────────────────────────────────────────────────────────────────

    def check(self, slots: list[int]) -> None:
        """Lengths and widths. Raises AssertionError that says what broke."""
        idle = np.ones(self.lens.shape[0], np.bool_)
        idle[slots] = False
        assert not self.lens[idle].any(), "a released request still has rows"
        lens, sealed = self.lens[slots], self.sealed[slots]
        assert (lens >= 0).all(), "a row has a negative length"
        assert (sealed <= lens // self.page_size).all(), "an open page counts as sealed"
        have = self.held(lens)
        assert (have.max(1, initial=0) <= self.tables.width[slots]).all(), "a table is too narrow"
