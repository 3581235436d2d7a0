"""Gates of DuoAttention: how much each KV head's attention needs the middle of the text."""

from __future__ import annotations

from typing import Any

import torch

from sparseengine.core.method import LayerStep
from sparseengine.core.specs import ModelSpec
from sparseengine.errors import ConfigError
from sparseengine.methods.calibration import Calibrator, Reading, logits, sampled
from sparseengine.methods.duo_attention import DuoAttention

_POINTS = 64  # queries of a text


class Gates(Calibrator):
    """Estimates gates without training, from texts whose last quarter repeats the first.

    For 64 queries in the repetition, a head's attention output is computed twice: over everything,
    and over the sinks and the newest tokens alone, `budget` tokens in all. The gate of a KV head is
    the mean over queries of |full - streaming| / |full|, over the outputs of its query heads.

    Deviation: the authors optimise gates by gradient descent, so that the last hidden state stays
    what it was on a synthetic passkey task (2000 steps). This estimate sees each head alone, with
    its layer's inputs dense, and not what the rest of the model makes of the change.
    """

    traits = DuoAttention.traits
    repeats = True

    def __init__(self, reading: Reading, model: ModelSpec) -> None:
        super().__init__(reading, model)
        self.sums = {
            i: torch.zeros(model.layers[i].kv_heads, dtype=torch.float64) for i in self.layers
        }
        self.count = 0
        begin = reading.length - reading.length // 4 + 1  # the first one has nothing to go by
        self.points = range(begin, reading.length, max(1, reading.length // 4 // _POINTS))

    def watch(self, at: LayerStep, chunk: int) -> None:
        positions, q = sampled(at, chunk, self.points)
        if not len(positions):
            return
        keys, values = at.gather("keys", chunk), at.gather("values", chunk).float()
        slot = torch.arange(keys.shape[1], device=q.device)
        before = slot <= positions[:, None]  # [n, L]
        sinks = min(self.reading.settings.sink, self.reading.budget // 2)
        newest = slot > positions[:, None] - (self.reading.budget - sinks)
        scores = torch.unflatten(logits(q, keys, at.spec), 1, (at.spec.kv_heads, -1))
        outs = []
        for visible in (before, before & (newest | (slot < sinks))):
            hidden = ~visible[:, None, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("nhgl,hld->nhgd", weights, values).flatten(2))
        full, streaming = outs
        change = (full - streaming).norm(dim=-1) / full.norm(dim=-1).clamp_min(1e-9)
        self.sums[at.layer] += change.double().sum(0).cpu()
        self.count += len(positions) if at.layer == min(self.sums) else 0

    def result(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.count:
            raise ConfigError("no layer of full attention was seen")
        gates: list[list[float]] = [[] for _ in self.model.layers]
        for layer, total in self.sums.items():
            gates[layer] = [round(float(g), 5) for g in total / self.count]
        every = sorted(g for row in gates for g in row)
        figures = {
            "kv_heads": len(every),
            "smallest_gate": every[0],
            "median_gate": every[len(every) // 2],
            "largest_gate": every[-1],
        }
        return {"gates": gates}, figures
