"""TOVA (arXiv:2401.06104): drop what the newest query attends to least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.plan import Demand, Purpose, StepPlan
from sparseengine.core.specs import Ragged
from sparseengine.methods.allocate import Allocation
from sparseengine.methods.families import EvictionConfig, EvictionMethod
from sparseengine.methods.knobs import knob


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

    Deviations: the newest token is retained whatever its score (preset "authors" lets it drop
    itself); with burst > 1 only every burst-th query decides, which is cheaper and another set than
    token by token. Eviction in decode moves the rows' tails, so that positions stay in order, and
    such steps run eagerly. The paper has no sinks and neither has the default. Tensor parallelism
    would need the scores of all heads of a layer.
    """

    name = "tova"
    config_class = TOVAConfig
    ragged = Ragged.LAYER
    traits = Traits(
        family="eviction",
        sharing="chain",
        takes="retained",
        query_aware=True,
        graph_safe=False,
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

    def observe(self, at: LayerStep) -> None:
        super().observe(at)
        if not self.config.burst or not self.acts_on(at.layer):
            return
        for i, chunk in enumerate(at.plan.chunks):
            if chunk.purpose is not Purpose.DECODE:
                return  # DECODE chunks come first
            budget = chunk.request.budget
            if budget is not None and max(at.lens(i)) >= budget + self.config.burst:
                self.note(at, i, budget)

    def why_not(self, allocation: Allocation) -> str | None:
        if self.config.burst and allocation.kind != "uniform":
            return "it cuts the rows of each layer by themselves while decoding; set burst=0"
        return super().why_not(allocation)

    def idle(self, plan: StepPlan, lens: Sequence[int]) -> bool:
        if not self.config.burst:
            return True
        budgets = (c.request.budget for c in plan.chunks)
        return all(
            b is None or n < b + self.config.burst for b, n in zip(budgets, lens, strict=True)
        )

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
