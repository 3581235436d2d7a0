"""AdaKV (arXiv:2407.11550): one budget per layer, shared out over its KV heads by score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseengine.cache.tensors import upload
from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.plan import Chunk, StepPlan
from sparseengine.core.specs import AuxSpec, LayerKind, ModelSpec
from sparseengine.core.view import Keep
from sparseengine.errors import RequestError
from sparseengine.methods import METHODS
from sparseengine.methods.allocate import share_tokens
from sparseengine.methods.budgets import largest_remainder, protect, top_mask
from sparseengine.methods.error_targets import Target
from sparseengine.methods.families import EvictionMethod
from sparseengine.methods.knobs import MethodConfig, knob, unknown_preset
from sparseengine.methods.pending import Pending, cut_together, expand_lens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaKVConfig(MethodConfig):
    """Knobs of AdaKV; every other knob is passed to the scorer."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"alpha": 0.2, "form": "share"},
            "kvpress": {"alpha": 0.2, "form": "floor"},
            "readme": {"alpha": 0.5, "form": "share"},
        }
    )

    scorer: str = knob("snapkv", "the eviction method that scores, by name")
    alpha: float = knob(0.2, "part of the budget that every head keeps", low=0.0, high=1.0)
    form: str = knob(
        "floor",
        "floor: each head's best alpha * budget tokens are safe, one threshold decides the rest; "
        "share: head budgets are (1 - alpha) * its part of the layer's best + alpha * budget",
        choices=("floor", "share"),
    )
    scope: str = knob(
        "layer",
        "layer: heads of a layer share its budget; model: heads of all layers share all budgets",
        choices=("layer", "model"),
    )
    scorer_config: Any = field(default=None)

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        if self.scope == "model" and self.form == "share":
            raise RequestError(
                "sparse knob scope='model' is not allowed with form='share', whose parts are those "
                "of a layer; use form='floor'"
            )

    @classmethod
    def from_knobs(cls, method: str, knobs: Mapping[str, Any]) -> Self:
        own = {k: v for k, v in knobs.items() if k in cls.knob_names()}
        rest = {k: v for k, v in knobs.items() if k not in own}
        scorer = _scorer_class(own.get("scorer", "snapkv"))
        preset, inner_presets = rest.get("preset"), scorer.config_class.presets
        is_named = isinstance(preset, str)
        if isinstance(preset, str) and preset in cls.presets:
            # of the allocation, and of the scorer if it has it, too
            own = {**cls.presets[preset], **own}
            rest = {k: v for k, v in rest.items() if k != "preset" or preset in inner_presets}
        elif "preset" in rest and not (is_named and preset in inner_presets):
            known = {*cls.presets, *inner_presets}
            raise RequestError(f"{method}: {unknown_preset(preset, known)}")
        inner = scorer.config_class.from_knobs(f"{method} with scorer={scorer.name}", rest)
        return cls(**own, scorer_config=inner)


