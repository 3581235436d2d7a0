"""TOVA (arXiv:2401.06104): drop what the newest query attends to least."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.plan import Demand, Purpose, StepPlan
from sparseengine.core.specs import AuxSpec, Per, Ragged
from sparseengine.methods.allocate import Allocation
from sparseengine.methods.error_targets import Target
from sparseengine.methods.families import EvictionConfig, EvictionMethod
from sparseengine.methods.knobs import knob
from sparseengine.methods.pending import Pending


@dataclass(frozen=True, slots=True, kw_only=True)
class TOVAConfig(EvictionConfig):
    """Knobs of TOVA."""

    sink: int = knob(0, "first tokens of the prompt that are always retained", low=0, high=1 << 20)
    recent: int = knob(1, "newest tokens that are always retained", low=0, high=1 << 20)
    burst: int = knob(
        1,
        "while decoding, cut a row to the budget when it is this many tokens longer; 0 cuts it "
        "when the prompt ends and never again",
        low=0,
        high=1 << 20,
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"recent": 0},
            "kvpress": {"burst": 0},
            "paper": {"recent": 0},
        }
    )


class TOVA(EvictionMethod):
    """Retains what the newest query attends to most, in the prompt and then at every token.

    arXiv:2401.06104. The score of a token is its attention under the newest query: fp32 softmax
    over the row, mean over all query heads; so a layer has one ranking, and its KV heads share one
    row. When the prompt ends, and in each decode step that leaves a row `burst` tokens longer than
    the budget, the row is cut to the budget. The scores are those of that step alone: nothing is
    remembered. A row is `burst` tokens above the budget at most while its step runs.

    Costs: 4 bytes per token and KV head; a step that cuts some row reads the keys of all growing
    rows twice more. Deviations: the newest token is retained whatever its score (preset "authors"
    lets it drop itself); with burst > 1 only every burst-th query decides, which is cheaper and
    another set than token by token. Eviction in decode moves the rows' tails, so that positions
    stay in order; a fork shares no pages. The paper has no sinks and neither has the default.
    Tensor parallelism would need the scores of all heads of a layer.
    """

    name = "tova"
    config_class = TOVAConfig
    ragged = Ragged.LAYER
    stored_score = "newest_attention"  # a KV head's query heads together: their sum or mean
    traits = Traits(
        family="eviction",
        sharing="chain",
        takes="retained",
        query_aware=True,
        tp="reduce",
        decode_hooks=True,
        measures="newest",
    )

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Attention of the chunk's last query, mean over all heads: fp32 [1, L]."""
        end = at.span(chunk)[1]
        return at.scores(chunk, at.q[end - 1 : end]).mean(0, keepdim=True)

    def masses(self, at: LayerStep, chunk: int) -> Tensor:
        """The score is the attention itself: fp32 [1, L]."""
        return self.score(at, chunk)

    def aux(self) -> tuple[AuxSpec, ...]:
        return (AuxSpec(name=self.stored_score, per=Per.SLOT, rewritten=True),)

    def watch(self, at: LayerStep, chunk: int) -> None:
        """Claim the row's slots: decodes write to them."""
        now = at.plan.chunks[chunk]
        if self.config.burst and now.ends_prompt and now.request.outgrows_budget:
            none = at.k.new_zeros(at.spec.kv_heads, max(at.lens(chunk)), dtype=torch.float32)
            at.scatter(self.stored_score, chunk, none)

    def observe(self, at: LayerStep) -> None:
        super().observe(at)  # chunks of prompts
        if self.acts_on(at.layer):
            due = self._due(at.plan, lambda i: max(at.lens(i)))
            if due:
                at.subset(due).add_attention(self.stored_score, None, 0.0)

    def _due(self, plan: StepPlan, length: Callable[[int], int]) -> list[int]:
        """Decodes that leave their rows `burst` tokens longer than the budget."""
        if not self.config.burst:
            return []
        due = []
        for i, chunk in enumerate(plan.chunks):
            if chunk.purpose is not Purpose.DECODE:
                break  # DECODE chunks come first
            budget = chunk.request.budget
            if budget is not None and length(i) >= budget + self.config.burst:
                due.append(i)
        return due

    def captured_budget(self, plan: StepPlan, lens: Sequence[int]) -> int | None:
        """One graph for all budgets: it notes what is attended to, and `weigh` looks at that."""
        return 0 if self.layers and self._due(plan, lens.__getitem__) else None

    def mixed_budget(self, budget: int, longest: int) -> int | None:
        """Rows that do not outgrow their budgets are left alone."""
        return budget

    def weigh(self, plan: StepPlan, layers: Callable[[], Iterable[LayerStep]]) -> None:
        """Scores of all rows that are due, a layer at a time; alike in all but by an error."""
        alike = all(c.request.sparse.kv_error is None for c in plan.chunks)
        lens: list[int] = []
        for at in layers():
            if not self.acts_on(at.layer):
                continue
            if not (lens and alike):
                lens = [max(at.lens(i)) for i in range(len(plan.chunks))]
                due = self._due(plan, lens.__getitem__)
            if not due:
                if alike:
                    return
                continue
            part = at.subset(due)
            paid = part.aux(self.stored_score)[part.table()[0].long()]  # [S, G, W, Hs, P]
            scores = paid.sum((1, 3)).flatten(1) / at.spec.q_heads
            for i, row in zip(due, scores, strict=True):
                request, found = plan.chunks[i].request, row[None, : lens[i]]
                error = request.sparse.kv_error
                target = None if error is None else Target(found, error)
                pending = Pending(found, (lens[i],), request.budget or 0, target)
                self._pending.setdefault(request.id, {})[at.layer] = pending

    def rescore(self, at: LayerStep) -> Tensor:
        """Attention at the last cut; tokens that came later are above all others."""
        found = at.gather(self.stored_score, 0).sum(0, keepdim=True)
        return torch.where(found == 0, torch.finfo(found.dtype).max, found)

    def why_not(self, allocation: Allocation) -> str | None:
        if self.config.burst and allocation.kind != "uniform":
            return "it cuts the rows of each layer by themselves while decoding; set burst=0"
        return super().why_not(allocation)

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        """Peak: the whole prompt. Steady: a row that is about to be cut."""
        total = prompt_len + max_tokens
        if budget is None:
            return Demand(total, total)
        longest = min(prompt_len, budget) + max_tokens
        if self.config.burst:
            longest = min(longest, budget + self.config.burst)
        steady = self.mean_rows(longest, total)
        return Demand(max(prompt_len, steady), steady)
