"""Digests of what was evicted: pseudo-tokens that stand for tokens no row holds any more.

Beside each row of a request that asked for them lies a digest row, in pages of the same pool:

    [ mean odd | mean odd | ... | token token token ]

The evicted tokens of a row are taken in the order of their eviction, then of their positions. Every
`TOKENS` of them become two entries: the one whose key is farthest from the mean of their keys, as
it is, and the mean key and value of the others, which stands for TOKENS - 1 tokens. Those that do
not fill a digest yet are kept as they are. So the content follows from which tokens were evicted
when, not from chunks or calls, and every weight from an entry's place in its row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparseengine.cache.compact import Compaction
from sparseengine.cache.group import GroupCache
from sparseengine.cache.pool import PagePool
from sparseengine.cache.rows import RowTable
from sparseengine.cache.tables import Index, Ints
from sparseengine.cache.tensors import upload
from sparseengine.core.specs import LayerKind
from sparseengine.core.view import Segment

TOKENS = 16
ENTRIES = 2
_SCRATCH = 1 << 24  # elements of evicted tokens that are looked at together


def digest_slots(dropped: int) -> int:
    """Slots of the digest row of a row that lost so many tokens."""
    return dropped // TOKENS * ENTRIES + dropped % TOKENS


def condense(keys: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Digests of groups of n tokens: [..., n, U, D] each -> [..., 2, U, D] each, mean then odd.

    Per unit U: odd is the token with the key farthest from the mean of the n keys, mean that of the
    other n - 1. Sums in fp32 (fp64 for fp64 inputs).
    """
    wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
    exact = keys.to(wide)
    distance = (exact - exact.mean(-3, keepdim=True)).square().sum(-1)  # [..., n, U]
    odd = distance.argmax(-2, keepdim=True)[..., None]  # [..., 1, U, 1]
    found = []
    for x in (keys, *values):
        other = x.to(wide)
        chosen = other.gather(-3, odd.expand(*odd.shape[:-1], x.shape[-1]))
        rest = (other.sum(-3, keepdim=True) - chosen) / (x.shape[-3] - 1)
        found.append(torch.cat([rest, chosen], -3).to(x.dtype))
    return tuple(found)


