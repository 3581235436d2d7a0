"""The heart of the engine: what a model sees while it runs one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseengine.core.attention import AttentionBackend
from sparseengine.core.cache import CacheManager
from sparseengine.core.method import LayerStep, SparseController
from sparseengine.core.plan import StepPlan
from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.core.view import leading


@dataclass(slots=True)
class StepContext:
    """The only engine object that a model or an nn block ever sees.

    `backends` holds the chosen backend of every layer. `lengths` int64 [T] is, for each token, the
    longer of its request's prompt and the text up to and including the token: what position rules
    that depend on a text's length go by, however the prompt is chunked.
    """

    plan: StepPlan
    cache: CacheManager
    controller: SparseController
    backends: tuple[AttentionBackend, ...]
    model: ModelSpec
    lengths: Tensor | None = None
    scores: Tensor | None = None
    at: LayerStep | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v; read what the method selects; let it observe. q [T, Hq, D] -> [T, Hq, Dv].

        For a LATENT layer k is the latent and v its value prefix: one tensor is stored.
        """
        at = self.store(layer, q, k, v)
        out = self.read(at)
        self.observe(at)
        return out

    def store(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> LayerStep:
        """The first third of `attend`: k and v of this step's tokens enter the cache."""
        kind = self.model.layers[layer].kind
        self.cache.write(layer, (k,) if kind is LayerKind.LATENT else (k, v))
        return self.cache.layer_step(layer, q, k, v)

    def read(self, at: LayerStep, num_spans: int | None = None) -> Tensor:
        """The second third: attention of all chunks, or of the plan's first `num_spans` chunks.

        Those must be chunks of one token. Returns [T, Hq, Dv] of the tokens read for.
        """
        view = self.cache.view(at.layer, self.controller.select(at))
        view, q = view.masked(self.controller.prefill_masks(at)), at.q
        if num_spans is not None and num_spans < len(self.plan.chunks):
            view, q = leading(view, num_spans), q[:num_spans]
        out = self.backends[at.layer].run(q, view, self.model.layers[at.layer], self.scores)
        return self.controller.add_digests(at, out)

    def observe(self, at: LayerStep) -> None:
        """The last third: the methods look at what was stored and asked."""
        self.controller.observe(at)
        self.at = at

    def layer_end(self, hidden: Tensor, extra: Tensor | None = None) -> None:
        """Called by the model after each attention layer with its output [T, hidden].

        extra: what is still to be added to it.
        """
        if self.at is not None:
            self.controller.layer_end(self.at, hidden, extra)
            self.at = None
