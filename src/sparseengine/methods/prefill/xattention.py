"""XAttention (arXiv:2503.16428): sums along antidiagonals estimate the mass of a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseengine.core.method import LayerStep
from sparseengine.methods.knobs import knob
from sparseengine.methods.prefill.base import (
    TILE,
    BlockPattern,
    Grid,
    PatternConfig,
    by_head,
    covering,
    products,
)
from sparseengine.ops.reference.scores import soft_capped


@dataclass(frozen=True, slots=True, kw_only=True)
class XAttentionConfig(PatternConfig):
    """Knobs of XAttention."""

    stride: int = knob(8, "tokens per antidiagonal", choices=(4, 8, 16))
    threshold: float = knob(
        0.9, "estimated attention mass that each block of queries reads", low=0.0, high=1.0
    )


class XAttention(BlockPattern):
    """Reads, per query head and block of queries, the blocks of most antidiagonal mass.

    Every `stride` queries, taken backwards, are multiplied with every `stride` keys as one long
    vector: the mean of one antidiagonal of that tile of the logits. A softmax over the tiles that a
    query tile sees, summed to blocks, is the estimated mass. Block 0 and the queries' own blocks
    are read; then, largest first, all blocks before which less than `threshold` of the row's mass
    has been collected. Costs 1 / stride of the products of dense attention.

    Source: arXiv:2503.16428 and the authors' code (block 128, stride 8 or 16, threshold 0.9 in its
    class and 0.8 in its function). Deviations: chunks are aligned by blocks, where the authors
    align them by 2,048 tokens; sinks are column 0, where their flag forces the first block of
    queries; threshold 1 reads everything.
    """

    name = "xattention"
    config_class = XAttentionConfig

    def choose(self, at: LayerStep, chunk: int, grid: Grid) -> Tensor | None:
        if self.config.threshold >= 1:
            return None
        heads = at.spec.q_heads
        mass = self.mass(at, chunk, grid)  # [Hq, nQ, nK]
        forced = by_head(grid.diagonal | (grid.columns == 0), heads).expand_as(mass)
        return covering(mass, mass.sum(-1, keepdim=True) * self.config.threshold, forced)

    def mass(self, at: LayerStep, chunk: int, grid: Grid) -> Tensor:
        """Estimated mass of each block of keys: fp32 [Hq, nQ, nK], rows summing to their tiles."""
        stride, block = self.config.stride, grid.block
        lo, hi = at.span(chunk)
        keys = at.gather("keys", chunk)  # [Hkv, L, D]
        keys = pad(keys, (0, 0, 0, grid.num_columns * block - keys.shape[1]))
        keys = torch.unflatten(keys, 1, (-1, stride)).flatten(2)  # [Hkv, nK B / s, s D]
        behind = grid.num_rows * block - grid.offset - grid.queries
        queries = pad(at.q[lo:hi], (0, 0, 0, 0, grid.offset, behind))
        queries = torch.unflatten(queries.transpose(0, 1), 1, (-1, stride)).flip(2).flatten(2)
        first = torch.arange(queries.shape[1], device=queries.device) * stride - grid.offset
        last = (first + stride - 1).clamp_max(grid.queries - 1)  # query of each tile
        exists = (last >= 0) & (first < grid.queries)
        newest = torch.where(exists, (grid.old + last) // stride, -1)  # [G, tiles] key tiles seen
        newest = newest.expand(at.spec.kv_heads, -1)
        estimate = _Estimate(
            scale=at.spec.softmax_scale / stride,
            cap=at.spec.softcap,
            size=block // stride,
            shared=max(0, min(grid.lens) - grid.queries) // stride,
        )
        rows = max(1, TILE // keys.shape[1] // estimate.size) * estimate.size
        out = []
        for head, mine in enumerate(queries):
            group = head // at.spec.group_size
            parts = zip(torch.split(mine, rows), torch.split(newest[group], rows), strict=True)
            out.append(torch.cat([estimate.mass(q, keys[group], seen) for q, seen in parts]))
        return torch.stack(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """size: tiles per block. shared: key tiles, from the first, that every query tile sees."""

    scale: float
    cap: float
    size: int
    shared: int

    def mass(self, queries: Tensor, keys: Tensor, newest: Tensor) -> Tensor:
        """queries [m, sD], keys [n, sD], newest [m] -> [m / size, n / size], summed softmax."""
        logits = soft_capped(products(queries, keys).mul_(self.scale), self.cap)
        late = torch.arange(self.shared, keys.shape[0], device=keys.device) > newest[:, None]
        logits[:, self.shared :].masked_fill_(late, float("-inf"))
        mass = logits.softmax(-1)
        blocks = torch.unflatten(mass, 1, (-1, self.size)).sum(2)
        blocks = torch.where(newest[:, None] < 0, 0.0, blocks)  # tiles without a query
        return torch.unflatten(blocks, 0, (-1, self.size)).sum(1)
