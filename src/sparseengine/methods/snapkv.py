"""SnapKV (arXiv:2404.14469): the prompt's last queries tell what the answer will attend to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.plan import Chunk
from sparseengine.core.specs import AuxSpec, Per
from sparseengine.errors import RequestError
from sparseengine.methods.budgets import split_protected
from sparseengine.methods.families import DENSE_DOC, EvictionMethod
from sparseengine.methods.knobs import MethodConfig, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKVConfig(MethodConfig):
    """Knobs of SnapKV."""

    dense_layers: int = knob(0, DENSE_DOC, low=0, high=4096)
    window: int = knob(32, "observation window: last queries of the prompt", low=1, high=1024)
    kernel: int = knob(7, "width of the pooling over positions; odd, 1 is none", low=1, high=1023)
    pooling: str = knob("max", "how neighbours are pooled", choices=("max", "avg"))
    sink: int = knob(4, "first tokens of the prompt that are always retained", low=0, high=1 << 20)
    block_tokens: int = knob(
        0,
        "chunk-local: after every block of this many prompt tokens, choose among its tokens by its "
        "own last queries, once and for all, which bounds memory; 0 chooses when the prompt ends",
        low=0,
        high=1 << 20,
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"window": 32, "kernel": 5, "pooling": "avg", "sink": 0},
            "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "sink": 0},
            "longbench": {"window": 32, "kernel": 7, "pooling": "max", "sink": 0},
            "paper": {"window": 32, "kernel": 7, "pooling": "max", "sink": 0},
            "sparse-vllm": {"window": 32, "kernel": 1, "sink": 0},
        }
    )

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        if self.kernel % 2 == 0:
            raise RequestError(f"sparse knob kernel={self.kernel} is not allowed; it must be odd")
        if 0 < self.block_tokens < self.window:
            raise RequestError(
                f"sparse knob block_tokens={self.block_tokens} is not allowed; it must be 0 or at "
                f"least window={self.window}"
            )


class SnapKV(EvictionMethod):
    """Retains what the last `window` prompt queries attended to (arXiv:2404.14469).

    Chunk-local with `block_tokens`: a row never holds more than the budget and a block, but only
    the last block is chosen for the question. After each block the row keeps its part of the budget
    (budget * tokens so far / prompt); survivors of earlier blocks are not judged again. So prompts
    of several lengths keep different tokens of one prefix.

    One choice per KV head: fp32 softmax over all keys, mean over the window's queries, pooling over
    positions before the window, then the mean over the head's query group. Deviations: the authors
    choose per query head (storing K and V repeated); sinks are forced; the queries are kept in a
    ring, so that the last chunk may be shorter than the window. Preset "sparse-vllm" has
    neither one index for all heads of a layer nor a softmax over candidates alone.
    """

    name = "snapkv"
    config_class = SnapKVConfig
    traits = Traits(
        family="eviction",
        sharing="chain",
        takes="retained",
        query_aware=True,
        measures="window",
    )

    def aux(self) -> tuple[AuxSpec, ...]:
        # The window is part of the name: instances with other windows may share the cache.
        shape = (self.config.window, "q_heads", "head_dim")
        ring = AuxSpec(
            name=self._ring,
            per=Per.REQUEST,
            shape=shape,
            dtype=self.model.dtype,
            lifetime="prefill",
        )
        return (ring,)

    @property
    def _ring(self) -> str:
        return f"window_queries_{self.config.window}"

    def protected(self, budget: int) -> tuple[int, int]:
        return split_protected(budget, self.config.sink, self.config.window)

    def reusable(self, prompt_len: int) -> int:
        """All but the window, whose queries must be seen."""
        return 0 if self.config.block_tokens else max(0, prompt_len - self.config.window)

    def prefill_block(self) -> int | None:
        return self.config.block_tokens or None

    def target(self, chunk: Chunk, budget: int) -> int:
        """Chunk-local: the budget's part of the text so far, none of it for short prompts."""
        length = chunk.request.prompt_len
        if not self.config.block_tokens or length <= budget:
            return budget
        return max(1, budget * chunk.stop // length)

    def watch(self, at: LayerStep, chunk: int) -> None:
        """Shift this chunk's queries into the ring, newest last."""
        lo, hi = at.span(chunk)
        ring = at.request_aux(self._ring, chunk)  # [w, Hq, D]
        new = at.q[max(lo, hi - self.config.window) : hi]
        if len(new) < len(ring):
            new = torch.cat((ring[len(new) :], new))
        ring.copy_(new)

    def _attention(self, at: LayerStep, chunk: int) -> Tensor:
        """Mean attention of the window's queries on each key: fp32 [Hq, L]."""
        seen = min(self.config.window, at.plan.chunks[chunk].stop)
        queries = at.request_aux(self._ring, chunk)[-seen:]
        mass: Tensor = at.scores(chunk, queries) / seen
        return mass

    def masses(self, at: LayerStep, chunk: int) -> Tensor:
        return self._attention(at, chunk).view(at.spec.kv_heads, at.spec.group_size, -1).mean(1)

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Pooled mean attention of the window on each key: fp32 [Hkv, L]."""
        mass = self._attention(at, chunk)
        lens = at.table()[1][chunk]  # [G], on the device: no wait
        slot = torch.arange(mass.shape[1], device=mass.device)
        before = slot < (lens - self.config.window)[:, None]  # [G, L]
        block, stop = self.config.block_tokens, at.plan.chunks[chunk].stop
        first = (
            (lens - (stop - (stop - 1) // block * block))[:, None] if block else lens[:, None] * 0
        )
        judged = before & (slot >= first)
        grouped = torch.unflatten(mass, 0, (at.spec.kv_heads, -1)) * judged[:, None]  # [Hkv, g, L]
        found = torch.where(judged, self._pool(grouped).mean(1), 0.0)
        return torch.where(slot < first, float("inf"), found)  # survivors of earlier blocks

    def _pool(self, mass: Tensor) -> Tensor:
        """Zeros past the window's start are what padding would be: mass is never negative."""
        kernel = self.config.kernel
        pool = max_pool1d if self.config.pooling == "max" else avg_pool1d
        return pool(mass, kernel, stride=1, padding=kernel // 2)
