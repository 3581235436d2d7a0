"""Label channels of Double Sparsity: those by which a head's keys differ for its queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.specs import ModelSpec
from sparseengine.errors import ConfigError
from sparseengine.methods.calibration import Calibrator, Reading
from sparseengine.methods.double_sparsity import DoubleSparsity


class Channels(Calibrator):
    """Ranks the channels of each KV head by E[q_d^2] Var[k_d], the spread of q_d k_d over keys.

    All tokens of all texts count, queries of a KV head's query heads together. A channel whose keys
    are alike ranks no tokens, however large they are, so the mean of a channel does not count.

    Deviation: the authors rank by the mean of |q_d k_d|, |q_d| or |k_d|, per query head.
    """

    traits = DoubleSparsity.traits

    def __init__(self, reading: Reading, model: ModelSpec) -> None:
        super().__init__(reading, model)
        self.sums: dict[int, Tensor] = {}  # sums of q^2, k, k^2: fp64 [3, Hkv, D]
        self.count = 0

    def watch(self, at: LayerStep, chunk: int) -> None:
        lo, hi = at.span(chunk)
        q, k = at.q[lo:hi].double(), at.k[lo:hi].double()
        asked = torch.unflatten(q, 1, (at.spec.kv_heads, -1)).square().mean(2)
        found = torch.stack((asked.sum(0), k.sum(0), k.square().sum(0)))
        before = self.sums.get(at.layer)
        self.sums[at.layer] = found if before is None else before + found
        self.count += hi - lo if at.layer == self.layers[0] else 0

    def result(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.count:
            raise ConfigError("no layer of full or latent attention was seen")
        order: list[list[list[int]]] = [[] for _ in self.model.layers]
        shares = []
        for layer, sums in self.sums.items():
            asked, mean, square = (sums / self.count).unbind(0)
            energy = asked * (square - mean.square()).clamp_min(0)  # [Hkv, D]
            ranked = energy.sort(stable=True, dim=-1, descending=True)
            order[layer] = ranked.indices.tolist()
            top = max(1, energy.shape[-1] // self.reading.settings.group_factor)
            shares.append(
                float(ranked.values[:, :top].sum() / ranked.values.sum().clamp_min(1e-30))
            )
        figures = {"tokens_seen": self.count, "energy_in_labels": sum(shares) / len(shares)}
        return {"channels": order}, figures
