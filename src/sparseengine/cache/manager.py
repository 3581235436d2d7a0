"""PagedCache: the cache manager over head pages (core.cache.CacheManager)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.cache import compact
from sparseengine.cache.group import GroupCache
from sparseengine.cache.memory import CacheBytes, bundle_bytes, split_pages
from sparseengine.cache.plan import geometry
from sparseengine.cache.select import narrow
from sparseengine.cache.sides import RequestSides
from sparseengine.cache.step import LayerView
from sparseengine.core.cache import PrefixHit, Usage
from sparseengine.core.method import SealedPages
from sparseengine.core.plan import Purpose, Request, StepPlan
from sparseengine.core.specs import CacheGroup, LayerKind, ModelSpec
from sparseengine.core.view import AttentionView, Keep, Segment, Selection
from sparseengine.errors import CapacityError

UNBOUNDED_TOKENS = 1 << 40  # free_tokens of a model without KV


class PagedCache:
    """All KV and side tensors of one engine. Per method by configuration: its cache plan.

    groups: the merged plan (`merge_plans`). total_bytes (payload and side tensors) or num_pages
    (pages of one row, as vLLM's num_gpu_blocks) is split over the groups so that all run out at the
    same row length. poison fills free slots with NaN, for tests that prove nothing reads them.
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
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        poison: bool = False,
    ) -> None:
        self.model, self.max_num_seqs = model, max_num_seqs
        self.device, self.dtype = torch.device(device), dtype
        geos = [geometry(model, g) for g in groups]
        counts = split_pages(geos, dtype, total_bytes=total_bytes, num_pages=num_pages)
        self.groups = [
            GroupCache(geo, n, device=self.device, dtype=dtype, poison=poison)
            for geo, n in zip(geos, counts, strict=True)
        ]
        self._group_of = {layer: g for g in self.groups for layer in g.geo.group.layers}
        self._sides = RequestSides(model, groups, device=self.device)
        self._slot_of: dict[int, int] = {}
        self._idle_slots: list[int] = []
        self._capacity = 0
        self._stored: dict[int, int] = {}  # positions run per request, evicted ones included
        self._dirty: set[int] = set()  # compacted since their last seal
        self._plan: StepPlan | None = None
        self._starts: tuple[int, ...] = (0,)
        self._num_single = self._max_q = 0
        self._cu_q = torch.zeros(1, dtype=torch.int32, device=self.device)

    # ── room ─────────────────────────────────────────────────────────────────────────────────────

    def total_pages(self) -> int:
        return sum(g.rows.num_pages * g.geo.units for g in self.groups)

    def free_pages(self) -> int:
        return sum(g.rows.num_free * g.geo.units for g in self.groups)

    def pages_for(self, tokens: int) -> int:
        return sum(-(-tokens // g.geo.page_size) * g.geo.rows * g.geo.units for g in self.groups)

    def free_tokens(self) -> int:
        rows = [g.rows.num_free // g.geo.rows * g.geo.page_size for g in self.groups]
        return min(rows, default=UNBOUNDED_TOKENS)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def match(self, request: Request) -> PrefixHit:
        """Nothing is kept of finished requests yet, so nothing is ever found."""
        return PrefixHit()

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Give the request rows: empty ones, or a fork of `hit.source` cut back to `hit.tokens`."""
        if hit.source is None:
            self._new_slot(request.id)
            return
        self.fork(hit.source, request.id)
        extra = self._stored[request.id] - hit.tokens
        assert extra >= 0, f"request {hit.source} holds fewer than {hit.tokens} tokens"
        if extra:
            self.truncate(request.id, extra)

    def fork(self, source_id: int, request_id: int) -> None:
        source, slot = self._slot(source_id), self._new_slot(request_id)
        for g in self.groups:
            g.rows.fork(source, slot)
        self._stored[request_id] = self._stored[source_id]
        if source in self._dirty:
            self._dirty.add(slot)
        self._sides.fork(source_id, request_id)

    def truncate(self, request_id: int, num_tokens: int) -> None:
        slot = self._slot(request_id)
        for g in self.groups:
            g.poison_pages(g.rows.truncate(slot, num_tokens))
            rows = np.arange(g.geo.rows)
            g.poison_tails(np.full_like(rows, slot), rows)
        self._stored[request_id] -= num_tokens

    def release(self, request_id: int, *, retain: bool = False) -> None:
        """End the ownership. `retain` asks for a prefix cache, which nothing offers yet."""
        slot = self._slot(request_id)
        for g in self.groups:
            g.poison_pages(g.rows.release(slot))
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
        slot = self._idle_slots.pop()
        self._slot_of[request_id] = slot
        self._stored[request_id] = 0
        return slot

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def reserve(self, plan: StepPlan) -> None:
        """Pages, slot mapping and tables for this step.

        Raises `CapacityError`, having changed nothing, when a group has too few free pages.
        """
        slots = np.array([self._slot(c.request.id) for c in plan.chunks], np.int64)
        tokens = np.array([len(c.tokens) for c in plan.chunks], np.int64)
        assert np.unique(slots).size == slots.size, "a request has two chunks in one step"
        drafts = [g.rows.draft(slots, tokens.astype(np.int32)) for g in self.groups]
        for g, draft in zip(self.groups, drafts, strict=True):
            self._require(g, draft.pages, f"a step of {int(tokens.sum())} tokens")
        cu_q = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
        chunk = np.repeat(np.arange(slots.size), tokens)
        owner = torch.from_numpy(chunk).to(self.device)
        offset = torch.from_numpy(np.arange(chunk.size) - cu_q[chunk]).to(self.device)
        for g, draft in zip(self.groups, drafts, strict=True):
            g.commit(draft, tokens, owner, offset)
        for c in plan.chunks:
            self._stored[c.request.id] += len(c.tokens)
        self._cu_q = torch.from_numpy(cu_q).to(self.device)
        self._plan = plan
        self._starts = tuple(int(n) for n in cu_q)
        several = np.flatnonzero(tokens != 1)
        self._num_single = int(several[0]) if several.size else slots.size
        self._max_q = int(tokens.max(initial=0))

    def _require(self, group: GroupCache, bundles: int, what: str) -> None:
        if bundles <= group.rows.num_free:
            return
        units = group.geo.units
        raise CapacityError(
            f"{what} needs {bundles * units} head pages, {group.rows.num_free * units} of "
            f"{group.rows.num_pages * units} are free; raise kv_cache_memory_bytes or "
            f"gpu_memory_utilization, or lower max_num_seqs",
            needed=bundles * units,
            available=group.rows.num_free * units,
        )

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
            table=step.table(rows),
            lens=step.lens[:, rows],
            page_size=size,
        )
        num_single = self._num_single
        cu_q, max_len = self._cu_q, step.max_len
        if selection is not None:
            units = group.geo.layer_units(layer)
            segment = narrow(segment, selection, units=units, pools=group.payload)
            width = selection.index.shape[2]
            max_len = min(max_len, width * size if selection.unit == "page" else width)
            if selection.cu_q is not None:  # finer spans: their sizes are known to the device only
                cu_q, num_single = selection.cu_q, 0
        return AttentionView((segment,), cu_q, spec.window, num_single, self._max_q, max_len)

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
            self._sides.aux,
            self._starts,
        )

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
        drafts = []
        for g in self.groups:
            masks = compact.collect(g, keeps, self._slot_of)
            draft = None if masks is None else compact.draft(g, masks)
            if draft is not None:
                self._require(g, draft.copy_page.size, "compacting rows that share pages")
                drafts.append((g, draft))
        for g, draft in drafts:
            compact.carry_out(g, draft)
            self._dirty.update(int(s) for s in np.unique(draft.slots))

    def seal(self, plan: StepPlan) -> Sequence[SealedPages]:
        """Full pages of the plan's requests, and of rows compacted since, not reported yet.

        Groups without PAGE side tensors have nobody to report to: they only keep count.
        """
        wanted = {self._slot(c.request.id) for c in plan.chunks} | self._dirty
        slots = np.array(sorted(wanted), np.int64)
        self._dirty.clear()
        sealed: list[SealedPages] = []
        for g in self.groups:
            report = bool(g.page_aux)
            rows, pages = g.rows.newly_full(slots, list_pages=report)
            if pages.size:
                sealed.extend(self._sealed(g, rows, pages))
        for c in plan.chunks:
            if c.ends_prompt:
                self._sides.end_prefill(c.request.id)
        return tuple(sealed)

    def _sealed(self, group: GroupCache, rows: np.ndarray, pages: np.ndarray) -> list[SealedPages]:
        out = []
        for layer in group.geo.group.layers:
            span = group.geo.layer_rows(layer)
            mine = pages[(rows >= span.start) & (rows < span.stop)]
            if mine.size:
                out.append(
                    SealedPages(
                        layer=layer,
                        spec=self.model.layers[layer],
                        pages=group.upload(mine).long(),
                        payload=group.layer_pools(layer),
                        aux=group.layer_aux(layer),
                    )
                )
        return out

    # ── facts ────────────────────────────────────────────────────────────────────────────────────

    def lens(self, request_id: int, layer: int) -> tuple[int, ...]:
        group = self._group_of[layer]
        rows = group.rows.lens[self._slot(request_id), group.geo.layer_rows(layer)]
        return tuple(int(n) for n in rows) * (group.geo.heads // group.geo.row_groups)

    def usage(self, request_id: int) -> Usage:
        slot, pages, total = self._slot(request_id), 0, self._sides.bytes(request_id)
        for g in self.groups:
            bundles = int(g.rows.held(g.rows.lens[slot]).sum())
            pages += bundles * g.geo.units
            total += bundles * sum(bundle_bytes(g.geo, self.dtype))
        return Usage(pages, total)

    def memory(self) -> CacheBytes:
        """Bytes this cache holds: pools, side tensors (per request ones included), tables."""
        parts = [g.bytes() for g in self.groups]
        return CacheBytes(
            payload=sum(p.payload for p in parts),
            aux=sum(p.aux for p in parts) + sum(self._sides.bytes(r) for r in self._slot_of),
            tables=sum(p.tables for p in parts),
        )

    def check(self) -> None:
        slots = sorted(self._slot_of.values())
        assert len(set(slots)) == len(slots), "two requests share a slot"
        assert sorted(slots + self._idle_slots) == list(range(self._capacity)), "a slot is lost"
        assert self._stored.keys() == self._slot_of.keys(), "a request is half released"
        self._sides.check(self._slot_of.keys())
        for g in self.groups:
            g.check(slots)
