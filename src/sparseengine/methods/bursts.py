"""Evictions that go on while decoding, in bursts: a row grows by `interval` and is cut back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.plan import Demand, Purpose, Request, StepPlan
from sparseengine.core.view import Keep
from sparseengine.methods.families import EvictionMethod, _Pending
from sparseengine.methods.knobs import MethodConfig, knob

INTERVAL_DOC = (
    "decoded tokens between two evictions: a row grows to budget + interval and is cut back to the "
    "budget; 1 evicts in every step, 0 never evicts while decoding"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstConfig(MethodConfig):
    """Knobs of every eviction in bursts."""

    interval: int = knob(64, INTERVAL_DOC, low=0, high=1 << 20)
    sink: int = knob(0, "first tokens of the prompt that are always retained", low=0, high=1 << 20)


class BurstEviction(EvictionMethod):
    """`watch` sees every chunk, decodes too; `score` works at any time from what `watch` kept.

    A row that holds budget + interval tokens after a decode step is cut back to the budget, as all
    rows longer than the budget are when the prompt ends.
    """

    traits: ClassVar[Traits] = Traits(
        family="eviction",
        sharing="chain",
        takes="retained",
        query_aware=True,
        decode_hooks=True,
        graph_safe=False,
    )

    def can_cut(self, request: Request) -> bool:
        """Whether a row can outgrow the budget; else nothing of the request need be remembered."""
        if request.budget is None:
            return False
        decoded = request.max_tokens if self.config.interval else 0
        return request.prompt_len + decoded > request.budget

    def idle(self, plan: StepPlan, lens: Sequence[int]) -> bool:
        return not self.config.interval or not any(self.can_cut(c.request) for c in plan.chunks)

    def observe(self, at: LayerStep) -> None:
        super().observe(at)  # chunks of prompts
        interval = self.config.interval
        if not self.acts_on(at.layer) or not interval:
            return
        for i, chunk in enumerate(at.plan.chunks):
            if chunk.purpose is not Purpose.DECODE:
                return
            budget, lens = chunk.request.budget, at.lens(i)
            if budget is None or not self.can_cut(chunk.request):
                continue
            self.watch(at, i)
            if max(lens) >= budget + interval:
                found = _Pending(self.score(at, i).float(), lens, budget)
                self._pending.setdefault(chunk.request.id, {})[at.layer] = found

    def shrink(
        self, request: Request, target_tokens: int, rows: Sequence[LayerStep]
    ) -> Sequence[Keep]:
        """A further eviction by the same scores; not if tokens were not watched."""
        if not self.config.interval or not self.can_cut(request):
            return ()
        batches: dict[tuple[torch.Size, int], list[tuple[int, int, _Pending]]] = {}
        for at in rows:
            if self.acts_on(at.layer) and max(at.lens(0)) > target_tokens:
                found = _Pending(self.score(at, 0).float(), at.lens(0), target_tokens)
                key = (found.scores.shape, target_tokens)
                batches.setdefault(key, []).append((request.id, at.layer, found))
        return self._choose(batches)

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        """Rows of the prompt (or of a block on top of the budget), then budget + interval."""
        total = prompt_len + max_tokens
        if budget is None:
            return Demand(total, total)
        block, interval = self.prefill_block(), self.config.interval
        worst = prompt_len if block is None else min(prompt_len, budget + block)
        grown = min(interval, max_tokens) if interval else max_tokens
        steady = self.mean_rows(min(total, budget + grown), total)
        return Demand(max(self.mean_rows(worst, prompt_len), steady), steady)
