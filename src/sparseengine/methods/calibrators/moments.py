"""Moments of queries for Expected Attention, from other texts than the prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.specs import ModelSpec
from sparseengine.errors import ConfigError
from sparseengine.methods.calibration import Calibrator, Reading
from sparseengine.methods.expected_attention import ExpectedAttention, pack, unrotated

RANK = 16  # directions of a covariance that are kept; the rest enters by its diagonal


class Moments(Calibrator):
    """Mean and covariance of every query head before rotation, over all texts but their sinks.

    The covariance is stored as its 16 strongest directions and the standard deviation of what they
    leave in each channel, so that a file has head_dim * 18 half-precision numbers per query head.
    """

    traits = ExpectedAttention.traits

    def __init__(self, reading: Reading, model: ModelSpec) -> None:
        super().__init__(reading, model)
        self.sums: dict[int, tuple[Tensor, Tensor]] = {}
        self.count = 0

    def watch(self, at: LayerStep, chunk: int) -> None:
        rotary = self.model.rotaries[at.layer] if self.model.rotaries else None
        q = unrotated(at, chunk, self.reading.settings.sink, rotary, torch.float64)
        if q is None:
            return
        heads = q.transpose(0, 1)  # [Hq, T, D]
        total, products = heads.sum(1), heads.mT @ heads
        if at.layer in self.sums:
            before = self.sums[at.layer]
            total, products = total + before[0], products + before[1]
        self.sums[at.layer] = (total, products)
        self.count += len(q) if at.layer == self.layers[0] else 0

    def result(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.count:
            raise ConfigError("no layer of full attention was seen, or texts of sinks alone")
        data: dict[str, Any] = {}
        kept, spread = 0.0, 0.0
        for layer, (total, products) in self.sums.items():
            mean = total / self.count
            cov = products / self.count - mean[:, :, None] * mean[:, None]
            values, vectors = torch.linalg.eigh(cov)
            rank = min(RANK, cov.shape[-1])
            factor = vectors[..., -rank:] * values[:, None, -rank:].clamp_min(0).sqrt()
            rest = cov.diagonal(dim1=-2, dim2=-1) - factor.square().sum(-1)
            data[str(layer)] = {
                "mean": pack(mean),
                "factor": pack(factor),
                "rest": pack(rest.clamp_min(0).sqrt()),
            }
            kept += float(factor.square().sum())
            spread += float(values.clamp_min(0).sum())
        figures = {"queries_per_head": self.count, "variance_kept": kept / spread}
        return {"layers": data}, figures
