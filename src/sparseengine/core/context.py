"""The heart of the engine: what a model sees while it runs one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseengine.core.attention import AttentionBackend
from sparseengine.core.cache import CacheManager
from sparseengine.core.method import LayerStep, SparseController
from sparseengine.core.plan import StepPlan
from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.core.view import Wanted, leading


@dataclass(slots=True)
class StepContext:
    """The only engine object that a model or an nn block ever sees.

    `backends` holds the chosen backend of every layer. `lengths` int64 [T] is, for each token, the
    longer of its request's prompt and the text up to and including the token: what position rules
    that depend on a text's length go by, however the prompt is chunked. `wanted`: whose hidden
    states the model returns; None: of all tokens.
    """

    plan: StepPlan
    cache: CacheManager
    controller: SparseController
    backends: tuple[AttentionBackend, ...]
    model: ModelSpec
    lengths: Tensor | None = None
    wanted: Wanted | None = None
    scores: Tensor | None = None
    at: LayerStep | None = None

    def wanted_behind(self, layer: int) -> Wanted | None:
        """Tokens that anybody reads behind a layer's attention, None for all: only keys and values
        of the others are of use in the last layer."""
        return self.wanted if layer + 1 == len(self.model.layers) else None

    def wanted_of(self, hidden: Tensor) -> Tensor:
        """Rows [N, ...] of the wanted tokens, of [T, ...] or of what these rows are already."""
        if self.wanted is None or hidden.shape[0] == self.wanted.rows.shape[0]:
            return hidden
        return hidden[self.wanted.rows]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, wanted: Wanted | None = None
    ) -> Tensor:
        """Store k, v; read what the method selects; let it observe. q [T, Hq, D] -> [T, Hq, Dv].

        For a LATENT layer k is the latent and v its value prefix: one tensor is stored. wanted:
        only these tokens' attention is returned, [N, Hq, Dv].
        """
        at = self.store(layer, q, k, v)
        out = self.read(at, wanted=wanted)
        self.observe(at)
        return out

    def store(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> LayerStep:
        """The first third of `attend`: k and v of this step's tokens enter the cache."""
        kind = self.model.layers[layer].kind
        self.cache.write(layer, (k,) if kind is LayerKind.LATENT else (k, v))
        return self.cache.layer_step(layer, q, k, v)

    def read(
        self, at: LayerStep, num_spans: int | None = None, wanted: Wanted | None = None
    ) -> Tensor:
        """The second third: attention of all chunks, or of the plan's first `num_spans` chunks.

        Those must be chunks of one token. Returns [T, Hq, Dv] of the tokens read for, or of those
        `wanted`. Methods see all queries, and decodes come first and are wanted: hooks find
        everything where it always is.
        """
        view = self.cache.view(at.layer, self.controller.select(at))
        view, q = view.masked(self.controller.prefill_masks(at)), at.q
        if num_spans is not None and num_spans < len(self.plan.chunks):
            view, q = leading(view, num_spans), q[:num_spans]
        few = wanted is not None and self.scores is None and wanted.can_ask(view)
        if wanted is not None and few:
            view, q = wanted.asking(view), q[wanted.rows]
        out = self.backends[at.layer].run(q, view, self.model.layers[at.layer], self.scores)
        out = self.controller.add_digests(at, out)
        return out if wanted is None or few else out[wanted.rows]

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
