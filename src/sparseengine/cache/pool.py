"""A pool of page bundles: storage, free stack and reference counts, shared by equal geometries.

Groups whose bundles have the same units, page size and dimensions (the FULL and the WINDOW layers
of one model, say) take from one pool, so that no split between them can strand memory. A bundle
belongs to rows of one group at a time; side tensors stay with the groups, indexed by bundle.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sparseengine.cache.plan import Geometry
from sparseengine.cache.tables import Index, Ints

TRASH = 0


class PagePool:
    """Payload [N, U, P, D] per stored tensor, and who owns its bundles.

    ref   int32 [N]     owners of a bundle; bundle 0 is trash: never owned, never free
    kept  int32 [N]     owners that are rows kept for later requests, among `ref`
    free  int32 [N-1]   a stack of which the first num_free entries count
    """

    def __init__(
        self, geo: Geometry, num_pages: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_pages, self.units, self.page_size = num_pages, geo.units, geo.page_size
        shape = (num_pages + 1, geo.units, geo.page_size)
        self.payload = tuple(
            torch.empty((*shape, d), dtype=dtype, device=device) for d in geo.spec.stored_dims
        )
        self.ref: Ints = np.zeros(num_pages + 1, np.int32)
        self.kept: Ints = np.zeros(num_pages + 1, np.int32)
        self.free: Ints = np.arange(num_pages, 0, -1, dtype=np.int32)  # low ids on top
        self.num_free = num_pages
        self.num_kept = 0  # references of kept rows
        self.num_refs = 0  # > pages in use exactly when some page is shared

    @property
    def any_shared(self) -> bool:
        return self.num_refs > self.num_pages - self.num_free

    @property
    def total_heads(self) -> int:
        """Head pages in the pool."""
        return self.num_pages * self.units

    @property
    def free_heads(self) -> int:
        return self.num_free * self.units

    def reclaimable(self) -> int:
        """Bundles that nobody but kept rows owns."""
        if not self.num_kept:
            return 0
        return int(np.count_nonzero((self.kept > 0) & (self.kept == self.ref)))

    def keep(self, pages: Ints) -> None:
        """A kept row becomes one more owner of these distinct pages."""
        self.share(pages)
        self.kept[pages] += 1
        self.num_kept += pages.size

    def unkeep(self, pages: Ints) -> Ints:
        """A kept row gives them up; returns those that came free."""
        self.kept[pages] -= 1
        self.num_kept -= pages.size
        return self.drop(pages)

    def take(self, count: int) -> Ints:
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} are free"
        self.num_free -= count
        pages = self.free[self.num_free : self.num_free + count][::-1].copy()
        self.ref[pages] = 1
        self.num_refs += count
        return pages

    def share(self, pages: Ints) -> None:
        """One more owner of each of these distinct pages."""
        self.ref[pages] += 1
        self.num_refs += pages.size

    def drop(self, pages: Ints) -> Ints:
        """Give up one reference to each listed page; returns those that came free."""
        if pages.size == 0:
            return pages
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
        copy = self.ref[pages] > 1
        if not copy.any():
            return copy
        unique, first, counts = np.unique(pages, return_index=True, return_counts=True)
        copy[first[counts == self.ref[unique]]] = False
        return np.asarray(copy, np.bool_)

    def bookkeeping_bytes(self) -> int:
        return self.ref.nbytes + self.kept.nbytes + self.free.nbytes

    def payload_bytes(self) -> int:
        return sum(t.nbytes for t in self.payload)

    def check(self, owned: list[Ints]) -> None:
        """Conservation. `owned`: for each group, the page of every table entry in use."""
        pages = np.concatenate(owned) if owned else np.zeros(0, np.int32)
        assert ((pages > TRASH) & (pages <= self.num_pages)).all(), (
            "a row holds a page out of range"
        )
        count = np.bincount(pages, minlength=self.num_pages + 1)
        wrong: Index = np.flatnonzero(count != self.ref)
        assert wrong.size == 0, (
            f"page {wrong[:1]} has {self.ref[wrong[:1]]} references, {count[wrong[:1]]} owners"
        )
        assert self.num_refs == pages.size, f"{self.num_refs} references for {pages.size} entries"
        free = np.sort(self.free[: self.num_free])
        unowned = np.flatnonzero(self.ref[1:] == 0) + 1
        assert np.array_equal(free, unowned), (
            f"{free.size} pages are free, {unowned.size} are owned by nobody"
        )
        groups = np.concatenate([np.unique(p) for p in owned]) if owned else pages
        assert np.unique(groups).size == groups.size, "rows of two groups hold one page"
