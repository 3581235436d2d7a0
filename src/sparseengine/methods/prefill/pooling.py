"""Attention between blocks: mean queries against mean keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseengine.core.method import LayerStep
from sparseengine.methods.prefill.base import Grid, by_head
from sparseengine.ops.reference.scores import soft_capped


def mean_keys(at: LayerStep, chunk: int, grid: Grid, keys: Tensor) -> Tensor:
    """keys [Hkv, L, D], zeros past a row's end -> fp32 [Hkv, nK, D], over the keys there are."""
    sums = pad(keys, (0, 0, 0, grid.num_columns * grid.block - keys.shape[1]))
    sums = torch.unflatten(sums, 1, (-1, grid.block)).sum(2, dtype=_wide(keys))
    lens = grid.old + grid.queries  # [G, 1]
    count = (lens - grid.columns).clamp(1, grid.block)
    means: Tensor = sums / count[..., None]
    return means


def mean_queries(at: LayerStep, chunk: int, grid: Grid) -> Tensor:
    """fp32 [Hq, nQ, D], over the queries of the chunk in each block."""
    lo, hi = at.span(chunk)
    behind = grid.num_rows * grid.block - grid.offset - grid.queries
    queries = pad(at.q[lo:hi], (0, 0, 0, 0, grid.offset, behind)).transpose(0, 1)
    sums = torch.unflatten(queries, 1, (-1, grid.block)).sum(2, dtype=_wide(queries))
    means: Tensor = sums / (grid.last_query - grid.first_query + 1)[:, None]
    return means


def pooled_mass(at: LayerStep, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Softmax over blocks: queries [Hq, m, D], keys [Hkv, nK, D], seen [Hq or 1, m, nK]."""
    logits = torch.unflatten(queries, 0, (keys.shape[0], -1)) @ keys[:, None].mT  # [Hkv, g, m, nK]
    logits = soft_capped(logits.flatten(0, 1) * at.spec.softmax_scale, at.spec.softcap)
    return logits.masked_fill(~seen, float("-inf")).softmax(-1)


def block_mass(at: LayerStep, chunk: int, grid: Grid, keys: Tensor) -> Tensor:
    """fp32 [Hq, nQ, nK]: what each block of queries attends to if pooled attention is right."""
    means = mean_keys(at, chunk, grid, keys)
    seen = by_head(grid.causal, at.spec.q_heads)
    return pooled_mass(at, mean_queries(at, chunk, grid), means, seen)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
