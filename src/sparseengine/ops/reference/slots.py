"""One query per row against every slot of the row, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine.core.view import PackedTable
from sparseengine.ops.reference.scores import soft_capped

_SCRATCH = 1 << 24  # elements of keys gathered at a time


def slot_scores(
    q: Tensor,
    k_pool: Tensor,
    table: Tensor | PackedTable,
    lens: Tensor,
    scale: float = 1.0,
    *,
    normalise: bool = False,
) -> Tensor:
    """scale * q.k of one query per row on each slot, the largest of a KV head's query heads.

    q: [S, Hq, D]. k_pool: [N, Hs, P, D]. table: int32 [S, G, W], or packed. lens: int32 [S, G].
    normalise: each query head's scores are less their log-sum-exp over the row (the logarithm of
    a softmax) before the largest is taken.
    Returns fp32 [S, Hkv, W * P] (fp64 for fp64 inputs). Slots at and past a row's length hold
    anything, NaN included; nothing of them is read.
    """
    logits = row_logits(q, k_pool, table) * scale
    if normalise:
        slot = torch.arange(logits.shape[3], device=q.device)
        dead = (slot >= lens[..., None])[:, :, None]  # [S, G, 1, L]
        logits = logits.masked_fill(dead, float("-inf")).log_softmax(-1)
    return logits.amax(2)


def row_logits(q: Tensor, k_pool: Tensor, table: Tensor | PackedTable) -> Tensor:
    """q.k on every slot that the table names: [S, Hkv, g, W * P]."""
    dense = table.dense() if isinstance(table, PackedTable) else table
    spans, groups, columns = dense.shape
    heads = max(groups, k_pool.shape[1])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(dtype).reshape(spans, heads, q.shape[1] // heads, q.shape[2])
    pages = dense.long().expand(spans, heads, -1)
    inner = torch.arange(heads, device=q.device)[:, None]
    inner = inner if k_pool.shape[1] > 1 else torch.zeros_like(inner)
    step = max(1, _SCRATCH // max(1, spans * heads * k_pool[0, 0].numel()))
    parts = []
    for first in range(0, columns, step):
        found = k_pool[pages[..., first : first + step], inner]  # [S, H, w, P, D]
        parts.append(grouped @ found.flatten(2, 3).to(dtype).mT)
    if not parts:
        return grouped.new_zeros(*grouped.shape[:3], 0)
    return torch.cat(parts, -1)


def add_mass(
    q: Tensor,
    k_pool: Tensor,
    table: Tensor | PackedTable,
    lens: Tensor,
    mass: Tensor,
    seen: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    left: float = 1.0,
) -> None:
    """Add the attention that one query per row pays on each slot to a number stored beside it.

    q, k_pool, table and lens as in `slot_scores`; rows share no pages. mass, seen: [N, Hs, P].
    mass becomes mass * left + the sum over a KV head's query heads of a softmax over the row, of
    scaled logits x or, with `softcap` c, of c tanh(x / c); seen becomes seen * left + 1.
    """
    table = table.dense() if isinstance(table, PackedTable) else table
    logits = soft_capped(row_logits(q, k_pool, table) * scale, softcap)
    slot = torch.arange(logits.shape[3], device=q.device)
    heads, page_size = logits.shape[1], k_pool.shape[2]
    live = (slot < lens[..., None]).expand(-1, heads, -1)  # [S, Hkv, L]
    weights = logits.masked_fill(~live[:, :, None], float("-inf")).softmax(-1).sum(2)
    pages = table.long().expand(-1, heads, -1).repeat_interleave(page_size, 2)
    inner = torch.arange(heads, device=q.device)[:, None]
    inner = inner if k_pool.shape[1] > 1 else torch.zeros_like(inner)
    _gather_more(mass, (pages, inner, slot % page_size), live, left, weights)
    if seen is not None:
        _gather_more(seen, (pages, inner, slot % page_size), live, left, torch.ones_like(weights))


def _gather_more(
    pool: Tensor, at: tuple[Tensor, ...], live: Tensor, left: float, more: Tensor
) -> None:
    """pool[at] * left + more where live. Elsewhere nothing is added, for `at` may be anyone's."""
    where = tuple(index.expand(live.shape)[live] for index in at)
    pool[where] = (pool[where] * left + more[live]).to(pool.dtype)
