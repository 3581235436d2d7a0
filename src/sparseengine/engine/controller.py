"""Drives the lifecycle hooks of every method in a step. Contains no method's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sparseengine.core.cache import CacheManager
from sparseengine.core.method import LayerStep, SparseMethod
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.prefill import PrefillPattern
from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.core.view import BlockMask, Keep, Selection
from sparseengine.engine.digests import DigestReader
from sparseengine.engine.faults import attempt, blame
from sparseengine.engine.record import Recorder, SparseOutput
from sparseengine.errors import CapacityError, UnsupportedError


@dataclass(slots=True)
class _Part:
    """Chunks of one method in a plan: all of them, and those that decode."""

    method: SparseMethod
    chunks: list[int]
    decodes: list[int]


class Controller:
    """Groups the chunks of a step by method instance and calls that instance's hooks.

    `methods` maps the key a request carries (`Request.method`) to its instance; the engine adds
    entries while it runs. Layers of a kind that a method does not act on are skipped. A method sees
    its own chunks only; `select` is asked for DECODE chunks, and the selections of several methods
    in one step are merged into one, in which every other chunk reads all of its columns.
    `patterns` maps the keys that requests carry as `Request.prefill`; those it lacks are dense.
    """

    def __init__(
        self,
        model: ModelSpec,
        cache: CacheManager,
        methods: Mapping[str, SparseMethod],
        patterns: Mapping[str, PrefillPattern] | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.methods = methods
        self.patterns = {} if patterns is None else patterns
        self.recorder = Recorder(model, cache)
        self.digests = DigestReader(model, cache)
        self._digesting: tuple[int, ...] = ()
        self._plan: StepPlan | None = None
        self._parts: list[_Part] = []
        self._patterned: list[tuple[int, PrefillPattern]] = []
        self._order: dict[tuple[int, ...], Tensor] = {}

    def select(self, at: LayerStep) -> Selection | None:
        """Ask every method in the step what its DECODE chunks read; None reads everything."""
        found: list[tuple[list[int], Selection]] = []
        for part in self._acting(at, "select"):
            if part.decodes:
                try:
                    selection = part.method.select(self._narrow(at, part.decodes))
                except Exception as error:
                    _blame(error, at.plan, part.decodes)
                    raise
                if selection is not None:
                    found.append((part.decodes, selection))
        merged = self._merge(at, found) if found else None
        if self.recorder.is_recording(at.plan):
            self.recorder.on_select(at, merged)
        return merged

    def prefill_masks(self, at: LayerStep) -> dict[int, BlockMask]:
        """Ask the patterns of the step what its prompt chunks read."""
        self._split(at.plan)
        masks: dict[int, BlockMask] = {}
        for chunk, pattern in self._patterned:
            if at.spec.kind in pattern.traits.kinds:
                try:
                    mask = pattern.pattern(at, chunk)
                except Exception as error:
                    _blame(error, at.plan, (chunk,))
                    raise
                if mask is not None:
                    masks[chunk] = mask
        if masks and self.recorder.is_recording(at.plan):
            self.recorder.on_masks(at, masks)
        return masks

    def add_digests(self, at: LayerStep, out: Tensor) -> Tensor:
        """Let decodes attend to the digests that their requests keep."""
        self._split(at.plan)
        if not self._digesting:
            return out
        if self.recorder.is_recording(at.plan):
            for chunk in (at.plan.chunks[i] for i in self._digesting):
                segment = self.cache.digests(chunk.request.id, at.layer)
                if segment is not None:
                    self.recorder.on_digests(at, chunk, segment.lens[0].tolist())
        return self.digests.read(at, out, self._digesting)

    def observe(self, at: LayerStep) -> None:
        for part in self._acting(at, "observe"):
            try:
                part.method.observe(self._narrow(at, part.chunks))
            except Exception as error:
                _blame(error, at.plan, part.chunks)
                raise

    def replayed(self, plan: StepPlan, lens: Sequence[int]) -> None:
        """A step of decodes ran as a captured graph; lens: the longest row of each chunk."""
        for part in self._split(plan):
            if part.method.uses("replayed"):
                chosen = [lens[i] for i in part.chunks]
                try:
                    part.method.replayed(_subplan(plan, part.chunks), chosen)
                except Exception as error:
                    _blame(error, plan, part.chunks)
                    raise

    def sees_output(self, plan: StepPlan) -> bool:
        """Whether a method's `layer_end` is called at the last layer, for which all rows count."""
        kind = self.model.layers[-1].kind
        methods = (part.method for part in self._split(plan))
        return any(m.uses("layer_end") and kind in m.traits.kinds for m in methods)

    def layer_end(self, at: LayerStep, hidden: Tensor, extra: Tensor | None = None) -> None:
        for part in self._acting(at, "layer_end"):
            if extra is not None:
                hidden, extra = hidden + extra, None
            sub = self._narrow(at, part.chunks)
            rows = [hidden[slice(*at.span(i))] for i in part.chunks]
            try:
                part.method.layer_end(sub, hidden if sub is at else torch.cat(rows))
            except Exception as error:
                _blame(error, at.plan, part.chunks)
                raise

    def end_step(self, plan: StepPlan) -> None:
        """Truncate replays, weigh, evict, apply, seal, in this order: summaries follow eviction."""
        for chunk in plan.chunks:
            if chunk.purpose is Purpose.REPLAY:
                self.cache.truncate(chunk.request.id, len(chunk.tokens))
        self.recorder.on_stored(plan)
        keeps: list[Keep] = []
        for part in self._split(plan):
            own = _subplan(plan, part.chunks)
            try:
                if part.method.uses("weigh"):
                    part.method.weigh(own, partial(self._stored, part))
                if part.method.uses("evict"):
                    keeps.extend(part.method.evict(own))
            except Exception as error:
                _blame(error, plan, part.chunks)
                raise
        self.recorder.on_cuts_by_error(plan, keeps)
        self._apply(keeps)
        self._seal(plan)
        self.recorder.on_step_end(plan)
        self._plan = None

    def _stored(self, part: _Part) -> Iterator[LayerStep]:
        """This step at each layer that a method acts on, after its forward."""
        for layer, spec in enumerate(self.model.layers):
            if spec.kind in part.method.traits.kinds and spec.kind is not LayerKind.RECURRENT:
                yield self._narrow(self.cache.stored_step(layer), part.chunks)

    def shrink(self, request: Request) -> bool:
        """Under memory pressure: let the method retain half of what a decoding request's rows hold.

        Between steps. False, and nothing has changed, if it cannot.
        """
        method = self.methods[request.method]
        chunk = Chunk(request, (), request.computed, Purpose.DECODE, False)
        self.cache.reserve(StepPlan((chunk,)))  # no tokens: a look at the rows as they are
        kinds = method.traits.kinds
        layers = [i for i in self.model.kv_layers if self.model.layers[i].kind in kinds]
        rows = [self.cache.stored_step(layer) for layer in layers]
        lens = [n for layer in layers for n in self.cache.lens(request.id, layer)]
        target = sum(lens) // max(1, len(lens)) // 2
        keeps = method.shrink(request, target, rows) if target else ()
        try:
            self.retain(keeps)
        except CapacityError:  # rows that share pages would need their own first
            return False
        return bool(keeps)

    def retain(self, keeps: Sequence[Keep]) -> None:
        """Apply retain decisions between steps (memory pressure): summaries follow at once."""
        self._apply(keeps)
        self._seal(StepPlan(()))

    def forget(self, request_id: int) -> None:
        """The request ended or was preempted."""
        self.digests.forget(request_id)
        for method in self.methods.values():
            attempt(partial(method.forget, request_id))

    def sparse_output(self, request: Request) -> SparseOutput | None:
        """What a request that ends asked to know; None if it asked for nothing."""
        out = self.recorder.result(request.id)
        if request.sparse.dropped_mass:
            out = out or self.recorder.blank(request)
            out.dropped_mass = self.digests.result(request)
        if request.sparse.kv_error is not None:
            out = out or self.recorder.blank(request)
            out.found_budget = self.recorder.found_budget(request.id)
        return out

    def _apply(self, keeps: Sequence[Keep]) -> None:
        if keeps:
            self.recorder.on_keeps(keeps)
            self.cache.apply(keeps)

    def _seal(self, plan: StepPlan) -> None:
        for pages in self.cache.seal(plan):
            for method in self.methods.values():
                method.seal(pages)

    def _split(self, plan: StepPlan) -> list[_Part]:
        if plan is not self._plan:
            parts: dict[str, _Part] = {}
            for i, chunk in enumerate(plan.chunks):
                key = chunk.request.method
                part = parts.setdefault(key, _Part(self.methods[key], [], []))
                part.chunks.append(i)
                if chunk.purpose is Purpose.DECODE:
                    part.decodes.append(i)
            self._plan, self._parts, self._order = plan, list(parts.values()), {}
            self._digesting = self.digests.chunks(plan)
            self._patterned = [
                (i, self.patterns[chunk.request.prefill])
                for i, chunk in enumerate(plan.chunks)
                if _is_prompt(chunk) and chunk.request.prefill in self.patterns
            ]
        return self._parts

    def _acting(self, at: LayerStep, hook: str) -> Iterator[_Part]:
        """Parts whose method overrides the hook and acts on layers of this kind."""
        for part in self._split(at.plan):
            if part.method.uses(hook) and at.spec.kind in part.method.traits.kinds:
                yield part

    @staticmethod
    def _narrow(at: LayerStep, chunks: list[int]) -> LayerStep:
        return at if len(chunks) == len(at.plan.chunks) else at.subset(chunks)

    def _merge(self, at: LayerStep, found: list[tuple[list[int], Selection]]) -> Selection:
        """One selection over all spans of the step; shapes depend on host facts only."""
        total = len(at.plan.chunks)
        if len(found) == 1 and len(found[0][0]) == total:
            return found[0][1]
        if any(s.cu_q is not None for _, s in found):
            raise UnsupportedError(
                "these methods cannot share a step", ["one of them refines the query spans"]
            )
        unit: Literal["page", "slot"] = (
            "page" if all(s.unit == "page" for _, s in found) else "slot"
        )
        if unit == "slot":
            found = [(rows, _as_slots(s, at.page_size)) for rows, s in found]
        chosen = {i for rows, _ in found for i in rows}
        rest = [i for i in range(total) if i not in chosen]
        parts = [s.index for _, s in found]
        if rest:
            parts.append(self._everything(at, rest, unit == "slot"))
        groups = max(p.shape[1] for p in parts)
        width = max(p.shape[2] for p in parts)
        padded = [
            torch.nn.functional.pad(p.expand(-1, groups, -1), (0, width - p.shape[2]), value=-1)
            for p in parts
        ]
        order = tuple(i for rows, _ in found for i in rows) + tuple(rest)
        index = torch.cat(padded).index_select(0, self._inverse(order, padded[0].device))
        return Selection(index=index, unit=unit, whole_from=max(chosen) + 1)

    @staticmethod
    def _everything(at: LayerStep, rows: list[int], slots: bool) -> Tensor:
        """Selection rows that read every column: int32 [len(rows), G, W]."""
        table, lens = (at.subset(rows) if len(rows) < len(at.plan.chunks) else at).table()
        per_column = 1 if slots else at.page_size
        width = table.shape[2] * at.page_size if slots else table.shape[2]
        columns = torch.arange(width, dtype=torch.int32, device=table.device)
        used = (lens + per_column - 1) // per_column
        return torch.where(columns < used[..., None], columns, -1)

    def _inverse(self, order: tuple[int, ...], device: torch.device) -> Tensor:
        """Where span i of the step sits in the concatenated parts; kept for the whole step."""
        if order not in self._order:
            inverse = sorted(range(len(order)), key=order.__getitem__)
            self._order[order] = torch.tensor(inverse, dtype=torch.int64, device=device)
        return self._order[order]


def _as_slots(selection: Selection, page_size: int) -> Selection:
    """The same selection in slots; those past a row's end are left out when it is read."""
    if selection.unit == "slot":
        return selection
    index = selection.index[..., None]
    slots = index * page_size + torch.arange(page_size, dtype=torch.int32, device=index.device)
    return Selection(torch.where(index >= 0, slots, -1).flatten(2), "slot")


def _blame(error: BaseException, plan: StepPlan, chunks: Sequence[int]) -> None:
    blame(error, (plan.chunks[i].request.id for i in chunks))


def _is_prompt(chunk: Chunk) -> bool:
    """Not a replay, and not tokens that a preempted request had generated densely."""
    return chunk.purpose is Purpose.PREFILL and chunk.start < chunk.request.prompt_len


def _subplan(plan: StepPlan, chunks: list[int]) -> StepPlan:
    if len(chunks) == len(plan.chunks):
        return plan
    return StepPlan(tuple(plan.chunks[i] for i in chunks), plan.preempted)
