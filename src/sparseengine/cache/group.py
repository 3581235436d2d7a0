"""One cache group on the device: pools, side tensors, the table mirror, this step's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.cache.memory import CacheBytes
from sparseengine.cache.plan import Geometry
from sparseengine.cache.rows import Delta, Draft, Index, Ints, RowTable
from sparseengine.core.specs import Per


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What one step needs of one group; per-layer views are slices of these.

    table int32 [S, R, W]; lens int32 [S, R], this step's tokens included; slots int64 [R, T] flat
    slot (page * P + offset) of each new token; host_lens is `lens` on the host.
    """

    table: Tensor
    lens: Tensor
    slots: Tensor
    host_lens: Ints

    @property
    def max_len(self) -> int:
        return int(self.host_lens.max(initial=0))


class GroupCache:
    """Storage of one group. Payload pools [N, U, P, D]; SLOT aux [N, U, P, *]; PAGE aux [N, U, *].

    Nothing is initialised: pages hold garbage until written (NaN with `poison`, for tests, and
    again when they come free). Bundle 0 is the trash page.
    """

    def __init__(
        self,
        geo: Geometry,
        num_pages: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        poison: bool,
    ) -> None:
        self.geo, self.device, self.poison = geo, device, poison
        self.rows = RowTable(geo.rows, geo.page_size, num_pages)
        n, u, p = num_pages + 1, geo.units, geo.page_size
        self.payload = tuple(
            torch.empty((n, u, p, d), dtype=dtype, device=device) for d in geo.spec.stored_dims
        )
        self.slot_aux = {
            a.name: torch.empty((n, u, p, *a.dims(geo.spec)), dtype=a.dtype, device=device)
            for a in geo.aux_of(Per.SLOT)
        }
        self.page_aux = {
            a.name: torch.empty((n, u, *a.dims(geo.spec)), dtype=a.dtype, device=device)
            for a in geo.aux_of(Per.PAGE)
        }
        self.mirror = self._mirror()
        self.step: StepTensors | None = None
        if poison:
            self.poison_pages(np.arange(n, dtype=np.int32))

    # ── device mirror of the table ───────────────────────────────────────────────────────────────

    def _mirror(self) -> Tensor:
        """On the CPU the host table itself; on a device a copy that deltas keep equal."""
        host = torch.from_numpy(self.rows.table)
        return host if self.device.type == "cpu" else host.to(self.device)

    def grow_slots(self, capacity: int) -> None:
        self.rows.grow_slots(capacity)
        self.mirror = self._mirror()

    def fit_width(self, used: int) -> None:
        if self.rows.fit_width(used):
            self.mirror = self._mirror()

    def trim(self) -> None:
        """Give back table width that nobody uses any more."""
        self.fit_width(self.rows.max_held())

    def mirror_rows(self, slots: Index, rows: Index) -> None:
        """Copy whole table rows to the device."""
        if self.device.type != "cpu" and slots.size:
            new = torch.from_numpy(self.rows.table[slots, rows]).to(self.device)
            self.mirror[self.upload(slots), self.upload(rows)] = new

    def upload(self, array: Index | Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def commit(self, draft: Draft, tokens: Index, owner: Tensor, offset: Tensor) -> None:
        """Take the pages, copy shared open pages, build the step's tensors, zero new side slots.

        owner, offset: int64 [T] on the device: the chunk of each token and its index in the chunk.
        """
        used = int((draft.have + draft.need).max(initial=0))
        self.fit_width(max(used, self.rows.max_held()))  # others may hold longer rows
        delta = self.rows.commit(draft)
        if self.device.type != "cpu" and delta.flat.size:
            self.mirror.view(-1)[self.upload(delta.flat)] = self.upload(delta.pages)
        if delta.src.size:
            self.copy_pages(delta.src, delta.dst)
        width = max(1, used)
        table = self.mirror[:, :, :width].index_select(0, self.upload(draft.slots))  # [S, R, W]
        lens = self.upload(draft.new)
        start = self.upload(draft.new - tokens[:, None].astype(np.int32)).long()  # [S, R]
        position = (start[owner] + offset[:, None]).T  # [R, T]
        p = self.geo.page_size
        row = torch.arange(self.geo.rows, device=self.device)[:, None]
        page = table.view(-1)[(owner * self.geo.rows + row) * width + position // p]
        slots = page.long() * p + position % p
        self.step = StepTensors(table=table, lens=lens, slots=slots, host_lens=draft.new)
        self._zero_aux(delta, slots)

    def _zero_aux(self, delta: Delta, slots: Tensor) -> None:
        if self.slot_aux:
            page, offset = slots.view(-1) // self.geo.page_size, slots.view(-1) % self.geo.page_size
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
        page = self.rows.table[slots, rows, lens // self.geo.page_size]
        own = self.rows.ref[page] == 1
        tail = np.arange(self.geo.page_size) >= (lens[own] % self.geo.page_size)[:, None]
        at, offset = np.nonzero(tail)
        index, off = self.upload(page[own][at]).long(), self.upload(offset)
        for pool in self.slot_pools:
            pool[index, :, off] = _poison(pool.dtype)

    # ── facts ────────────────────────────────────────────────────────────────────────────────────

    def bytes(self) -> CacheBytes:
        r = self.rows
        host = r.table.nbytes + r.lens.nbytes + r.sealed.nbytes + r.ref.nbytes + r.free.nbytes
        device = 0 if self.device.type == "cpu" else self.mirror.nbytes
        aux = [*self.slot_aux.values(), *self.page_aux.values()]
        return CacheBytes(
            payload=sum(t.nbytes for t in self.payload),
            aux=sum(t.nbytes for t in aux),
            tables=host + device,
        )

    def check(self, slots: list[int]) -> None:
        self.rows.check(slots)
        live = np.arange(self.rows.table.shape[2]) < self.rows.held(self.rows.lens)[:, :, None]
        mirror = self.mirror.cpu().numpy()
        assert mirror.shape == self.rows.table.shape, "the device table has another shape"
        assert np.array_equal(mirror[live], self.rows.table[live]), (
            "the device table is out of date"
        )


def _poison(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max
