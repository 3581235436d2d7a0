"""H2O (arXiv:2306.14048): tokens that gathered much attention so far are heavy hitters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.plan import Purpose
from sparseengine.core.specs import AuxSpec, Per
from sparseengine.methods.budgets import protect, split_protected, top_mask
from sparseengine.methods.bursts import BurstConfig, BurstEviction
from sparseengine.methods.error_targets import Target, least_counts
from sparseengine.methods.knobs import knob

_MASS, _SEEN = "attention_mass", "attention_seen"
_LEAST = 1e-30
_TILE_LOGITS = 1 << 24  # of one KV head at a time: 64 MiB in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class H2OConfig(BurstConfig):
    """Knobs of H2O."""

    recent_ratio: float = knob(
        0.5, "part of the budget that the newest tokens get", low=0.0, high=1.0
    )
    block_tokens: int = knob(
        0,
        "evict after every block of this many prompt tokens, which bounds memory but loses what a "
        "later question needs; 0 evicts once, when the prompt ends",
        low=0,
        high=1 << 20,
    )
    average: bool = knob(
        False, "divide a token's mass by the number of queries that could see it, old tokens' most"
    )
    decay: float = knob(
        1.0, "what is left of the gathered mass after each decoded token", low=0.0, high=1.0
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"recent_ratio": 0.5, "interval": 1},
            "kvpress": {"recent_ratio": 0.0, "interval": 0, "average": True},
            "paper": {"recent_ratio": 0.5, "interval": 1},
            "sparse-vllm": {"recent_ratio": 0.5, "interval": 128},
        }
    )


class H2O(BurstEviction):
    """Retains the tokens that gathered most attention so far, and the newest ones.

    arXiv:2306.14048. Every query, of the prompt and while decoding, adds the attention it pays (a
    softmax in fp32 over all keys it sees) to a number per stored token and KV head, summed over the
    head's query group. Numbers move along with their tokens. When the prompt ends, rows longer than
    the budget keep their newest ceil(recent_ratio * budget) tokens and, of the others, those of
    largest sum. While decoding a row grows to budget + interval and is cut back to the budget in
    the same way. The budget counts everything retained.

    Costs: scoring reads every key of the prompt once more for every query, in tiles of bounded
    memory, and each decode step reads the row's keys twice more; 4 bytes per token and KV head
    (8 with `average`). Old tokens were seen by more queries, so the sum prefers them; `average`
    takes that away.

    Deviations: one choice per KV head (the authors' models have one query head each); prompts are
    cut when they end, not after each query (`block_tokens` bounds memory instead); decoded tokens
    are evicted in bursts of 64 (authors: 1); a fork shares no pages, for its sums differ; `decay`
    is not in the paper. Of preset "sparse-vllm", the one index for all heads is not reproduced.
    """

    name = "h2o"
    config_class = H2OConfig
    traits = replace(BurstEviction.traits, scores="mass", measures="all")

    def aux(self) -> tuple[AuxSpec, ...]:
        names = (_MASS, _SEEN) if self.config.average else (_MASS,)
        return tuple(AuxSpec(name=name, per=Per.SLOT, rewritten=True) for name in names)

    def prefill_block(self) -> int | None:
        return self.config.block_tokens or None

    def protected(self, budget: int) -> tuple[int, int]:
        recent = math.ceil(self.config.recent_ratio * budget - 1e-9)
        return split_protected(budget, self.config.sink, recent)

    def masses(self, at: LayerStep, chunk: int) -> Tensor:
        """The part of all that queries of the prompt paid: fp32 [Hkv, L]."""
        mass = at.gather(_MASS, chunk)
        return mass / mass.sum(-1, keepdim=True).clamp_min(_LEAST)

    def least_mask(self, scores: Tensor, lens: Tensor, target: Target, budget: int) -> Tensor:
        """Newest tokens grow with the budget that is looked for."""

        def cut(budgets: Tensor) -> Tensor:
            newest = torch.ceil(self.config.recent_ratio * budgets.double() - 1e-9).long()
            sink = (budgets // 2).clamp(max=self.config.sink)
            recent = newest.minimum(budgets - sink)
            return top_mask(protect(scores, lens, sink[:, None], recent[:, None]), budgets)

        def lost(budgets: Tensor) -> Tensor:
            return target.masses.double().masked_fill(cut(budgets), 0.0).sum(-1)

        least = self.least(budget)
        return cut(least_counts(lost, target, lens, budget, least, self.page_size))

    def least(self, budget: int) -> int:
        return max(1, 2 * self.protected(budget)[0])  # the newest grow with it

    def watch(self, at: LayerStep, chunk: int) -> None:
        """Add the mass of a chunk's queries to the row's sums; new slots start at zero."""
        now = at.plan.chunks[chunk]
        if not self.is_watched(now.request):
            return
        left = self.config.decay if now.purpose is Purpose.DECODE else 1.0
        mass = at.gather(_MASS, chunk) * left  # [Hkv, L]
        lo, hi = at.span(chunk)
        longest = max(at.lens(chunk))
        for first, end in self._tiles(hi - lo, longest, at.spec.group_size):
            behind = hi - lo - end
            found = at.scores(chunk, at.q[lo + first : lo + end], behind=behind)
            mass[:, : longest - behind] += found.view(at.spec.kv_heads, -1, found.shape[1]).sum(1)
        at.scatter(_MASS, chunk, mass)
        if self.config.average:
            lens = at.table()[1][chunk]  # [G]
            slot = torch.arange(longest, device=mass.device)
            saw = (lens[:, None] - slot).clamp(0, hi - lo)  # of this chunk's queries
            at.scatter(_SEEN, chunk, at.gather(_SEEN, chunk) * left + saw)

    def watch_decodes(self, at: LayerStep, chunks: list[int]) -> None:
        """The same for one query per row, all rows at once."""
        seen = _SEEN if self.config.average else None
        at.subset(chunks).add_attention(_MASS, seen, self.config.decay)

    @staticmethod
    def _tiles(count: int, length: int, group: int) -> list[tuple[int, int]]:
        """Queries of a chunk in runs whose logits are bounded, newest last."""
        size = min(1024, max(16, _TILE_LOGITS // (length * group)))
        return [(first, min(first + size, count)) for first in range(0, count, size)]

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Gathered mass of each slot: fp32 [Hkv, L]."""
        mass = at.gather(_MASS, chunk)
        if not self.config.average:
            return mass
        seen = at.gather(_SEEN, chunk)
        return torch.where(seen > 0, mass / seen, 0.0)
