"""Filter layers of OmniKV: those whose best tokens carry most of what later layers attend to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.specs import ModelSpec
from sparseengine.errors import ConfigError
from sparseengine.methods.calibration import Calibrator, Reading, logits, sampled
from sparseengine.methods.omnikv import OmniKV, built_in_filters

_POINTS = 16  # queries of a text


class FilterLayers(Calibrator):
    """Measures cover[f, l], the attention of layer l on the tokens that layer f would choose.

    Of 16 queries in the later half of each text, a layer chooses as the method does: sinks, recent
    tokens, and the largest q.k over all heads, `budget` tokens in all. cover[f, l] is the attention
    of layer l's heads on them, the mean over heads and queries.

    There are as many filters as built in, and the first stands no later than the built-in one, so
    that no more layers are dense. Among these sets the one is taken that loses least attention over
    all layers that read a choice. The authors choose by the share of tokens that layers have in
    common; here tokens count by their attention.
    """

    traits = OmniKV.traits

    def __init__(self, reading: Reading, model: ModelSpec) -> None:
        super().__init__(reading, model)
        half = reading.length // 2
        self.points = range(reading.length - 1, half, -max(1, (reading.length - half) // _POINTS))
        self.cover = torch.zeros(len(self.layers), len(self.layers), dtype=torch.float64)
        self.count = 0
        self._chosen: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def watch(self, at: LayerStep, chunk: int) -> None:
        """Sum up what layers before this one, and it itself, cover of its attention."""
        own, place = at.plan.chunks[chunk].request.id, self.layers.index(at.layer)
        positions, q = sampled(at, chunk, self.points)
        keys = at.gather("keys", chunk)
        masks = []
        for i, position in enumerate(positions.tolist()):
            scores = logits(q[i : i + 1], keys[:, : position + 1], at.spec)[0]  # [Hq, L]
            masks.append(self._choose(scores.amax(0)))
            mass = scores.softmax(-1).mean(0)
            for f in range(place + 1):
                mask = masks[i] if f == place else self._chosen[own, f][i]
                self.cover[f, place] += float(mass[mask].sum())
        self._chosen[own, place] = tuple(masks)
        self.count += len(masks) if place == 0 else 0

    def _choose(self, scores: Tensor) -> Tensor:
        budget, settings = self.reading.budget, self.reading.settings
        if len(scores) <= budget:
            return torch.ones_like(scores, dtype=torch.bool)
        scores = scores.clone()
        scores[-max(1, min(settings.recent, budget // 2)) :] = float("inf")
        scores[: min(settings.sink, budget // 4)] = float("inf")
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[scores.topk(budget).indices] = True
        return mask

    def result(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.count:
            raise ConfigError("no layer of full or latent attention was seen")
        cover = self.cover / self.count
        built_in = [self.layers.index(i) for i in built_in_filters(self.layers)]
        lost, places = fewest_lost((1 - cover).tolist(), len(built_in), built_in[0])
        sparse = len(self.layers) - places[0] - len(places)
        before = loss((1 - cover).tolist(), built_in)
        filters = [self.layers[p] for p in places]
        figures = {
            "filter_layers": filters,
            "attention_covered": 1 - lost / max(1, sparse),
            "attention_covered_built_in": 1
            - before / max(1, len(self.layers) - built_in[0] - len(built_in)),
        }
        return {"filter_layers": filters}, figures


def loss(lost: list[list[float]], places: list[int]) -> float:
    """Attention lost over all layers behind the first filter, by the sum over layers."""
    ends = [*places[1:], len(lost)]
    return sum(sum(lost[f][f + 1 : end]) for f, end in zip(places, ends, strict=True))


def fewest_lost(lost: list[list[float]], count: int, latest: int) -> tuple[float, list[int]]:
    """The `count` places of least loss, ascending, the first at most `latest`.

    lost[f][l]: what layer l loses if it reads what f < l chose. The last layer is taken only where
    there is no other way. Ties: the earlier places.
    """
    n = len(lost)
    last = max(n - 2, count - 1)
    # best[p]: (loss from place p on if p is the newest of the filters counted so far, from behind)
    best = {p: (sum(lost[p][p + 1 :]), [p]) for p in range(last + 1)}
    for _ in range(count - 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for p in range(last + 1):
            ways = [
                (sum(lost[p][p + 1 : q]) + rest, [p, *places])
                for q, (rest, places) in best.items()
                if q > p
            ]
            if ways:
                longer[p] = min(ways)
        best = longer
    return min(way for p, way in best.items() if p <= latest)
