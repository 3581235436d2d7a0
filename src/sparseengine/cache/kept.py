"""Rows kept for later requests: what a prefix cache shares.

A kept row is what a finished request leaves: its tokens, and for each group the pages that hold
them, of which it is one owner among others. A later prompt that begins with the same tokens takes
the pages over up to there; the first write into a page that others own copies it. Rows that
continue another replace it; those that branch off share the pages of what they have in common.

Nobody waits for what is kept: when a step lacks pages, the row used longest ago gives up its tail,
half of it at a time, and then goes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sparseengine.cache.group import GroupCache
from sparseengine.cache.sides import RequestSides
from sparseengine.cache.tables import Ints
from sparseengine.core.cache import PrefixHit
from sparseengine.core.plan import Miss
from sparseengine.core.specs import ModelSpec

MAX_ROWS = 1024  # compared with a prompt one by one
MAX_BYTES = 1 << 30  # of tokens and page lists, on the host
_MAX_GHOSTS = 64
_LEAST_CUT = 1024  # tokens; shorter rows go as a whole
_LOOK = 64  # tokens compared first: most rows differ early

States = Mapping[int, tuple[Tensor, ...]]


@dataclass(slots=True)
class _Part:
    """The rows of one group: lengths [R] and pages [R, W], anything past a row's end."""

    lens: Ints
    pages: Ints

    def owned(self, page_size: int) -> Ints:
        """The page of every entry in use."""
        held = -(-self.lens // np.int32(page_size))
        return np.asarray(self.pages[np.arange(self.pages.shape[1]) < held[:, None]])


@dataclass(slots=True)
class _Kept:
    """evicted: something was, so that only all of it is of use. was_cut: it gave up its tail."""

    tokens: Ints
    salt: str
    parts: list[_Part]
    states: States
    evicted: bool = False
    was_cut: bool = False

    @property
    def nbytes(self) -> int:
        """Host bytes of the tokens and the page lists."""
        return self.tokens.nbytes + sum(p.lens.nbytes + p.pages.nbytes for p in self.parts)


class KeptRows:
    """The kept rows of one cache, the one used longest ago first. Knows no method.

    step: prompts take over multiples of so many tokens. ends_only: rows cannot be cut back, for
    some layers have a window or a state.
    """

    def __init__(self, model: ModelSpec, groups: Sequence[GroupCache], sides: RequestSides) -> None:
        self._groups, self._sides = groups, sides
        self._rows: OrderedDict[int, _Kept] = OrderedDict()
        self._ghosts: deque[tuple[str, Ints]] = deque(maxlen=_MAX_GHOSTS)
        self._next_key = self._bytes = 0
        self.step = max((g.geo.page_size for g in groups), default=1)
        self.ends_only = len(model.kv_layers) < len(model.layers) or any(
            g.geo.window is not None for g in groups
        )

    def __len__(self) -> int:
        return len(self._rows)

    # ── finding ──────────────────────────────────────────────────────────────────────────────────

    def find(self, tokens: Sequence[int], salt: str, limit: int) -> PrefixHit:
        """The most of the first `limit` tokens that a row of this salt has, and why not more."""
        wanted = np.asarray(tokens[:limit], np.int32)
        best, source, longest, is_all = 0, None, 0, False
        for key, row in reversed(self._rows.items()):
            more = slice(best, best + (1 if self.ends_only or row.evicted else self.step))
            if row.salt != salt or (best and not _same(wanted[more], row.tokens[more], more)):
                continue  # most rows: it cannot have more of use than one that was used later
            common = _common(wanted, row.tokens)
            if common > longest:
                longest, is_all = common, common == row.tokens.size
            usable = self._usable(row, common)
            if usable > best:
                best, source = usable, key
        if source is not None:
            self._rows.move_to_end(source)
        if limit < self.step:
            return PrefixHit(miss=Miss("below_page"))
        if source is not None and self._rows[source].evicted:
            return PrefixHit(best, source, held=self._held(self._rows[source]))
        if best >= limit // self.step * self.step:
            return PrefixHit(best, source)
        gone = max((_common(wanted, t) for s, t in self._ghosts if s == salt), default=0)
        return PrefixHit(best, source, self._miss(limit, best, longest, gone, is_all=is_all))

    def _of(self, salt: str) -> Iterator[tuple[int, _Kept]]:
        return ((key, row) for key, row in self._rows.items() if row.salt == salt)

    def _usable(self, row: _Kept, common: int) -> int:
        """Tokens of a row that a prompt can begin with if so many are the same."""
        whole = common // self.step * self.step
        if not row.evicted and self._can_cut(row, whole):
            return whole
        return common if common == row.tokens.size else 0

    def _can_cut(self, row: _Kept, tokens: int) -> bool:
        """Whether the first `tokens` of a row are all there: windows and states have moved on."""
        gone = row.tokens.size - tokens
        if gone and row.states:
            return False
        for group, part in zip(self._groups, row.parts, strict=True):
            window = group.geo.window
            if window is not None and int(part.lens[0]) - gone < min(window - 1, tokens):
                return False
        return True

    def _miss(self, limit: int, best: int, longest: int, gone: int, *, is_all: bool) -> Miss | None:
        if gone // self.step * self.step > best and gone > longest:
            return Miss("evicted", gone)
        if not longest:
            return Miss("cold")
        if longest < self.step:
            return Miss("below_page", longest)
        if longest // self.step * self.step > best:
            return Miss("window", longest)
        return None if is_all else Miss("diverged", longest)

    # ── keeping ──────────────────────────────────────────────────────────────────────────────────

    def _held(self, row: _Kept) -> int:
        """Mean length of rows that an eviction has cut, each rounded up to pages."""
        plain = [
            (group, part)
            for group, part in zip(self._groups, row.parts, strict=True)
            if group.geo.window is None
        ]
        held = sum(p.owned(g.geo.page_size).size * g.geo.page_size * g.geo.units for g, p in plain)
        return -(-held // max(1, sum(p.lens.size * g.geo.units for g, p in plain)))

    def add(
        self,
        request_id: int,
        slot: int,
        stored: int,
        tokens: Sequence[int],
        salt: str,
        *,
        evicted: bool = False,
    ) -> None:
        """Keep a request's rows of `stored` tokens, cut back to `tokens`, the first of them.

        Nothing happens if they cannot be cut so, are less than a page, or something was evicted;
        with `evicted`, unless something was.
        """
        gone = stored - len(tokens)
        assert gone >= 0, f"request {request_id} holds {stored} tokens, not {len(tokens)}"
        wanted = np.asarray(tokens, np.int32)
        if wanted.size < self.step or not self._is_news(wanted, salt, evicted or self.ends_only):
            return
        states = self._sides.states_of(request_id)
        if gone and states:
            return
        parts = [_cut_part(group, slot, stored, gone) for group in self._groups]
        found = [part for part in parts if part is not None]
        is_whole = all(_is_intact(group, slot, stored) for group in self._groups)
        if len(found) < len(parts) or is_whole == evicted:
            return
        row = _Kept(wanted, salt, found, states, evicted)
        for group, part in zip(self._groups, found, strict=True):
            group.pool.keep(part.owned(group.geo.page_size))
        if not (self.ends_only or evicted):
            for key in [k for k, r in self._of(salt) if _begins(wanted, r.tokens)]:
                self._drop(key)
        self._rows[self._next_key] = row
        self._next_key += 1
        self._bytes += row.nbytes
        while len(self._rows) > MAX_ROWS or self._bytes > MAX_BYTES:
            self._evict(next(iter(self._rows)))

    def _is_news(self, tokens: Ints, salt: str, ends_only: bool) -> bool:
        """Whether no row has these tokens; one that has counts as used now."""
        for key, row in self._of(salt):
            same = row.tokens.size == tokens.size if ends_only else True
            if same and _begins(row.tokens, tokens):
                self._rows.move_to_end(key)
                return False
        return True

    def adopt(self, key: int, tokens: int, slot: int, request_id: int, *, copies: bool) -> None:
        """Give a request without rows the first `tokens` of a kept row; see `PrefixHit.copies`."""
        row = self._rows[key]
        gone = row.tokens.size - tokens
        for group, part in zip(self._groups, row.parts, strict=True):
            group.rows.adopt(slot, part.pages, part.lens - np.int32(gone), copies=copies)
        self._sides.adopt_states(request_id, row.states)

    # ── letting go ───────────────────────────────────────────────────────────────────────────────

    def give_up_some(self) -> bool:
        """Let go of the least recently used half row; False if nothing is kept."""
        if not self._rows:
            return False
        key, row = next(iter(self._rows.items()))
        half = row.tokens.size // 2 // self.step * self.step
        if row.tokens.size < _LEAST_CUT or self.ends_only or row.evicted:
            self._evict(key)
            return True
        if not row.was_cut:
            self._ghosts.append((row.salt, row.tokens))
        row.was_cut = True
        self._bytes -= row.nbytes
        for group, part in zip(self._groups, row.parts, strict=True):
            held = -(-half // group.geo.page_size)
            had = -(-int(part.lens[0]) // group.geo.page_size)
            self._release(group, part.pages[:, held:had].ravel())
            part.lens = np.full_like(part.lens, half)
            part.pages = part.pages[:, :held].copy()
        row.tokens = row.tokens[:half].copy()
        self._bytes += row.nbytes
        return True

    def forget(self, tokens: Sequence[int] | None, salt: str) -> None:
        """Let go of rows of a salt that begin with the same page; of all rows without tokens."""
        if tokens is None:
            keys = list(self._rows)
            self._ghosts.clear()
        else:
            wanted = np.asarray(tokens[: self.step], np.int32)
            is_page = wanted.size == self.step
            keys = [k for k, r in self._of(salt) if is_page and _begins(r.tokens, wanted)]
        for key in keys:
            self._drop(key)

    def _evict(self, key: int) -> None:
        row = self._rows[key]
        if not row.was_cut:
            self._ghosts.append((row.salt, row.tokens))
        self._drop(key)

    def _drop(self, key: int) -> None:
        row = self._rows.pop(key)
        self._bytes -= row.nbytes
        for group, part in zip(self._groups, row.parts, strict=True):
            self._release(group, part.owned(group.geo.page_size))

    @staticmethod
    def _release(group: GroupCache, pages: Ints) -> None:
        group.poison_pages(group.pool.unkeep(pages))

    # ── facts ────────────────────────────────────────────────────────────────────────────────────

    def bytes(self) -> int:
        """Host bytes of tokens and page lists."""
        return self._bytes

    def state_bytes(self) -> int:
        each = (t for row in self._rows.values() for s in row.states.values() for t in s)
        return sum(t.nbytes for t in each)

    def owned(self, group: GroupCache) -> Ints:
        """The page of every entry of a group's kept rows, for the cache's own checks."""
        assert self._bytes == sum(row.nbytes for row in self._rows.values()), "bytes are miscounted"
        at = self._groups.index(group)
        found = [row.parts[at].owned(group.geo.page_size) for row in self._rows.values()]
        return np.concatenate(found) if found else np.zeros(0, np.int32)


def _cut_part(group: GroupCache, slot: int, stored: int, gone: int) -> _Part | None:
    """A request's row in a group without its newest `gone` of `stored` tokens, if it is there."""
    lens, window = group.rows.lens[slot] - np.int32(gone), group.geo.window
    least = 0 if window is None else min(window - 1, stored - gone)
    if int(lens.min(initial=least)) < least:
        return None
    return _Part(lens, group.rows.first_pages(slot, lens))


def _is_intact(group: GroupCache, slot: int, stored: int) -> bool:
    """Whether a request's rows hold all that was run, but for what a window has left behind."""
    return group.geo.window is not None or bool((group.rows.lens[slot] == stored).all())


def _begins(a: Ints, b: Ints) -> bool:
    """Whether `a` begins with all of `b`, which is not empty."""
    size = b.size
    return size <= a.size and a[size - 1] == b[-1] and np.array_equal(a[:size], b)


def _same(a: Ints, b: Ints, cut: slice) -> bool:
    """Whether both have all of a cut, and the same."""
    return a.size == b.size == cut.stop - cut.start and bool((a == b).all())


def _common(a: Ints, b: Ints) -> int:
    """How many leading tokens are the same."""
    size = min(a.size, b.size)
    for stop in (min(size, _LOOK), size):
        differ = np.flatnonzero(a[:stop] != b[:stop])
        if differ.size:
            return int(differ[0])
    return size
