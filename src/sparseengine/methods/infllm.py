"""Page recall (InfLLM, arXiv:2402.04617; ArkVale, NeurIPS 2024): digests of pages choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.core.method import LayerStep, SealedPages
from sparseengine.core.specs import AuxSpec, Per
from sparseengine.methods.families import SelectionConfig, SelectionMethod
from sparseengine.methods.knobs import knob

_SCRATCH = 1 << 24  # numbers of keys that are summarised at a time
_RECENT = 1e30  # above any score, below what is forced


@dataclass(frozen=True, slots=True, kw_only=True)
class InfLLMConfig(SelectionConfig):
    """Knobs of page recall."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "arkvale": {"digest": "cuboid", "sink_pages": 2, "recent_pages": 2},
            "paper": {"digest": "representatives", "representatives": 4},
        }
    )

    digest: str = knob(
        "cuboid",
        "what a page is judged by: the box of its mean key and mean deviation, the mean of its few "
        "most distinct keys, or its mean key",
        choices=("cuboid", "representatives", "mean"),
    )
    representatives: int = knob(
        4, "keys of a page that digest='representatives' averages", low=1, high=1024
    )
    sink_pages: int = knob(2, "first pages of a row that are always read", low=0, high=4096)
    recent_pages: int = knob(
        2, "newest pages that are always read, the open one included", low=1, high=4096
    )
    min_pages: int = knob(5, "pages read at least, whatever the budget", low=1, high=4096)


class InfLLM(SelectionMethod):
    """Recalls the pages whose digest matches the query; sinks and recent pages are always read.

    When a page is full, its rotated keys are summarised once per KV head. Each decode step scores
    all digests and attends to the first pages, the newest ones, and the pages of highest score, one
    list per KV head; a page that no step asked for comes back as soon as one does. Nothing is
    evicted: the pages stay on the device. Prefill and the first layers are dense. Digests:

    cuboid (default; ArkVale, NeurIPS 2024): mean key m and mean absolute deviation d per channel;
    score sum_i max(q_i (m_i - d_i), q_i (m_i + d_i)), which one outlier cannot inflate as it does
    the bounds of extremes. representatives (InfLLM, arXiv:2402.04617): the mean of the page's few
    representative keys; score q.digest. mean: the mean of all its keys; score q.digest.

    Deviations: a page is the cache's (16 tokens; ArkVale 32, InfLLM 128), and sinks and recent
    pages are two each (ArkVale: two of 32 tokens, InfLLM: 128 and 4,096 tokens). The score is the
    largest of a KV head's query heads; InfLLM takes one list for all heads, from their sum, and
    asks once per block of 512 queries. InfLLM's representatives are the keys that received most
    attention from the local window; here those least like the page's mean direction (cosine), so
    that a digest depends on the page alone and a step stays free of extra work. Keys retain their
    own positions: models are not stretched beyond the length they were trained for. Where the
    budget has no room for all recent pages, the newest come first.
    """

    name = "infllm"
    config_class = InfLLMConfig

    def aux(self) -> tuple[AuxSpec, ...]:
        return tuple(
            AuxSpec(name=name, per=Per.PAGE, shape=("head_dim",), dtype=self.model.dtype)
            for name in self._names()
        )

    def seal(self, pages: SealedPages) -> None:
        """Summarise pages that became full: keys [N, U, P, D] -> one or two digests [N, U, D]."""
        if self._acts.isdisjoint(pages.layers):
            return
        keys = pages.payload[0]
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        for ids in torch.split(pages.pages, max(1, _SCRATCH // max(1, keys[0].numel()))):
            found = self._digests(keys[ids].to(dtype))
            for name, digest in zip(self._names(), found, strict=True):
                pages.aux[name][ids] = digest.to(self.model.dtype)

    def score_pages(self, at: LayerStep, table: Tensor) -> Tensor:
        names = self._names()
        low, high = at.aux(names[0]), at.aux(names[-1])
        scores = ops.page_scores(at.q, low, high, table, at.spec.group_size)  # [S, Hkv, W]
        last = (at.table()[1] - 1) // at.page_size  # [S, G]: the open page's column
        age = last[..., None] - torch.arange(scores.shape[2], device=scores.device)
        newer = _RECENT * (2 - age / scores.shape[2])
        return torch.where(age < self.config.recent_pages, newer.to(scores.dtype), scores)

    def _names(self) -> tuple[str, ...]:
        """Side tensors; requests with other knobs share the cache: a name says what it holds."""
        kind = self.config.digest
        if kind == "cuboid":
            return ("digest_low", "digest_high")
        few = f"_{self.config.representatives}" if kind == "representatives" else ""
        return (f"digest_{kind}{few}",)

    def _digests(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Keys of whole pages [M, U, P, D] -> a digest [M, U, D] per side tensor."""
        page = keys.shape[2]
        if self.config.digest == "representatives":
            count = min(self.config.representatives, page)
            chosen = most_distinct(keys, count)[..., None]
            return (_sum(torch.where(chosen, keys, 0), 2) / count,)
        mean = _sum(keys, 2) / page
        if self.config.digest == "mean":
            return (mean,)
        deviation = _sum((keys - mean[:, :, None]).abs(), 2) / page
        return mean - deviation, mean + deviation


def most_distinct(keys: Tensor, count: int) -> Tensor:
    """The keys of a page least like its mean direction: [M, U, P, D] -> bool [M, U, P]."""
    unit = keys / _sum(keys * keys, 3).sqrt().clamp_min(1e-20)[..., None]
    likeness = _sum(unit * _sum(unit, 2)[:, :, None], 3)
    order = likeness.argsort(dim=-1, stable=True)[..., :count]
    return torch.zeros_like(likeness, dtype=torch.bool).scatter_(-1, order, True)


def _sum(x: Tensor, dim: int) -> Tensor:
    """A sum by halves: its rounding does not depend on how many pages are summed at once."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat((folded, x.narrow(dim, size - 1, 1)), dim) if size % 2 else folded
    return x.squeeze(dim)
