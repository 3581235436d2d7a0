"""OmniKV (ICLR 2025): a few filter layers choose the tokens that the layers after them read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from sparseengine.core.method import LayerStep
from sparseengine.core.plan import Chunk
from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.core.view import Selection
from sparseengine.errors import RequestError
from sparseengine.methods.calibration import (
    calibration_knob,
    damaged,
    read_calibration,
    refuse_both,
)
from sparseengine.methods.knobs import MethodConfig, knob
from sparseengine.methods.tokens import TokenSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniKVConfig(MethodConfig):
    """Knobs of OmniKV."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "llama3_8b": {"filter_layers": (2, 8, 18), "wait": 1},
            "paper": {"filter_layers": (2, 8, 18), "wait": 1, "recent": 16},
        }
    )

    filter_layers: tuple[int, ...] = knob(
        (),
        "layers that read everything and choose for those after them; empty: those at 2, 8 and 18 "
        "of 32 of the model's depth",
        low=0,
        high=4096,
    )
    wait: int = knob(
        0, "layers after a filter that read everything, too (the paper: 1)", low=0, high=4096
    )
    sink: int = knob(4, "first tokens that are always read", low=0, high=1 << 20)
    recent: int = knob(128, "newest tokens that are always read", low=1, high=1 << 20)
    calibration: str = calibration_knob()


class OmniKV(TokenSelection):
    """Reads, in most layers, the tokens that an earlier layer chose (OmniKV, ICLR 2025).

    Consecutive layers attend to similar tokens. A filter layer attends to everything and gives
    each token the largest q.k of the newest query over all heads; the best tokens are what all
    heads of the layers up to the next filter read, in the same step. Layers before the first filter
    are dense. Nothing is evicted, prefill is dense. The budget counts tokens read per row in those
    layers: `sink` first ones (at most a quarter of it), `recent` newest ones (at most half), and
    the best of the rest. Filters count among layers of full and latent attention only.

    Deviations: the authors choose among the prompt's tokens and always read what was generated, so
    that reads grow; here `recent` tokens are read and older generated ones compete. Nothing is
    offloaded to the host, so the layer after a filter need not wait for a copy (`wait`). Without a
    calibration, filters are those of Llama-3-8B by depth. A filter that no layer follows (of a
    model with one layer of full attention, say) reads what it chose itself.
    """

    name = "omnikv"
    config_class = OmniKVConfig
    traits = replace(TokenSelection.traits, tp="reduce")
    default_budget = 2048
    aligned_layers = True

    def __init__(self, config: Any, model: ModelSpec) -> None:
        filters = _filters(config, model, self.traits.kinds)
        self._source = _sources(config, model, self.traits.kinds, filters)
        self._choosers = frozenset(self._source.values())
        super().__init__(config, model)
        self._shared: tuple[tuple[Chunk, ...], int, Selection] | None = None

    def dense_layers(self) -> frozenset[int]:
        return frozenset(range(len(self.model.layers))) - self._source.keys()

    def select(self, at: LayerStep) -> Selection | None:
        source = self._source.get(at.layer)
        if source is None and at.layer not in self._choosers:
            return None
        width = self._width(at)
        if width is None:
            return None
        if at.layer in self._choosers:
            self._shared = (at.plan.chunks, at.layer, self.choose(at, width))
        if source is None:
            return None
        assert self._shared is not None, f"layer {source} has chosen nothing"
        chunks, chooser, selection = self._shared
        assert chooser == source, f"layer {at.layer} follows {source}, {chooser} chose last"
        assert chunks == at.plan.chunks, f"layer {source} chose for other requests"
        if at.layer == self.layers[-1]:
            self._shared = None
        return selection

    def choose(self, at: LayerStep, width: int) -> Selection:
        """The tokens of largest q.k over all heads, one list for all: index [S, 1, K]."""
        scores = at.logits().amax(1, keepdim=True)  # [S, 1, L]
        budgets, lens = self.budgets(at), at.packed()[1][:, :1]
        recent = (budgets // 2).clamp(max=self.config.recent)[:, None]
        sinks = (budgets // 4).clamp(max=self.config.sink)
        return self._best(at, scores, (lens - recent)[..., None], sinks, width)

    def forget(self, request_id: int) -> None:
        self._shared = None


def _eligible(model: ModelSpec, kinds: frozenset[LayerKind]) -> list[int]:
    return [i for i, spec in enumerate(model.layers) if spec.kind in kinds]


def _filters(config: OmniKVConfig, model: ModelSpec, kinds: frozenset[LayerKind]) -> list[int]:
    """The filter layers, ascending: given, calibrated or built in."""
    layers = _eligible(model, kinds)
    if not layers:
        return []
    if config.calibration:
        refuse_both("omnikv", filter_layers=config.filter_layers)
        found = read_calibration(config.calibration, "omnikv", model).get("filter_layers")
        if not isinstance(found, list) or not found or not all(i in layers for i in found):
            raise damaged(config.calibration)
        return sorted(set(found))
    wrong = sorted(set(config.filter_layers) - set(layers))
    if wrong:
        raise RequestError(
            f"omnikv: filter_layers={list(config.filter_layers)} is not allowed; layers {wrong} "
            f"are no layers of full or latent attention, of which the model has {layers}"
        )
    if config.filter_layers:
        return sorted(set(config.filter_layers))
    return built_in_filters(layers)


def built_in_filters(layers: Sequence[int]) -> list[int]:
    """Of these layers those at 2, 8 and 18 of 32 of the depth, the last only if it is the first."""
    places = {(2 * share * len(layers) + 32) // 64 for share in (2, 8, 18)}
    return [layers[p] for p in sorted(places) if p < max(1, len(layers) - 1)]


def _sources(
    config: OmniKVConfig, model: ModelSpec, kinds: frozenset[LayerKind], filters: list[int]
) -> dict[int, int]:
    """For each layer that reads a choice, the filter layer that made it."""
    layers, sources = _eligible(model, kinds), {}
    for layer in layers:
        at = bisect_right(filters, layer) - 1
        if at >= 0 and layers.index(layer) - layers.index(filters[at]) > config.wait:
            sources[layer] = filters[at]
    if filters and layers and filters[-1] == layers[-1]:
        sources[filters[-1]] = filters[-1]
    return sources
