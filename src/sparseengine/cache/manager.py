"""PagedCache: the cache manager over head pages (core.cache.CacheManager)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.cache import compact
from sparseengine.cache.digests import Digests
from sparseengine.cache.facts import RequestFacts
from sparseengine.cache.group import GroupCache
from sparseengine.cache.kept import KeptRows
from sparseengine.cache.memory import CacheBytes, bundle_bytes, pools_of, split_pages
from sparseengine.cache.plan import geometry
from sparseengine.cache.pool import PagePool
from sparseengine.cache.room import Needs, Room
from sparseengine.cache.select import narrow
from sparseengine.cache.sides import RequestSides
from sparseengine.cache.step import LayerView
from sparseengine.cache.tables import Ints
from sparseengine.cache.tensors import StepTensors, Tokens
from sparseengine.core.cache import PrefixHit, Usage
from sparseengine.core.method import SealedPages
from sparseengine.core.plan import Purpose, Request, StepPlan
from sparseengine.core.specs import CacheGroup, LayerKind, ModelSpec
from sparseengine.core.view import AttentionView, HostRows, Keep, Segment, Selection


class PagedCache:
    """All KV and side tensors of one engine. Per method by configuration: its cache plan.

    groups: the merged plan (`merge_plans`); those with equal bundles share a pool of pages.
    total_bytes (payload and side tensors) or num_pages (pages of one row, as vLLM's num_gpu_blocks)
    is split over the pools as if rows of all groups were equally long. max_chunk: most tokens of a
    chunk, which bounds the rows of WINDOW layers; None: no bound. window_align: the first token
    that such a row holds is at a multiple of it. poison fills free slots with NaN, for tests that
    prove nothing reads them.
    Raises `UnsupportedError` for a plan it cannot store, `ConfigError` when nothing would fit.
    """

    def __init__(
        self,
        model: ModelSpec,
        groups: Sequence[CacheGroup],
        *,
        total_bytes: int | None = None,
        num_pages: int | None = None,
        max_num_seqs: int = 256,
        max_chunk: int | None = None,
        window_align: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        poison: bool = False,
    ) -> None:
        self.model, self.max_num_seqs = model, max_num_seqs
        self.device, self.dtype = torch.device(device), dtype
        self.max_chunk = max_chunk
        geos = [geometry(model, g, window_align) for g in groups]
        counts = split_pages(geos, dtype, total_bytes=total_bytes, num_pages=num_pages)
        pool_of: dict[int, PagePool] = {}
        for members, count in zip(pools_of(geos), counts, strict=True):
            pool = PagePool(geos[members[0]], count, device=self.device, dtype=dtype)
            pool_of.update(dict.fromkeys(members, pool))
        self.pools = list(dict.fromkeys(pool_of.values()))
        self.groups = [
            GroupCache(geo, pool_of[i], device=self.device, poison=poison)
            for i, geo in enumerate(geos)
        ]
        self._group_of = {layer: g for g in self.groups for layer in g.geo.group.layers}
        self._sides = RequestSides(model, groups, device=self.device)
        self._facts = RequestFacts(self._sides, self.device)
        self._digests = Digests(self.groups)
        self._kept = KeptRows(model, self.groups, self._sides)
        self._room = Room(self.groups, self.pools, max_chunk)
        self._slot_of: dict[int, int] = {}
        self._idle_slots: list[int] = []
        self._capacity = 0
        self._stored: dict[int, int] = {}  # positions run per request, evicted ones included
        self._dirty: set[int] = set()  # compacted since their last seal
        self._plan: StepPlan | None = None
        self._starts: tuple[int, ...] = (0,)
        self._num_single = self._max_q = 0
        self._tokens = Tokens(np.zeros(0, np.int64), self.device)

    # ── room ─────────────────────────────────────────────────────────────────────────────────────

    def total_pages(self) -> int:
        return sum(p.total_heads for p in self.pools)

    def free_pages(self) -> int:
        return self._room.free_pages()

    def pages_for(
        self, tokens: int, *, positions: int | None = None, chunk: int | None = None
    ) -> int:
        return self._room.pages_for(tokens, positions, chunk)

    def free_tokens(self) -> int:
        return self._room.free_tokens()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def match(self, request: Request, limit: int = 0, salt: str | None = None) -> PrefixHit:
        salt = request.salt if salt is None else salt
        return self._kept.find(request.tokens, salt, limit) if limit > 0 else PrefixHit()

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Give the request rows: empty ones, or the first `hit.tokens` of a kept one."""
        slot = self._new_slot(request.id)
        if request.sparse.digests:
            self._digests.open(slot)
        if hit.source is not None:
            self._kept.adopt(hit.source, hit.tokens, slot, request.id, copies=hit.copies)
            self._stored[request.id] = hit.tokens

    def keep(
        self, request_id: int, tokens: Sequence[int], salt: str = "", *, evicted: bool = False
    ) -> None:
        slot, stored = self._slot(request_id), self._stored[request_id]
        self._kept.add(request_id, slot, stored, tokens, salt, evicted=evicted)

    def forget_kept(self, tokens: Sequence[int] | None = None, salt: str = "") -> None:
        self._kept.forget(tokens, salt)

    @property
    def reuse_step(self) -> int:
        return self._kept.step

    @property
    def keeps_ends_only(self) -> bool:
        return self._kept.ends_only

    def fork(self, source_id: int, request_id: int) -> None:
        source, slot = self._slot(source_id), self._new_slot(request_id)
        for g in self.groups:
            g.rows.fork(source, slot)
        self._digests.fork(source, slot)
        self._stored[request_id] = self._stored[source_id]
        if source in self._dirty:
            self._dirty.add(slot)
        self._sides.fork(source_id, request_id)

    def truncate(self, request_id: int, num_tokens: int) -> None:
        slot = self._slot(request_id)
        for g in self.groups:
            self._check_window(g, request_id, num_tokens)
        for g in self.groups:
            g.poison_pages(g.rows.truncate(slot, num_tokens))
            rows = np.arange(g.geo.rows)
            g.poison_tails(np.full_like(rows, slot), rows)
        self._stored[request_id] -= num_tokens

    def _check_window(self, group: GroupCache, request_id: int, num_tokens: int) -> None:
        """What WINDOW rows have dropped cannot come back into sight."""
        if group.geo.window is None:
            return
        lens = group.rows.lens[self._slot(request_id)]
        seen = min(group.geo.window - 1, self._stored[request_id] - num_tokens)
        assert seen <= int(lens[0]) - num_tokens, (
            f"cannot remove {num_tokens} tokens of request {request_id}: layers "
            f"{group.geo.group.layers} hold their last {lens[0]} tokens only, and the window of "
            f"{group.geo.window} would reach further back"
        )

    def release(self, request_id: int) -> None:
        slot = self._slot(request_id)
        for g in self.groups:
            g.poison_pages(g.rows.release(slot))
        self._digests.release(slot)
        del self._slot_of[request_id], self._stored[request_id]
        self._idle_slots.append(slot)
        self._dirty.discard(slot)
        self._sides.release(request_id)

    def _slot(self, request_id: int) -> int:
        assert request_id in self._slot_of, f"request {request_id} was not admitted"
        return self._slot_of[request_id]

    def _new_slot(self, request_id: int) -> int:
        assert request_id not in self._slot_of, f"request {request_id} was admitted already"
        if not self._idle_slots:
            limit = max(self.max_num_seqs, self._capacity + 1)
            capacity = min(max(4, 2 * self._capacity), limit)
            self._idle_slots = list(range(capacity - 1, self._capacity - 1, -1))
            self._capacity = capacity
            for g in self.groups:
                g.rows.grow_slots(capacity)
            self._digests.grow_slots(capacity)
        slot = self._idle_slots.pop()
        self._slot_of[request_id] = slot
        self._stored[request_id] = 0
        return slot

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def reserve(self, plan: StepPlan) -> None:
        """Pages, slot mapping and tables for this step.

        Raises `CapacityError`, having changed nothing, when a pool has too few free pages.
        """
        slots = np.array([self._slot(c.request.id) for c in plan.chunks], np.int64)
        tokens = np.array([len(c.tokens) for c in plan.chunks], np.int64)
        assert np.unique(slots).size == slots.size, "a request has two chunks in one step"
        while True:
            drafts = [g.rows.draft(slots, tokens.astype(np.int32)) for g in self.groups]
            needs = [(g.pool, d.pages) for g, d in zip(self.groups, drafts, strict=True)]
            if not self._make_room(needs):
                break  # what was copied from a kept row may be the request's own without it
        self._room.require(needs, f"a step of {int(tokens.sum())} tokens")
        chunks = Tokens(tokens, self.device)
        for g, draft in zip(self.groups, drafts, strict=True):
            g.commit(draft, chunks)
        for c in plan.chunks:
            self._stored[c.request.id] += len(c.tokens)
        self._begin(plan, chunks)

    def _make_room(self, needs: Needs) -> bool:
        """Give up what is kept until the needs are met; False if that changes nothing."""
        gave = False
        while self._room.lacks(needs) and self._kept.give_up_some():
            gave = True
        return gave

    def _begin(self, plan: StepPlan, tokens: Tokens) -> None:
        self._plan, self._tokens = plan, tokens
        self._facts.begin(plan)
        self._starts = tuple(tokens.starts.tolist())
        several = np.flatnonzero(tokens.counts != 1)
        self._num_single = int(several[0]) if several.size else tokens.counts.size
        self._max_q = int(tokens.counts.max(initial=0))

    # ── captured decode steps ────────────────────────────────────────────────────────────────────

    def make_static(self, max_rows: int) -> None:
        """Room at fixed addresses for captured decode steps of up to `max_rows` requests."""
        self._facts.make_static(max_rows)
        self._static_cu_q = torch.arange(max_rows + 1, dtype=torch.int32, device=self.device)
        for g in self.groups:
            g.make_static(max_rows)

    def load_static(self, bucket: int, method: str = "", whole: int = 0) -> None:
        """Bring the reserved step, which must be of decodes only, to those addresses.

        method: that acts in it, if one does; the other requests get the budget `whole`.
        """
        self._facts.load_static(bucket, method, whole)
        for g in self.groups:
            g.load_static(bucket)

    def clear_static(self, bucket: int, budget: int | None) -> None:
        """Every row is one token of the trash page, every budget the given one."""
        self._facts.clear_static(bucket, budget)
        for g in self.groups:
            g.clear_static(bucket)

    @contextmanager
    def static_step(self, plan: StepPlan, max_len: int, host_len: int) -> Iterator[None]:
        """Let those addresses be the current step, for a plan of made-up decodes.

        What is derived from them is device work, and part of a capture in whose course this is
        entered. max_len: no row of a replayed step will be longer. host_len: the row length that
        host code is told.
        """
        bucket = len(plan.chunks)
        before = self._plan, self._tokens
        steps = [g.swap_step(None) for g in self.groups]
        self._begin(plan, Tokens(np.ones(bucket, np.int64), self.device))
        self._tokens.place(self._static_cu_q[: bucket + 1])
        self._facts.use_static(bucket)
        try:
            for g in self.groups:
                g.use_static(bucket, max_len, host_len)
            yield
        finally:
            for g, step in zip(self.groups, steps, strict=True):
                g.swap_step(step)
            if before[0] is not None:
                self._begin(before[0], before[1])

    def longest_rows(self) -> Ints:
        """int32 [S]: the longest row of each chunk of the reserved step, outside WINDOW layers."""
        found = [g.longest() for g in self.groups if g.geo.window is None]
        found = found or [g.longest() for g in self.groups]
        return np.asarray(np.max(found, axis=0), np.int32)

    @property
    def static_version(self) -> int:
        """Changes when an address that captured graphs hold has changed."""
        return sum(g.arena_moves for g in self.groups) + self._sides.ring_moves

    def write(self, layer: int, payload: tuple[Tensor, ...]) -> None:
        group = self._group_of[layer]
        slots = group.current().slots[group.geo.layer_rows(layer)]
        ops.store(group.layer_pools(layer), payload, slots)

    def view(self, layer: int, selection: Selection | None) -> AttentionView:
        """What attention reads at a layer. Static shapes, no host sync: a graph can hold it."""
        group, spec = self._group_of[layer], self.model.layers[layer]
        step, rows, size = group.current(), group.geo.layer_rows(layer), group.geo.page_size
        segment = Segment(
            payload=tuple((pool,) for pool in group.layer_pools(layer)),
            codec=(),
            values_in_keys=spec.kind is LayerKind.LATENT,
            table=step.packed(rows) if self._walks_packed(step) else step.table(rows),
            lens=step.lens[:, rows],
            page_size=size,
        )
        num_single = self._num_single
        cu_q, max_len = self._tokens.cu_q(), step.max_len
        known: int | None = 0  # spans from here on are as long as the host thinks
        if selection is not None:
            known = selection.whole_from
            units = group.geo.layer_units(layer)
            segment = narrow(segment, selection, units=units, pools=group.payload)
            width = selection.index.shape[2]
            max_len = min(max_len, width * size if selection.unit == "page" else width)
            if selection.cu_q is not None:  # finer spans: their sizes are known to the device only
                cu_q, num_single, known = selection.cu_q, 0, None
        host = None if known is None else HostRows(self._starts, step.host_lens[:, rows], known)
        return AttentionView((segment,), cu_q, spec.window, num_single, self._max_q, max_len, host)

    def _walks_packed(self, step: StepTensors) -> bool:
        """A decode step on a device: kernels follow the packed tables, no padded copy is made."""
        return step.is_decode and self.device.type == "cuda"

    def _current_plan(self) -> StepPlan:
        assert self._plan is not None, "reserve(plan) comes before write, view and layer_step"
        return self._plan

    def layer_step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> LayerView:
        plan = self._current_plan()
        return LayerView(
            self._group_of[layer],
            layer,
            self.model.layers[layer],
            plan,
            range(len(plan.chunks)),
            (q, k, v),
            self._sides,
            self._starts,
            self._facts,
        )

    def stored_step(self, layer: int) -> LayerView:
        none = torch.empty(0, device=self.device)
        return self.layer_step(layer, none, none, none)

    def state(self, layer: int) -> tuple[Tensor, ...]:
        ids = [c.request.id for c in self._current_plan().chunks]
        return self._sides.states(ids, layer)

    def set_state(self, layer: int, value: tuple[Tensor, ...]) -> None:
        """Store the chunks' new states; those of REPLAY chunks are forgotten."""
        for b, c in enumerate(self._current_plan().chunks):
            if c.purpose is not Purpose.REPLAY:
                self._sides.set_state(c.request.id, layer, [t[b] for t in value])

    # ── after a step ─────────────────────────────────────────────────────────────────────────────

    def apply(self, keeps: Sequence[Keep]) -> None:
        """Retain what the masks say: one compaction per group for all keeps of the call.

        A mask may be coarser than the rows it names: `layer=None` covers all layers, one mask all
        heads. A mask whose length is not its row's, a finer one than the plan's rows, or two for
        one row raise AssertionError. Rows that share pages get pages of their own where they are
        rewritten; when those are not free, CapacityError is raised and nothing is changed.
        """
        for keep in keeps:
            self._slot(keep.request)
        while True:
            drafts = []
            for g in self.groups:
                masks = compact.collect(g, keeps, self._slot_of)
                draft = None if masks is None else compact.draft(g, masks)
                if draft is not None:
                    drafts.append((g, draft))
            folds = self._digests.draft(drafts)
            needs = [(g.pool, d.copy_page.size) for g, d in drafts]
            every = needs + [(f.pool, f.pages) for f in folds]
            if not self._make_room(every):
                break
        self._room.require(needs, "compacting rows that share pages")
        self._room.require(every, "digests of what is evicted")
        for fold in folds:
            fold.read()
        for g, draft in drafts:
            compact.carry_out(g, draft)
            self._dirty.update(int(s) for s in np.unique(draft.slots))
            compact.write_keys(g, keeps, self._slot_of)
        for fold in folds:
            fold.write()

    def digests(self, request_id: int, layer: int) -> Segment | None:
        return self._digests.segment(self._slot(request_id), layer)

    def digest_pages(self, dropped: int) -> int:
        return self._digests.pages_for(dropped)

    def seal(self, plan: StepPlan) -> Sequence[SealedPages]:
        """Full pages of the plan's requests, and of rows compacted since, not reported yet.

        Groups without PAGE side tensors have nobody to report to: they only keep count. First,
        WINDOW rows of PREFILL and DECODE chunks drop the pages that no later query can see.
        """
        self._drop_unseen(plan)
        wanted = {self._slot(c.request.id) for c in plan.chunks} | self._dirty
        slots = np.array(sorted(wanted), np.int64)
        self._dirty.clear()
        sealed: list[SealedPages] = []
        for g in self.groups:
            report = bool(g.page_aux)
            pages, rows = g.rows.newly_full(slots, list_pages=report)
            if pages.size:
                sealed.append(g.sealed(pages, rows))
        for c in plan.chunks:
            if c.ends_prompt:
                self._sides.end_prefill(c.request.id)
        return tuple(sealed)

    def _drop_unseen(self, plan: StepPlan) -> None:
        groups = [g for g in self.groups if g.geo.window is not None]
        if not groups:
            return
        ran = [c.request.id for c in plan.chunks if c.purpose is not Purpose.REPLAY]
        slots = np.array([self._slot(r) for r in ran], np.int64)
        for g in groups:
            assert g.geo.window is not None
            g.poison_pages(g.rows.drop_leading(slots, g.geo.window - 1, g.geo.window_step))

    # ── facts ────────────────────────────────────────────────────────────────────────────────────

    def lens(self, request_id: int, layer: int) -> tuple[int, ...]:
        group = self._group_of[layer]
        rows = group.rows.lens[self._slot(request_id), group.geo.layer_rows(layer)]
        return tuple(int(n) for n in rows) * (group.geo.heads // group.geo.row_groups)

    def usage(self, request_id: int) -> Usage:
        slot, pages, total = self._slot(request_id), 0, self._sides.bytes(request_id)
        for g in self.groups:
            bundles = int(g.rows.held(g.rows.lens[slot]).sum()) + self._digests.pages(g, slot)
            pages += bundles * g.geo.units
            total += bundles * sum(bundle_bytes(g.geo, self.dtype))
        return Usage(pages, total)

    def memory(self) -> CacheBytes:
        """Bytes this cache holds: pools, side tensors (per request ones included), tables."""
        parts = [g.bytes() for g in self.groups]
        return CacheBytes(
            payload=sum(p.payload_bytes() for p in self.pools),
            aux=sum(p.aux for p in parts) + self._sides.total_bytes() + self._kept.state_bytes(),
            tables=sum(p.tables for p in parts)
            + sum(p.bookkeeping_bytes() for p in self.pools)
            + self._digests.bytes()
            + self._kept.bytes(),
        )

    def check(self) -> None:
        slots = sorted(self._slot_of.values())
        assert len(set(slots)) == len(slots), "two requests share a slot"
        assert sorted(slots + self._idle_slots) == list(range(self._capacity)), "a slot is lost"
        assert self._stored.keys() == self._slot_of.keys(), "a request is half released"
        self._sides.check(self._slot_of.keys())
        for g in self.groups:
            g.check(slots)
        self._digests.check(slots)
        for pool in self.pools:
            mine = [g for g in self.groups if g.pool is pool]
            kept = [self._kept.owned(g) for g in mine]
            both = zip(mine, kept, strict=True)
            owned = [(g.owned(slots), self._digests.owned(g, slots), k) for g, k in both]
            pool.check([np.concatenate(pages) for pages in owned])
            count = np.bincount(np.concatenate(kept), minlength=pool.kept.size)
            assert np.array_equal(count, pool.kept), "kept pages are counted wrong"
