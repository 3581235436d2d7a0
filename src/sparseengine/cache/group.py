"""One cache group on the device: pools, side tensors, the table mirror, this step's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.cache.memory import CacheBytes
from sparseengine.cache.plan import Geometry
from sparseengine.cache.pool import PagePool
from sparseengine.cache.rows import Delta, Draft, RowTable
from sparseengine.cache.tables import Index, Ints
from sparseengine.core.specs import Per

# Table entries of one step that are gathered at once; more are gathered layer by layer, since a
# long prompt beside many short requests would make the padded table of all layers large.
_EAGER_ENTRIES = 1 << 24
_FEW_RANGES = 4  # of changed tables that are copied to the device one by one


@dataclass(slots=True, kw_only=True)
class StepTensors:
    """What one step needs of one group; per-layer views are slices of these.

    lens int32 [S, R], this step's tokens included; slots int64 [R, T] flat slot (page * P + offset)
    of each new token; host_lens is `lens` on the host. arena, base, width: the packed tables and
    where each chunk's is (see cache/tables.py); columns: W of the padded table; max_len: the
    longest row, a host fact.
    """

    lens: Tensor
    slots: Tensor
    host_lens: Ints
    arena: Tensor
    base: Tensor  # int64 [S]
    width: Tensor  # int64 [S]
    columns: int
    max_len: int
    whole: Tensor | None = None  # int32 [S, R, W]
    last: tuple[slice, Tensor] | None = None

    def table(self, rows: slice) -> Tensor:
        """int32 [S, G, W] page ids of some rows of every chunk, padded with ids in range."""
        if self.whole is not None:
            return self.whole[:, rows]
        if self.last is None or self.last[0] != rows:
            self.last = rows, self.gather(rows)
        return self.last[1]

    def gather(self, rows: slice) -> Tensor:
        device = self.base.device
        row = torch.arange(rows.start, rows.stop, device=device)
        end = (self.width - 1).clamp_min(0)[:, None]
        column = torch.minimum(torch.arange(self.columns, device=device), end)  # [S, W]
        start = self.base[:, None] + row * self.width[:, None]  # [S, G]
        return self.arena[start[:, :, None] + column[:, None]]


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
        self.step: StepTensors | None = None
        if poison:
            self.poison_pages(np.arange(n, dtype=np.int32))

    def sync_tables(self) -> None:
        """Bring the device copy of the tables up to date; on the CPU it is the host's memory."""
        replaced, ranges = self.rows.tables.take_stale()
        host = torch.from_numpy(self.rows.tables.arena)
        if not self.mirrored:
            self.mirror = host
        elif replaced:
            self.mirror = host.to(self.device, copy=True)
        elif len(ranges) <= _FEW_RANGES:
            for lo, hi in ranges:
                self.mirror[lo:hi].copy_(host[lo:hi])
        else:  # one upload instead of many small ones
            at = np.concatenate([np.arange(lo, hi) for lo, hi in ranges])
            self.mirror[self.upload(at)] = self.upload(self.rows.tables.arena[at])

    def upload(self, array: Index | Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def commit(self, draft: Draft, tokens: Index, owner: Tensor, offset: Tensor) -> None:
        """Take the pages, copy shared open pages, build the step's tensors, zero new side slots.

        owner, offset: int64 [T] on the device: the chunk of each token and its index in the chunk.
        """
        delta = self.rows.commit(draft)
        self.sync_tables()
        if self.mirrored and delta.flat.size:
            self.mirror[self.upload(delta.flat)] = self.upload(delta.pages)
        if delta.src.size:
            self.copy_pages(delta.src, delta.dst)
        p, tables = self.geo.page_size, self.rows.tables
        base = self.upload(tables.base[draft.slots])
        width = self.upload(tables.width[draft.slots])
        start = self.upload(draft.new - tokens[:, None].astype(np.int32))  # [S, R]
        position = (start[owner] + offset[:, None]).T  # [R, T]
        column, place = _divmod(position, p)
        row = torch.arange(self.geo.rows, device=self.device)[:, None]
        page = self.mirror[base[owner] + row * width[owner] + column]
        slots = page.long() * p + place
        self.step = StepTensors(
            lens=self.upload(draft.new),
            slots=slots,
            host_lens=draft.new,
            arena=self.mirror,
            base=base,
            width=width,
            columns=max(1, int((draft.have + draft.need).max(initial=0))),
            max_len=int(draft.new.max(initial=0)),
        )
        if draft.new.size * self.step.columns <= _EAGER_ENTRIES:
            self.step.whole = self.step.gather(slice(0, self.geo.rows))
        self._zero_aux(delta, slots)

    def _zero_aux(self, delta: Delta, slots: Tensor) -> None:
        if self.slot_aux:
            page, offset = _divmod(slots.view(-1), self.geo.page_size)
            for aux in self.slot_aux.values():
                aux[page, :, offset] = 0
        if self.page_aux and delta.num_new:
            fresh = self.upload(delta.new_pages).long()
            for aux in self.page_aux.values():
                aux[fresh] = 0

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

    def current(self) -> StepTensors:
        assert self.step is not None, "reserve(plan) comes before write, view and layer_step"
        return self.step

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
        assert mirror.shape == arena.shape, "the device tables have another size"
        assert np.array_equal(mirror[live], arena[live]), "the device tables are out of date"


def _divmod(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(index // size, index % size), by bits where size is a power of two."""
    if size & (size - 1) == 0:
        return index >> (size.bit_length() - 1), index & (size - 1)
    return index // size, index % size


def _poison(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max