@dataclass(slots=True)
class _Rows:
    """Digest rows of one group. dropped int32 [S_cap, R]: tokens that each row has lost."""

    group: GroupCache
    table: RowTable
    dropped: Ints

    def grow_slots(self, capacity: int) -> None:
        self.table.grow_slots(capacity)
        self.dropped = np.pad(self.dropped, ((0, capacity - self.dropped.shape[0]), (0, 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """New entries of some rows (slots[i], rows[i]) from slot first[i] on: [m, n, U, D] each."""

    slots: Index
    rows: Index
    first: Index
    entries: tuple[Tensor, ...]


@dataclass(slots=True, kw_only=True)
class Fold:
    """What an eviction adds to the digest rows of a group; nothing is changed before `write`.

    slots, rows: the rows that lose lost[i] tokens. pages: that the pool must have beside those that
    the eviction frees.
    """

    into: _Rows
    source: Compaction
    picked: Index
    slots: Index
    rows: Index
    lost: Ints
    pages: int
    parts: list[_Part] = field(default_factory=list)

    @property
    def pool(self) -> PagePool:
        return self.into.table.pool

    def read(self) -> None:
        """Condense what is about to be evicted, while it is where it was."""
        tail = self.into.dropped[self.slots, self.rows] % TOKENS
        kinds, which = np.unique(np.stack([tail, self.lost]), axis=1, return_inverse=True)
        units = self.into.group.geo.units
        width = sum(p.shape[3] for p in self.pool.payload)
        for kind in range(kinds.shape[1]):
            some = np.flatnonzero(which.ravel() == kind)
            total = int(kinds[:, kind].sum())
            step = max(1, _SCRATCH // (total * units * width))
            for at in range(0, some.size, step):
                self.parts.append(self._read(some[at : at + step], int(kinds[0, kind])))

    def _read(self, some: Index, tail: int) -> _Part:
        """Rows whose tails, and whose numbers of lost tokens, are equal."""
        slots, rows = self.slots[some], self.rows[some]
        first = self.into.dropped[slots, rows] // TOKENS * ENTRIES
        page, offset = self._places(some, first, tail)
        closed = page.shape[1] // TOKENS * TOKENS
        pools = self.pool.payload
        units, width = pools[0].shape[1], sum(p.shape[3] for p in pools)
        step = max(1, _SCRATCH // (some.size * TOKENS * units * width)) * TOKENS
        found: list[tuple[Tensor, ...]] = []
        for at in range(0, closed, step):
            piece = slice(at, min(at + step, closed))
            tokens = [p[page[:, piece], :, offset[:, piece]] for p in pools]  # [m, n, U, D]
            digests = condense(*(x.reshape(some.size, -1, TOKENS, *x.shape[2:]) for x in tokens))
            found.append(tuple(x.flatten(1, 2) for x in digests))
        found.append(tuple(p[page[:, closed:], :, offset[:, closed:]] for p in pools))
        entries = tuple(torch.cat(each, 1) for each in zip(*found, strict=True))
        return _Part(slots=slots, rows=rows, first=first.astype(np.int64), entries=entries)

    def _places(self, some: Index, first: Ints, tail: int) -> tuple[Tensor, Tensor]:
        """(page, offset) int64 [m, tail + lost]: what waits in digest rows, then what is lost."""
        group, size = self.into.group, self.into.group.geo.page_size
        slots, rows, lost = self.slots[some], self.rows[some], int(self.lost[some[0]])
        mask = self.source.mask[_on(self.source.mask, self.picked[some])].to(group.device)
        lens = group.rows.lens[slots, rows]
        slot = torch.arange(mask.shape[1], device=group.device)
        dead = ~mask & (slot < group.upload(lens)[:, None])
        order = dead.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :lost]
        width = int(group.rows.held(lens).max())
        table = group.upload(group.rows.tables.block(slots, rows, width)).long()
        page, offset = table.gather(1, order // size), order % size
        if tail == 0:
            return page, offset
        waiting = first[:, None].astype(np.int64) + np.arange(tail)
        tables = self.into.table.tables
        at = tables.at(slots[:, None], rows[:, None], waiting // size)
        old = group.upload(tables.arena[at]).long()
        return torch.cat([old, page], 1), torch.cat([group.upload(waiting % size), offset], 1)

    def write(self) -> None:
        """Lengthen the digest rows and store the entries; what was evicted is gone by now."""
        into, group = self.into, self.into.group
        _resize(into, self.slots, self.rows, self.lost)
        size = group.geo.page_size
        tables = into.table.tables
        for part in self.parts:
            slot = part.first[:, None] + np.arange(part.entries[0].shape[1])
            page = tables.arena[tables.at(part.slots[:, None], part.rows[:, None], slot // size)]
            where = group.upload(page).long(), group.upload(slot % size)
            for pool, entry in zip(self.pool.payload, part.entries, strict=True):
                pool.transpose(1, 2)[where] = entry
        self.parts.clear()


def _on(mask: Tensor, index: Index) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index)).to(mask.device)


def _growth(into: _Rows, slots: Index, rows: Index, lost: Ints) -> tuple[Ints, Ints, Index, Index]:
    """(pages held, pages wanted, and row i, column of shared pages that are written)."""
    done = into.dropped[slots, rows]
    table = into.table
    have, want = table.held(table.lens[slots, rows]), table.held(_slots(done + lost))
    begin = done // TOKENS * ENTRIES // table.page_size
    count = np.maximum(np.minimum(have, want) - begin, 0)
    i = np.repeat(np.arange(slots.size), count)
    col = np.arange(i.size) - np.repeat(np.cumsum(count) - count - begin, count)
    page = table.tables.arena[table.tables.at(slots[i], rows[i], col)]
    shared = table.pool.must_copy(page)
    return have, want, i[shared], col[shared]


def _slots(dropped: Ints) -> Ints:
    return dropped // np.int32(TOKENS) * np.int32(ENTRIES) + dropped % np.int32(TOKENS)


def _resize(into: _Rows, slots: Index, rows: Index, lost: Ints) -> None:
    """Pages for rows that lost more tokens; shared ones that will be written are copied."""
    table, pool = into.table, into.table.pool
    tables = table.tables
    have, want, i, col = _growth(into, slots, rows, lost)
    wide = np.zeros(tables.width.size, np.int64)
    np.maximum.at(wide, slots, np.maximum(have, want))
    named = np.unique(slots)
    tables.fit(named, wide[named])
    entry = tables.at(slots[i], rows[i], col)
    shared, fresh = tables.arena[entry], pool.take(i.size)
    if i.size:
        into.group.copy_pages(shared, fresh)
        tables.arena[entry] = fresh
    more, fewer = np.maximum(want - have, 0), np.maximum(have - want, 0)
    j = np.repeat(np.arange(slots.size), more)
    at = np.arange(j.size) - np.repeat(np.cumsum(more) - more - have, more)
    tables.arena[tables.at(slots[j], rows[j], at)] = pool.take(j.size)
    j = np.repeat(np.arange(slots.size), fewer)
    at = np.arange(j.size) - np.repeat(np.cumsum(fewer) - fewer - want, fewer)
    freed = pool.drop(np.concatenate([shared, tables.arena[tables.at(slots[j], rows[j], at)]]))
    into.group.poison_pages(freed)
    into.dropped[slots, rows] += lost
    table.lens[slots, rows] = _slots(into.dropped[slots, rows])
    tables.take_stale()  # no device copy follows these tables


class Digests:
    """Digest rows of all groups. Empty, and without cost, until a request asks for some."""

    def __init__(self, groups: Sequence[GroupCache]) -> None:
        self._groups = [g for g in groups if g.geo.window is None]
        self._rows: list[_Rows] = []
        self._capacity = 0
        self._kept: set[int] = set()
        self._segments: dict[tuple[int, int], Segment | None] = {}

    def grow_slots(self, capacity: int) -> None:
        self._capacity = capacity
        for rows in self._rows:
            rows.grow_slots(capacity)

    def open(self, slot: int) -> None:
        """Keep digests of what the rows of this slot lose from now on."""
        if not self._rows:
            for g in self._groups:
                none = np.zeros((0, g.geo.rows), np.int32)
                self._rows.append(_Rows(g, RowTable(g.geo.rows, g.pool), none))
            self.grow_slots(self._capacity)
        self._kept.add(slot)

    def fork(self, source: int, slot: int) -> None:
        if source not in self._kept:
            return
        self._kept.add(slot)
        for rows in self._rows:
            rows.table.fork(source, slot)
            rows.table.tables.take_stale()
            rows.dropped[slot] = rows.dropped[source]

    def release(self, slot: int) -> None:
        if slot not in self._kept:
            return
        self._kept.discard(slot)
        for rows in self._rows:
            rows.group.poison_pages(rows.table.release(slot))
            rows.dropped[slot] = 0
        self._forget([slot])

    def draft(self, drafts: Iterable[tuple[GroupCache, Compaction]]) -> list[Fold]:
        """What these evictions add to the digests of requests that keep some."""
        if not self._kept:
            return []
        found = []
        of = {id(rows.group): rows for rows in self._rows}
        for group, c in drafts:
            picked = np.flatnonzero(np.isin(c.slots, sorted(self._kept)))
            if picked.size == 0 or id(group) not in of:
                continue
            into, slots, rows, kept = of[id(group)], c.slots[picked], c.rows[picked], c.kept[picked]
            old = group.rows.lens[slots, rows]
            lost = old - kept
            have, want, copies, _ = _growth(into, slots, rows, lost)
            pages = int(np.maximum(want - have, 0).sum()) + copies.size
            if not group.pool.any_shared:
                pages -= int((group.rows.held(old) - group.rows.held(kept)).sum())
            found.append(
                Fold(
                    into=into, source=c, picked=picked, slots=slots, rows=rows, lost=lost,
                    pages=max(0, pages),
                )
            )  # fmt: skip
            self._forget(np.unique(slots).tolist())
        return found

    def segment(self, slot: int, layer: int) -> Segment | None:
        """The digests of one request at one layer: [1, G, ...]; None where nothing was evicted."""
        key = slot, layer
        if slot in self._kept and key not in self._segments:
            self._segments[key] = self._build(slot, layer)
        return self._segments.get(key)

    def _build(self, slot: int, layer: int) -> Segment | None:
        rows = next((r for r in self._rows if layer in r.group.geo.group.layers), None)
        if rows is None:
            return None
        group, table = rows.group, rows.table
        span = group.geo.layer_rows(layer)
        lens, dropped = table.lens[slot, span], rows.dropped[slot, span]
        longest = int(lens.max(initial=0))
        if longest == 0:
            return None
        at = np.arange(span.start, span.stop)
        pages = table.tables.block(np.full_like(at, slot), at, int(table.held(lens).max()))
        place = np.arange(longest)
        is_mean = (place < (dropped // TOKENS * ENTRIES)[:, None]) & (place % ENTRIES == 0)
        bias = np.where(is_mean, math.log(TOKENS - 1), 0.0).astype(np.float32)
        return Segment(
            payload=tuple((pool,) for pool in group.layer_pools(layer)),
            codec=(),
            values_in_keys=group.geo.spec.kind is LayerKind.LATENT,
            table=group.upload(pages)[None],
            lens=group.upload(lens.copy())[None],
            page_size=group.geo.page_size,
            log_bias=upload(bias, group.device)[None],
        )

    def _forget(self, slots: Sequence[int]) -> None:
        gone = set(slots)
        for key in [k for k in self._segments if k[0] in gone]:
            del self._segments[key]

    # ── facts ────────────────────────────────────────────────────────────────────────────────────

    def pages(self, group: GroupCache, slot: int) -> int:
        """Bundles of a request's digest rows in one group."""
        if slot not in self._kept:
            return 0
        mine = (r for r in self._rows if r.group is group)
        return sum(int(r.table.held(r.table.lens[slot]).sum()) for r in mine)

    def pages_for(self, dropped: int) -> int:
        """Head pages when every row loses `dropped` tokens; an upper bound for rows that differ."""
        if dropped <= 0:
            return 0
        slots = dropped * ENTRIES // TOKENS + TOKENS - 1
        each = [(g.geo, -(-slots // g.geo.page_size) + 1) for g in self._groups]
        return sum(pages * geo.rows * geo.units for geo, pages in each)

    def owned(self, group: GroupCache, slots: list[int]) -> Ints:
        """The page of every digest table entry in use of some requests."""
        mine = [r for r in self._rows if r.group is group]
        found = [r.table.tables.arena[r.table.live_entries(slots)] for r in mine]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def bytes(self) -> int:
        """Of tables and lengths; the entries are in the pools' pages."""
        parts = [
            (r.table.tables.arena, r.table.lens, r.table.sealed, r.dropped) for r in self._rows
        ]
        return sum(t.nbytes for part in parts for t in part)

    def check(self, slots: list[int]) -> None:
        assert self._kept <= set(slots), "a released request still has digests"
        for r in self._rows:
            r.table.check(slots)
            assert (r.table.lens == _slots(r.dropped)).all(), "a digest row has the wrong length"
