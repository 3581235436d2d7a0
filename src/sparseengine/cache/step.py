"""What a method may see of one step at one layer (core.method.LayerStep)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.cache.facts import RequestFacts
from sparseengine.cache.group import GroupCache
from sparseengine.cache.sides import RequestSides
from sparseengine.core.plan import StepPlan
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import PackedTable


class LayerView:
    """One layer of the current step, for all chunks or some of them. Reads; never owns.

    chunks: indices into the cache's current plan. q, k, v hold these chunks' tokens only.
    """

    def __init__(
        self,
        group: GroupCache,
        layer: int,
        spec: LayerSpec,
        plan: StepPlan,
        chunks: Sequence[int],
        qkv: tuple[Tensor, Tensor, Tensor],
        sides: RequestSides,
        starts: tuple[int, ...],
        facts: RequestFacts,
    ) -> None:
        self.layer, self.spec, self.plan = layer, spec, plan
        self.q, self.k, self.v = qkv
        self._group, self._chunks, self._sides = group, tuple(chunks), sides
        self._rows = group.geo.layer_rows(layer)
        self._facts = facts
        self._starts = starts  # first token of each chunk in q, k, v, and their number

    @property
    def page_size(self) -> int:
        return self._group.geo.page_size

    @property
    def page_aux_bytes(self) -> int:
        return sum(t[0, 0].nbytes for t in self._group.page_aux.values())

    def subset(self, chunks: Sequence[int]) -> LayerView:
        """The same step seen by some of its chunks only (indices into this step's plan)."""
        if list(chunks) == list(range(len(self.plan.chunks))):
            return self
        spans = _runs([self.span(c) for c in chunks])
        q, k, v = (_take(t, spans) for t in (self.q, self.k, self.v))
        lengths = (len(self.plan.chunks[c].tokens) for c in chunks)
        return LayerView(
            self._group,
            self.layer,
            self.spec,
            StepPlan(tuple(self.plan.chunks[c] for c in chunks), self.plan.preempted),
            [self._chunks[c] for c in chunks],
            (q, k, v),
            self._sides,
            tuple(accumulate(lengths, initial=0)),
            self._facts,
        )

    def span(self, chunk: int) -> tuple[int, int]:
        return self._starts[chunk], self._starts[chunk + 1]

    def lens(self, chunk: int) -> tuple[int, ...]:
        host = self._group.host_lens()
        return tuple(int(n) for n in host[self._chunks[chunk], self._rows])

    def budgets(self) -> Tensor:
        return _take(self._facts.budgets()[0], self._spans())

    def table(self) -> tuple[Tensor, Tensor]:
        step = self._group.current()
        spans = self._spans()
        table, lens = step.table(self._rows), step.lens[:, self._rows]
        return _take(table, spans), _take(lens, spans)

    def packed(self) -> tuple[PackedTable, Tensor]:
        step = self._group.current()
        spans = self._spans()
        table, lens = step.packed(self._rows), step.lens[:, self._rows]
        base, width = _take(table.base, spans), _take(table.width, spans)
        return replace(table, base=base, width=width), _take(lens, spans)

    def _spans(self) -> list[tuple[int, int]]:
        """Where this step's chunks are among those of the whole step."""
        return _runs([(c, c + 1) for c in self._chunks])

    def _row(self, chunk: int) -> tuple[Tensor, Tensor]:
        """(int32 [G, W] table, int32 [G] lengths) of one chunk."""
        step, c = self._group.current(), self._chunks[chunk]
        return step.table(self._rows)[c], step.lens[c, self._rows]

    def aux(self, name: str) -> Tensor:
        units = self._group.geo.layer_units(self.layer)
        for tensors in (self._group.slot_aux, self._group.page_aux):
            if name in tensors:
                return tensors[name][:, units]
        known = [a.name for a in self._group.geo.group.aux]
        raise AssertionError(f"layer {self.layer} has no pool side tensor {name!r}; it has {known}")

    def request_aux(self, name: str, chunk: int) -> Tensor:
        return self._sides.aux(self.plan.chunks[chunk].request.id, self.layer, name)

    def push(self, name: str, value: Tensor) -> None:
        pool = self._sides.rings(self.layer, name)  # [slots, w, ...]
        slots, position = (_take(fact, self._spans()) for fact in self._facts.rings())
        pool[slots, position % pool.shape[1]] = value.to(pool.dtype)

    def _pool(self, name: str) -> Tensor:
        if name not in ("keys", "values"):
            return self.aux(name)
        pools = self._group.layer_pools(self.layer)
        if name == "values" and self.spec.kind is LayerKind.LATENT:
            return pools[0][..., : self.spec.value_dim]
        return pools[0] if name == "keys" else pools[1]

    def gather(self, name: str, chunk: int, *, first: int | None = None) -> Tensor:
        table, lens = self._row(chunk)
        longest = max(self.lens(chunk), default=0)
        longest = longest if first is None else min(longest, first)
        return ops.gather_rows(self._pool(name), table, lens, self.spec.kv_heads, longest)

    def scatter(self, name: str, chunk: int, value: Tensor) -> None:
        """Write a SLOT side tensor back, [Hkv, Lmax, ...] in row order; padding is ignored."""
        if name in self._group.rewritten:
            self._group.own(self._chunks[chunk])
        table, lens = self._row(chunk)
        pool = self.aux(name)
        size, length = self.page_size, value.shape[1]
        slot = torch.arange(length, device=value.device)
        page = table[:, (slot // size).clamp_max(table.shape[1] - 1)].long()
        slots = torch.where(slot < lens[:, None], page * size + slot % size, -1)  # [G, L]
        flat = pool.unsqueeze(-1) if pool.dim() == 3 else pool.flatten(3)
        new = value.reshape(value.shape[0], length, -1).transpose(0, 1)  # [L, H, D]
        ops.store((flat,), (new.to(pool.dtype),), slots)

    def scores(
        self,
        chunk: int,
        queries: Tensor,
        reduce: Literal["sum", "max"] = "sum",
        *,
        behind: int = 0,
    ) -> Tensor:
        table, lens = self._row(chunk)
        longest = max(self.lens(chunk), default=0) - behind
        lens = lens - behind if behind else lens
        keys, scale, cap = self._pool("keys"), self.spec.softmax_scale, self.spec.softcap
        return ops.window_scores(queries, keys, table, lens, longest, scale, reduce, cap)

    def add_attention(self, mass: str, seen: str | None, left: float) -> None:
        for chunk, planned in zip(self._chunks, self.plan.chunks, strict=True):
            if planned.request.outgrows_budget:
                self._group.own(chunk)
        table, lens = self.packed()
        outgrows = _take(self._facts.budgets()[1], self._spans())
        ops.add_mass(
            self.q,
            self._pool("keys"),
            table,
            lens * outgrows[:, None],
            self.aux(mass),
            None if seen is None else self.aux(seen),
            scale=self.spec.softmax_scale,
            softcap=self.spec.softcap,
            left=left,
        )

    def logits(self) -> Tensor:
        table, lens = self.packed()
        return ops.slot_scores(self.q, self._pool("keys"), table, lens)


def _runs(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent spans, so that a contiguous selection stays a view."""
    joined: list[tuple[int, int]] = []
    for first, end in spans:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((first, end))
    return joined


def _take(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    parts = [tensor[first:end] for first, end in spans]
    if not parts:
        return tensor[:0]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
