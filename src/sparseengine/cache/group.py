"""One cache group on the device: pools, side tensors, the table mirror, this step's tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.cache.memory import CacheBytes
from sparseengine.cache.plan import Geometry
from sparseengine.cache.pool import PagePool
from sparseengine.cache.rows import Draft, RowTable
from sparseengine.cache.tables import Index, Ints
from sparseengine.cache.tensors import (
    StaticStep,
    StepTensors,
    Tokens,
    build_step,
    divide,
    upload,
    upload_into,
)
from sparseengine.core.method import SealedPages
from sparseengine.core.specs import Per

_ARENA_ENTRIES = 4  # table entries per page of the pool that the device has room for at first
_FEW_RANGES = 4  # of changed tables that are copied to the device one by one


class GroupCache:
    """Storage of one group. SLOT aux [N, U, P, *], PAGE aux [N, U, *]; payload is the pool's.

    Nothing is initialised: pages hold garbage until written (NaN with `poison`, for tests, and
    again when they come free). Bundle 0 is the trash page.
    """

    def __init__(
        self,
        geo: Geometry,
        pool: PagePool,
        *,
        device: torch.device,
        poison: bool,
    ) -> None:
        self.geo, self.pool, self.device, self.poison = geo, pool, device, poison
        self.rows = RowTable(geo.rows, pool)
        self.payload = pool.payload
        n, u, p = pool.num_pages + 1, geo.units, geo.page_size
        self.rewritten = frozenset(a.name for a in geo.group.aux if a.rewritten)
        self.slot_aux = {
            a.name: torch.empty((n, u, p, *a.dims(geo.spec)), dtype=a.dtype, device=device)
            for a in geo.aux_of(Per.SLOT)
        }
        self.page_aux = {
            a.name: torch.empty((n, u, *a.dims(geo.spec)), dtype=a.dtype, device=device)
            for a in geo.aux_of(Per.PAGE)
        }
        # tests keep a second copy on the CPU, too, so that the updates a device needs are checked
        self.mirrored = poison or self.device.type != "cpu"
        self.mirror = torch.from_numpy(self.rows.tables.arena).to(device)
        self.arena_moves = 0  # a captured graph holds the mirror's address
        self.static: StaticStep | None = None
        self._step: StepTensors | None = None
        self._draft: Draft | None = None
        self._tokens: Tokens | None = None
        self._in_capture = False
        self._is_replayed = False  # a captured graph runs the committed step
        if poison:
            self.poison_pages(np.arange(n, dtype=np.int32))

    def sync_tables(self) -> None:
        """Bring the device copy of the tables up to date; on the CPU it is the host's memory."""
        replaced, ranges = self.rows.tables.take_stale()
        host = torch.from_numpy(self.rows.tables.arena)
        if not self.mirrored:
            self.mirror = host
        elif replaced:
            self._replace_mirror(host)
        elif len(ranges) <= _FEW_RANGES:
            for lo, hi in ranges:
                upload_into(self.mirror[lo:hi], self.rows.tables.arena[lo:hi])
        else:  # one upload instead of many small ones
            at = np.concatenate([np.arange(lo, hi) for lo, hi in ranges])
            self.mirror[self.upload(at)] = self.upload(self.rows.tables.arena[at])

    def _replace_mirror(self, host: Tensor) -> None:
        """Take over a new arena, in place when it fits beside the trash page's entry, the last."""
        if host.numel() >= self.mirror.numel():
            self._make_mirror(2 * host.numel())
        self.mirror[: host.numel()].copy_(host)

    def _make_mirror(self, entries: int) -> None:
        self.mirror = torch.zeros(entries + 1, dtype=torch.int32, device=self.device)
        self.arena_moves += 1

    def upload(self, array: Index | Ints) -> Tensor:
        return upload(array, self.device)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def commit(self, draft: Draft, tokens: Tokens) -> None:
        """Take the pages and bring tables and pages up to date; tensors follow in `current`."""
        delta = self.rows.commit(draft)
        self.sync_tables()
        if self.mirrored and delta.flat.size:
            self.mirror[self.upload(delta.flat)] = self.upload(delta.pages)
        if delta.src.size:
            self.copy_pages(delta.src, delta.dst)
        if self.page_aux and delta.num_new:
            fresh = self.upload(delta.new_pages).long()
            for aux in self.page_aux.values():
                aux[fresh] = aux.new_zeros(())
        self._draft, self._tokens, self._step = draft, tokens, None
        self._is_replayed = False

    def current(self) -> StepTensors:
        """This step's tensors; the first call builds them and zeroes the new side slots.

        A captured graph has zeroed and filled them itself.
        """
        if self._step is None:
            assert self._draft is not None, "reserve(plan) comes before write, view and layer_step"
            draft, tables = self._draft, self.rows.tables
            self._step = build_step(
                lens=self.upload(draft.new),
                host_lens=draft.new,
                arena=self.mirror,
                base=self.upload(tables.base[draft.slots]),
                width=self.upload(tables.width[draft.slots]),
                page_size=self.geo.page_size,
                columns=max(1, int((draft.have + draft.need).max(initial=0))),
                max_len=int(draft.new.max(initial=0)),
                tokens=self._tokens,
            )
            if not self._is_replayed:
                self._zero_slots(self._step.slots)
        return self._step

    def host_lens(self) -> Ints:
        """Row lengths [S, R] of this step, its tokens included."""
        if self._step is not None:
            return self._step.host_lens
        assert self._draft is not None, "reserve(plan) comes first"
        return self._draft.new

    def own(self, chunk: int) -> None:
        """The request of a chunk rewrites side slots: later steps copy pages that it shares."""
        if self._in_capture:
            return  # of no request; those that a replay serves have rewritten theirs before
        assert self._draft is not None, "reserve(plan) comes first"
        self.rows.rewriters.add(int(self._draft.slots[chunk]))

    def _zero_slots(self, slots: Tensor) -> None:
        if self.slot_aux:
            page, offset = divide(slots.reshape(-1), self.geo.page_size)
            for aux in self.slot_aux.values():
                aux[page, :, offset] = aux.new_zeros(())  # a number would be copied from the host

    def sealed(self, pages: Ints, rows: Index) -> SealedPages:
        """The report of newly full pages, each of a row."""
        return SealedPages(
            layers=self.geo.group.layers,
            spec=self.geo.spec,
            pages=self.upload(pages).long(),
            payload=self.payload,
            aux={**self.slot_aux, **self.page_aux},
            rows=rows,
        )

    # ── captured steps ───────────────────────────────────────────────────────────────────────────

    def make_static(self, max_rows: int) -> None:
        """Buffers for captured decode steps of up to `max_rows` requests."""
        self.static = StaticStep(max_rows, self.geo.rows, self.device)
        host = torch.from_numpy(self.rows.tables.arena)
        room = _ARENA_ENTRIES * self.pool.num_pages  # nearly always enough: its address is kept
        self._make_mirror(max(room, host.numel()))
        self.mirror[: host.numel()].copy_(host)

    def load_static(self, bucket: int) -> None:
        """Bring the step that `commit` prepared into the buffers, padded to `bucket` requests."""
        assert self.static is not None, "make_static comes first"
        assert self._draft is not None, "reserve(plan) comes first"
        draft, tables = self._draft, self.rows.tables
        trash = self.mirror.numel() - 1
        places = tables.base[draft.slots], tables.width[draft.slots]
        self.static.load(draft.new, *places, bucket, trash)
        self._is_replayed = True

    def clear_static(self, bucket: int) -> None:
        """One token of the trash page for every row."""
        assert self.static is not None, "make_static comes first"
        none, at = np.zeros((0, self.geo.rows), np.int32), np.zeros(0, np.int64)
        self.static.load(none, at, at, bucket, self.mirror.numel() - 1)

    def swap_step(self, step: StepTensors | None) -> StepTensors | None:
        """Make `step` the current one; returns the one before."""
        before, self._step, self._in_capture = self._step, step, False
        return before

    def longest(self) -> Ints:
        """int32 [S]: the longest row of each chunk of the committed step."""
        assert self._draft is not None, "reserve(plan) comes first"
        return np.asarray(self._draft.new.max(1, initial=0), np.int32)

    def use_static(self, bucket: int, max_len: int, host_len: int) -> None:
        """Make the buffers the current step, for a capture: what follows reads them.

        max_len: no row will be longer. host_len: the length that host code sees of every row.
        """
        assert self.static is not None, "make_static comes first"
        longest = max_len
        if self.geo.window is not None:
            longest = min(max_len, self.geo.window + self.geo.window_step)
        self._step = build_step(
            lens=self.static.lens[:bucket],
            host_lens=np.full((bucket, self.geo.rows), host_len, np.int32),
            arena=self.mirror,
            base=self.static.base[:bucket],
            width=self.static.width[:bucket],
            page_size=self.geo.page_size,
            columns=-(-longest // self.geo.page_size),
            max_len=longest,
            tokens=None,
        )
        self._in_capture = True
        self._zero_slots(self._step.slots)

    def copy_pages(self, src: Ints, dst: Ints) -> None:
        ops.copy_pages(self.all_pools, self.upload(src).long(), self.upload(dst).long())

    @property
    def all_pools(self) -> tuple[Tensor, ...]:
        return (*self.payload, *self.slot_aux.values(), *self.page_aux.values())

    @property
    def slot_pools(self) -> tuple[Tensor, ...]:
        """Pools whose entries move with their slots."""
        return (*self.payload, *self.slot_aux.values())

    # ── views of one layer ───────────────────────────────────────────────────────────────────────

    def layer_pools(self, layer: int) -> tuple[Tensor, ...]:
        units = self.geo.layer_units(layer)
        return tuple(pool[:, units] for pool in self.payload)

    def layer_aux(self, layer: int) -> dict[str, Tensor]:
        units = self.geo.layer_units(layer)
        both = {**self.slot_aux, **self.page_aux}
        return {name: pool[:, units] for name, pool in both.items()}

    # ── poison ───────────────────────────────────────────────────────────────────────────────────

    def poison_pages(self, pages: Ints) -> None:
        """Fill freed pages with NaN, so that a test sees any read of them."""
        if self.poison and pages.size:
            index = self.upload(pages).long()
            for pool in self.all_pools:
                pool[index] = _poison(pool.dtype)

    def poison_tails(self, slots: Index, rows: Index) -> None:
        """Fill the free slots of the rows' open pages, unless a sibling owns the page, too."""
        if not self.poison or slots.size == 0:
            return
        lens = self.rows.lens[slots, rows]
        opened = lens % self.geo.page_size > 0
        slots, rows, lens = slots[opened], rows[opened], lens[opened]
        tables = self.rows.tables
        page = tables.arena[tables.at(slots, rows, lens // self.geo.page_size)]
        own = self.pool.ref[page] == 1
        tail = np.arange(self.geo.page_size) >= (lens[own] % self.geo.page_size)[:, None]
        at, offset = np.nonzero(tail)
        index, off = self.upload(page[own][at]).long(), self.upload(offset)
        for pool in self.slot_pools:
            pool[index, :, off] = _poison(pool.dtype)

    # ── facts ────────────────────────────────────────────────────────────────────────────────────

    def bytes(self) -> CacheBytes:
        """Bytes of this group alone; payload and the pool's bookkeeping are the pool's."""
        r = self.rows
        device = self.mirror.nbytes if self.mirrored else 0
        aux = [*self.slot_aux.values(), *self.page_aux.values()]
        return CacheBytes(
            payload=0,
            aux=sum(t.nbytes for t in aux),
            tables=r.tables.arena.nbytes + r.lens.nbytes + r.sealed.nbytes + device,
        )

    def owned(self, slots: list[int]) -> Ints:
        """The page of every table entry in use of some requests."""
        return self.rows.tables.arena[self.rows.live_entries(slots)]

    def check(self, slots: list[int]) -> None:
        self.rows.check(slots)
        lens = self.rows.lens[slots]
        assert self.geo.window is None or (lens == lens[:, :1]).all(), (
            f"WINDOW layers {self.geo.group.layers} of a request differ in length"
        )
        self.sync_tables()
        live = self.rows.live_entries(slots)
        mirror, arena = self.mirror.cpu().numpy(), self.rows.tables.arena
        assert mirror.size >= arena.size, "the device tables are smaller"
        assert np.array_equal(mirror[live], arena[live]), "the device tables are out of date"


def _poison(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max
