"""R-KV (arXiv:2505.24133): long reasoning repeats itself; drop what is unimportant or redundant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from sparseengine.core.method import LayerStep
from sparseengine.core.specs import AuxSpec, Per
from sparseengine.errors import RequestError
from sparseengine.methods.budgets import split_protected
from sparseengine.methods.bursts import INTERVAL_DOC, BurstConfig, BurstEviction
from sparseengine.methods.knobs import MethodConfig, knob
from sparseengine.methods.knorm import content_keys

_TILE_ENTRIES = 1 << 24  # of the similarity matrix at a time: 64 MiB in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class RKVConfig(BurstConfig):
    """Knobs of R-KV."""

    interval: int = knob(128, INTERVAL_DOC, low=0, high=1 << 20)
    window: int = knob(8, "newest queries that tell importance; retained", low=1, high=1024)
    kernel: int = knob(7, "width of the pooling over positions; odd, 1 is none", low=1, high=1023)
    importance: float = knob(
        0.07, "weight of importance; the rest is that of redundancy", low=0.0, high=1.0
    )
    threshold: float = knob(
        0.5, "cosine above which two keys are near-duplicates", low=-1.0, high=1.0
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"importance": 0.07},
            "paper": {"importance": 0.1},
            "sparse-vllm": {"importance": 0.1, "threshold": 0.8},
        }
    )

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        if self.kernel % 2 == 0:
            raise RequestError(f"sparse knob kernel={self.kernel} is not allowed; it must be odd")


class RKV(BurstEviction):
    """Retains tokens that are important and unlike the others, again and again while decoding.

    arXiv:2505.24133, made for long reasoning. Rows longer than the budget are cut when the prompt
    ends, and whenever they have grown by `interval`. Per KV head, the newest `window` tokens stay;
    of the others those with the largest weight * importance - (1 - weight) * redundancy.

    Importance: logits of the last `window` queries, their maximum over the query group, a softmax
    in fp32 over the tokens before the window, the mean over the queries, max pooling over stored
    neighbours. Redundancy: cosines between all keys of the row, zero with itself; each key forgives
    the newest of its near-duplicates (or the row's first token when it has none: so do the
    authors); then the mean over keys of their cosine to this one, and a softmax over the row.

    The budget counts everything retained. Costs: L * L * head_dim per cut and KV head, in tiles of
    bounded memory, so a budget near `interval` is cheap per step; the queries of the window are
    stored once per request. Deviations: cuts follow the row's length rather than the number of
    steps; of a latent's keys only the content channels are compared. Preset "sparse-vllm"
    has no one index for all heads.
    """

    name = "rkv"
    config_class = RKVConfig
    traits = replace(BurstEviction.traits, measures="window")
    default_budget = 1024
    default_ratio = None

    def aux(self) -> tuple[AuxSpec, ...]:
        # The window is part of the name: instances with other windows may share the cache.
        shape = (self.config.window, "q_heads", "head_dim")
        dtype = self.model.dtype
        return (AuxSpec(name=self._ring, per=Per.REQUEST, shape=shape, dtype=dtype, ring=True),)

    @property
    def _ring(self) -> str:
        return f"newest_queries_{self.config.window}"

    def protected(self, budget: int) -> tuple[int, int]:
        return split_protected(budget, self.config.sink, self.config.window)

    def watch(self, at: LayerStep, chunk: int) -> None:
        """Put this chunk's newest queries into the ring: that of position p at p modulo window."""
        now = at.plan.chunks[chunk]
        if not self.is_watched(now.request):
            return
        lo, hi = at.span(chunk)
        ring = at.request_aux(self._ring, chunk)  # [w, Hq, D]
        new = at.q[max(lo, hi - len(ring)) : hi]
        first = (now.stop - len(new)) % len(ring)
        ring[first : first + len(new)] = new[: len(ring) - first]
        ring[: max(0, first + len(new) - len(ring))] = new[len(ring) - first :]

    def watch_decodes(self, at: LayerStep, chunks: list[int]) -> None:
        part = at.subset(chunks)
        part.push(self._ring, part.q)

    def masses(self, at: LayerStep, chunk: int) -> Tensor:
        """Attention of the window's queries, mean over them and a head's group: fp32 [Hkv, L]."""
        stop, ring = at.plan.chunks[chunk].stop, at.request_aux(self._ring, chunk)
        seen = min(len(ring), stop)
        queries = ring.roll(-(stop % len(ring)), 0)[-seen:]
        found: Tensor = at.scores(chunk, queries) / seen
        return found.view(at.spec.kv_heads, at.spec.group_size, -1).mean(1)

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Weighted importance minus redundancy: fp32 [Hkv, L], zero in the window."""
        lens, heads = at.lens(chunk), at.spec.kv_heads
        lens = lens * heads if len(lens) == 1 else lens
        keys, content = at.gather("keys", chunk), content_keys(at, chunk)
        score = torch.zeros(heads, max(lens), device=keys.device, dtype=content.dtype)
        for length in set(lens):  # one, unless heads share a budget
            before = length - self.config.window
            if before <= 0:  # the budget is within the window: the newest stay
                continue
            some = [h for h in range(heads) if lens[h] == length]
            redundancy = self._redundancy(content[some, :length])[:, :before]
            importance = self._importance(at, chunk, keys[some, :before], some)
            weight = self.config.importance
            score[some, :before] = weight * importance - (1 - weight) * redundancy
        return score

    def _importance(self, at: LayerStep, chunk: int, keys: Tensor, heads: list[int]) -> Tensor:
        """Pooled mean attention of the window's queries on older keys [H, L, D] of some heads."""
        stop, ring = at.plan.chunks[chunk].stop, at.request_aux(self._ring, chunk)
        seen = min(len(ring), stop)
        keys = keys if keys.element_size() == 8 else keys.float()
        mean = keys.new_zeros(keys.shape[:2])
        for position in range(stop - seen, stop):  # one query at a time
            query = ring[position % len(ring)].to(keys.dtype)
            grouped = query.view(at.spec.kv_heads, -1, query.shape[-1])[heads]  # [H, g, D]
            logits = grouped @ keys.mT * at.spec.softmax_scale
            if at.spec.softcap:
                logits = at.spec.softcap * torch.tanh(logits / at.spec.softcap)
            mean += logits.amax(1).softmax(-1) / seen
        kernel = self.config.kernel
        return max_pool1d(mean, kernel, stride=1, padding=kernel // 2)

    def _redundancy(self, keys: Tensor) -> Tensor:
        """Softmax over the row of each key's mean cosine, in tiles: [Hkv, L, D] -> [Hkv, L]."""
        unit = normalize(keys, dim=-1)
        heads, length, _ = unit.shape
        total = unit.new_zeros(heads, length)
        slot = torch.arange(length, device=unit.device)
        size = max(1, _TILE_ENTRIES // (heads * length))
        for first in range(0, length, size):
            tile = slot[first : first + size]
            cosine = unit[:, first : first + size] @ unit.mT  # [Hkv, R, L]
            cosine.masked_fill_(slot == tile[:, None], 0.0)
            # the newest near-duplicate of each key; 0 without any
            newest = torch.where(cosine > self.config.threshold, slot, 0).amax(-1, keepdim=True)
            total += cosine.scatter_(-1, newest, 0.0).sum(1)
        return (total / length).softmax(-1)
