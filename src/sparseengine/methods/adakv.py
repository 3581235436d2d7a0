"""AdaKV (arXiv:2407.11550): one budget per layer, shared out over its KV heads by score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self

from sparseengine.core.method import Traits
from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.errors import RequestError
from sparseengine.methods import METHODS
from sparseengine.methods.allocate import Allocation
from sparseengine.methods.compose import Wrapper
from sparseengine.methods.families import EvictionMethod
from sparseengine.methods.knobs import MethodConfig, knob, unknown_preset


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


class AdaKV(Wrapper):
    """Shares a layer's budget (kv_heads * budget tokens) out over its KV heads by score.

    arXiv:2407.11550, in kvpress' form by default; wraps any eviction method that scores, which goes
    on doing all it does by itself: runs of its own, evictions while decoding, sentences. The total
    is exact, so the mean row has `budget` tokens; rows of a layer differ in length. With
    scope="model" the heads of all layers share one threshold (of those that store the same
    dimensions), and layers differ, too; latent layers, of one row each, then take part. Over
    `pyramidkv` a layer shares what the pyramid gives it, which is the paper's Ada-PyramidKV. The
    same sharing is a stage of every scored eviction: `allocate="adakv"`.

    Deviations: largest remainders in the `share` form (the authors' rounding misses the total);
    ties go to the smaller position, then to the smaller head. Tensor parallelism would need the
    scores of all heads of a layer. `query_aware` and `measures` are stated for the default scorer.
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
    default_budget: ClassVar[int | None] = None
    default_ratio: ClassVar[float | None] = EvictionMethod.default_ratio

    def __init__(self, config: Any, model: ModelSpec) -> None:
        found = _scorer_class(config.scorer)
        scorer = found(config.scorer_config or found.config_class(), model)
        allocation = Allocation(
            kind="adakv", scope=config.scope, floor=config.alpha, parts=config.form == "share"
        )
        reason = scorer.why_not(allocation)
        if reason is not None:
            raise RequestError(
                f"adakv: scorer={config.scorer!r} with scope={config.scope!r} is not possible: "
                f"{reason}"
            )
        scorer.allocation = allocation
        kinds = self.traits.kinds
        if config.scope == "model":  # one row per layer suffices to share
            kinds = kinds | {LayerKind.LATENT}
        scorer.act_on(kinds)
        super().__init__(config, scorer)
        self.scorer = scorer
        traits = replace(scorer.traits, tp="reduce", kinds=kinds & scorer.traits.kinds)
        self.adopt(traits=traits, layers=scorer.layers)

    @property
    def page_size(self) -> int:
        return self.scorer.page_size

    @page_size.setter
    def page_size(self, slots: int) -> None:
        self.scorer.page_size = slots


def _scorer_class(name: object) -> type[EvictionMethod]:
    """The scored eviction method behind a name; raises `RequestError` for any other."""
    known = "a scored eviction method, e.g. 'snapkv', 'keydiff', 'knorm' or 'random'"
    if not isinstance(name, str) or name not in METHODS:
        raise RequestError(f"adakv: scorer={name!r} is not allowed; it must be {known}")
    found: type[EvictionMethod] = METHODS.get(name)
    if not issubclass(found, EvictionMethod):
        raise RequestError(f"adakv: scorer={name!r} does not score tokens; it must be {known}")
    return found