class AdaKV(EvictionMethod):
    """Shares a layer's budget (kv_heads * budget tokens) out over its KV heads by score.

    arXiv:2407.11550, in kvpress' form by default; wraps any eviction method that scores. The total
    is exact, so the mean row has `budget` tokens; rows of a layer differ in length. With
    scope="model" the heads of all layers share one threshold (of those that store the same
    dimensions), and layers differ, too. Deviations:
    largest remainders in the `share` form (the authors' rounding misses the total); ties go to the
    smaller position, then to the smaller head. Tensor parallelism would need the scores of all
    heads of a layer. `query_aware` and `measures` are stated for the default scorer.
    """

    name = "adakv"
    config_class = AdaKVConfig
    traits = Traits(
        family="eviction",
        sharing="chain",
        takes="retained",
        query_aware=True,
        tp="reduce",
        measures="window",
        kinds=frozenset({LayerKind.FULL}),
    )

    def __init__(self, config: Any, model: ModelSpec) -> None:
        scorer = _scorer_class(config.scorer)
        inner = config.scorer_config or scorer.config_class()
        self.scorer: EvictionMethod = scorer(inner, model)
        super().__init__(config, model)
        own = replace(self.traits, measures=self.scorer.traits.measures)
        object.__setattr__(self, "traits", own)  # a fact of a class elsewhere

    def dense_layers(self) -> frozenset[int]:
        return self.scorer.dense_layers()

    def aux(self) -> tuple[AuxSpec, ...]:
        return self.scorer.aux()

    def prefill_block(self) -> int | None:
        return self.scorer.prefill_block()

    def target(self, chunk: Chunk, budget: int) -> int:
        return self.scorer.target(chunk, budget)

    def can_rescore(self) -> bool:
        return self.scorer.can_rescore()

    def protected(self, budget: int) -> tuple[int, int]:
        return self.scorer.protected(budget)

    def least(self, budget: int) -> int:
        return self.scorer.least(budget)

    def slack(self) -> int:
        return self.page_size - 1

    def watch(self, at: LayerStep, chunk: int) -> None:
        self.scorer.watch(at, chunk)

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        return self.scorer.score(at, chunk).expand(at.spec.kv_heads, -1)

    def masses(self, at: LayerStep, chunk: int) -> Tensor:
        return self.scorer.masses(at, chunk).expand(at.spec.kv_heads, -1)

    def cut_by_error(self, request: int, layer: int, found: Pending, target: Target) -> Keep:
        """The heads of a layer lose no more in their mean."""
        return self._over_layers(request, [(layer, found)])[0]

    def evict(self, plan: StepPlan) -> Sequence[Keep]:
        if self.config.scope == "layer":
            return super().evict(plan)
        keeps: list[Keep] = []
        for chunk in plan.chunks:
            alike: dict[object, list[tuple[int, Pending]]] = {}
            for layer, found in self._pending.pop(chunk.request.id, {}).items():
                dims = self.model.layers[layer].stored_dims
                alike.setdefault((found.scores.shape[0], dims), []).append((layer, found))
            for items in alike.values():
                keeps.extend(self._over_layers(chunk.request.id, items))
        return keeps

    def _over_layers(self, request: int, items: Sequence[tuple[int, Pending]]) -> list[Keep]:
        """All heads of some layers as if they were those of one; rows may differ in length."""
        heads = items[0][1].scores.shape[0]
        longest = max(found.scores.shape[1] for _, found in items)
        scores = [pad(f.scores, (0, longest - f.scores.shape[1])) for _, f in items]
        lens = [n for _, f in items for n in expand_lens(f.lens, heads)]
        lengths = upload(np.array([lens], np.int64), scores[0].device)
        together = torch.cat(scores)[None]
        retain = partial(self.retain, together, lengths)
        pending = [found for _, found in items]
        (mask,) = cut_together(pending, retain, self.least(pending[0].budget))
        return [
            Keep(
                request,
                layer,
                tuple(mask[r, : lens[r]] for r in range(i * heads, i * heads + heads)),
            )
            for i, (layer, _) in enumerate(items)
        ]

    def retain(self, scores: Tensor, lens: Tensor, budget: int) -> Tensor:
        """fp32 [N, H, L], int64 [N, H] -> bool [N, H, L]; min(H * budget, all) are kept."""
        shielded = protect(scores, lens, *self.protected(budget))
        if self.config.form == "share":
            return self._share(shielded, lens, budget)
        return share_tokens(shielded, lens, budget, self.config.alpha)

    def _share(self, scores: Tensor, lens: Tensor, budget: int) -> Tensor:
        """Head budgets from each head's part of the layer's best, then the head's own best."""
        heads = scores.shape[1]
        free = scores.masked_fill(scores == float("inf"), float("-inf"))  # protected ones are apart
        forced = (scores == float("inf")).sum(2)  # [N, H]
        room = max(0, budget - int(forced.max()))
        best = top_mask(free.mT.flatten(1), heads * room)
        parts = best.view(len(best), -1, heads).sum(1)  # [N, H]
        alpha = self.config.alpha
        counts = [
            largest_remainder([(1 - alpha) * n + alpha * room for n in row], heads * room)
            for row in parts.tolist()
        ]
        extra = torch.tensor(counts, dtype=torch.int64, device=scores.device)
        return top_mask(scores, torch.minimum(forced + extra, lens))


def _scorer_class(name: object) -> type[EvictionMethod]:
    """The scored eviction method behind a name; raises `RequestError` for any other."""
    known = "a scored eviction method, e.g. 'snapkv', 'keydiff', 'knorm' or 'random'"
    if not isinstance(name, str) or name not in METHODS:
        raise RequestError(f"adakv: scorer={name!r} is not allowed; it must be {known}")
    found: type[EvictionMethod] = METHODS.get(name)
    if not issubclass(found, EvictionMethod) or issubclass(found, AdaKV):
        raise RequestError(f"adakv: scorer={name!r} does not score tokens; it must be {known}")
    return found
