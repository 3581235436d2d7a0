"""Evictions that go on while decoding, in bursts: a row grows by `interval` and is cut back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.plan import Demand, Purpose, Request, StepPlan
from sparseengine.methods.families import DENSE_DOC, EvictionMethod
from sparseengine.methods.knobs import MethodConfig, knob

INTERVAL_DOC = (
    "decoded tokens between two evictions: a row grows to budget + interval and is cut back to the "
    "budget; 1 evicts in every step, 0 never evicts while decoding"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstConfig(MethodConfig):
    """Knobs of every eviction in bursts."""

    dense_layers: int = knob(0, DENSE_DOC, low=0, high=4096)
    interval: int = knob(64, INTERVAL_DOC, low=0, high=1 << 20)
    sink: int = knob(0, "first tokens of the prompt that are always retained", low=0, high=1 << 20)


class BurstEviction(EvictionMethod):
    """`watch` sees every chunk, decodes too; `score` works after any step from what `watch` kept.

    A row that holds budget + interval tokens after a decode step is cut back to the budget, as all
    rows longer than the budget are when the prompt ends.
    """

    traits: ClassVar[Traits] = Traits(
        family="eviction",
        sharing="chain",
        takes="retained",
        query_aware=True,
        decode_hooks=True,
    )

    def can_cut(self, request: Request) -> bool:
        """Whether a row can outgrow the budget; else nothing of the request need be remembered."""
        if request.budget is None or self.config.interval:
            return request.outgrows_budget
        return request.prompt_len > request.budget

    def is_watched(self, request: Request) -> bool:
        """Whether its tokens need be watched: a prompt that an error target cuts, too."""
        return self.can_cut(request) or request.sparse.kv_error is not None

    def captured_budget(self, plan: StepPlan, lens: Sequence[int]) -> int | None:
        """One graph for all budgets: it watches, and `weigh` looks at the rows afterwards."""
        return 0 if self.layers and self._growing(plan) else None

    def observe(self, at: LayerStep) -> None:
        super().observe(at)  # chunks of prompts
        if self.acts_on(at.layer):
            decodes = self._growing(at.plan)
            if decodes:
                self.watch_decodes(at, decodes)

    def _growing(self, plan: StepPlan) -> list[int]:
        """Decodes of requests whose rows may have to be cut. DECODE chunks come first in a plan."""
        if not self.config.interval:
            return []
        decodes = takewhile(lambda c: c.purpose is Purpose.DECODE, plan.chunks)
        return [i for i, c in enumerate(decodes) if self.can_cut(c.request)]

    def watch_decodes(self, at: LayerStep, chunks: list[int]) -> None:
        """`watch` for chunks of one token each: device work of static shapes, all rows at once."""
        raise NotImplementedError

    def weigh(self, plan: StepPlan, layers: Callable[[], Iterable[LayerStep]]) -> None:
        """Score the rows that have grown by `interval`; alike in all layers but by an error."""
        growing = self._growing(plan)
        if not growing:
            return
        if self.allocation is not None:
            self._weigh_shared(plan, growing, [at for at in layers() if self.acts_on(at.layer)])
            return
        alike = all(plan.chunks[i].request.sparse.kv_error is None for i in growing)
        for at in layers():
            if not self.acts_on(at.layer):
                continue
            due = 0
            for i in growing:
                budget, longest = plan.chunks[i].request.budget, max(at.lens(i))
                if budget is not None and longest >= budget + self.config.interval:
                    pending = self._pending.setdefault(plan.chunks[i].request.id, {})
                    pending[at.layer] = self.weighed(at, i, budget)
                    due += 1
            if not due and alike:
                return

    def _weigh_shared(
        self, plan: StepPlan, growing: Sequence[int], layers: Sequence[LayerStep]
    ) -> None:
        """The same for rows that share: when their mean has grown by `interval`."""
        assert self.allocation is not None
        for i in growing:
            request = plan.chunks[i].request
            if request.budget is None:
                continue
            heads = [at.spec.kv_heads for at in layers]
            total = sum(
                sum(at.lens(i)) * n // len(at.lens(i)) for at, n in zip(layers, heads, strict=True)
            )
            cap = self.allocation.cap(request.budget, self.page_size)
            if total >= sum(heads) * (cap + self.config.interval):
                for at in layers:
                    self.note(at, i, request.budget)

    def can_rescore(self) -> bool:
        return True

    def can_shrink(self, request: Request) -> bool:
        """Not if its tokens were not watched."""
        return bool(self.config.interval) and self.can_cut(request)

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        """Rows of the prompt (or of a block on top of the budget), then budget + interval."""
        total = prompt_len + max_tokens
        if budget is None:
            return Demand(total, total)
        block, interval = self.prefill_block(), self.config.interval
        again = bool(interval)
        grown = min(interval, max_tokens) if interval else max_tokens
        most = self.held(prompt_len, budget, block or 0, again)
        worst = prompt_len if block is None else min(prompt_len, most)
        steady = self.mean_rows(min(total, self.held(prompt_len, budget, grown, again)), total)
        return Demand(max(self.mean_rows(worst, prompt_len), steady), steady)
