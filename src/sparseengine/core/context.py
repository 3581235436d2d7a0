"""The heart of the engine: what a model sees while it runs one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseengine.core.attention import AttentionBackend
from sparseengine.core.cache import CacheManager
from sparseengine.core.method import LayerStep, SparseController
from sparseengine.core.plan import StepPlan
from sparseengine.core.specs import LayerKind, ModelSpec


@dataclass(slots=True)
class StepContext:
    """The only engine object that a model or an nn block ever sees.

    `backends` holds the chosen backend of every layer.
    """

    plan: StepPlan
    cache: CacheManager
    controller: SparseController
    backends: tuple[AttentionBackend, ...]
    model: ModelSpec
    scores: Tensor | None = None
    at: LayerStep | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v; read what the method selects; let it observe. q [T, Hq, D] -> [T, Hq, Dv].

        For a LATENT layer k is the latent and v its value prefix: one tensor is stored.
        """
        spec = self.model.layers[layer]
        self.cache.write(layer, (k,) if spec.kind is LayerKind.LATENT else (k, v))
        at = self.cache.layer_step(layer, q, k, v)
        view = self.cache.view(layer, self.controller.select(at))
        out = self.backends[layer].run(q, view, spec, self.scores)
        self.controller.observe(at)
        self.at = at
        return out

    def layer_end(self, hidden: Tensor) -> None:
        """Called by the model after each attention layer with its output [T, hidden]."""
        if self.at is not None:
            self.controller.layer_end(self.at, hidden)
            self.at = None
