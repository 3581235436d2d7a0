"""The families most methods belong to. A subclass writes one or two tensor functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseengine import ops
from sparseengine.cache.tensors import upload
from sparseengine.core.method import LayerStep, SparseMethod, Traits
from sparseengine.core.plan import Chunk, Demand, Purpose, Request, StepPlan
from sparseengine.core.specs import AuxSpec, CacheGroup, LayerKind, ModelSpec, Per, Ragged
from sparseengine.core.view import Keep, Selection
from sparseengine.methods.allocate import Allocation
from sparseengine.methods.budgets import protect, split_protected, top_mask
from sparseengine.methods.error_targets import Target, row_counts
from sparseengine.methods.knobs import MethodConfig, knob
from sparseengine.methods.pending import Pending, cut_together, expand_lens

DENSE_DOC = "first layers of the model that retain and read everything"
_TINY = 1e-30


class Method(SparseMethod):
    """What all methods here share: the layers they act on, a cache plan, an honest demand.

    default_budget, default_ratio: what a request gets that gives neither; at most one is set.
    page_size: slots of a page in the plan; set by `make_method`.
    """

    config_class: ClassVar[type[MethodConfig]] = MethodConfig
    ragged: ClassVar[Ragged] = Ragged.REQUEST
    default_budget: ClassVar[int | None] = None
    default_ratio: ClassVar[float | None] = None
    page_size: int = 16

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        self.layers = tuple(
            i
            for i, spec in enumerate(model.layers)
            if spec.kind in self.traits.kinds
            and spec.kind is not LayerKind.RECURRENT
            and i not in self.dense_layers()
        )
        self._acts = frozenset(self.layers)

    def act_on(self, kinds: frozenset[LayerKind]) -> None:
        """Leave layers of other kinds alone, too."""
        self.layers = tuple(i for i in self.layers if self.model.layers[i].kind in kinds)
        self._acts = frozenset(self.layers)

    def dense_layers(self) -> frozenset[int]:
        """Layers that this configuration leaves dense: the first ones, if it has such a knob."""
        return frozenset(range(getattr(self.config, "dense_layers", 0)))

    def acts_on(self, layer: int) -> bool:
        return layer in self._acts

    def aux(self) -> tuple[AuxSpec, ...]:
        """Side tensors of the layers whose kind the method acts on."""
        return ()

    def side_tensors(self) -> tuple[AuxSpec, ...]:
        """`aux` and what a family needs."""
        return self.aux()

    def cache_plan(self) -> tuple[CacheGroup, ...]:
        """One group per layer kind; layers of other kinds are stored plainly."""
        groups = []
        for kind in (LayerKind.FULL, LayerKind.LATENT, LayerKind.WINDOW):
            layers = tuple(i for i, s in enumerate(self.model.layers) if s.kind is kind)
            if layers and kind in self.traits.kinds:
                groups.append(
                    CacheGroup(
                        layers=layers,
                        page_size=self.page_size,
                        ragged=self.ragged,
                        aux=self.side_tensors(),
                    )
                )
            elif layers:
                groups.append(CacheGroup(layers=layers, page_size=self.page_size))
        return tuple(groups)

    def mean_rows(self, acting_tokens: int, other_tokens: int) -> int:
        """Average row length when acting layers hold one length and the others another.

        WINDOW layers that the method leaves alone do not count: what they hold, no method changes.
        Lengths are rounded up to pages before averaging: the mean then never hides a page.
        """
        acting = sum(self.model.layers[i].kv_heads for i in self.layers)
        counted = {*self.model.sparse_layers, *self.layers}
        every = sum(self.model.layers[i].kv_heads for i in counted)
        if acting == every or acting_tokens == other_tokens:
            return acting_tokens
        page = self.page_size
        pages = acting * -(-acting_tokens // page) + (every - acting) * -(-other_tokens // page)
        return -(-pages * page // max(every, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionConfig(MethodConfig):
    """Knobs of every scored eviction."""

    dense_layers: int = knob(0, DENSE_DOC, low=0, high=4096)
    sink: int = knob(4, "first tokens of the prompt that are always retained", low=0, high=1 << 20)
    recent: int = knob(32, "newest tokens that are always retained", low=0, high=1 << 20)


class EvictionMethod(Method):
    """Physical eviction when the prompt ends: `score` says how important each stored token is.

    The budget counts all tokens retained per row right after the eviction: sinks, recent tokens and
    the scored rest. A row that is not longer than the budget is left alone. Tokens generated later
    are appended and not evicted. A budget below sink + recent shortens them: sinks get at most
    half, the newest tokens the rest.
    """

    traits = Traits(family="eviction", sharing="chain", takes="retained")
    ragged = Ragged.HEAD
    default_ratio: ClassVar[float | None] = 0.25
    keys_suffice: ClassVar[bool] = False  # whether `score` works at any time, from stored rows
    stored_score: ClassVar[str] = "eviction_score"  # side tensor of scores, for a later `shrink`
    allocation: Allocation | None = None  # how rows share their budgets; None: the method's own way

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._pending: dict[int, dict[int, Pending]] = {}

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Importance of each slot of a chunk's rows: fp32 [H, Lmax], H = 1 or kv_heads."""
        raise NotImplementedError

    def masses(self, at: LayerStep, chunk: int) -> Tensor:
        """Attention paid to each slot, the mean over queries and a head's group: fp32 [H, L].

        Of the queries that traits.measures names; a row sums to 1 at most. For error targets.
        """
        raise NotImplementedError

    def watch(self, at: LayerStep, chunk: int) -> None:
        """Called for every prompt chunk before `score`, to remember what later chunks need."""

    def protected(self, budget: int) -> tuple[int, int]:
        """Sinks and recent tokens that are retained whatever their score."""
        return split_protected(budget, self.config.sink, self.config.recent)

    def least(self, budget: int) -> int:
        """The smallest budget under which no protected token gives way, for a search from below."""
        sink, recent = self.protected(budget)
        return max(1, 2 * sink, sink + recent)

    def layer_budget(self, layer: int, length: int, budget: int) -> int:
        """Tokens that a layer's rows of `length` tokens retain; override `demand` with it."""
        return budget

    def target(self, chunk: Chunk, budget: int) -> int:
        """Tokens that a row retains after this prompt chunk, if it is due."""
        return budget

    def is_due(self, chunk: Chunk) -> bool:
        """Whether this prompt chunk is followed by an eviction.

        A block of `prefill_block` tokens ends at fixed positions, however the prompt is chunked.
        """
        block = self.prefill_block()
        return chunk.ends_prompt or (block is not None and chunk.stop % block == 0)

    def observe(self, at: LayerStep) -> None:
        if not self.acts_on(at.layer):
            return
        for i in range(len(at.plan.chunks) - 1, -1, -1):
            chunk = at.plan.chunks[i]
            if chunk.purpose is Purpose.DECODE:
                return  # DECODE chunks come first: a decode step costs one look
            if chunk.purpose is not Purpose.PREFILL or chunk.stop > chunk.request.prompt_len:
                continue
            if chunk.request.saved:
                continue  # its rows were cut, and what comes behind them stays
            self.watch(at, i)
            budget, by_error = chunk.request.budget, chunk.request.sparse.kv_error is not None
            if not self.is_due(chunk) or (budget is None and not by_error):
                continue
            budget = chunk.stop if budget is None else self.target(chunk, budget)
            # Rows that share a budget may be shorter than it; together they are not.
            longest = max(at.lens(i)) if self.allocation is None else chunk.stop
            if longest > budget or by_error:
                self.note(at, i, budget)

    def reusable(self, prompt_len: int) -> int:
        """All of the prompt, if stored rows are all that is looked at when it ends."""
        own = type(self)
        looks = own.watch is not EvictionMethod.watch or self.uses("layer_end")
        looks |= own.observe is not EvictionMethod.observe or self.prefill_block() is not None
        return 0 if looks else prompt_len

    def saves(self) -> bool:
        """Where the prompt is cut once, when it ends."""
        return not self.traits.decode_hooks and self.prefill_block() is None

    def why_not(self, allocation: Allocation) -> str | None:
        """Why rows of this method cannot share budgets so; None if they can."""
        own = type(self)
        if own.retain is EvictionMethod.retain and own.layer_budget is EvictionMethod.layer_budget:
            return None
        return "it shares budgets out itself; leave `allocate` out, or name a method that scores"

    def note(self, at: LayerStep, chunk: int, budget: int) -> None:
        """Score a chunk's rows at this layer; they are cut to the budget when the step ends."""
        found = self.weighed(at, chunk, budget)
        self._pending.setdefault(at.plan.chunks[chunk].request.id, {})[at.layer] = found
        if self._stores_scores():
            score = torch.where(found.scores == 0, -_TINY, found.scores)  # 0 is: never scored
            at.scatter(self.stored_score, chunk, score.expand(at.spec.kv_heads, -1))

    def weighed(self, at: LayerStep, chunk: int, budget: int) -> Pending:
        """What the choice at this layer needs to know."""
        lens, request = at.lens(chunk), at.plan.chunks[chunk].request
        own, error = self.layer_budget(at.layer, max(lens), budget), request.sparse.kv_error
        if error is None:
            return Pending(self.score(at, chunk).float(), lens, own)
        if self.allocation is not None:
            every = self._row_budgets(request.prompt_len, budget, self.allocation)
            own = every[self.layers.index(at.layer)]
        target = Target(self.masses(at, chunk), error)
        return Pending(self.score(at, chunk).float(), lens, own, target)

    def _stores_scores(self) -> bool:
        return not self.can_rescore()

    def side_tensors(self) -> tuple[AuxSpec, ...]:
        own = self.aux()
        if not self._stores_scores() or any(a.name == self.stored_score for a in own):
            return own
        # Not `rewritten`: scores are stored when a prompt ends, before anybody shares its pages.
        return (*own, AuxSpec(name=self.stored_score, per=Per.SLOT))

    def evict(self, plan: StepPlan) -> Sequence[Keep]:
        """One batched choice per (shape, budget) over all layers and requests of the step."""
        batches: dict[tuple[torch.Size, int], list[tuple[int, int, Pending]]] = {}
        keeps: list[Keep] = []
        how = self.allocation
        for chunk in plan.chunks:
            pending = self._pending.pop(chunk.request.id, {})
            by_error = chunk.request.sparse.kv_error is not None
            if pending and how is not None and (how.shares or not by_error):
                keeps.extend(self._share_out(chunk.request, pending, how))
                continue
            for layer, found in pending.items():
                if found.target is not None:
                    keeps.append(self.cut_by_error(chunk.request.id, layer, found, found.target))
                    continue
                key = (found.scores.shape, found.budget)
                batches.setdefault(key, []).append((chunk.request.id, layer, found))
        return keeps + self._choose(batches)

    def cut_by_error(self, request: int, layer: int, found: Pending, target: Target) -> Keep:
        """The fewest best tokens of each row that lose at most the error."""
        rows = expand_lens(found.lens, len(target.masses))
        lens = upload(np.array(rows, np.int64), found.scores.device)
        scores = found.scores.expand(len(rows), -1)
        masks = self.least_mask(scores, lens, target, found.budget).unbind(0)
        return Keep(request, layer, tuple(m[:n] for m, n in zip(masks, rows, strict=True)))

    def least_mask(self, scores: Tensor, lens: Tensor, target: Target, budget: int) -> Tensor:
        """The same: fp32 [H, L] and int64 [H] -> bool [H, L], within the budget."""
        shielded, least = protect(scores, lens, *self.protected(budget)), self.least(budget)
        counts = row_counts(shielded, target, lens, budget, least, self.page_size)
        return top_mask(shielded, counts)

    def _choose(
        self, batches: Mapping[tuple[torch.Size, int], list[tuple[int, int, Pending]]]
    ) -> list[Keep]:
        keeps: list[Keep] = []
        for ((num_heads, _), budget), items in batches.items():
            scores = torch.stack([found.scores for _, _, found in items])  # [N, H, L]
            rows = [expand_lens(found.lens, num_heads) for _, _, found in items]
            lens = upload(np.array(rows, np.int64), scores.device)
            masks = self.retain(scores, lens, budget)
            for (request, layer, _), lengths, mask in zip(items, rows, masks, strict=True):
                rows_of = zip(mask.unbind(0), lengths, strict=True)
                keeps.append(Keep(request, layer, tuple(m[:n] for m, n in rows_of)))
        return keeps

    def _share_out(
        self, request: Request, found: Mapping[int, Pending], allocation: Allocation
    ) -> list[Keep]:
        """The cut of one request's rows that share: those of layers that store equal sizes."""
        keeps: list[Keep] = []
        alike: dict[tuple[object, ...], list[int]] = {}
        for layer in sorted(found):
            spec, by_error = self.model.layers[layer], found[layer].target is not None
            own = layer if by_error and allocation.scope == "layer" else None
            alike.setdefault((own, spec.kv_heads, *spec.stored_dims), []).append(layer)
        for layers in alike.values():
            items = [found[layer] for layer in layers]
            heads, longest = items[0].scores.shape[0], max(p.scores.shape[1] for p in items)
            parts = [pad(p.scores, (0, longest - p.scores.shape[1])) for p in items]
            rows = [expand_lens(p.lens, heads) for p in items]
            scores = torch.stack(parts)  # [N, H, L]
            lens = upload(np.array(rows, np.int64), scores.device)
            retain = partial(self._shared, request.prompt_len, allocation, layers, scores, lens)
            masks = cut_together(items, retain, self.least(items[0].budget))
            for layer, lengths, mask in zip(layers, rows, masks, strict=True):
                rows_of = zip(mask.unbind(0), lengths, strict=True)
                keeps.append(Keep(request.id, layer, tuple(m[:n] for m, n in rows_of)))
        return keeps

    def _shared(
        self,
        length: int,
        how: Allocation,
        layers: Sequence[int],
        scores: Tensor,
        lens: Tensor,
        budget: int,
    ) -> Tensor:
        """What rows of some layers retain under a budget: bool [N, H, L]."""
        every = self._row_budgets(length, budget, how)
        own = [every[self.layers.index(layer)] for layer in layers]
        return how.retain(scores, lens, own, self.protected(budget), self.page_size)

    def _row_budgets(self, prompt_len: int, budget: int, allocation: Allocation) -> tuple[int, ...]:
        """Tokens per row of each acting layer, before rows share."""
        forced = sum(self.protected(budget))
        return allocation.layer_budgets(len(self.layers), prompt_len, budget, forced)

    def can_rescore(self) -> bool:
        return self.keys_suffice

    def can_shrink(self, request: Request) -> bool:
        """Whether `rescore` knows the request's tokens."""
        return True

    def rescore(self, at: LayerStep) -> Tensor:
        """Scores of a request's rows at any time: fp32 [H, L]; of its chunk alone in `at`.

        From what is stored where that suffices; else those of the last cut. Tokens that came later
        and were never scored are above all others.
        """
        if self.can_rescore():
            return self.score(at, 0).float()
        found = at.gather(self.stored_score, 0)
        found = torch.where(found == 0, torch.finfo(found.dtype).max, found)
        return found if self.ragged is Ragged.HEAD else found[:1]

    def shrink(
        self, request: Request, target_tokens: int, rows: Sequence[LayerStep]
    ) -> Sequence[Keep]:
        """A further cut, by `rescore`, to what the method retains under this budget."""
        shared = self.allocation or self.own_sharing()
        if not self.can_shrink(request):
            return ()
        found: dict[int, Pending] = {}
        for at in rows:
            if self.acts_on(at.layer):
                lens = at.lens(0)
                own = self.layer_budget(at.layer, request.prompt_len, target_tokens)
                if shared is not None or max(lens) > own:
                    found[at.layer] = Pending(self.rescore(at), lens, own)
        if shared is not None:
            return self._share_out(request, found, shared)
        batches: dict[tuple[torch.Size, int], list[tuple[int, int, Pending]]] = {}
        for layer, item in found.items():
            batches.setdefault((item.scores.shape, item.budget), []).append(
                (request.id, layer, item)
            )
        return self._choose(batches)

    def own_sharing(self) -> Allocation | None:
        """How rows share budgets without `allocation`, where it is not `retain` that says so."""
        return None

    def retain(self, scores: Tensor, lens: Tensor, budget: int) -> Tensor:
        """Which slots stay: fp32 [N, H, L] and int64 [N, H] -> bool [N, H, L]."""
        shielded = protect(scores, lens, *self.protected(budget))
        return top_mask(shielded, lens.clamp(max=budget), budget)

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        """Peak: the whole prompt (a block on top of the budget in block-wise eviction)."""
        total = prompt_len + max_tokens
        if budget is None or prompt_len <= budget:
            return Demand(total, total)
        block = self.prefill_block()
        retained = self.held(prompt_len, budget, 0)
        worst = prompt_len if block is None else min(prompt_len, retained + block)
        steady = self.mean_rows(min(total, self.held(prompt_len, budget, max_tokens)), total)
        return Demand(max(self.mean_rows(worst, prompt_len), steady), steady)

    def held(self, prompt_len: int, budget: int, grown: int, again: bool = False) -> int:
        """Mean tokens of acting rows after a cut and `grown` tokens more; again: cut repeatedly."""
        if self.allocation is None:
            return budget + self.slack() + grown
        rows = [self.model.layers[i].kv_heads for i in self.layers]
        budgets = self._row_budgets(prompt_len, budget, self.allocation)
        return self.allocation.held(rows, budgets, self.page_size, grown, again)

    def slack(self) -> int:
        """Tokens per row that page rounding may add to the budget, where rows are ragged."""
        return 0

    def forget(self, request_id: int) -> None:
        self._pending.pop(request_id, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig(MethodConfig):
    """Knobs of every page selection."""

    dense_layers: int = knob(2, DENSE_DOC, low=0, high=4096)
    sink_pages: int = knob(1, "first pages of a row that are always read", low=0, high=4096)
    min_pages: int = knob(3, "pages read at least, whatever the budget", low=1, high=4096)


class SelectionMethod(Method):
    """Reads the pages with the highest score in each decode step; retains everything.

    The budget counts tokens read per row: budget // page_size pages, never fewer than `min_pages`.
    The open (last) page and `sink_pages` are always among them; sinks give way when there is no
    room. A row that is not longer than the budget is read whole. Prefill is dense.
    """

    traits = Traits(family="selection", query_aware=True, decode_hooks=True, takes="read")
    default_budget = 1024
    fixed_budget: int | None = None  # tokens read per row, where the request's budget is another's
    aligned_layers: ClassVar[bool] = False  # whether a layer reads slots that another layer chose

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._seen: tuple[tuple[Chunk, ...], tuple[int, bool]] = ((), (0, False))

    def dense_layers(self) -> frozenset[int]:
        return frozenset(range(self.config.dense_layers))

    def score_pages(self, at: LayerStep, table: Tensor) -> Tensor:
        """Importance of each page to this step's queries; table int32 [S, G, W] -> [S, Hkv, W].

        Columns past a row's end may hold anything, NaN included.
        """
        raise NotImplementedError

    def select(self, at: LayerStep) -> Selection | None:
        width = self._width(at) if self.acts_on(at.layer) else None
        if width is None:
            return None
        table, lens = at.table()  # [S, G, W], [S, G]
        index = ops.top_pages(
            self.score_pages(at, table),
            lens,
            self.budgets(at),
            at.page_size,
            sinks=min(self.config.sink_pages, self.config.min_pages - 1),
            least=self.config.min_pages,
            width=min(width, table.shape[2]),
        )
        return Selection(index)

    def budgets(self, at: LayerStep) -> Tensor:
        """int32 [S]: tokens that each chunk's rows read, on the device."""
        if self.fixed_budget is None:
            return at.budgets()
        size = (len(at.plan.chunks),)
        return torch.full(size, self.fixed_budget, dtype=torch.int32, device=at.q.device)

    def limits(self, at: LayerStep) -> tuple[int, bool]:
        """The largest budget of a step, and whether a row of this layer is longer than its own.

        Looked up once per step if nothing is evicted, for all rows are alike then.
        """
        chunks = at.plan.chunks
        if self.fixed_budget is not None:
            longest = max((max(at.lens(i)) for i in range(len(chunks))), default=0)
            return self.fixed_budget, longest > self.fixed_budget
        if chunks != self._seen[0]:  # mostly the same objects: compared by identity
            budgets = [c.request.budget or 0 for c in chunks]
            exceeds = any(max(at.lens(i)) > b for i, b in enumerate(budgets))
            self._seen = (chunks, (max(budgets, default=0), exceeds))
        return self._seen[1]

    def captured_budget(self, plan: StepPlan, lens: Sequence[int]) -> int | None:
        budgets = [self.fixed_budget or c.request.budget or 0 for c in plan.chunks]
        exceeds = any(n > b for n, b in zip(lens, budgets, strict=True))
        return max(budgets) if exceeds and self.layers else None

    def _width(self, at: LayerStep) -> int | None:
        """The most pages that a row of this step reads; None when all rows are read whole."""
        budget, exceeds = self.limits(at)
        return max(self.config.min_pages, -(-budget // at.page_size)) if exceeds else None
